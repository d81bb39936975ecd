r"""Low-rank attention over shards of a sequence: landmarks are agreed once, then states are combined.

The frame, the landmarks and the factor of their kernel are made together, each number by one process, so that the
features :math:`\varphi` are the same function everywhere; then each process works on its own rows and keys, and sums
over keys are joined as any linear attention's are (`avow.distributed.states`).

Landmarks are chosen as by `cholesky.pivots` with the keys where they are: in each round every process proposes its best
keys, and the best of all proposals go to all. With the same generator the landmarks are those that one process with all
keys would draw, unless rounding decides.

The bound of a row needs two sums over the keys it sees, of :math:`w_j` and of :math:`w_j \sqrt{\rho(k_j)}`. Each
process sends both of its own keys; what lies before a causal shard counts as part of its first key, which every row of
it sees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.attend import Attended
from avow.core import Computed, Method, Sizes
from avow.core.certify import certify
from avow.core.requirement import random_stream
from avow.distributed.consensus import Context, agree, digest
from avow.distributed.protocols import (
    Protocol,
    Shard,
    Traffic,
    all_gather,
    combine_message,
    combine_rows,
    gather_message,
    over_processes,
    traffic,
)
from avow.distributed.states import (
    LinearShard,
    centred_frame,
    gather_longest,
    joined,
    random_features_protocol,
    separable_protocol,
)
from avow.methods import random_features
from avow.methods.low_rank import LowRank, Trace
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.numerics import cholesky, rounding, scan
from avow.numerics import features as feature_maps
from avow.numerics.cholesky import Factor, LandmarkFeatures, WeightedKeys
from avow.numerics.features import Frame
from avow.numerics.heads import grouped, per_query_head, ungrouped, vector_lengths, within_ball

_U = rounding.unit(torch.float64)


def attend_linear(context: Context, method: Method, confidence: float, generator: torch.Generator | None) -> Attended:
    """Separable, random-feature or low-rank attention of this process's rows to the keys of all processes.

    Shards may differ in length and may be empty, and without causality there may be any number of queries. Gradients
    flow to every shard, so that all processes go backward together. The generators of all processes are alike.
    """
    shard, out, trace = over_processes(linear_protocol(context, method, generator), context.group)
    if isinstance(trace, random_features.Trace) and shard.longest[..., 4].unique().numel() > 1:
        # Other bits from the same seed, as another machine or another torch may draw them.
        agree({"digest of directions": digest(trace.directions)}, None, None, context.group)
    certificate = certify(method, shard.whole, Computed(out, trace), confidence)
    return Attended(out, dataclasses.replace(certificate, cost=method.cost(context.problem.sizes)))


def linear_protocol(
    shard: Shard, method: Method, generator: torch.Generator | None
) -> Protocol[tuple[LinearShard, Tensor, Any]]:
    """The shard once it knows the others, the answers to its rows, and what their certificate takes."""
    if isinstance(method, RandomFeatures):
        q, stream = shard.problem.q, random_stream(generator, "cpu")
        directions = feature_maps.draw(method.features, q.shape[-1], method.orthogonal, stream, q.device)
        linear = yield from gather_longest(shard, generator, directions)
        return linear, *(yield from random_features_protocol(linear, method, directions))
    linear = yield from gather_longest(shard, generator, None)
    if isinstance(method, LowRank):
        return linear, *(yield from low_rank_protocol(linear, method.rank))
    assert isinstance(method, Separable)
    return linear, *(yield from separable_protocol(linear, method))


def low_rank_traffic(method: LowRank, z: Sizes, ranks: int, longest: int | None = None) -> Traffic:
    """What a rank sends, if the longest shard has so many keys, or all have as many.

    Ranks that outnumber the key heads send more, since landmarks are shared out by heads.
    """
    heads, rank = (z.batch, z.key_heads), method.rank
    message = functools.partial(combine_message, 1, 1, z.batch * z.key_heads, ranks=ranks)
    few = cholesky.candidates(z.keys, rank)
    candidates = [] if few == z.keys else [message(min(few, -(-z.keys // ranks) if longest is None else longest))]
    proposals = [message((span.stop - span.start) * (1 + z.dim + span.start)) for span in cholesky.rounds(rank)]
    rounds = [
        gather_message(*heads, 5, ranks=ranks),
        combine_message(*heads, z.dim, 4, width=3, ranks=ranks),  # the frame
        *candidates,
        *proposals,
        message(rank * z.dim + 1, width=rank * z.dim + rank * rank + 2),  # the factor
        combine_message(*heads, rank, z.value_dim + 2, ranks=ranks),  # states
        gather_message(*heads, 3, ranks=ranks),  # sums for bounds
    ]
    return traffic(rounds, ranks)


def low_rank_protocol(shard: LinearShard, rank: int) -> Protocol[tuple[Tensor, Trace | None]]:
    """The answers to a shard's rows, and what their certificate takes."""
    p = shard.problem
    frame: Frame = yield from centred_frame(shard, torch.float64)
    keys = WeightedKeys.of(p, frame)
    factor, radius = yield from _agreed_factor(shard, keys.points, keys.log, rank)
    features = LandmarkFeatures(p, keys, factor)
    values, size = shard.values(torch.float64)
    own = shard.absorbed(features.of_keys, values, rank, 1, *frame, *factor[:2])
    state = yield from joined(shard, own)
    residual = features.key_residual  # of the first pass over the keys
    sums_of_all = yield from all_gather(_sums(keys.log.detach()[..., 0], residual, values), shard.ranks)
    normalisers: list[Tensor] = []

    def answer() -> tuple[scan.Sums, int]:
        sums, unit, steps = shard.averaged(features.of_keys, lambda rows, _: features.of_rows(rows), values, state)
        assert sums.normaliser is not None and unit is not None
        normalisers.extend(ungrouped(x.detach().expand_as(sums.normaliser))[..., 0] for x in (sums.normaliser, unit))
        most = grouped(_longest_seen(shard, values, sums_of_all[..., 2]).unsqueeze(-1), p.k.shape[1])
        return sums._replace(out=within_ball(sums.out, most)), steps

    out, steps = shard.collected(answer, size, state.sums, state.total, sums_of_all[..., 2], *frame, *factor[:2])
    if not normalisers:
        return out, None
    rows = features.rows
    key_log, key_residual = _seen(shard, keys.log.detach()[..., 0], residual, sums_of_all.detach())
    normaliser, unit_log = normalisers
    return out, Trace(key_log, key_residual, rows, normaliser, unit_log, factor.slack, radius, frame, steps)


