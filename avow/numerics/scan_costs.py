"""What a pass of `scan` costs: tiles, operations, and bytes at the peak."""

from __future__ import annotations

from avow.core import Sizes
from avow.numerics.scan import BLOCK, tile_length, tiles


def count(sizes: Sizes, features: int) -> int:
    """How many tiles a pass over rows and keys works through."""
    z = sizes
    rows, keys = (tile_length(z.batch * heads * features) for heads in (z.heads, z.linear_key_heads))
    return -(-z.queries // rows) + -(-z.keys // keys)


def flops(sizes: Sizes, features: int, normalise: bool, shared: bool = False) -> int:
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
