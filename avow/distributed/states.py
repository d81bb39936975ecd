r"""Linear attention over shards of a sequence, one shard a process: states travel, and rows and keys stay.

All that a row must know of keys elsewhere is the state of their sums (`avow.numerics.scan`): for every feature a
reference :math:`\mathrm{top}`, a total and a sum of values. Each process sums its own keys, once. Without causality
the states of all are added up; with it, rank r is told the sum over the ranks before it, from which its own causal scan
starts:

.. math:: \mathrm{top} = \max_{i<r} \mathrm{top}_i, \quad
          \mathrm{sums} = \sum_{i<r} e^{\mathrm{top}_i - \mathrm{top}}\, \mathrm{sums}_i

*Rounding.* On its way a term is rescaled once more and added to those of other ranks. That moves its logarithm by the
rounding of a difference of references, which only rise along the way, so that their differences add up to no more than
the method's bound allows for already; by an exponential, right to `EXP_ULPS`; and by a sum over ranks. `joined` counts
the last two as further steps of the scan, and the method's own promise does the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.distributed.consensus import Context
from avow.distributed.exchange import combined, gathered, tied
from avow.distributed.frames import centred_frame
from avow.distributed.shards import Shards, alike, shards_of
from avow.methods import random_features, separable
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.numerics import features as feature_maps
from avow.numerics import rounding, scan
from avow.numerics.feature_logs import FeatureLogs
from avow.numerics.heads import cast_output, grouped, linear_type, rescaled
from avow.numerics.random_stream import random_stream


def attend_states(
    met: Context, method: Separable | RandomFeatures, confidence: float, generator: torch.Generator | None
) -> Attended:
    """Attention of this process's rows to the keys of all processes, by states of sums.

    Shards may differ in length and may be empty, and without causality there may be any number of queries. Gradients
    flow to every shard, so that all processes go backward together. Their generators are alike.
    """
    shards = shards_of(met, generator)
    if isinstance(method, Separable):
        return shards.attended(method, *_separable(shards, method), confidence)
    return shards.attended(method, *_random_features(shards, method), confidence)


def joined(shards: Shards, state: scan.State) -> scan.State:
    """The state a process's rows start from: of all keys before its shard where causal, else of all keys."""
    logs, ranks = state.top.shape[-1], shards.ranks
    top = state.top.expand(*state.top.shape[:-1], state.sums.shape[-2])

    def combine(said: Tensor) -> Tensor:
        held, tops = said[..., :-1], said[..., -1:].detach()
        if shards.problem.causal:
            return torch.stack([_added(held[:rank], tops[:rank]) for rank in range(ranks)])
        whole = _added(held, tops)
        return whole.expand(ranks, *whole.shape)

    mine = torch.cat([state.sums, state.total, top.transpose(-1, -2)], -1)  # (b, g, m, e + 2)
    told = combined(mine, combine, shards.group)
    e = state.sums.shape[-1]
    top = told[..., -1:].detach().transpose(-1, -2)[..., :logs]
    tiles = len(list(scan.tiles(max(shards.keys), top.shape[0] * top.shape[1] * mine.shape[-2])))
    return scan.State(top, told[..., :e], told[..., e : e + 1], tiles + ranks + rounding.EXP_ULPS // 4)


def _added(held: Float[Tensor, "ranks b g m c"], tops: Float[Tensor, "ranks b g m 1"]) -> Float[Tensor, "b g m w"]:
    """Sums of some ranks relative to their highest reference, which comes last."""
    top = tops.amax(0) if len(tops) else tops.new_full(tops.shape[1:], -math.inf)
    shrink = torch.exp(tops - top.masked_fill(top == -math.inf, 0.0))
    return torch.cat([(held * shrink).sum(0), top], -1)


def absorbed(
    shards: Shards, keys_of: scan.KeysOf, values: Tensor, features: int, logs: int, *followed: Tensor
) -> scan.State:
    """The state of this process's keys; where there are none, still a function of what autograd follows elsewhere."""
    if shards.problem.k.shape[-2]:
        return scan.absorb(keys_of, values, features)
    nothing = scan.nothing(values, features, logs)
    return nothing._replace(sums=tied(nothing.sums, shards.problem.k, values, *followed))


def collected(
    shards: Shards, answer: Callable[[], tuple[scan.Sums, int]], size: Tensor | None, *exchanges: Tensor
) -> tuple[Tensor, int]:
    """Answers to this process's rows, and in how many steps; where it has none, still a function of all exchanges."""
    p = shards.problem
    if shards.whole.empty:
        nothing = p.v.new_zeros(*p.q.shape[:-1], p.v.shape[-1])
        return tied(nothing, p.q, *exchanges), 0
    sums, steps = answer()
    return cast_output(p, rescaled(sums.out, size)), steps


def _separable(shards: Shards, method: Separable) -> tuple[Tensor, separable.Trace]:
    p = shards.problem
    wide, (queries, features) = linear_type(p), p.q.shape[-2:]
    values, size = shards.values(wide)
    keys = p.k.to(wide)  # once, so that the gradients of both passes over the keys are added up in the wide type
    least = torch.finfo(wide).tiny  # below any sum that a key contributes to, which is at least one

    def keys_of(span: slice) -> scan.Keys:
        return scan.Keys(method.cooled(keys[..., span, :]))

    def mixture(rows: slice) -> Tensor:
        return grouped(torch.softmax(method.cooled(p.q[..., rows, :].to(wide)), -1), p.k.shape[1])

    def causal_mixture(tile: scan.Tile) -> Tensor:
        prefix = scan.running(tile.features, tile.total)
        return mixture(tile.rows) / prefix.clamp(min=least).unsqueeze(2)

    state = joined(shards, absorbed(shards, keys_of, values, features, features))

    def answer() -> tuple[scan.Sums, int]:
        if p.causal:
            sums, last = scan.causal(keys_of, causal_mixture, values, p.q.shape[1], queries, state, normalise=False)
            return sums, last.steps
        columns = state._replace(sums=state.sums / state.total.clamp(min=least))
        return scan.collect(mixture, p.q.shape[1], queries, columns, normalise=False), state.steps

    out, steps = collected(shards, answer, size, state.sums, state.total)
    return out, separable.Trace(steps)


def _random_features(shards: Shards, method: RandomFeatures) -> tuple[Tensor, random_features.Trace]:
    p = shards.problem
    wide = method.arithmetic(p.with_norms(shards.agreed))
    (queries, d), m = p.q.shape[-2:], method.features
    directions = feature_maps.draw(m, d, method.orthogonal, random_stream(shards.generator, "cpu"), p.q.device)
    alike("directions", directions, shards.group)
    frame = feature_maps.plain_frame(p.k, wide) if p.causal else centred_frame(shards, wide)
    values, size = shards.values(wide)
    # Once, so that the gradients of both passes over the keys are added up in the wide type.
    p = dataclasses.replace(p, k=p.k.to(wide))
    logs = FeatureLogs(p, directions, frame, wide)

    def keys_of(span: slice) -> scan.Keys:
        log, shift = logs.of_keys(span)
        return scan.Keys(log.add_(shift))

    def weigh(span: slice, reference: Tensor) -> Tensor:
        log = logs.of_rows(span).add_(reference.unsqueeze(2))
        return log.sub_(log.detach().amax(-1, keepdim=True)).exp_()

    state = joined(shards, absorbed(shards, keys_of, values, m, m, *frame))
    # No key is longer in the frame than the longest of all shards, which a causal frame leaves as it is.
    longest = math.sqrt(abs(p.scale)) * shards.agreed.k if p.causal else _longest(logs.key_radius, shards)

    def answer() -> tuple[scan.Sums, int]:
        if p.causal:
            sums, last = scan.causal(
                keys_of, lambda tile: weigh(tile.rows, tile.reference), values, p.q.shape[1], queries, state, True
            )
            return sums, last.steps
        whole = scan.settle(state)
        sums = scan.collect(lambda rows: weigh(rows, whole.top), p.q.shape[1], queries, whole, normalise=True)
        return sums, whole.steps

    out, steps = collected(shards, answer, size, state.sums, state.total, *frame)
    return out, random_features.Trace(directions, frame, logs.query_radius, longest, None, steps)


def _longest(radius: Float[Tensor, "b g 1"], shards: Shards) -> Float[Tensor, "b g 1"]:
    return gathered(radius, shards.group).amax(0)
