"""Heads that share keys, values that may be huge or tiny, and the last touch on an answer."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.core import Problem
from avow.numerics import rounding
from avow.numerics.masks import masked, row_tiles, sees_any, visible, visible_max
from avow.numerics.norms import norm_floor

# Heads whose values are this far from one, either way, are brought near one before they are summed.
_COMFORT = 1e-8


def grouped(x: Float[Tensor, "b h n c"], groups: int) -> Float[Tensor, "b g r n c"]:
    """Query heads gathered by the key head they share."""
    return x.reshape(x.shape[0], groups, x.shape[1] // max(groups, 1), *x.shape[2:])


def ungrouped(x: Float[Tensor, "b g r n c"]) -> Float[Tensor, "b h n c"]:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """One entry per key head, repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def expand_gqa(p: Problem) -> Problem:
    """The problem with keys repeated where one key head is masked differently by its query heads."""
    heads, groups = p.q.shape[1], p.k.shape[1]
    present = [x for x in (p.allowed, p.bias) if x is not None and x.shape[1] != 1]
    if heads == groups or not present:
        return p
    return dataclasses.replace(p, k=per_query_head(p.k, heads), v=per_query_head(p.v, heads))


def key_log(p: Problem, dtype: torch.dtype) -> Float[Tensor, "#b #g s 1"] | None:
    """What is added to the log of each key: its bias, −inf where it is hidden from all rows; None for nothing."""
    if p.allowed is None:
        return None if p.bias is None else p.bias.to(dtype).transpose(-1, -2)
    bias = torch.zeros((), dtype=dtype, device=p.q.device) if p.bias is None else p.bias.to(dtype)
    return torch.where(p.allowed, bias, -math.inf).transpose(-1, -2)


def linear_type(p: Problem) -> torch.dtype:
    """The type linear methods compute in: wide where a bias such as −1e9 would swallow what it is added to."""
    return torch.float64 if p.bias is not None else rounding.accumulator(p.q.dtype)


def distance_rounding(p: Problem, own: float) -> float:
    """How far logits are moved by the rounding of kernel="rbf"'s bias, −‖k‖²/2σ of at most `own`, to float64.

    It is a rounded sum itself, and the caller's mask, which it was added to, may have swallowed part of it.
    """
    assert p.bias is not None
    seen, u = visible(p), rounding.unit(torch.float64)
    tops = (p.bias if seen is None else torch.where(seen, p.bias, -math.inf)).amax(-1)
    highest = float(tops.masked_fill(tops == -math.inf, 0.0).abs().amax())
    return rounding.gamma(p.q.shape[-1] + 8, u) * own + 4 * u * (highest + own + 2 * rounding.NEGLIGIBLE_NATS)


