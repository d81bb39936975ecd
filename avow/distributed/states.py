r"""Linear attention over shards of a sequence: states of sums are combined, and rows and keys stay where they are.

All that a row must know of keys elsewhere is the state of their sums (`avow.numerics.scan`): for every feature a
reference :math:`\mathrm{top}`, a total and a sum of values. Each process sums its own keys, once. Without causality
the states of all are added up; with it, rank r gets the sum over the ranks before it, from which its own causal scan
starts:

.. math:: \mathrm{top} = \max_{i<r} \mathrm{top}_i, \quad
          \mathrm{sums} = \sum_{i<r} e^{\mathrm{top}_i - \mathrm{top}}\, \mathrm{sums}_i

*Rounding.* On its way a term is rescaled once more and added to those of other ranks. That moves its logarithm by the
rounding of a difference of references, which only rise along the way, so that their differences add up to no more than
the method's bound allows for already; by an exponential, right to `EXP_ULPS`; and by a sum over ranks. `joined` counts
the last two as further steps of the scan, and the method's own promise does the rest.

Each method's protocol begins with `gather_longest`, how long the longest vectors of all shards are, since decisions
need that. It ends with all that this process must know of the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.core import Method, Norms, Problem, Sizes
from avow.distributed.consensus import digest
from avow.distributed.protocols import (
    Protocol,
    Shard,
    Traffic,
    all_gather,
    combine_message,
    combine_rows,
    depend_on,
    gather_message,
    traffic,
)
from avow.methods import random_features, separable
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.numerics import features as feature_maps
from avow.numerics import rounding, scan
from avow.numerics.features import FeatureLogs, Frame
from avow.numerics.heads import cast_output, grouped, linear_type, rescaled, scaled_values

Answer = Callable[[], tuple[scan.Sums, int]]
"""What rows collect from a state, and in how many steps."""


@dataclass(frozen=True)
class LinearShard(Shard):
    """A shard that knows the longest vectors of each: per key head the longest query, key and value, and the largest
    entry of a value; and a number that differs if directions were drawn otherwise.
    """

    longest: Float64[Tensor, "ranks b g 5"]
    generator: torch.Generator | None = None

    @functools.cached_property
    def agreed(self) -> Norms:
        """The longest query, key and value of all shards, for each key head."""
        q, k, v = self.longest[..., :3].amax(0).unsqueeze(-1).unbind(-2)  # (b, g, 1) each
        return Norms(q, k, v, self.problem.norms.slack)

    @functools.cached_property
    def whole(self) -> Problem:
        """What a promise is asked of: this process's rows, the keys of all, and norms that hold for what rows see.

        Keys and values are only counted there, so they take no memory.
        """
        p, most = self.problem, self.agreed
        k, v = (x.new_zeros(()).expand(*x.shape[:2], self.total, x.shape[-1]) for x in (p.k, p.v))
        values = most.v
        if p.causal and p.k.shape[-2]:
            seen = p.norms.v.clone()
            if self.rank:
                # What the first row sees before this shard, every row sees.
                seen[..., 0] = torch.maximum(seen[..., 0], self.longest[: self.rank, ..., 2].amax(0))
            values = torch.cat([seen, most.v], -1)  # the last entry lies after every row
        norms = Norms(p.norms.q, most.k, values, p.norms.slack)
        return dataclasses.replace(p, k=k, v=v).with_norms(norms)

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """This shard's values, and the power of two that every process divided them by, if any was needed."""
        largest = self.longest[..., 3].amax(0)[..., None, None].to(dtype)  # (b, g, 1, 1)
        _, size = scaled_values(dataclasses.replace(self.problem, v=largest).with_norms(self.agreed), dtype)
        values = self.problem.v.to(dtype)
        return (values, None) if size is None else (values / size, size)

    def absorbed(self, keys_of: scan.KeysOf, values: Tensor, features: int, logs: int, *followed: Tensor) -> scan.State:
        """The state of this process's keys; without any, still a function of what autograd follows elsewhere."""
        if self.problem.k.shape[-2]:
            return scan.absorb(keys_of, values, features)
        nothing = scan.nothing(values, features, logs)
        return nothing._replace(sums=depend_on(nothing.sums, self.problem.k, values, *followed))

    def averaged(
        self, keys_of: scan.KeysOf, weigh: Callable[[slice, Tensor], Tensor], values: Tensor, state: scan.State
    ) -> tuple[scan.Sums, Tensor | None, int]:
        """Averages for this process's rows by the weights of rows relative to a reference, the logarithm of the unit
        of their normalisers, and in how many steps.
        """
        heads, queries = self.problem.q.shape[1:3]
        if self.problem.causal:
            sums, last = scan.causal(
                keys_of, lambda tile: weigh(tile.rows, tile.reference), values, heads, queries, state, normalise=True
            )
            return sums, sums.unit_log, last.steps
        whole = scan.settle(state)
        sums = scan.collect(lambda rows: weigh(rows, whole.top), heads, queries, whole, normalise=True)
        return sums, whole.top.unsqueeze(2), whole.steps

    def collected(self, answer: Answer, size: Tensor | None, *exchanged: Tensor) -> tuple[Tensor, int]:
        """Answers to this process's rows, and in how many steps; without rows, still a function of all exchanges."""
        p = self.problem
        if self.whole.empty:
            nothing = p.v.new_zeros(*p.q.shape[:-1], p.v.shape[-1])
            return depend_on(nothing, p.q, *exchanged), 0
        sums, steps = answer()
        return cast_output(p, rescaled(sums.out, size)), steps


