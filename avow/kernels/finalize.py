"""The answers of a step and their bounds: one program for each query head merges the parts of its list."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Float64, Int32
from torch import Tensor

from avow.kernels.choice import Chosen
from avow.kernels.chunking import padded
from avow.kernels.gather_attention import Parts
from avow.kernels.merging import UNIT, merge, rounding_of
from avow.kernels.sample_bounds import FUZZY, NONE, missed_twin
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import STEPS
from avow.kernels.work_partition import TILE, programs, shares, slots_of, tiles_listed, tiles_of

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


def merged_twin(
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
    """The same in plain torch."""
    (b, h, d), (g, _, e) = q.shape, v.shape[1:]
    r, (lists, tiles) = h // g, tiles_of(chosen, programs(b * g, v.shape[2]))
    counts = torch.tensor([len(own) for own in lists], device=q.device)
    after, head = counts.cumsum(0), torch.arange(b * g, device=q.device)
    first, beyond = (after - counts) // tiles + head, (after - 1) // tiles + head + 1
    slots = torch.arange(len(parts.square), device=q.device)
    own_slots = (slots >= first[:, None]) & (slots < beyond[:, None])  # (bg, slots)
    mine = own_slots.repeat_interleave(r, 0)[:, :, None]  # (bh, slots, 1)

    def by_row(x: Float32[Tensor, "slots r *e"], blank: float) -> Float32[Tensor, "bh slots *e"]:
        """What each head's own slots hold."""
        x = x.movedim(1, 0).repeat(b * g, *[1] * (x.ndim - 1))
        return torch.where(mine if x.ndim == 3 else mine[..., 0], x, blank)

    peak = by_row(parts.peak, -math.inf)
    high = peak.amax(-1)
    weight = torch.exp2(peak - high[:, None])
    mass = (by_row(parts.total, 0.0) * weight).sum(-1)
    answer = (by_row(parts.values, 0.0) * weight.unsqueeze(-1)).sum(1) / mass[:, None]
    answer = answer.clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
    own, asked = (torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-13) for x in (answer, q.reshape(b * h, d)))
    square = torch.where(own_slots, parts.square, 0.0).amax(-1)
    longest = square.sqrt().repeat_interleave(r) * (1 + 2.0**-13) + 2.0**-58
    scale, logit_error, per_tile, narrow, halves, vanished = rounding_of(q, v, scale)
    count = (beyond - first).repeat_interleave(r)
    delta = scale * asked * longest * logit_error + (tiles + 2) * 2.0**-20 + 900 * UNIT.value
    delta = delta if chosen.draws is None else delta + 2.0**-15
    depth = (tiles * per_tile + count + 2 * TILE + 16) * UNIT.value
    rounding = torch.where(depth < 0.5, delta + halves + 2 * depth / (1 - depth) + 2.0**-20, math.inf)
    unit_length, wide = (x.reshape(-1).double().repeat_interleave(r) for x in (most, terms.nu))
    reach = (own + rounding * unit_length * 1.1) / wide
    grown = delta.exp() * (1 + rounding) * (1 + 2.0**-16)

    def above(top: Float64[Tensor, "bh"]) -> Float64[Tensor, "bh"]:
        """What stands that many octaves high, at most, beside the largest weight."""
        return torch.exp2(top - high + (top.abs() + high.abs() + 1) * 2.0**-21)

    if chosen.draws is not None and parts.light is not None and parts.heavy is not None:
        rim, fine = chosen.draws.rims.double().unbind(-1)
        light, heavy = (by_row(x, 0.0).double().sum(-1) * grown for x in (parts.light, parts.heavy))
        moved = missed_twin(
            light * grown + 2.0**-40, heavy, above(rim - fine), fine.exp2(), mass / grown, reach, chosen.draws.logs
        )
        moved = torch.where(delta < FUZZY.value, moved * (wide / unit_length), math.inf)
        moved = torch.where((rim < NONE.value) | (unit_length == 0), 0.0, moved)
    else:
        tail = mass.new_zeros(()) if chosen.tails is None else chosen.tails.double().sum(-1) * (1 + 2.0**-10)
        moved = tail * above(terms.widest.double() / STEPS) / mass * (wide / unit_length) * reach.clamp(min=1.0) * grown
        moved = torch.where((tail == 0) | (unit_length == 0), 0.0, moved)
    whole = (moved + rounding + narrow * own / unit_length + vanished / unit_length) * (1 + 2.0**-16)
    lengths = (1 + own / unit_length * (1 + narrow) + vanished / unit_length) * (1 + 2.0**-16)
    whole = torch.where(whole < lengths, whole, lengths)
    whole = (
        torch.where(unit_length == 0, torch.where(own == 0, 0.0, math.inf), whole)
        .nan_to_num(nan=math.inf, posinf=math.inf)
        .float()
    )
    within = (moved <= drop) & (whole <= limit) & (whole < math.inf)
    bound, within, length = (x.view(b, h) for x in (whole, within, own.float()))
    if chosen.draws is not None:
        chosen.draws.seed.add_(1)
    return Decoded(answer.to(q.dtype).view(b, h, e), bound, within, length, chosen.found.sum(-1).int().view(b, g))
