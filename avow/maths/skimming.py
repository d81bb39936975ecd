r"""Averages of values under exponential weights from the heavy tokens alone: no masks, no biases, no odds.

It does what `outlook` and `reading` do for any problem, made for long caches on a CPU, where every look at all tokens
counts. Tokens have an upper end each; where to stop is guessed from every few of them and proved from all:

.. math:: \|o^* - o_H\| \le \frac{\sum_T e^{b_j} (\|v_j\| + \|o_H\|)}{Z_H}   [claim tail-mass-output]

A head reads what any of its rows wants, and gives it to all of them. What is read is multiplied in float32 as long as
its rounding is a small part of what may be lost, and in float64 otherwise; short sums go on in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from avow.maths.brackets import Ends, ends
from avow.maths.fused import Fused
from avow.maths.rounding import EXP_ULPS, perturbed, products, tiny, unit
from avow.maths.sketch import GROUP, Sketch
from avow.maths.uppers import uppers

# Every so many tokens of a longer cache are looked at to guess where to stop, in so many bins of an eighth of a nat.
_SAMPLE, _BINS, _FINE = 8192, 256, 8
# What is aimed at, of what may be lost: at first more, as siblings' tokens help; less whenever that was not enough.
_AIMS = (1.1, 0.85, 0.7, 0.5)
# Rows whose products are summed in float32 before float64 goes on.
_SHORT = 256
# The share of what may be lost that float32 may take.
_ROUNDING = 0.1
# Largest products, ends and lengths for which float32 has room; smallest lengths.
_REACH, _HIGH, _LONG, _FAINT = 1e4, 1e6, 1e15, 1e-15
# Rounding of exp, its argument and sums of 64 terms, in float32.
_GROWN = 1 + 2.0**-12


class Unfit(Exception):
    """Numbers are too large or too small for float32 arithmetic, or what was aimed at was not reached."""


class Skimmed(NamedTuple):
    """Averages, how far unread tokens and float32 may have moved them in units of `most`, and how many were read."""

    out: Float64[Tensor, "b g r e"]
    moved: Float64[Tensor, "b g r"]
    read: Int[Tensor, "b g"]


@dataclass(frozen=True)
class Skim:
    """A look at all tokens, before the first is read."""

    q: Float64[Tensor, "b g r d"]
    """Multiplied by the factor."""
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    most: Float64[Tensor, "b g"]
    """At most the longest value's length."""
    drop: float
    kind: torch.dtype
    rounding: Float64[Tensor, "b g r"]
    """How far arithmetic in `kind` may move an average, in units of `most`."""
    stray: Float64[Tensor, "b g r"]
    """How far it may move a logarithm of a weight."""
    heads: list[_Head]
    hidden: int

    @staticmethod
    def over(
        q: Float[Tensor, "b g r d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        sketch: Sketch,
        factor: float,
        longest_key: Float64[Tensor, "b g"],
        lengths: Float[Tensor, "b g s"],
        most: Float64[Tensor, "b g"],
        drop: float,
        hidden: int = 0,
        compiled: bool = False,
    ) -> Skim:
        """What the sketch of the first keys says of all tokens but the first `hidden`; `lengths` bound those of values.

        Raises `Unfit` where float32 has no room for these numbers.
        """
        b, g = q.shape[:2]
        known = sketch.rows
        if known == 0:
            raise Unfit("nothing is sketched")
        told = ends(q, sketch, factor)
        longest = lengths[..., hidden:].amax(-1)  # (b, g)
        _check(told, longest)
        near = lengths[..., :known].float() if lengths.dtype != torch.float64 else _up(lengths[..., :known])
        # ν: it only orders the tokens, and no bound rests on it.
        usual = near + (0.5 * longest).float().unsqueeze(-1)
        terms = uppers(told, sketch, usual.log(), compiled)
        share = usual.reciprocal_()
        # How much ends are above what is expected, about.
        radius = sketch.radius[:, :, :: max(1, known // _SAMPLE)].float().mean((-1, -2))
        half = told.slope.squeeze(-1).float() * radius.unsqueeze(-1)  # (b, g, r)
        wide = q.detach().double() * factor
        kind, rounding, stray = _arithmetic(wide, k, v, longest_key, longest, drop)
        budget = drop - rounding
        heads = []
        for i in range(b * g):
            at = divmod(i, g)
            t = terms[i]
            if hidden:
                t[:, :hidden] = -math.inf
            heads.append(_Head.of(t, near[at], share[at], half[at], (budget * most.unsqueeze(-1))[at], at, compiled))
        return Skim(wide, k, v, most, drop, kind, rounding, stray, heads, hidden)

    @property
    def share(self) -> float:
        """The part of the tokens that would be read first."""
        count = sum(int(head.view.wanted.sum()) for head in self.heads)
        return count / max((self.k.shape[2] - self.hidden) * len(self.heads), 1)

    def read(self) -> Skimmed:
        """Averages that are proved to be within `drop`; raises `Unfit` where four attempts are not enough."""
        b, g, r, _ = self.q.shape
        e = self.v.shape[-1]
        out, moved = self.q.new_zeros(b, g, r, e), self.q.new_zeros(b, g, r)
        count = torch.zeros(b, g, dtype=torch.int64, device=self.q.device)
        for head in self.heads:
            out[head.at], moved[head.at], count[head.at] = self._read(head)
        return Skimmed(out, moved, count)

    def _read(self, head: _Head) -> tuple[Tensor, Tensor, int]:
        at, known = head.at, head.terms.shape[-1]
        most, stray, rounding = self.most[at], self.stray[at], self.rounding[at]
        # What has no sketch is always read.
        rest = torch.arange(max(known, self.hidden), self.k.shape[2], device=self.q.device)
        read: Tensor | None = None
        found, count = None, 0
        for aim in _AIMS[1:]:
            wanted = head.view.wanted
            places = (wanted if read is None else wanted & ~read).nonzero().flatten()
            places = torch.cat([places, rest]) if read is None else places
            count, read = count + places.numel(), wanted
            if places.numel():
                part = self._sums(at, places)
                found = part if found is None else found.joined(part)
            assert found is not None  # the largest term is always wanted
            average = found.sums / found.total.unsqueeze(-1)
            length = torch.linalg.vector_norm(average, dim=-1) + rounding * most
            tail = head.behind(length) * (head.top.double() - found.top).exp()
            moved = tail / (found.total * most) * (2 * stray).exp() * (1 + 1e-6) + rounding
            late = ~(moved <= self.drop)
            if not bool(late.any()):
                return average, moved, count
            allowed = aim * (self.drop - rounding) / (moved - rounding)
            head = head.lowered(torch.where(late, allowed, 1.0))
        raise Unfit(f"what is left could still move an average by {float(moved.max()):.1e}")

    def _sums(self, at: tuple[int, int], places: Int[Tensor, " m"]) -> _Sums:
        """Weights and weighted values of some tokens, summed."""
        m = places.numel()
        pieces = max(1, -(-m // _SHORT))
        # Filled up with the last token, which counts once.
        places = torch.nn.functional.pad(places, (0, pieces * _SHORT - m), value=int(places[-1]))
        q = self.q[at].to(self.kind)
        logits = q @ self.k[at].index_select(0, places).to(self.kind).T  # (r, pieces·256)
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        weights[:, m:] = 0
        rows = self.v[at].index_select(0, places).to(self.kind).view(pieces, _SHORT, -1)
        sums = weights.view(-1, pieces, _SHORT).transpose(0, 1) @ rows  # (pieces, r, e)
        return _Sums(top.squeeze(-1).double(), weights.double().sum(-1), sums.double().sum(0))


@dataclass(frozen=True)
class _Head:
    """The tokens of one head: their terms' upper ends, and which are to be read."""

    at: tuple[int, int]
    terms: Float32[Tensor, "r s"]
    """Upper ends of the logarithms of weight·(length + ν)."""
    top: Float32[Tensor, " r"]
    near: Float32[Tensor, " s"]
    share: Float32[Tensor, " s"]
    """1/(length + ν)."""
    guessed: Float32[Tensor, "r bins"]
    """About the sums of terms in each bin and all after it, relative to exp(top)."""
    cut: Int[Tensor, " r"]
    view: _View

    @staticmethod
    def of(
        terms: Float32[Tensor, "r s"],
        near: Float32[Tensor, " s"],
        share: Float32[Tensor, " s"],
        half: Float32[Tensor, " r"],
        budget: Float64[Tensor, " r"],
        at: tuple[int, int],
        compiled: bool,
    ) -> _Head:
        """With tokens wanted so that about `budget` of the expected mass is left: ends shrunk by `half` tell that."""
        top = terms.amax(-1)
        if not float(top.amax()) <= _HIGH:
            raise Unfit("the sketch says too little")
        mass = (terms - top.unsqueeze(-1)).exp_() @ share * torch.exp(-half)
        step = max(1, terms.shape[-1] // _SAMPLE)
        some = top.unsqueeze(-1) - terms[:, ::step]
        bins = some.new_zeros(terms.shape[0], _BINS)
        bins.scatter_add_(-1, (some * _FINE).clamp(0, _BINS - 1).long(), torch.exp(-some))
        guessed = bins.flip(-1).cumsum(-1).flip(-1) * step
        cut = _cut(guessed, _AIMS[0] * budget.float() * mass)
        return _Head(at, terms, top, near, share, guessed, cut, _View.of(terms, near, share, top, cut, compiled))

    def lowered(self, by: Float64[Tensor, " r"]) -> _Head:
        """With more tokens wanted where what is left has to shrink by a factor below 1."""
        last = self.guessed.gather(-1, self.cut.clamp(max=_BINS - 1).unsqueeze(-1)).squeeze(-1)
        lower = torch.maximum(_cut(self.guessed, last * by.float()), self.cut + 1)
        cut = torch.where(by < 1, lower, self.cut)
        view = _View.of(self.terms, self.near, self.share, self.top, cut, self.view.compiled)
        return dataclasses.replace(self, cut=cut, view=view)

    def behind(self, length: Float64[Tensor, " r"]) -> Float64[Tensor, " r"]:
        """At least what tokens that are not wanted move a sum with an answer of this length, relative to exp(top)."""
        # Ends too far below the top for float32.
        lost = self.terms.shape[-1] * 2.0**-120
        largest = self.share.amax().double()
        return (self.view.moved + lost + length * (self.view.mass + lost * largest)) * _GROWN


class _View(NamedTuple):
    """What lies before a cut of some row, and for each row, the sums of what does not."""

    wanted: Bool[Tensor, " s"]
    moved: Float64[Tensor, " r"]
    """Of weights times lengths."""
    mass: Float64[Tensor, " r"]
    compiled: bool

    @staticmethod
    def of(
        terms: Float32[Tensor, "r s"],
        near: Float32[Tensor, " s"],
        share: Float32[Tensor, " s"],
        top: Float32[Tensor, " r"],
        cut: Int[Tensor, " r"],
        compiled: bool,
    ) -> _View:
        # Behind the last bin is none.
        edges = torch.where(cut >= _BINS, -math.inf, top - cut / _FINE)
        by_group = (near.view(-1, GROUP), share.view(-1, GROUP), *terms.view(len(top), -1, GROUP))
        if compiled:
            over, *sums = _parted_fused(by_group, top, edges)
        else:
            over, *sums = _parted(*by_group, top, edges)
        moved, mass = torch.stack(sums).double().sum(-1).view(2, -1).unbind()
        return _View(over.flatten() >= 0, moved, mass, compiled)


def _parted(near: Tensor, share: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """How far each token is above the nearest cut, then sums over each group's tokens below all of them."""
    *terms, top, edges = rest
    over = functools.reduce(torch.maximum, [x - edges[i] for i, x in enumerate(terms)])  # (c, G)
    left = torch.where(over < 0, share, 0.0)
    masses = [(x - top[i]).exp() * left for i, x in enumerate(terms)]
    return (over, *[(x * near).sum(-1) for x in masses], *[x.sum(-1) for x in masses])


_parted_fused = Fused(_parted)


class _Sums(NamedTuple):
    """Of some tokens: the largest logarithm of a weight, all weights relative to it, and weighted values."""

    top: Float64[Tensor, " r"]
    total: Float64[Tensor, " r"]
    sums: Float64[Tensor, "r e"]

    def joined(self, other: _Sums) -> _Sums:
        top = torch.maximum(self.top, other.top)
        mine, theirs = (self.top - top).exp(), (other.top - top).exp()
        sums = self.sums * mine.unsqueeze(-1) + other.sums * theirs.unsqueeze(-1)
        return _Sums(top, self.total * mine + other.total * theirs, sums)


def _cut(guessed: Float32[Tensor, "r bins"], budget: Float32[Tensor, " r"]) -> Int[Tensor, " r"]:
    """The first bin behind which terms are within a budget; never before the first one's end."""
    return (~(guessed <= budget.unsqueeze(-1))).sum(-1).clamp(1, _BINS)


def _check(told: Ends, longest: Float64[Tensor, "b g"]) -> None:
    if not float(told.most.amax()) + float(told.slope.amax()) <= _REACH or not float(told.grown.amax()) <= 2.0**60:
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
        rounding = perturbed(stray) + known.dot(_SHORT + 8) * 1.01 + lost * (1 + 1 / least)
        if float(rounding.amax()) <= _ROUNDING * drop:
            return torch.float32, rounding, stray
    return torch.float64, torch.zeros_like(reach), torch.zeros_like(reach)


def _up(x: Float64[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Numbers of at least 0 in float32, none of them smaller than it was."""
    return (x * (1 + 2.0**-22)).float() + 2.0**-120
