r"""Positive random features: :math:`e^{q\cdot k}` as an expectation, attention in linear time.

.. math:: out_i = \frac{\sum_f e^{w_f \cdot q_i} \sum_j e^{w_f \cdot k_j - \|k_j\|^2/2} v_j}
                       {\sum_f e^{w_f \cdot q_i} \sum_j e^{w_f \cdot k_j - \|k_j\|^2/2}}

Features are kept as logarithms and shifted by running maxima that cancel exactly, so no norm overflows.
The relative variance grows as :math:`(e^{\|q+k\|^2}-1)/m` [claim features-variance]: `features_needed` says from
q and k what a tolerance would take, and says so when no feasible number would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.core import BoundEstimate, Computed, Cost, Method, Problem, Promise, Sizes
from avow.core.requirement import INDEPENDENT
from avow.errors import ParameterError
from avow.numerics import features as feature_maps
from avow.numerics import heads, kernel_rounding, rounding, scan
from avow.numerics.features import FeatureLogs, Frame
from avow.numerics.kernel_rounding import KernelRounding
from avow.numerics.masks import masked, row_tiles, seen_by
from avow.numerics.softmax import softmax_average
from avow.parameters import anything, from_to, param

# Beyond this many features even a sequence of a million keys is cheaper to attend to exactly.
_MOST_FEATURES = 2**24
# Squares of norms beyond this leave float32.
_ROOMY = 1e15
# Logs of features that stay within this, of rows and of keys, need no reference of their own: with a million keys,
# thousands of features and values up to `scaled_values`' comfort, their sums are within the type's range.
_CALM = {torch.float32: 22.0, torch.float64: 150.0}


class FeatureState(NamedTuple):
    """What a pass hands to the next call: the draw, the frame, and the sums over all keys so far."""

    directions: Float[Tensor, "m d"]
    frame: Frame
    sums: scan.State

    def to(self, dtype: torch.dtype) -> FeatureState:
        """The same state in another type; the draw keeps its own."""
        sums: Any = (x.to(dtype) if isinstance(x, Tensor) else x for x in self.sums)
        return FeatureState(self.directions, Frame(*(x.to(dtype) for x in self.frame)), scan.State(*sums))


class Trace(NamedTuple):
    """What the certificate must know of the run: besides the draw and the frame, lengths in the frame."""

    directions: Float[Tensor, "m d"]
    frame: Frame
    query_radius: Float[Tensor, "b h n"]
    key_radius: Float[Tensor, "b g 1"]
    final_state: FeatureState | None
    steps: int
    carried: bool = False
    """Whether it began with a state: how long the keys in that are is not known."""
    kernel: KernelRounding | None = None
    """How kernels rounded, where they made the answer."""


@dataclass(frozen=True)
class RandomFeatures(Method):
    """exp(q·k) by positive orthogonal random features."""

    name: ClassVar[str] = "random_features"
    summary: ClassVar[str] = "exp(q·k) as an expectation of positive features; linear, good for small norms"
    averages: ClassVar[bool] = True
    random: ClassVar[bool] = True

    features: int = param(256, from_to(1, _MOST_FEATURES), "random directions")
    orthogonal: bool = param(True, anything(), "draw directions in orthogonal blocks")

    @property
    def statistical(self) -> bool:
        return True

    def state_features(self, dim: int) -> int:
        return self.features

    def compute(
        self, problem: Problem, generator: torch.Generator | None = None, initial_state: FeatureState | None = None
    ) -> Computed:
        p = heads.expand_gqa(problem)
        wide = self.feature_dtype(p)
        if initial_state is None:
            directions = self.draw(p.q.shape[-1], generator, p.q.device)
            frame = feature_maps.frame_of(p, wide)
        else:
            # Sums over keys so far may be wider than these keys need, or narrower.
            wide = torch.promote_types(wide, initial_state.sums.sums.dtype)
            initial_state = initial_state.to(wide)
            directions, frame = initial_state.directions, initial_state.frame
        fast = self._by_kernels(p, directions, frame, initial_state)
        if fast is not None:
            return fast
        logs = FeatureLogs(p, directions, frame, wide)
        if p.mask_kind == "full":
            if initial_state is not None and initial_state.sums.steps:
                rule = "cannot include keys that are known only by their sums"
                raise ParameterError("random_features: mask", "full", rule, "let all rows see the same keys")
            out, state, steps = _pairwise(p, logs), None, p.k.shape[-2]
        else:
            out, state = self._scanned(p, logs, initial_state)
            steps = state.sums.steps
        lengths, carried = (logs.query_radius, logs.key_radius), initial_state is not None
        return Computed(heads.cast_output(p, out), Trace(directions, frame, *lengths, state, steps, carried))

    def _scanned(
        self, p: Problem, logs: FeatureLogs, initial_state: FeatureState | None
    ) -> tuple[Tensor, FeatureState]:
        """The answer from sums over keys, and the sums over all of them."""
        values, size = heads.scaled_values(p, logs.wide)
        start = None
        if initial_state is not None:
            start, values, size = scan.in_one_unit(initial_state.sums, values, size)
        calm = start is None or start.top.shape[-1] == 1
        longest = torch.linalg.vector_norm(logs.directions, dim=-1).amax()
        weights = _Weights(logs, heads.key_log(p, logs.wide), heads.key_seen(p), calm, longest)
        m, h, queries = self.features, *p.q.shape[1:3]
        if p.causal:
            begin = scan.nothing(values, m, 1) if start is None else start
            sums, state = scan.causal(weights.of_keys, weights.of_tile, values, h, queries, begin, True)
        else:
            state = scan.absorb(weights.of_keys, values, m, start)
            whole = scan.settle(state)
            sums = scan.collect(lambda rows: weights.of_rows(rows, whole.top), h, queries, whole, normalise=True)
        return heads.rescaled(sums.out, size), FeatureState(logs.directions, logs.frame, state._replace(size=size))

    def _by_kernels(
        self, p: Problem, directions: Tensor, frame: Frame, initial_state: FeatureState | None
    ) -> Computed | None:
        """The same answer where the device has kernels and they fit the problem."""
        kernels = _kernels(p, frame, initial_state)
        if kernels is None:
            return None
        lengths = kernels.radii(p)
        start = None if initial_state is None else initial_state.sums
        means = kernels.feature_means(p, directions, frame, start, lengths)
        if means is None:
            return None
        state = FeatureState(directions, frame, means.state)
        carried, steps = initial_state is not None, means.state.steps
        radii = lengths.queries, lengths.keys
        return Computed(means.out, Trace(directions, frame, *radii, state, steps, carried, means.rounding))

    def draw(self, dim: int, generator: torch.Generator | None, device: torch.device) -> Float[Tensor, "m d"]:
        return feature_maps.draw(self.features, dim, self.orthogonal, generator, device)

    def initial_state(self, problem: Problem, sample: Tensor | None = None) -> FeatureState:
        directions = self.draw(problem.q.shape[-1], None, problem.q.device) if sample is None else sample
        wide = rounding.accumulator(problem.q.dtype)
        empty = scan.nothing(problem.v.to(wide), self.features, 1)
        return FeatureState(directions, feature_maps.frame_of(problem, wide), empty)

    def read_on(self, problem: Problem, state: FeatureState) -> tuple[Tensor, FeatureState | None]:
        computed = self.compute(problem, initial_state=state)
        return computed.out, computed.trace.final_state

    def step(self, problem: Problem, state: FeatureState) -> Tensor | None:
        kernels = _kernels(problem, state.frame, state)
        return None if kernels is None else kernels.feature_step(problem, state.directions, state.frame, state.sums)

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms, trace = heads.expand_gqa(problem), problem.norms, computed.trace
        if trace.carried:
            unknown = torch.full(p.q.shape[:-1], math.inf, dtype=torch.float64, device=p.q.device)
            return Promise("none", unknown, reason="it went on from a state, whose keys are not in the problem")
        radius_q, radius_k, shift = feature_maps.radii(p, trace.frame, trace.query_radius, trace.key_radius, norms)
        variance = feature_maps.relative_variance(radius_q + radius_k, self.features, p.q.shape[-1], self.orthogonal)
        chance = feature_maps.ratio_bound(variance, confidence)
        longest = float(torch.linalg.vector_norm(trace.directions, dim=-1).amax())
        moved, rest = self._rounding(problem, radius_q, radius_k, shift, longest, trace)
        # A mixture of values is never further from another than two of their lengths.
        rows = (chance + moved).clamp(max=2.0) + rest
        assumptions = ("the generator's numbers are Gaussian", INDEPENDENT, "exp is right to 64 ulp")
        return Promise("statistical", heads.mask_bounds(p, rows * rounding.SAFETY), confidence, assumptions=assumptions)

    def _rounding(
        self, p: Problem, radius_q: Tensor, radius_k: Tensor, shift: Tensor, longest: float, trace: Trace
    ) -> tuple[Tensor, Tensor]:
        """How far arithmetic moves the weights, and what sums, flushing and the output's type add.

        Every term is positive, so a wrong exponent moves weights and never changes their sign.
        """
        wide, dtype, kernel = trace.frame.key_shift.dtype, p.q.dtype, trace.kernel
        products = rounding.products(wide, p.q.device.type) if kernel is None else kernel.products
        u, s, m, d = products.u, p.k.shape[-2], self.features, p.q.shape[-1]
        radius = radius_q + radius_k
        # Calm logs leave a row's normaliser no smaller than this beside its unit, and what falls below the smallest
        # number is small beside that.
        least, apart = math.exp(-2 * _CALM[wide]), 0.0
        span = longest
        if kernel is not None:
            least = kernel_rounding.least(m, longest, float(radius_k.amax()))
            span, apart = longest + kernel_rounding.lift(m), kernel.apart
        logs = (products.dot(d + 16) + 8 * u) * (span * radius + radius.square() + shift)
        if p.bias is not None:
            logs = logs + 4 * u * float(p.bias.abs().amax())
        exponent = 4 * u * rounding.underflow_log(wide) + 3 * rounding.EXP_ULPS * u
        if kernel is not None:
            along = trace.directions
            logs = logs + kernel_rounding.lost(along, dtype) * radius + kernel_rounding.floor(along, dtype)
            logs = logs + kernel.shared / 2
        moved = rounding.softmax_l1_bound(2 * (logs + exponent))
        sums = 4 * products.dot(scan.depth(s, trace.steps) + m + 1) + 16 * s * m * rounding.tiny(wide) / least + apart
        lost = heads.underflow_bound(p, s * m / least, wide)
        final = rounding.unit(dtype) if dtype != wide else 0.0
        return moved * (1 + final), sums * (1 + final) + 4 * final + lost

    def largest_radius(self, problem: Problem) -> Float[Tensor, ""]:
        """An upper bound on the largest length of q + k in the frame."""
        p = heads.expand_gqa(problem)
        frame = feature_maps.frame_of(p, self.feature_dtype(p))
        radius_q, radius_k, _ = feature_maps.radii(p, frame, *feature_maps.lengths(p, frame), problem.norms)
        return (radius_q + radius_k).amax()

    def feature_dtype(self, p: Problem) -> torch.dtype:
        """The type features are computed in: wide where squares of norms would leave the inputs' own."""
        wide = heads.linear_type(p)
        if wide == torch.float64 or torch.compiler.is_compiling():
            return wide
        if p.known_norms is None:
            ends = [float(end) for x in (p.q, p.k) if x.numel() for end in torch.aminmax(x.detach())]
            largest = max(map(abs, ends), default=0.0)
        else:
            largest = max(p.known_norms.most[:2])
        return wide if largest * max(1.0, abs(p.scale)) < _ROOMY else torch.float64

    def cost(self, sizes: Sizes) -> Cost:
        z, m = sizes, self.features
        item = 8 if z.biased else rounding.accumulator(z.dtype).itemsize
        rows, keys = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys
        projections = 2 * (rows + keys) * z.dim * m + 2 * keys * z.dim
        if z.mask == "full":
            pairs = rows * z.keys
            return Cost(projections + 2 * pairs * z.value_dim, 4 * pairs * m, 20, 4 * item * min(pairs * m, 2**24))
        launches = 16 + scan.tile_count(z, m) * (30 if z.causal else 14)
        flops = projections + scan.pass_flops(z, m, normalise=True, shared=True)
        work = (rows + keys) * (4 * m + 3 * z.dim + 3 * z.value_dim)
        return Cost(flops, work, launches, scan.peak_bytes(z, m, item, z.dim), item / 4)

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[RandomFeatures]:
        for features in (64, 256, 1024):
            yield cls(features)

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        if confidence >= 1:
            return BoundEstimate(math.inf, "none", True, "promises only with a confidence below 1: pass confidence=")
        worst = self.largest_radius(problem)
        variance = feature_maps.relative_variance(worst, self.features, problem.q.shape[-1], self.orthogonal)
        bound = float(feature_maps.ratio_bound(variance, confidence))
        return BoundEstimate(bound, "statistical", False, "" if bound < 2 else f"norms of q+k up to {float(worst):.3g}")


