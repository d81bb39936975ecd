r"""Sums over keys in log-scaled features: one state, one pass, any length, no overflow.

Every linear attention here has numerators :math:`\sum_f y_{if} \sum_{j \le i} x_{jf} v_j`, where the key
features are numbers too large or too small for any float: :math:`x_{jf} = e^{l_{jf}}`. They are kept
relative to a running maximum per feature, as online softmax keeps its weights:

.. math:: \mathrm{sums}_f = \sum_j e^{l_{jf} - \mathrm{top}_f} v_j, \quad
          \mathrm{total}_f = \sum_j e^{l_{jf} - \mathrm{top}_f}, \quad \mathrm{top}_f = \max_j l_{jf}

so that exponents never exceed `_RISE` and the largest term of each feature is never lost. Features of moderate size
but for one factor a key, :math:`x_{jf} = c_{jf} e^{l_j}`, share one reference, and need fewer passes over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from avow.core import Sizes
from avow.numerics.masks import slices

# Keys per block: within a block rows meet keys pair by pair, between blocks through sums.
BLOCK = 64
# Keys per tile: a tile shares one reference, and its features (all heads) stay in cache.
TILE = 512
_CACHED = 2**20
# How far logs may rise above the reference inside a tile. e^40 · smallest normal · (features · tile) is far
# below rounding, so nothing that counts is lost at the other end of the range.
_RISE = {torch.float32: 40.0, torch.float64: 300.0}
# The same for one log a key beside factors, which have a range of their own.
_RISE_SHARED = {torch.float32: 8.0, torch.float64: 300.0}


class Keys(NamedTuple):
    """Features of some keys: exp(log), or `factor · exp(log)` with one log per key; keys not `seen` have log −inf.

    `log` is the scan's to overwrite: never hand over a view of the caller's tensor.
    """

    log: Float[Tensor, "b g l #m"]
    factor: Float[Tensor, "b g l m"] | None = None
    seen: Bool[Tensor, "#b #g l 1"] | None = None


class State(NamedTuple):
    """All that is remembered of the keys so far, in O(m·e), how many tiles were added up to it, and the power of two
    that values were divided by, if any.
    """

    top: Float[Tensor, "b g 1 #m"]
    sums: Float[Tensor, "b g m e"]
    total: Float[Tensor, "b g m 1"]
    steps: int = 0
    size: Float[Tensor, "b g 1 1"] | None = None

    def seen_from(self, reference: Tensor) -> State:
        """The same state relative to a higher reference."""
        shrink = torch.exp(self.top - reference).transpose(-1, -2)
        return self._replace(top=reference, sums=self.sums * shrink, total=self.total * shrink)


class Sums(NamedTuple):
    """What rows collect: weighted sums of values, divided by their normalisers where those were asked for.

    Normalisers are relative to exp(`unit_log`), noted for features that share one logarithm.
    """

    out: Float[Tensor, "b g r n e"]
    normaliser: Float[Tensor, "b g r n 1"] | None
    unit_log: Float[Tensor, "b g r n 1"] | None


class Tile(NamedTuple):
    """What a row needs to know of its tile to weigh it; `total` is that of all keys before the tile."""

    rows: slice
    reference: Float[Tensor, "b g 1 #m"]
    total: Float[Tensor, "b g m 1"]
    features: Float[Tensor, "b g l m"]


KeysOf = Callable[[slice], Keys]
RowsOf = Callable[[Tile], Tensor]


class _Collector:
    """Rows as they are finished: written in place, or kept for one concatenation where autograd watches."""

    def __init__(self, queries: int) -> None:
        self.queries, self.done = queries, 0
        self.parts: list[Sums] = []

    def add(self, numerator: Tensor, normaliser: Tensor | None, reference: Tensor) -> None:
        divisor, unit, length = None, None, numerator.shape[-2]
        if normaliser is not None:
            # A visible key contributes one; what is smaller belongs to a row that sees nothing, or to one of which
            # landmarks know nothing. A gradient divides by it, and meets keys that weigh up to e^rise: where that might
            # be more than floats hold, none flows.
            least = math.sqrt(torch.finfo(normaliser.dtype).tiny)
            divisor = torch.where(normaliser.abs() < least, 1.0, normaliser)
            if reference.shape[-1] == 1:
                unit = reference.unsqueeze(2).expand_as(normaliser)
        if length == self.queries or numerator.requires_grad or torch.compiler.is_compiling():
            self.parts.append(Sums(numerator if divisor is None else numerator / divisor, normaliser, unit))
            return
        if not self.parts:
            room = (None if x is None else self._room(x) for x in (normaliser, unit))
            self.parts = [Sums(self._room(numerator), *room)]
        whole, span = self.parts[0], slice(self.done, self.done + length)
        rows = whole.out[..., span, :]
        if divisor is None:
            rows.copy_(numerator)
        else:
            torch.div(numerator, divisor, out=rows)
        for target, source in zip(whole[1:], (normaliser, unit), strict=True):
            if target is not None and source is not None:
                target[..., span, :] = source
        # Features may share one logarithm in some tiles and not in others: then there is no unit of them all.
        self.parts, self.done = [whole if unit is not None else whole._replace(unit_log=None)], self.done + length

    def _room(self, part: Tensor) -> Tensor:
        """Room for what all rows collect, as for those of a part."""
        return part.new_empty(*part.shape[:-2], self.queries, part.shape[-1])

    def joined(self) -> Sums:
        """All parts as one; without what is missing in one of them."""
        if len(self.parts) == 1:
            return self.parts[0]
        out, *rest = zip(*self.parts, strict=True)
        columns = ([x for x in xs if x is not None] for xs in rest)
        return Sums(torch.cat(out, -2), *(torch.cat(xs, -2) if len(xs) == len(out) else None for xs in columns))


def nothing(values: Float[Tensor, "b g s e"], features: int, logs: int) -> State:
    """The state before any key, of `features` features with `logs` logarithms among them (all, or one)."""
    b, g, _, e = values.shape
    top = values.new_full((b, g, 1, logs), -math.inf)
    return State(top, values.new_zeros(b, g, features, e), values.new_zeros(b, g, features, 1))


def in_one_unit(
    state: State, values: Float[Tensor, "b g s e"], size: Tensor | None
) -> tuple[State, Tensor, Tensor | None]:
    """Sums divided by one power of two and new values divided by another, both divided by the larger, and that."""
    if state.size is None and size is None:
        return state, values, None
    one = torch.ones_like(values[..., :1, :1])
    before, now = (one if x is None else x for x in (state.size, size))
    # Sums of nothing have no unit: one would swallow values near underflow.
    read = (state.total > 0).any(-2, keepdim=True)
    larger = torch.where(read, torch.maximum(before, now), now)
    return state._replace(sums=state.sums * (before / larger)), values * (now / larger), larger


def settle(state: State) -> State:
    """The same state with a finite reference."""
    return state.seen_from(_finite(state.top))


def tile_length(per_position: int) -> int:
    """How many positions of so many numbers each make a tile: a power of two, whole blocks."""
    length = TILE
    while length > BLOCK and length * per_position > _CACHED:
        length //= 2
    return length


def tiles(length: int, per_position: int) -> Iterator[slice]:
    """A sequence cut into tiles."""
    return slices(length, tile_length(per_position))


def absorb(keys_of: KeysOf, values: Float[Tensor, "b g s e"], features: int, state: State | None = None) -> State:
    """The state after all keys, read once, tile by tile."""
    for span in tiles(values.shape[-2], values.shape[0] * values.shape[1] * features):
        keys = keys_of(span)
        top = keys.log.detach().amax(-2, keepdim=True)
        if state is not None:
            state = _joining(state, keys)
            top = torch.maximum(top, state.top)
        reference = _finite(top)
        sums, total = _summed(keys, reference, values[..., span, :])
        if state is not None:
            before = state.seen_from(reference)
            sums, total = sums + before.sums, total + before.total
        state = State(top, sums, total, 1 if state is None else state.steps + 1)
    assert state is not None, "no keys and no state"
    return state


def collect(rows_of: Callable[[slice], Tensor], heads: int, queries: int, state: State, normalise: bool) -> Sums:
    """What every row collects from one state that it sees whole."""
    collector = _Collector(queries)
    _collect(rows_of, heads, queries, state, normalise, collector)
    return collector.joined()


def _collect(
    rows_of: Callable[[slice], Tensor], heads: int, queries: int, state: State, normalise: bool, collector: _Collector
) -> None:
    # The normaliser is one more column: a product of its own would read all rows again.
    columns = (torch.cat([state.sums, state.total], -1) if normalise else state.sums).unsqueeze(2)
    for span in tiles(queries, columns.shape[0] * heads * columns.shape[-2]):
        products = rows_of(span) @ columns  # (b, g, r, l, m) @ (b, g, 1, m, e)
        numerator, normaliser = (products[..., :-1], products[..., -1:]) if normalise else (products, None)
        collector.add(numerator, normaliser, state.top)


def causal(
    keys_of: KeysOf,
    rows_of: RowsOf,
    values: Float[Tensor, "b g s e"],
    heads: int,
    queries: int,
    state: State,
    normalise: bool,
) -> tuple[Sums, State]:
    """What every row collects from the keys up to its own, and the state after the last key.

    `rows_of` gives the row features (b, g, r, l, m) of a tile. Row i sees keys 0..i and the initial state.
    Where logs rise too steeply inside a tile, the tile is halved until they do not.
    """
    s, m = values.shape[-2], state.sums.shape[-2]
    collector = _Collector(queries)
    paired = min(queries, s)
    for span in tiles(paired, values.shape[0] * heads * m):
        state = _tile(keys_of(span), rows_of, values, span, state, collector, normalise)
    if queries > s:
        last = settle(state)
        silent = values.new_zeros(*last.sums.shape[:2], 1, last.sums.shape[-2])

        def late(span: slice) -> Tensor:
            return rows_of(Tile(slice(span.start + s, span.stop + s), last.top, last.total, silent))

        _collect(late, heads, queries - s, last, normalise, collector)
    elif s > queries:
        state = absorb(
            lambda span: keys_of(slice(span.start + queries, span.stop + queries)), values[..., queries:, :], m, state
        )
    return collector.joined(), state


def _joining(state: State, keys: Keys) -> State:
    """The state with a reference for each feature where the keys to come need one, and sums had shared it so far."""
    if keys.factor is not None or state.top.shape[-1] == keys.log.shape[-1]:
        return state
    some = torch.where(state.total > 0, state.total, 1.0)
    top = state.top + torch.where(state.total > 0, some.log(), -math.inf).transpose(-1, -2)
    return State(top, state.sums / some, state.total / some, state.steps)


def _finite(x: Tensor) -> Tensor:
    """A reference also for features that no key has reached yet."""
    return x.masked_fill(x == -math.inf, 0.0)


def _weight(keys: Keys, reference: Tensor) -> Tensor:
    """exp(log) relative to a reference."""
    above = keys.log.sub_(reference)
    if torch.compiler.is_compiling():
        # A compiled graph cannot halve tiles where the data asks for it: clip, and stay finite.
        above = above.clamp(max=2 * _RISE[above.dtype])
    return above.exp_()


def _summed(keys: Keys, reference: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and totals of some keys; what all features of a key share weighs its values, which are fewer."""
    weight = _weight(keys, reference)
    if keys.factor is None:
        return weight.transpose(-1, -2) @ values, weight.sum(-2).unsqueeze(-1)
    sums = keys.factor.transpose(-1, -2) @ torch.cat([values * weight, weight], -1)
    return sums[..., :-1], sums[..., -1:]


