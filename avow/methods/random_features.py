r"""Positive random features: :math:`e^{q\cdot k}` as an expectation, attention in linear time.

.. math:: out_i = \frac{\sum_f e^{w_f \cdot q_i} \sum_j e^{w_f \cdot k_j - \|k_j\|^2/2} v_j}
                       {\sum_f e^{w_f \cdot q_i} \sum_j e^{w_f \cdot k_j - \|k_j\|^2/2}}

Features are kept as logarithms and shifted by running maxima that cancel exactly, so no norm overflows.
The relative variance grows as :math:`(e^{\|q+k\|^2}-1)/m` [claim features-variance]: `features_needed` says from
q and k what a tolerance would take, and says so when it is hopeless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.contract import Computed, Cost, Method, Norms, Problem, Promise, Prospect, Sizes
from avow.maths import features as feature_maps
from avow.maths import kernel_rounding, rounding, scan, scan_costs
from avow.maths.features import Frame, framed_keys, framed_queries
from avow.maths.heads import (
    finished,
    flushed,
    grouped,
    key_log,
    key_seen,
    linear_type,
    own_keys,
    per_query_head,
    rescaled,
    scaled_values,
    settled,
    ungrouped,
)
from avow.maths.kernel_rounding import KernelRounding
from avow.maths.masks import at_rows, row_tiles, visible
from avow.maths.softmax import softmax_average
from avow.params import anything, from_to, param

# Beyond this many features even a sequence of a million keys is cheaper to attend to exactly.
_HOPELESS = 2**24
# Squares of norms beyond this leave float32.
_ROOMY = 1e15
# Logs of features that stay within this, of rows and of keys, need no reference of their own: with a million keys,
# thousands of features and values up to `scaled_values`' comfort, their sums are within the type's range.
_CALM = {torch.float32: 22.0, torch.float64: 150.0}


class FeatureState(NamedTuple):
    """What a pass hands to the next call: the draw, the frame, the sums over all keys so far and their unit."""

    directions: Float[Tensor, "m d"]
    frame: Frame
    sums: scan.State
    size: Float[Tensor, "b g 1 1"] | None

    def to(self, dtype: torch.dtype) -> FeatureState:
        """The same state in another type; the draw keeps its own."""
        top, sums, total, steps = self.sums
        kept = scan.State(top.to(dtype), sums.to(dtype), total.to(dtype), steps)
        frame = Frame(*(x.to(dtype) for x in self.frame))
        return FeatureState(self.directions, frame, kept, None if self.size is None else self.size.to(dtype))


class Trace(NamedTuple):
    """What the certificate must know of the run: besides the draw and the frame, lengths in the frame."""

    directions: Float[Tensor, "m d"]
    frame: Frame
    query_radius: Float[Tensor, "b h n"]
    key_radius: Float[Tensor, "b g 1"]
    final_state: FeatureState | None
    steps: int
    kernel: KernelRounding | None = None
    """How kernels rounded, where they made the answer."""


@dataclass(frozen=True)
class RandomFeatures(Method):
    """exp(q·k) by positive orthogonal random features."""

    name: ClassVar[str] = "random_features"
    summary: ClassVar[str] = "exp(q·k) as an expectation of positive features; linear, good for small norms"
    random: ClassVar[bool] = True

    features: int = param(256, from_to(1, _HOPELESS), "random directions")
    orthogonal: bool = param(True, anything(), "draw directions in orthogonal blocks")

    def compute(
        self,
        problem: Problem,
        generator: torch.Generator | None = None,
        initial_state: FeatureState | None = None,
    ) -> Computed:
        p = own_keys(problem)
        wide = self.arithmetic(p)
        groups, queries = p.k.shape[1], p.q.shape[-2]
        if initial_state is None:
            directions = feature_maps.draw(self.features, p.q.shape[-1], self.orthogonal, generator, p.q.device)
            frame = feature_maps.frame_of(p, wide)
        else:
            # Sums over keys so far may be wider than these keys need, or narrower.
            wide = torch.promote_types(wide, initial_state.sums.sums.dtype)
            initial_state = initial_state.to(wide)
            directions, frame = initial_state.directions, initial_state.frame
        fast = self._by_kernels(p, directions, frame, initial_state)
        if fast is not None:
            return fast
        across = directions.to(wide).T.expand(*p.k.shape[:2], -1, -1).contiguous()  # (b, g, d, m): one product per head
        longest = torch.linalg.vector_norm(directions, dim=-1).amax()
        radii_q: list[Tensor] = []
        radii_k: list[Tensor] = []

        def quiet(radius: Tensor) -> bool:
            """Whether no log of these rows or keys is far from zero; a compiled graph does not ask."""
            return not torch.compiler.is_compiling() and bool(1.01 * longest * radius.amax() <= _CALM[wide])

        def row_logs(span: slice) -> Tensor:
            rows = framed_queries(p, frame, span, wide)
            radii_q.append(torch.linalg.vector_norm(rows.detach(), dim=-1))
            return grouped(rows, groups) @ across.unsqueeze(2)  # (b, g, r, l, m)

        def key_logs(span: slice) -> tuple[Tensor, Tensor]:
            keys, length, shift = framed_keys(p, frame, span, wide)
            radii_k.append(length.detach()[..., 0].amax(-1, keepdim=True))
            return keys @ across, shift

        def traced(state: FeatureState | None, steps: int) -> Trace:
            longest_key = torch.cat(radii_k, -1).amax(-1, keepdim=True)
            return Trace(directions, frame, torch.cat(radii_q, -1), longest_key, state, steps)

        if p.mask_kind == "full":
            out = _pairwise(p, row_logs, lambda span: torch.add(*key_logs(span)), wide)
            return Computed(finished(p, out), traced(None, p.k.shape[-2]))
        values, size = scaled_values(p, wide)
        start = None
        if initial_state is not None:
            start, values, size = _in_one_unit(initial_state, values, size)
        added, seen = key_log(p, wide), key_seen(p)
        m, heads = self.features, p.q.shape[1]
        calm = start is None or start.top.shape[-1] == 1

        def keys_of(span: slice) -> scan.Keys:
            nonlocal calm
            log, shift = key_logs(span)
            if added is not None:
                shift = shift + added[..., span, :]
            visible = None if seen is None else seen[..., span, :]
            calm = calm and quiet(radii_k[-1])
            if calm:
                return scan.Keys(shift, log.exp_(), visible)
            return scan.Keys(log.add_(shift), None, visible)

        def weigh(rows: slice, reference: Tensor) -> Tensor:
            log = row_logs(rows)
            if reference.shape[-1] > 1:
                log = log.add_(reference.unsqueeze(2))
            elif quiet(radii_q[-1]):
                return log.exp_()
            return log.sub_(log.detach().amax(-1, keepdim=True)).exp_()

        if p.causal:
            begin = scan.nothing(values, m, 1) if start is None else start
            sums, state = scan.causal(
                keys_of, lambda tile: weigh(tile.rows, tile.reference), values, heads, queries, begin, normalise=True
            )
        else:
            state = scan.absorb(keys_of, values, m, start)
            whole = scan.settle(state)
            sums = scan.collect(lambda rows: weigh(rows, whole.top), heads, queries, whole, normalise=True)
        final = FeatureState(directions, frame, state, size)
        return Computed(finished(p, rescaled(sums.out, size)), traced(final, state.steps))

    def _by_kernels(
        self, p: Problem, directions: Tensor, frame: Frame, initial_state: FeatureState | None
    ) -> Computed | None:
        """The same answer where the device has kernels and they fit the problem."""
        if not _suits(p, frame, initial_state):
            return None
        from avow.kernels import problems

        lengths = problems.radii(p)
        start = None if initial_state is None else initial_state.sums
        found = problems.feature_means(p, directions, frame, start, lengths)
        if found is None:
            return None
        state = FeatureState(directions, frame, found.state, None)
        return Computed(found.out, Trace(directions, frame, *lengths, state, found.state.steps, found.rounding))

    def step(self, problem: Problem, state: FeatureState) -> Tensor | None:
        """The answer to one more token, which the state takes in, in place; None where no kernel does that."""
        if not _suits(problem, state.frame, state):
            return None
        from avow.kernels import problems

        return problems.feature_step(problem, state.directions, state.frame, state.sums)

    def promise(self, problem: Problem, norms: Norms, computed: Computed, confidence: float) -> Promise:
        p, trace = own_keys(problem), computed.trace
        radius_q, radius_k, shift = feature_maps.radii(p, trace.frame, trace.query_radius, trace.key_radius, norms)
        variance = feature_maps.relative_variance(radius_q + radius_k, self.features, p.q.shape[-1], self.orthogonal)
        chance = feature_maps.ratio_bound(variance, confidence)
        longest = float(torch.linalg.vector_norm(trace.directions, dim=-1).amax())
        moved, rest = self._rounding(p, norms, radius_q, radius_k, shift, longest, trace)
        # A mixture of values is never further from another than two of their lengths.
        rows = (chance + moved).clamp(max=2.0) + rest
        assumptions = ("the generator's numbers are independent and Gaussian", "exp is right to 64 ulp")
        return Promise("statistical", settled(p, rows * rounding.OUTWARD), confidence, assumptions=assumptions)

    def _rounding(
        self, p: Problem, norms: Norms, radius_q: Tensor, radius_k: Tensor, shift: Tensor, longest: float, trace: Trace
    ) -> tuple[Tensor, Tensor]:
        """How far arithmetic moves the weights, and what sums, flushing and the output's type add.

        Every term is positive, so a wrong exponent moves weights and never changes their sign.
        """
        wide, kept, kernel = trace.frame.key_shift.dtype, p.q.dtype, trace.kernel
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
            logs = logs + kernel_rounding.lost(along, kept) * radius + kernel_rounding.floor(along, kept)
            logs = logs + kernel.shared / 2
        moved = rounding.perturbed(2 * (logs + exponent))
        sums = 4 * products.dot(scan.depth(s, trace.steps) + m + 1) + 16 * s * m * rounding.tiny(wide) / least + apart
        lost = flushed(p, norms, s * m / least, wide)
        final = rounding.unit(kept) if kept != wide else 0.0
        return moved * (1 + final), sums * (1 + final) + 4 * final + lost

    def arithmetic(self, p: Problem) -> torch.dtype:
        """The type features are computed in: wide where squares of norms would leave the inputs' own."""
        wide = linear_type(p)
        if wide == torch.float64 or torch.compiler.is_compiling():
            return wide
        if p.norms is None:
            ends = [float(end) for x in (p.q, p.k) if x.numel() for end in torch.aminmax(x.detach())]
            largest = max(map(abs, ends), default=0.0)
        else:
            largest = max(p.norms.most[:2])
        return wide if largest * max(1.0, abs(p.scale)) < _ROOMY else torch.float64

    def cost(self, sizes: Sizes) -> Cost:
        z, m = sizes, self.features
        item = 8 if z.biased else rounding.accumulator(z.dtype).itemsize
        rows, keys = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys
        projections = 2 * (rows + keys) * z.dim * m + 2 * keys * z.dim
        if z.mask == "full":
            pairs = rows * z.keys
            return Cost(projections + 2 * pairs * z.value_dim, 4 * pairs * m, 20, 4 * item * min(pairs * m, 2**24))
        launches = 16 + scan_costs.count(z, m) * (30 if z.causal else 14)
        flops = projections + scan_costs.flops(z, m, normalise=True, shared=True)
        work = (rows + keys) * (4 * m + 3 * z.dim + 3 * z.value_dim)
        return Cost(flops, work, launches, scan_costs.peak_bytes(z, m, item, z.dim), item / 4)

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def settings(cls, sizes: Sizes) -> Iterator[RandomFeatures]:
        for features in (64, 256, 1024):
            yield cls(features)

    def foresee(self, problem: Problem, norms: Norms, confidence: float) -> Prospect:
        if confidence >= 1:
            return Prospect(math.inf, "none", True, "promises only with a confidence below 1")
        p = own_keys(problem)
        frame = feature_maps.frame_of(p, self.arithmetic(p))
        radius_q, radius_k, _ = feature_maps.radii(p, frame, *feature_maps.lengths(p, frame), norms)
        worst = (radius_q + radius_k).amax()
        variance = feature_maps.relative_variance(worst, self.features, p.q.shape[-1], self.orthogonal)
        bound = float(feature_maps.ratio_bound(variance, confidence))
        return Prospect(bound, "statistical", False, "" if bound < 2 else f"norms of q+k up to {float(worst):.3g}")


