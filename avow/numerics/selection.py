r"""What of a cache may be left unread, told from upper ends of weights: which tokens, and how much all others weigh.

A sketch bounds every product from above, :math:`l_j \le u_j`; what is kept of that is :math:`e^{u_j - origin}`, with an
origin near the largest of a row, as the middles of groups tell it. A compiler turns unpacking, products, bounds and
exponentials into one loop, in which the rows of a group stand side by side, so that nothing is added across a register;
plain torch has to write every code down as a float first. Both ways stay within the same bounds, as those hold for sums
in any order, with or without fused multiply-adds.

Where to stop is guessed from every few tokens and proved from all: each at its worst, or all of them together as
`aggregate_error` has it. Tokens are ordered by the upper end of their weight times (length + ν), with ν half the
longest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, UInt8
from torch import Tensor

from avow.numerics.aggregate_error import aggregate_error, curvature
from avow.numerics.brackets import Ends, products_with
from avow.numerics.fused import Fused
from avow.numerics.sketch import GROUP, Sketch, field

# About so many tokens of a longer cache are looked at to guess where to stop, in so many bins of a sixteenth of a nat.
_SAMPLE, _BINS, _FINE = 2048, 512, 16
# A cut is never before this bin: the token that may weigh most is before it, as its key is a third of the largest.
_FIRST = 20
# So many times, rows of a head guess again how much each may leave, as what one reads serves all of them.
_TURNS = 4
# The largest key for which float32 has room, and one over the smallest.
_HIGH = 1e35
# Rounding of exp, its argument and sums of 64 terms, in float32.
_GROWN = 1 + 2.0**-12
# Weights below this have lost more of their logarithm.
_FAINTEST = 2.0**-99
# Differences of rounding between here and `Ends`: additions, relative to the products, the origin among them; and what
# is so small that the factors which bring a code's bits to their place leave the range of float32.
_ADDED, _CONSTANT = 2.0**-21, 2.0**-40
# About so many groups tell the origin.
_SOME = 64
# Rounding of the bounds themselves.
_OUTWARD = 1 + 2.0**-20


class Uppers(NamedTuple):
    """An upper bound on exp(factor·q·k) of every sketched row k, but for factors that `fast_decode` allows for."""

    weights: Float32[Tensor, "b g r c G"]
    """Relative to exp(origin); infinite where that was far too low."""
    origin: Float32[Tensor, "b g r"]
    tops: Float32[Tensor, "b g r c"]
    """The largest weight of each group."""
    sums: Float32[Tensor, "b g r c"]
    """Of each group's weights."""
    radii: Float32[Tensor, "b g r c"]
    """Sums of weights times radii."""


