r"""Landmarks for the Gaussian kernel by randomised pivoted Cholesky, and what they leave over.

For a positive semidefinite kernel G with unit diagonal, landmarks Z and any B with :math:`B\,G(Z,Z)\,B^T \preceq I`,
the features :math:`\varphi(x) = B\,G(Z,x)` leave a residual kernel that is itself positive semidefinite, so

.. math:: |G(x,y) - \varphi(x)\cdot\varphi(y)| \le \sqrt{(1-\|\varphi(x)\|^2)(1-\|\varphi(y)\|^2)}

by Cauchy–Schwarz [claim residual-cauchy-schwarz]. B comes from a Cholesky factor of G(Z,Z) + λ, with λ at least
the rounding of both, so the condition holds for the numbers actually computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from avow.core import Problem
from avow.numerics import rounding, scan
from avow.numerics.features import Frame, framed_keys, framed_queries
from avow.numerics.heads import grouped

_U = rounding.unit(torch.float64)
# Below this the diagonal can no longer be distinguished from rounding and jitter.
_SPENT = 1e-9
# The most pivots drawn in one round.
_TOGETHER = 16
# Pivots are sought among so many keys, or so many a pivot: their choice then costs the same at any length.
_CANDIDATES = 4096
_PER_PIVOT = 16


def log_gauss(x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b r d"]) -> Float[Tensor, "*b n r"]:
    """−‖x−z‖²/2, never above zero."""
    squares = x.square().sum(-1, keepdim=True) + z.square().sum(-1).unsqueeze(-2)
    return (x @ z.transpose(-1, -2) - 0.5 * squares).clamp(max=0.0)


def rounds(rank: int) -> Iterator[slice]:
    """Pivots are drawn together, few at first: early ones teach most, later ones share each reading of the keys."""
    start = 0
    while start < rank:
        stop = min(rank, start + max(1, min(start, _TOGETHER)))
        yield slice(start, stop)
        start = stop


def pivots(
    x: Float[Tensor, "b g s d"], log_weight: Float[Tensor, "b g s"], rank: int, generator: torch.Generator | None
) -> Int[Tensor, "b g r"]:
    """Landmarks by randomised block-pivoted Cholesky of the kernel w(x) G(x,y) w(y).

    Each round draws without replacement, with probability proportional to the diagonal that is left. Keys of
    weight zero (log −inf) are drawn only when no others are left. Of many keys only some are candidates, drawn in
    the same way. Any landmarks are sound; these are good.
    """
    if torch.compiler.is_compiling():
        # Round after round would be traced: a graph that grows with the rank and takes minutes to compile.
        return _opaque(x, log_weight, rank) if generator is None else _uncompiled(x, log_weight, rank, generator)
    few = candidates(x.shape[-2], rank)
    if few == x.shape[-2]:
        return _pivots(x, log_weight, rank, generator)
    noise = uniform(log_weight.shape, generator, x)
    wanted = torch.where(log_weight > -math.inf, 2 * log_weight + gumbel(noise), -1e300 * (1 + noise))
    index = wanted.topk(few, dim=-1).indices  # (b, g, few)
    some = x.gather(-2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
    return index.gather(-1, _pivots(some, log_weight.gather(-1, index), rank, generator))


@torch.library.custom_op(
    "avow::pivots",
    mutates_args=(),
    schema="(Tensor x, Tensor log_weight, int rank) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _opaque(x: Tensor, log_weight: Tensor, rank: int) -> Tensor:
    """`pivots` as one node of a compiled graph."""
    return pivots(x, log_weight, rank, None)


@_opaque.register_fake
def _(x: Tensor, log_weight: Tensor, rank: int) -> Tensor:
    return x.new_empty(*x.shape[:2], rank, dtype=torch.int64)


# No graph holds a generator. The public `torch.compiler.disable` would load the compiler with this module.
_uncompiled = torch._disable_dynamo(lambda *arguments: pivots(*arguments))  # type: ignore[attr-defined]  # private


def candidates(keys: int, rank: int) -> int:
    """How many of so many keys may become landmarks."""
    return min(keys, max(_CANDIDATES, _PER_PIVOT * rank))


def uniform(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Numbers between 0 and 1, drawn where the generator lives."""
    source = torch.device("cpu") if generator is None else generator.device
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=source).to(like.device)


def gumbel(noise: Tensor) -> Tensor:
    """The largest of log-weights plus Gumbel noise are a draw without replacement."""
    return -torch.log(-torch.log(noise.clamp(1e-300, 1 - 1e-16)))


