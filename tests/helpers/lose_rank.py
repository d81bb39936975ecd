"""A process killed, or stopped, at random moments of attention over shards; all others must say which, in time.

`python -m tests.helpers.lose_rank --kills 20 --stalls 4`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from avow.distributed import attend
from avow.distributed.ring import ring_attention
from avow.errors import LostRank
from tests.helpers.processes import FRESH, meet

WAYS = ("keys", "ring", "promised ring")
# A kill comes within so many seconds after the first calls.
SOON = 0.5


class Loss(NamedTuple):
    """One process lost: how, which of how many, after how many calls, and what the others said when."""

    signal: str
    victim: int
    ranks: int
    calls: int
    seconds: float
    said: tuple[str, ...]

    @property
    def named(self) -> bool:
        """Whether every other process named the victim."""
        right = [one for one in self.said if one.startswith(f"LostRank: rank {self.victim}=")]
        return len(right) == len(self.said) == self.ranks - 1


def _survive(rank: int, count: int, folder: str, limit: float, seed: int) -> None:
    """Attend in all ways, over and over, until somebody is missing."""
    meet(rank, count, folder, limit)
    draw = random.Random(seed)
    q, k, v = (torch.randn(1, 2, 150, 16, requires_grad=True) for _ in range(3))
    calls = 0
    try:
        while True:
            # Each way once, then any.
            causal, way = draw.random() < 0.5, WAYS[calls] if calls < len(WAYS) else draw.choice(WAYS)
            if way == "keys":
                out = attend(q, k, v, causal=causal).out
            elif way == "ring":
                out = ring_attention(q, k, v, causal=causal)
            else:
                out = attend(q, k, v, causal=causal, shared_queries=False).out
            out.square().sum().backward()
            calls += 1
            if calls >= len(WAYS):
                Path(folder, f"calls-{rank}").write_text(str(calls))
    except LostRank as error:
        Path(folder, f"said-{rank}").write_text(f"LostRank: {error}")
    except Exception as error:
        Path(folder, f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def lose(kind: signal.Signals, limit: float, seed: int) -> Loss:
    """Start some processes, lose one of them, and see what the others say."""
    draw = random.Random(seed)
    count = draw.choice((2, 3, 4))
    victim = draw.randrange(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crowd = [FRESH.Process(target=_survive, args=(rank, count, name, limit, seed)) for rank in range(count)]
        for one in crowd:
            one.start()
        until = time.monotonic() + 120
        while len(list(folder.glob("calls-*"))) < count and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, SOON))
        pid = crowd[victim].pid
        early = [path.read_text() for path in folder.glob("said-*")]
        assert pid is not None and crowd[victim].is_alive() and not early, early
        os.kill(pid, kind)
        start = time.monotonic()
        others = [one for rank, one in enumerate(crowd) if rank != victim]
        while any(one.is_alive() for one in others) and time.monotonic() < start + 3 * limit:
            time.sleep(0.005)
        seconds = time.monotonic() - start
        for one in crowd:
            one.kill()
            one.join()
        said = [folder / f"said-{rank}" for rank in range(count) if rank != victim]
        calls = int((folder / f"calls-{victim}").read_text() or 0)
        words = tuple(path.read_text() if path.exists() else "nothing" for path in said)
    return Loss(kind.name, victim, count, calls, seconds, words)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--stalls", type=int, default=4)
    options.add_argument("--timeout", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    kinds = [signal.SIGKILL] * given.kills + [signal.SIGSTOP] * given.stalls
    bad = 0
    print("signal   lost    calls before  seconds  what the others said")
    for number, kind in enumerate(kinds):
        loss = lose(kind, given.timeout, given.seed + number)
        # One that is only stopped is waited for until the timeout; to say who it is takes a part of that again.
        bad += not (loss.named and loss.seconds <= (1.5 if kind == signal.SIGSTOP else 1.0) * given.timeout)
        said = "; ".join(dict.fromkeys(one.split(" must")[0] for one in loss.said))
        print(f"{loss.signal}  {loss.victim} of {loss.ranks}  {loss.calls:12}  {loss.seconds:7.2f}  {said}", flush=True)
    print(f"{len(kinds)} processes lost, {bad} not named by all others in time")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
