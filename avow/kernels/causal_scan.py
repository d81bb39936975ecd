r"""The scan behind every causal linear attention: two readings of keys and values, one of queries, no state per chunk.

A sequence is cut into a few long parts, just enough to fill the device. A first kernel adds up each part's
:math:`\sum_j y_j z_j^T`; a second turns them into what lies before each part; a third walks through every part chunk by
chunk with the state in its registers. No number is added by whoever comes first: every run gives the same bits.
The first kernel walks each part away from where the third begins, which therefore finds that end still in the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import chunking
from avow.kernels.chunking import Cut, divided, padded
from avow.kernels.scan_kernels import (
    COLUMNS,
    NORMALISED,
    PLAIN,
    PRECISION,
    part_prefixes,
    part_rows,
    part_sums,
    row_slopes,
    weighted_rows,
)


class Sums(NamedTuple):
    """What lies before each part: the sums of y zᵀ, and those of β y where they were asked for."""

    sums: Float32[Tensor, "heads parts m e"]
    totals: Float32[Tensor, "heads parts m"]


class Pieces(NamedTuple):
    """The sums of pieces of parts, so many of each part."""

    sums: Float32[Tensor, "heads pieces m e"]
    totals: Float32[Tensor, "heads pieces m"]
    many: int


class Scanned(NamedTuple):
    """The rows, the normalisers they were divided by, and the sums after the last row."""

    out: Float[Tensor, "b h n e"]
    norm: Float32[Tensor, "b h n"]
    final: Float32[Tensor, "s g m e"]
    final_total: Float32[Tensor, "s g c"]


def rowwise(x: Tensor) -> Tensor:
    """The same tensor, with the numbers of a row beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def summed(
    y: Float[Tensor, "b h n m"],
    z: Float[Tensor, "b h n e"],
    parts: Cut,
    mode: int,
    reverse: bool,
    slope: Float32[Tensor, "b h n"] | None,
    whole: bool,
) -> Pieces:
    """The sums of each part's pieces; those of the last that a scan comes to only where the `whole` is wanted."""
    b, h, n, m = y.shape
    e = z.shape[-1]
    chosen = chunking.config_of_sums(m, e, y.element_size())
    columns = divided(e, chosen.columns)
    many = chunking.pieces(parts, b * h * columns, chosen.resident, whole)
    sums = y.new_empty(b * h, parts.parts * many, m, e, dtype=torch.float32)
    totals = y.new_empty(b * h, parts.parts * many, m if mode != PLAIN else 0, dtype=torch.float32)
    if whole or parts.parts > 1:
        part_sums[(b * h, parts.parts * many, columns)](
            y,
            z,
            slope,
            parts.table,
            sums,
            totals,
            *y.stride()[:3],
            *z.stride()[:3],
            n,
            parts.length,
            H=h,
            M=m,
            MP=padded(m),
            E=e,
            EB=chosen.columns,
            C=chosen.chunk,
            PIECES=many,
            MODE=mode,
            WHOLE=whole,
            REVERSE=reverse,
            PACKED=parts.table is not None,
            PRECISION=PRECISION,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return Pieces(sums, totals, many)


def before(
    y: Float[Tensor, "b h n m"],
    z: Float[Tensor, "b h n e"],
    parts: Cut,
    mode: int = PLAIN,
    reverse: bool = False,
    initial: Float32[Tensor, "s h m e"] | None = None,
    initial_total: Float32[Tensor, "s h m"] | None = None,
    slope: Float32[Tensor, "b h n"] | None = None,
) -> Sums:
    """Sums over all rows before each part, from an initial state on; `reverse` counts from the end."""
    found = summed(y, z, parts, mode, reverse, slope, False)
    b, h = y.shape[:2]
    known = Sums(*(x.new_empty(b * h, parts.parts, *x.shape[2:]) for x in found[:2]))
    for pieces, held, given in zip(found[:2], known, (initial, initial_total), strict=True):
        size = math.prod(held.shape[2:])
        if size:
            block = min(1024, padded(size))
            part_prefixes[(b * h, divided(size, block), parts.sequences)](
                pieces,
                held,
                given,
                parts.ends,
                parts.parts,
                b * h,
                SIZE=size,
                BLOCK=block,
                PIECES=found.many,
                REVERSE=reverse,
                num_warps=4,
            )
    return known


def scanned(
    x: Float[Tensor, "b hx n m"],
    y: Float[Tensor, "b hy n m"],
    z: Float[Tensor, "b hy n e"],
    known: Sums,
    parts: Cut,
    mode: int = PLAIN,
    reverse: bool = False,
    turned: bool = False,
    weight: Float32[Tensor, "b h n"] | None = None,
    slope: Float32[Tensor, "b h n"] | None = None,
    kept: torch.dtype | None = None,
    plain: bool = True,
) -> Scanned:
    """Every row's sum over the rows up to it, of the type `kept`; `turned` states are those of z yᵀ.

    Parts that others than `plain` scans walk through, too, are longer: fewer columns are taken at a time.
    """
    (b, hx, n, m), (hy, e) = x.shape, (z.shape[1], z.shape[3])
    h = max(hx, hy)
    # Sums that float16 meets are in float32, and take twice the room.
    chosen = chunking.config(m, e, x.element_size(), plain and mode == PLAIN and x.dtype != torch.float16)
    out = x.new_empty(b, h, n, e, dtype=x.dtype if kept is None else kept)
    norm = x.new_empty(b, h, n if mode == NORMALISED else 0, dtype=torch.float32)
    sequences = b * parts.sequences
    final = x.new_empty(sequences, hy, m, e, dtype=torch.float32)
    width = m if mode == NORMALISED else e if mode == COLUMNS else 0
    final_total = x.new_empty(sequences, hy, width, dtype=torch.float32)
    part_rows[(b * h, parts.parts, divided(e, chosen.columns))](
        x,
        y,
        z,
        weight,
        slope,
        parts.table,
        known.sums,
        known.totals,
        out,
        norm,
        final,
        final_total,
        *x.stride()[:3],
        *y.stride()[:3],
        *z.stride()[:3],
        1 if turned else e,
        m if turned else 1,
        n,
        parts.length,
        H=h,
        RX=h // hx,
        RY=h // hy,
        M=m,
        MP=padded(m),
        E=e,
        EB=chosen.columns,
        C=chosen.chunk,
        MODE=mode,
        REVERSE=reverse,
        PACKED=parts.table is not None,
        PRECISION=PRECISION,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return Scanned(out, norm, final, final_total)


class Weighted(NamedTuple):
    """What rows of a normalised mean are weighted by in gradients, slopes by their normalisers, and both weighted."""

    weight: Float32[Tensor, "b h n"]
    slope: Float32[Tensor, "b h n"]
    gradient: Float[Tensor, "b h n e"]
    weighted_slope: Float32[Tensor, "b h n"]


def weighted(
    gradient: Float[Tensor, "b h n e"], out: Float[Tensor, "b h n e"], norm: Float32[Tensor, "b h n"]
) -> Weighted:
    """Gradients of the rows of a normalised mean as those of keys and values need them."""
    b, h, n, e = out.shape
    found = Weighted(torch.empty_like(norm), torch.empty_like(norm), torch.empty_like(out), torch.empty_like(norm))
    grid = (b * h, max(1, divided(n, 64)))
    weighted_rows[grid](
        gradient, out, norm, *found, *gradient.stride()[:3], n, H=h, E=e, EP=padded(e), C=64, num_warps=4
    )
    return found


def slopes(gradient: Float[Tensor, "b h n e"], out: Float[Tensor, "b h n e"]) -> Float32[Tensor, "b h n"]:
    """The slope of every row of a normalised mean by its normaliser, over what the row is weighted by."""
    b, h, n, e = out.shape
    slope = out.new_empty(b, h, n, dtype=torch.float32)
    row_slopes[(b * h, max(1, divided(n, 64)))](
        gradient, out, slope, *gradient.stride()[:3], n, H=h, E=e, EP=padded(e), C=64, num_warps=4
    )
    return slope
