"""Which keys a row may see, and reductions over just those."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Entries of a (rows × keys) tile that a reduction may hold at once.
_TILE = 2**24


def past(n: int, s: int, device: torch.device) -> Bool[Tensor, "n s"]:
    """Row i sees key j when j ≤ i: aligned to the first row, as SDPA's `is_causal`."""
    return torch.ones(n, s, dtype=torch.bool, device=device).tril()


def visible(
    allowed: Bool[Tensor, "#b #h #n s"] | None, causal: bool, n: int, s: int, device: torch.device
) -> Bool[Tensor, "#b #h #n s"] | None:
    """Mask and causality as one; None when every row sees every key."""
    if not causal:
        return allowed
    return past(n, s, device)[None, None] if allowed is None else allowed & past(n, s, device)


def sees_any(allowed: Bool[Tensor, "#b #h #n s"] | None, causal: bool, n: int) -> Bool[Tensor, "#b #h #n"] | None:
    """Which rows see at least one key; None when all do."""
    if allowed is None:
        return None
    if not causal:
        return allowed.any(-1)
    if allowed.shape[-2] == 1:
        return prefix(allowed[..., 0, :].to(torch.uint8), n).bool()
    return visible(allowed, True, n, allowed.shape[-1], allowed.device).any(-1)  # type: ignore[union-attr]


def prefix(x: Tensor, n: int) -> Tensor:
    """The largest of x[0..i] for every row i < n; rows past the last key see them all."""
    s = x.shape[-1]
    running = x[..., : min(n, s)].cummax(-1).values
    if n > s:
        running = torch.cat([running, running[..., -1:].expand(*running.shape[:-1], n - s)], -1)
    return running


def visible_max(
    x: Float[Tensor, "b h s"], allowed: Bool[Tensor, "#b #h #n s"] | None, causal: bool, n: int, empty: float
) -> Float[Tensor, "b h #n"]:
    """The largest x over the keys each row sees, `empty` where it sees none."""
    s = x.shape[-1]
    if s == 0:
        return x.new_full((*x.shape[:-1], 1), empty)
    if allowed is None or allowed.shape[-2] == 1:
        if allowed is not None:
            x = torch.where(allowed[..., 0, :], x, -math.inf)
        best = prefix(x, n) if causal else x.amax(-1, keepdim=True)
    else:
        parts = []
        for rows in row_tiles(n, x.shape[0] * x.shape[1] * s):
            seen = allowed[..., rows, :]
            if causal:
                seen = seen & past(n, s, x.device)[rows]
            parts.append(torch.where(seen, x[..., None, :], -math.inf).amax(-1))
        best = torch.cat(parts, -1)
    return best.masked_fill(best == -math.inf, empty)


def row_tiles(n: int, per_row: int) -> Iterator[slice]:
    """Slices of n rows, each holding at most a few million entries of `per_row`."""
    step = max(1, _TILE // max(per_row, 1))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def additive(
    allowed: Bool[Tensor, "#b #h #n s"] | None,
    bias: Float[Tensor, "#b #h #n s"] | None,
    causal: bool,
    n: int,
    s: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """One mask for a kernel: boolean where nothing is added, else numbers with −inf for what is hidden.

    A row's largest visible bias is subtracted first: it cancels in the softmax, and a bias of −1e9 over a
    whole row would otherwise swallow the logits. A row that sees nothing is shown everything, so that the
    kernel stays finite; the caller blanks it.
    """
    seen = visible(allowed, causal, n, s, device)
    if seen is not None:
        seen = seen | ~seen.any(-1, keepdim=True)
    if bias is None:
        return seen
    wide = bias.to(torch.promote_types(bias.dtype, dtype))
    shown = wide if seen is None else torch.where(seen, wide, -math.inf)
    return (shown - shown.detach().amax(-1, keepdim=True)).to(dtype)


def at_rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows of a mask or bias, which may be one row that stands for all."""
    return x if x.shape[-2] == 1 else x[..., rows, :]


def visible_pairs(allowed: Tensor | None, causal: bool, rows: tuple[int, ...], s: int, device: torch.device) -> int:
    """How many pairs there are of a row, (b, h, n) of them, and one of s keys that it sees."""
    b, h, n = rows
    if allowed is None:
        per_head = sum(min(i + 1, s) for i in range(n)) if causal else n * s
        return b * h * per_head
    seen = allowed & past(n, s, device) if causal else allowed
    return int(seen.sum()) * (b * h * n * s // seen.numel())
