r"""The certificate of an answer: what its method promises, in units of the longest value and of the answer itself.

A certificate bounds :math:`\|out_i - o^*_i\|` by :math:`b_i`, the row's bound times the longest value that it sees. The
true answer is then no shorter than :math:`\|out_i\| - b_i`, and the error relative to it is at most

.. math:: \frac{\|out_i - o^*_i\|}{\|o^*_i\|} \le \frac{b_i}{\|out_i\| - b_i},

if that is positive; otherwise nothing is known. Lengths of answers are rounded down and all else up.

The other way round, a row whose answer is about r times as long as its longest value keeps `rtol` if its bound is at
most :math:`r \cdot rtol / (1 + rtol)`: what a method is to aim at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.core import SOFTMAX, Certificate, Computed, Cost, Kind, LazyCertificate, Method, Problem, Promise, Sizes
from avow.errors import InputError, ParameterError, ShapeError, value_text
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.norms import length_floors, lengths, norm_floor, slack
from avow.parameters import as_float

# Charges below this are left out: SAFETY adds more to any bound.
_NOTHING = 1e-22
# Under a mask the longest value of all stands for each row's own if no value is this much shorter.
_ALIKE = 8.0


class _Stated(NamedTuple):
    """A certificate's fields, and what gives those that are relative to the answer, from the rows."""

    fields: dict[str, Any]
    relative: Callable[[Tensor], dict[str, Any]]


def certify(method: Method, p: Problem, computed: Computed, confidence: float) -> Certificate:
    """The certificate of an answer just computed."""
    fields, relative = _stated(method, p, computed, confidence)
    return Certificate(**fields | relative(fields["rows"]))


def certify_lazily(method: Method, p: Problem, computed: Computed, confidence: float) -> LazyCertificate:
    """The same certificate; the bounds relative to the answer are computed when somebody looks at them."""
    fields, relative = _stated(method, p, computed, confidence)
    # Whoever writes into the rows of a certificate does not change what is stated later.
    rows = fields["rows"].clone()
    return LazyCertificate.of(lambda: fields | {"rows": rows} | relative(rows), known=fields)


