r"""Low rank by landmarks: a few keys stand for all, and the positive-definite residual says what that costs.

Softmax weights are a Gaussian kernel in disguise: :math:`e^{q\cdot k} = e^{\|q\|^2/2}\, G(q,k)\, e^{\|k\|^2/2}` with
:math:`G(x,y) = e^{-\|x-y\|^2/2}`; the first factor cancels in the row, the last is a weight of the key. Landmarks Z
among the keys give features :math:`\varphi(x) = B\,G(Z,x)`, and what they miss obeys Cauchy–Schwarz, so with
:math:`\rho(x) = 1 - \|\varphi(x)\|^2` every row has the proved error

.. math:: \frac{\|out_i - o^*_i\|}{\max_j\|v_j\|} \le
          \frac{2\sqrt{\rho(q_i)} \sum_j w_j \sqrt{\rho(k_j)}}{\hat D_i}

All of it is float64: the residual is a difference of nearly equal numbers, and its square root forgives nothing.
Landmarks are chosen among keys of the whole sequence, so a causal row's error (never its target) depends on keys it may
not see: not for training language models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import BoundEstimate, Computed, Cost, Method, Norms, Problem, Promise, Sizes
from avow.errors import ParameterError
from avow.numerics import cholesky, heads, rounding, scan
from avow.numerics.cholesky import LandmarkFeatures, Rows, WeightedKeys
from avow.numerics.features import Frame, centred_frame, sample_step
from avow.numerics.masks import masked, row_tiles
from avow.numerics.softmax import softmax_average
from avow.parameters import from_to, param

_U = rounding.unit(torch.float64)


class Trace(NamedTuple):
    """What the certificate must know of the run, per key head and per row."""

    key_log: Float[Tensor, "b g s"]
    key_residual: Float[Tensor, "b g s"]
    rows: Rows
    normaliser: Float[Tensor, "b h n"]
    unit_log: Float[Tensor, "b h n"]
    slack: Float[Tensor, "b g"]
    key_radius: Float[Tensor, "b g"]
    frame: Frame
    steps: int


@dataclass(frozen=True)
class LowRank(Method):
    """Softmax attention through landmark keys."""

    name: ClassVar[str] = "low_rank"
    summary: ClassVar[str] = "landmark keys by randomised pivoted Cholesky; linear, a bound for every row"
    averages: ClassVar[bool] = True
    random: ClassVar[bool] = True
    selects_landmarks: ClassVar[bool] = True

    rank: int = param(64, from_to(1, 2**16), "landmarks per head")

    def check(self, sizes: Sizes) -> None:
        if sizes.keys and self.rank > sizes.keys:
            rule = f"exceeds {sizes.keys} keys"
            raise ParameterError("low_rank: rank", self.rank, rule, f'use rank<={sizes.keys} or method="exact"')

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p = heads.expand_gqa(problem)
        keys = _weighted(p)
        radius = torch.linalg.vector_norm(keys.points.detach(), dim=-1).amax(-1)
        with torch.no_grad():
            chosen = cholesky.pivots(keys.points, keys.log[..., 0], self.rank, generator)
        landmarks = keys.points.gather(-2, chosen.unsqueeze(-1).expand(-1, -1, -1, p.q.shape[-1]))
        features = LandmarkFeatures(p, keys, cholesky.factor(landmarks, radius))
        values, size = heads.scaled_values(p, torch.float64)
        sums, unit, steps = self._summed(p, features, values)
        assert sums.normaliser is not None
        out = heads.cast_output(
            p, heads.rescaled(heads.within_ball(sums.out, heads.longest_in_groups(p, values)), size)
        )
        normaliser, unit_log = (
            heads.ungrouped(x.detach().expand_as(sums.normaliser))[..., 0] for x in (sums.normaliser, unit)
        )
        key_log, slack = keys.log.detach()[..., 0], features.factor.slack.detach()
        known = key_log, features.key_residual, features.rows, normaliser, unit_log
        return Computed(out, Trace(*known, slack, radius, keys.frame, steps))

    def _summed(
        self, p: Problem, features: LandmarkFeatures, values: Float[Tensor, "b g s e"]
    ) -> tuple[scan.Sums, Tensor, int]:
        """Averages of values, the logs of what their normalisers are relative to, and in how many steps."""
        h, queries = p.q.shape[1:3]
        if p.mask_kind == "full":
            return *_pairwise(p, features, values), p.k.shape[-2]  # one sum, in any order
        if p.causal:
            start = scan.nothing(values, self.rank, 1)
            sums, state = scan.causal(
                features.of_keys, lambda tile: features.of_rows(tile.rows), values, h, queries, start, True
            )
            assert sums.unit_log is not None
            return sums, sums.unit_log, state.steps
        whole = scan.settle(scan.absorb(features.of_keys, values, self.rank))
        sums = scan.collect(features.of_rows, h, queries, whole, normalise=True)
        return sums, whole.top.unsqueeze(2), whole.steps

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms = heads.expand_gqa(problem), problem.norms
        t: Trace = computed.trace
        h, s = p.q.shape[1], p.k.shape[-2]
        key_radius, slack = (heads.per_query_head(x.unsqueeze(-1), h) for x in (t.key_radius, t.slack))
        moved = rounding.softmax_l1_bound(2 * self._logit_error(p, norms, t, key_radius))
        missed, mass = (heads.visible_log_sum(p, x) for x in (t.key_log + 0.5 * t.key_residual.log(), t.key_log))
        # Everything below is relative to the unit of the normaliser and to the row's nearest landmark.
        left = (missed - t.unit_log - t.rows.log).exp() * t.rows.residual.sqrt()
        depth = scan.depth(s, t.steps) + self.rank
        arithmetic = (slack + rounding.gamma(4 * depth, _U)) * (1 + t.rows.norm) * (mass - t.unit_log).exp()
        sure = (t.normaliser - arithmetic).clamp(min=0.0)
        bound = torch.where(sure > 0, (2 * left + 4 * arithmetic) / sure.clamp(min=1e-300), math.inf)
        final = rounding.unit(p.q.dtype)
        lost = heads.underflow_bound(problem, s * self.rank, torch.float64)
        rows = (moved + bound.nan_to_num(math.inf)).clamp(max=2 + 4 * norms.slack) * (1 + 2 * final) + final + lost
        assumption = "exp is right to 64 ulp in float64"
        return Promise("deterministic", heads.mask_bounds(p, rows * rounding.SAFETY), assumptions=(assumption,))

    def _logit_error(self, p: Problem, norms: Norms, t: Trace, key_radius: Tensor) -> Tensor:
        """How far G(q, k)·w as computed may be from exp(scale·q·k + bias), in the exponent and up to the row's own."""
        h, d = p.q.shape[1], p.q.shape[-1]
        radius = (t.rows.radius + key_radius) ** 2
        centre_q, centre_k = (
            heads.per_query_head(torch.linalg.vector_norm(x, dim=-1), h)
            for x in (t.frame.query_shift, t.frame.key_shift)
        )
        longest = heads.per_query_head(norms.k.amax(-1, keepdim=True), h)
        shift = abs(p.scale) * (norms.q + centre_q) * (longest + centre_k)
        bias = 0.0 if p.bias is None else float(p.bias.abs().amax())
        return 8 * (d + 16) * _U * (radius + shift + bias) + 2 * rounding.EXP_ULPS * _U

    def cost(self, sizes: Sizes) -> Cost:
        z, r = sizes, self.rank
        rows, keys = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys
        groups = z.batch * z.linear_key_heads
        few, rounds = cholesky.candidates(z.keys, r), list(cholesky.rounds(r))
        flops = sum(2 * groups * few * (span.stop - span.start) * (z.dim + span.start) for span in rounds)
        flops += 2 * groups * r * r * (z.dim + r)
        flops += 2 * (rows + keys) * r * (z.dim + r) + 2 * keys * z.dim
        if z.mask == "full":
            pairs = rows * z.keys
            flops += 2 * pairs * (r + z.value_dim)
            return Cost(flops, 6 * pairs + 3 * keys * r, 30 * r, 8 * (keys * r + 4 * min(pairs, 2**24)))
        flops += scan.pass_flops(z, r, normalise=True, shared=True)
        launches = 25 * len(rounds) + 40 * scan.tile_count(z, r)
        work = 12 * groups * few * len(rounds) + (rows + keys) * (6 * r + 6 * z.dim + 6 * z.value_dim)
        return Cost(flops, work, launches, self._peak(z))

    def _peak(self, z: Sizes) -> int:
        """Memory at its peak: while landmarks are chosen, while rows are collected, or while answers are finished."""
        rows, keys, e = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys, z.value_dim
        few = z.batch * z.linear_key_heads * cholesky.candidates(z.keys, self.rank)
        copied = few * z.dim if few < z.batch * z.linear_key_heads * z.keys else 0
        choosing = keys * z.dim + max(keys * z.dim, copied + few * (self.rank + 3 * min(self.rank // 2 + 1, 16) + 8))
        held = keys * (z.dim + 3 + (e if z.item != 8 else 0))
        passing = scan.peak_bytes(dataclasses.replace(z, dtype=torch.float64), self.rank, 8, z.dim)
        collecting = held + rows * 5 + passing // 8
        finishing = held + rows * (4 * e + 6)
        factors = z.batch * z.linear_key_heads * self.rank * (5 * self.rank + 2 * z.dim)
        return 8 * (max(choosing, collecting, finishing) + factors)

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[LowRank]:
        for rank in sorted({min(rank, max(sizes.keys, 1)) for rank in (16, 64, 256)}):
            yield cls(rank)

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        """The promise on a sample of rows and keys: a guess, and a cheap one."""
        p = problem
        if self.rank > p.k.shape[-2]:
            return BoundEstimate(math.inf, "none", True, f"rank {self.rank} exceeds {p.k.shape[-2]} keys")
        if p.mask_kind == "full":
            reason = "a mask that differs by row leaves nothing to share between rows"
            return BoundEstimate(math.inf, "none", True, reason)
        if p.q.device.type != "cpu":
            # Rounds of pivots and tiles in float64, each some launches: many times exact attention there.
            return BoundEstimate(math.inf, "none", True, "low_rank is for CPUs: name it to run it here")
        sample = _sampled(p, 4 * self.rank)
        computed = self.compute(sample, torch.Generator().manual_seed(0))
        rows = self.promise(sample, computed, confidence).rows
        bound = float(rows.amax()) if rows.numel() else 0.0
        reason = "" if bound < 2 else "landmarks leave too much of these keys over"
        return BoundEstimate(bound, "deterministic", False, reason)


def _sampled(p: Problem, size: int) -> Problem:
    """Every so many rows and keys, unmasked, with their norms."""
    q, k, v = (x[..., :: sample_step(x.shape[-2], size), :] for x in (p.q, p.k, p.v))
    norms = [x[..., :: sample_step(x.shape[-1], size)] for x in (p.norms.q, p.norms.k, p.norms.v)]
    sample = Problem(q, k, v, None, None, False, p.scale, p.default_scale, "dot", p.leading)
    return sample.with_norms(Norms(norms[0], norms[1], norms[2], p.norms.slack))


def _weighted(p: Problem) -> WeightedKeys:
    """The keys where landmarks are sought: in a frame of what rows may see, with what a mask adds to all rows alike."""
    alike = p.mask_kind != "full"
    seen, added = (heads.key_seen(p), heads.key_log(p, torch.float64)) if alike else (None, None)
    return WeightedKeys.of(p, centred_frame(p, torch.float64), seen, added)


def _pairwise(p: Problem, features: LandmarkFeatures, values: Tensor) -> tuple[scan.Sums, Tensor]:
    """Row by row against every key, for masks that differ by row."""
    n, s, h, groups = p.q.shape[-2], p.k.shape[-2], p.q.shape[1], p.k.shape[1]
    keys = features.of_keys(slice(0, s))
    assert keys.factor is not None, "low_rank's keys come as factors with one log each"
    log = heads.per_query_head(keys.log[..., 0], h)
    phi, held = heads.per_query_head(keys.factor, h), heads.per_query_head(values, h)
    parts = []
    for rows in row_tiles(n, p.q.shape[0] * h * s):
        total = masked(p, log.unsqueeze(-2), rows)
        top = total.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (heads.ungrouped(features.of_rows(rows)) @ phi.transpose(-1, -2)) * torch.exp(total - top)
        norm = weights.sum(-1, keepdim=True)
        out = (weights @ held) / torch.where(norm.abs() < 1e-300, 1.0, norm)
        parts.append(tuple(heads.grouped(x, groups) for x in (out, norm, top)))
    out, norm, top = (torch.cat(columns, -2) for columns in zip(*parts, strict=True))
    return scan.Sums(out, norm, None), top