def uppers(errors: Ends, sketch: Sketch, compiled: bool, first: int = 0) -> Uppers:
    """What the sketch says, for products within 1e6; groups from `first` on tell the origin.

    Raises `NotCompiled` where a compiler is asked for and there is none.
    """
    # All but the smallest part grows with a group's reach; bounds in float32 are rounded outward.
    tilt = ((errors.tilt + errors.length * _ADDED) * _OUTWARD).float().squeeze(-1)  # (b, g, r)
    floor = ((errors.floor + _CONSTANT) * _OUTWARD).float().squeeze(-1)  # (b, g, 1)
    slope, grown = (errors.slope * _OUTWARD).float().squeeze(-1), errors.grown.float().squeeze(-1)
    # Some groups tell it well enough: no bound rests on it.
    some = slice(first, None, max(1, sketch.zero.shape[2] // _SOME))
    middle = sketch.zero[:, :, some].float() + (2**sketch.bits - 1) / 2 * sketch.scale[:, :, some].float()
    origin = (errors.q @ middle.transpose(-1, -2)).amax(-1) * grown  # (b, g, r)
    if not compiled:
        half = torch.addcmul(floor.unsqueeze(-1), tilt.unsqueeze(-1), sketch.reach.unsqueeze(2))  # (b, g, r, c)
        radius = sketch.radius.float()
        half = torch.addcmul(half.unsqueeze(-1), slope[..., None, None], radius.unsqueeze(2))
        ends = half.addcmul_(products_with(errors.q, sketch), grown[..., None, None])
        weights = ends.sub_(origin[..., None, None]).exp_()
        return Uppers(weights, origin, weights.amax(-1), weights.sum(-1), (weights * radius.unsqueeze(2)).sum(-1))
    planes = sketch.codes.shape[-1] * (8 // field(sketch.bits))
    more = planes - errors.q.shape[-1]
    narrow = errors.q, sketch.scale, sketch.zero
    q, scale, zero = (torch.nn.functional.pad(x, (0, more)) if more else x for x in narrow)
    long = (sketch.codes.transpose(-1, -2), scale, zero, sketch.radius, sketch.reach)
    weights, *others = _all_heads(long, q, slope, tilt, floor - origin, grown, sketch.bits)
    return Uppers(weights, origin, *others)


def _of_all_heads(
    codes: UInt8[Tensor, "b g c w G"],
    scale: Float[Tensor, "b g c p"],
    zero: Float[Tensor, "b g c p"],
    radius: Float[Tensor, "b g c G"],
    reach: Float32[Tensor, "b g c"],
    q: Float32[Tensor, "b g r p"],
    slope: Float32[Tensor, "b g r"],
    tilt: Float32[Tensor, "b g r"],
    floor: Float32[Tensor, "b g r"],
    grown: Float32[Tensor, "b g 1"],
    bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width, taken = codes.shape[-2], field(bits)
    # Codes stay where they are in their bytes: the query is divided by what that makes of them, a power of two.
    planes = [(codes & ((2**taken - 1) << at) if taken < 8 else codes).float() for at in range(0, 8, taken)]
    scale, zero, radius = scale.float(), zero.float(), radius.float()
    weights = []
    for i in range(q.shape[2]):
        row = (q[:, :, i] * grown).unsqueeze(2)  # (b, g, 1, p)
        scaled = (row * scale).unsqueeze(-1)  # (b, g, c, p, 1)
        parts = [
            x * (scaled[..., at * width : (at + 1) * width, :] * 2.0 ** (-at * taken)) for at, x in enumerate(planes)
        ]
        start = (row * zero).sum(-1) + (tilt[:, :, i, None] * reach + floor[:, :, i, None])  # (b, g, c)
        middle = functools.reduce(torch.add, parts).sum(-2)  # (b, g, c, G)
        weights.append((middle + (radius * slope[:, :, i, None, None] + start.unsqueeze(-1))).exp())
    tops, sums, radii = (
        [x.amax(-1) for x in weights],
        [x.sum(-1) for x in weights],
        [(x * radius).sum(-1) for x in weights],
    )
    return torch.stack(weights, 2), torch.stack(tops, 2), torch.stack(sums, 2), torch.stack(radii, 2)


_all_heads = Fused(_of_all_heads, axis=2)


class Unfit(Exception):
    """Numbers are too large or too small for float32 arithmetic, or what was aimed at was not reached."""


@dataclass(frozen=True)
class View:
    """Which tokens are to be read, and for each row, the sums of what is left, relative to exp(origin). Keys are upper
    ends of weights times (length + ν), with ν half the longest: they only order the tokens, and no bound rests on them.
    """

    ends: Uppers
    near: Float32[Tensor, "b g c G"]
    """An upper bound on the length of each value."""
    longest: Float64[Tensor, "b g 1"]
    largest: Float64[Tensor, "b g r"]
    """An upper bound on the largest key."""
    guess: _Guess
    """Of keys relative to the largest."""
    crowded: _Crowded | None
    cut: Int[Tensor, "b g r"]
    compiled: bool
    wanted: Bool[Tensor, "b g s"]
    """What lies before a cut of some row."""
    moved: Float64[Tensor, "b g r"]
    """Of weights that are not wanted times lengths."""
    mass: Float64[Tensor, "b g r"]
    together: _Together | None

    @staticmethod
    def of(
        bounds: Uppers,
        near: Float32[Tensor, "b g c G"],
        longest: Float64[Tensor, "b g"],
        budget: Float64[Tensor, "b g r"],
        crowded: _Crowded | None,
        compiled: bool,
    ) -> View:
        """With tokens wanted so that about `budget` is left."""
        longest = longest.unsqueeze(-1)
        largest = bounds.tops.amax(-1).double() * (1.5 * longest)  # (b, g, r)
        if not (float(largest.amin()) > 1 / _HIGH and float(largest.amax()) < _HIGH):
            raise Unfit("the sketch says too little")
        # Every few rows of every few groups.
        count = near.shape[2] * GROUP
        step = min(GROUP, 2 ** max(0, (count // _SAMPLE).bit_length() - 1))
        groups = max(1, count // step // _SAMPLE)
        some = (near[:, :, ::groups, ::step] + (0.5 * longest.unsqueeze(-1)).float()).unsqueeze(2)
        keys = (some * bounds.weights[..., ::groups, ::step]).flatten(3) / largest.float().unsqueeze(-1)
        guess = _Guess.of(keys, count)
        cut = guess.cut(budget / largest)
        return View._at(bounds, near, longest, largest, guess, crowded, cut, compiled)

    @staticmethod
    def _at(
        bounds: Uppers,
        near: Tensor,
        longest: Tensor,
        largest: Tensor,
        guess: _Guess,
        crowded: _Crowded | None,
        cut: Tensor,
        compiled: bool,
    ) -> View:
        # Behind the last bin is none but what weighs nothing at all: hidden tokens.
        limits = torch.where(cut >= _BINS, 0.0, torch.exp(cut / -_FINE) * largest).float().clamp(min=2.0**-126)
        usual = (0.5 * longest).float()
        long = (bounds.weights.movedim(2, 3), near)
        over, *left = _parted_fused(long, limits, usual) if compiled else _parted(*long, limits, usual)
        moved, mass, squares = (x.movedim(2, 3).double() for x in left)  # (b, g, r, c)
        together = None if crowded is None else crowded.sums(moved, mass, squares, limits, usual.double())
        # What is not below all limits, nan included, is not among those sums.
        wanted = (over < 0).logical_not_().flatten(2)
        singly = moved.sum(-1), mass.sum(-1)
        return View(bounds, near, longest, largest, guess, crowded, cut, compiled, wanted, *singly, together)

    @property
    def known(self) -> int:
        return self.wanted.shape[-1]

    @functools.cached_property
    def places(self) -> list[Int[Tensor, " m"]]:
        """Where the wanted tokens of each head are."""
        return where(self.wanted)

    def lowered(self, by: Float64[Tensor, "b g r"]) -> View:
        """With more tokens wanted where what is left has to shrink by a factor below 1."""
        lower = torch.maximum(self.guess.cut(self.guess.left(self.cut) * by), self.cut + 1)
        cut = torch.where(by < 1, lower, self.cut)
        return View._at(self.ends, self.near, self.longest, self.largest, self.guess, self.crowded, cut, self.compiled)

    def behind(self, length: Float64[Tensor, "b g r"]) -> Float64[Tensor, "b g r"]:
        """An upper bound on what unwanted tokens move a sum with an answer of this length, relative to exp(origin)."""
        # Ends too far below the origin for float32.
        lost = self.known * 2.0**-120
        singly = (self.moved + lost * (1 + self.longest) + length * (self.mass + lost)) * _GROWN
        if self.together is None:
            return singly
        # Those whose logarithms float32 rounds by more than `crowded` allows for weigh less than this each.
        faint = self.known * _FAINTEST * (1 + self.longest + length)
        # The most of (n + length)/(n + ν) for any n up to the longest.
        usual = 0.5 * self.longest
        ratio = torch.where(length > usual, length / usual, (self.longest + length) / (self.longest + usual))
        return torch.fmin(singly, self.together.moved_by(length, ratio) * _GROWN + faint)


class _Together(NamedTuple):
    """Sums over unwanted tokens at the middles of their brackets, and what the sketch may have moved them together."""

    moved: Float64[Tensor, "b g r"]
    mass: Float64[Tensor, "b g r"]
    stray: Float64[Tensor, "b g r"]
    """Of keys."""

    def moved_by(self, length: Float64[Tensor, "b g r"], ratio: Float64[Tensor, "b g r"]) -> Float64[Tensor, "b g r"]:
        """An upper bound on what they move a sum with an answer of this length; `ratio` bounds (n + length)/(n + ν)."""
        return self.moved + length * self.mass + ratio * self.stray


class _Crowded(NamedTuple):
    """What a look knows of how far logits are from the middles of their brackets."""

    whole: Float64[Tensor, "b g r"]
    """An upper bound on the root of their summed squares."""
    bent: Float64[Tensor, "b g r"]
    """A lower bound on φ(h)·exp(−h) of any token."""
    shrunk: Float64[Tensor, "b g r c"]
    """An upper bound on exp(−h) of any token of a group."""

    def sums(
        self,
        moved: Float64[Tensor, "b g r c"],
        mass: Float64[Tensor, "b g r c"],
        squares: Float64[Tensor, "b g r c"],
        limits: Float32[Tensor, "b g r"],
        usual: Float64[Tensor, "b g 1"],
    ) -> _Together:
        """From sums over each group's unwanted tokens at their upper ends; their keys are below the limits."""
        # A square that is too small for float32 is less than its smallest normal number.
        straight = (squares * self.shrunk.square() + GROUP * 2.0**-125).sum(-1).sqrt() * usual
        stray = self.whole * (straight + self.whole * self.bent * limits)
        return _Together((moved * self.shrunk).sum(-1), (mass * self.shrunk).sum(-1), stray)


def crowded(q: Tensor, sketch: Sketch, factor: float, errors: Ends) -> _Crowded | None:
    """None where nothing is known of what sketched rows lost together."""
    stray = aggregate_error(q, sketch, factor)
    if stray is None:
        return None
    reach, radius = sketch.reach.amax(-1)[..., None, None].double(), sketch.radius
    widest = radius.amax((-1, -2))[..., None, None].double()
    # What `uppers` rounds beyond `ends`, both ways, in logarithms; the slope in float32; the weights themselves.
    more = 2 * (errors.length * _ADDED * reach + errors.floor + _CONSTANT) + 2.0**-18 * errors.slope * widest + 2.0**-11
    whole = stray.whole * (1 + 1e-4) + math.sqrt(sketch.rows) * more  # (b, g, r, 1)
    least = errors.slope * radius.amin(-1).double().unsqueeze(2)  # (b, g, r, c)
    return _Crowded(whole.squeeze(-1), curvature(stray.least).squeeze(-1), torch.exp(-least) * (1 + 1e-9))


def _parted(weights: Tensor, near: Tensor, limits: Tensor, usual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far each token's key is above the nearest limit, then sums over each group's tokens below all of them: of
    weights times lengths, of weights, and of squares of keys over ν.
    """
    rows = range(weights.shape[3])
    keys = near + usual.unsqueeze(-1)  # (b, g, c, G)
    above = [keys * weights[:, :, :, i] - limits[:, :, i, None, None] for i in rows]
    over = functools.reduce(torch.maximum, above)
    below = torch.where(over < 0, 1.0, 0.0)
    left = [weights[:, :, :, i] * below for i in rows]
    moved, mass = [(x * near).sum(-1) for x in left], [x.sum(-1) for x in left]
    # In units of ν: squares of short values would leave the range of float32.
    relative = near / usual.unsqueeze(-1) + 1
    squares = [(x * relative).square().sum(-1) for x in left]
    return over, torch.stack(moved, 3), torch.stack(mass, 3), torch.stack(squares, 3)


_parted_fused = Fused(_parted, axis=2)


def where(wanted: Bool[Tensor, "b g s"]) -> list[Int[Tensor, " m"]]:
    """Where the wanted tokens of each head are."""
    return [x.nonzero().flatten() for x in wanted.flatten(0, 1).unbind()]


@dataclass(frozen=True)
class _Guess:
    """About how much is left behind cuts, from some of the tokens."""

    keys: Float32[Tensor, "b g r m"]
    places: Int[Tensor, "b g r m"]
    """The bin of each."""
    share: float
    """What part of all tokens these are."""
    behind: Float64[Tensor, "b g r bins"]
    """About the sums of all keys in each bin and all after it."""

    @staticmethod
    def of(keys: Float32[Tensor, "b g r m"], count: int) -> _Guess:
        """From the keys of some of `count` tokens, none of them above 1."""
        places, share = (keys.log() * -_FINE).clamp_(0, _BINS - 1).long(), keys.shape[-1] / count
        bins = keys.new_zeros(*keys.shape[:3], _BINS).scatter_add_(-1, places, keys)
        return _Guess(keys, places, share, bins.double().flip(-1).cumsum(-1).flip(-1) / share)

    def left(self, cut: Int[Tensor, "b g r"]) -> Float64[Tensor, "b g r"]:
        """About the sum of each row's keys that no row of its head wants."""
        wanted = (self.places < cut.unsqueeze(-1)).any(2, keepdim=True)
        return self.keys.masked_fill(wanted, 0.0).sum(-1, dtype=torch.float64) / self.share

    def cut(self, budget: Float64[Tensor, "b g r"]) -> Int[Tensor, "b g r"]:
        """The first bins behind which about a budget is left, each row's own where a head has several."""
        own = budget
        cut = self._first(own)
        for _ in range(_TURNS if self.keys.shape[2] > 1 else 0):
            own = own * (budget / self.left(cut).clamp(min=1e-300)).clamp(0.5, 2.0)
            cut = self._first(own)
        return cut

    def _first(self, budget: Float64[Tensor, "b g r"]) -> Int[Tensor, "b g r"]:
        return (~(self.behind <= budget.unsqueeze(-1))).sum(-1).clamp(_FIRST, _BINS)