def _suits(p: Problem, frame: Frame, initial_state: FeatureState | None) -> bool:
    """Whether kernels are worth asking: nothing here waits for the device, or loads them."""
    if torch.compiler.is_compiling() or not p.causal or frame.key_shift.dtype != torch.float32:
        return False
    from avow.kernels import presence

    return (initial_state is None or initial_state.size is None) and presence.at_hand(p.q.device)


def _in_one_unit(state: FeatureState, values: Tensor, size: Tensor | None) -> tuple[scan.State, Tensor, Tensor | None]:
    """Sums so far and new values, divided by the same power of two."""
    if state.size is None and size is None:
        return state.sums, values, None
    one = torch.ones_like(values[..., :1, :1])
    before, now = (one if x is None else x for x in (state.size, size))
    larger = torch.maximum(before, now)
    sums = state.sums._replace(sums=state.sums.sums * (before / larger))
    return sums, values * (now / larger), larger


class FeatureCount(NamedTuple):
    """How many features a tolerance takes; `inf` when no number that pays would do."""

    features: float
    variance: float
    radius: float

    def __str__(self) -> str:
        if math.isinf(self.features):
            return f"hopeless: one feature has relative variance {self.variance:.3g} at |q+k| = {self.radius:.3g}"
        return f"{self.features:.0f} features (|q+k| up to {self.radius:.3g})"


