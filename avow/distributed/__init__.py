"""Attention over shards of a sequence, one shard a process: what shards promise merges into what the whole does."""

from avow.distributed.cache import ShardedCache
from avow.distributed.exact import attend
from avow.distributed.low_rank import attend_low_rank
from avow.distributed.ring import ring_attend, ring_attention
from avow.distributed.sparse import attend_sparse
from avow.distributed.states import attend_states

__all__ = [
    "ShardedCache",
    "attend",
    "attend_low_rank",
    "attend_sparse",
    "attend_states",
    "ring_attend",
    "ring_attention",
]
