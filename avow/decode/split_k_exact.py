r"""Exact attention of one query of each head to all tokens of a cache on a CPU, in parts that keep every thread busy.

PyTorch's fused kernel gives a head to one thread. Here a head's keys are a few parts, which are heads to the kernel; it
returns the log-sum-exp of each part, :math:`L_c`, and answers are joined by them:

.. math:: o = \sum_c \frac{e^{L_c}}{\sum_{c'} e^{L_{c'}}} o_c

Sums of weights cancel between a part's answer and its share, so what exp and products move counts once, and rounding
grows with the length of a part rather than with that of the cache. An answer in half precision is rounded with its part
and once more at the end, relative to its own length, which is known by then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from avow.core import Certificate, LazyCertificate, Problem, Sizes
from avow.core.certify import absolute_errors, relative_errors
from avow.decode.token_buffers import LengthBounds, row_lengths, row_sizes
from avow.methods.exact import Exact
from avow.numerics.cpu_sums import fewest_rows
from avow.numerics.norms import check_range, length_floors, row_norms, slack
from avow.numerics.rounding import EXP_ULPS, SAFETY, gamma, tiny, unit

_EXACT = Exact()

# Parts are no shorter than this, and in half precision, where weights below its range vanish, no longer than that.
_SHORTEST, _LONGEST = 4096, 65536
# The share of the time that threads may idle.
_IDLE = 0.06
# Above this a bound is left to the general way, which knows that none is above two; so are values shorter than that.
_MOST, _FAINT = 0.1, 1e-9
# By how much the memory of long answers fades with each.
_FORGET = 0.97
# Queries longer than this are left to the general way.
_QUERY = 2.0**40
# The binding: a call of torch.ops' operator takes longer.
_kernel: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu
_HALF = (torch.bfloat16, torch.float16)


class SplitKExact:
    """Answers from all tokens with certificates, for one query of each head and usual numbers."""

    def __init__(self) -> None:
        self._ratio = 0.6
        """How long answers were lately, beside the longest value."""
        self._limits: Limits | None = None
        self._room: tuple[Tensor, Tensor] | None = None
        """For the queries of each key head, filled up with zeros if they are too few; and without these."""

    def __reduce__(self) -> tuple[type[SplitKExact], tuple[()]]:
        """Copies and files start over: another cache learns for itself."""
        return SplitKExact, ()

    def quick(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s d"],
        known: LengthBounds,
        error: float,
        tol: float | None,
        scale: float | None,
        reason: Callable[[], str],
    ) -> tuple[Tensor, Certificate] | None:
        """What `attend` answers, in few steps: limits stand from call to call, and the longest query decides.

        The certificate is worked out when somebody looks at it. None if numbers are not within the limits, or several
        parts keep more threads busy.
        """
        (b, h, _, d), (g, s) = q.shape, k.shape[1:3]
        if not _plain_products(q.dtype):
            return None
        limits = self._limits
        if limits is None or limits.key_of_call != (tol, scale, h) or not limits.hold(s, known):
            problem = Problem.of(q, k, v, scale=scale, enable_gqa=True)
            limits = self._limits = Limits.of(problem, known, error, tol, scale)
        norms = row_lengths(q)
        # nan compares false with everything.
        if not all(x <= limits.query for x in norms):
            return None
        if limits.tokens >= 2 * _SHORTEST and parts_for(b * g, s, q.dtype) > 1:
            return None
        siblings, rows = h // g, q.reshape(b, g, h // g, d).contiguous()  # the kernel needs adjacent features
        if limits.rows > siblings:
            # Sums of fewer rows are rounded more often.
            if self._room is None or self._room[0].shape != (b, g, limits.rows, d) or self._room[1].shape != rows.shape:
                with torch.inference_mode(False):  # it is written into outside, too
                    room = q.new_zeros(b, g, limits.rows, d)
                self._room = room, room[:, :, :siblings]
            self._room[1].copy_(rows)
            rows = self._room[0]
        out = _kernel(rows, k, v, scale=limits.scale)[0]
        out = (out if limits.rows <= siblings else out[:, :, :siblings]).reshape(q.shape)
        # Captured now: whoever has the answer may write into it before anybody looks.
        lengths, off = row_sizes(out), slack(d, q.dtype)

        def fields() -> dict[str, Any]:
            # What norms are off makes answers no shorter, and the longest value no longer.
            longest = [x * (1 - error) / (1 + off) for x in known.values]
            beside = [x / longest[i // siblings] for i, x in enumerate(lengths.flatten().tolist())]
            reach = [x * known.keys[i // siblings] * abs(limits.scale) for i, x in enumerate(norms)]
            bounds = [limits.split.bound(x, y) for x, y in zip(reach, beside, strict=True)]
            sizes = dataclasses.replace(limits.sizes, keys=s)
            values = [known.values[i // siblings] for i in range(len(norms))]
            return _fields(bounds, values, lengths.double() * (1 - off), sizes, limits.assumption, reason())

        return out, LazyCertificate.of(fields)

    def attend(
        self, problem: Problem, known: LengthBounds, error: float, tol: float | None, reason: str
    ) -> tuple[Tensor, Certificate] | None:
        """The answers, and what is promised of them; None if the general way serves better.

        Lengths in `known` may be above the true ones by `error`, relatively.
        """
        q, (b, g, s, _) = problem.q, problem.k.shape
        if not serves(q, problem.v):
            return None
        norms, factor, siblings = lengths_of(q, "q"), abs(problem.scale), q.shape[1] // g
        query, key, value, least = max(norms), max(known.keys), max(known.values), known.least
        check_range(query, key, value, problem.scale)
        usual = least > _FAINT and torch.backends.cuda.flash_sdp_enabled()
        if not usual or not _EXACT.fits(problem, query, key, value):
            return None
        wanted = _MOST if tol is None else min(tol, _MOST)
        for parts in dict.fromkeys((parts_for(b * g, s, q.dtype), 1)):
            split, twice = split_bound(problem, query, key, least * (1 - error), parts, s), 2 if parts > 1 else 1
            if split.bound(query * key * factor, twice * self._ratio) <= wanted:
                break
        else:
            return None
        out, own = whole(problem, split)
        longest = [x * (1 - error) for x in known.values]
        lengths = [x / longest[i // siblings] for i, x in enumerate(own)] or [0.0] * len(norms)
        bounds = [split.bound(x * known.keys[i // siblings] * factor, lengths[i]) for i, x in enumerate(norms)]
        # The bound assumed that answers are no longer than recent ones. If these are longer, they are computed again,
        # and the next dozen or so steps assume nothing.
        if not max(bounds) <= wanted:
            self._ratio = 1.0
            return None
        self._ratio = min(1.0, max(1.02 * max(lengths) / twice, _FORGET * self._ratio))
        values = [known.values[i // siblings] for i in range(len(norms))]
        assumption = _EXACT.assumption(problem)
        return out, Certificate(**_fields(bounds, values, length_floors(out), problem.sizes, assumption, reason))


def _fields(
    bounds: list[float], longest: list[float], lengths: Tensor, sizes: Sizes, assumption: str, reason: str
) -> dict[str, Any]:
    """The fields of a certificate with these bounds of rows, of answers at least as long as `lengths`."""
    rows, values = torch.tensor([bounds, longest], dtype=torch.float64, device="cpu").view(2, sizes.batch, -1, 1)
    own = relative_errors(absolute_errors(rows, values), lengths)
    return {
        "method": _EXACT.name,
        "parameters": _EXACT.parameters,
        "target": _EXACT.target,
        "kind": "deterministic",
        "bound": max(bounds),
        "rows": rows,
        "assumptions": (assumption,),
        "reason": reason,
        "cost": _EXACT.cost(sizes),
        "relative": float(own.amax()),
        "relative_rows": own,
    }


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether queries are of the kind that is answered here: one of each head, as wide as values, not in float64."""
    return q.shape[2] == 1 and q.dtype != torch.float64 and q.shape[3] == v.shape[3]