def _stated(method: Method, p: Problem, computed: Computed, confidence: float) -> _Stated:
    shape = (*p.leading, p.q.shape[-2])
    if p.empty:
        longest = floors = p.q.new_zeros(p.q.shape[:-1], dtype=torch.float64)
        promise = Promise("deterministic", longest, assumptions=("there was nothing to attend to",))
    else:
        with torch.no_grad():
            p = p.measure_norms().detached()
            _check_computed(method, p, computed)
            floors, longest = _floors(p, computed), longest_value_above(p)
            promise = method.promise(p, computed, confidence)
            _check_promise(method, p, promise)
            promise = dataclasses.replace(promise, rows=_charged(method, p, promise.rows))
    bound = _largest(method, promise.rows)
    if bound > 1 and method.averages and promise.kind != "none":
        with torch.no_grad():
            # An answer is at most as far from an average of the values its row sees as both are long together.
            most, unit = _longest_value_range(p)
            length = lengths(computed.out) if computed.lengths is None else computed.lengths
            trivial = torch.where(most > 0, (length + most) * rounding.SAFETY / unit, math.inf)
            promise = dataclasses.replace(promise, rows=torch.minimum(promise.rows, trivial))
        bound = _largest(method, promise.rows)

    def relative(rows: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            own = relative_errors(absolute_errors(rows.reshape(floors.shape), longest), floors)
        return {"relative": float(own.amax()) if own.numel() else 0.0, "relative_rows": own.reshape(shape)}

    identity = {"method": method.name, "parameters": method.parameters, "target": method.target}
    bounds = {"bound": bound, "rows": promise.rows.reshape(shape), "cost": _checked_cost(method, p.sizes)}
    return _Stated(vars(promise) | identity | bounds, relative)


def _check_computed(method: Method, p: Problem, computed: object) -> None:
    """Raise if what `compute` returned is not an answer to the problem."""
    name, shape = f"{method.name}: compute()", (*p.q.shape[:-1], p.v.shape[-1])
    if not isinstance(computed, Computed):
        raise InputError(name, value_text(computed), "must be a Computed", "return Computed(out) from compute")
    if not isinstance(computed.out, Tensor) or computed.out.shape != shape:
        rule = f"must be a tensor of shape {shape}: batch, heads, queries, value dim"
        raise ShapeError(f"{name}.out", value_text(computed.out), rule, "return one vector for each query")


def _check_promise(method: Method, p: Problem, promise: object) -> None:
    """Raise if what `promise` returned is not about every row of the problem; `_largest` checks its numbers."""
    name, shape = f"{method.name}: promise()", tuple(p.q.shape[:-1])
    if not isinstance(promise, Promise):
        remedy = 'return Promise("deterministic", rows) from promise'
        raise InputError(name, value_text(promise), "must be a Promise", remedy)
    if promise.kind not in get_args(Kind):
        rule = f"must be one of {', '.join(get_args(Kind))}"
        raise ParameterError(f"{name}.kind", value_text(promise.kind), rule, 'use "none" if nothing is promised')
    rows = promise.rows
    if not isinstance(rows, Tensor) or rows.shape != shape or not rows.is_floating_point():
        rule = f"must be a tensor of numbers of shape {shape}: batch, heads, queries"
        raise ShapeError(f"{name}.rows", value_text(rows), rule, "return one bound for each query")
    if not 0 <= as_float(promise.confidence) <= 1:
        rule = "must be a probability, from 0 to 1"
        raise ParameterError(f"{name}.confidence", value_text(promise.confidence), rule, "1 means always")


def _checked_cost(method: Method, sizes: Sizes) -> Cost:
    cost: object = method.cost(sizes)
    if not isinstance(cost, Cost):
        remedy = "return Cost(flops, pointwise, launches, peak_bytes) from cost"
        raise InputError(f"{method.name}: cost()", value_text(cost), "must be a Cost", remedy)
    return cost


def _largest(method: Method, rows: Tensor) -> float:
    """The largest bound of a row. Raises if one is below 0 or not a number: it would keep any tolerance, or none."""
    if not rows.numel():
        return 0.0
    least, bound = torch.stack([rows.amin(), rows.amax()]).tolist()
    if not least >= 0:
        remedy = "return at least 0 for every row, and inf if nothing is proved of it"
        raise ParameterError(f"{method.name}: promise().rows", least, "is not a bound", remedy)
    return float(bound)


def _charged(method: Method, p: Problem, rows: Tensor) -> Tensor:
    """The bounds of rows with what subnormal numbers may have cost them."""
    charge = subnormal_charge(method, p)
    return rows if charge is None else rows + charge


def subnormal_charge(method: Method, p: Problem) -> Tensor | None:
    """What it costs each row that subnormal numbers among the inputs may have been read as zeros.

    Methods promise what they owe to the numbers they read. Logits move little, and values by less than they are long.
    None if it costs nothing.
    """
    norms = p.norms
    rows: Tensor | None = None
    if method.target == SOFTMAX:
        query, key, _ = norms.most
        if rounding.misread_logits(query, key, p.scale, p.q.shape[-1], p.q.dtype) > _NOTHING:
            keys = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
            moved = rounding.misread_logits(norms.q, keys, p.scale, p.q.shape[-1], p.q.dtype)
            rows = rounding.softmax_l1_bound(moved) * rounding.SAFETY
    unread = math.sqrt(p.v.shape[-1]) * rounding.flush_threshold(p.q.dtype)
    if unread > _NOTHING * norms.least_value:
        longest, unit = _longest_value_range(p)
        more = torch.where(longest > 0, (torch.full_like(unit, unread) / unit).clamp(max=1.0), 0.0)
        rows = more if rows is None else rows + more
    return rows


def _longest_value_range(p: Problem) -> tuple[Tensor, Tensor]:
    """An upper and a lower bound on the length of the longest value that each row sees."""
    norms = p.norms
    if p.allowed is None or norms.v.shape[-1] == p.v.shape[-2]:
        most = least = longest_seen(p, norms.v)
    else:  # a cache knows the shortest and the longest of its values, and not which of them a mask shows
        least, most = (per_query_head(x.unsqueeze(-1), p.q.shape[1]) for x in (norms.v.amin(-1), norms.v.amax(-1)))
    return most, norm_floor(least, norms.slack, p.v.shape[-1])


def relative_errors(absolute: Float64[Tensor, "*rows"], lengths: Float64[Tensor, "*rows"]) -> Float64[Tensor, "*rows"]:
    """Bounds relative to the true answers: `absolute` errors are at most these, and answers at least so long."""
    gap = lengths - absolute
    bounds = absolute / gap * rounding.SAFETY**2
    # nan compares false with everything: what is not known to be a length bounds nothing.
    bounds = torch.where((gap > 0) & torch.isfinite(lengths), bounds, math.inf)
    return torch.where(absolute == 0, 0.0, bounds)


def absolute_errors(rows: Float64[Tensor, "*rows"], longest: Float64[Tensor, "*#rows"]) -> Float64[Tensor, "*rows"]:
    """What bounds in units of the longest value allow each row; `longest` is at least that value's length."""
    none = (rows == 0) | ((longest == 0) & (rows < math.inf))
    allowed = rows * longest * rounding.SAFETY + rounding.tiny(torch.float64)
    return torch.where(none, 0.0, allowed.nan_to_num(nan=math.inf, posinf=math.inf))


def longest_value_above(p: Problem) -> Float64[Tensor, "b h #n"]:
    """An upper bound on the length of the longest value that each row sees."""
    norms = p.norms
    if p.allowed is not None:
        apart = norms.v.shape[-1] != p.k.shape[-2]
        alike = p.allowed.shape[-2] > 1 and norms.most[2] <= _ALIKE * norms.least_value
        if apart or alike:
            return per_query_head(norms.v.amax(-1, keepdim=True), p.q.shape[1])
    return longest_seen(p, norms.v)


def _floors(p: Problem, computed: Computed) -> Float64[Tensor, "b h n"]:
    """Lower bounds on the lengths of answers."""
    if computed.lengths is None:
        return length_floors(computed.out.detach())
    e = p.v.shape[-1]
    return norm_floor(computed.lengths, slack(e, torch.float64), e)


def aimed_bound(ratio: float, rtol: float) -> float:
    """The bound, in units of the longest value, that proves `rtol` of answers which are `ratio` times as long."""
    return ratio * rtol / (1 + rtol) * (1 - 1e-6)


def proved_ratio(certificate: Certificate) -> float:
    """A proved lower bound on (length of a true answer) / (longest value of its row), for all rows; 0 if none is."""
    some = certificate.rows > 0
    ratios = torch.where(some, certificate.rows / certificate.relative_rows.clamp(min=1e-300), 1.0)
    return float(ratios.amin()) if ratios.numel() else 1.0


def answer_ratios(p: Problem, out: Float[Tensor, "b h n e"], rows: Float64[Tensor, "b h n"]) -> tuple[float, float]:
    """About how long the shortest and the longest answer are beside the longest value of their row; rows that see no
    value do not count.

    The shortest is proved if errors are small beside the answers. If they are not, a quarter of what was given is a
    guess.
    """
    longest, floors = longest_value_above(p).expand(rows.shape), length_floors(out.detach())
    left = torch.maximum(floors - absolute_errors(rows, longest), floors / 4)
    some = longest > 0
    if not bool(some.any()):
        return 1.0, 1.0
    ratios = [x[some] / longest[some] for x in (left, floors)]
    return max(0.0, float(ratios[0].amin())), float(ratios[1].amax())
