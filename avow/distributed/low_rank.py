r"""Low-rank attention over shards of a sequence, one shard a process: landmarks are agreed once, then states travel.

The frame, the landmarks and the factor of their kernel are made together, each number by one process, so that the
features :math:`\varphi` are the same function everywhere; then each process works on its own rows and keys, and sums
over keys are joined as any linear attention's are (`avow.distributed.states`).

The bound of a row needs two sums over the keys it sees, of :math:`w_j` and of :math:`w_j \sqrt{\rho(k_j)}`. Each
process tells both of its own keys; what lies before a causal shard counts as part of its first key, which every row of
it sees.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.distributed import landmarks
from avow.distributed.consensus import Context
from avow.distributed.exchange import combined, gathered
from avow.distributed.frames import centred_frame
from avow.distributed.shards import Shards, shards_of
from avow.distributed.states import absorbed, collected, joined
from avow.methods.low_rank import LowRank, Trace, lengths, within_ball
from avow.numerics import cholesky, rounding, scan
from avow.numerics.cholesky import Factor
from avow.numerics.heads import grouped, per_query_head, ungrouped
from avow.numerics.landmark_features import LandmarkFeatures, WeightedKeys

_U = rounding.unit(torch.float64)


def attend_low_rank(met: Context, method: LowRank, confidence: float, generator: torch.Generator | None) -> Attended:
    """Softmax attention of this process's rows to the keys of all processes through landmarks among them.

    Shards, gradients and generators are as in `avow.distributed.states.attend_states`.
    """
    shards = shards_of(met, generator)
    return shards.attended(method, *_low_rank(shards, method.rank), confidence)


def _low_rank(shards: Shards, rank: int) -> tuple[Tensor, Trace | None]:
    p = shards.problem
    heads, queries, groups = p.q.shape[1], p.q.shape[-2], p.k.shape[1]
    frame = centred_frame(shards, torch.float64)
    keys = WeightedKeys.of(p, frame)
    factor, radius = _agreed(shards, keys.points, keys.log, rank)
    features = LandmarkFeatures(p, keys, factor)
    values, size = shards.values(torch.float64)
    state = joined(shards, absorbed(shards, features.of_keys, values, rank, 1, *frame, *factor[:2]))
    residual = features.key_residual  # of the first pass over the keys
    told = gathered(_sums(keys.log.detach()[..., 0], residual, values), shards.group)  # (ranks, b, g, 3)
    found: list[Tensor] = []

    def answer() -> tuple[scan.Sums, int]:
        if p.causal:
            sums, last = scan.causal(
                features.of_keys, lambda tile: features.of_rows(tile.rows), values, heads, queries, state, True
            )
            unit, steps = sums.unit_log, last.steps
        else:
            whole = scan.settle(state)
            sums = scan.collect(features.of_rows, heads, queries, whole, normalise=True)
            unit, steps = whole.top.unsqueeze(2), whole.steps
        assert sums.normaliser is not None and unit is not None
        found.extend(ungrouped(x.detach().expand_as(sums.normaliser))[..., 0] for x in (sums.normaliser, unit))
        most = grouped(_longest_seen(shards, values, told[..., 2]).unsqueeze(-1), groups)
        return sums._replace(out=within_ball(sums.out, most)), steps

    out, steps = collected(shards, answer, size, state.sums, state.total, told[..., 2], *frame, *factor[:2])
    if not found:
        return out, None
    rows = features.rows
    key_log, key_residual = _seen(shards, keys.log.detach()[..., 0], residual, told.detach())
    trace = Trace(
        key_log=key_log,
        key_residual=key_residual,
        row_residual=rows.residual,
        row_norm=rows.norm,
        row_log=rows.log,
        normaliser=found[0],
        unit_log=found[1],
        slack=factor.slack,
        query_radius=rows.radius,
        key_radius=radius,
        frame=frame,
        steps=steps,
    )
    return out, trace


def _agreed(shards: Shards, keys: Tensor, weight: Tensor, rank: int) -> tuple[Factor, Float[Tensor, "b g"]]:
    """The features of landmarks among the keys of all shards, and at most how long those are; each head by one process.

    A landmark comes from the process that has it, as a sum to which the others add zeros.
    """
    b, g, s, d = keys.shape
    with torch.no_grad():
        radius = torch.linalg.vector_norm(keys, dim=-1).amax(-1) if s else keys.new_zeros(b, g)
        mine, index = landmarks.chosen(shards, keys, weight[..., 0], rank)
    held = keys if s else keys.sum(-2, keepdim=True).expand(b, g, 1, d)  # zeros, for autograd a function of the keys
    own = held.gather(-2, index.unsqueeze(-1).expand(b, g, rank, d)) * mine.unsqueeze(-1)

    def combine(said: Tensor) -> Tensor:
        points = said[..., :-1].sum(0)[0].unflatten(-1, (rank, d))  # (1, heads, r, d)
        longest = said[..., -1].detach().amax(0)[0]
        f = cholesky.factor(points, longest)
        told = torch.cat([f.landmarks.flatten(2), f.b.flatten(2), f.slack[..., None], longest[..., None]], -1)
        return told.expand(shards.ranks, 1, *told.shape)

    asked = torch.cat([own.flatten(2), radius.unsqueeze(-1)], -1).reshape(1, 1, b * g, -1)
    told = combined(asked, combine, shards.group).reshape(b, g, -1)
    points, inverse, slack, radius = told.split([rank * d, rank * rank, 1, 1], -1)
    factor = Factor(points.unflatten(-1, (rank, d)), inverse.unflatten(-1, (rank, rank)), slack.detach()[..., 0])
    return factor, radius.detach()[..., 0]


def _sums(key_log: Tensor, residual: Tensor, values: Tensor) -> Float[Tensor, "b g 3"]:
    """Logarithms of the sums of weights, and of weights times roots of residuals; and the longest value."""
    sums = [_above(torch.logsumexp(x, -1), x.shape[-1]) for x in (key_log, key_log + 0.5 * residual.log())]
    longest = lengths(values)[..., 0].amax(-1) if values.shape[-2] * values.shape[-1] else values.sum((-1, -2))
    return torch.stack([*sums, longest], -1)


def _seen(shards: Shards, key_log: Tensor, residual: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    """Logs and residuals whose sums over what a row sees are those over the keys of all shards, or more.

    Without causality one key stands for all. A causal shard's first key stands also for all before it.
    """
    if not shards.problem.causal:
        mass, missed = (_above(torch.logsumexp(told[..., i], 0), shards.ranks).unsqueeze(-1) for i in range(2))
        return mass, _residual(mass, missed)
    if not shards.rank:
        return key_log, residual
    first = key_log[..., 0], (key_log + 0.5 * residual.log())[..., 0]
    mass, missed = (
        _above(torch.logsumexp(torch.cat([told[: shards.rank, ..., i], first[i][None]]), 0), shards.ranks)
        for i in range(2)
    )
    logs = torch.cat([mass.unsqueeze(-1), key_log[..., 1:]], -1)
    return logs, torch.cat([_residual(mass, missed).unsqueeze(-1), residual[..., 1:]], -1)


def _residual(mass: Tensor, missed: Tensor) -> Tensor:
    """The residual for which a weight of e^mass has at least e^missed left."""
    return torch.exp(2 * (missed - mass) + 64 * _U * (1 + mass.abs() + missed.abs().nan_to_num(posinf=0.0)))


def _above(log: Tensor, terms: int) -> Tensor:
    """At least the true logarithm of a sum of so many terms."""
    return log + 64 * _U * (log.abs().nan_to_num(0.0, 0.0, 0.0) + terms)


def _longest_seen(shards: Shards, values: Tensor, longest: Float[Tensor, "ranks b g"]) -> Float[Tensor, "b h #n"]:
    """The length of the longest value that each row sees, in all shards."""
    p = shards.problem
    if not p.causal:
        return per_query_head(longest.amax(0).unsqueeze(-1), p.q.shape[1])
    earlier = torch.arange(shards.ranks, device=values.device) < shards.rank
    before = torch.where(earlier[:, None, None], longest, 0.0).amax(0).unsqueeze(-1)
    return per_query_head(torch.maximum(before, lengths(values)[..., 0].cummax(-1).values), p.q.shape[1])
