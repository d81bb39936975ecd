r"""Watching attention that others compute: sampled rows of every call, recomputed in float64 beside it.

Seeing. PyTorch's SDPA is seen at its operator, whoever calls it and in whichever thread; FlexAttention, and the
attention functions and caches of transformers, at their own entrances. An outer call stands for those inside it.

Sampling. Each row of a call is drawn by itself with a known probability of at least `rate`, whatever the answer. If K
rows of a layer have larger errors than all that were drawn, none of these K was drawn: a chance of at most
:math:`(1 - rate)^K`. With probability `confidence`, then, fewer than :math:`\ln(1 - confidence)/\ln(1 - rate)` rows
have larger errors than the largest that the report shows. No distribution of errors is assumed.

Judging. An alarm is a proof and no statistic: the error of the row, less float64's own, exceeds `tol`. Without `tol`,
what is allowed is what rounding can do: the bound of exact attention in the inputs' type, sums taken in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch._C import _functorch

from avow.bounds import AnyOrder
from avow.core import Problem, dtype_name
from avow.core.quantities import count
from avow.core.record import naming, running_layer
from avow.errors import ParameterError, value_text
from avow.methods.exact import Model
from avow.numerics import rounding
from avow.parameters import as_float

# A layer's first calls are looked at more closely: its c-th call at this many rows over c, until `rate` asks for more.
_FIRST = 8
# Rows that see only shorter values than this are not judged: conversions may read them as zeros.
_SMALLEST = 1e-30
CACHE = " · cache"
"""What stands behind a layer's name where its cache is meant."""
_KEPT = 3  # the worst rows of a layer that a report names
_HELD = 1024  # judgements that may wait on a device

_MOST = 2**24  # numbers in float64 that are held at once
_GIVEN = 32  # tokens of a cache that are kept as they were given

Versions = tuple[int, int] | None
Numbers = Float64[np.ndarray, "..."]
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Call(NamedTuple):
    """One attention call as it was asked: what each of its rows should be follows from this.

    Attributes:
        q: queries, (*lead, n, d).
        k: keys, (*lead, s, d), with fewer heads if some are shared.
        v: values, (*lead, s, e).
        scale: what q·k is multiplied by.
        mask: booleans or numbers, broadcast to (*lead, n, s); what is below half its type's range hides a key.
        visible: whether a row sees a key, of (batch, head, row, key): a number, two columns, and a line.
        score: what a logit is changed to, of (logit, batch, head, row, key).
        sinks: a logit for each head that takes weight and gives no value.
        rounds_logits: whether logits are rounded to the inputs' type.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None = None
    visible: Visible | None = None
    score: Score | None = None
    sinks: Tensor | None = None
    rounds_logits: bool = False

    def measure(
        self,
        sequence: tuple[int, ...],
        places: Sequence[tuple[int, int]],
        given: Tensor | None,
        keys: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Float64[Tensor, "l e"], Float64[Tensor, "7 l"]]:
        """The answers to some rows of a sequence in float64, and what `judged` takes of them beside those `given`.

        `places` are heads and rows in the order of heads; `keys` of one head stand in the place of the call's own.
        Nothing here waits for a device, and of small operations there are few: bounds are worked out of it later.
        """
        queries, (n, s) = by_head(self.q[sequence]), (self.q.shape[-2], self.k.shape[-2])
        device, group = queries.device, queries.shape[0] // by_head(self.k[sequence]).shape[0]
        # Axes of every batch but the heads count as one.
        batch = torch.full((), _flat(sequence, self.q.shape[:-3]), device=device)
        heads, place = _there(places, device).mT
        head, row, key = heads[:, None], place[:, None], torch.arange(s, device=device)[None]
        if keys is None:
            first, last = places[0][0] // group, places[-1][0] // group + 1
            k, v = (by_head(x[sequence])[first:last].double() for x in (self.k, self.v))
            own = [head // group - first for head, _ in places]
        else:
            (k, v), own = (x[None].double() for x in keys), [0] * len(places)
        held = _beside(own, device)

        def grid(rows: Tensor) -> Tensor:
            """The rows of each key head side by side."""
            if held is None:
                return rows[None]
            room = rows.new_zeros(*held.size, rows.shape[-1])
            room[held.at] = rows
            return room

        def own_product(rows: Tensor, matrices: Tensor) -> Tensor:
            """Each row times its own key head's matrix; all times all would be many times the work."""
            return rows @ matrices[0] if held is None else (grid(rows) @ matrices)[held.at]

        q = queries[heads, place].double()
        logits = self.scale * own_product(q, k.mT)
        if self.score is not None:
            logits = self.score(logits, batch, head, row, key)
        seen = None if self.visible is None else self.visible(batch, head, row, key).expand(len(places), s)
        if self.mask is not None:
            mask = by_head(self.mask[..., :s].expand(*self.q.shape[:-2], n, s)[sequence])[heads, place]
            shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            if mask.dtype != torch.bool:
                bias = torch.where(shown, mask, 0.0).double()
                # Beside a bias of −1e9 over a whole row a sum would lose the logit; the average is the same without it.
                logits = logits + (
                    bias - torch.where(shown, mask, -math.inf).double().amax(-1, keepdim=True).clamp(min=-1e300)
                )
            seen = shown if seen is None else seen & shown
        sizes, largest = [torch.linalg.vector_norm(x, dim=-1) for x in (k, v)], logits.abs()
        sizes = [x.expand(len(places), s) if held is None else x[held.at[0]] for x in sizes]
        if seen is not None:
            largest = torch.where(seen, largest, -math.inf)
            logits = torch.where(seen, logits, -math.inf)
            # What no row of a head sees may hold anything, nan too.
            v = torch.where(grid(seen).any(1)[..., None], v, 0.0)
            sizes = [torch.where(seen, x, 0.0) for x in sizes]
        longest = [x.amax(-1) for x in sizes]
        if self.sinks is not None:
            weights = torch.softmax(torch.cat([logits, self.sinks.double()[heads, None]], -1), -1)[:, :-1]
        else:
            weights = torch.softmax(logits, -1)
        truth = own_product(weights, v)
        given = truth if given is None else given.double()
        lengths = [torch.linalg.vector_norm(x, dim=-1) for x in (given - truth, q, given, truth)]
        return truth, torch.stack([*lengths, *longest, largest.amax(-1)])