def _pivots(
    x: Float[Tensor, "b g s d"], log_weight: Float[Tensor, "b g s"], rank: int, generator: torch.Generator | None
) -> Int[Tensor, "b g r"]:
    b, g, s, d = x.shape
    log_weight = 2 * log_weight
    half = 0.5 * x.square().sum(-1).unsqueeze(-2)  # (b, g, 1, s)
    left = torch.ones_like(log_weight)
    rows = x.new_zeros(b, g, rank, s)
    chosen = torch.zeros(b, g, rank, dtype=torch.int64, device=x.device)
    taken = torch.zeros(b, g, s, dtype=torch.bool, device=x.device)
    for span in rounds(rank):
        size = span.stop - span.start
        noise = uniform(left.shape, generator, x)
        index = worth(log_weight, left, taken, noise).topk(size, dim=-1).indices  # (b, g, size)
        chosen[..., span] = index
        taken.scatter_(-1, index, True)
        points = x.gather(-2, index.unsqueeze(-1).expand(-1, -1, -1, d))
        own = half.expand(b, g, 1, s).gather(-1, index.unsqueeze(-2)).transpose(-1, -2)  # (b, g, size, 1)
        fresh = (points @ x.transpose(-1, -2)).sub_(half).sub_(own).clamp_(max=0.0).exp_()  # (b, g, size, s)
        if span.start:
            earlier = rows[..., : span.start, :]
            along = earlier.gather(-1, index.unsqueeze(-2).expand(-1, -1, span.start, -1))  # (b, g, start, size)
            fresh = fresh - along.transpose(-1, -2) @ earlier
        fresh = orthonormal(fresh, fresh.gather(-1, index.unsqueeze(-2).expand(-1, -1, size, -1)))
        rows[..., span, :] = fresh
        left = remaining(left, fresh)
    return chosen


def worth(
    log_weight: Float[Tensor, "b g s"], left: Float[Tensor, "b g s"], taken: Tensor, noise: Float[Tensor, "b g s"]
) -> Float[Tensor, "b g s"]:
    """Whose largest are the next pivots: `log_weight` that of the diagonal, `left` what earlier pivots left of it."""
    scores = log_weight + torch.log(left) + gumbel(noise)
    # Then keys with nothing left, then hidden ones, in any order.
    scores = torch.where(left > 0, scores, -1e200 * (1 + noise))
    return torch.where(log_weight > -math.inf, scores, -1e300 * (1 + noise)).masked_fill_(taken, -math.inf)


def orthonormal(fresh: Float[Tensor, "b g l s"], block: Float[Tensor, "b g l l"]) -> Float[Tensor, "b g l s"]:
    """A round's rows with what they share among each other taken out; `block` are their columns at its pivots."""
    # Pivots of rounding size, or alike within a round, have nothing new to say: the jitter mutes them.
    eye = torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
    lower, _ = torch.linalg.cholesky_ex(0.5 * (block + block.transpose(-1, -2)) + 1e-10 * eye)
    lower = torch.where(torch.isfinite(lower).all(-1, keepdim=True).all(-2, keepdim=True), lower, 1e4 * eye)
    return torch.linalg.solve_triangular(lower, fresh, upper=False)


def remaining(left: Float[Tensor, "b g s"], fresh: Float[Tensor, "b g l s"]) -> Float[Tensor, "b g s"]:
    """What is left of the diagonal after more pivots."""
    left = left - fresh.square().sum(-2)
    return left.masked_fill_(left < _SPENT, 0.0)


class Factor(NamedTuple):
    """φ(x) = B·G(Z,x), and the rounding of φ."""

    landmarks: Float[Tensor, "b g r d"]
    b: Float[Tensor, "b g r r"]
    slack: Float[Tensor, "b g"]


def factor(landmarks: Float[Tensor, "b g r d"], radius: Float[Tensor, "b g"]) -> Factor:
    """The features of some landmarks, among vectors of norm up to `radius`."""
    r, d = landmarks.shape[-2:]
    kernel = torch.exp(log_gauss(landmarks, landmarks))
    eye = torch.eye(r, dtype=kernel.dtype, device=kernel.device)
    # `log_gauss` rounds by 8·(d + 8)·u·radius² at most.
    entry = torch.expm1((8 * (d + 8) * _U * radius.square()).clamp(max=1.0)) + 4 * _U
    # ‖ΔG‖ ≤ r·entry and the backward error of Cholesky ≤ γ_{r+1}·trace(G+λ): λ covers both twice over.
    least = 2 * r * entry + 8 * (r + 1) * _U * r + 1e-13
    # What rounding adds to a residual falls as λ^-½, what λ itself adds grows as λ: the sum is least between.
    between = (0.5 * r * math.sqrt(r) * (entry + rounding.gamma(r + 4, _U))) ** (2 / 3)
    jitter = torch.maximum(least, between).detach()
    kernel = torch.where(eye > 0, 1.0, kernel) + jitter[..., None, None] * eye
    lower = torch.linalg.cholesky(kernel)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    with torch.no_grad():
        # B L is the identity but for rounding; shrinking B by its excess restores B G Bᵀ ≼ I.
        off = torch.linalg.matrix_norm(inverse @ lower - eye)
        spread = torch.linalg.matrix_norm(inverse) * torch.linalg.matrix_norm(lower)
        shrink = 1 / (1 + off + rounding.gamma(r + 2, _U) * spread)
        slack = torch.linalg.matrix_norm(inverse) * math.sqrt(r) * (entry + rounding.gamma(r + 4, _U))
    return Factor(landmarks, inverse * shrink[..., None, None], slack)


