"""Processes meet under a name that nobody used before.

A store may outlive those who wrote into it: torchrun keeps one through all restarts, and what dead processes left in
it, addresses above all, reads like what the living wrote. So the first process makes up a name, and it holds when every
other one has answered to it; each answer has a word of its own, by which its author knows that it was meant.
"""

from __future__ import annotations

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

from avow.errors import LostRank

_PAUSE = 0.01


def met(store: Store, rank: int, world: int, timeout: float) -> Store:
    """A part of the store that these processes alone know, when all of them are here."""
    word, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("name", word)
        missing = set(range(1, world))
        while missing:
            missing -= {one for one in missing if store.check([f"{word} answer {one}"])}
            _breathe(until, f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}", timeout)
        for one in range(1, world):
            store.set(f"{word} seen {one}", store.get(f"{word} answer {one}").decode())
        return PrefixStore(word, store)
    while True:
        # An old name may stand there until the first process is here.
        name = store.get("name").decode() if store.check(["name"]) else ""
        if name:
            store.set(f"{name} answer {rank}", word)
            if store.check([f"{name} seen {rank}"]) and store.get(f"{name} seen {rank}").decode() == word:
                return PrefixStore(name, store)
        _breathe(until, "rank 0, or another,", timeout)


def _breathe(until: float, whom: str, timeout: float) -> None:
    if time.monotonic() > until:
        remedy = "see why it did not start, or raise run.timeout"
        raise LostRank(whom, "absent", f"did not come to the meeting within {timeout:g} s", remedy)
    time.sleep(_PAUSE)
