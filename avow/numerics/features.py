r"""Positive random features for :math:`e^{x \cdot y}`, and how many of them a tolerance needs.

With w ~ N(0, I), :math:`E\,[e^{w\cdot x - \|x\|^2/2}\, e^{w\cdot y - \|y\|^2/2}] = e^{x\cdot y}`: every feature is
positive, so the estimate is a mixture and never leaves the hull of the values [claim features-unbiased].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Norms, Problem
from avow.numerics import rounding
from avow.numerics.heads import grouped, key_seen, per_query_head
from avow.numerics.scan import tiles


def draw(
    features: int, dim: int, orthogonal: bool, generator: torch.Generator | None, device: torch.device
) -> Float[Tensor, "m d"]:
    """Gaussian directions in float64; orthogonal ones come in blocks of `dim`, each direction still N(0, I)."""

    def gauss(rows: int) -> Tensor:
        source = torch.device("cpu") if generator is None else generator.device
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device=source)

    if not orthogonal:
        return gauss(features).to(device)
    blocks = []
    for start in range(0, features, dim):
        basis, upper = torch.linalg.qr(gauss(dim))
        # Signs of R's diagonal make the basis Haar distributed; fresh norms make each row Gaussian.
        basis = basis * torch.sign(upper.diagonal())
        lengths = torch.linalg.vector_norm(gauss(dim), dim=-1, keepdim=True)
        blocks.append((basis.T * lengths)[: features - start])
    return torch.cat(blocks).to(device)


class Frame(NamedTuple):
    r"""A change of variables that leaves every softmax weight as it was.

    :math:`q\cdot k = (q-b)D \cdot D^{-1}(k-c) + b\cdot(k-c) + q\cdot c`: the last term is constant in a row and
    cancels, the middle one is a bias of the key. Centred and balanced, the norms that drive the variance shrink.
    """

    query_shift: Float[Tensor, "b g 1 d"]
    key_shift: Float[Tensor, "b g 1 d"]
    balance: Float[Tensor, "b g 1 d"]


def plain_frame(k: Float[Tensor, "b g s d"], dtype: torch.dtype) -> Frame:
    """The frame that changes nothing: for causal rows, which must not learn of the future through a mean."""
    zero = k.new_zeros(k.shape[0], k.shape[1], 1, k.shape[-1], dtype=dtype)
    return Frame(zero, zero, zero + 1)


def centred_frame(p: Problem, dtype: torch.dtype) -> Frame:
    """Means of the queries and of the keys that all rows see, and the diagonal that makes their spreads alike."""
    seen = key_seen(p) if p.mask_kind == "keys" else None
    queries = grouped(p.q, p.k.shape[1]).flatten(2, 3)
    return balanced(*_moments(queries, None, dtype), *_moments(p.k, seen, dtype))


def frame_of(p: Problem, dtype: torch.dtype) -> Frame:
    """The frame for a problem: centred on what all rows see, plain for causal ones."""
    return plain_frame(p.k, dtype) if p.causal else centred_frame(p, dtype)


def balanced(mean_q: Tensor, spread_q: Tensor, mean_k: Tensor, spread_k: Tensor) -> Frame:
    """The frame of these means and mean squares about them."""
    # The small constant keeps gradients finite where all rows agree; any positive balance is exact.
    balance = ((spread_k + 1e-6) / (spread_q + 1e-6)).pow(0.25).clamp(1e-2, 1e2)
    return Frame(mean_q, mean_k, balance)


def sample_step(length: int, sample: int = 2048) -> int:
    """The step that takes about `sample` of so many rows: an odd one, not in step with powers of two that data has."""
    return length // sample | 1


def _moments(x: Tensor, seen: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and mean square about it of each feature, over the rows that are seen."""
    if seen is not None:
        weight = seen.to(dtype)
        total = weight.sum(-2, keepdim=True).clamp(min=1)
        mean = (x * weight).sum(-2, keepdim=True) / total
        return mean, ((x - mean).square() * weight).sum(-2, keepdim=True) / total
    some = x[..., :: sample_step(x.shape[-2]), :].to(dtype)  # enough of them, since any frame is exact
    mean = some.mean(-2, keepdim=True)
    return mean, (some - mean).square().mean(-2, keepdim=True)