def features(f: Factor, x: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g n r"]:
    """φ(x) of every row."""
    return torch.exp(log_gauss(x, f.landmarks)) @ f.b.transpose(-1, -2)


def residual(phi: Float[Tensor, "b g n r"], slack: Float[Tensor, "b g"]) -> Float[Tensor, "b g n"]:
    """An upper bound on 1 − ‖φ(x)‖², whatever rounding did to φ."""
    left = 1 - phi.square().sum(-1)
    return (left + 4 * slack[..., None] + 2 * slack[..., None].square() + 64 * phi.shape[-1] * _U).clamp(0.0, 1.0)


class WeightedKeys(NamedTuple):
    """Keys in a frame, each with the log of its weight."""

    frame: Frame
    points: Float64[Tensor, "b g s d"]
    log: Float64[Tensor, "b g s 1"]
    seen: Bool[Tensor, "#b #g s 1"] | None

    @staticmethod
    def of(
        p: Problem,
        frame: Frame,
        seen: Bool[Tensor, "#b #g s 1"] | None = None,
        added: Float64[Tensor, "#b #g s 1"] | None = None,
    ) -> WeightedKeys:
        """The keys of a problem; what is `added` to a key's logits adds to its log."""
        points, _, shift = framed_keys(p, frame, slice(None), torch.float64)
        if seen is not None:
            # What no row may see must not stretch the space the landmarks live in.
            points, shift = torch.where(seen, points, 0.0), torch.where(seen, shift, 0.0)
        log = shift + points.square().sum(-1, keepdim=True)  # ‖k‖²/2 + the shift of the queries
        return WeightedKeys(frame, points, log if added is None else log + added, seen)


class Rows(NamedTuple):
    """What a bound must know of rows: what landmarks miss of each, the norm of its features relative to its nearest
    landmark, the log of that, and how long it is in the frame.
    """

    residual: Float64[Tensor, "b h l"]
    norm: Float64[Tensor, "b h l"]
    log: Float64[Tensor, "b h l"]
    radius: Float64[Tensor, "b h l"]


class LandmarkFeatures:
    """Features of a problem's rows and keys by some landmarks, and notes on all that were asked for, in that order."""

    def __init__(self, p: Problem, keys: WeightedKeys, factor: Factor) -> None:
        self.keys, self.factor, self._problem = keys, factor, p
        # Where there is no key, there still is something to join.
        self._residuals = [keys.points.new_zeros(*keys.points.shape[:2], 0)]
        self._rows: list[Rows] = []

    def of_keys(self, span: slice) -> scan.Keys:
        """Those of some keys, with their weights, as a scan takes them."""
        phi = features(self.factor, self.keys.points[..., span, :])
        self._residuals.append(residual(phi.detach(), self.factor.slack))
        seen = None if self.keys.seen is None else self.keys.seen[..., span, :]
        return scan.Keys(self.keys.log[..., span, :].clone(), phi, seen)

    def of_rows(self, rows: slice) -> Float64[Tensor, "b g r l m"]:
        """Those of some rows, relative to the nearest landmark of each."""
        queries = framed_queries(self._problem, self.keys.frame, rows, torch.float64)
        x = grouped(queries, self._problem.k.shape[1])  # (b, g, r, l, d)
        flat = x.flatten(2, 3)
        log = log_gauss(flat, self.factor.landmarks)
        near = log.detach().amax(-1, keepdim=True)
        phi = torch.exp(log - near) @ self.factor.b.transpose(-1, -2)
        with torch.no_grad():
            left = residual(phi * torch.exp(near), self.factor.slack)
            norm, radius = (torch.linalg.vector_norm(y, dim=-1) for y in (phi, flat))
            by_row = (y.unflatten(2, x.shape[2:4]).flatten(1, 2) for y in (left, norm, near[..., 0], radius))
            self._rows.append(Rows(*by_row))
        return phi.unflatten(2, x.shape[2:4])

    @property
    def key_residual(self) -> Float64[Tensor, "b g s"]:
        """What landmarks miss of each key."""
        return torch.cat(self._residuals, -1)

    @property
    def rows(self) -> Rows:
        """The notes on all of them."""
        return Rows(*(torch.cat(column, -1) for column in zip(*self._rows, strict=True)))
