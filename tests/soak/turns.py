"""Surfaces take turns: each runs cases for a while, its failures are told with the seed that repeats them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from scipy.stats import binom

from avow.errors import AvowError

T = TypeVar("T")

# A case that takes longer hangs, on a busy machine too.
LIMIT = 240
# Allocators keep some of what they had; what a leak adds grows past that.
GROWTH, SPARE = 1.10, 64 * 2**20
# How rarely chance alone may call a statistical promise broken.
RARE = 1e-9


class Wrong(Exception):
    """What no answer may be: a broken bound, a changed input, a file lost."""


class Found(NamedTuple):
    """What came of one case: a word, the largest error beside its bound, rows that chance may fail, and that it did."""

    what: str
    worst: float = 0.0
    chance: float = 0.0
    rows: int = 0
    misses: int = 0


Case = Callable[[int], Found]
Surface = Callable[[Path], contextlib.AbstractContextManager[Case]]


def tried(call: Callable[[], T]) -> T | AvowError:
    """What a call gives, or how it refuses: an error with its four parts. Anything else it raises is a failure."""
    try:
        return call()
    except AvowError as refusal:
        parts = [refusal.name, refusal.rule, refusal.remedy]
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise Wrong(f"a refusal without its parts: {refusal!r}") from refusal
        if len(str(refusal)) > 4000:
            raise Wrong(f"a refusal of {len(str(refusal))} characters: {str(refusal)[:200]}") from refusal
        # It travels between processes.
        if str(pickle.loads(pickle.dumps(copy.copy(refusal)))) != str(refusal):
            raise Wrong(f"a refusal that changes on its way: {refusal!r}") from refusal
        return refusal


@dataclass
class Tally:
    """What came of the cases of one surface."""

    name: str
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    rows: Counter[float] = field(default_factory=Counter)
    misses: Counter[float] = field(default_factory=Counter)
    stories: dict[str, str] = field(default_factory=dict)
    failures: int = 0

    def add(self, found: Found) -> None:
        self.kinds[found.what] += 1
        self.worst = max(self.worst, found.worst)
        if found.rows:
            self.rows[found.chance] += found.rows
            self.misses[found.chance] += found.misses

    def fail(self, seed: int, problem: BaseException) -> None:
        """Note a failure; of those that end in the same place, one is told."""
        self.kinds["failed"] += 1
        self.failures += 1
        steps = traceback.extract_tb(problem.__traceback__)
        own = [step for step in steps if f"{os.sep}avow{os.sep}" in step.filename] or steps
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        told = re.sub(r"\s+", " ", f"{type(problem).__name__}: {problem}")[:400]
        again = f"python -m tests.soak --only {self.name} --case {seed}"
        self.stories.setdefault(f"{type(problem).__name__} {where}", f"{again}   # {where} {told}")

    @property
    def unlucky(self) -> list[str]:
        """Statistical promises that failed more often than chance allows."""
        return [
            f"{self.misses[chance]} of {rows:,} rows missed bounds that may fail at {chance:.2g}"
            for chance, rows in self.rows.items()
            if self.misses[chance] > binom.isf(RARE, rows, chance)
        ]

    @property
    def sound(self) -> bool:
        return not self.failures and not self.unlucky

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(self.kinds.items()))
        told = f"{self.name:13} {self.kinds.total():9,} cases {self.seconds:7.0f} s {self.failures:4} failures"
        ratio = f"; largest error/bound {self.worst:.3f}" if self.worst else ""
        chancy = f"; {self.misses.total()} misses in {self.rows.total():,} statistical rows" if self.rows else ""
        return f"{told}  ({kinds}){ratio}{chancy}"


@dataclass
class Soak:
    """Some surfaces in turns, and the memory of this process between them."""

    surfaces: dict[str, Surface]
    folder: Path
    seed: int
    turn: float = 20.0
    tallies: dict[str, Tally] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)

    def run(self, seconds: float, tell: Callable[[str], None] = print) -> bool:
        """Take turns until time is up; whether nothing failed."""
        draw = random.Random(self.seed)
        with contextlib.ExitStack() as stack:
            cases = {}
            for name, surface in self.surfaces.items():
                (home := self.folder / name).mkdir(parents=True, exist_ok=True)
                cases[name] = stack.enter_context(surface(home))
                self.tallies[name] = Tally(name)
            last = time.monotonic()
            until = last + seconds
            while time.monotonic() < until:
                for name, case in cases.items():
                    told = len(self.tallies[name].stories)
                    self._turn(self.tallies[name], case, draw, min(until, time.monotonic() + self.turn))
                    for story in list(self.tallies[name].stories.values())[told:]:
                        tell(story)
                gc.collect()
                self.memory.append(resident())
                if time.monotonic() - last > 120:
                    tell(str(self))
                    last = time.monotonic()
        tell(str(self))
        return self.sound

    def _turn(self, tally: Tally, case: Case, draw: random.Random, until: float) -> None:
        start = time.monotonic()
        while time.monotonic() < until:
            once(tally, case, draw.getrandbits(40))
        tally.seconds += time.monotonic() - start

    @property
    def grown(self) -> bool:
        """Whether what is held at the end is more than all that was held in the first third."""
        third = len(self.memory) // 3
        return third > 0 and min(self.memory[-third:]) > GROWTH * max(self.memory[:third]) + SPARE

    @property
    def sound(self) -> bool:
        return not self.grown and all(tally.sound for tally in self.tallies.values())

    def __str__(self) -> str:
        lines = [str(tally) for tally in self.tallies.values()]
        lines += [f"  {tally.name}: {story}" for tally in self.tallies.values() for story in tally.unlucky]
        marks = self.memory[:: max(1, len(self.memory) // 8)]
        held = " ".join(f"{x / 2**20:.0f}" for x in [*marks, *self.memory[-1:]])
        lines.append(f"memory in MiB {held}{': A LEAK' if self.grown else ''}")
        return "\n".join(lines)


def once(tally: Tally, case: Case, seed: int) -> None:
    """One case, its failure noted."""
    try:
        with within(LIMIT):
            tally.add(case(seed))
    except Exception as error:
        tally.fail(seed, error)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises in what takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def resident() -> int:
    """Bytes that this process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
