r"""Sums over keys in log-scaled features: one state, one pass, any length, no overflow.

Every linear attention here has numerators :math:`\sum_f y_{if} \sum_{j \le i} x_{jf} v_j`, where the key
features are positive numbers too large or too small for any float: :math:`x_{jf} = c_{jf} e^{l_{jf}}`.
They are kept relative to a running maximum per feature, as online softmax keeps its weights:

.. math:: \mathrm{sums}_f = \sum_j c_{jf} e^{l_{jf} - \mathrm{top}_f} [v_j, 1], \quad
          \mathrm{top}_f = \max_j l_{jf}

so that exponents never exceed `_RISE` and the largest term of each feature is never lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.contract import Sizes

# Keys per block: within a block rows meet keys pair by pair, between blocks through sums.
BLOCK = 64
# Keys per tile: a tile shares one reference and its features stay in cache.
TILE = 1024
# How far logs may rise above the reference inside a tile. e^40 · smallest normal · (features · tile) is far
# below rounding, so nothing that counts is lost at the other end of the range.
_RISE = {torch.float32: 40.0, torch.float64: 300.0}


class Keys(NamedTuple):
    """Features of some keys: `factor · exp(log)`; −inf hides a key, no factor means one."""

    log: Float[Tensor, "b g l #m"]
    factor: Float[Tensor, "b g l m"] | None = None


class State(NamedTuple):
    """All that is remembered of the keys so far, in O(m·e)."""

    top: Float[Tensor, "b g 1 #m"]
    sums: Float[Tensor, "b g m e1"]


class Tile(NamedTuple):
    """What a row needs to know of its tile to weigh it."""

    rows: slice
    reference: Float[Tensor, "b g 1 #m"]
    before: Float[Tensor, "b g m e1"]
    features: Float[Tensor, "b g l m"]


KeysOf = Callable[[slice], Keys]
RowsOf = Callable[[Tile], Tensor]


def append_one(v: Float[Tensor, "b g s e"], dtype: torch.dtype) -> Float[Tensor, "b g s e1"]:
    """Values with a column of ones, whose sum is the normaliser."""
    return torch.nn.functional.pad(v.to(dtype), (0, 1), value=1.0)


def _shift(log: Tensor, reference: Tensor) -> Tensor:
    """exp(log − reference), zero where the key is hidden, finite whatever happens."""
    limit = 2 * _RISE[log.dtype]
    return torch.exp((log - reference).clamp(max=limit))


def _finite(x: Tensor) -> Tensor:
    """A reference for features that no key has reached yet."""
    return x.masked_fill(x == -math.inf, 0.0)


def _times(factor: Tensor | None, weight: Tensor) -> Tensor:
    return weight if factor is None else factor * weight


def nothing(values: Float[Tensor, "b g s e1"], features: int, log_features: int | None = None) -> State:
    """The state before any key."""
    b, g, _, width = values.shape
    top = values.new_full((b, g, 1, features if log_features is None else log_features), -math.inf)
    return State(top, values.new_zeros(b, g, features, width))


def settle(state: State) -> tuple[Tensor, Tensor]:
    """A finite reference, and the sums relative to it."""
    reference = _finite(state.top)
    return reference, state.sums * torch.exp(state.top - reference).transpose(-1, -2)


def tiles(length: int) -> Iterator[slice]:
    """A sequence cut into tiles."""
    for start in range(0, length, TILE):
        yield slice(start, min(start + TILE, length))


def depth(keys: int) -> float:
    """The most roundings a term goes through on its way into a sum over so many keys."""
    return min(keys, TILE) + 4 * keys / TILE + 2 * BLOCK + 16


def count(sizes: Sizes) -> int:
    """How many tiles a pass over rows and keys works through."""
    return -(-sizes.queries // TILE) + -(-sizes.keys // TILE)


def absorb(keys_of: KeysOf, values: Float[Tensor, "b g s e1"], state: State | None = None) -> State:
    """The state after all keys, read once, tile by tile."""
    for span in tiles(values.shape[-2]):
        keys = keys_of(span)
        top = keys.log.detach().amax(-2, keepdim=True)
        if state is not None:
            top = torch.maximum(top, state.top)
        reference = _finite(top)
        sums = _times(keys.factor, _shift(keys.log, reference)).transpose(-1, -2) @ values[..., span, :]
        if state is not None:
            sums = sums + state.sums * torch.exp(state.top - reference).transpose(-1, -2)
        state = State(top, sums)
    assert state is not None, "no keys and no state"
    return state


def causal(
    keys_of: KeysOf,
    rows_of: RowsOf,
    values: Float[Tensor, "b g s e1"],
    queries: int,
    state: State,
) -> tuple[Float[Tensor, "b g r n e1"], State]:
    """Numerators and normalisers of every row over the keys up to its own, and the state after the last key.

    `rows_of` gives the row features (b, g, r, l, m) of a tile. Row i sees keys 0..i and the initial state.
    Where logs rise too steeply inside a tile, the tile is halved until they do not.
    """
    s = values.shape[-2]
    parts: list[Tensor] = []
    paired = min(queries, s)
    for span in tiles(paired):
        state = _tile(keys_of(span), rows_of, values, span, state, parts)
    if queries > s:
        reference, before = settle(state)
        for rest in tiles(queries - s):
            rows = slice(rest.start + s, rest.stop + s)
            tile = Tile(rows, reference, before, values.new_zeros(*before.shape[:2], 1, before.shape[-2]))
            parts.append(rows_of(tile) @ before.unsqueeze(2))
    elif s > queries:
        state = absorb(lambda span: keys_of(slice(span.start + queries, span.stop + queries)), values[..., queries:, :], state)
    return torch.cat(parts, -2), state


def _tile(keys: Keys, rows_of: RowsOf, values: Tensor, span: slice, state: State, parts: list[Tensor]) -> State:
    length = span.stop - span.start
    peak = keys.log.detach().amax(-2, keepdim=True)
    top = torch.maximum(state.top, peak)
    reference = torch.maximum(state.top, _first(keys.log.detach()))
    # Under torch.compile the choice cannot depend on data; `_shift` then clips, and stays finite.
    if length > 1 and not torch.compiler.is_compiling():
        rise = torch.where(reference > -math.inf, top - reference, 0.0)
        if bool((rise > _RISE[rise.dtype]).any()):
            half = (length + 1) // 2
            for piece in (slice(0, half), slice(half, length)):
                log, factor = keys.log[..., piece, :], None if keys.factor is None else keys.factor[..., piece, :]
                part = slice(span.start + piece.start, span.start + piece.stop)
                state = _tile(Keys(log, factor), rows_of, values, part, state, parts)
            return state
    reference = _finite(reference)
    features = _times(keys.factor, _shift(keys.log, reference))  # (b, g, l, m)
    before = state.sums * torch.exp(state.top - reference).transpose(-1, -2)
    rows = rows_of(Tile(span, reference, before, features))  # (b, g, r, l, m)
    piece = values[..., span, :]
    out, total = _blocks(rows, features, piece, before)
    parts.append(out)
    settled = _finite(top)
    sums = (before + total) * torch.exp(reference - settled).transpose(-1, -2)
    return State(top, sums)


def _first(log: Tensor) -> Tensor:
    """The log of the first key that is not hidden, per feature; −inf when all are."""
    seen = log > -math.inf
    first = seen.to(torch.uint8).argmax(-2, keepdim=True)
    return log.gather(-2, first)


def _blocks(
    rows: Float[Tensor, "b g r l m"], features: Float[Tensor, "b g l m"], values: Float[Tensor, "b g l e1"], before: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows against the keys before them in the tile and all sums before it; and the sums of the tile."""
    b, g, r, length, m = rows.shape
    size = min(BLOCK, length)
    blocks = -(-length // size)
    spare = blocks * size - length
    if spare:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, spare))
        features = torch.nn.functional.pad(features, (0, 0, 0, spare))
        values = torch.nn.functional.pad(values, (0, 0, 0, spare))
    x = features.reshape(b, g, blocks, size, m)
    w = values.reshape(b, g, blocks, size, -1)
    y = rows.reshape(b, g, r, blocks, size, m).transpose(2, 3).reshape(b, g, blocks, r * size, m)
    own = x.transpose(-1, -2) @ w  # (b, g, blocks, m, e1)
    running = own.cumsum(2)
    earlier = before.unsqueeze(2) + torch.nn.functional.pad(running[:, :, :-1], (0, 0, 0, 0, 1, 0))
    past = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril().repeat(r, 1)
    near = (y @ x.transpose(-1, -2)).masked_fill(~past, 0.0)  # (b, g, blocks, r·size, size)
    out = near @ w + y @ earlier
    out = out.reshape(b, g, blocks, r, size, -1).transpose(2, 3).reshape(b, g, r, blocks * size, -1)
    return out[..., :length, :], running[:, :, -1]


def flops(sizes: Sizes, features: int, width: int, read: int) -> int:
    """Multiply-adds (counted as two) of one pass over keys of `width` columns; rows read `read` of them."""
    z, m = sizes, features
    per_key, per_row = 2 * z.batch * z.key_heads * m * width, 2 * z.batch * z.heads * m * read
    if not z.causal:
        return per_key * z.keys + per_row * z.queries
    total, paired = 0, min(z.queries, z.keys)
    for start in range(0, paired, TILE):
        length = min(TILE, paired - start)
        size = min(BLOCK, length)
        padded = -(-length // size) * size
        near = 2 * z.batch * z.heads * padded * size * (m + width)
        total += padded * (per_key + 2 * z.batch * z.heads * m * width) + near
    return total + per_key * (z.keys - paired) + 2 * z.batch * z.heads * m * width * (z.queries - paired)
