"""Attention over listed tokens, in parts that `avow.kernels.merging` puts together.

Each program reads its share of all lists, and keeps the largest logit, the sum of weights and the weighted values of
what it read of each head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.choice import Chosen
from avow.kernels.chunking import padded
from avow.kernels.pausing import Used, tokens_in
from avow.kernels.tile_attention import ROWS, WARPS, attend, lift
from avow.kernels.tile_ops import by_head, early, follow, interpreted
from avow.kernels.work_partition import programs, share_of, shares, span_of, tiles_listed


class Parts(NamedTuple):
    """Shares of a head's list: their largest logits, sums of weights, weighted values, and longest keys, squared.

    What program p found of key head i is in slot p + i: along all lists one after the other, no two are the same.
    """

    peak: Float32[Tensor, "slots r"]
    total: Float32[Tensor, "slots r"]
    values: Float32[Tensor, "slots r e"]
    square: Float32[Tensor, "slots"]
    light: Float32[Tensor, "slots r"] | None = None
    """Where tokens were drawn: the squares of light terms over their odds, (1 − p)-fold, and the heavy ones, both in
    units of the threshold between them.
    """
    heavy: Float32[Tensor, "slots r"] | None = None


@triton.jit(do_not_specialize=["heads", "room"])
def _attended(
    q,
    k,
    v,
    listed,
    found,
    used,
    state,
    rims,
    nu,
    each,
    peak,
    total,
    values,
    square,
    light,
    heavy,
    factor,
    k_stride,
    v_stride,
    each_stride,
    heads,
    spans,
    room,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    HEADS: tl.constexpr,
    SPANS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LIFT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One share of all lists, as long as any other: the end of one head's, perhaps, and the beginning of the next's."""
    follow(EARLY)
    program = tl.program_id(0)
    counts = tiles_listed(found, heads, spans, HEADS, SPANS)
    ends, share = shares(counts, PROGRAMS)
    begin, stop, first, beyond = share_of(program, ends, share)
    for head in range(first, beyond):
        start, end = span_of(head, ends, counts, begin, stop, HEADS)
        attend(
            program,
            head,
            start,
            end,
            q,
            k,
            v,
            peak,
            total,
            values,
            square,
            factor,
            k_stride,
            v_stride,
            R,
            RP,
            D,
            DP,
            E,
            EP,
            LIFT,
            FAST,
            None,
            listed,
            found,
            spans,
            room,
            SPANS,
            (tokens_in(used, state, head) == 0).to(tl.int32),
            rims,
            nu,
            each,
            each_stride,
            light,
            heavy,
        )


def blank_parts(q: Tensor, v: Tensor) -> Parts:
    """Room for what all programs find."""
    (b, h, _), (g, s, e) = q.shape, v.shape[1:]
    slots, r = programs(b * g, s) + b * g, h // g
    shapes: tuple[tuple[int, ...], ...] = ((slots, r), (slots, r), (slots, r, e), (slots,))
    return Parts(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))


def attended(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, used: Used) -> Parts:
    """Attention over the listed tokens, in parts."""
    b, h, d = q.shape
    g, s, e = v.shape[1:]
    heads, spans, r = b * g, chosen.found.shape[1], h // g
    keys, values = by_head(k, "k"), by_head(v, "v")
    count, parts, draws = programs(heads, s), blank_parts(q, v), chosen.draws
    if draws is not None:
        parts = parts._replace(light=torch.empty_like(parts.peak), heavy=torch.empty_like(parts.peak))
    _attended[(count,)](
        q,
        keys,
        values,
        chosen.listed,
        chosen.found,
        *used,
        *((None,) * 3 if draws is None else draws[:3]),
        *parts,
        scale * math.log2(math.e),
        keys.stride(0),
        values.stride(0),
        None if draws is None else draws.lengths.stride(0),
        heads,
        spans,
        chosen.listed.shape[1] // spans,
        R=r,
        RP=ROWS,
        D=d,
        DP=padded(d),
        E=e,
        EP=padded(e),
        HEADS=triton.next_power_of_2(heads),
        SPANS=triton.next_power_of_2(spans),
        PROGRAMS=count,
        LIFT=lift(v.dtype),
        FAST=not interpreted(),
        num_warps=WARPS,
        EARLY=early(q.device),
        launch_pdl=early(q.device),
        # Lists and rows are fetched one after the other: five stages hold two tiles, three hold one.
        num_stages=5 if q.element_size() * (d + e) <= 512 else 3,
    )
    return parts