def _plain_products(dtype: torch.dtype) -> bool:
    """Whether the user's switches leave the kernel on, and products of float32 as they are."""
    if not torch._C._get_flash_sdp_enabled():  # what torch.backends asks, in one call
        return False
    if dtype != torch.float32:
        return True
    precision = torch._C._get_fp32_precision_getter
    return {precision("mkldnn", "matmul"), precision("generic", "all")} <= {"none", "ieee"}


@dataclass(frozen=True)
class Limits:
    """Constants of bounds that hold for up to `tokens` tokens and norms up to these, and keep the tolerance."""

    key_of_call: tuple[float | None, float | None, int]
    """The tolerance, the scale and the number of query heads that they are for."""
    sizes: Sizes
    scale: float
    split: SplitBound
    tokens: int
    query: float
    """The longest query whose bound is within the tolerance, however long its answer; -1 if none is."""
    key: float
    value: float
    least: float
    rows: int
    """How many rows the kernel needs to add as the model says."""
    assumption: str

    def hold(self, tokens: int, known: LengthBounds) -> bool:
        """Whether they hold for this many tokens of such lengths."""
        usual = tokens <= self.tokens and known.least >= self.least
        return usual and max(known.keys) <= self.key and max(known.values) <= self.value

    @staticmethod
    def of(problem: Problem, known: LengthBounds, error: float, tol: float | None, scale: float | None) -> Limits:
        """Limits with some room above what is known, so that they last."""
        p, s = problem, problem.k.shape[2]
        # An eighth more tokens, and lengths up to the next power of two.
        step = 1 << max(4, s.bit_length() - 4)
        tokens = -(-s // step) * step
        key, value = (2.0 ** math.frexp(max(x))[1] for x in (known.keys, known.values))
        least = 2.0 ** (math.frexp(known.least)[1] - 1) if known.least > _FAINT else 0.0
        split = split_bound(p, _QUERY, key, max(least, _FAINT) * (1 - error), 1, tokens)
        wanted = _MOST if tol is None else min(tol, _MOST)
        # An answer is no longer than the longest value, and what it is off; that value's length is known to a part of
        # `error`, far below a thousandth.
        rest = wanted * (1 - 1e-9) - split.bound(0.0, (1 + wanted) * 1.001)
        longest = min(_QUERY, rest / (split.slope * key * abs(p.scale) + 1e-300))
        usual = least > 0 and rest > 0 and _EXACT.fits(p, _QUERY, key, value * tokens / s)
        alone = p.k.shape[0] * p.k.shape[1] == 1  # would be spread over threads, few rows for each
        query = longest if usual and not alone and p.scale > 0 else -1.0
        rows, assumption = fewest_rows(p.q.dtype, p.q.shape[3]), _EXACT.assumption(p)
        call = (tol, scale, p.q.shape[1])
        return Limits(call, p.sizes, p.scale, split, tokens, query, key, value, least, rows, assumption)


class SplitBound(NamedTuple):
    """How many parts there are, and the constants of their bound: in a row whose logits are at most S it is

    slope·S + fixed + rounded·(length of the answer, and of its parts if there are several).
    """

    parts: int
    slope: float
    fixed: float
    rounded: float

    def bound(self, reach: float, length: float) -> float:
        """The bound for logits up to `reach`; `length` is that of the answer in units of the longest value."""
        return self.slope * reach + self.fixed + self.rounded * length


def parts_for(heads: int, s: int, dtype: torch.dtype) -> int:
    """The fewest parts of each head's keys that give all threads about the same to do."""
    threads = torch.get_num_threads()
    least = -(-s // _LONGEST) if dtype in _HALF else 1
    for parts in range(least, min(least + threads, max(least, s // _SHORTEST)) + 1):
        if -(-heads * parts // threads) * threads <= heads * parts * (1 + _IDLE):
            return parts
    return least


def split_bound(problem: Problem, query: float, key: float, least: float, parts: int, s: int) -> SplitBound:
    """The bound of `s` keys in so many parts, for norms of q and k up to these and no value shorter than `least`."""
    d, dtype = problem.q.shape[3], problem.q.dtype
    model = _EXACT.model(problem, query, key, -(-s // parts))
    # 2·tanh(δ/2) ≤ δ for the weights.
    slope, fixed, lost = model.slope, model.floor + model.sums, model.lost + model.ends
    # An answer in half precision is relative to one that was rounded already.
    rounded = model.final * (1 + 2 * model.final)
    if parts > 1:
        # The logarithm of a part's weights is its largest logit and that of a sum from one to s: an ulp of this, and
        # one of the result. What it is off counts for the parts' shares, twice; so do differences, exp and their sum.
        u, lowest = unit(torch.float32), tiny(torch.float32)
        own = 16 * u + 8 * s * lowest
        slope, fixed = slope + own, fixed + own * (math.log(s) + 1)
        # Shares and parts are multiplied and added in float32.
        fixed += gamma(2 * EXP_ULPS + 4 * (parts + 1), u) + 4 * parts * lowest
        lost += 2 * math.sqrt(d) * (tiny(dtype) + (parts + 1) * lowest)
    return SplitBound(parts, *(x * SAFETY for x in (slope, fixed + lost / least, rounded)))


def lengths_of(rows: Float[Tensor, "*lead d"], name: str) -> list[float]:
    """Upper bounds on the norms of rows; raises if a number is nan or inf.

    Between two readings of a long cache no code of torch's is in the processor's caches any more: for a few numbers
    Python's own arithmetic is faster, and right to an ulp.
    """
    norms = [math.hypot(*row) * (1 + 1e-12) for row in rows.flatten(0, -2).tolist()]
    if not all(map(math.isfinite, norms)):
        row_norms(rows, name)  # says where
    return norms


def whole(problem: Problem, split: SplitBound) -> tuple[Float[Tensor, "b h 1 d"], list[float]]:
    """The answers of one query of each head to all tokens, and the length of each, with those of its parts if there are
    several; no lengths if answers are not rounded.
    """
    q, k, (b, h, _, d), g = problem.q, problem.k, problem.q.shape, problem.k.shape[1]
    rows = q.reshape(b * g, 1, h // g, d).contiguous()  # the kernel needs adjacent features
    short = fewest_rows(q.dtype, d) - h // g
    if short > 0:
        # (b·g, 1, r, d): sums of fewer rows are rounded more often.
        rows = torch.cat([rows, rows[:, :, -1:].expand(-1, -1, short, -1)], 2)
    out, logs = _parts(rows, k, problem.v, problem.scale, split.parts)
    if short > 0:
        out, logs = out[:, :, : h // g], logs[:, :, : h // g]
    length = None
    if split.parts > 1:
        shares, parts = _shares(logs), out
        joined = (parts * shares.unsqueeze(-1)).sum(1)  # (b·g, r, d), in float32
        out = joined.to(q.dtype)
        if split.rounded:
            each, all_of = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (parts, joined))
            length = (each * shares).sum(1) * (1 + 1e-5) + all_of  # (b·g, r)
    elif split.rounded:
        length = torch.linalg.vector_norm(out, dim=-1, dtype=torch.float64)
    return out.reshape(b, h, 1, d), [] if length is None else length.flatten().tolist()


def _shares(logs: Float32[Tensor, "h c r"]) -> Float32[Tensor, "h c r"]:
    """Their softmax over parts, in Python for the same reason as `lengths_of`."""
    shares = []
    for head in logs.transpose(1, 2).flatten(0, 1).tolist():
        top = max(head)
        weights = [math.exp(x - top) for x in head]
        total = sum(weights)
        shares += [x / total for x in weights]
    heads, parts, rows = logs.shape
    return torch.tensor(shares, dtype=torch.float32, device=logs.device).view(heads, rows, parts).transpose(1, 2)


def _parts(
    rows: Float[Tensor, "h 1 r d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s d"], scale: float, parts: int
) -> tuple[Float[Tensor, "h c r d"], Float32[Tensor, "h c r"]]:
    """The answers of all parts, the few keys that are left over as one more, and the log-sum-exp of each."""
    s, d = k.shape[2:]
    each = s // parts
    main = parts * each
    keys, values = (x[:, :, :main].view(-1, parts, each, d) for x in (k, v))  # (h, c, s/c, d)
    # A part that is alone would be spread over threads, few rows for each.
    heads = 2 if len(keys) * parts == 1 else parts
    spread = (x.expand(-1, heads, -1, -1) for x in (rows, keys, values))
    out, logs = (x[:, :parts] for x in _kernel(*spread, scale=scale))
    if main == s:
        return out, logs
    more, their = _kernel(rows, *(x[:, :, main:].view(-1, 1, s - main, d) for x in (k, v)), scale=scale)
    return torch.cat([out, more], 1), torch.cat([logs, their], 1)