def _agreed_factor(
    shard: LinearShard, keys: Tensor, weight: Tensor, rank: int
) -> Protocol[tuple[Factor, Float[Tensor, "b g"]]]:
    """The features of landmarks among the keys of all shards, and at most how long those are; each head by one process.

    A landmark comes from the process that has it, as a sum to which the others add zeros.
    """
    b, g, s, d = keys.shape
    radius = torch.linalg.vector_norm(keys.detach(), dim=-1).amax(-1) if s else keys.new_zeros(b, g)
    mine, index = yield from landmarks(shard, keys.detach(), weight[..., 0].detach(), rank)
    held = keys if s else keys.sum(-2, keepdim=True).expand(b, g, 1, d)  # zeros, for autograd a function of the keys
    own = held.gather(-2, index.unsqueeze(-1).expand(b, g, rank, d)) * mine.unsqueeze(-1)

    def combine(pieces: Tensor) -> Tensor:
        points = pieces[..., :-1].sum(0)[0].unflatten(-1, (rank, d))  # (1, heads, r, d)
        longest = pieces[..., -1].detach().amax(0)[0]
        f = cholesky.factor(points, longest)
        numbers = torch.cat([f.landmarks.flatten(2), f.b.flatten(2), f.slack[..., None], longest[..., None]], -1)
        return numbers.expand(shard.ranks, 1, *numbers.shape)

    proposal = torch.cat([own.flatten(2), radius.unsqueeze(-1)], -1).reshape(1, 1, b * g, -1)
    combined = yield from combine_rows(proposal, combine, shard.ranks)
    points, inverse, slack, radius = combined.reshape(b, g, -1).split([rank * d, rank * rank, 1, 1], -1)
    factor = Factor(points.unflatten(-1, (rank, d)), inverse.unflatten(-1, (rank, rank)), slack.detach()[..., 0])
    return factor, radius.detach()[..., 0]


