"""Everything that measures: time, memory and error of methods, kernels and shards, beside exact attention and peers.

Every answer is checked first, and what fails is not timed. `clock` times, `workloads` and `cases` are measured,
`compare` is what `avow compare` measures, `trials` one method on one head row by row; `decode`, `linear` and `shards`
are the tables of `avow bench`, and `results` holds such a table. Part of the package, and not of `benchmarks/`, so that
users can measure their own machine.
"""
