"""Triton kernels, loaded at use; each has a pure-torch twin it is tested against.

In the order that data flows, one step of sparse decoding is `step_constants`, `sketch_pass`, `histogram`, then `choice`
or `planning` and `sampling`, `list_shares`, `tile_attention`, `gather_attention`, `merging`, `answers` and, as a last
resort, `reading_again`; `sparse_decode` is the whole. Linear attention is scans: `cuts`, `tiles`, `totals`,
`scan_kernels`, `causal_scan`, then `linear_*`, `feature_*` and `separable_*`, whose gradients have files of their own;
`problems` is where methods ask. `presence` says whether kernels can run; `interpreted` runs them without a GPU.
"""
