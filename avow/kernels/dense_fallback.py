"""Answers from all tokens, for heads that a step's bounds do not suffice for.

One kernel, which does nothing unless there is such a head: programs share all tokens of those heads, and whoever is the
last to be done with a head merges what all of them found.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.finalize import Decoded
from avow.kernels.gather_attention import blank_parts
from avow.kernels.merging import merge, rounding_of
from avow.kernels.sketch_pass import Terms
from avow.kernels.tile_attention import ROWS, WARPS, attend, lift
from avow.kernels.tile_ops import by_head, early, follow, interpreted
from avow.kernels.work_partition import programs, share_of, shares, slots_of, span_of, tiles_again

# Parts that one warp merges at once.
_CHUNK = 16


@triton.jit(do_not_specialize=["heads"])
def _read_again(
    q,
    k,
    v,
    peak,
    total,
    values,
    square,
    most,
    arrived,
    out,
    report,
    within,
    factor,
    scale,
    logit_error,
    per_tile,
    narrow,
    halves,
    vanished,
    k_stride,
    v_stride,
    used,
    heads,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIFT: tl.constexpr,
    LARGEST: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One share of all tokens of heads with a row that is not within what was allowed."""
    follow(EARLY)
    program = tl.program_id(0)
    counts = tiles_again(within, used, heads, R, HEADS)
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
            tl.load(used + head),
        )
        slot, slots = slots_of(head, ends, counts, share, HEADS)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + head * R, 1, sem="acq_rel")
        if before % (slots - slot) == slots - slot - 1:
            for sibling in range(R):
                tl.store(report + 4 * heads * R + head * R + sibling, 1.0)
                merge(
                    head * R + sibling,
                    slot,
                    slots,
                    share,
                    q,
                    peak,
                    total,
                    values,
                    square,
                    most,
                    most,
                    out,
                    report,
                    heads * R,
                    scale,
                    logit_error,
                    per_tile,
                    narrow,
                    halves,
                    vanished,
                    R,
                    D,
                    DP,
                    E,
                    EP,
                    CHUNK,
                    CHUNK,
                    LARGEST,
                )


def read_again(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, most: Float32[Tensor, "b g"], scale: float, found: Decoded
) -> None:
    """Puts answers from all tokens in the place of those that are not within what was allowed, without a look at them.

    `within` stays as it was: it tells what the answers were that had to be replaced.
    """
    (b, h, d), (g, s, e) = q.shape, v.shape[1:]
    heads, count = b * g, programs(b * g, s)
    keys, values = by_head(k, "k"), by_head(v, "v")
    _read_again[(count,)](
        q,
        keys,
        values,
        *blank_parts(q, v)[:4],
        most,
        terms.arrived,
        found.out,
        found.report,
        found.within.view(torch.int8),
        scale * math.log2(math.e),
        *rounding_of(q, v, scale),
        keys.stride(0),
        values.stride(0),
        terms.used.tokens,
        heads,
        R=h // g,
        RP=ROWS,
        D=d,
        DP=padded(d),
        E=e,
        EP=padded(e),
        HEADS=triton.next_power_of_2(heads),
        PROGRAMS=count,
        CHUNK=_CHUNK,
        LIFT=lift(v.dtype),
        LARGEST=torch.finfo(q.dtype).max,
        FAST=not interpreted(),
        num_warps=WARPS,
        EARLY=early(q.device),
        launch_pdl=early(q.device),
        num_stages=3,
    )
