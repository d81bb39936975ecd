r"""Softmax attention that reads in full only the tokens that may matter, and proves of the others that they do not.

A sketch of the keys gives every logit an interval, :math:`l_j \in [a_j, b_j]`. Tokens are read in full from the top
down until what is left can no longer move the answer. With H the tokens read, :math:`Z_H` the sum of their weights and
T the others,

.. math:: \|o^* - out\| = \frac{\|\sum_T w_j (v_j - out)\|}{Z_H + \sum_T w_j}
          \le \frac{\sum_T e^{b_j} (\|v_j\| + \|out\|)}{Z_H + \sum_T e^{a_j}}   [claim tail-mass-output]

With `chance` > 0 the others are sampled instead of dropped: token j is read with probability
:math:`p_j = \min(1, \lambda e^{b_j} (\|v_j\| + ν))` and counts :math:`1/p_j`-fold. How far the estimate is from the
truth follows from the proved range of each term by Bernstein's inequality, so that flat heads become cheap, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avow.contract import Computed, Cost, Method, Norms, Problem, Promise, Prospect, Sizes
from avow.maths import rounding, tails
from avow.maths.heads import grouped, highest_bias, per_query_head, scaled_values, ungrouped
from avow.maths.masks import at_rows, past, row_tiles
from avow.maths.norms import row_norms, slack
from avow.maths.sketch import Sketch, intervals, sketched
from avow.maths.softmax import softmax_average
from avow.params import Rule, param

# Beyond this many nats below the row's top, a key's whole share is smaller than any bound we state.
_DEAD = 100.0
# Float64 sums over fewer than 2^22 keys, products of a few factors, and exp itself.
_SUMS = 1e-9
# Plans aim for this share of what may be dropped, since they only guess what the rest weighs.
_SAFE = 0.97
# Samples, whose proofs depend on the draws, are planned thrice, each larger and with the former in it.
_LADDER = (0.95, 0.75, 0.55)
# Plans that turn out to drop too much before everything is read.
_PLANS = 4
# Shares of the chance that the answer's deviation, its variance, the mass's deviation and its variance may fail.
_SHARES = (0.8, 0.1, 0.05, 0.05)


class Trace(NamedTuple):
    """What unread tokens may have moved each row, in its unit; the unit; and how many tokens were read in full."""

    tails: Float64[Tensor, "b h n"]
    most: Float64[Tensor, "b h n"]
    read: Float64[Tensor, "b h n"]


@dataclass(frozen=True)
class Sparse(Method):
    """Softmax attention over the tokens that may matter, found by a sketch of the keys."""

    name: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "reads in full only tokens that may matter; proves that the others do not"
    random: ClassVar[bool] = True

    drop: float = param(5e-3, Rule("must be at least 0", lambda x: x >= 0), "error that unread tokens may cause")
    bits: int = param(4, Rule("must be from 1 to 8", lambda x: 1 <= x <= 8), "bits of a key's number in the sketch")
    chance: float = param(
        0.0, Rule("must be at least 0 and below 1", lambda x: 0 <= x < 1), "chance that a row's bound fails; 0: none"
    )

    def compute(
        self, problem: Problem, generator: torch.Generator | None = None, sketch: Sketch | None = None
    ) -> Computed:
        p = problem
        values, size = scaled_values(p, torch.float64)
        lengths = _lengths(p.v.detach()) if p.norms is None else p.norms.v  # (b, g, s)
        known = _Known(
            p,
            values,
            per_query_head(lengths if size is None else lengths / size[..., 0], p.q.shape[1]),
            sketched(p.k, self.bits) if sketch is None else sketch,
        )
        b, h, n = p.q.shape[:3]
        parts = [self._tile(known, rows, generator) for rows in row_tiles(n, 16 * b * h * p.k.shape[-2])]
        out = torch.cat([part[0] for part in parts], -2)
        tails, unit, read = (torch.cat(xs, -1) for xs in zip(*(part[1] for part in parts), strict=True))
        if size is not None:
            size = per_query_head(size, h)
            out, unit = out * size, unit * size[..., 0]
        most = torch.finfo(p.q.dtype).max
        return Computed(out.clamp(-most, most).to(p.q.dtype), Trace(tails, unit, read))

    def _tile(self, known: _Known, rows: slice, generator: torch.Generator | None) -> tuple[Tensor, Trace]:
        """The answers of some rows, and what is known of them."""
        logits = known.logits(rows)
        with torch.no_grad():
            view = known.view(rows, logits.detach())
            odds, drawn, sampled = self._chosen(view, generator)
            # A row that sees nothing reads what it does not see, and is blanked below: softmax of nothing is nan.
            shown = drawn | ~view.seen.any(-1, keepdim=True)
        weights = torch.softmax(torch.where(shown, logits - odds.clamp(min=1e-300).log(), -math.inf), -1)
        out = weights @ per_query_head(known.values, logits.shape[1])
        out = torch.where(view.seen.any(-1, keepdim=True), out, 0.0)
        with torch.no_grad():
            tails = view.dropped(odds > 0, torch.linalg.vector_norm(out, dim=-1, keepdim=True))
            if self._samples(view):
                tails = torch.where(sampled, view.missed(odds, drawn, out, self._logs), tails)
        return out, Trace(tails.squeeze(-1), view.most.squeeze(-1), drawn.sum(-1).double())

    @property
    def _logs(self) -> Sequence[float]:
        """How unlikely each inequality's failure must be; deviations fail on two sides."""
        sides = (2, 1, 2, 1)
        return tuple(
            math.log(len(_LADDER) * k / (share * self.chance)) for k, share in zip(sides, _SHARES, strict=True)
        )

    def _samples(self, view: _View) -> bool:
        """Whether there is something to sample, and something to gain by it."""
        return self.chance > 0 and self.drop > 0 and view.known > 0

    def _chosen(
        self, view: _View, generator: torch.Generator | None
    ) -> tuple[Float64[Tensor, "b h n s"], Bool[Tensor, "b h n s"], Bool[Tensor, "b h n 1"]]:
        """The odds of each token, which of them are read, and which rows sample: every row within `drop`."""
        length = view.reached(view.worth(self.drop * torch.ones_like(view.most), 0.0))
        share = torch.full_like(view.most, _SAFE)
        kept = view.worth(self.drop * share, length)
        for plan in range(_PLANS):
            tails = view.dropped(kept, length)
            wrong = tails > self.drop
            if not torch.compiler.is_compiling() and not bool(wrong.any()):
                break
            share = torch.where(wrong, share * (0.5 * self.drop / tails), share)
            kept = view.worth(self.drop * share, length) if plan < _PLANS - 1 else kept | (wrong & view.seen)
        odds, drawn = kept.double(), kept
        sampled = torch.zeros_like(view.most, dtype=torch.bool)
        if self._samples(view):
            draws = torch.rand(odds.shape, generator=generator, device=odds.device, dtype=torch.float64)
            for aim in _LADDER:
                # Fixed before anything is drawn, so that each rung's law is that of independent draws.
                some = view.odds(self.drop * aim, length, self._logs)
                fewer = some.sum(-1, keepdim=True) < kept.sum(-1, keepdim=True)
                taken = draws < some
                proved = view.missed(some, taken, None, self._logs) <= self.drop
                now = fewer & proved & taken.any(-1, keepdim=True) & ~sampled
                odds, drawn = torch.where(now, some, odds), torch.where(now, taken, drawn)
                sampled = sampled | now
        return odds, drawn, sampled

    def promise(self, problem: Problem, norms: Norms, computed: Computed, confidence: float) -> Promise:
        p, trace = problem, computed.trace
        keys = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
        rows = self._rounded(p, abs(p.scale) * norms.q * keys, trace.tails)
        lost = math.sqrt(p.v.shape[-1]) * rounding.tiny(p.q.dtype)
        seen = trace.most > 0
        rows = torch.where(seen, rows + lost / trace.most.clamp(min=1e-300), torch.zeros_like(rows))
        share = float(trace.read.sum()) / max(_visible_pairs(p), 1)
        kind, sure = ("statistical", 1 - self.chance) if self.chance else ("deterministic", 1.0)
        return Promise(
            "statistical" if kind == "statistical" else "deterministic",
            rows,
            sure,
            assumptions=("sums and exp of float64 are right to 1e-9",),
            reason=f"read {share:.1%} of the tokens in full",
        )

    def foresee(self, problem: Problem, norms: Norms, confidence: float) -> Prospect:
        query, key, _ = norms.most
        reach = torch.tensor(abs(problem.scale) * query * key, dtype=torch.float64)
        bound = float(self._rounded(problem, reach, torch.tensor(self.drop, dtype=torch.float64)))
        return Prospect(bound * rounding.OUTWARD, "statistical" if self.chance else "deterministic", True)

    def _rounded(self, p: Problem, reach: Tensor, tails: Tensor) -> Tensor:
        """Bounds on whole rows: what was not read, and the rounding of what was."""
        d, s, u = p.q.shape[-1], p.k.shape[-2], rounding.unit(torch.float64)
        # Logits, their differences from the row's top, and biases beside them: those within Λ = 4S + ln s + 100 matter.
        delta = reach * (rounding.gamma(d + 8, u) + 32 * u) + 8 * u * (math.log(max(s, 1)) + _DEAD)
        if p.kernel == "rbf":
            # The bias −‖k‖²/2σ is itself a rounded sum, and the caller's mask may have swallowed part of it.
            own = 0.5 * abs(p.scale) * float(p.k.detach().double().square().sum(-1).amax())
            delta = delta + rounding.gamma(d + 8, u) * own + 4 * u * (highest_bias(p) + own + 2 * _DEAD)
        rows = tails * torch.exp(2 * delta.clamp(max=_DEAD)) * (1 + _SUMS) + 2 * torch.tanh(delta / 2) + _SUMS
        rows = rows.clamp(max=2 + _SUMS)  # Answer and target are both averages of values.
        final = 0.0 if p.q.dtype == torch.float64 else rounding.unit(p.q.dtype)
        return (rows * (1 + final) + final) * rounding.OUTWARD

    def cost(self, sizes: Sizes) -> Cost:
        z = sizes
        rows, pairs = z.batch * z.heads * z.queries, z.batch * z.heads * z.queries * z.keys
        near = rows * (z.keys // 64 * 64)
        flops = 2 * near * z.dim + 2 * rows * z.dim + 2 * pairs * (z.dim + 2 * z.value_dim)
        if self.chance:
            flops += 8 * pairs * z.value_dim
        return Cost(flops, 60 * pairs, 60, self._held(z), 2.0)

    def _held(self, z: Sizes) -> int:
        tile = min(z.queries, max(1, 2**24 // max(16 * z.batch * z.heads * z.keys, 1)))
        pairs = z.batch * z.heads * tile * z.keys
        copies = z.batch * z.keys * (z.key_heads * (z.dim + z.value_dim) + z.heads * z.value_dim) * 8
        return 10 * 8 * pairs + copies

    def reference(self, problem: Problem) -> Tensor:
        p = problem
        return softmax_average(p.q, p.k, p.v, p.allowed, p.bias, p.causal, p.scale)

    @classmethod
    def aimed(
        cls, parameters: Mapping[str, Any], sizes: Sizes, tol: float | None, confidence: float
    ) -> Mapping[str, Any]:
        """With all of the tolerance to drop that rounding does not need, and the chance that was asked for."""
        final = 0.0 if sizes.dtype == torch.float64 else rounding.unit(sizes.dtype)
        found: dict[str, Any] = {"chance": 1 - confidence}
        if tol is not None:
            found["drop"] = max(0.0, (tol - final) / (1 + final) * (1 - 1e-6) - 1e-6)
        return found | dict(parameters)

    @classmethod
    def settings(cls, sizes: Sizes) -> Iterator[Sparse]:
        for drop in (1e-1, 1e-2, 1e-3):
            yield cls(drop)


@dataclass(frozen=True)
class _Known:
    """A problem, its values in float64 brought near one, their lengths, and the sketch of its keys."""

    problem: Problem
    values: Float64[Tensor, "b g s e"]
    lengths: Float64[Tensor, "b h s"]
    sketch: Sketch

    def logits(self, rows: slice) -> Float64[Tensor, "b h n s"]:
        """Every logit of some rows, of hidden keys too."""
        p = self.problem
        q, k = grouped(p.q[:, :, rows].double(), p.k.shape[1]), p.k.double()
        logits = ungrouped(
            (q * p.scale).flatten(2, 3).matmul(k.transpose(-1, -2)).unflatten(2, (q.shape[2], q.shape[3]))
        )
        return logits if p.bias is None else logits + self._bias(rows)

    def view(self, rows: slice, logits: Float64[Tensor, "b h n s"]) -> _View:
        """What the sketch says of some rows."""
        p = self.problem
        q = grouped(p.q[:, :, rows].detach(), p.k.shape[1])  # (b, g, r, n, d)
        middle, half = intervals(q.flatten(2, 3), self.sketch, p.scale)
        middle, half = (ungrouped(x.unflatten(2, q.shape[2:4])) for x in (middle, half))  # (b, h, n, s0)
        known = self.sketch.rows
        if p.bias is not None:
            bias = self._bias(rows)[..., :known].detach()
            middle, half = middle + bias, half + 2.0**-50 * (bias.abs() + middle.abs())
        seen = self._seen(rows).expand(logits.shape)
        lengths = self.lengths.unsqueeze(-2)  # (b, h, 1, s)
        most = torch.where(seen, lengths, 0.0).amax(-1, keepdim=True) * (1 - 2 * slack(p.v.shape[-1], p.v.dtype))
        values = per_query_head(self.values.detach(), logits.shape[1])
        hidden = ~seen[..., :known]
        low, guess, high = (x.masked_fill(hidden, -math.inf) for x in (middle - half, middle, middle + half))
        origin = guess.amax(-1, keepdim=True) if known else guess.new_zeros(*guess.shape[:-1], 1)
        origin = origin.masked_fill(origin == -math.inf, 0.0)
        expected = (guess - origin).exp()
        logits = logits.masked_fill(~seen, -math.inf)
        return _View(logits, seen, low, high, expected, origin, lengths, values, most, known)

    def _seen(self, rows: slice) -> Bool[Tensor, "#b #h #n s"]:
        p = self.problem
        n, s = p.q.shape[-2], p.k.shape[-2]
        seen = torch.ones(1, 1, 1, s, dtype=torch.bool, device=p.q.device)
        if p.causal:
            seen = past(n, s, p.q.device)[None, None, rows]
        return seen if p.allowed is None else seen & at_rows(p.allowed, rows)

    def _bias(self, rows: slice) -> Float64[Tensor, "#b #h #n s"]:
        """Biases below the highest that a row sees: what all keys share cancels, and may be huge."""
        p = self.problem
        assert p.bias is not None
        bias = at_rows(p.bias, rows).double()
        top = torch.where(self._seen(rows), bias, -math.inf).amax(-1, keepdim=True)
        return bias - top.masked_fill(top == -math.inf, 0.0)


@dataclass(frozen=True)
class _View:
    """Rows beside the tokens: logits, and what the sketch says of the first `known` of them; all in float64."""

    logits: Float64[Tensor, "b h n s"]
    seen: Bool[Tensor, "b h n s"]
    low: Float64[Tensor, "b h n s0"]
    high: Float64[Tensor, "b h n s0"]
    expected: Float64[Tensor, "b h n s0"]
    """The weights that the sketch expects, as multiples of exp(origin)."""
    origin: Float64[Tensor, "b h n 1"]
    lengths: Float64[Tensor, "b h 1 s"]
    values: Float64[Tensor, "b h s e"]
    most: Float64[Tensor, "b h n 1"]
    known: int

    def terms(self, length: Tensor | float) -> Float64[Tensor, "b h n s0"]:
        """How much each token, unread, may move a row's sum if the answer has this length: as logarithms."""
        return self.high - self.origin + (self.lengths[..., : self.known] + length).log()

    def worth(self, drop: Float64[Tensor, "b h n 1"], length: Tensor | float) -> Bool[Tensor, "b h n s"]:
        """Tokens to read so that the others move a row by about `drop`; those without a sketch always."""
        kept = self.seen.clone()
        if self.known:
            terms = self.terms(length)
            bins = tails.binned(terms)
            total = self.expected.sum(-1, keepdim=True)
            kept[..., : self.known] &= bins.place < tails.cut(bins, terms.exp(), drop * self.most * total)
        # Where all values are zero no token matters, and an average still needs one.
        return kept | (self.seen & ~kept.any(-1, keepdim=True))

    def reached(self, kept: Bool[Tensor, "b h n s"]) -> Float64[Tensor, "b h n 1"]:
        """At least the length of the answer that these tokens give, alone or with any others."""
        weights = torch.where(kept, self.logits - self.top(kept), -math.inf).exp()
        out = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ self.values
        length = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
        # Tokens that join move the answer by no more than all that are missing might, and never beyond the longest.
        moved = (length + self.dropped(kept, length) * self.most) * (1 + _SUMS)
        return torch.minimum(moved, torch.where(self.seen, self.lengths, 0.0).amax(-1, keepdim=True))

    def top(self, kept: Bool[Tensor, "b h n s"]) -> Float64[Tensor, "b h n 1"]:
        top = torch.where(kept, self.logits, -math.inf).amax(-1, keepdim=True)
        return top.masked_fill(top == -math.inf, 0.0)

    def dropped(self, kept: Bool[Tensor, "b h n s"], length: Float64[Tensor, "b h n 1"]) -> Float64[Tensor, "b h n 1"]:
        """How far the tokens that are not kept may move the answer of this length, at most."""
        top = self.top(kept)
        tail = self.seen[..., : self.known] & ~kept[..., : self.known]
        whole = torch.where(kept, self.logits - top, -math.inf).exp().sum(-1, keepdim=True)
        least, most = (torch.where(tail, x - top, -math.inf).exp() for x in (self.low, self.high))
        moved = torch.where(tail, most * (self.lengths[..., : self.known] + length), 0.0).sum(-1, keepdim=True)
        moved = moved / ((whole + least.sum(-1, keepdim=True)) * self.most).clamp(min=1e-300)
        moved = moved.nan_to_num(nan=math.inf, posinf=math.inf)  # far above what is kept, both sums overflow
        return torch.where((self.most > 0) & tail.any(-1, keepdim=True), moved, 0.0)

    def odds(
        self, drop: float, length: Float64[Tensor, "b h n 1"], logs: Sequence[float]
    ) -> Float64[Tensor, "b h n s"]:
        """Chances to read each token, so small that the estimate may still be expected to prove `drop`."""
        odds = self.seen.double()
        terms = self.terms(length)
        bins = tails.binned(terms)
        weights = self.expected
        total = weights.sum(-1, keepdim=True)
        reach = self.lengths[..., : self.known] + length
        edges = bins.edges()
        # Tokens from bin c on are sampled with odds term/edge: sums over them of what their variance is made of.
        behind = [
            bins.sums(x).flip(-1).cumsum(-1).flip(-1)
            for x in ((weights * reach).square() / terms.exp(), weights.square() / terms.exp(), weights)
        ]
        largest = edges.exp()
        shortest = reach.amin(-1, keepdim=True).clamp(min=1e-300)
        apart, mass = (
            tails.deviation(tails.at_most(largest * x.nan_to_num(), bound.square(), own_log), bound, log)
            for x, bound, log, own_log in (
                (behind[0], largest, logs[0], logs[1]),
                (behind[1], largest / shortest, logs[2], logs[3]),
            )
        )
        expected = (apart + mass * behind[2] / total * 2 * length) / ((total - mass) * self.most)
        hopeless = (total <= mass) | ~(expected <= drop)
        # The first bin from which on all plans are expected to do.
        first = hopeless.flip(-1).cummax(-1).values.flip(-1).sum(-1, keepdim=True)
        last = first >= edges.shape[-1]
        edge = edges.gather(-1, first.clamp(max=edges.shape[-1] - 1))
        some = torch.where(last, 0.0, terms - edge).clamp(max=0.0).exp()
        odds[..., : self.known] *= some
        return odds

    def missed(
        self,
        odds: Float64[Tensor, "b h n s"],
        drawn: Bool[Tensor, "b h n s"],
        out: Float64[Tensor, "b h n e"] | None,
        logs: Sequence[float],
    ) -> Float64[Tensor, "b h n 1"]:
        """How far the estimate from these draws is from the truth, at most, up to the chances that `logs` stand for."""
        values = self.values
        tail = self.seen[..., : self.known] & (odds[..., : self.known] < 1)
        certain = drawn & (odds == 1)
        top = self.top(drawn)
        weights = torch.where(drawn, self.logits - top, -math.inf).exp()
        counted = weights / odds.clamp(min=1e-300)
        total = counted.sum(-1, keepdim=True)
        if out is None:
            out = (counted / total.clamp(min=1e-300)) @ values
        # Fixed before the draws: what the tokens that are read for certain give, if the others add nothing but weight.
        core = torch.where(certain, weights, 0.0)
        others = torch.where(tail, self.expected * (self.origin - top).exp(), 0.0).sum(-1, keepdim=True)
        core = core / (core.sum(-1, keepdim=True) + others).clamp(min=1e-300)
        center = core @ values  # (b, h, n, e)
        length = torch.linalg.vector_norm(center, dim=-1, keepdim=True)
        square = values.square().sum(-1).unsqueeze(-2)
        apart = (square - 2 * (center @ values.transpose(-1, -2)) + length.square()).clamp(min=0)[..., : self.known]
        p = torch.where(tail, odds[..., : self.known], 1.0)
        high = torch.where(tail, self.high - top, -math.inf).exp()
        reach = self.lengths[..., : self.known] + length
        taken = torch.where(drawn[..., : self.known] & tail, weights[..., : self.known], 0.0)
        one = torch.ones_like(p)
        far, mass = (
            _far(taken.square() * square, high * bound, p, log, own_log)
            for square, bound, log, own_log in ((apart, reach, logs[0], logs[1]), (one, one, logs[2], logs[3]))
        )
        shift = torch.linalg.vector_norm(out - center, dim=-1, keepdim=True)
        least = total - mass
        moved = (far + mass * shift) * (1 + _SUMS) / (least * self.most).clamp(min=1e-300)
        moved = torch.where(least > 0, moved, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where((self.most > 0) & tail.any(-1, keepdim=True), moved, 0.0)


def _lengths(v: Tensor) -> Float64[Tensor, "b g s"]:
    """Upper bounds on the lengths of values; compiled, without a look at how large they are."""
    if torch.compiler.is_compiling():
        norms = torch.linalg.vector_norm(v.to(rounding.accumulator(v.dtype)), dim=-1)
        return norms.double() * (1 + slack(v.shape[-1], v.dtype) / 2)
    return row_norms(v, "v")


def _far(taken: Tensor, most: Tensor, p: Tensor, log: float, own_log: float) -> Float64[Tensor, "b h n 1"]:
    """How far a sum that counts what is drawn 1/p-fold may be from the whole sum, given the squares of what was drawn
    and the most that each term can be; its variance is estimated from the draws, and never taken for more than proved.
    """
    largest = (most / p).amax(-1, keepdim=True)
    found = (taken * (1 - p) / p.square()).sum(-1, keepdim=True)
    proved = (most.square() * (1 - p) / p).sum(-1, keepdim=True)
    variance = torch.minimum(tails.at_most(found, largest.square(), own_log), proved)
    return tails.deviation(variance * (1 + _SUMS), largest * (1 + _SUMS), log)


def _visible_pairs(p: Problem) -> int:
    """How many pairs of a row and a key it sees there are."""
    b, h, n = p.q.shape[:3]
    s = p.k.shape[-2]
    if p.allowed is None:
        per_head = sum(min(i + 1, s) for i in range(n)) if p.causal else n * s
        return b * h * per_head
    seen = p.allowed & past(n, s, p.q.device) if p.causal else p.allowed
    return int(seen.expand(b, h, n, s).sum())