class _Held(NamedTuple):
    """Where rows lie beside others of the same owner: the owner and the place of each, and how many there are."""

    at: tuple[Tensor, ...]
    size: tuple[int, int]


def _beside(own: Sequence[int], device: torch.device) -> _Held | None:
    """The places of rows whose owners come in order, the first of them 0; None if all have that one."""
    if not own[-1]:
        return None
    counts: Counter[int] = Counter()
    places = []
    for one in own:
        places.append((one, counts[one]))
        counts[one] += 1
    return _Held(tuple(_there(places, device).mT), (1 + own[-1], max(counts.values())))


def _there(numbers: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Whole numbers on a device. On a GPU nobody waits until it has done what it was asked before."""
    made = torch.tensor(numbers)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def by_head(x: Tensor) -> Tensor:
    """A sequence of a call with an axis of heads, also where the call has none."""
    return x[None] if x.ndim == 2 else x


def _parts(rows: Sequence[tuple[int, int]], group: int, s: int, d: int) -> Iterator[list[tuple[int, int]]]:
    """Heads and rows in parts, whose keys and logits are few enough; a part of one head has all its keys."""
    part: list[tuple[int, int]] = []
    for place in rows:
        heads = place[0] // group - part[0][0] // group + 1 if part else 1
        if part and heads * s * max(d if heads > 1 else 1, len(part) + 1) > _MOST:
            yield part
            part = []
        part.append(place)
    if part:
        yield part


def _flat(index: tuple[int, ...], shape: Sequence[int]) -> int:
    """The place among all, of an index along several axes."""
    return functools.reduce(lambda flat, pair: flat * pair[1] + pair[0], zip(index, shape, strict=True), 0)


def _unflat(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index along several axes, of a place among all."""
    index = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))