def scaled_values(p: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Values that sums can hold, and the power of two per head they were divided by, if any was needed."""
    values = p.v.to(dtype)
    if not torch.compiler.is_compiling():
        known = p.known_norms
        lengths = torch.linalg.vector_norm(values.detach(), dim=(-1, -2)) if known is None else known.v.amax(-1)
        if bool(((lengths > _COMFORT) & (lengths < 1 / _COMFORT)).all()):
            return values, None
    largest = values.detach().abs().amax((-1, -2), keepdim=True).clamp(min=4 * torch.finfo(dtype).tiny)
    size = torch.exp2(torch.floor(torch.log2(largest)))  # (b, g, 1, 1)
    return values / size, size


def rescaled(out: Float[Tensor, "b g r n e"], size: Tensor | None) -> Float[Tensor, "b h n e"]:
    """The answer in the size of the values."""
    return ungrouped(out if size is None else out * size.unsqueeze(2))


def key_seen(p: Problem) -> Bool[Tensor, "#b #g s 1"] | None:
    """Which keys are visible, for masks that are the same for all rows."""
    return None if p.allowed is None else p.allowed.transpose(-1, -2)


def cast_output(p: Problem, out: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h n e"]:
    """The answer in the inputs' type, zero in rows that see nothing."""
    seen = sees_any(p)
    if seen is not None:
        out = torch.where(seen.unsqueeze(-1), out, 0.0)
    return rounding.saturating_cast(out, p.q.dtype)


def longest_seen(p: Problem, lengths: Float[Tensor, "b g s"]) -> Float[Tensor, "b h #n"]:
    """The largest length among the values each row sees, zero where it sees none."""
    return visible_max(p, per_query_head(lengths, p.q.shape[1]))


def underflow_bound(p: Problem, terms: float, dtype: torch.dtype) -> Float[Tensor, "b h #n"]:
    """What a row may lose to underflow in sums of so many terms, relative to the values it sees.

    Values are summed as they are or divided by their head's magnitude, so a row that sees only far smaller ones may
    lose them.
    """
    norms, e = p.norms, p.v.shape[-1]
    longest = longest_seen(p, norms.v)
    size = per_query_head(2 * norms.v.amax(-1, keepdim=True), p.q.shape[1])
    size = torch.where(size < 0.1 * _COMFORT, size, size.clamp(min=1.0))  # as they are, or as `scaled_values` made them
    lost = 4 * math.sqrt(e) * (terms * rounding.tiny(dtype) * size + rounding.tiny(p.q.dtype) + rounding.tiny(dtype))
    return torch.where(longest > 0, lost / norm_floor(longest, norms.slack, e), 0.0)


def mask_bounds(p: Problem, rows: Tensor) -> Float[Tensor, "b h n"]:
    """Bounds of every row, zero where nothing is seen."""
    rows = rows.expand(p.q.shape[:-1])
    seen = sees_any(p)
    return rows if seen is None else torch.where(seen, rows, 0.0)


def visible_log_sum(p: Problem, log: Float[Tensor, "b g s"]) -> Float[Tensor, "b h #n"]:
    """An upper bound on the log of the sum over the keys a row sees, of exp(log) and its bias if rows differ."""
    h, queries, s = p.q.shape[1], p.q.shape[-2], p.k.shape[-2]
    log = per_query_head(log, h)
    if p.mask_kind == "full":
        tiles = row_tiles(queries, log.numel())
        total = torch.cat([torch.logsumexp(masked(p, log.unsqueeze(-2), rows), -1) for rows in tiles], -1)
    elif p.causal:
        running = torch.logcumsumexp(log[..., : min(queries, s)], -1)
        total = torch.cat([running, running[..., -1:].expand(*running.shape[:-1], max(queries - s, 0))], -1)
    else:
        total = torch.logsumexp(log, -1, keepdim=True)
    return total + 64 * rounding.unit(torch.float64) * (total.abs().nan_to_num(0.0, 0.0, 0.0) + s)


def within_ball(out: Float[Tensor, "b g r n e"], most: Float[Tensor, "b g r #n 1"]) -> Float[Tensor, "b g r n e"]:
    """The nearest points that are at most so long: averages of values that short are not moved away from."""
    out = out.nan_to_num(0.0, 0.0, 0.0)
    length = vector_lengths(out)
    outside = length > most
    return out * torch.where(outside, most / torch.where(outside, length, 1.0), 1.0)


def vector_lengths(x: Float[Tensor, "*lead e"]) -> Float[Tensor, "*lead 1"]:
    """Norms of rows whose squares might vanish."""
    least = 2 * torch.finfo(x.dtype).tiny
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=least)
    return largest * torch.linalg.vector_norm(x / largest, dim=-1, keepdim=True).clamp(min=least)


def longest_in_groups(p: Problem, values: Float[Tensor, "b g s e"]) -> Float[Tensor, "b g r #n 1"]:
    """The length of the longest of these values that each row sees."""
    return grouped(longest_seen(p, vector_lengths(values)[..., 0]).unsqueeze(-1), p.k.shape[1])
