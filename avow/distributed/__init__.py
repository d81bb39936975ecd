"""Attention over shards of a sequence, one shard a process: what shards promise merges into what the whole does."""

from avow.distributed.exact import attend
from avow.distributed.ring import ring_attend, ring_attention
from avow.distributed.sparse import attend_sparse

__all__ = ["attend", "attend_sparse", "ring_attend", "ring_attention"]
