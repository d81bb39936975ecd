r"""Softmax attention that reads in full only the tokens that may matter, and proves of the others that they do not.

A sketch of the keys gives every logit an interval, :math:`l_j \in [a_j, b_j]`. Tokens are read in full from the top
down until what is left can no longer move the answer. With H the tokens read, :math:`Z_H` the sum of their weights and
T the others,

.. math:: \|o^* - out\| = \frac{\|\sum_T w_j (v_j - out)\|}{Z_H + \sum_T w_j}
          \le \frac{\sum_T e^{b_j} (\|v_j\| + \|out\|)}{Z_H + \sum_T e^{a_j}}   [claim tail-mass-output]

All query heads that share a key head read what any of them does, so that each may stop earlier; and not all unread
tokens can be at their worst at once (`avow.numerics.token_ranking`).

With `chance` > 0 the others are sampled instead of dropped: token j is read with probability
:math:`p_j = \min(1, \lambda e^{b_j} (\|v_j\| + ν))` and counts :math:`1/p_j`-fold. How far the estimate is from the
truth follows from the proved range of each term by Bernstein's inequality, so that flat heads become cheap, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avow.core import BoundEstimate, Computed, Cost, Method, Problem, Promise, Sizes
from avow.core.requirement import INDEPENDENT
from avow.numerics import rounding
from avow.numerics.gather import Gathered, Masked
from avow.numerics.heads import distance_rounding, per_query_head, ungrouped
from avow.numerics.masks import row_tiles, visible_pairs
from avow.numerics.shard_steps import alone
from avow.numerics.sketch import GROUP, SQUARINGS, Sketch, sketched
from avow.numerics.sketched_problem import Known
from avow.numerics.softmax import softmax_average
from avow.numerics.sparse_reading import SparseReading
from avow.numerics.tail_samples import LADDER
from avow.numerics.token_ranking import SUMS
from avow.parameters import Rule, from_to, param

# Values shorter than this are measured too coarsely for a proof.
_FAINT = 1e-290


class Trace(NamedTuple):
    """What unread tokens may have moved each row, in its unit; the unit; how many tokens were read in full; what sums
    may have lost to underflow; how many tokens of a key head were read for any of its query heads; and which tokens
    were read, if that was asked for.
    """

    tails: Float64[Tensor, "b h n"]
    most: Float64[Tensor, "b h n"]
    read: Float64[Tensor, "b h n"]
    lost: Float64[Tensor, "b h n"]
    distinct: Float64[Tensor, "b g n"]
    selected: Bool[Tensor, "b h n s"] | None = None


def _percent(share: float) -> str:
    """
    >>> _percent(0.0834), _percent(1 / 32768), _percent(0.0)
    ('8.3%', '0.0031%', '0.0%')
    """
    return f"{100 * share:.2g}%" if 0 < share < 5e-4 else f"{share:.1%}"


@dataclass(frozen=True)
class Sparse(Method):
    """Softmax attention over the tokens that may matter, found by a sketch of the keys."""

    name: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "reads in full only tokens that may matter; proves that the others do not"
    averages: ClassVar[bool] = True
    random: ClassVar[bool] = True
    selects_tokens: ClassVar[bool] = True

    drop: float = param(5e-3, Rule("must be at least 0", lambda x: x >= 0), "error that unread tokens may cause")
    bits: int = param(4, from_to(1, 8), "bits of a key's number in the sketch")
    chance: float = param(
        0.0, Rule("must be at least 0 and below 1", lambda x: 0 <= x < 1), "chance that a row's bound fails; 0: none"
    )

    @property
    def statistical(self) -> bool:
        return self.chance > 0

    def compute(
        self,
        problem: Problem,
        generator: torch.Generator | None = None,
        sketch: Sketch | None = None,
        selection: bool = False,
    ) -> Computed:
        """The answer. Given a `sketch` of the first keys, no other token than those it chooses is touched.

        With `selection` the trace says which tokens were read; that takes a byte for each pair of row and key.
        """
        p = problem
        known = Known.of(p, sketched(p.k, self.bits) if sketch is None else sketch, gathers=sketch is not None)
        b, h, n = p.q.shape[:3]
        tiles = row_tiles(n, 16 * b * h * p.k.shape[-2])
        parts: list[Any] = [self._tile(known, rows, generator, selection) for rows in tiles]
        *parts, selected = zip(*parts, strict=True)
        out, tails, unit, read, distinct = (torch.cat(xs, -2) for xs in parts)
        size = per_query_head(known.size, h)
        tails, unit, read = (x.squeeze(-1) for x in (tails, unit, read))
        terms = (p.k.shape[-2] + 4) * math.sqrt(p.v.shape[-1])
        lost = (terms * rounding.tiny(torch.float64) * size[..., 0]).expand(tails.shape)
        trace = Trace(tails, unit, read, lost, distinct.squeeze(-1), torch.cat(selected, -2) if selection else None)
        return Computed(rounding.saturating_cast(out * size, p.q.dtype), trace)

    def _tile(
        self, known: Known, rows: slice, generator: torch.Generator | None, selection: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The answers of some rows, what unread tokens may have moved them, their units, and how much was read: by each
        query head, and by any that share a key head; and with `selection` which tokens each query head read.
        """
        tokens, n = known.tokens(rows), rows.stop - rows.start
        siblings = known.problem.q.shape[1] // max(known.problem.k.shape[1], 1)
        sampling = self.chance > 0 and self.drop > 0
        whole = None if known.gathers else Masked.of(tokens)
        unit = known.longest(rows)
        with torch.no_grad():
            # Samples are each row's own; else query heads of a key head read what any of them does.
            view = known.view(rows, 1 if sampling else siblings, tokens.bias)
            nothing = Gathered.of(tokens) if whole is None else whole.detached()
            most = unit / known.size
            drop, chance = torch.full_like(most, self.drop), self.chance if sampling else 0.0
            reading = SparseReading(view, nothing, view.extent, most, drop, tokens.k.shape[-2], chance, generator)
            answer = alone(reading.steps())
        out = answer.state.out
        if whole is not None:  # once more, for autograd
            read = whole.joined(answer.kept)
            weights = read.weights if answer.odds is None else read.weights / answer.odds.clamp(min=1e-300)
            out = read.average(weights) / read.sum(weights).clamp(min=1e-300)
        touched = answer.touched
        shared = touched.unflatten(2, (siblings, n)).any(2)  # (b, g, n, s)
        parts = (out, answer.tails, unit, touched.sum(-1, keepdim=True).double())
        out, tails, unit, count = (ungrouped(x.unflatten(2, (siblings, n))) for x in parts)
        chosen = touched.unflatten(2, (siblings, n)).flatten(1, 2) if selection else None
        return out, tails, unit, count, shared.sum(-1, keepdim=True).double(), chosen

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms, trace = problem, problem.norms, computed.trace
        keys = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
        rows = self._rounded(p, abs(p.scale) * norms.q * keys, trace.tails)
        lost = math.sqrt(p.v.shape[-1]) * rounding.tiny(p.q.dtype)
        rows = rows + (lost + trace.lost) / trace.most
        # Where all values are zero, so is the answer; lengths near the end of float64 are no longer sharp.
        rows = torch.where(trace.most == 0, 0.0, torch.where(trace.most < _FAINT, math.inf, rows))
        pairs = visible_pairs(p)
        share = float(trace.read.sum()) / max(pairs, 1)
        return Promise(
            "statistical" if self.chance else "deterministic",
            rows,
            1 - self.chance,
            assumptions=("sums and exp of float64 are right to 1e-9", *((INDEPENDENT,) if self.chance else ())),
            reason=f"read {_percent(share)} of the tokens in full",
        )

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        query, key, _ = problem.norms.most
        reach = torch.tensor(abs(problem.scale) * query * key, dtype=torch.float64, device="cpu")
        bound = float(self._rounded(problem, reach, torch.full_like(reach, self.drop)))
        return BoundEstimate(bound * rounding.SAFETY, "statistical" if self.chance else "deterministic", True)

    def _rounded(self, p: Problem, reach: Tensor, tails: Tensor) -> Tensor:
        """Bounds on whole rows: what was not read, and the rounding of what was."""
        d, s, u = p.q.shape[-1], p.k.shape[-2], rounding.unit(torch.float64)
        # Logits, their differences from the row's top, and biases beside them: those within Λ = 4S + ln s + 100 matter.
        delta = reach * (rounding.gamma(d + 8, u) + 32 * u) + 8 * u * (math.log(max(s, 1)) + rounding.NEGLIGIBLE_NATS)
        if p.kernel == "rbf":
            longest = float(p.k.detach().double().square().sum(-1).amax())
            delta = delta + distance_rounding(p, 0.5 * abs(p.scale) * longest)
        rows = (
            tails * torch.exp(2 * delta.clamp(max=rounding.NEGLIGIBLE_NATS)) * (1 + SUMS)
            + 2 * torch.tanh(delta / 2)
            + SUMS
        )
        rows = rows.clamp(max=2 + SUMS)  # Answer and target are both averages of values.
        final = 0.0 if p.q.dtype == torch.float64 else rounding.unit(p.q.dtype)
        return (rows * (1 + final) + final) * rounding.SAFETY

    def cost(self, sizes: Sizes) -> Cost:
        z = sizes
        rows, pairs = z.batch * z.heads * z.queries, z.batch * z.heads * z.queries * z.keys
        groups = z.keys // GROUP
        near = 2 * rows * (groups * GROUP + groups + (1 if z.biased else 3)) * z.dim
        near += 2 * z.batch * z.key_heads * (groups * GROUP + SQUARINGS * z.dim) * z.dim**2
        averages = 4 + 2 * len(LADDER) if self.chance > 0 and self.drop > 0 else 4
        flops = near + 2 * pairs * (z.dim + averages * z.value_dim)
        return Cost(flops, 150 * pairs, 150, self._held(z), 2.0)

    def _held(self, z: Sizes) -> int:
        tile = min(z.queries, max(1, 2**24 // max(16 * z.batch * z.heads * z.keys, 1)))
        pairs = z.batch * z.heads * tile * z.keys
        copies = z.batch * z.keys * z.key_heads * (z.dim + 2 * z.value_dim) * 8
        return 14 * 8 * pairs + copies

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def tune(
        cls, parameters: Mapping[str, Any], sizes: Sizes, tol: float | None, confidence: float
    ) -> Mapping[str, Any]:
        """With all of the tolerance to drop that rounding does not need, and the chance that was asked for."""
        final = 0.0 if sizes.dtype == torch.float64 else rounding.unit(sizes.dtype)
        tuned: dict[str, Any] = {"chance": 1 - confidence}
        if tol is not None:
            tuned["drop"] = max(0.0, (tol - final) / (1 + final) * (1 - 1e-6) - 1e-6)
        return tuned | dict(parameters)

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Sparse]:
        for drop in (1e-1, 1e-2, 1e-3):
            yield cls(drop)
