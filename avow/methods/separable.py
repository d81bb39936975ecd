r"""Separable attention: softmax over the features of Q, softmax over the positions of K. Linear in time and memory.

.. math:: out_i = \sum_f \rho_{if} \sum_{j \in S_i} \kappa^{(i)}_{jf} v_j, \quad
          \rho_i = softmax_f(q_i / T), \quad
          \kappa^{(i)}_{jf} = \frac{\exp(k_{jf}/T + bias_{ij})}{\sum_{j' \in S_i} \exp(k_{j'f}/T + bias_{ij'})}

:math:`S_i` is what row i may see. A causal column softmax therefore normalises over the prefix: row i
weighs keys 0..i as if the sequence ended there, so its rows are distributions and never see the future.
Without a mask the matrix has rank at most d: it cannot copy more than d values [claim separable-weaker].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from avow.core import Computed, Cost, Method, Problem, Promise, Sizes
from avow.errors import ParameterError
from avow.numerics import heads, kernel_rounding, rounding, scan
from avow.numerics.kernel_rounding import KernelRounding
from avow.numerics.masks import masked, row_tiles
from avow.parameters import between, param


class Trace(NamedTuple):
    """In how many steps sums were taken, and how kernels rounded where they took them."""

    steps: int
    kernel: KernelRounding | None = None


@dataclass(frozen=True)
class Separable(Method):
    """Softmax over features of Q times softmax over positions of K."""

    name: ClassVar[str] = "separable"
    summary: ClassVar[str] = "softmax over Q's features times softmax over K's positions; linear, its own mechanism"
    averages: ClassVar[bool] = True
    target: ClassVar[str] = "separable attention"

    temperature: float = param(1.0, between(0, math.inf), "divides Q and K before their softmaxes")

    def state_features(self, dim: int) -> int:
        return dim

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p = heads.expand_gqa(self.checked(problem))
        wide = heads.linear_type(p)
        if p.mask_kind == "full":
            # One sum, in any order.
            return Computed(heads.cast_output(p, self._by_definition(p, wide)), Trace(p.k.shape[-2]))
        fast = self._by_kernels(p, wide)
        if fast is not None:
            return fast
        out, state = self._scanned(p, wide, None)
        return Computed(out, Trace(state.steps))

    def initial_state(self, problem: Problem, sample: Tensor | None = None) -> scan.State:
        features = problem.q.shape[-1]
        return scan.nothing(problem.v.to(rounding.accumulator(problem.q.dtype)), features, features)

    def read_on(self, problem: Problem, state: scan.State) -> tuple[Tensor, scan.State]:
        return self._scanned(problem, heads.linear_type(problem), state)

    def _scanned(self, p: Problem, wide: torch.dtype, before: scan.State | None) -> tuple[Tensor, scan.State]:
        """The answer from sums over keys, those known before included, and the sums over all of them."""
        values, size = heads.scaled_values(p, wide)
        queries, features = p.q.shape[-2:]
        start = scan.nothing(values, features, features)
        if before is not None:
            start, values, size = scan.in_one_unit(before, values, size)
        added, seen = heads.key_log(p, wide), heads.key_seen(p)

        def keys_of(span: slice) -> scan.Keys:
            log = self.cooled(p.k[..., span, :].to(wide))
            if added is not None:
                log = log + added[..., span, :]
            return scan.Keys(log, None, None if seen is None else seen[..., span, :])

        def mixture(rows: slice) -> Tensor:
            return heads.grouped(torch.softmax(self.cooled(p.q[..., rows, :].to(wide)), -1), p.k.shape[1])

        def causal_mixture(tile: scan.Tile) -> Tensor:
            prefix = scan.running(tile.features, tile.total)
            return mixture(tile.rows) / prefix.clamp_(min=_least(wide)).unsqueeze(2)

        if p.causal:
            sums, state = scan.causal(keys_of, causal_mixture, values, p.q.shape[1], queries, start, normalise=False)
        else:
            state = scan.absorb(keys_of, values, features, start if before is not None else None)
            columns = state._replace(sums=state.sums / state.total.clamp(min=_least(wide)))
            sums = scan.collect(mixture, p.q.shape[1], queries, columns, normalise=False)
        return heads.cast_output(p, heads.rescaled(sums.out, size)), state._replace(size=size)

    def _by_kernels(self, p: Problem, wide: torch.dtype) -> Computed | None:
        """The same answer where the device has kernels and they fit the problem."""
        from avow.kernels.availability import linear_kernels

        kernels = linear_kernels(p.q.device) if wide == torch.float32 else None
        means = None if kernels is None else kernels.column_means(p, self.temperature)
        if means is None:
            return None
        out, kernel = means
        return Computed(out, Trace(kernel.steps, kernel))

    def step(self, problem: Problem, state: scan.State) -> Tensor | None:
        from avow.kernels.availability import linear_kernels

        p, kernels = problem, linear_kernels(problem.q.device) if state.size is None else None
        return None if kernels is None else kernels.column_step(p.q, p.k, p.v, state, self.temperature)

    def cooled(self, x: Tensor) -> Tensor:
        """x over the temperature, a fresh tensor; what leaves the type stops at its end, and the bound says so."""
        if self.temperature >= 1:
            return x / self.temperature
        limits = torch.finfo(x.dtype)
        # A temperature below the type's range would be zero there, and zero over it nan.
        wide = x.double() if self.temperature < limits.tiny else x
        return (wide / self.temperature).clamp(-limits.max, limits.max).to(x.dtype)

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms = heads.expand_gqa(self.checked(problem)), problem.norms
        wide, dtype, trace = heads.linear_type(p), p.q.dtype, computed.trace
        kernel = trace.kernel
        products = rounding.products(wide, p.q.device.type) if kernel is None else kernel.products
        u, s, d = products.u, p.k.shape[-2], p.q.shape[-1]
        # Every weight is a product of positive numbers, so relative errors add up: two exponentials, their
        # arguments (divided, biased, shifted; what lies beyond underflow has no weight), then the sums.
        argument = 4 * u * rounding.underflow_log(wide) + 2 * rounding.flush_threshold(dtype) / self.temperature
        if p.bias is not None or self.temperature != 1 or kernel is not None:
            # Dividing and biasing round numbers as large as the inputs, before what they share is subtracted; and so
            # do logarithms to base 2.
            bias = 0.0 if p.bias is None else float(p.bias.abs().amax())
            argument += 4 * u * (max(norms.most[:2]) / self.temperature + bias)
        shared, apart, least = 0.0, 0.0, 1.0
        if kernel is not None:
            shared, apart, least = kernel.shared, kernel.apart, kernel_rounding.THIN if p.causal else 1.0
        moved = 2 * math.tanh(argument + rounding.EXP_ULPS * u + shared / 2)
        depth = scan.depth(s, trace.steps) + 2 * d
        relative = moved + 4 * products.dot(depth) + 8 * s * d * rounding.tiny(wide) / least + apart
        final = rounding.unit(dtype) if dtype != wide else 0.0
        rows = relative * (1 + final) + final + heads.underflow_bound(problem, s * d / least, wide)
        rows = heads.mask_bounds(p, rows * rounding.SAFETY)
        return Promise("deterministic", rows, assumptions=("exp is right to 64 ulp",))

    def cost(self, sizes: Sizes) -> Cost:
        z, m = sizes, sizes.dim
        item = 8 if z.biased else rounding.accumulator(z.dtype).itemsize
        rows, keys = z.batch * z.heads * z.queries, z.batch * z.linear_key_heads * z.keys
        if z.mask == "full":
            pairs = rows * z.keys
            return Cost(2 * pairs * z.value_dim, 4 * pairs * m, 20, 4 * item * min(pairs * m, 2**24))
        work = (rows + keys) * ((3 + z.causal) * m + 2 * z.value_dim)
        launches = 8 + scan.tile_count(z, m) * (24 if z.causal else 10)
        flops = scan.pass_flops(z, m, normalise=False) + (scan.running_flops(z, m) if z.causal else 0)
        return Cost(flops, work, launches, scan.peak_bytes(z, m, item, 0), item / 4)

    def reference(self, problem: Problem) -> Tensor:
        return self._by_definition(self.checked(problem), torch.float64)

    def reference_error(self, problem: Problem) -> Tensor:
        return self.promise(problem, Computed(problem.q, Trace(problem.k.shape[-2])), 1.0).rows

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Separable]:
        yield cls()

    def checked(self, p: Problem) -> Problem:
        """The problem, unless it asks for what has no meaning here."""
        if not p.default_scale or p.kernel != "dot":
            name, value = ("scale", p.scale) if p.kernel == "dot" else ("kernel", p.kernel)
            rule = "has no meaning for separable attention, which has no logits q·k"
            raise ParameterError(f"separable: {name}", value, rule, "leave it out and set temperature instead")
        return p

    def _by_definition(self, p: Problem, dtype: torch.dtype) -> Tensor:
        """Every weight written out: quadratic, for masks that differ by row and for the tests."""
        n, s, h = p.q.shape[-2], p.k.shape[-2], p.q.shape[1]
        k, v = (heads.per_query_head(x.to(dtype), h) for x in (p.k, p.v))
        parts = []
        for rows in row_tiles(n, p.q.shape[0] * h * s * p.q.shape[-1]):
            rho = torch.softmax(self.cooled(p.q[..., rows, :].to(dtype)), -1)
            added = masked(p, k.new_zeros(1, 1, 1, s), rows).unsqueeze(-1)
            log = self.cooled(k).unsqueeze(-3) + added  # (b, h, l, s, d)
            top = log.detach().amax(-2, keepdim=True)
            columns = torch.exp(log - top.masked_fill(top == -math.inf, 0.0))
            columns = columns / columns.sum(-2, keepdim=True).clamp(min=_least(dtype))
            weights = (columns * rho.unsqueeze(-2)).sum(-1)  # (b, h, rows, s)
            parts.append(weights @ v)
        return torch.cat(parts, -2)


def _least(dtype: torch.dtype) -> float:
    """Below any sum that a visible key contributes to, which is at least one."""
    return torch.finfo(dtype).tiny
