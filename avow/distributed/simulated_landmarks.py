"""Low-rank attention over a sequence as a script: a frame, landmarks and their factor are agreed, states combined.

What it exchanges is what `comm_cost.landmarks` counts. Landmarks are the keys with the most left to explain, not drawn
at random, so that any number of shards finds the same ones.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import pad

from avow.core import Problem
from avow.distributed.protocols import Protocol, all_gather
from avow.distributed.simulated import centred, combined, joined
from avow.numerics.cholesky import log_gauss, rounds
from avow.numerics.heads import grouped, ungrouped

# What keeps the kernel of landmarks that nearly coincide invertible.
_RIDGE = 1e-10


def low_rank(p: Problem, ranks: int, rank: int) -> Protocol[Tensor]:
    """This shard's rows through so many landmarks among the keys of all; there are no more keys than candidates."""
    b, g, s, d = p.k.shape
    keys = (yield from centred(p.k.double(), ranks)) * math.sqrt(p.scale)
    queries = grouped(p.q.double() * math.sqrt(p.scale), g).flatten(2, 3)  # (b, g, r, d)
    heavy = 0.5 * keys.square().sum(-1)  # (b, g, s)
    points, mine = yield from _landmarks(keys, heavy, ranks, rank)
    own = torch.where(mine.unsqueeze(-1), points, 0.0).flatten(2)  # (b, g, rank·d)
    told = torch.cat([own, mine.sum(-1, keepdim=True).double()], -1).flatten(0, 1)[None, None]  # (1, 1, bg, rank·d + 1)
    factored = yield from combined(told, ranks, lambda x: _factored(x, rank, d))
    chosen, _, factor, _ = factored.reshape(b, g, -1).split([rank * d, 1, rank * rank, 1], -1)
    chosen, factor = chosen.unflatten(-1, (rank, d)), factor.unflatten(-1, (rank, rank))
    tops = torch.stack([heavy.amax(-1), heavy.sum(-1), torch.full_like(heavy[..., 0], s)], -1)
    tops = yield from all_gather(tops, ranks)
    top = tops[..., 0].amax(0)[..., None, None]  # (b, g, 1, 1)
    features = _features(chosen, factor, keys) * (heavy.unsqueeze(-2) - top).exp()  # (b, g, rank, s)
    state = torch.cat([features @ p.v.double(), features.sum(-1, keepdim=True)], -1)
    state = torch.cat([state, top.expand(b, g, rank, 1)], -1)
    sums = yield from combined(state, ranks, joined)
    both = _features(chosen, factor, queries).mT @ sums[..., :-1]  # (b, g, r, e + 1)
    out = both[..., :-1] / both[..., -1:]
    return ungrouped(out.unflatten(2, (-1, p.q.shape[2])))


def _factored(told: Float64[Tensor, "ranks 1 1 m c"], rank: int, dim: int) -> Float64[Tensor, "1 1 m w"]:
    """Landmarks put together, and the Cholesky factor of their kernel; rows beyond the last head hold nothing."""
    whole = told.sum(0)
    points = whole[..., :-1].unflatten(-1, (rank, dim))
    kernel = log_gauss(points, points).exp() + _RIDGE * torch.eye(rank, dtype=points.dtype)
    kernel = torch.where(whole[..., -1:, None] > 0, kernel, torch.eye(rank, dtype=points.dtype))
    factor = torch.linalg.cholesky(kernel)
    return torch.cat([whole, factor.flatten(-2), factor.diagonal(dim1=-1, dim2=-2).amin(-1, keepdim=True)], -1)


def _picked(told: Float64[Tensor, "ranks 1 1 m c"], width: int) -> Float64[Tensor, "1 1 m c"]:
    """Of each head's proposals, as many as one shard made: those of most worth, which stands first."""
    said = told.unflatten(-1, (-1, width)).movedim(0, 3).flatten(3, 4)  # (1, 1, m, ranks·size, width)
    best = said[..., 0].topk(told.shape[-1] // width, dim=-1).indices
    return said.gather(-2, best.unsqueeze(-1).expand(*best.shape, width)).flatten(-2)


def _features(points: Tensor, factor: Tensor, x: Tensor) -> Float64[Tensor, "b g r s"]:
    return torch.linalg.solve_triangular(factor, log_gauss(points, x).exp(), upper=False)


def _landmarks(
    x: Float64[Tensor, "b g s d"], heavy: Float64[Tensor, "b g s"], ranks: int, rank: int
) -> Protocol[tuple[Tensor, Tensor]]:
    """Landmarks in rounds of proposals, (b, g, rank, d), and which of them are keys of this shard."""
    b, g, s, d = x.shape
    left, rows = torch.ones_like(heavy), x.new_zeros(b, g, rank, s)
    points, mine = x.new_zeros(b, g, rank, d), torch.zeros(b, g, rank, dtype=torch.bool)
    taken = torch.zeros_like(left, dtype=torch.bool)
    for span in rounds(rank):
        size, earlier = span.stop - span.start, rows[..., : span.start, :]
        worth = (2 * heavy + left.clamp(min=1e-300).log()).masked_fill(taken, -math.inf)
        index = worth.topk(min(size, s), dim=-1).indices  # (b, g, ≤ size)
        best = torch.cat([worth.unsqueeze(-1), x, earlier.mT], -1).gather(
            -2, index.unsqueeze(-1).expand(-1, -1, -1, 1 + d + span.start)
        )
        best = pad(best, (0, 0, 0, size - best.shape[-2]))
        best[..., index.shape[-1] :, 0] = -math.inf
        told = best.reshape(1, 1, b * g, -1)
        said = yield from combined(told, ranks, functools.partial(_picked, width=best.shape[-1]))
        _, fresh, along = said.reshape(best.shape).split([1, d, span.start], -1)
        points[..., span, :] = fresh
        # A key of this shard is the point itself, to the last bit.
        same = (x.unsqueeze(-2) == fresh.unsqueeze(-3)).all(-1) & ~taken.unsqueeze(-1)  # (b, g, s, size)
        mine[..., span] = same.any(-2)
        taken |= same.any(-1)
        across = log_gauss(fresh, x).exp() - along @ earlier
        block = log_gauss(fresh, fresh).exp() - along @ along.mT + _RIDGE * torch.eye(size, dtype=x.dtype)
        rows[..., span, :] = torch.linalg.solve_triangular(torch.linalg.cholesky(block), across, upper=False)
        left = (left - rows[..., span, :].square().sum(-2)).clamp(min=0.0)
    return points, mine