@dataclass
class _Weights:
    """Features as a scan takes them: as they are while all keys so far are calm, and by their logs from there on."""

    logs: FeatureLogs
    added: Float[Tensor, "#b #g s 1"] | None
    seen: Bool[Tensor, "#b #g s 1"] | None
    calm: bool
    longest: Float[Tensor, ""]
    """Of the directions."""

    def of_keys(self, span: slice) -> scan.Keys:
        log, shift = self.logs.of_keys(span)
        if self.added is not None:
            shift = shift + self.added[..., span, :]
        seen = None if self.seen is None else self.seen[..., span, :]
        self.calm = self.calm and self._quiet(self.logs.key_radii[-1])
        if self.calm:
            return scan.Keys(shift, log.exp_(), seen)
        return scan.Keys(log.add_(shift), None, seen)

    def of_rows(self, rows: slice, reference: Float[Tensor, "b g 1 #m"]) -> Float[Tensor, "b g r l m"]:
        log = self.logs.of_rows(rows)
        if reference.shape[-1] > 1:
            log = log.add_(reference.unsqueeze(2))
        elif self._quiet(self.logs.query_radii[-1]):
            return log.exp_()
        return log.sub_(log.detach().amax(-1, keepdim=True)).exp_()

    def of_tile(self, tile: scan.Tile) -> Float[Tensor, "b g r l m"]:
        return self.of_rows(tile.rows, tile.reference)

    def _quiet(self, radius: Tensor) -> bool:
        """Whether no log of rows or keys this long is far from zero; a compiled graph does not ask."""
        longest = self.longest
        return not torch.compiler.is_compiling() and bool(1.01 * longest * radius.amax() <= _CALM[self.logs.wide])


