"""Attention over shards of a sequence, one shard a process: what shards promise merges into what the whole does.

The way in:
    attend                every method through one call
    request               what one process asks, and what keeps it from asking so
    consensus             processes agree before they compute, or all raise the same error
    planner               which method keeps a tolerance at the least price
    cache                 ShardedCache: the tokens of a decoder in shards
How processes talk:
    point_to_point        every byte that leaves a process, counted
    exchange              a piece from each to each, differentiable
    protocols             rounds of talk as generators, that run over processes or side by side in one
    failure_detection     who is missing, when somebody is
    bytes_sent            what each call sends, in closed form
    comm_cost             how long bytes and rounds take on an interconnect
    parallel_plan         what a method costs on many ranks, and how it scales
Exact attention:
    exact                 shared queries: partial answers are merged
    ring                  sharded queries: blocks of keys go round a ring
    ring_route            which way they travel, and who needs them
    ring_travel           their journey, and that of their gradients
    blocks                what a block adds to an answer and to its gradients
    partials              what a block answers, with all that a merged certificate takes
    autograd              an answer found together, as a function that autograd knows
Separable attention, random features and low-rank attention:
    shards                what a process knows of the whole sequence
    frames                where all queries and keys are centred
    states                sums over keys travel, and rows and keys stay
    low_rank              the same through landmarks
    landmarks             which are chosen among the keys of all
Sparse attention:
    sparse                shared queries: each shard reads only what matters to all
    sparse_script         the rounds in which one cut is found, read up to, and proved
    sparse_budget         what shards leave unread together, and its bounds
    sparse_draws          samples of the rest, and one proof for all of them
    sparse_reports        what was read, added up and told
    sparse_gradients      gradients of the part that was kept
In one process, for hundreds of shards:
    simulated             every way as a script of plain arithmetic
    simulated_landmarks   and that of low-rank attention
"""

from avow.distributed.attend import attend
from avow.distributed.cache import ShardedCache

__all__ = ["ShardedCache", "attend"]