def _sums(key_log: Tensor, residual: Tensor, values: Tensor) -> Float[Tensor, "b g 3"]:
    """Logarithms of the sums of weights, and of weights times roots of residuals; and the longest value."""
    sums = [_above(torch.logsumexp(x, -1), x.shape[-1]) for x in (key_log, key_log + 0.5 * residual.log())]
    longest = vector_lengths(values)[..., 0].amax(-1) if values.shape[-2] * values.shape[-1] else values.sum((-1, -2))
    return torch.stack([*sums, longest], -1)


def _seen(shard: LinearShard, key_log: Tensor, residual: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Logs and residuals whose sums over what a row sees are those over the keys of all shards, or more.

    Without causality one key stands for all. A causal shard's first key stands also for all before it.
    """
    if not shard.problem.causal:
        mass, missed = (_above(torch.logsumexp(sums[..., i], 0), shard.ranks).unsqueeze(-1) for i in range(2))
        return mass, _residual(mass, missed)
    if not shard.rank:
        return key_log, residual
    first = key_log[..., 0], (key_log + 0.5 * residual.log())[..., 0]
    mass, missed = (
        _above(torch.logsumexp(torch.cat([sums[: shard.rank, ..., i], first[i][None]]), 0), shard.ranks)
        for i in range(2)
    )
    logs = torch.cat([mass.unsqueeze(-1), key_log[..., 1:]], -1)
    return logs, torch.cat([_residual(mass, missed).unsqueeze(-1), residual[..., 1:]], -1)


def _residual(mass: Tensor, missed: Tensor) -> Tensor:
    """The residual for which a weight of e^mass has at least e^missed left."""
    return torch.exp(2 * (missed - mass) + 64 * _U * (1 + mass.abs() + missed.abs().nan_to_num(posinf=0.0)))


def _above(log: Tensor, terms: int) -> Tensor:
    """An upper bound on the true logarithm of a sum of `terms` terms."""
    return log + 64 * _U * (log.abs().nan_to_num(0.0, 0.0, 0.0) + terms)


def _longest_seen(shard: LinearShard, values: Tensor, longest: Float[Tensor, "ranks b g"]) -> Float[Tensor, "b h #n"]:
    """The length of the longest value that each row sees, in all shards."""
    p = shard.problem
    if not p.causal:
        return per_query_head(longest.amax(0).unsqueeze(-1), p.q.shape[1])
    earlier = torch.arange(shard.ranks, device=values.device) < shard.rank
    before = torch.where(earlier[:, None, None], longest, 0.0).amax(0).unsqueeze(-1)
    return per_query_head(torch.maximum(before, vector_lengths(values)[..., 0].cummax(-1).values), p.q.shape[1])


def landmarks(
    shard: LinearShard, x: Float[Tensor, "b g s d"], log_weight: Float[Tensor, "b g s"], rank: int
) -> Protocol[tuple[Bool[Tensor, "b g r"], Int[Tensor, "b g r"]]]:
    """Landmarks by randomised block-pivoted Cholesky over the keys of all shards.

    Which of them are keys of this process, and which key each is; another's have number 0.
    """
    few = cholesky.candidates(shard.total, rank)
    index, place = yield from _candidates(shard, log_weight, rank)
    x, log_weight = _at(x, index), log_weight.gather(-1, index)
    b, g, c = place.shape
    half = 0.5 * x.square().sum(-1).unsqueeze(-2)  # (b, g, 1, c)
    diagonal, left = 2 * log_weight, torch.ones_like(log_weight)
    taken, place = place >= few, place.clamp(max=few - 1)
    rows = x.new_zeros(b, g, rank, c)
    mine, key = torch.zeros(b, g, rank, dtype=torch.bool, device=x.device), place.new_zeros(b, g, rank)
    for span in cholesky.rounds(rank):
        earlier = rows[..., : span.start, :]
        noise = cholesky.uniform((b, g, few), shard.generator, x).gather(-1, place)
        worth = cholesky.worth(diagonal, left, taken, noise)
        pivots, along, own, candidate = yield from _best(shard, x, worth, earlier, span.stop - span.start)
        mine[..., span] = own
        if c:
            key[..., span] = torch.where(own, index.gather(-1, candidate), 0)
            taken |= torch.zeros_like(place).scatter_add_(-1, candidate, own.long()).bool()
        squares = 0.5 * pivots.square().sum(-1, keepdim=True)
        fresh = (pivots @ x.transpose(-1, -2)).sub_(half).sub_(squares).clamp_(max=0.0).exp_()
        # The pivots' own columns, which every process can compute from what it received.
        block = cholesky.log_gauss(pivots, pivots).exp_() - along @ along.transpose(-1, -2)
        rows[..., span, :] = cholesky.orthonormal(fresh - along @ earlier, block)
        left = cholesky.remaining(left, rows[..., span, :])
    return mine, key


def _best(
    shard: LinearShard, x: Float[Tensor, "b g c d"], worth: Float[Tensor, "b g c"], earlier: Tensor, size: int
) -> Protocol[tuple[Tensor, Tensor, Bool[Tensor, "b g l"], Int[Tensor, "b g l"]]]:
    """So many keys of the greatest worth among those of all processes, each of which proposes as many.

    One process picks for a head, and sends the others the proposals it took: keys (b, g, l, d) and their entries in the
    rows of earlier pivots. Each knows which of them are its own, and which of its candidates.
    """
    own = worth.topk(min(size, x.shape[-2]), dim=-1)
    short = size - own.indices.shape[-1]
    columns = own.values.unsqueeze(-1), _at(x, own.indices), _at(earlier.transpose(-1, -2), own.indices)
    proposal = pad(torch.cat(columns, -1), (0, 0, 0, short))  # (b, g, size, 1 + d + start)
    proposal[..., size - short :, 0] = -math.inf

    def pick(pieces: Tensor) -> Tensor:
        every = pieces.unflatten(-1, proposal.shape[-2:]).movedim(0, -3).flatten(-3, -2)  # (1, 1, heads, ranks·size, …)
        index = every[..., 0].topk(size, dim=-1).indices.unsqueeze(-1)
        taken = every.gather(-2, index.expand(*index.shape[:-1], every.shape[-1]))
        taken = torch.cat([index.to(taken), taken[..., 1:]], -1).flatten(-2)
        return taken.expand(shard.ranks, *taken.shape)

    heads = proposal.shape[0] * proposal.shape[1]
    pivots = yield from combine_rows(proposal.reshape(1, 1, heads, -1), pick, shard.ranks)
    pivots = pivots.reshape(proposal.shape)
    picked = pivots[..., 0].long()
    points, along = pivots[..., 1:].split([x.shape[-1], earlier.shape[-2]], -1)
    mine = picked // size == shard.rank
    candidate = pad(own.indices, (0, short)).gather(-1, torch.where(mine, picked % size, 0))
    return points, along, mine, candidate


def _candidates(
    shard: LinearShard, log_weight: Tensor, rank: int
) -> Protocol[tuple[Int[Tensor, "b g c"], Int[Tensor, "b g c"]]]:
    """This process's keys that may become landmarks, and their places among those of all shards.

    They are all keys, or the best of all shards by a first draw.
    """
    (b, g, s), few = log_weight.shape, cholesky.candidates(shard.total, rank)
    if few == shard.total:
        here = torch.arange(s, device=log_weight.device).expand(b, g, s)
        return here, here + shard.before
    # Every process draws for the keys of all and takes its part: numbers are cheaper to draw than to send.
    noise = cholesky.uniform((b, g, shard.total), shard.generator, log_weight)[..., shard.before : shard.before + s]
    most = min(few, max(shard.keys))
    best = (2 * log_weight + cholesky.gumbel(noise)).topk(min(most, s), dim=-1)
    worth = pad(best.values, (0, most - best.values.shape[-1]), value=-math.inf)
    places = yield from combine_rows(worth.reshape(1, 1, b * g, most), _places, shard.ranks)
    return best.indices, places.reshape(b, g, most)[..., : best.indices.shape[-1]].long()


def _places(worth: Float[Tensor, "ranks one also heads c"]) -> Float[Tensor, "ranks one also heads c"]:
    """How many candidates of all ranks are better than each."""
    flat = worth.movedim(0, -2).flatten(-2)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    place = torch.empty_like(flat).scatter_(-1, order, torch.arange(flat.shape[-1]).to(flat).expand_as(flat))
    return place.unflatten(-1, (worth.shape[0], -1)).movedim(-2, 0)


def _at(x: Float[Tensor, "b g c w"], index: Int[Tensor, "b g l"]) -> Float[Tensor, "b g l w"]:
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
