"""Attention over shards of a sequence, one shard a process: what shards promise merges into what the whole does."""

from avow.distributed.attend import attend
from avow.distributed.cache import ShardedCache

__all__ = ["ShardedCache", "attend"]
