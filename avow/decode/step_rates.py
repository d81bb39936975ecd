"""What a decoding step costs on this machine, for heads of one shape: measured once, kept in a file.

A step is `KeyValueCache.append` of its tokens and `attend`. Steps in a short cache, in one that fits into a processor's
caches and in one that is too long for them give the times between which others lie:

    exact    straight lines from one of the three to the next, and on
    sparse   seconds of looking at all tokens + share of them that is read · seconds of reading all, both such lines

Beside them stands PyTorch's SDPA called the same way, and what sketching a token costs, once. Steps of up to `_HEADS`
key heads are measured; more heads cost so many times as much. Which share of the tokens is read depends on the numbers
in a cache, and is the caller's to say: the heads measured here are made such that queries need a known share.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from avow.attend import Attended
from avow.calibration import is_off
from avow.calibration_file import file_for, forget, keep, recall
from avow.core import Certificate, Sizes, dtype_name
from avow.decode.cpu import SHORTEST as SHORTEST_ON_CPU
from avow.decode.cpu import not_installed, prepare
from avow.decode.kernel_steps import SHORTEST as SHORTEST_ON_GPU
from avow.decode.key_value_cache import KeyValueCache
from avow.parameters import as_float

_LOG = logging.getLogger(__name__)
# Raise when the steps themselves or what is measured of them change: older files are then measured again.
VERSION = 6
# Keys and values of the long cache, in bytes: even their sketch, a seventh, does not fit into a processor's caches. But
# no more tokens than that: on a CPU sketching them takes long. And no more heads than so many, or than fit into so many
# bytes. Keys and values of the middle one do fit. Of sparse steps it has a quarter of the tokens: the sketch does fit.
_BYTES, _TOKENS = {"cpu": 288 * 2**20, "cuda": 2**30}, {"cpu": 2**17, "cuda": 2**20}
_FITTING = 24 * 2**20
_HEADS, _ROOM_OF_HEADS = 16, 2**28
# Tokens of the short caches of exact and of sparse steps, and room for those that steps append. From 2,048 tokens on a
# step looks at a sample of as many to choose what to read: that is the same at every length.
_SHORT, _SHORT_SPARSE, _ROOM = 64, 4096, 1024
# Bytes that are copied to a GPU to see how fast that is.
_LINKED = 2**26
# Seconds in all. A machine at rest needs two to five.
_PATIENCE = 10.0
# Seconds for each kind of step, and the fewest and the most steps.
_ENOUGH, _FEWEST, _MOST = 0.2, 4, 25
# The tolerance of sparse steps. Two kinds of queries look at these shares of the tokens, which come in runs as in a
# text: their logits are so many nats above the others', whose standard deviation is about 1.
_TOL, _SHARES, _RUN, _GAP = 1e-2, (0.05, 0.25), 16, 14.0
# Other work disturbs a measurement whose threads waited for a processor for this share of its time.
_WAITED = 0.2


class Curve(NamedTuple):
    """Seconds of a call, by the number of tokens: straight between points, and on beyond the last."""

    tokens: tuple[float, ...]
    times: tuple[float, ...]

    @staticmethod
    def line(overhead: float, token: float) -> Curve:
        """So many seconds, and as many more for each token."""
        return Curve((0.0, 2.0**20), (overhead, overhead + token * 2**20))

    def seconds(self, tokens: float) -> float:
        i = min(max(1, bisect.bisect_left(self.tokens, tokens)), len(self.tokens) - 1)
        (low, high), (least, most) = self.tokens[i - 1 : i + 1], self.times[i - 1 : i + 1]
        return max(0.0, least + (tokens - low) * (most - least) / (high - low))

    def of_heads(self, factor: float) -> Curve:
        """The same of so many times as many heads: a token is as much work as that many were."""
        return Curve(tuple(tokens / factor for tokens in self.tokens), self.times)


NOTHING = Curve.line(0.0, 0.0)


@dataclass(frozen=True)
class StepRates:
    """Seconds of decoding steps of heads of one shape."""

    exact: Curve
    sparse: Curve | None
    """Steps that read no token in full; None if no step reads a part of the tokens here."""
    read: Curve
    """What reading all tokens in full, by all key heads, adds to it."""
    sketch: float
    """Seconds of sketching a token of all key heads, once."""
    sdpa: Curve | None
    """PyTorch's SDPA; None if it was not measured."""
    unfit: str = ""
    """Why no step reads a part of the tokens."""
    source: str = ""
    """Where these come from."""
    link: float | None = None
    """Seconds of each token that is read in full from host memory, by all key heads; None without a GPU."""

    def sparse_seconds(self, tokens: float, kept: float) -> float | None:
        """Seconds of a step that reads this share of the tokens."""
        return None if self.sparse is None else self.sparse.seconds(tokens) + kept * self.read.seconds(tokens)

    def times(self, factor: float) -> StepRates:
        """The rates of so many times as many heads."""
        curves = {name: curve and curve.of_heads(factor) for name, curve in self.curves.items()}
        link = None if self.link is None else factor * self.link
        per_token = {"sketch": factor * self.sketch, "link": link}
        return dataclasses.replace(self, **cast("Any", curves | per_token))

    @property
    def curves(self) -> dict[str, Curve | None]:
        """Exact steps, sparse ones, what these read and SDPA by name."""
        return {"exact": self.exact, "sparse": self.sparse, "read": self.read, "sdpa": self.sdpa}