def _first(keys: Keys) -> Tensor:
    """The log of the first visible key, per feature; −inf when there is none."""
    assert keys.seen is not None
    log = keys.log.detach()
    index = keys.seen.to(torch.uint8).argmax(-2, keepdim=True)  # (b, g, 1, 1)
    return log.gather(-2, index.expand(*log.shape[:-2], 1, log.shape[-1]))


def _tile(
    keys: Keys, rows_of: RowsOf, values: Tensor, span: slice, state: State, collector: _Collector, normalise: bool
) -> State:
    length = span.stop - span.start
    state = _joining(state, keys)
    top = torch.maximum(state.top, keys.log.detach().amax(-2, keepdim=True))
    # Every row of the tile has met what the state and the first key hold; where that is nothing, it meets nothing
    # before the first visible key.
    reference = torch.maximum(state.top, keys.log.detach()[..., :1, :])
    if keys.seen is not None:
        reference = torch.where(reference > -math.inf, reference, _first(keys))
    if length > 1 and not torch.compiler.is_compiling():
        rise = torch.where(reference > -math.inf, top - reference, 0.0)
        most = _RISE if keys.factor is None else _RISE_SHARED
        if bool((rise > most[rise.dtype]).any()):
            half = (length + 1) // 2
            for piece in (slice(0, half), slice(half, length)):
                log = keys.log[..., piece, :]
                # A piece's log is overwritten, and autograd must not take that for a change of the other's.
                log = log.clone() if log.requires_grad else log
                some = Keys(log, *(None if x is None else x[..., piece, :] for x in keys[1:]))
                part = slice(span.start + piece.start, span.start + piece.stop)
                state = _tile(some, rows_of, values, part, state, collector, normalise)
            return state
    reference = _finite(reference)
    weight = _weight(keys, reference)
    features = weight if keys.factor is None else keys.factor * weight  # (b, g, l, m)
    before = state.seen_from(reference)
    rows = rows_of(Tile(span, reference, before.total, features))  # (b, g, r, l, m)
    numerator, normaliser, after = _blocks(rows, features, values[..., span, :], before, normalise)
    collector.add(numerator, normaliser, reference)
    return after.seen_from(_finite(top))._replace(top=top, steps=state.steps + 1)


