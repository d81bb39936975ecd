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

from avow.kernels.choice import PLACES, Chosen
from avow.kernels.chunking import padded
from avow.kernels.heads import by_head
from avow.kernels.sample_bounds import ABOVE, BELOW
from avow.kernels.tile_attention import ROWS, WARPS, attend, lift
from avow.kernels.tile_ops import interpreted
from avow.kernels.work_partition import programs, share_of, shares, span_of, tiles_listed, tiles_of


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
):
    """One share of all lists, as long as any other: the end of one head's, perhaps, and the beginning of the next's."""
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


def attended(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float) -> Parts:
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
        # Lists and rows are fetched one after the other: five stages hold two tiles, three hold one.
        num_stages=5 if q.element_size() * (d + e) <= 512 else 3,
    )
    return parts


def attended_twin(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float) -> Parts:
    """The same in plain torch; what no program writes is nan."""
    b, h, d = q.shape
    g, s, e = v.shape[1:]
    r, count = h // g, programs(b * g, s)
    peak, total, values, square, light, heavy = (
        torch.full((count + b * g, *shape), math.nan, device=q.device) for shape in ((r,), (r,), (r, e), (), (r,), (r,))
    )
    tiles, share = tiles_of(chosen, count)
    before = 0
    for head, own in enumerate(tiles):
        rows = q.reshape(b * g, r, d)[head].float()
        for program in range(before // share, (before + len(own) - 1) // share + 1 if len(own) else 0):
            places = own[max(program * share - before, 0) : program * share + share - before].flatten().long()
            places = places[places >= 0]
            rare = places >> PLACES if chosen.draws is not None else torch.zeros_like(places)
            places = places - (rare << PLACES)
            odds = ((127 << 23) - (rare << 20)).int().view(torch.float32)
            keys, carried = (x[head // g, head % g, places].float() for x in (k, v))
            logits = rows @ keys.T * (scale * math.log2(math.e)) - odds.log2()
            slot = program + head
            peak[slot] = logits.amax(-1)
            weights = torch.exp2(logits - peak[slot].unsqueeze(-1))
            total[slot], values[slot], square[slot] = weights.sum(-1), weights @ carried, keys.square().sum(-1).amax()
            if chosen.draws is not None:
                length = chosen.draws.lengths[head, places].float() / chosen.draws.nu[head]
                slanted = (length.square() + 1).sqrt()
                rim, fine = chosen.draws.rims[head * r : head * r + r, :, None].unbind(1)
                term = torch.exp2(torch.where(rare > 0, logits + slanted.log2() - (rim - fine), -math.inf))
                light[slot] = (term.clamp(max=ABOVE.value).square() * (1 - odds)).sum(-1)
                heavy[slot] = torch.where(term > BELOW.value, term * ((length + 1) / slanted), 0.0).sum(-1)
        before += len(own)
    found = Parts(peak, total, values, square)
    return found if chosen.draws is None else found._replace(light=light, heavy=heavy)