def framed_queries(p: Problem, frame: Frame, span: slice, dtype: torch.dtype) -> Tensor:
    """Queries in the frame, the scale shared evenly with the keys."""
    shift, balance = (x.repeat_interleave(p.q.shape[1] // x.shape[1], 1) for x in (frame.query_shift, frame.balance))
    root = math.copysign(math.sqrt(abs(p.scale)), p.scale)
    return (p.q[..., span, :].to(dtype) - shift) * (balance * root)


def framed_keys(p: Problem, frame: Frame, span: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in the frame, their lengths, and the log each brings: −‖k‖²/2, and b·(k−c) for the shift of the queries."""
    away = p.k[..., span, :].to(dtype) - frame.key_shift
    keys = away * (math.sqrt(abs(p.scale)) / frame.balance)
    log = away @ (frame.query_shift * p.scale).transpose(-1, -2)
    length = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    return keys, length, log - 0.5 * length.square()


def relative_variance(radius: Tensor, features: int, dim: int, orthogonal: bool) -> Tensor:
    r"""A bound on the variance of a mixture of kernel estimates, relative to its squared mean.

    One feature has relative variance :math:`e^{R^2}-1`, R the largest norm of q + k. Two orthogonal features
    w, w' of one block are not independent, but for any z, z' of norm at most R,

    .. math:: -\frac{R^2(1+R^2)}{2(d-3)} \le \frac{E e^{w\cdot z} e^{w'\cdot z'}}{E e^{w\cdot z} E e^{w'\cdot z'}} - 1
              \le e^{R^2/2(d-1)} - 1

    since, given w, the other is uniform in its complement with a norm of its own: its moments exceed those of a
    Gaussian there by at most (d/(d−1))^k, and it lacks at most :math:`(w\cdot z')^2/\|w\|^2`, whose mean under the
    tilted law N(z, I) is at most :math:`R^2(1+R^2)/(d-3)`.
    """
    square = radius.square()
    own = torch.expm1(square)
    if not orthogonal:
        return own / features
    block = min(dim, features)
    shared = own
    if dim > 3:
        above = torch.expm1(square / (2 * (dim - 1)))
        below = square * (1 + square) / (2 * (dim - 3))
        shared = torch.minimum(own, torch.maximum(above, below))
    return (own + (block - 1) * shared) / features


def ratio_bound(variance: Tensor, confidence: float) -> Tensor:
    r"""With this probability a row's error is at most this, by Chebyshev above and Cantelli below.

    The error is :math:`\|\sum_j \hat A_j (v_j - o^*)\| / \hat D`. Its numerator has mean zero and second moment
    at most V, in units of D and the largest value; P(D̂ ≤ (1−s)D) ≤ V/(V+s²).
    """
    miss = (1 - confidence) / 2
    above = torch.sqrt(variance / miss)
    below = torch.sqrt(variance * (1 - miss) / miss)
    return torch.where(below < 1, above / (1 - below).clamp(min=1e-12), math.inf)


def variance_for(tol: float, confidence: float) -> float:
    """The relative variance at which `ratio_bound` equals `tol`."""
    miss = (1 - confidence) / 2
    return (tol / (1 / math.sqrt(miss) + tol * math.sqrt((1 - miss) / miss))) ** 2


def lengths(p: Problem, frame: Frame) -> tuple[Tensor, Tensor]:
    """Lengths in the frame, of queries and of the longest keys; tile by tile, since whole copies would cost more."""
    per_position, dtype = p.q.shape[0] * p.q.shape[1] * p.q.shape[-1], frame.key_shift.dtype
    rows = [
        torch.linalg.vector_norm(framed_queries(p, frame, span, dtype), dim=-1)
        for span in tiles(p.q.shape[-2], per_position)
    ]
    keys = [
        framed_keys(p, frame, span, dtype)[1][..., 0].amax(-1, keepdim=True)
        for span in tiles(p.k.shape[-2], per_position)
    ]
    return torch.cat(rows, -1), torch.cat(keys, -1).amax(-1, keepdim=True)


def radii(p: Problem, frame: Frame, rows: Tensor, keys: Tensor, norms: Norms) -> tuple[Tensor, Tensor, Tensor]:
    """Norms in the frame: of every query (b, h, n), of the longest key (b, h, 1), and the largest shift of a log."""
    heads = p.q.shape[1]
    grown = 1 + 64 * (p.q.shape[-1] + 4) * rounding.unit(frame.key_shift.dtype)
    radius_q, radius_k = rows.double() * grown, keys.double() * grown
    centre_q = torch.linalg.vector_norm(frame.query_shift, dim=-1).double()
    centre_k = torch.linalg.vector_norm(frame.key_shift, dim=-1).double()
    longest_key = per_query_head(norms.k.amax(-1, keepdim=True), p.k.shape[1])
    longest_query = norms.q.reshape(norms.q.shape[0], p.k.shape[1], -1).amax(-1, keepdim=True)  # (b, g, 1)
    reach = abs(p.scale) * (centre_q + longest_query) * (longest_key + centre_k)
    return radius_q, per_query_head(radius_k, heads), per_query_head(reach, heads)


class FeatureLogs:
    """Logs of the features of a problem along some directions, and notes on how long rows and keys are in the frame."""

    def __init__(self, p: Problem, directions: Float[Tensor, "m d"], frame: Frame, wide: torch.dtype) -> None:
        self.problem, self.directions, self.frame, self.wide = p, directions, frame, wide
        # (b, g, d, m): one product per head
        self._across = directions.to(wide).T.expand(*p.k.shape[:2], -1, -1).contiguous()
        # Where there is neither row nor key, there still is something to join.
        self.query_radii: list[Float[Tensor, "b h l"]] = [p.q.new_zeros(*p.q.shape[:2], 0, dtype=wide)]
        self.key_radii: list[Float[Tensor, "b g 1"]] = [p.k.new_zeros(*p.k.shape[:2], 1, dtype=wide)]

    def of_rows(self, span: slice) -> Float[Tensor, "b g r l m"]:
        """Those of some rows, as many in each of the r query heads that share a key head."""
        rows = framed_queries(self.problem, self.frame, span, self.wide)
        self.query_radii.append(torch.linalg.vector_norm(rows.detach(), dim=-1))
        return grouped(rows, self.problem.k.shape[1]) @ self._across.unsqueeze(2)

    def of_keys(self, span: slice) -> tuple[Float[Tensor, "b g l m"], Float[Tensor, "b g l 1"]]:
        """Those of some keys, and what each key adds to all of its own."""
        keys, length, shift = framed_keys(self.problem, self.frame, span, self.wide)
        self.key_radii.append(length.detach()[..., 0].amax(-1, keepdim=True))
        return keys @ self._across, shift

    @property
    def query_radius(self) -> Float[Tensor, "b h l"]:
        """The length in the frame of every row that was asked for, in that order."""
        return torch.cat(self.query_radii, -1)

    @property
    def key_radius(self) -> Float[Tensor, "b g 1"]:
        """The length in the frame of the longest key that was asked for."""
        return torch.cat(self.key_radii, -1).amax(-1, keepdim=True)
