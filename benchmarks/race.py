"""Contenders timed in turns: each is checked first, and what fails its check is not timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from avow.core.timing import timed

_CPU = torch.device("cpu")


class Contender(NamedTuple):
    """A call to time, and a check of its answer that returns what is wrong with it: nothing, it is hoped."""

    name: str
    call: Callable[[], object]
    check: Callable[[], str]


class Ratio(NamedTuple):
    """One contender's time over another's: the median over rounds, and the ratio of the best times."""

    median: float
    minimum: float


@dataclass(frozen=True)
class Race:
    """Seconds of every round by contender, and why the others did not start."""

    times: dict[str, list[float]]
    failed: dict[str, str]

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])

    def ratio(self, name: str, base: str) -> Ratio | None:
        """The time of `name` in units of `base`, each round by itself; None where either failed its check."""
        if name not in self.times or base not in self.times:
            return None
        mine, theirs = self.times[name], self.times[base]
        rounds = [a / b for a, b in zip(mine, theirs, strict=True)]
        return Ratio(statistics.median(rounds), min(mine) / min(theirs))


def race(contenders: Iterable[Contender], seconds: float, least: int = 5, most: int = 25) -> Race:
    """The times of contenders that take turns, for about so many seconds and within so many rounds.

    Every round starts with another contender, so that none is always the one behind a slow neighbour.
    """
    failed: dict[str, str] = {}
    ready = []
    with torch.no_grad():
        for contender in contenders:
            wrong = contender.check()
            if wrong:
                failed[contender.name] = wrong
            else:
                ready.append(contender)
        start = time.perf_counter()
        for contender in ready:
            contender.call()
        rounds = max(least, min(most, int(seconds / max(time.perf_counter() - start, 1e-9))))
        times: dict[str, list[float]] = {contender.name: [] for contender in ready}
        for turn in range(rounds):
            for place in range(len(ready)):
                contender = ready[(place + turn) % len(ready)]
                times[contender.name].append(timed(contender.call, _CPU))
    return Race(times, failed)
