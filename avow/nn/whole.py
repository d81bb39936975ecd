r"""All tokens of a cache for one query of each head, on a CPU: exact attention, in parts that keep every thread busy.

PyTorch's fused kernel gives a head to one thread. Here a head's keys are a few parts, which are heads to the kernel; it
tells the logarithm of each part's weights, :math:`L_c`, and answers are joined by them:

.. math:: o = \sum_c \frac{e^{L_c}}{\sum_{c'} e^{L_{c'}}} o_c

Sums of weights cancel between a part's answer and its share, so what exp and products move counts once, and rounding
grows with the length of a part rather than with that of the cache. An answer in half precision is rounded with its part
and once more at the end, relative to its own length, which is known by then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from avow.contract import Problem
from avow.maths.rounding import OUTWARD, tiny, unit
from avow.methods.exact import Exact

EXACT = Exact()

# Parts are no shorter than this, and in half precision, where weights below its range vanish, no longer than that.
_SHORTEST, _LONGEST = 4096, 65536
# The share of the time that threads may idle.
_IDLE = 0.06
_HALF = (torch.bfloat16, torch.float16)


class Whole(NamedTuple):
    """Answers, how far each may be off in units of the longest value, and in that unit the length of the longest."""

    out: Float[Tensor, "b h 1 d"]
    rows: Float64[Tensor, "b h 1"]
    ratio: float


class Plan(NamedTuple):
    """How many parts there are, and the constants of their bound: in a row whose logits are at most S it is

    slope·S + fixed + rounded·(length of the answer, and of its parts where there are several).
    """

    parts: int
    slope: float
    fixed: float
    rounded: float

    def expected(self, reach: float, ratio: float) -> float:
        """The bound for logits up to `reach` and answers no longer than `ratio`."""
        return self.slope * reach + self.fixed + self.rounded * ratio * (2 if self.parts > 1 else 1)


def parts_for(heads: int, s: int, dtype: torch.dtype) -> int:
    """The fewest parts of each head's keys that give all threads about the same to do."""
    threads = torch.get_num_threads()
    least = -(-s // _LONGEST) if dtype in _HALF else 1
    for parts in range(least, min(least + threads, max(least, s // _SHORTEST)) + 1):
        if -(-heads * parts // threads) * threads <= heads * parts * (1 + _IDLE):
            return parts
    return least


def plan(problem: Problem, query: float, key: float, least: float, parts: int) -> Plan:
    """So many parts, for norms of q and k up to these and no value shorter than `least`."""
    s, d, dtype = problem.k.shape[2], problem.q.shape[3], problem.q.dtype
    model = EXACT.model(problem, query, key, -(-s // parts))
    # 2·tanh(δ/2) ≤ δ for the weights.
    slope, fixed, lost = model.slope, model.floor + model.sums, model.lost
    # An answer in half precision is relative to one that was rounded already.
    rounded = model.final * (1 + 2 * model.final)
    if parts > 1:
        # The logarithm of a part's weights is its largest logit and that of a sum from one to s: an ulp of this, and
        # one of the result. What it is off counts for the parts' weights, twice.
        own = 8 * unit(torch.float32) + 8 * s * tiny(torch.float32)
        slope, fixed = slope + own, fixed + own * (math.log(s) + 1)
        fixed += 0.0 if rounded else unit(dtype)
        lost += 2 * math.sqrt(d) * tiny(dtype)
    return Plan(parts, *(x * OUTWARD for x in (slope, fixed + lost / least, rounded)))


def whole(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    scale: float,
    reach: Float64[Tensor, "b g r"],
    longest: Float64[Tensor, "b g 1"],
    made: Plan,
) -> Whole:
    """The answers and their bounds: `reach` bounds the logits of each row, `longest` is at most the longest value."""
    b, h, _, d = q.shape
    g = k.shape[1]
    rows = q.reshape(b * g, 1, h // g, d)
    if h == g and q.dtype == torch.float32:
        rows = torch.cat([rows, rows], 2)  # (b·g, 1, 2, d), as the sums of a single row are rounded more often
    out, logs = _parts(rows, k, v, scale, made.parts)
    if rows.shape[2] > h // g:
        out, logs = out[:, :, :1], logs[:, :, :1]
    length = None
    if made.parts > 1:
        shares, parts = logs.double().softmax(1), out.double()
        joined = (parts * shares.unsqueeze(-1)).sum(1)  # (b·g, r, d)
        out = joined.to(q.dtype)
        if made.rounded:
            length = (torch.linalg.vector_norm(parts, dim=-1) * shares).sum(1) + torch.linalg.vector_norm(
                joined, dim=-1
            )
    elif made.rounded:
        length = torch.linalg.vector_norm(out, dim=-1, dtype=torch.float64)
    bounds, ratio = reach * made.slope + made.fixed, 1.0
    if length is not None:
        relative = length.view(b, g, -1) / longest
        bounds.add_(relative, alpha=made.rounded)
        ratio = float(relative.amax()) / (2 if made.parts > 1 else 1)
    return Whole(out.reshape(b, h, 1, d), bounds.view(b, h, 1), ratio)


def _parts(
    rows: Float[Tensor, "h 1 r d"], k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s d"], scale: float, parts: int
) -> tuple[Float[Tensor, "h c r d"], Float32[Tensor, "h c r"]]:
    """The answers of all parts, the few keys that are left over as one more, and the logarithms of their weights."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    s, d = k.shape[2:]
    each = s // parts
    main = parts * each
    keys, values = (x[:, :, :main].view(-1, parts, each, d) for x in (k, v))  # (h, c, s/c, d)
    out, logs = kernel(rows.expand(-1, parts, -1, -1), keys, values, scale=scale)
    if main == s:
        return out, logs
    more, their = kernel(rows, *(x[:, :, main:].view(-1, 1, s - main, d) for x in (k, v)), scale=scale)
    return torch.cat([out, more], 1), torch.cat([logs, their], 1)
