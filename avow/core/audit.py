r"""Recomputing some rows in float64: what a sample proves about all rows.

Of r rows drawn uniformly without regard to the answer, the largest error bounds the errors of at least a share c of
all rows, unless every one of the r rows fell into the best c: a chance of at most :math:`c^r`. No distribution is
assumed; r = ln(1−confidence)/ln(coverage) rows are enough. Where there are no more, all are recomputed.

That holds of errors in either unit, relative to the longest value and to the true answer, each on its own; and of both
at once for limits that were fixed before the rows were drawn, such as `tol` and `rtol`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from avow.core import Certificate, Method, Norms, Problem, notebook
from avow.core.quantities import count
from avow.core.requirement import random_stream
from avow.errors import ParameterError
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.masks import visible
from avow.numerics.norms import length_floors, lengths, norm_floor, widened
from avow.parameters import as_float

# Rows of a head that are recomputed at once: their float64 weights take this many times the keys.
_AT_ONCE = 1024


@dataclass(frozen=True)
class Audit:
    """Errors of the rows that were recomputed, as upper bounds in three units, and the certificate they earn.

    float64 rounds, too: `least_errors` are what the errors are at least, and refute a bound that is below them.

    Attributes:
        certificate: a `sampled` certificate, with the largest errors as bounds.
        rows: which rows were recomputed: batch, head and place of each, (r, 3).
        errors: relative to the longest value that the row sees, (r,).
        relative_errors: relative to the true answer's length, (r,).
        absolute_errors: as they are, (r,).
        least_errors: lower bounds, relative to the longest value that the row sees, (r,).
        not_finite: how many rows of the whole answer hold nan or inf, recomputed or not.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> avow.audit(avow.attend(q, k, v).out, q, k, v).errors.shape
    torch.Size([459])
    """

    certificate: Certificate
    rows: Int[Tensor, "r 3"]
    errors: Float[Tensor, "r"]
    relative_errors: Float[Tensor, "r"]
    absolute_errors: Float[Tensor, "r"]
    least_errors: Float[Tensor, "r"]
    not_finite: int = 0

    def __repr__(self) -> str:
        return f"Audit(rows={self.errors.numel()}, certificate={self.certificate!r})"

    def __str__(self) -> str:
        largest = ", ".join(f"{error:.2e} {unit}" for unit, error in self._largest().items())
        # Whoever computed the answer is not known: the method is the one whose target it is compared with.
        certificate = str(self.certificate).replace("\n  method   ", "\n  compared with the target of ", 1)
        return "\n".join([f"{self._recomputed}: largest errors {largest}", *self._not_finite, certificate])

    def _repr_html_(self) -> str:
        errors = [(f"largest error, {unit}", f"{error:.2e}") for unit, error in self._largest().items()]
        errors += [("not finite", line) for line in self._not_finite]
        promise = self.certificate.kind != "none"
        return notebook.card(self._recomputed, notebook.facts(errors), self.certificate._repr_html_(), promise=promise)

    @property
    def _recomputed(self) -> str:
        every = "all " if self.certificate.coverage == 1 else ""
        return f"{every}{self.errors.numel()} rows recomputed in float64"

    @property
    def _not_finite(self) -> list[str]:
        """A line if rows hold nan or inf: they can be counted without recomputing them."""
        rows = count(self.not_finite, "row")
        return [f"{rows} of the answer {'holds' if self.not_finite == 1 else 'hold'} nan or inf"] * (
            self.not_finite > 0
        )

    def _largest(self) -> dict[str, float]:
        """The largest error in each unit."""
        units = ("of the longest value", "of the answer", "absolute")
        errors = (self.errors, self.relative_errors, self.absolute_errors)
        return {unit: float(x.amax()) if x.numel() else 0.0 for unit, x in zip(units, errors, strict=True)}


def rows_needed(coverage: float, confidence: float) -> float:
    """How many sampled rows prove that coverage at that confidence: infinitely many for all rows."""
    if not 0 < as_float(coverage) <= 1:
        rule = "must be above 0 and at most 1"
        raise ParameterError("coverage", coverage, rule, "try coverage=0.99, or coverage=1 to recompute all rows")
    if not 0 < as_float(confidence) < 1:
        rule = "must lie strictly between 0 and 1"
        raise ParameterError("confidence", confidence, rule, "try confidence=0.99")
    return math.inf if coverage == 1 else math.ceil(math.log(1 - confidence) / math.log(coverage))


def audit_rows(
    out: Tensor, p: Problem, target: Method, coverage: float, confidence: float, generator: torch.Generator | None
) -> Audit:
    """Errors of sampled rows of any answer against a method's target, and the `sampled` certificate they earn."""
    out = out.reshape(*p.q.shape[:-1], p.v.shape[-1])
    b, h, n, _ = out.shape
    needed = rows_needed(coverage, confidence)
    population = b * h * n
    if population <= needed:
        index, coverage, confidence = torch.arange(population, device="cpu"), 1.0, 1.0
        words = f"all {population} rows were recomputed in float64"
    else:
        stream = random_stream(generator, "cpu")
        index = torch.randint(population, (int(needed),), generator=stream, device=stream.device).cpu()
        words = f"the {needed} audited rows were drawn uniformly, whatever the answer"
    index = index.sort().values  # rows of one head together
    rows = torch.stack([index // (h * n), index // n % h, index % n], -1)
    heads = rows.split((index // n).unique_consecutive(return_counts=True)[1].tolist()) if len(rows) else ()
    parts = [part for head in heads for part in head.split(_AT_ONCE)]
    errors = torch.cat([torch.zeros(4, 0, device="cpu"), *(_errors(out, p, target, part) for part in parts)], -1)
    worst, own, *_ = errors.amax(-1).tolist() if len(rows) else (0.0, 0.0)
    everywhere = torch.ones(*p.leading, n, dtype=torch.float64, device="cpu")
    certificate = Certificate(
        method=target.name,
        parameters={},
        target=target.target,
        kind="sampled",
        bound=worst,
        rows=worst * everywhere,
        confidence=confidence,
        coverage=coverage,
        assumptions=(words,),
        relative=own,
        relative_rows=own * everywhere,
    )
    not_finite = int((~torch.isfinite(out).all(-1)).sum())
    largest, of_answer, absolute, least = errors
    return Audit(certificate, rows, largest, of_answer, absolute, least, not_finite)


def _errors(out: Tensor, p: Problem, target: Method, rows: Int[Tensor, "l 3"]) -> Float[Tensor, "4 l"]:
    """The errors of some rows of one head, as `Audit` has them: distance to float64's answer plus its own error, or
    less it.
    """
    b, h, index = int(rows[0, 0]), int(rows[0, 1]), rows[:, 2].to(p.q.device)
    given = widened(out[b, h, index])
    if p.empty:  # The target is zero if there is nothing to attend to.
        return torch.where((given == 0).all(-1), 0.0, math.inf).double().expand(4, -1).cpu()
    group = h // (p.q.shape[1] // p.k.shape[1])
    one = p.head(b, h, group)
    some = one.rows(index)
    # Every number of the inputs, also those that are read as zeros while `torch.set_flush_denormal` is on.
    some = dataclasses.replace(some, q=widened(some.q), k=widened(some.k), v=widened(some.v))
    heads, keys, norms = (slice(b, b + 1), slice(h, h + 1)), (slice(b, b + 1), slice(group, group + 1)), p.norms
    some = some.with_norms(Norms(norms.q[heads][..., index], norms.k[keys], norms.v[keys], norms.slack))
    own_error = target.reference_error(some)
    if own_error is None:
        some = top_at_zero(some)
        own_error = reference_error(some)
    own = own_error[0, 0]
    truth = target.reference(some)[0, 0]
    distance = torch.where(torch.isfinite(given).all(-1), lengths(given - truth), math.inf)
    longest = longest_seen(some, some.norms.v)[0, 0]
    # At most the longest value, and what the reference's products may lose below the smallest normal number.
    unit = norm_floor(longest, norms.slack, p.v.shape[-1])
    lost = (p.k.shape[-2] + 4) * math.sqrt(p.v.shape[-1]) * rounding.tiny(torch.float64)
    beside = torch.where(longest > 0, (distance + lost) / unit, torch.where(distance > 0, math.inf, 0.0))
    # A lower bound on the true answer's length: the reference's less its own error; zero if a row sees no value.
    off = torch.where(longest > 0, own * longest + lost, 0.0)
    absolute = (distance + off) * rounding.SAFETY
    length = (length_floors(truth) - off) / rounding.SAFETY
    to_answer = torch.where(length > 0, absolute / length, torch.where(absolute > 0, math.inf, 0.0))
    least = torch.where(longest > 0, (distance - lost) / longest / rounding.SAFETY - own, beside).clamp(min=0.0)
    return torch.stack([(beside + own) * rounding.SAFETY, to_answer * rounding.SAFETY, absolute, least]).cpu()


def top_at_zero(p: Problem) -> Problem:
    """The same softmax average: without each row's largest visible bias, beside which a sum would lose the logit."""
    if p.bias is None:
        return p
    seen, bias = visible(p), p.bias.double()
    top = (bias if seen is None else torch.where(seen, bias, -math.inf)).amax(-1, keepdim=True)
    shifted = bias - torch.where(top > -math.inf, top, 0.0)
    # Exact zeros, so that what is hidden has no rounding of its own.
    return dataclasses.replace(p, bias=shifted if seen is None else torch.where(seen, shifted, 0.0)).with_norms(p.norms)


def _bias_reach(p: Problem, reach: Float[Tensor, "b h n"]) -> Float[Tensor, "#b #h #n"] | float:
    """How large a bias may be whose key has any weight; `reach` bounds a row's products."""
    if p.bias is None:
        return 0.0
    seen, bias = visible(p), p.bias.double()
    top = (bias if seen is None else torch.where(seen, bias, -math.inf)).amax(-1)
    largest = (bias.abs() if seen is None else torch.where(seen, bias.abs(), 0.0)).amax(-1)
    # A bias further below the row's largest leaves its key a weight below e^-700, in real arithmetic and as computed:
    # a mask of -3e38 hides a key, and its rounding is of no account. `SAFETY` covers such weights.
    return torch.minimum(largest, torch.where(top > -math.inf, top.abs(), 0.0) + 4 * reach + 1000)


def logit_error(p: Problem) -> Float[Tensor, "b h n"]:
    """How far logits that float64 computes may be from the real ones, beside each other."""
    norms = p.norms
    u, d = rounding.unit(torch.float64), p.q.shape[-1]
    key = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
    reach = abs(p.scale) * norms.q * key + rounding.misread_logits(norms.q, key, p.scale, d, torch.float64) / u
    bias = _bias_reach(p, reach)
    product = rounding.gamma(d + 8, u)
    # 8u: the bias without the row's largest, the sum of the two, what is left without the row's top.
    return product * reach + 8 * u * (reach + bias) + 0.5 * product * abs(p.scale) * key**2


def reference_error(p: Problem) -> Float[Tensor, "b h n"]:
    """The rounding of a softmax average in float64 itself."""
    u = rounding.unit(torch.float64)
    return rounding.softmax_l1_bound(logit_error(p) + 8 * u * 746) + 4 * rounding.gamma(p.k.shape[-2] + 8, u)