def shortest(device: str) -> int:
    """From how many tokens on a step may read a part of them by itself."""
    return SHORTEST_ON_GPU if device == "cuda" else SHORTEST_ON_CPU


def share_read(certificate: Certificate) -> float:
    """The share of the tokens that was read in full for an answer from a cache, as its certificate says."""
    told = re.search(r"([\d.]+)% of the tokens", certificate.reason)
    return float(told[1]) / 100 if told and certificate.method == "sparse" else 1.0


def step_rates(sizes: Sizes, tell: Callable[[str], object] = _LOG.info, again: bool = False) -> StepRates:
    """The rates of steps of these sizes: those of the device's file, else measured now and kept, else typical ones.

    The number of keys does not matter. `tell` is called with a line that says what is measured and how long it takes.
    If the machine is too busy, it is left alone for an hour; `again` measures whatever is known.
    """
    heads = sizes.batch * sizes.key_heads
    room = _ROOM_OF_HEADS // (shortest(sizes.device) * (sizes.dim + sizes.value_dim) * sizes.item)
    few = min(heads, _HEADS, max(room, 1))
    one = dataclasses.replace(sizes, batch=1, key_heads=few, heads=few * (sizes.heads // sizes.key_heads), keys=0)
    return _of_few(one, tell, again).times(heads / few)


def _of_few(z: Sizes, tell: Callable[[str], object], again: bool) -> StepRates:
    if is_off():
        return typical(z, "typical rates: AVOW_CALIBRATION=off")
    path = rates_file(z)
    if again:
        forget(path)
    known = recall(path, _parsed)
    if known is None:
        uncompiled = prepare(tell) if z.device == "cpu" else ""
        tell(
            "measuring decoding steps of these heads on this machine, once: "
            f"2 to 5 s, given up after {_PATIENCE:.0f} s if other work has the processors"
        )
        try:
            fresh, disturbed = measure_steps(z)
        except TooBusy:
            known = keep(path, None, None, "the machine was too busy to be measured")
        else:
            fault = "other work disturbed the measurement: times may be too high" if disturbed else ""
            # A compiler that fails may work after an hour; that there is none is in the file's name.
            fault = fault or ("" if not_installed() else uncompiled)
            known = keep(path, fresh, dataclasses.asdict(fresh), fault)
    if known.found is None:
        return typical(z, known.source)
    return dataclasses.replace(known.found, source=known.source)


def rates_file(z: Sizes) -> Path:
    """Where the rates of such steps are kept: in another file if no compiler takes sparse ones on a CPU."""
    shape = f"{z.heads}on{z.key_heads}x{z.dim}" + (f"-{z.value_dim}" if z.value_dim != z.dim else "")
    queries = f"-{z.queries}queries" if z.queries > 1 else ""
    compiled = "-without-numba" if z.device == "cpu" and not_installed() else ""
    return file_for(f"steps-v{VERSION}-{shape}-{dtype_name(z.dtype)}{queries}{compiled}", z.device)


def _parsed(plain: Any) -> StepRates | None:
    curves = {name: plain[name] and Curve(*map(tuple, plain[name])) for name in ("exact", "sparse", "read", "sdpa")}
    found = StepRates(**(plain | curves))
    given = [curve for curve in curves.values() if curve]
    ordered = all(len(set(x)) == len(y) >= 2 and list(x) == sorted(x) for x, y in given)
    numbers = [time for curve in given for time in curve.times] + [found.sketch, found.link or 0.0]
    usual = None not in (curves["exact"], curves["read"]) and ordered and all(0 <= as_float(x) < 1e6 for x in numbers)
    explained = isinstance(found.unfit, str) and (found.sparse is None) == bool(found.unfit)
    return found if usual and explained and isinstance(found.source, str) else None


def typical(z: Sizes, source: str) -> StepRates:
    """Rates by bytes alone, of a two-core machine of 2026 or a data-centre GPU."""
    on_gpu = z.device == "cuda"
    bandwidth = 2e12 if on_gpu else 12e9 if z.item >= 4 else 7e9
    overhead = 1e-4 if on_gpu else 2e-4
    cache = KeyValueCache(z.key_heads, z.dim, z.value_dim, dtype=z.dtype)
    token = z.key_heads * (z.dim + z.value_dim) * z.item  # bytes
    look = Curve.line(overhead, token * cache.overhead / bandwidth)
    read = token / bandwidth
    exact = Curve.line(overhead, read)
    if unfit := "" if on_gpu else not_installed():
        return StepRates(exact, None, NOTHING, 0.0, None, unfit, source)
    link = token / 25e9 if on_gpu else None
    return StepRates(
        exact, look, Curve.line(0.0, read), z.key_heads * (2e-9 if on_gpu else 2e-6), None, "", source, link
    )


class TooBusy(Exception):
    """The machine is too busy to be measured."""


class StepTimer:
    """The least seconds of calls on a device, until `patience` seconds have passed; and whether other work disturbed.

    Of a single thread on a CPU it is processor time, to which waiting adds nothing; memory that others read, too, does.
    """

    def __init__(self, device: str, patience: float = math.inf) -> None:
        self.device, self.start = torch.device(device), time.monotonic()
        self.end, self._waited = self.start + patience, seconds_waited()
        self.alone = device == "cpu" and torch.get_num_threads() == 1

    def check(self) -> None:
        """Raise `TooBusy` if there is no patience left."""
        if time.monotonic() > self.end:
            raise TooBusy

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call; raises `TooBusy` if there is no patience left."""
        self.check()
        busy, start = time.process_time(), time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        return min(seconds, busy) if self.alone else seconds

    def least(self, call: Callable[[], object]) -> float:
        """The least seconds of several calls after one that is not counted: what else runs only ever adds."""
        self.once(call)
        times: list[float] = []
        while len(times) < _FEWEST or (sum(times) < _ENOUGH and len(times) < _MOST):
            times.append(self.once(call))
        return min(times)

    @property
    def disturbed(self) -> bool:
        """Whether threads of this process waited for a processor for much of the time since the timer began."""
        return seconds_waited() - self._waited > _WAITED * (time.monotonic() - self.start)


def seconds_waited() -> float:
    """How long threads of this process waited for a processor in all, from some moment on.

    Linux knows. Elsewhere it is how long this thread did not run: it never sleeps while it measures.
    """
    queues = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may end meanwhile
            queues.append(int(path.read_text().split()[1]) / 1e9)
    return sum(queues) if queues else time.monotonic() - time.thread_time()


def measure_steps(z: Sizes, patience: float = _PATIENCE) -> tuple[StepRates, bool]:
    """The rates of steps of these heads, and whether other work disturbed them; raises `TooBusy` if it takes longer."""
    timer = StepTimer(z.device, patience)
    token = z.key_heads * (z.dim + z.value_dim) * z.item  # bytes
    tokens = max(shortest(z.device), min(_BYTES[z.device] // token, _TOKENS[z.device]))
    with torch.no_grad():
        fitting = min(_FITTING // token, tokens // 2)
        caches = [_Steps(z, count) for count in (max(_SHORT, z.queries), fitting, tokens) if count >= z.queries]
        timer.check()  # making them takes a while, too
        exact = _curve(timer, caches, lambda steps: steps.attend(0))
        sdpa = _curve(timer, caches, lambda steps: steps.sdpa(0))
        long = caches.pop()
        caches.clear()
        sketching = timer.once(lambda: long.attend(0, _TOL))
        answer = long.attend(0, _TOL).certificate
        if answer.method != "sparse":
            why = answer.reason or "steps read all tokens"
            return StepRates(exact, None, NOTHING, 0.0, sdpa, why), timer.disturbed
        points = [_Point.of(timer, long, "auto")]
        del long
        for count in {tokens // 4, min(tokens // 2, _SHORT_SPARSE)}:
            points.append(_Point.of(timer, _Steps(z, count), "sparse"))
    sketch = max(0.0, sketching - points[0].few) / tokens
    link = token * _seconds_of_byte(timer) if z.device == "cuda" else None
    counts, looks, reads = zip(*sorted((float(point.tokens), point.look, point.read) for point in points), strict=True)
    sparse, read = (Curve(counts, tuple(itertools.accumulate(times, max))) for times in (looks, reads))
    return StepRates(exact, sparse, read, sketch, sdpa, link=link), timer.disturbed


def _seconds_of_byte(timer: StepTimer) -> float:
    """What a byte takes from host memory to a GPU."""
    there = torch.empty(_LINKED, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=timer.device)
    return timer.least(lambda: here.copy_(there, non_blocking=True)) / _LINKED


def _curve(timer: StepTimer, caches: list[_Steps], call: Callable[[_Steps], object]) -> Curve:
    """What calls take in caches, each longer than the one before."""
    times = itertools.accumulate((timer.least(functools.partial(call, steps)) for steps in caches), max)
    return Curve(tuple(float(steps.tokens) for steps in caches), tuple(times))


class _Point(NamedTuple):
    """Tokens in a cache, seconds of a step that reads few of them, and what looking at all and reading all take."""

    tokens: int
    few: float
    look: float
    read: float

    @staticmethod
    def of(timer: StepTimer, steps: _Steps, method: str) -> _Point:
        """From steps of both kinds of queries."""

        def measured(kind: int) -> tuple[float, float]:
            call = functools.partial(steps.attend, kind, _TOL, method)
            # What a step reads depends on the steps before it: the share is that of the steps that were timed.
            return timer.least(call), share_read(call().certificate)

        (few, some), (many, more) = map(measured, range(2))
        # If shares turn out to be nearly equal, noise is not divided by nearly nothing.
        read = max(0.0, many - few) / max(more - some, _SHARES[0])
        return _Point(steps.tokens, few, max(0.0, few - some * read), read)


class _Steps:
    """A cache of random tokens, to which each step appends some more, and two kinds of queries."""

    def __init__(self, z: Sizes, tokens: int) -> None:
        self.tokens = tokens
        generator = torch.Generator().manual_seed(0)
        draw = functools.partial(torch.randn, generator=generator)
        k, v = draw(tokens, z.dim), draw(tokens, z.value_dim)
        runs = torch.rand(-(-tokens // _RUN), generator=generator).repeat_interleave(_RUN)[:tokens]
        self._queries, past = [], 0.0
        for share in _SHARES:
            # (d,), the direction in which some of the keys are longer, and queries that ask for it
            direction = draw(z.dim).sign() / math.sqrt(z.dim)
            k[(runs >= past) & (runs < past + share)] += _GAP * direction
            past += share
            q = math.sqrt(z.dim) * direction + 0.3 * draw(1, z.heads, z.queries, z.dim)
            self._queries.append(q.to(z.device, z.dtype))
        room = tokens + _ROOM * z.queries
        self.cache = KeyValueCache(z.key_heads, z.dim, z.value_dim, dtype=z.dtype, device=z.device, capacity=room)
        # Heads of the same numbers cost as much as others, and less to draw.
        k, v = (x.to(z.device, z.dtype).expand(1, z.key_heads, -1, -1) for x in (k, v))
        self.cache.append(k, v)
        self._last = tuple(x[:, :, : z.queries].contiguous() for x in (k, v))

    def attend(self, kind: int, tol: float | None = None, method: str = "auto") -> Attended:
        """A step: its tokens are appended, then its queries answered."""
        self.cache.append(*self._last)
        return self.cache.attend(self._queries[kind], tol, method=method)

    def sdpa(self, kind: int) -> Tensor:
        """The same by PyTorch: tokens are copied to the last places, then all are attended to."""
        (k, v), q = self.cache.tokens, self._queries[kind]
        n, s = q.shape[2], k.shape[2]
        k[:, :, -n:], v[:, :, -n:] = self._last
        mask = None if n == 1 else torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
