"""Attention over shards of a sequence, one shard a process: one answer, with one certificate.

The way in:
    attend            every method through one call
    cache             ShardedCache: the tokens of a decoder in shards
    consensus         processes agree before they compute, or all raise the same error
    planner           which method keeps a tolerance at the least price
    parallel_plan     what a method costs on many ranks, and how it scales
How processes communicate:
    point_to_point    every byte that leaves a process, counted; a missing rank is named
    protocols         rounds of communication as generators: over processes, side by side in one, or priced without data
Exact attention:
    exact             what a block of keys answers; shared queries: partial answers are merged
    ring              sharded queries: blocks of keys go round a ring
Separable attention, random features and low-rank attention:
    states            sums over keys are combined, and rows and keys stay
    low_rank          the same through landmarks among the keys of all
Sparse attention:
    sparse            shared queries: each shard reads only what matters to all
"""

from avow.distributed.attend import attend
from avow.distributed.cache import ShardedCache
from avow.distributed.parallel_plan import Interconnect

__all__ = ["Interconnect", "ShardedCache", "attend"]
