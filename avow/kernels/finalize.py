"""The answers of a step and their bounds: one program for each query head merges the parts of its list."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from avow.kernels import pausing
from avow.kernels.choice import Chosen
from avow.kernels.chunking import padded
from avow.kernels.gather_attention import Parts
from avow.kernels.merging import merge, rounding_of
from avow.kernels.pausing import ARRIVED as _ARRIVED
from avow.kernels.pausing import settle
from avow.kernels.sketch_pass import Terms
from avow.kernels.tile_ops import early, follow
from avow.kernels.work_partition import programs, shares, slots_of, tiles_listed

# Parts whose largest logits are compared at once, parts that are merged at once and the numbers that they may be, so
# that registers hold them, and by how many warps.
_PARTS, _CHUNK, _HELD, _WARPS = 256, 128, 2**15, 4


ARRIVED = tl.constexpr(_ARRIVED)


class Decoded(NamedTuple):
    """The answers of one step, and what is proved of them; all on the device."""

    out: Float[Tensor, "b h e"]
    report: Float32[Tensor, "5 b h"]
    """Bounds, lengths of answers, at most the longest values, hints for the next step, and shares of tokens read."""
    within: Bool[Tensor, "b h"]
    """Whether unread tokens moved the row by no more than was allowed. Where not, compute it exactly."""
    kept: Int32[Tensor, "b g"]
    """How many tokens of each key head were read."""

    @property
    def bound(self) -> Float32[Tensor, "b h"]:
        """At most this far is a row from the truth, relative to the longest value; inf where nothing is proved. Where
        tokens were drawn, up to the chance that was allowed.
        """
        return self.report[0]

    @property
    def length(self) -> Float32[Tensor, "b h"]:
        """The answers' lengths."""
        return self.report[1]


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
    report,
    within,
    used,
    state,
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
    worthwhile,
    spans,
    heads,
    R: tl.constexpr,
    RP: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    """A row's answer, and its bound."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = row // R
    counts = tiles_listed(found, heads, spans, HEADS, SPANS)
    ends, share = shares(counts, PROGRAMS)
    first, beyond = slots_of(head, ends, counts, share, HEADS)
    span = tl.arange(0, SPANS)
    read = tl.sum(tl.load(found + head * spans + span, mask=span < spans, other=0), 0)
    whole = tl.load(used + head)
    tl.store(kept + head, read, mask=row % R == 0)
    tl.store(report + 4 * tl.num_programs(0) + row, read.to(tl.float32) / tl.maximum(whole, 1).to(tl.float32))
    # Whoever reads again counts who is done.
    tl.store(arrived + row, 0)
    if seed is not None and row == 0:
        # The next step draws anew.
        tl.store(seed, tl.load(seed) + 1)
    if whole > 0:
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
            report,
            tl.num_programs(0),
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
    else:
        # Without tokens the answer is zero.
        column = tl.arange(0, EP)
        tl.store(out + row * E + column, tl.zeros((EP,), tl.float32).to(out.dtype.element_ty), mask=column < E)
        tl.store(report + row, 0.0)
        tl.store(report + tl.num_programs(0) + row, 0.0)
        tl.store(report + 2 * tl.num_programs(0) + row, tl.load(most + head))
        tl.store(within + row, 1)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    before = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        settle(state, used, kept, within, heads, worthwhile, R, RP, HEADS)


def blank_report(b: int, h: int, device: torch.device) -> Float32[Tensor, "5 b h"]:
    """The report of a cache that has not decoded yet: nothing is proved, and nothing expected."""
    return torch.full((5, b, h), math.inf, device=device)


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
    report: Float32[Tensor, "5 b h"] | None = None,
) -> Decoded:
    """The answers and their bounds, in the place of a `report` of the step before; the seed of draws is advanced."""
    (b, h, _), (g, _, e) = q.shape, v.shape[1:]
    out = q.new_empty(b, h, e)
    report = blank_report(b, h, q.device) if report is None else report
    within = q.new_empty(b, h, dtype=torch.int8)
    kept = q.new_empty(b, g, dtype=torch.int32)
    found = Decoded(out, report, within.view(torch.bool), kept)
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
        report,
        within,
        *terms.used,
        drop,
        limit,
        *rounding_of(q, v, scale),
        *((None, None, None) if draws is None else draws.logs),
        pausing.WORTHWHILE,
        spans,
        heads,
        R=h // g,
        RP=triton.next_power_of_2(h // g),
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
        EARLY=early(q.device),
        launch_pdl=early(q.device),
    )
    return found