def gather_longest(shard: Shard, generator: torch.Generator | None, drawn: Tensor | None) -> Protocol[LinearShard]:
    """The shard, once it knows the longest vectors of all, and whether all have the same `drawn`."""
    p, norms = shard.problem, shard.problem.norms
    b, g = p.k.shape[:2]
    rows = [norms.q.unflatten(1, (g, -1)).flatten(2), norms.k, norms.v, p.v.detach().double().abs().flatten(2)]
    mark = 0.0 if drawn is None else float(int(digest(drawn)[:13], 16))  # what float64 has room for
    columns = [x.amax(-1) if x.shape[-1] else x.new_zeros(b, g) for x in rows]
    longest = yield from all_gather(torch.stack([*columns, torch.full_like(columns[0], mark)], -1), shard.ranks)
    return LinearShard(p, shard.rank, shard.rows, shard.keys, longest, generator)


def states_traffic(method: Method, z: Sizes, ranks: int) -> Traffic:
    """What a rank sends for linear attention: the longest vectors, a frame if there is one, and states."""
    heads, kind = (z.batch, z.key_heads), rounding.accumulator(z.dtype)
    rounds = [gather_message(*heads, 5, ranks=ranks)]
    features = method.state_features(z.dim) or z.dim
    if method.random and not z.causal:
        rounds.append(combine_message(*heads, z.dim, 4, width=3, dtype=kind, ranks=ranks))
        rounds.append(gather_message(*heads, 1, dtype=kind, ranks=ranks))
    return traffic([*rounds, combine_message(*heads, features, z.value_dim + 2, dtype=kind, ranks=ranks)], ranks)