def features_needed(problem: Problem, norms: Norms, tol: float, confidence: float) -> FeatureCount:
    """The features that would certify `tol` for every row, from the norms of q and k alone."""
    method, p = RandomFeatures(), own_keys(problem)
    frame = feature_maps.frame_of(p, method.arithmetic(p))
    radius_q, radius_k, _ = feature_maps.radii(p, frame, *feature_maps.lengths(p, frame), norms)
    worst = (radius_q + radius_k).amax()
    d = p.q.shape[-1]
    # From d features on, the bound is a constant over their number.
    per_feature = float(feature_maps.relative_variance(worst, d, d, method.orthogonal)) * d
    single = float(torch.expm1(worst.square()))
    needed = max(per_feature / feature_maps.variance_for(tol, confidence), 1.0)
    return FeatureCount(math.ceil(needed) if needed <= _HOPELESS else math.inf, single, float(worst))


def _pairwise(
    p: Problem, row_logs: Callable[[slice], Tensor], key_logs: Callable[[slice], Tensor], dtype: torch.dtype
) -> Tensor:
    """Every weight as a sum over features of its own, for masks that differ by row: safe, and quadratic."""
    n, s, heads = p.q.shape[-2], p.k.shape[-2], p.q.shape[1]
    seen = visible(p)
    keys = per_query_head(key_logs(slice(None)), heads)
    values = per_query_head(p.v.to(dtype), heads)
    parts = []
    for rows in row_tiles(n, p.q.shape[0] * heads * s * keys.shape[-1]):
        log = torch.logsumexp(ungrouped(row_logs(rows)).unsqueeze(-2) + keys.unsqueeze(-3), -1)
        if p.bias is not None:
            log = log + at_rows(p.bias, rows).to(dtype)
        if seen is not None:
            log = torch.where(at_rows(seen, rows), log, -math.inf)
            log = torch.where(at_rows(seen, rows).any(-1, keepdim=True), log, 0.0)
        parts.append(torch.softmax(log, -1) @ values)
    return torch.cat(parts, -2)
