"""Decoding from a cache whose keys have a sketch: what may matter is read, the rest is bounded.

Modules:
    cpu               one query of each head on a CPU: who is served, the threads, the proof of the bound
    cpu_stages        its five stages, compiled by numba when a step first needs them
    vector_loops      the loops over registers that these are made of
"""