def _finite(value: Any) -> Any:
    """The same for JSON, which has no infinities: they become words."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _Asked(NamedTuple):
    """What errors of a call depend on beside its numbers."""

    dtype: torch.dtype
    device: str
    dim: int
    keys: int
    value_dim: int
    scale: float
    biased: bool
    rounds_logits: bool

    @staticmethod
    def of(call: Call) -> _Asked:
        sizes = call.q.shape[-1], call.k.shape[-2], call.v.shape[-1]
        biased = call.score is not None or call.sinks is not None
        biased |= call.mask is not None and call.mask.dtype != torch.bool
        return _Asked(call.q.dtype, call.q.device.type, *sizes, call.scale, biased, call.rounds_logits)


@functools.lru_cache(4096)
def _sized(asked: _Asked) -> Problem:
    """A problem of these sizes, without numbers of its own."""
    one = torch.zeros((), dtype=asked.dtype, device=asked.device)
    q, k, v = (
        one.expand(1, 1, *size) for size in ((1, asked.dim), (asked.keys, asked.dim), (asked.keys, asked.value_dim))
    )
    bias = one.expand(1, 1, 1, asked.keys) if asked.biased else None
    return Problem(q, k, v, None, bias, False, asked.scale, False, "dot", (1, 1))


@functools.lru_cache(4096)
def _model(asked: _Asked, query: float, key: float) -> Model:
    """The constants of the bound on the rounding of whoever answers, for norms up to these."""
    return AnyOrder().model(_sized(asked), query, key)


class Found(NamedTuple):
    """The errors of rows, and what rounding may do to them, relative to the longest value that each sees.

    Of a row that saw no key, or whose inputs were not finite or too small, all four are nan.
    """

    error: Numbers
    relative: Numbers
    least: Numbers
    allowed: Numbers


def judged(asked: _Asked, numbers: Float64[np.ndarray, "7 l"]) -> Found:
    """The errors of rows by what float64 found of them.

    The error is what float64 measured and its own error, or less it: as in `avow.audit`, in single numbers.
    """
    with np.errstate(all="ignore"):
        return Found(*_judged(asked, *numbers))


def _judged(
    asked: _Asked,
    distance: Numbers,
    query: Numbers,
    given: Numbers,
    truth: Numbers,
    key: Numbers,
    value: Numbers,
    largest: Numbers,
) -> Numbers:
    u, d, s = rounding.unit(torch.float64), asked.dim, asked.keys
    ill = ~np.isfinite(query + key + value + truth) | ~(largest > -math.inf) | ((value > 0) & (value < _SMALLEST))
    distance = np.where(np.isfinite(distance), distance, math.inf)
    up = 1 + 4 * (max(d, asked.value_dim) + 4) * u
    query, key, longest = query * up, key * up, value * up
    reach, product = abs(asked.scale) * query * key, rounding.gamma(d + 8, u)
    unread = rounding.misread_logits(query, key, asked.scale, d, asked.dtype)
    bias = 4 * reach + 1000 if asked.biased else 0.0
    delta = product * reach + 8 * u * (reach + bias + 746) + unread
    # Of two answers in float64, as of a cache's keys and those it was given.  [claim softmax-perturbation]
    own = 2 * (2 * np.tanh(delta / 2) + 4 * rounding.gamma(s + 8, u))
    lost = math.sqrt(asked.value_dim) * ((s + 4) * rounding.tiny(torch.float64) + rounding.flush_threshold(asked.dtype))
    error = ((distance + lost) / (value / up) + own) * rounding.SAFETY
    absolute = (distance + own * longest + lost) * rounding.SAFETY
    length = truth / up - own * longest - lost
    relative = np.where(length > 0, absolute / length, math.inf)
    least = np.maximum(0.0, (distance - lost) / longest / rounding.SAFETY - own)
    found = np.stack([error, relative, least, _allowed(asked, reach, query, key, longest, largest, given * up, up)])
    # Where all values are zero, so is the answer.
    wrong = distance > lost
    zeros = np.stack([np.where(wrong, math.inf, 0.0)] * 3 + [np.zeros_like(error)])
    return np.where(ill, math.nan, np.where(value == 0, zeros, found))


def _allowed(
    asked: _Asked,
    reach: Numbers,
    query: Numbers,
    key: Numbers,
    longest: Numbers,
    largest: Numbers,
    given: Numbers,
    up: float,
) -> Numbers:
    """What rounding may do to answers of whoever computes them, relative to the longest value of each row."""
    model, kernel = _model(asked, 1e15, 1e15), AnyOrder()  # norms matter to underflow alone
    delta = model.slope * reach + model.floor
    if asked.rounds_logits:
        # Rounded as a product, when scaled, when masked, and beside the row's largest: u·|logit| each.
        delta += 4 * rounding.unit(asked.dtype) * (largest + model.slope * reach)
    merging = np.expm1(np.minimum(700.0, reach * model.merge_slope + model.merge_floor))
    allowed = (2 * np.tanh(delta / 2) + merging) * model.grown + model.sums * (1 + model.final)
    value = longest / up
    allowed += model.final * np.minimum(1.0, given / (value / up)) + (model.lost + model.ends) / (value / up)
    sized = _sized(asked)
    fitting = [kernel.fits(sized, *row) for row in zip(query.tolist(), key.tolist(), longest.tolist(), strict=True)]
    return np.where(np.array(fitting) & (np.maximum(query, key) <= 1e15), allowed * rounding.SAFETY, math.inf)


class WorstRow(NamedTuple):
    """A row that was recomputed: where it is, its error, and what was allowed."""

    call: int
    place: tuple[int, ...]
    error: float
    relative: float
    allowed: float


@dataclass
class LayerAudit:
    """What was found of one layer.

    Attributes:
        name: the layer's name in its model; else who called.
        kernel: what computed its answers.
        dtype: the type of their inputs.
        calls: calls that were seen.
        rows: rows in them.
        recomputed: rows that were recomputed.
        unjudged: rows that were drawn but saw no key, or whose inputs held nan or inf.
        error: the largest error, relative to the longest value that the row sees.
        relative: the largest error relative to the true answer.
        alarms: rows whose error provably exceeds what is allowed.
        first: the call of the first alarm; 0 if there is none.
        worst: the rows with the largest errors beside what is allowed.
    """

    name: str
    kernel: str
    dtype: str = ""
    calls: int = 0
    rows: int = 0
    recomputed: int = 0
    unjudged: int = 0
    error: float = 0.0
    relative: float = 0.0
    alarms: int = 0
    first: int = 0
    worst: list[WorstRow] = field(default_factory=list)

    def add(self, call: int, places: Sequence[tuple[int, ...]], found: Found, tol: float | None) -> None:
        """Count rows that were drawn."""
        allowed = found.allowed if tol is None else np.where(np.isnan(found.error), math.nan, tol)
        known = ~np.isnan(found.error)
        self.unjudged += int((~known).sum())
        if not known.any():
            return
        self.recomputed += int(known.sum())
        self.error = max(self.error, float(found.error[known].max()))
        self.relative = max(self.relative, float(found.relative[known].max()))
        if alarms := int((found.least[known] > allowed[known]).sum()):
            self.alarms += alarms
            self.first = self.first or call
        share = np.where(known, found.error / np.maximum(allowed, 1e-300), -1.0)
        for i in np.argsort(-share, kind="stable")[:_KEPT]:
            if known[i]:
                row = WorstRow(call, places[i], *(float(x[i]) for x in (found.error, found.relative, allowed)))
                self.worst.append(row)
        self.worst = sorted(self.worst, key=lambda row: -row.error / max(row.allowed, 1e-300))[:_KEPT]


class _Shadow:
    """What one key head of a cache's layer was given, to be compared with what the cache gives back.

    Single tokens are kept as they were given, all heads of them, until some have come: to copy each would cost more
    than all else that watching does. Whether they were changed meanwhile, PyTorch counts.
    """

    def __init__(self, head: int, kernel: str) -> None:
        self.head, self.kernel, self.tokens, self.wrong = head, kernel, 0, ""
        self._kept: tuple[Tensor, ...] = ()
        self._given: list[tuple[Tensor, Tensor, Versions]] = []

    @property
    def whole(self) -> bool:
        """Whether this is all that the cache was given."""
        return not self.wrong

    def append(self, k: Tensor, v: Tensor, versions: Versions, given_back: Tensor) -> None:
        """Add tokens that a cache was given when these were their versions."""
        if self.wrong:
            return
        self.tokens += k.shape[-2]
        if given_back.shape != (*k.shape[:-2], self.tokens, k.shape[-1]):
            return self.forget("gave back other tokens than it was given here")
        # Without the graph of who made them, which would live as long; the count of changes is shared.
        self._given.append((k.detach(), v.detach(), versions))
        if k.shape[-2] > 1 or versions is None or len(self._given) == _GIVEN:
            self._copy()

    def forget(self, wrong: str) -> None:
        """Keep nothing any more, for this reason."""
        self.wrong, self._kept = wrong, ()
        self._given.clear()

    def of(self, batch: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a sequence; None if they are not known."""
        self._copy()
        return None if self.wrong else (self._kept[0][batch], self._kept[1][batch])

    def _copy(self) -> None:
        given = self._given
        if any(versions is not None and versions_of(k, v) != versions for k, v, versions in given):
            return self.forget("was given tensors that were changed in place")
        if given:
            each = zip(*((k[:, self.head], v[:, self.head]) for k, v, _ in given), strict=True)
            before: Sequence[tuple[Tensor, ...]] = [(x,) for x in self._kept] or [(), ()]
            self._kept = tuple(torch.cat([*x, *y], -2).detach() for x, y in zip(before, each, strict=True))
            given.clear()