def _blocks(
    rows: Tensor, features: Tensor, values: Tensor, before: State, normalise: bool
) -> tuple[Tensor, Tensor | None, State]:
    """Rows against the keys before them in the tile and all sums before it; and the state after the tile."""
    b, g, r, length, m = rows.shape
    size = min(BLOCK, length)
    blocks = -(-length // size)
    spare = blocks * size - length
    if spare:
        rows, features, values = (pad(x, (0, 0, 0, spare)) for x in (rows, features, values))
    x = features.reshape(b, g, blocks, size, m)
    w = values.contiguous().reshape(b, g, blocks, size, -1)
    y = rows.reshape(b, g, r, blocks, size, m).transpose(2, 3).reshape(b, g, blocks, r * size, m)
    # Turned once, for two products: small batched ones with a transposed factor are slow.
    turned = x.transpose(-1, -2).contiguous()  # (b, g, blocks, m, size)
    own = State(before.top, turned @ w, x.sum(-2).unsqueeze(-1))  # of each block (b, g, blocks, m, e)
    near = y @ turned  # (b, g, blocks, r·size, size)
    near.unflatten(3, (r, size)).tril_()

    def in_rows(out: Tensor) -> Tensor:
        by_head = out.reshape(b, g, blocks, r, size, -1).transpose(2, 3)
        return by_head.reshape(b, g, r, blocks * size, -1)[..., :length, :]

    numerator = in_rows((near @ w).add_(y @ _earlier(own.sums, before.sums)))
    normaliser = None
    if normalise:
        normaliser = in_rows(near.sum(-1, keepdim=True) + y @ _earlier(own.total, before.total))
    after = State(before.top, before.sums + own.sums.sum(2), before.total + own.total.sum(2))
    return numerator, normaliser, after


def running(x: Float[Tensor, "b g l m"], total: Float[Tensor, "b g m 1"]) -> Float[Tensor, "b g l m"]:
    """Sums over the keys of a tile up to each, and all before the tile; by products, which are faster than a cumsum."""
    length = x.shape[-2]
    size = min(BLOCK, length)
    spare = -length % size
    blocks = (pad(x, (0, 0, 0, spare)) if spare else x).unflatten(-2, (-1, size))  # (b, g, blocks, size, m)
    within = torch.ones(size, size, dtype=x.dtype, device=x.device).tril() @ blocks
    before = _earlier(within[..., -1, :].unsqueeze(-1), total).transpose(-1, -2)  # (b, g, blocks, 1, m)
    return within.add_(before).flatten(2, 3)[..., :length, :]


def _earlier(own: Float[Tensor, "b g k m c"], before: Float[Tensor, "b g m c"]) -> Float[Tensor, "b g k m c"]:
    """What lies before each block: the blocks before it, by one small product, and all that came before the tile."""
    blocks = own.shape[2]
    strictly = torch.ones(blocks, blocks, dtype=own.dtype, device=own.device).tril(-1)
    sums = strictly @ own.flatten(3)  # (b, g, blocks, m·c)
    return sums.unflatten(3, own.shape[3:]).add_(before.unsqueeze(2))


def depth(keys: int, steps: int) -> float:
    """The most roundings a term goes through on its way into a sum over so many keys, taken in so many tiles.

    Within a tile any order may be taken; each tile after it rescales twice and adds once. Tiles may have been
    halved down to single keys, so their number is counted, not assumed.
    """
    return min(keys, TILE) + 4 * steps + 2 * BLOCK + 16


def tile_count(sizes: Sizes, features: int) -> int:
    """How many tiles a pass over rows and keys works through."""
    z = sizes
    rows, keys = (tile_length(z.batch * heads * features) for heads in (z.heads, z.linear_key_heads))
    return -(-z.queries // rows) + -(-z.keys // keys)


def pass_flops(sizes: Sizes, features: int, normalise: bool, shared: bool = False) -> int:
    """Multiply-adds, counted as two, of one pass over keys and rows; `shared` where features share one log a key."""
    z, m, e = sizes, features, sizes.value_dim
    read = e + normalise
    per_key, per_row = 2 * z.batch * z.linear_key_heads * m * (e + shared), 2 * z.batch * z.heads * m * read
    if not z.causal:
        return per_key * z.keys + per_row * z.queries
    total, paired = 0, min(z.queries, z.keys)
    for span in tiles(paired, z.batch * z.heads * m):
        length = span.stop - span.start
        size = min(BLOCK, length)
        padded = -(-length // size) * size
        total += padded * (2 * z.batch * z.linear_key_heads * m * e + per_row + 2 * z.batch * z.heads * size * (m + e))
        total += 2 * z.batch * z.linear_key_heads * (padded // size) ** 2 * m * read
    return total + per_key * (z.keys - paired) + per_row * (z.queries - paired)


def running_flops(sizes: Sizes, features: int) -> int:
    """Multiply-adds, counted as two, of `running` over every tile of a causal pass."""
    z = sizes
    per_head, paired = 2 * z.batch * z.linear_key_heads * features, min(z.queries, z.keys)
    late = len(list(tiles(z.queries - paired, z.batch * z.heads * features)))
    lengths = [span.stop - span.start for span in tiles(paired, z.batch * z.heads * features)] + [1] * late
    total = 0
    for length in lengths:
        size = min(BLOCK, length)
        blocks = -(-length // size)
        total += per_head * (blocks * size * size + blocks * blocks)
    return total


def peak_bytes(sizes: Sizes, features: int, item: int, per_row: int) -> int:
    """What a pass holds at its peak beyond its inputs: copies of the values, the answer, and one tile's work.

    `per_row` counts what a row's features are made from, beyond themselves.
    """
    z, m, e = sizes, features, sizes.value_dim
    rows, shared = z.batch * z.heads, z.batch * z.linear_key_heads
    tile = min(tile_length(rows * m), z.queries)
    held = shared * z.keys * e * item if item != z.item else 0
    if tile < z.queries:
        held += rows * z.queries * e * item
    if not z.causal:
        # From the second tile on, the features of the one before are still held.
        return held + item * tile * rows * ((2 * m if tile < z.queries else m) + e + per_row)
    # Per key: its features and running sums, one per block, three times over. Per row: features, near weights, sums.
    regrouped = m + e if z.heads != z.linear_key_heads else 0
    return held + item * tile * (shared * (m + 3 * m * e // BLOCK) + rows * (m + BLOCK + 2 * e + regrouped))
