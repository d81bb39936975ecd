"""Triton kernels, loaded at use.

In the order that data flows, one step of sparse decoding is `step_constants`, `sketch_pass`, `planning`, then `choice`
or `sampling`, `work_partition`, `gather_attention` and `finalize`; `sparse_decode` is the whole, and `pausing` says
whether a step looks at the sketch. Linear attentions are chunk scans with three feature maps:
`tile_ops` and `chunking` serve all of them, `linear_attention` has no map, `feature_attention` and `feature_kernels`
have random features, `separable_attention` and `separable_kernels` two softmaxes; `linear_step` takes in one more
token, and `problems` is where methods ask. `availability` says whether kernels can run; `interpreted` runs them without
a GPU.
"""