def versions_of(k: Tensor, v: Tensor) -> Versions:
    """How often two tensors were changed in place; None where PyTorch does not count it."""
    return None if k.is_inference() or v.is_inference() else (k._version, v._version)


class AttentionAudit:
    """What was seen of other people's attention while a block of `auditing` ran; prints as a table of layers.

    Attributes:
        rate: the least probability with which a row was recomputed.
        tol: the error that was allowed, relative to the longest value; None allows what rounding can do.
        confidence: the probability of what is said of rows that were not recomputed.
        seed: what makes the draws repeatable; None takes them from the operating system.
        unseen: what could not be judged: how many calls, by the reason.
        seconds: seconds that recomputing took.
        total: seconds that the block took.
    """

    def __init__(self, rate: float, tol: float | None, confidence: float, seed: int | None) -> None:
        self.rate, self.tol, self.confidence, self.seed = rate, tol, confidence, seed
        self.unseen: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self.hooked = False
        self.seconds = self.total = 0.0
        self._layers: dict[str, LayerAudit] = {}
        self._waiting: list[tuple[LayerAudit, int, _Asked, list[tuple[int, ...]], Tensor]] = []
        self._lock = threading.RLock()
        # Its own, from the system: to draw must not move the draws of whoever generates.
        self._random = random.Random(os.urandom(16) if seed is None else seed)
        self._shadows: weakref.WeakKeyDictionary[Any, dict[int, _Shadow]] = weakref.WeakKeyDictionary()

    @property
    def layers(self) -> dict[str, LayerAudit]:
        """What was found, by the names of layers; judgements that wait on a device are fetched."""
        with self._lock:
            # One transfer for all that waits on a device.
            fetched = {
                device: torch.cat([found for *_, found in self._waiting if found.device == device], 1).cpu().numpy()
                for device in {found.device for *_, found in self._waiting}
            }
            taken = dict.fromkeys(fetched, 0)
            for layer, call, asked, places, found in self._waiting:
                first, taken[found.device] = taken[found.device], taken[found.device] + len(places)
                numbers = fetched[found.device][:, first : taken[found.device]]
                layer.add(call, places, judged(asked, numbers), self.tol)
            self._waiting.clear()
        return self._layers

    @property
    def alarms(self) -> list[LayerAudit]:
        """The layers of which an answer provably has a larger error than is allowed."""
        return [layer for layer in self.layers.values() if layer.alarms]

    @property
    def healthy(self) -> bool:
        """Whether rows were recomputed, and none raised an alarm."""
        return not self.alarms and any(layer.recomputed for layer in self.layers.values())

    @property
    def beyond(self) -> int:
        """The most rows of a layer that may have larger errors than its largest here, with probability `confidence`."""
        return math.ceil(math.log(1 - self.confidence) / math.log1p(-self.rate)) - 1 if self.rate < 1 else 0

    def plain(self) -> dict[str, Any]:
        """The report as JSON has it."""
        named = ("rate", "tol", "confidence", "beyond", "healthy", "seconds", "total")
        layers = [
            dataclasses.asdict(layer) | {"worst": [row._asdict() for row in layer.worst]}
            for layer in self.layers.values()
        ]
        return _finite({name: getattr(self, name) for name in named} | {"layers": layers, "unseen": dict(self.unseen)})

    def to_json(self) -> str:
        """The report as JSON.

        Returns:
            One object, with a list of layers. Infinities are written as the word "inf".
        """
        return json.dumps(self.plain())

    def __repr__(self) -> str:
        return f"<AttentionAudit of {count(len(self._layers), 'layer')}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        alarms, recomputed = self.alarms, sum(layer.recomputed for layer in self.layers.values())
        if alarms:
            names = ", ".join(layer.name for layer in alarms[:8]) + (" and more" if len(alarms) > 8 else "")
            return f"ALARM in {count(len(alarms), 'layer')}: {names}"
        if not recomputed:
            return "no row was recomputed, and nothing is said of any"
        return f"no alarm in {count(recomputed, 'recomputed row')}"

    def __str__(self) -> str:
        layers = list(self.layers.values())
        widest = max((len(layer.name) for layer in layers), default=5)
        lines = [
            self.verdict,
            f"{'layer':<{widest}}    calls      rows  recomputed    error  of answer  allowed  kernel",
        ]
        for one in layers:
            worst = f"{one.worst[0].allowed:7.1e}" if one.worst else f"{'–':>7}"
            figures = (
                f"{one.calls:7,}  {one.rows:8,}  {one.recomputed:10,}  {one.error:7.1e}  {one.relative:9.1e}  {worst}"
            )
            lines.append(
                f"{one.name:<{widest}}  {figures}  {one.kernel}"
                + (f"  ALARM: {count(one.alarms, 'row')}" if one.alarms else "")
            )
        return "\n".join([*(lines if layers else lines[:1]), *self.remarks])

    @property
    def remarks(self) -> list[str]:
        """What the numbers mean, what could not be seen, and what watching cost."""
        allowed = "what rounding can do in the inputs' type" if self.tol is None else f"{self.tol:g}"
        share = f" ({self.seconds / self.total:.1%})" if self.total else ""
        most = max((layer.rows for layer in self.layers.values()), default=0)
        others = (
            f"with probability {self.confidence:g}, at most {self.beyond:,} rows of a layer have larger errors than "
            "its largest here."
        )
        if self.beyond >= most > 0:
            others = f"too rarely to say anything about the others of a layer's {most:,} rows; a higher rate would."
        notes = [
            f"Errors are relative to the longest value that a row sees; allowed: {allowed}. An alarm is a proof.",
            f"Each row was drawn with probability {self.rate:g} or more: {others}",
            f"Recomputing took {self.seconds:.2f} s of {self.total:.2f} s{share}.",
        ]
        notes += [
            f"not seen: {reason}" + (f" ({many:,} times)" if many > 1 else "") for reason, many in self.unseen.items()
        ]
        return notes

    def _miss(self, reason: str) -> None:
        """Count a call that could not be judged."""
        with self._lock:
            self.unseen[reason] += 1

    def _see(
        self, name: str, kernel: str, call: Callable[[], Call], shape: Sequence[int], out: Tensor, shadow: Any
    ) -> None:
        """Draw rows of a call, whose queries have this shape, and judge its answer there."""
        rows = math.prod(shape[:-1])
        with self._lock:
            watched = [self._layer(name, kernel)]
            if shadow is not None and shadow.whole:
                watched.append(self._layer(name + CACHE, shadow.kernel))
            for one in watched:
                one.calls += 1
                one.rows += rows
            drawn = self._draw(rows, max(self.rate, min(1.0, _FIRST / (watched[0].calls * max(rows, 1)))))
        if not drawn:
            return
        begun = time.perf_counter()
        asked = call()
        # What is computed here is no part of what is watched, and in no other type than it says.
        with _Whole(), torch.no_grad(), torch.autocast(out.device.type, enabled=False):
            self._recompute(asked, watched, drawn, shape, out, shadow)
        with self._lock:
            self.seconds += time.perf_counter() - begun
            full = len(self._waiting) > _HELD
        if full:
            self.layers  # noqa: B018  # what waits is fetched, or memory would grow

    def _layer(self, name: str, kernel: str) -> LayerAudit:
        found = self._layers.get(name)
        return self._layers.setdefault(name, LayerAudit(name, kernel)) if found is None else found

    def _recompute(
        self, asked: Call, watched: list[LayerAudit], drawn: list[int], shape: Sequence[int], out: Tensor, shadow: Any
    ) -> None:
        """Recompute rows of an answer, and those of its cache beside what that was given."""
        layer, n, heads = watched[0], shape[-2], shape[-3] if len(shape) > 2 else 1
        for one in watched:
            one.dtype = dtype_name(asked.q.dtype)
        key_heads = asked.k.shape[-3] if asked.k.ndim > 2 else 1
        for flat, some in itertools.groupby(drawn, lambda row: row // (heads * n)):
            sequence = _unflat(flat, shape[:-3])
            rows = [divmod(row - flat * heads * n, n) for row in some]
            answers = by_head(out.detach()[sequence])
            for places in _parts(rows, heads // key_heads, *asked.k.shape[-2:]):
                found = asked.measure(sequence, places, answers[tuple(_there(places, answers.device).mT)])[1]
                self._judge(layer, asked, sequence, places, found)
                if len(watched) > 1:
                    # What other keys change, whatever the kernel did with them: at such rows of a head that is kept.
                    group = heads // key_heads
                    others = sorted((shadow.head * group + self._random.randrange(group), row) for _, row in places)
                    if (given_to := shadow.of(flat)) is None:
                        self._unlike(shadow)
                        watched.pop()
                        continue
                    given, _ = asked.measure(sequence, others, None)
                    found = asked.measure(sequence, others, given, given_to)[1]
                    self._judge(watched[1], asked, sequence, others, found)

    def _draw(self, rows: int, probability: float) -> list[int]:
        """Which of so many rows are drawn, each with this probability: the gaps between them are geometric."""
        if probability >= 1:
            return list(range(rows))
        gap, row = math.log1p(-probability), -1
        drawn: list[int] = []
        while True:
            step = math.log(1 - self._random.random()) / gap
            if row + 1 + step >= rows:
                return drawn
            row += 1 + int(step)
            drawn.append(row)

    def _judge(
        self,
        layer: LayerAudit,
        asked: Call,
        sequence: tuple[int, ...],
        places: Sequence[tuple[int, int]],
        found: Tensor,
    ) -> None:
        """Keep what was found of some rows until somebody looks."""
        # A call without heads has rows alone.
        where = [(*sequence, *place)[-asked.q.ndim + 1 :] for place in places]
        with self._lock:
            self._waiting.append((layer, layer.calls, _Asked.of(asked), where, found))

    def _cached(self, cache: Any, number: int, k: Tensor, v: Tensor, versions: Versions, given_back: Tensor) -> _Shadow:
        """Keep what one key head of a cache's layer was given."""
        with self._lock:
            layers = self._shadows.get(cache)
            if layers is None:
                layers = self._shadows.setdefault(cache, {})
            shadow = layers.get(number)
            if shadow is None:
                shadow = layers[number] = _Shadow(
                    self._random.randrange(k.shape[1]), type(cache.layers[number]).__name__
                )
        before = shadow.whole
        shadow.append(k, v, versions, given_back)
        if before and not shadow.whole:
            self._unlike(shadow)
        return shadow

    def _unlike(self, shadow: _Shadow) -> None:
        """Say from where on a cache is not compared with what it was given."""
        self._miss(f"{shadow.kernel} {shadow.wrong}: its keys were taken as they are")

    def _rearranged(self, cache: Any, name: str) -> None:
        """Forget what a cache was given: it was changed to hold something else."""
        for shadow in self._shadows.get(cache, {}).values():
            shadow.forget(f"was changed by {name}")
        self._miss(f"{type(cache).__name__}.{name}: from there on its keys were taken as they are")


# The reports of every block that runs now: a call is shown to each.
_watchers: list[AttentionAudit] = []
_lock = threading.Lock()
_hooks = contextlib.ExitStack()


class _Here(threading.local):
    """What this thread is in the middle of."""

    def __init__(self) -> None:
        self.before: list[int] = []  # what `seen` was when modules that are under way began

    inside = False
    """An attention call that is seen as a whole, or a judgement: calls within are not seen."""
    seen = 0
    """How many calls were seen: a module whose count stands still computed its attention unseen."""
    cached: tuple[Any, dict[int, _Shadow]] = (None, {})
    """The keys that a cache gave back last, and what it was given, by the watcher."""


_here = _Here()


class _Whole:
    """Calls inside the block belong to the one that is under way."""

    def __enter__(self) -> None:
        _here.inside = True

    def __exit__(self, *_: object) -> None:
        _here.inside = False


def watchers() -> tuple[AttentionAudit, ...]:
    """Everybody who watches."""
    return tuple(_watchers)


def watching() -> bool:
    """Whether somebody watches, and this is no part of a call that is seen already."""
    return bool(_watchers) and not _here.inside and not torch.compiler.is_compiling()


def computed(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What an attention function gives; the calls that it makes itself are part of this one."""
    with _Whole():
        return function(*arguments, **options)


def missed(reason: str) -> None:
    """Tell everybody who watches of a call that cannot be judged."""
    for watcher in watchers():
        watcher._miss(reason)


def saw(name: str, kernel: str, call: Callable[[], Call], q: Tensor, k: Tensor, out: Tensor) -> None:
    """Show a call to everybody who watches."""
    _here.seen += 1
    if reason := _unjudgeable(q):
        return missed(reason)
    (keys, shadows), _here.cached = _here.cached, (None, {})
    if keys is not None and keys() is not k:
        shadows = {}
        missed(f"{name}: what its cache gave back was changed before attention, and was not compared")
    for watcher in watchers():
        watcher._see(name, kernel, call, q.shape, out, shadows.get(id(watcher)))


def _unjudgeable(q: Tensor) -> str:
    """Why numbers of this tensor cannot be read now; empty if they can."""
    if type(q) not in (Tensor, nn.Parameter) or _functorch.is_functorch_wrapped_tensor(q):
        return "calls that were traced (torch.compile, export) or that pass tensors of other classes"
    if q.is_meta or q.is_nested:
        return "calls with tensors that are nested or have no numbers"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "calls that were captured into a CUDA graph: its replays are not seen"
    return ""


def saw_cache(cache: Any, number: int, k: Tensor, v: Tensor, versions: Versions, given_back: Tensor) -> None:
    """Show what a cache was given, in which versions, and what it gives back to everybody who watches."""
    if _unjudgeable(k):
        return
    shadows = {id(watcher): watcher._cached(cache, number, k, v, versions, given_back) for watcher in watchers()}
    _here.cached = (weakref.ref(given_back), shadows)


def saw_rearranged(cache: Any, name: str) -> None:
    """Tell everybody who watches that a cache holds something else from now on."""
    for watcher in watchers():
        watcher._rearranged(cache, name)


_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's own answer, shown to everybody who watches."""
    out: Tensor = _SDPA.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not _watchers or _here.inside:  # also while code is traced, which `_compiled` reports
        return out
    name = running_layer("") or _caller()
    if dropout_p > 0:
        _here.seen += 1
        missed(f"{name}: calls that drop weights at random")
        return out

    def call() -> Call:
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return Call(query, key, value, factor, attn_mask, past if is_causal else None)

    saw(name, "scaled_dot_product_attention", call, query, key, out)
    return out


def past(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Row i sees keys 0 to i."""
    return key <= row


def _caller() -> str:
    """The code that called PyTorch: the name of a layer that has none."""
    frame = sys._getframe(2)
    ours = (os.path.dirname(torch.__file__), __file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _flex(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlexAttention, or a compiled form of it, whose answers are shown to everybody who watches."""

    @functools.wraps(function)
    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        given = (query, key, value, score_mod, block_mask, scale, *more)
        if not watching():
            return function(*given, **options)
        result = computed(function, *given, **options)

        def call() -> Call:
            factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            visible = None if block_mask is None else over_pairs(block_mask.mask_mod)
            return Call(
                query, key, value, factor, None, visible, None if score_mod is None else _over_scores(score_mod)
            )

        out = result[0] if isinstance(result, tuple) else result
        saw(running_layer("") or _caller(), "flex_attention", call, query, key, out)
        return result

    return flex_attention


def over_pairs(rule: Visible) -> Visible:
    """A rule for one row and one key, for many of both."""
    every = torch.vmap(torch.vmap(rule, (None, None, None, 0)), (None, 0, 0, None))
    return lambda batch, head, row, key: every(batch, head[:, 0], row[:, 0], key[0])


def _over_scores(rule: Score) -> Score:
    """A change of one logit, for many rows and keys."""
    every = torch.vmap(torch.vmap(rule, (0, None, None, None, 0)), (0, None, 0, 0, None))
    return lambda logit, batch, head, row, key: every(logit, batch, head[:, 0], row[:, 0], key[0])


@contextlib.contextmanager
def _everywhere(original: Any, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """A function replaced in every module that holds it or a compiled form of it, as long as the block runs."""
    held = [
        (vars(module), name, thing)
        for module in list(sys.modules.values())
        if isinstance(getattr(module, "__dict__", None), dict)
        for name, thing in list(vars(module).items())
        if thing is original
        or (type(thing) is FunctionType and vars(thing).get("_torchdynamo_orig_callable") is original)
    ]
    for names, name, thing in held:
        names[name] = wrap(thing)
    try:
        yield
    finally:
        for names, name, thing in held:
            names[name] = thing


@contextlib.contextmanager
def _operator() -> Iterator[None]:
    """PyTorch's SDPA shown to everybody who watches, as long as the block runs; its derivatives stay its own."""
    library = torch.library.Library("aten", "IMPL")
    # Tracers look kernels up once and keep what they found: derivatives would be lost to code compiled later.
    found = torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache
    for key in ("CPU", "CUDA"):
        library.impl("scaled_dot_product_attention", _sdpa, key)
        library.impl("scaled_dot_product_attention", _sdpa, f"Autograd{key}")
    found.clear()
    try:
        yield
    finally:
        library._destroy()
        found.clear()


@contextlib.contextmanager
def _compiled() -> Iterator[None]:
    """Every entry of compiled code reported to all watchers: what was traced before is not traced again."""
    dynamo: Any = importlib.import_module("torch._dynamo.eval_frame")
    original = dynamo._callback_from_stance

    def entering(callback: Any) -> Any:
        chosen = original(callback)
        if chosen is not None and watching():  # None runs code as it is
            missed("compiled code ran: attention inside it may not be seen")
        return chosen

    dynamo._callback_from_stance = entering
    try:
        yield
    finally:
        dynamo._callback_from_stance = original


@contextlib.contextmanager
def _attention_modules(model: nn.Module | None, report: AttentionAudit) -> Iterator[None]:
    """Have calls named after the attention modules of a model, and modules whose attention is not seen reported."""
    if model is None:
        yield
        return
    every = dict(model.named_modules())
    for name, module in every.items():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            report._miss(f"{name or type(module).__name__} is compiled: attention inside compiled code")
    theirs = _transformers()
    asking: dict[str, nn.Module] = theirs.asking(every) if theirs else {}
    named = {name: one for name, one in every.items() if "att" in type(one).__name__.lower() and name not in asking}
    inner = {
        name: one for name, one in named.items() if not any(other.startswith(f"{name}.") for other in (*named, *asking))
    }
    ran = set[str]()

    def enter(*_: Any) -> None:
        _here.before.append(_here.seen)

    def leave(name: str, module: nn.Module, *_: Any) -> None:
        ran.add(name)
        if _here.before.pop() == _here.seen and watching():
            remedy = "; pass need_weights=False" if isinstance(module, nn.MultiheadAttention) else ""
            report._miss(f"{name} ({type(module).__name__}) ran without a call that could be seen{remedy}")

    handles = [model.register_forward_hook(lambda *_: ran.add(""), always_call=True)]
    for name, one in inner.items():
        handles.append(one.register_forward_pre_hook(enter))
        handles.append(one.register_forward_hook(functools.partial(leave, name), always_call=True))
    try:
        with naming(inner or ({} if asking else every)):
            yield
    finally:
        for handle in handles:
            handle.remove()
        silent = [name for name in (*asking, *inner) if name not in report._layers and name not in ran]
        if "" in ran and silent:
            report._miss(f"attention of these did not run where it could be seen: {', '.join(silent)}")


def _transformers() -> Any:
    """What watches transformers; None if nobody has loaded that."""
    if "transformers" not in sys.modules:
        return None
    from avow.integrations.transformers import audited as theirs

    return theirs


@contextlib.contextmanager
def _watched(report: AttentionAudit) -> Iterator[None]:
    """Show every call to a report; what is hooked for the first stays hooked until the last has gone."""
    with _lock:
        if not _watchers:
            _hooks.enter_context(_operator())
            _hooks.enter_context(_compiled())
            # The fused path of `nn.MultiheadAttention` has no SDPA inside; without it, the module calls SDPA.
            _hooks.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
                _hooks.enter_context(_everywhere(flex.flex_attention, _flex))
        hooked = "transformers" in sys.modules
        if hooked and not any(one.hooked for one in _watchers):
            _hooks.enter_context(_transformers().hooks())
        report.hooked = hooked
        _watchers.append(report)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(report)
            if not _watchers:
                _hooks.close()
        if not hooked and "transformers" in sys.modules:
            report._miss("transformers was imported inside the block: of its attention only PyTorch's SDPA was seen")


def auditing(
    model: nn.Module | None = None,
    *,
    rate: float = 1e-3,
    tol: float | None = None,
    confidence: float = 0.99,
    seed: int | None = None,
) -> contextlib.AbstractContextManager[AttentionAudit]:
    """A report on every attention call of any PyTorch code in the block, whoever computes it.

    Rows are drawn at random and recomputed in float64 beside the answers, which stay as they are. Calls of every thread
    are among them. Seen are PyTorch's SDPA, FlexAttention, and the attention functions and caches of transformers. The
    fused path of `torch.nn.MultiheadAttention`, which cannot be looked into, is off inside the block.

    Args:
        model: a model whose modules name the calls; None names them by the code that calls.
        rate: the least probability with which a row is recomputed; first calls of a layer are looked at more closely.
        tol: the largest error of a row that raises no alarm, relative to the longest value that the row sees; None
            allows what rounding can do in the inputs' type.
        confidence: the probability of what is said of rows that were not recomputed.
        seed: makes the draws repeatable; None takes them from the operating system.

    Returns:
        A context manager; inside and after its block, the `AttentionAudit`, which prints as a table of layers.

    Raises:
        ParameterError: an option has a value that it must not have; the message names it.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> with avow.auditing() as report:
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> report.healthy, sum(layer.rows for layer in report.layers.values())
    (True, 512)
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ParameterError("model", value_text(model), "must be a torch.nn.Module", "pass one, or leave it out")
    for name, value, top in (("rate", rate, 1), ("confidence", confidence, 1 - 1e-15)):
        if not 0 < as_float(value) <= top:
            rule = "must be above 0 and at most 1" if top == 1 else "must lie strictly between 0 and 1"
            raise ParameterError(name, value_text(value), rule, f"try {name}={1e-3 if name == 'rate' else 0.99:g}")
    if tol is not None and not 0 < as_float(tol) < math.inf:
        raise ParameterError("tol", value_text(tol), "must be a number above 0", "try tol=1e-2, or leave it out")
    if seed is not None and not isinstance(seed, int):
        raise ParameterError("seed", value_text(seed), "must be a whole number", "try seed=0, or leave it out")
    return resumed(model, AttentionAudit(float(rate), tol, float(confidence), seed))


@contextlib.contextmanager
def resumed(model: nn.Module | None, report: AttentionAudit) -> Iterator[AttentionAudit]:
    """A report that goes on, with what its block adds."""
    begun = time.perf_counter()
    try:
        with _watched(report), _attention_modules(model, report):
            report.names = {} if model is None else {id(one): name for name, one in model.named_modules()}
            yield report
    finally:
        report.total += time.perf_counter() - begun
