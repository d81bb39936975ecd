r"""Certificates of parts make the certificate of the whole: over heads, over a batch, over shards of the keys.

**Answers side by side** (`compose`) keep their bounds row by row, in both units.

**Shards of the keys** (`merge`). Shard i holds some of the keys. Of a row it knows, truly, its normaliser
:math:`Z_i = \sum e^{l_j}` and its answer :math:`o_i`; it reports :math:`\ell_i` and :math:`out_i` with

.. math:: |\ell_i - \ln Z_i| \le \lambda_i, \qquad \|out_i - o_i\| \le E_i, \qquad \|v_j\| \le M_i .

The row's true answer is :math:`o = \sum_i Z_i o_i / \sum_i Z_i`. With :math:`w = softmax(\ell)` the merged answer is
:math:`\sum_i w_i\,out_i`, and with :math:`\rho_i = e^{\lambda_i} - 1` and :math:`M = \max_i M_i` its error is at most

.. math:: \sum_i w_i E_i + \min\Big\{ 2\tanh(\max_i\lambda_i/2)\,M,\;
          \frac{\sum_{i<j} w_i w_j (\rho_i + \rho_j)(M_i + M_j)}{\sum_i w_i e^{-\lambda_i}} \Big\}.

*Proof.* The reported answers err by :math:`\sum w_i E_i` from :math:`o' = \sum w_i o_i`. The true weights are those of
the logarithms :math:`\ell_i + \delta_i` with :math:`|\delta_i| \le \lambda_i`, and :math:`\|o_i\| \le M_i \le M`: the
first term follows [claim softmax-perturbation]. For the second let
:math:`S = \sum w_j e^{\delta_j} \ge \sum w_j e^{-\lambda_j}`. Then
:math:`S (o - o') = \sum_{i,j} w_i w_j e^{\delta_i} (o_i - o_j) = \sum_{i<j} w_i w_j (e^{\delta_i} - e^{\delta_j})
(o_i - o_j)`, and :math:`|e^{\delta_i} - e^{\delta_j}| \le \rho_i + \rho_j`. ∎

The second term forgives what weighs nothing: a shard with a small share of the mass may know its own normaliser badly,
and a shard that is alone need not know it at all.

*Merging is a law.* Every sum over shards is a mean by mass, so two parts with shares a and b of theirs merge by
:math:`x \mapsto a x + b x'`; the sum over pairs by :math:`C \mapsto a^2 C + b^2 C' + ab\,(\text{pairs across})`, where
the pairs across are :math:`\overline{\rho M} + \bar\rho \bar M' + \bar\rho' \bar M + \overline{\rho M}'`; maxima by
maxima; chances of failure add up (the union bound). All of these are associative and commutative, and a part that sees
nothing changes none of them.

*Rounding.* A merge computes in float64. Its products and sums move the answer by a few units of
:math:`\sum w_i \|out_i\| \le \sum w_i (M_i + E_i)`, which is added to the mean of the :math:`E_i`. The weights of two
parts are right to :math:`u(1024 + |\ell|)` in their logarithms, the error :math:`\ell` is stored with: the drift. It
adds up along the tree and moves the answer by at most :math:`2\tanh(drift/2) M` more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.core import SOFTMAX, Certificate, weakest
from avow.core.certify import relative_errors
from avow.errors import InputError, NonFiniteError, RangeError, ShapeError
from avow.numerics import rounding
from avow.numerics.norms import length_floors, lengths, norm_floor

_U = rounding.unit(torch.float64)

# A normaliser worse known than by this, in nats, is taken for unknown; e^16 times a value of 1e300 is still a number.
_UNKNOWN = 16.0
_LARGEST = 1e300

# Weights below float64's smallest number vanish, and so do products below it: at most e^32 of either is lost.
_LOST = 1e-290

_OF_SHARES = "speaks of a share of the rows and not of any one"


def compose(parts: Sequence[Certificate], dim: int) -> Certificate:
    """The certificate of answers concatenated along an axis of their rows: as strong as the weakest part.

    Statistical promises are made row by row, so the smallest confidence holds for each. Sampled promises speak of
    all rows at once: their failures add up, and coverage is averaged by rows.
    """
    if not parts:
        raise InputError("parts", "[]", "must hold at least one certificate", "pass the certificates of the parts")
    targets = {part.target for part in parts}
    if len(targets) > 1:
        named = ", ".join(sorted(targets))
        raise InputError("parts", named, "must approximate one target", "compose certificates of one mechanism")
    kinds = {part.kind for part in parts}
    if {"statistical", "sampled"} <= kinds:
        rule = "speak of single rows and of shares of rows, which do not add up"
        raise InputError("parts", "statistical and sampled", rule, "audit the whole answer instead")
    least = weakest(parts)
    rows, own = (torch.cat([getattr(part, name) for part in parts], dim) for name in ("rows", "relative_rows"))
    sizes = [part.rows.numel() for part in parts]
    coverage = sum(part.coverage * size for part, size in zip(parts, sizes, strict=True)) / max(sum(sizes), 1)
    confidence = min(part.confidence for part in parts)
    if least.kind == "sampled":
        confidence = max(0.0, 1 - sum(1 - part.confidence for part in parts))
    costs = [part.cost for part in parts if part.cost is not None]
    return dataclasses.replace(
        least,
        method=" + ".join(dict.fromkeys(part.method for part in parts)),
        parameters=least.parameters if len({part.method for part in parts}) == 1 else {},
        bound=max(part.bound for part in parts),
        rows=rows,
        confidence=confidence,
        coverage=coverage if sum(sizes) else 1.0,
        rounding=all(part.rounding for part in parts),
        assumptions=tuple(dict.fromkeys(sentence for part in parts for sentence in part.assumptions)),
        cost=sum(costs[1:], costs[0]) if len(costs) == len(parts) else None,
        relative=max(part.relative for part in parts),
        relative_rows=own,
    )


def select(certificate: Certificate, index: Tensor | Sequence[int], dim: int) -> Certificate:
    """The certificate of some of the rows of an answer, along an axis of them and in this order."""
    places = torch.as_tensor(index, dtype=torch.long, device=certificate.rows.device)
    rows, own = (x.index_select(dim, places) for x in (certificate.rows, certificate.relative_rows))
    if certificate.kind == "sampled" and certificate.coverage < 1 and rows.numel() < certificate.rows.numel():
        raise InputError("kind of certificate", "sampled", _OF_SHARES, "audit the answer's part instead")
    bound, relative = (float(x.amax()) if x.numel() else 0.0 for x in (rows, own))
    return dataclasses.replace(certificate, rows=rows, bound=bound, relative=relative, relative_rows=own)


@dataclass(frozen=True, eq=False)
class Partial:
    """What some of the keys answer to every row, and all it takes to merge that with what other keys answer.

    Make one with `Partial.of`. `means`, weighted by mass: of the errors, of the longest values, of the normalisers'
    relative errors ρ, of ρ times the longest value, of e^−λ.
    """

    out: Float64[Tensor, "*rows e"]
    lse: Float64[Tensor, "*rows"]
    longest: Float64[Tensor, "*rows"]
    means: Float64[Tensor, "5 *rows"]
    pairs: Float64[Tensor, "*rows"]
    unsure: Float64[Tensor, "*rows"]
    drift: Float64[Tensor, "*rows"]
    slack: float = 0.0
    words: Certificate | None = None

    @staticmethod
    def of(
        out: Float[Tensor, "*rows e"],
        lse: Float[Tensor, "*rows"],
        lse_error: Float[Tensor, "*#rows"] | float,
        longest: Float[Tensor, "*rows"],
        certificate: Certificate,
        slack: float = 0.0,
    ) -> Partial:
        """What one shard reports.

        `lse` is the logarithm of the sum of exponentials of the logits a row sees, −inf if it sees none, right to
        `lse_error`; `longest` is at least the largest norm of the values a row sees, and at most 1 + `slack` of it.
        A statistical `certificate` speaks of the bound and of `lse_error` at once.
        """
        if certificate.target != SOFTMAX:
            rule = "is not a mixture of the shards' answers"
            raise InputError("target of certificate", certificate.target, rule, f"merge shards of {SOFTMAX}")
        if certificate.kind == "sampled":
            raise InputError("kind of certificate", "sampled", _OF_SHARES, "audit the merged answer instead")
        stray = torch.as_tensor(lse_error, dtype=torch.float64, device=out.device).expand(lse.shape)
        _check_numbers(out.detach(), lse.detach(), stray, longest, certificate.rows, slack)
        seen = lse > -math.inf
        if not bool(seen.any()):
            return Partial.nothing(out.shape, out.device)
        wide = torch.where(seen.unsqueeze(-1), out, 0.0).double()
        with torch.no_grad():
            size = torch.where(seen, longest, 0.0).double()
            stray = torch.where(seen, stray, 0.0)
            # Without any certificate, answer and truth are at most the sum of their lengths apart.
            claimed = torch.nan_to_num(certificate.rows.double() * size, nan=math.inf, posinf=math.inf)
            claimed = claimed + torch.where(size > 0, rounding.tiny(torch.float64), 0.0)
            error = torch.minimum(torch.where(seen, claimed, 0.0), lengths(wide) + size)
            known = stray.clamp(max=_UNKNOWN)
            ratio, floor = torch.expm1(known), torch.where(seen, torch.exp(-known), 0.0)
            means = torch.stack([error, size, ratio, ratio * size, floor])
        none, no_rows = torch.zeros_like(size), torch.zeros(0, dtype=torch.float64, device="cpu")
        # Its bounds live on in the means; what travels further is what it says beside them.
        words = dataclasses.replace(certificate, rows=no_rows, relative=math.inf, relative_rows=no_rows)
        return Partial(wide, lse.double(), size, means, none, stray, none, slack, words)

    @staticmethod
    def nothing(shape: Sequence[int], device: torch.device | str | None = None) -> Partial:
        """What no key answers to rows of that shape (…, e): it changes nothing it is merged with."""
        out = torch.zeros(*shape, dtype=torch.float64, device=device)
        none, means = out.new_zeros(shape[:-1]), out.new_zeros(5, *shape[:-1])
        return Partial(out, torch.full_like(none, -math.inf), none, means, none, none, none)

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[Float[Tensor, "*rows e"], Certificate]:
        """The answer in a type, rounded to it once, and its certificate."""
        out = rounding.saturating_cast(self.out, dtype)
        with torch.no_grad():
            rows, own = self._bounds(lengths(self.out - out.double()), out.detach())
        bound, relative = (float(x.amax()) if x.numel() else 0.0 for x in (rows, own))
        words = self.words
        if words is None:
            assumed = ("there was nothing to attend to",)
            words = Certificate("nothing", {}, SOFTMAX, "deterministic", bound, rows, assumptions=assumed)
        return out, dataclasses.replace(words, bound=bound, rows=rows, relative=relative, relative_rows=own)

    def _bounds(
        self, moved: Float64[Tensor, "*rows"], out: Float[Tensor, "*rows e"]
    ) -> tuple[Float64[Tensor, "*rows"], Float64[Tensor, "*rows"]]:
        """The theorem above for an answer moved so far since, relative to the longest value and to the true answer."""
        error, _, _, _, floor = self.means
        all_alike = rounding.softmax_l1_bound(self.unsure + self.drift) * self.longest
        by_mass = torch.where(floor > 0, self.pairs / floor, 0.0) + rounding.softmax_l1_bound(self.drift) * self.longest
        # Each merge rounds every term by a few units: far below what SAFETY leaves for it.
        apart = torch.minimum(error + torch.minimum(all_alike, by_mass), lengths(self.out) + self.longest)
        absolute = (apart + moved) * rounding.SAFETY
        unit = norm_floor(self.longest, self.slack, self.out.shape[-1])
        beyond = torch.where(absolute > 0, math.inf, 0.0)
        rows = torch.where(unit > 0, absolute / unit * rounding.SAFETY, beyond)
        return rows, relative_errors(absolute, length_floors(out))


def merge(a: Partial, b: Partial) -> Partial:
    """What the keys of both answer, with a bound that holds: the order and the grouping of merges do not matter."""
    if a.out.shape != b.out.shape:
        sizes = f"{tuple(a.out.shape)} and {tuple(b.out.shape)}"
        raise ShapeError("shapes of a and b", sizes, "must be equal", "let every shard answer the same queries")
    both = (a.lse > -math.inf) & (b.lse > -math.inf)
    gap = torch.where(both, a.lse - b.lse, 0.0)
    left = torch.where(both, torch.sigmoid(gap), (a.lse > -math.inf).double())
    right = torch.where(both, torch.sigmoid(-gap), (b.lse > -math.inf).double())
    top = torch.maximum(a.lse, b.lse)
    lse = torch.where(both, top + torch.log1p(torch.exp(-gap.abs())), top)
    out = left.unsqueeze(-1) * a.out + right.unsqueeze(-1) * b.out
    with torch.no_grad():
        longest, unsure = torch.maximum(a.longest, b.longest), torch.maximum(a.unsure, b.unsure)
        means = left * a.means + right * b.means
        rounded = 32 * _U * (means[0] + means[1]) + _LOST * (1 + longest)
        means[0] += torch.where(both & (longest > 0), rounded, 0.0)
        drift = torch.maximum(a.drift, b.drift) + torch.where(both, _U * (1024 + lse.abs()), 0.0)
        unknown = both & (unsure > _UNKNOWN) | a.pairs.isinf() | b.pairs.isinf()
        _, size, ratio, product, _ = a.means
        _, other_size, other_ratio, other_product, _ = b.means
        # The mean of (ρ + ρ')(M + M') over pairs of a shard of a and a shard of b.
        across = (product + other_product) + (ratio * other_size + other_ratio * size)
        pairs = left.square() * a.pairs + right.square() * b.pairs + left * right * across
        pairs = torch.where(unknown, math.inf, pairs)
    words = _joined(a.words, b.words)
    return Partial(out, lse, longest, means, pairs, unsure, drift, max(a.slack, b.slack), words)


def _joined(a: Certificate | None, b: Certificate | None) -> Certificate | None:
    """All that two certificates say beside their bounds; both hold at once with the chance that neither fails."""
    if a is None or b is None:
        return b if a is None else a
    confidence = max(0.0, a.confidence + b.confidence - 1)
    if a.confidence < 1 and b.confidence < 1:
        confidence = max(0.0, confidence - 2 * _U)  # the sum above may have been rounded up
    return dataclasses.replace(
        weakest((a, b)),
        method=_united(a.method, b.method, " + "),
        parameters=a.parameters if a.parameters == b.parameters else {},
        confidence=confidence,
        rounding=a.rounding and b.rounding,
        assumptions=tuple(sorted({*a.assumptions, *b.assumptions})),
        reason=_united(a.reason, b.reason, "; "),
        cost=None if a.cost is None or b.cost is None else a.cost + b.cost,
    )


def _united(a: str, b: str, separator: str) -> str:
    """The phrases of both, each once, in an order that does not depend on who came first."""
    return separator.join(sorted({*a.split(separator), *b.split(separator)} - {""}))


def _check_numbers(out: Tensor, lse: Tensor, stray: Tensor, longest: Tensor, rows: Tensor, slack: float) -> None:
    for name, x in (("lse", lse), ("longest", longest), ("rows of certificate", rows)):
        if x.shape != out.shape[:-1]:
            rule = f"must be {tuple(out.shape[:-1])}, one number for each row of out"
            raise ShapeError(f"shape of {name}", tuple(x.shape), rule, "report on the rows that were answered")
    seen = lse != -math.inf
    finite = torch.isfinite(lse) | ~seen
    if not bool(finite.all()):
        rule = "must be finite, or -inf for no key"
        raise NonFiniteError("lse", float(lse[~finite][0]), rule, "remove NaN and +inf from q and k")
    if not bool(torch.isfinite(out[seen]).all()):
        raise NonFiniteError("out", "nan or inf", "must be finite where a key is seen", "remove NaN and inf from v")
    for name, x in (("lse_error", stray), ("longest", longest), ("rows of certificate", rows)):
        wrong = seen & ~(x >= 0)
        if bool(wrong.any()):
            rule = "must be a number, zero or more"
            raise InputError(name, float(x[wrong][0]), rule, "report bounds of what was computed")
    for name, x in (("out", out[seen].abs()), ("longest", longest[seen])):
        if x.numel() and (most := float(x.amax())) > _LARGEST:
            raise RangeError(f"largest {name}", f"{most:.3g}", f"must be at most {_LARGEST:g}", "scale v down")
    if not 0 <= slack < 1:
        raise InputError("slack", slack, "must be at least 0 and below 1", "use the slack of the norms you took")
