r"""Softmax weights by the Taylor polynomial of exp, for heads whose logits hardly vary. Linear in the length.

Softmax does not change if all keys are shifted by one vector c. With :math:`t_{ij} = scale \cdot q_i \cdot (k_j - c)`
the weights are :math:`e^{t_{ij}}`, and the polynomial :math:`p(t) = 1 + t` or :math:`1 + t + t^2/2` stands for them:
a product of d + 1, or (d + 1)(d + 2)/2, features of the query and of the key. With the remainders
:math:`r_{ij} = e^{t_{ij}} - p(t_{ij})`, weights :math:`w_j` of the keys' biases and :math:`\hat D_i = \sum_j w_j
p(t_{ij})`, the error of a row is, exactly,

.. math:: o^*_i - out_i = \frac{\sum_j w_j r_{ij} (v_j - o^*_i)}{\hat D_i}   [claim ratio-error]

so it is at most :math:`S_i (V + \|o^*_i\|)`, V the longest value and :math:`S_i = \sum_j w_j |r_{ij}| / \hat D_i`. If
no logit exceeds :math:`\rho_i = |scale| \|q_i\| \max_j \|k_j - c\|`, remainders are at most

.. math:: |r| \le t^2 \frac{e^\rho - 1 - \rho}{\rho^2} \quad \text{and} \quad
          |r| \le t^2 \frac{e^\rho - 1 - \rho - \rho^2/2}{\rho^2}

for degrees 1 and 2, so that S follows from the mean square of the row's logits. That is measured. For degree 1 the keys
are summed like values, and :math:`\sum_j w_j t_{ij}^2 = \sum_j w_j p(t_{ij}) t_{ij} - \hat D_i + \sum_j w_j`. For
degree 2 it is :math:`2(\hat D_i - \sum_j w_j - \sum_j w_j t_{ij})`, and the last sum is the product of q with a sum of
keys.

The shift is the mean of the keys that all rows see. Causal rows must not learn of later keys by it, and have none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from avow.core import BoundEstimate, Computed, Cost, Method, Norms, Problem, Promise, Sizes
from avow.numerics import heads, rounding, scan
from avow.numerics.features import sample_step
from avow.numerics.masks import masked, row_tiles, visible_max
from avow.numerics.norms import lengths, norm_floor, slack
from avow.numerics.softmax import softmax_average
from avow.parameters import from_to, param

# A bound is guessed from about so many rows and keys, from so many of the longest rows, and of causal ones the first.
_SAMPLE, _LONGEST, _FIRST = 128, 64, 64


class Trace(NamedTuple):
    """What the certificate must know of the run."""

    shift: Float[Tensor, "b g 1 d"]
    normaliser: Float[Tensor, "b h n"]
    unit_log: Float[Tensor, "b h n"]
    """What the normaliser is relative to."""
    moment: Float[Tensor, "b h n"]
    """Σ w p(t) t / D̂ of each row for degree 1, Σ w t / D̂ for degree 2; nan if it was not measured."""
    steps: int


@dataclass(frozen=True)
class Polynomial(Method):
    """Softmax attention by the Taylor polynomial of exp around centred keys."""

    name: ClassVar[str] = "polynomial"
    summary: ClassVar[str] = "Taylor polynomial of exp around the mean key; linear, for logits that hardly vary"
    averages: ClassVar[bool] = True

    degree: int = param(1, from_to(1, 2), "degree of the polynomial")

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p = heads.expand_gqa(problem)
        wide = heads.linear_type(p)
        values, size = heads.scaled_values(p, wide)
        shift = _mean_key(p, wide)
        keys = p.k.to(wide) - shift
        rows = p.q.to(wide) * p.scale
        # Keys are summed like values: what rows collect of them tells how much their logits vary.
        held = torch.cat([values, keys], -1) if self.degree == 1 else values
        if p.mask_kind == "full":
            sums, unit, first, steps = *self._pairwise(p, rows, keys, held), p.k.shape[-2]
        else:
            sums, unit, steps = self._summed(p, rows, keys, held)
            first = None if self.degree == 1 else _first_moments(p, rows.detach(), keys.detach(), unit.detach())
        assert sums.normaliser is not None
        e, groups = values.shape[-1], p.k.shape[1]
        if first is None:
            moment = (sums.out.detach()[..., e:] * heads.grouped(rows.detach(), groups)).sum(-1, keepdim=True)
        else:
            moment = first / sums.normaliser.detach()
        normaliser, unit_log, moment = (
            heads.ungrouped(x.detach().expand_as(sums.normaliser))[..., 0] for x in (sums.normaliser, unit, moment)
        )
        # A row whose weights add up to next to nothing may be anything, and its bound says so.
        out = heads.rescaled(heads.within_ball(sums.out[..., :e], heads.longest_in_groups(p, values)), size)
        return Computed(heads.cast_output(p, out), Trace(shift.detach(), normaliser, unit_log, moment, steps))

    def _summed(self, p: Problem, rows: Tensor, keys: Tensor, held: Tensor) -> tuple[scan.Sums, Tensor, int]:
        """Averages of what is held, the logs of what their normalisers are relative to, and in how many steps."""
        (h, queries), groups = p.q.shape[1:3], p.k.shape[1]
        added, seen = heads.key_log(p, rows.dtype), heads.key_seen(p)

        def keys_of(span: slice) -> scan.Keys:
            factor = self._features(keys[..., span, :])
            log = factor.new_zeros(*factor.shape[:-1], 1)
            if added is not None:
                log = log + added[..., span, :]
            return scan.Keys(log, factor, None if seen is None else seen[..., span, :])

        def rows_of(span: slice) -> Tensor:
            return heads.grouped(self._features(rows[..., span, :]) * self._coefficients(rows), groups)

        if p.causal:
            start = scan.nothing(held, self.count(keys.shape[-1]), 1)
            sums, state = scan.causal(keys_of, lambda tile: rows_of(tile.rows), held, h, queries, start, True)
            assert sums.unit_log is not None
            return sums, sums.unit_log, state.steps
        whole = scan.settle(scan.absorb(keys_of, held, self.count(keys.shape[-1])))
        return scan.collect(rows_of, h, queries, whole, normalise=True), whole.top.unsqueeze(2), whole.steps

    def _pairwise(
        self, p: Problem, rows: Tensor, keys: Tensor, held: Tensor
    ) -> tuple[scan.Sums, Tensor, Tensor | None]:
        """Row by row against every key, for masks that differ by row; with their first moments for degree 2."""
        (h, n), s, groups = p.q.shape[1:3], p.k.shape[-2], p.k.shape[1]
        keys, held, parts = heads.per_query_head(keys, h), heads.per_query_head(held, h), []
        for span in row_tiles(n, p.q.shape[0] * h * s):
            added = masked(p, rows.new_zeros(1, 1, 1, s), span)
            top = added.detach().amax(-1, keepdim=True)
            top = top.masked_fill(top == -math.inf, 0.0)
            t, seen = rows[..., span, :] @ keys.mT, torch.exp(added - top)
            weights = (1 + t + (0.5 * t * t if self.degree == 2 else 0.0)) * seen
            norm = weights.sum(-1, keepdim=True)
            out = (weights @ held) / torch.where(norm == 0, 1.0, norm)
            first = (t.detach() * seen.detach()).sum(-1, keepdim=True)
            parts.append(tuple(heads.grouped(x, groups) for x in (out, norm, top.expand_as(norm), first)))
        out, norm, top, first = (torch.cat(columns, -2) for columns in zip(*parts, strict=True))
        return scan.Sums(out, norm, None), top, first if self.degree == 2 else None

    def count(self, dim: int) -> int:
        """How many features a query and a key have."""
        return dim + 1 if self.degree == 1 else (dim + 1) * (dim + 2) // 2

    def _features(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead m"]:
        """One, x, and for degree 2 the products of any two of its entries."""
        one = x.new_ones(*x.shape[:-1], 1)
        if self.degree == 1:
            return torch.cat([one, x], -1)
        first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        return torch.cat([one, x, x[..., first] * x[..., second]], -1)

    def _coefficients(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "m"]:
        """What each product of features counts: t²/2 has half of every square, and each mixed product once."""
        d = x.shape[-1]
        plain = x.new_ones(self.count(d))
        if self.degree == 2:
            first, second = torch.triu_indices(d, d, device=x.device)
            plain[1 + d :] = torch.where(first == second, 0.5, 1.0)
        return plain

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms = heads.expand_gqa(problem), problem.norms
        t: Trace = computed.trace
        (s, d), wide = p.k.shape[-2:], t.shift.dtype
        products = rounding.products(wide, p.q.device.type)
        row, key = abs(p.scale) * norms.q, self._longest_key(p, t)  # (b, h, n) and (b, h, #n)
        # Logits as they are computed may be a little longer.
        reach = row * key * (1 + 8 * products.u)
        # Each term of a sum is a weight (an exponential of what a mask adds), a value, a feature of the key (a
        # difference, perhaps squared) and one of the row; rounded sums over keys, then over features. Narrow products
        # round their entries, and a term goes through three of them.
        sums = products.dot(scan.depth(s, t.steps) + self.count(d) + 24) + 6 * products.entry
        if p.bias is not None:
            exponent = float(p.bias.abs().amax()) + rounding.underflow_log(wide) + (1 + t.steps) * rounding.EXP_ULPS
            sums += math.expm1(min(4 * products.u * exponent, 99.0))
        positive = t.normaliser > 0
        share = (heads.visible_log_sum(p, _key_logs(p)) - t.unit_log.double()).exp() / t.normaliser.double()  # Σ w / D̂
        size = 1 + reach + (0.5 * reach.square() if self.degree == 2 else 0.0)
        apart = sums * share * size  # how far D̂ is from what it should be, relative to it; and sums of values, from V
        sure = 1 - apart
        # The mean square of logits; what is not known of it is at most the largest square.
        square = t.moment.double() - 1 + share if self.degree == 1 else 2 * (1 - share - t.moment.double())
        square = (square + 1e-12 * share + 4 * apart * (1 + reach)).clamp(min=0.0).nan_to_num(math.inf)
        square = torch.minimum(square, share * reach.square())
        left = square * _remainder(reach, self.degree) / sure.clamp(min=1e-12)  # S
        # ‖o*‖ ≤ ‖out‖ + error, and never more than V.
        longest = heads.longest_seen(p, norms.v)
        given = lengths(computed.out)  # squares of faint values would vanish
        least = norm_floor(longest, norms.slack, p.v.shape[-1])
        length = torch.where(least > 0, given / torch.where(least > 0, least, 1.0), 1.0)
        arithmetic = 2 * apart * (1 + left) / sure.clamp(min=1e-12)
        final = rounding.unit(p.q.dtype)
        near = (left * (1 + length) + arithmetic + 2 * final) / (1 - left).clamp(min=1e-12)
        rows = torch.where(left < 0.5, torch.minimum(2 * left + arithmetic, near), 2 * left + arithmetic)
        rows = torch.where(positive & (sure > 0), rows.nan_to_num(math.inf), math.inf)
        if p.kernel == "rbf":
            own = 0.5 * abs(p.scale) * norms.most[1] ** 2
            rows = rows + rounding.softmax_l1_bound(rows.new_tensor(2 * heads.distance_rounding(p, own)))
        # What is too small for the type is lost before it is multiplied by the row's features, or by the key's.
        lost = heads.underflow_bound(problem, s * self.count(d), wide)
        lost = (
            lost * (1 + math.sqrt(d) * row) ** 2 * (1 + math.sqrt(d) * key) ** 2 / t.normaliser.double().clamp(1e-30, 1)
        )
        rows = (rows * (1 + final) + final + lost).nan_to_num(math.inf)
        return Promise("deterministic", heads.mask_bounds(p, rows * rounding.SAFETY), assumptions=self._assumptions(p))

    @staticmethod
    def _assumptions(p: Problem) -> tuple[str, ...]:
        return () if p.bias is None else ("exp is right to 64 ulp",)

    def _longest_key(self, p: Problem, t: Trace) -> Float[Tensor, "b h #n"]:
        """An upper bound on the length of the shifted keys that each row sees."""
        if bool((t.shift == 0).all()):
            lengths = p.norms.k
            lengths = lengths if lengths.shape[1] == p.k.shape[1] else heads.per_query_head(lengths, p.k.shape[1])
        else:
            lengths = torch.linalg.vector_norm(p.k.double() - t.shift.double(), dim=-1)
            lengths = lengths * (1 + slack(p.k.shape[-1], torch.float64)) + 1e-150
        return visible_max(p, heads.per_query_head(lengths, p.q.shape[1]))

    def cost(self, sizes: Sizes) -> Cost:
        z, m = sizes, self.count(sizes.dim)
        item = 8 if z.biased else rounding.accumulator(z.dtype).itemsize
        rows, keys = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys
        # For degree 1 keys are summed like values.
        wider = dataclasses.replace(z, value_dim=z.value_dim + (z.dim if self.degree == 1 else 0))
        if z.mask == "full":
            pairs = rows * z.keys
            flops = 2 * pairs * (z.dim + wider.value_dim)
            return Cost(flops, 8 * pairs, 24, 6 * item * min(pairs, 2**24) + item * keys * (2 * z.dim + z.value_dim))
        launches = 16 + scan.tile_count(z, m) * (30 if z.causal else 14)
        work = (rows + keys) * (3 * m + 3 * z.dim + 3 * wider.value_dim)
        held = item * (keys * (2 * z.dim + z.value_dim) + rows * z.dim) + (8 * keys * z.dim if self.degree == 2 else 0)
        return Cost(
            scan.pass_flops(wider, m, normalise=True, shared=True),
            work,
            launches,
            held + scan.peak_bytes(wider, m, item, m),
            item / 4,
        )

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Polynomial]:
        yield from (cls(degree) for degree in (1, 2))

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        """The promise on a sample of rows and keys: a cheap guess that is seldom too small."""
        if problem.mask_kind == "full":
            reason = "a mask that differs by row leaves nothing to share between rows"
            return BoundEstimate(math.inf, "none", True, reason)
        sample = _sampled(problem)
        rows = self.promise(sample, self.compute(sample), confidence).rows
        bound = float(rows.amax()) if rows.numel() else 0.0
        reason = "" if bound < 2 else "logits vary too much for a polynomial"
        return BoundEstimate(bound, "deterministic", False, reason)


def _remainder(reach: Tensor, degree: int) -> Tensor:
    """The most that |exp(t) − p(t)| is of t², for |t| up to these: (e^ρ − 1 − ρ)/ρ², or (e^ρ − 1 − ρ − ρ²/2)/ρ²."""
    # Differences of nearly equal numbers; below one, Taylor's own terms, of which 20 leave nothing.
    series, term = torch.zeros_like(reach), torch.full_like(reach, 0.5)
    small = reach.clamp(max=1.0)
    for power in range(2, 22):
        if power > degree:
            series = series + term
        term = term * small / (power + 1)
    large = reach.clamp(min=1.0)
    rest = large.exp() - 1 - large - (0.5 * large.square() if degree == 2 else 0.0)
    return torch.where(reach <= 1, series, rest / large.square()) * (1 + 1e-12)


def _first_moments(p: Problem, rows: Tensor, keys: Tensor, unit: Tensor) -> Float[Tensor, "b g r n 1"]:
    """Σ w t of each row, relative to its unit; nan for causal rows with biases, whose units differ."""
    added, groups = heads.key_log(p, torch.float64), p.k.shape[1]
    if p.causal and p.bias is not None:
        return unit.new_full(unit.shape, math.nan)
    held = keys.double()
    if added is not None:
        held = held * (added if p.causal else added - unit[..., 0, :, :]).exp()
    if p.causal:
        n, s = p.q.shape[-2], keys.shape[-2]
        sums = held[..., : min(n, s), :].cumsum(-2)
        sums = torch.cat([sums, sums[..., -1:, :].expand(*sums.shape[:-2], max(n - s, 0), -1)], -2)
    else:
        sums = held.sum(-2, keepdim=True)
    return (heads.grouped(rows, groups) * sums.unsqueeze(2)).sum(-1, keepdim=True)


def _mean_key(p: Problem, dtype: torch.dtype) -> Float[Tensor, "b g 1 d"]:
    """The mean of the keys that rows see; zero if that differs from row to row."""
    if p.causal or p.mask_kind == "full":
        return p.k.new_zeros(*p.k.shape[:2], 1, p.k.shape[-1], dtype=dtype)
    seen = heads.key_seen(p)
    if seen is None:
        return p.k.to(dtype).mean(-2, keepdim=True)
    shown = torch.where(seen, p.k.to(dtype), 0.0).sum(-2, keepdim=True)
    return shown / seen.sum(-2, keepdim=True).clamp(min=1)


def _key_logs(p: Problem) -> Float[Tensor, "b g s"]:
    """The logs of what keys weigh in all rows alike, −inf if they are hidden; what differs by row is in the mask."""
    zero = torch.zeros(p.k.shape[:-1], dtype=torch.float64, device=p.k.device)
    if p.mask_kind == "full":
        return zero
    added = heads.key_log(p, torch.float64)
    return zero if added is None else zero + added[..., 0]


def _sampled(problem: Problem) -> Problem:
    """Rows and keys of which the largest bound is likely to be known: a problem without its order, as masks have it.

    Rows are taken at equal distances, with the longest queries and, if causal, the first rows: these see few keys,
    whose mean square may be large. Keys are taken at equal distances; each counts as long as the longest up to the
    next one.
    """
    p = heads.expand_gqa(problem)
    n, s, wide = p.q.shape[-2], p.k.shape[-2], heads.linear_type(p)
    first = _FIRST if p.causal else 0
    keys, common = (_every(length, first, p.q.device) for length in (s, n))
    longest = p.norms.q.topk(min(_LONGEST, n), -1).indices  # (b, h, r)
    rows = torch.cat([common.expand(*longest.shape[:2], -1), longest], -1)
    shifted = p.k.to(wide) - _mean_key(p, wide)
    lengths = torch.linalg.vector_norm(shifted.double(), dim=-1)
    seen = heads.key_seen(p)
    lengths = (lengths if seen is None else torch.where(seen[..., 0], lengths, 0.0)).cummax(-1).values
    allowed = keys <= rows.unsqueeze(-1) if p.causal else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=p.q.device)
    if p.allowed is not None:
        allowed = allowed & p.allowed[..., keys]
    q = p.q.gather(2, rows.unsqueeze(-1).expand(*rows.shape, p.q.shape[-1]))
    bias = None if p.bias is None else p.bias[..., keys]
    # The mask is one that differs by row, for which keys are not shifted: they have been.
    allowed = allowed.expand(*rows.shape, len(keys))
    sample = Problem(
        q, shifted[..., keys, :], p.v[..., keys, :], allowed, bias, False, p.scale, False, p.kernel, p.leading
    )
    ends = torch.cat([keys[1:], keys.new_tensor([s])]) - 1
    values = heads.per_query_head(problem.norms.v, p.k.shape[1])[..., keys]
    return sample.with_norms(Norms(p.norms.q.gather(2, rows), lengths[..., ends], values, problem.norms.slack))


def _every(length: int, first: int, device: torch.device) -> Int[Tensor, "r"]:
    """Some positions: the first ones, and others at equal distances."""
    first = min(first, length)
    rest = torch.arange(first, length, sample_step(length - first, _SAMPLE), device=device)
    return torch.cat([torch.arange(first, device=device), rest])
