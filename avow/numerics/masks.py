"""Which keys a row may see, and reductions over just those."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.core import Problem

# Entries of a (rows × keys) tile that a reduction may hold at once.
_TILE = 2**24


def seen_by(p: Problem, rows: slice = slice(None)) -> Bool[Tensor, "#b #h #n s"]:
    """Which keys some rows see, mask and causality as one."""
    s = p.k.shape[-2]
    allowed = p.q.new_ones(1, 1, 1, s, dtype=torch.bool) if p.allowed is None else at_rows(p.allowed, rows)
    if not p.causal:
        return allowed
    start, stop = rows.start or 0, p.q.shape[-2] if rows.stop is None else rows.stop
    # Row i sees key j when j ≤ i: aligned to the first row, as SDPA's `is_causal`.
    return allowed & torch.ones(stop - start, s, dtype=torch.bool, device=p.q.device).tril(start)


def visible(p: Problem, rows: slice = slice(None)) -> Bool[Tensor, "#b #h #n s"] | None:
    """What `seen_by` says; None when every row sees every key."""
    return None if p.allowed is None and not p.causal else seen_by(p, rows)


def sees_any(p: Problem) -> Bool[Tensor, "#b #h #n"] | None:
    """Which rows see at least one key; None when all do."""
    if p.allowed is None:
        return None
    if p.causal and p.allowed.shape[-2] == 1:
        return prefix(p.allowed[..., 0, :].to(torch.uint8), p.q.shape[-2]).bool()
    return seen_by(p).any(-1)


def prefix(x: Tensor, n: int) -> Tensor:
    """The largest of x[0..i] for every row i < n; rows past the last key see them all."""
    s = x.shape[-1]
    running = x[..., : min(n, s)].cummax(-1).values
    if n > s:
        running = torch.cat([running, running[..., -1:].expand(*running.shape[:-1], n - s)], -1)
    return running


def visible_max(p: Problem, x: Float[Tensor, "b h s"]) -> Float[Tensor, "b h #n"]:
    """The largest x ≥ 0 over the keys each row sees, zero where it sees none."""
    n, s = p.q.shape[-2], x.shape[-1]
    if s == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    if p.allowed is None or p.allowed.shape[-2] == 1:
        if p.allowed is not None:
            x = torch.where(p.allowed[..., 0, :], x, 0.0)
        return prefix(x, n) if p.causal else x.amax(-1, keepdim=True)
    tiles = row_tiles(n, x.shape[0] * x.shape[1] * s)
    return torch.cat([torch.where(seen_by(p, rows), x[..., None, :], 0.0).amax(-1) for rows in tiles], -1)


def row_tiles(n: int, per_row: int, most: int | None = None) -> Iterator[slice]:
    """Slices of n rows of `per_row` entries each, as long as `most` entries, or a few million, allow."""
    return slices(n, max(1, (most or _TILE) // max(per_row, 1)))


def slices(length: int, step: int) -> Iterator[slice]:
    """A sequence cut into slices of so many positions; the last may be shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def additive(p: Problem, dtype: torch.dtype) -> Tensor | None:
    """One mask for a kernel: boolean where nothing is added, else numbers with −inf for what is hidden.

    `dtype` is the one that logits are in, float32 or float64: half precision has no room for a bias of −256.1. A row's
    largest visible bias is subtracted first: it cancels in the softmax, and a bias of −1e9 over a whole row would
    otherwise swallow the logits. A row that sees nothing is shown everything, so that the kernel stays finite; the
    caller blanks it.
    """
    seen, bias = visible(p), p.bias
    if seen is not None:
        seen = seen | ~seen.any(-1, keepdim=True)
    if bias is None:
        return seen
    wide = bias.to(torch.promote_types(bias.dtype, dtype))
    shown = wide if seen is None else torch.where(seen, wide, -math.inf)
    return (shown - shown.detach().amax(-1, keepdim=True)).to(dtype)


def masked(p: Problem, logits: Float[Tensor, "#b #h #l s"], rows: slice) -> Float[Tensor, "#b #h #l s"]:
    """Logits of some rows with their biases, −inf where a row does not see the key."""
    if p.bias is not None:
        logits = logits + at_rows(p.bias, rows).to(logits.dtype)
    seen = visible(p, rows)
    return logits if seen is None else torch.where(seen, logits, -math.inf)


def at_rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows of a mask or bias, which may be one row that stands for all."""
    return x if x.shape[-2] == 1 else x[..., rows, :]


def visible_pairs(p: Problem) -> int:
    """How many pairs there are of a row and a key that it sees."""
    b, h, n, s = *p.q.shape[:3], p.k.shape[-2]
    if p.allowed is None:
        return b * h * (sum(min(i + 1, s) for i in range(n)) if p.causal else n * s)
    seen = seen_by(p)
    return int(seen.sum()) * (b * h * n * s // seen.numel())
