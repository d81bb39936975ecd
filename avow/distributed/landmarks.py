"""Landmarks among the keys of all shards, chosen together: a few keys are proposed and told, no shard is sent.

This is `cholesky.pivots` with the keys where they are. In each round every process proposes its best keys,
and the best of all proposals are told to all. With the same generator the landmarks are those that one process with
all keys would draw, unless rounding decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.distributed.exchange import combined
from avow.distributed.shards import Shards
from avow.numerics import cholesky


class Chosen(NamedTuple):
    """Which landmarks are keys of this process, and which of them; another's have number 0."""

    mine: Bool[Tensor, "b g r"]
    key: Int[Tensor, "b g r"]


class _Candidates(NamedTuple):
    """This process's keys that may become landmarks, which they are, and their places among those of all shards."""

    x: Float[Tensor, "b g c d"]
    log_weight: Float[Tensor, "b g c"]
    key: Int[Tensor, "b g c"]
    place: Int[Tensor, "b g c"]


def chosen(shards: Shards, x: Float[Tensor, "b g s d"], log_weight: Float[Tensor, "b g s"], rank: int) -> Chosen:
    """Landmarks by randomised block-pivoted Cholesky over the keys of all shards."""
    few = cholesky.candidates(shards.total, rank)
    some = _candidates(shards, x, log_weight, rank)
    b, g, c = some.place.shape
    half = 0.5 * some.x.square().sum(-1).unsqueeze(-2)  # (b, g, 1, c)
    diagonal, left = 2 * some.log_weight, torch.ones_like(some.log_weight)
    taken, place = some.place >= few, some.place.clamp(max=few - 1)
    rows = x.new_zeros(b, g, rank, c)
    mine, key = torch.zeros(b, g, rank, dtype=torch.bool, device=x.device), place.new_zeros(b, g, rank)
    for span in cholesky.rounds(rank):
        earlier = rows[..., : span.start, :]
        noise = cholesky.uniform((b, g, few), shards.generator, x).gather(-1, place)
        worth = cholesky.worth(diagonal, left, taken, noise)
        best = _best(shards, some.x, worth, earlier, span.stop - span.start)
        mine[..., span] = best.mine
        if c:
            key[..., span] = torch.where(best.mine, some.key.gather(-1, best.candidate), 0)
            taken |= torch.zeros_like(place).scatter_add_(-1, best.candidate, best.mine.long()).bool()
        squares = 0.5 * best.x.square().sum(-1, keepdim=True)
        fresh = (best.x @ some.x.transpose(-1, -2)).sub_(half).sub_(squares).clamp_(max=0.0).exp_()
        # The pivots' own columns, which every process can tell from what it was told.
        block = cholesky.log_gauss(best.x, best.x).exp_() - best.along @ best.along.transpose(-1, -2)
        rows[..., span, :] = cholesky.orthonormal(fresh - best.along @ earlier, block)
        left = cholesky.remaining(left, rows[..., span, :])
    return Chosen(mine, key)


class _Pivots(NamedTuple):
    """Keys of all shards, their entries in the rows of earlier pivots, and which candidate of this process each is."""

    x: Float[Tensor, "b g l d"]
    along: Float[Tensor, "b g l start"]
    mine: Bool[Tensor, "b g l"]
    candidate: Int[Tensor, "b g l"]


def _best(
    shards: Shards, x: Float[Tensor, "b g c d"], worth: Float[Tensor, "b g c"], earlier: Tensor, size: int
) -> _Pivots:
    """So many keys of the greatest worth among those of all processes, each of which proposes as many.

    One process picks for a head, and tells the others which proposals it took.
    """
    own = worth.topk(min(size, x.shape[-2]), dim=-1)
    told = own.values.unsqueeze(-1), _at(x, own.indices), _at(earlier.transpose(-1, -2), own.indices)
    short = size - own.indices.shape[-1]
    proposal = pad(torch.cat(told, -1), (0, 0, 0, short))  # (b, g, size, 1 + d + start)
    proposal[..., size - short :, 0] = -math.inf

    def pick(said: Tensor) -> Tensor:
        given = said.unflatten(-1, proposal.shape[-2:]).movedim(0, -3).flatten(-3, -2)  # (1, 1, heads, ranks·size, …)
        picked = given[..., 0].topk(size, dim=-1).indices.unsqueeze(-1)
        found = given.gather(-2, picked.expand(*picked.shape[:-1], given.shape[-1]))
        found = torch.cat([picked.to(found), found[..., 1:]], -1).flatten(-2)
        return found.expand(shards.ranks, *found.shape)

    heads = proposal.shape[0] * proposal.shape[1]
    found = combined(proposal.reshape(1, 1, heads, -1), pick, shards.group).reshape(proposal.shape)
    picked = found[..., 0].long()
    points, along = found[..., 1:].split([x.shape[-1], earlier.shape[-2]], -1)
    mine = picked // size == shards.rank
    candidate = pad(own.indices, (0, short)).gather(-1, torch.where(mine, picked % size, 0))
    return _Pivots(points, along, mine, candidate)


def _candidates(shards: Shards, x: Tensor, log_weight: Tensor, rank: int) -> _Candidates:
    """All keys, or the best of all shards by a first draw: each process then knows which of them are its own."""
    (b, g, s), few = log_weight.shape, cholesky.candidates(shards.total, rank)
    here = torch.arange(s, device=x.device).expand(b, g, s)
    if few == shards.total:
        return _Candidates(x, log_weight, here, here + shards.before)
    # Every process draws for the keys of all and takes its part: numbers are cheaper to draw than to send.
    noise = cholesky.uniform((b, g, shards.total), shards.generator, x)[..., shards.before : shards.before + s]
    most = min(few, max(shards.keys))
    best = (2 * log_weight + cholesky.gumbel(noise)).topk(min(most, s), dim=-1)
    worth = pad(best.values, (0, most - best.values.shape[-1]), value=-math.inf)
    place = combined(worth.reshape(1, 1, b * g, most), _places, shards.group).reshape(b, g, most)
    index = best.indices
    return _Candidates(_at(x, index), log_weight.gather(-1, index), index, place[..., : index.shape[-1]].long())


def _places(worth: Float[Tensor, "ranks one also heads c"]) -> Float[Tensor, "ranks one also heads c"]:
    """How many candidates of all ranks are better than each."""
    flat = worth.movedim(0, -2).flatten(-2)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    place = torch.empty_like(flat).scatter_(-1, order, torch.arange(flat.shape[-1]).to(flat).expand_as(flat))
    return place.unflatten(-1, (worth.shape[0], -1)).movedim(-2, 0)


def _at(x: Float[Tensor, "b g c w"], index: Int[Tensor, "b g l"]) -> Float[Tensor, "b g l w"]:
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