def joined(shard: Shard, state: scan.State) -> Protocol[scan.State]:
    """The state a process's rows start from: of all keys before its shard if causal, else of all keys."""
    logs, ranks = state.top.shape[-1], shard.ranks
    top = state.top.expand(*state.top.shape[:-1], state.sums.shape[-2])

    def combine(pieces: Tensor) -> Tensor:
        held, tops = pieces[..., :-1], pieces[..., -1:].detach()
        if shard.problem.causal:
            return torch.stack([_added(held[:rank], tops[:rank]) for rank in range(ranks)])
        whole = _added(held, tops)
        return whole.expand(ranks, *whole.shape)

    mine = torch.cat([state.sums, state.total, top.transpose(-1, -2)], -1)  # (b, g, m, e + 2)
    whole = yield from combine_rows(mine, combine, ranks)
    e = state.sums.shape[-1]
    top = whole[..., -1:].detach().transpose(-1, -2)[..., :logs]
    tiles = len(list(scan.tiles(max(shard.keys), top.shape[0] * top.shape[1] * mine.shape[-2])))
    return scan.State(top, whole[..., :e], whole[..., e : e + 1], tiles + ranks + rounding.EXP_ULPS // 4)


def _added(held: Float[Tensor, "ranks b g m c"], tops: Float[Tensor, "ranks b g m 1"]) -> Float[Tensor, "b g m w"]:
    """Sums of some ranks relative to their highest reference, which comes last."""
    top = tops.amax(0) if len(tops) else tops.new_full(tops.shape[1:], -math.inf)
    shrink = torch.exp(tops - top.masked_fill(top == -math.inf, 0.0))
    return torch.cat([(held * shrink).sum(0), top], -1)


def separable_protocol(shard: LinearShard, method: Separable) -> Protocol[tuple[Tensor, separable.Trace]]:
    """The answers to a shard's rows, and what their certificate takes."""
    p = shard.problem
    wide, (queries, features) = linear_type(p), p.q.shape[-2:]
    values, size = shard.values(wide)
    keys = p.k.to(wide)  # once, so that the gradients of both passes over the keys are added up in the wide type
    least = torch.finfo(wide).tiny  # below any sum that a key contributes to, which is at least one

    def keys_of(span: slice) -> scan.Keys:
        return scan.Keys(method.cooled(keys[..., span, :]))

    def mixture(rows: slice) -> Tensor:
        return grouped(torch.softmax(method.cooled(p.q[..., rows, :].to(wide)), -1), p.k.shape[1])

    def causal_mixture(tile: scan.Tile) -> Tensor:
        prefix = scan.running(tile.features, tile.total)
        return mixture(tile.rows) / prefix.clamp(min=least).unsqueeze(2)

    state = yield from joined(shard, shard.absorbed(keys_of, values, features, features))

    def answer() -> tuple[scan.Sums, int]:
        if p.causal:
            sums, last = scan.causal(keys_of, causal_mixture, values, p.q.shape[1], queries, state, normalise=False)
            return sums, last.steps
        columns = state._replace(sums=state.sums / state.total.clamp(min=least))
        return scan.collect(mixture, p.q.shape[1], queries, columns, normalise=False), state.steps

    out, steps = shard.collected(answer, size, state.sums, state.total)
    return out, separable.Trace(steps)


def random_features_protocol(
    shard: LinearShard, method: RandomFeatures, directions: Float[Tensor, "m d"]
) -> Protocol[tuple[Tensor, random_features.Trace]]:
    """The answers to a shard's rows, and what their certificate takes; directions must be alike in all shards."""
    p = shard.problem
    wide = method.feature_dtype(p.with_norms(shard.agreed))
    frame = feature_maps.plain_frame(p.k, wide) if p.causal else (yield from centred_frame(shard, wide))
    values, size = shard.values(wide)
    # Once, so that the gradients of both passes over the keys are added up in the wide type.
    p = dataclasses.replace(p, k=p.k.to(wide))
    logs = FeatureLogs(p, directions, frame, wide)

    def keys_of(span: slice) -> scan.Keys:
        log, shift = logs.of_keys(span)
        return scan.Keys(log.add_(shift))

    def weigh(span: slice, reference: Tensor) -> Tensor:
        log = logs.of_rows(span).add_(reference.unsqueeze(2))
        return log.sub_(log.detach().amax(-1, keepdim=True)).exp_()

    own = shard.absorbed(keys_of, values, method.features, method.features, *frame)
    state = yield from joined(shard, own)
    if p.causal:
        # No key is longer in the frame than the longest of all shards, which a causal frame leaves as it is.
        longest = math.sqrt(abs(p.scale)) * shard.agreed.k
    else:
        longest = (yield from all_gather(logs.key_radius, shard.ranks)).amax(0)

    def answer() -> tuple[scan.Sums, int]:
        sums, _, steps = shard.averaged(keys_of, weigh, values, state)
        return sums, steps

    out, steps = shard.collected(answer, size, state.sums, state.total, *frame)
    return out, random_features.Trace(directions, frame, logs.query_radius, longest, None, steps)


def centred_frame(shard: Shard, dtype: torch.dtype) -> Protocol[Frame]:
    """The frame that one process with all queries and keys would take, up to rounding: the same bits in each."""
    p = shard.problem
    rows, keys = grouped(p.q, p.k.shape[1]), p.k.unsqueeze(2)  # (b, g, r, n, d), (b, g, 1, s, d)
    parts = [_sampled(rows, shard.rows, shard.rank), _sampled(keys, shard.keys, shard.rank)]
    shares = [_shares(rows.shape[2], shard.rows, rows), _shares(1, shard.keys, rows)]

    def combine(pieces: Tensor) -> Tensor:
        moments = (
            _joined_moments(pieces[..., 2 * i], pieces[..., 2 * i + 1], shares[i].to(pieces.dtype)) for i in range(2)
        )
        (mean_q, spread_q), (mean_k, spread_k) = moments
        frame = feature_maps.balanced(mean_q, spread_q, mean_k, spread_k)
        return torch.stack(frame, -1).expand(shard.ranks, *mean_q.shape, 3)

    mine = torch.stack([moment for x in parts for moment in _moments(x.to(dtype))], -1)  # (b, g, d, 4)
    frame = yield from combine_rows(mine, combine, shard.ranks)
    return Frame(*frame.transpose(-1, -2).split(1, -2))  # (b, g, 1, d) each


def _sampled_rows(repeats: int, total: int, before: int, length: int) -> list[range]:
    """Which rows of a shard belong to the sample of all, for each query head of a key head.

    Rows are counted as if one process held them, head after head.
    """
    step = feature_maps.sample_step(repeats * total)
    return [range(-(head * total + before) % step, length, step) for head in range(repeats)]


def _sampled(x: Tensor, lengths: tuple[int, ...], rank: int) -> Tensor:
    samples = _sampled_rows(x.shape[2], sum(lengths), sum(lengths[:rank]), lengths[rank])
    return torch.cat([x[:, :, head, some.start :: some.step] for head, some in enumerate(samples)], 2)


def _shares(repeats: int, lengths: tuple[int, ...], like: Tensor) -> Tensor:
    """What part of the sample lies in each shard."""
    starts, total = [0, *itertools.accumulate(lengths)], sum(lengths)
    counts = [
        sum(map(len, _sampled_rows(repeats, total, start, length)))
        for start, length in zip(starts, lengths, strict=False)
    ]
    whole = max(sum(counts), 1)
    return torch.tensor([count / whole for count in counts], dtype=torch.float64, device=like.device)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square about it of each feature; zero without rows."""
    count = max(x.shape[-2], 1)
    mean = x.sum(-2) / count
    return mean, (x - mean.unsqueeze(-2)).square().sum(-2) / count


def _joined_moments(means: Tensor, spreads: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of all shards from those of each."""
    share = shares[:, None, None, None]
    mean = (share * means).sum(0)
    return mean, (share * (spreads + (means - mean).square())).sum(0)