def _kernels(p: Problem, frame: Frame, state: FeatureState | None) -> Any:
    """Kernels where they are worth asking, which is found out without a wait for the device; None elsewhere."""
    from avow.kernels.availability import linear_kernels

    suits = p.causal and frame.key_shift.dtype == torch.float32 and (state is None or state.sums.size is None)
    return linear_kernels(p.q.device) if suits else None


# How norms are counted that decide how many features are needed.
_SCALED = "q and k scaled such that their product is the logit"


class FeatureCount(NamedTuple):
    """How many features a tolerance takes; `inf` if that is more than 16,777,216."""

    features: float
    variance: float
    radius: float

    def __str__(self) -> str:
        if math.isinf(self.features):
            variance = f"one feature has relative variance {self.variance:.3g} at |q+k| = {self.radius:.3g}"
            return f"more than {_MOST_FEATURES:,} features: {variance} ({_SCALED})"
        return f"{self.features:.0f} features (|q+k| up to {self.radius:.3g}, {_SCALED})"


def features_needed(problem: Problem, tol: float, confidence: float) -> FeatureCount:
    """The features that would certify `tol` for every row, from the norms of q and k alone."""
    method, d = RandomFeatures(), problem.q.shape[-1]
    worst = method.largest_radius(problem)
    # From d features on, the bound is a constant over their number.
    per_feature = float(feature_maps.relative_variance(worst, d, d, method.orthogonal)) * d
    single = float(torch.expm1(worst.square()))
    needed = max(per_feature / feature_maps.variance_for(tol, confidence), 1.0)
    return FeatureCount(math.ceil(needed) if needed <= _MOST_FEATURES else math.inf, single, float(worst))


def _pairwise(p: Problem, logs: FeatureLogs) -> Float[Tensor, "b h n e"]:
    """Every weight as a sum over features of its own, for masks that differ by row: safe, and quadratic."""
    n, s, h = p.q.shape[-2], p.k.shape[-2], p.q.shape[1]
    keys = heads.per_query_head(torch.add(*logs.of_keys(slice(None))), h)
    values = heads.per_query_head(p.v.to(logs.wide), h)
    parts = []
    for rows in row_tiles(n, p.q.shape[0] * h * s * keys.shape[-1]):
        log = torch.logsumexp(heads.ungrouped(logs.of_rows(rows)).unsqueeze(-2) + keys.unsqueeze(-3), -1)
        log = torch.where(seen_by(p, rows).any(-1, keepdim=True), masked(p, log, rows), 0.0)
        parts.append(torch.softmax(log, -1) @ values)
    return torch.cat(parts, -2)
