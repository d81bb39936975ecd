"""Decoding from a cache whose keys have a sketch: what may matter is read, the rest is bounded.

Modules:
    key_value_cache   KeyValueCache: all tokens so far, and which way a call is answered
    token_buffers     the room they lie in, with their sketch
    host_memory       room in memory of the host that a GPU reads
    cache_file        the file they are kept in
Answers:
    split_k_exact     from all tokens, by PyTorch's kernel on a CPU
    kernel_steps      from some of them, by kernels on a GPU
    cpu               from some of them, by compiled code on a CPU: the threads, the proof of the bound
    cpu_stages        its five stages, compiled by numba when a step first needs them
    vector_loops      the loops over registers that these are made of
What a step costs:
    plan              time, memory, and from which length sparse steps pay
    step_rates        what steps take on this machine, measured once
"""
