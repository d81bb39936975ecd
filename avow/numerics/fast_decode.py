r"""Averages of values under exponential weights from the heavy tokens alone: no masks, no biases, no odds.

It does what `tail_histogram` and `gather` do for any problem, made for long caches on a CPU, where every look at all
tokens counts. Tokens have an upper end each; where to stop is guessed from every few of them and proved from all:

.. math:: \|o^* - o_H\| \le \frac{\sum_T e^{b_j} (\|v_j\| + \|o_H\|)}{Z_H}   [claim tail-mass-output]

or from what they weigh together, as `aggregate_error` has it, where that is less.

A head reads what any of its rows wants, and gives it to all of them. What is read is multiplied in float32 as long as
its rounding is a small part of what may be lost, and in float64 otherwise; short sums go on in float64. Both loops over
all tokens, the look at the sketch and the sums of what is left, are compiled where a compiler is at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from avow.numerics.brackets import Ends, ends
from avow.numerics.rounding import EXP_ULPS, products, softmax_l1_bound, tiny, unit
from avow.numerics.selection import Unfit, View, crowded, uppers, where
from avow.numerics.sketch import GROUP, Sketch

# What is aimed at, of what may be lost; less whenever that was not enough.
_AIMS = (0.98, 0.95, 0.8, 0.5)
# How many times more than is expected to be allowed may be left unread at first, where a look before this one says so.
_BOLDEST = 32.0
# Rows whose products are summed in float32 before float64 goes on.
_SHORT = 256
# The share of what may be lost that float32 may take.
_ROUNDING = 0.1
# Largest products and lengths for which float32 has room; smallest lengths.
_REACH, _LONG, _FAINT = 1e4, 1e15, 1e-15


class Skimmed(NamedTuple):
    """Averages, how far unread tokens and float32 may have moved them in units of `most`, and how many were read."""

    out: Float64[Tensor, "b g r e"]
    moved: Float64[Tensor, "b g r"]
    read: Int[Tensor, "b g"]
    bolder: Float64[Tensor, "b g r"]
    """By how much more a look like this one might have left unread: what the next one may begin with."""


@dataclass(frozen=True)
class Skim:
    """A look at all tokens, before the first is read."""

    q: Float64[Tensor, "b g r d"]
    """Multiplied by the factor."""
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    most: Float64[Tensor, "b g"]
    """A lower bound on the longest value's length."""
    drop: float
    kind: torch.dtype
    rounding: Float64[Tensor, "b g r"]
    """How far arithmetic in `kind` may move an average, in units of `most`."""
    stray: Float64[Tensor, "b g r"]
    """How far it may move a logarithm of a weight."""
    view: View
    hidden: int
    bold: Float64[Tensor, "b g r"]
    """How many times what is expected to be allowed is left unread at first."""

    @staticmethod
    def over(
        q: Float[Tensor, "b g r d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        sketch: Sketch,
        factor: float,
        longest_key: Float64[Tensor, "b g"],
        lengths: Float[Tensor, "b g s"],
        longest: Float64[Tensor, "b g"],
        most: Float64[Tensor, "b g"],
        drop: float,
        hidden: int = 0,
        compiled: bool = False,
        bold: Float64[Tensor, "b g r"] | None = None,
    ) -> Skim:
        """What the sketch of the first keys says of all tokens but the first `hidden`.

        `lengths` bound those of values, none of them above `longest`. `bold` may hold what a look before this one
        bounds: sketches promise less than is true, by about the same in step after step. Raises `Unfit` where float32
        has no room for these numbers.
        """
        known = sketch.rows
        if known == 0:
            raise Unfit("nothing is sketched")
        errors = ends(q, sketch, factor)
        _check(errors, sketch, longest)
        wide = q.detach().double() * factor
        kind, rounding, stray = _arithmetic(wide, k, v, longest_key, longest, drop)
        bounds = uppers(errors, sketch, compiled, int(hidden > 0 and known > GROUP))
        if hidden:
            bounds.weights.flatten(3)[..., :hidden] = 0
            bounds.tops.copy_(bounds.weights.amax(-1))
            bounds.sums.copy_(bounds.weights.sum(-1))
            bounds.radii.copy_((bounds.weights * sketch.radius.float().unsqueeze(2)).sum(-1))
        near = lengths[..., :known].float() if lengths.dtype != torch.float64 else _up(lengths[..., :known])
        # Ends are above what is expected by about their radius, of each group the mean under its weights.
        shrunk = torch.exp(-errors.slope.float() * (bounds.radii / bounds.sums.clamp(min=2.0**-100)))  # (b, g, r, c)
        mass = (bounds.sums * shrunk).sum(-1).double()
        bold = torch.ones_like(mass) if bold is None or bold.shape != mass.shape else bold
        budget = _AIMS[0] * (drop - rounding) * most.unsqueeze(-1) * mass * bold
        near = near.unflatten(-1, (-1, GROUP))
        view = View.of(bounds, near, longest, budget, crowded(q, sketch, factor, errors), compiled)
        return Skim(wide, k, v, most, drop, kind, rounding, stray, view, hidden, bold)

    @property
    def share(self) -> float:
        """The part of the tokens that would be read first."""
        heads = self.k.shape[0] * self.k.shape[1]
        return sum(x.numel() for x in self.view.places) / max((self.k.shape[2] - self.hidden) * heads, 1)

    def read(self) -> Skimmed:
        """Averages that are proved to be within `drop`; raises `Unfit` where four attempts are not enough."""
        view, most = self.view, self.most.unsqueeze(-1)
        # What has no sketch is always read.
        rest = torch.arange(max(view.known, self.hidden), self.k.shape[2], device=self.q.device)
        places = [torch.cat([x, rest]) if rest.numel() else x for x in view.places]
        if not all(x.numel() for x in places):
            raise Unfit("a hidden token would weigh more than all others")
        count, read = [0] * len(places), view.wanted
        partial: _Sums | None = None
        bolder: Tensor | None = None
        for aim in (*_AIMS[1:], 0.0):
            part = self._sums(places)
            partial = part if partial is None else partial.joined(part)
            count = [already + x.numel() for already, x in zip(count, places, strict=True)]
            average = partial.sums / partial.total.unsqueeze(-1)
            length = torch.linalg.vector_norm(average, dim=-1) + self.rounding * most
            tail = view.behind(length) * (view.ends.origin - partial.top).exp()
            moved = tail / (partial.total * most) * (2 * self.stray).exp() * (1 + 1e-6) + self.rounding
            room = (self.drop - self.rounding) / (moved - self.rounding)
            if bolder is None:
                bolder = (self.bold * room).nan_to_num(1.0).clamp(1.0, _BOLDEST)
            late = ~(moved <= self.drop)
            if not bool(late.any()):
                counts = torch.tensor(count, device=self.q.device).view(self.most.shape)
                return Skimmed(average, moved, counts, bolder)
            if aim == 0:
                break
            view = view.lowered(torch.where(late, aim * room, 1.0))
            places, read = where(view.wanted & ~read), view.wanted | read
        raise Unfit(f"what is left could still move an average by {float(moved.max()):.1e}")

    def _sums(self, places: list[Int[Tensor, " m"]]) -> _Sums:
        """Weights and weighted values of some tokens of each head, summed."""
        b, g, r, _ = self.q.shape
        q = self.q.to(self.kind).flatten(0, 1)
        parts = [self._of_head(divmod(i, g), q[i], some) for i, some in enumerate(places)]
        top, total, sums = (torch.stack(x) for x in zip(*parts, strict=True))
        return _Sums(top.view(b, g, r), total.view(b, g, r), sums.view(b, g, r, -1))

    def _of_head(
        self, at: tuple[int, int], q: Float[Tensor, "r d"], places: Int[Tensor, " m"]
    ) -> tuple[Float64[Tensor, " r"], Float64[Tensor, " r"], Float64[Tensor, "r e"]]:
        m = places.numel()
        if m == 0:
            nothing = self.q.new_zeros(len(q), self.v.shape[-1] + 1)
            return nothing[:, 0] - math.inf, nothing[:, 0], nothing[:, 1:]
        pieces = -(-m // _SHORT)
        # Filled up with the first token, which counts once.
        places = torch.nn.functional.pad(places, (0, pieces * _SHORT - m), value=int(places[0]))
        logits = q @ self.k[at].index_select(0, places).to(self.kind).T  # (r, pieces·256)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        weights[:, m:] = 0
        rows = self.v[at].index_select(0, places).to(self.kind).view(pieces, _SHORT, -1)
        sums = weights.view(-1, pieces, _SHORT).transpose(0, 1) @ rows  # (pieces, r, e)
        return top.squeeze(-1).double(), weights.sum(-1, dtype=torch.float64), sums.sum(0, dtype=torch.float64)


class _Sums(NamedTuple):
    """Of some tokens: the largest logarithm of a weight, all weights relative to it, and weighted values."""

    top: Float64[Tensor, "b g r"]
    total: Float64[Tensor, "b g r"]
    sums: Float64[Tensor, "b g r e"]

    def joined(self, other: _Sums) -> _Sums:
        top = torch.maximum(self.top, other.top)
        mine, theirs = (self.top - top).exp(), (other.top - top).exp()
        sums = self.sums * mine.unsqueeze(-1) + other.sums * theirs.unsqueeze(-1)
        return _Sums(top, self.total * mine + other.total * theirs, sums)


def _check(errors: Ends, sketch: Sketch, longest: Float64[Tensor, "b g"]) -> None:
    most = float((errors.length.squeeze(-1) * sketch.reach.amax(-1, keepdim=True)).amax())
    if not most + float(errors.slope.amax()) <= _REACH or not float(errors.grown.amax()) <= 2.0**60:
        raise Unfit("products may be too large")
    if not (float(longest.amax()) <= _LONG and float(longest.amin()) >= _FAINT):
        raise Unfit("values are too long or too short")


def _arithmetic(
    q: Tensor, k: Tensor, v: Tensor, longest_key: Tensor, longest: Tensor, drop: float
) -> tuple[torch.dtype, Tensor, Tensor]:
    """The type to multiply in, and how far that may move averages and logarithms of weights."""
    reach = torch.linalg.vector_norm(q, dim=-1) * longest_key.unsqueeze(-1)  # (b, g, r)
    if k.dtype != torch.float64 and float(reach.amax()) <= _REACH:
        known, u = products(torch.float32, q.device.type), unit(torch.float32)
        # Products with the query rounded, differences from the top, exp; then sums, with weights that underflow.
        stray = reach * (known.dot(k.shape[-1] + 8) + 8 * u) + 2 * EXP_ULPS * u + 2.0**-60
        lost = k.shape[2] * math.sqrt(v.shape[-1]) * tiny(torch.float32) * 4
        least = longest.amin() * 0.5
        rounding = softmax_l1_bound(stray) + known.dot(_SHORT + 8) * 1.01 + lost * (1 + 1 / least)
        if float(rounding.amax()) <= _ROUNDING * drop:
            return torch.float32, rounding, stray
    return torch.float64, torch.zeros_like(reach), torch.zeros_like(reach)


def _up(x: Float64[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Numbers of at least 0 in float32, none of them smaller than it was."""
    return (x * (1 + 2.0**-22)).float() + 2.0**-120
