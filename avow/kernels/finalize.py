"""The answers of a step and their bounds: one program for each query head merges the parts of its list."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from avow.kernels.choice import Chosen
from avow.kernels.chunking import padded
from avow.kernels.gather_attention import Parts
from avow.kernels.merging import merge, rounding_of
from avow.kernels.sketch_pass import Terms
from avow.kernels.work_partition import programs, shares, slots_of, tiles_listed

# Parts whose largest logits are compared at once, parts that are merged at once and the numbers that they may be, so
# that registers hold them, and by how many warps.
_PARTS, _CHUNK, _HELD, _WARPS = 256, 128, 2**15, 4


class Decoded(NamedTuple):
    """The answers of one step, and what is proved of them; all on the device."""

    out: Float[Tensor, "b h e"]
    bound: Float32[Tensor, "b h"]
    """At most this far is a row from the truth, relative to the longest value; inf where nothing is proved. Where
    tokens were drawn, up to the chance that was allowed.
    """
    within: Bool[Tensor, "b h"]
    """Whether unread tokens moved the row by no more than was allowed. Where not, compute it exactly."""
    length: Float32[Tensor, "b h"]
    """The answers' lengths: hints for the next step."""
    kept: Int32[Tensor, "b g"]
    """How many tokens of each key head were read."""


@triton.jit(do_not_specialize=["heads"])
def _merged(
    q,
    peak,
    total,
    values,
    square,
    light,
    heavy,
    rims,
    tails,
    widest,
    nu,
    most,
    found,
    seed,
    arrived,
    kept,
    out,
    bound,
    within,
    length,
    drop,
    limit,
    scale,
    logit_error,
    per_tile,
    narrow,
    halves,
    vanished,
    mean_log,
    variance_log,
    log,
    spans,
    heads,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPANS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """A row's answer, and its bound."""
    row = tl.program_id(0).to(tl.int64)
    head = row // R
    counts = tiles_listed(found, heads, spans, HEADS, SPANS)
    ends, share = shares(counts, PROGRAMS)
    first, beyond = slots_of(head, ends, counts, share, HEADS)
    span = tl.arange(0, SPANS)
    read = tl.sum(tl.load(found + head * spans + span, mask=span < spans, other=0), 0)
    tl.store(kept + head, read, mask=row % R == 0)
    # Whoever reads again counts who is done.
    tl.store(arrived + row, 0)
    if seed is not None and row == 0:
        # The next step draws anew.
        tl.store(seed, tl.load(seed) + 1)
    merge(
        row,
        first,
        beyond,
        share,
        q,
        peak,
        total,
        values,
        square,
        nu,
        most,
        out,
        bound,
        length,
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
        PARTS,
        CHUNK,
        LARGEST,
        within,
        drop,
        limit,
        tails,
        widest,
        spans,
        SPANS,
        rims,
        light,
        heavy,
        mean_log,
        variance_log,
        log,
    )


def merged(
    q: Tensor,
    v: Tensor,
    parts: Parts,
    terms: Terms,
    chosen: Chosen,
    most: Float32[Tensor, "b g"],
    drop: float,
    scale: float,
    limit: float = math.inf,
) -> Decoded:
    """The answers and their bounds; the seed of draws is advanced."""
    (b, h, _), (g, _, e) = q.shape, v.shape[1:]
    out = q.new_empty(b, h, e)
    bound, length = (q.new_empty(b, h, dtype=torch.float32) for _ in range(2))
    within = q.new_empty(b, h, dtype=torch.int8)
    kept = q.new_empty(b, g, dtype=torch.int32)
    found = Decoded(out, bound, within.view(torch.bool), length, kept)
    heads, d, spans = b * g, q.shape[2], chosen.found.shape[1]
    draws, count = chosen.draws, programs(b * g, v.shape[2])
    _merged[(b * h,)](
        q,
        *parts,
        None if draws is None else draws.rims,
        chosen.tails,
        terms.widest,
        terms.nu,
        most,
        chosen.found,
        None if draws is None else draws.seed,
        terms.arrived,
        found.kept,
        found.out,
        found.bound,
        within,
        found.length,
        drop,
        limit,
        *rounding_of(q, v, scale),
        *((None, None, None) if draws is None else draws.logs),
        spans,
        heads,
        R=h // g,
        D=d,
        DP=padded(d),
        E=e,
        EP=padded(e),
        HEADS=triton.next_power_of_2(heads),
        PROGRAMS=count,
        PARTS=min(triton.next_power_of_2(count), _PARTS),
        CHUNK=min(triton.next_power_of_2(count), _CHUNK, _HELD // padded(e)),
        SPANS=triton.next_power_of_2(spans),
        LARGEST=torch.finfo(q.dtype).max,
        num_warps=_WARPS,
    )
    return found
