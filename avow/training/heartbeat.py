"""Signs of life: each process of a run gives one now and then, so that those who wait in vain can say for whom.

A process that ends takes its connections with it, and the error of those at their other ends names nobody; one that
hangs is noticed when the time to wait is over, all of it. Signs of life go through the store where the processes met.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from avow.errors import LostRank

# Seconds between two signs of life, and those without one after which a process counts as lost, where there is time.
BEAT, PATIENCE = 0.25, 3.0
# What finding out who is lost may take, as a share of a run's timeout, which was waited for before.
SHARE = 0.25


class Watch:
    """Gives signs of life of this process until it is stopped, and tells which others give none."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        # A thread needs a connection of its own: on one, who waits for an answer lets nobody else ask.
        shared: Any = store
        self._signs, self._store = (PrefixStore("watch", shared.clone()) for _ in range(2))
        self._rank, self._world, self._patience = rank, world, min(PATIENCE, SHARE * timeout)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more signs of life."""
        self._over.set()
        self._thread.join(BEAT)  # Who waits for a store that is gone waits long, and is missed by nobody.

    def lost(self) -> LostRank | None:
        """The error that names others who give no sign of life; None where all do. It takes a few seconds to tell."""
        try:
            before = self._counts()
            time.sleep(self._patience)
            silent = [rank for rank, count in self._counts().items() if count == before[rank]]
            if not silent:
                return None
            # Whoever finds out first is right: those who find out later miss him, too. Of itself each knows better.
            found = json.loads(self._store.compare_set("lost", "", json.dumps(silent)))
            silent = [rank for rank in found if rank != self._rank] or silent
        except RuntimeError:
            if self._rank == 0:
                return None
            silent = [0]  # It kept the store, which is gone.
        name = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        remedy = "resume from the last checkpoint, as torchrun --max-restarts does by itself"
        return LostRank(name, "lost", "gave no sign of life, and nobody can go on alone", remedy)

    def _counts(self) -> dict[int, int]:
        """How many signs of life each of the others has given."""
        return {rank: self._store.add(str(rank), 0) for rank in range(self._world) if rank != self._rank}

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._signs.add(str(self._rank), 1)
            except RuntimeError:
                return  # The store is gone; who needs it will say so.
