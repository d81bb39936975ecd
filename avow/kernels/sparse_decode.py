"""One decoding step that reads a fraction of the cache and proves that it was enough, on a GPU.

Four kernels, none of which waits for the host: a bound for every token from the sketch, with a histogram; a list from
where that is cut on; attention over the list; the answer with its bound. With a limit on the bound two more follow,
which do nothing unless a row is beyond it. With a confidence below 1 tokens are drawn instead of cut off, so that fewer
are read. Buffers and grids depend on the shapes alone, so a step can be
captured in a CUDA graph; its draws differ whenever it is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.kernels import planning
from avow.kernels.choice import PLACES, Chosen, marked
from avow.kernels.finalize import Decoded, Sinks, merged
from avow.kernels.gather_attention import attended, read_again
from avow.kernels.hot_rows import HotRows
from avow.kernels.pausing import Used, blank_state
from avow.kernels.planning import blank_counts
from avow.kernels.sample_bounds import Logs
from avow.kernels.sampling import drawn
from avow.kernels.sketch_pass import Terms, bounded
from avow.kernels.step_constants import ROWS
from avow.kernels.work_partition import Parts
from avow.numerics.sketch import Sketch

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Lengths(NamedTuple):
    """How long values are: at least each, and at most the longest of each head."""

    each: Float[Tensor, "b g s"]
    """Where rows see different tokens in float32, of which true lengths are at least a part of 1 − 2^-20."""
    most: Float32[Tensor, "b g"]
    """0 only where all values are zero, nan where they are too small for a proof."""


class Stages(NamedTuple):
    """What a step does, one after the other; it either cuts off or draws."""

    bounded: Callable[..., Terms]
    marked: Callable[..., Chosen]
    drawn: Callable[..., Chosen]
    attended: Callable[..., Parts]
    merged: Callable[..., Decoded]
    read_again: Callable[..., None]


KERNELS = Stages(bounded, marked, drawn, attended, merged, read_again)


def decode(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    sketch: Sketch,
    lengths: Lengths,
    drop: float,
    scale: float | None = None,
    hint: Float32[Tensor, "b h"] | None = None,
    limit: float | None = None,
    confidence: float = 1.0,
    seed: Int64[Tensor, "1"] | None = None,
    stages: Stages = KERNELS,
    used: Used | None = None,
    report: Float32[Tensor, "5 b h"] | None = None,
    sinks: Float32[Tensor, "heads"] | None = None,
    counts: Int32[Tensor, "bh circle"] | None = None,
    hot: HotRows | None = None,
) -> Decoded:
    """Attention of one query per head over a cache, by the tokens that may matter.

    Several queries of a head, `used.queries` of them, are as many rows side by side in h, each of which sees the tokens
    up to its own; with `used.window` no older ones than that many. `sinks` are logits of query heads without a value.

    `sketch` is that of the first whole groups of k, `lengths` are those of v; tokens without a sketch are always read.
    `used`, on the device, says how many tokens each key head has, the others of k and v being room for tokens to come,
    and whether the sketch is used: with a `limit`, heads without it are read in full. Without it all tokens are in use.
    `report` takes the place of a new one, and its fourth row that of a hint; `counts` that of empty histograms, which
    they are again after the step.
    `hint` may hold lengths that the answers are expected to have, such as those of the step before: the nearer, the
    fewer tokens are read; what is proved holds whatever they are. With a `limit`, `drop` is only aimed at: rows are
    within what is allowed where their whole bound is, and heads with a row that is not read all tokens after all.

    With a `confidence` below 1, bounds hold for each row with that probability over the draws, which `seed`, a number
    on the device, decides; it is another one after the step. Then `drop` and the rounding of the answer together are
    aimed at a little less than the `limit`.

    k and v may be in host memory that the device reads by its address; `hot` are then rows of them that it keeps.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    _check(q, k, v, sketch, lengths, drop, scale)
    seed = _checked_seed(confidence, seed, k)
    hint = report[3] if hint is None and report is not None else hint
    q = q.detach().contiguous()
    most, s = lengths.most, k.shape[2]
    if used is None:
        used = Used(most.new_full((most.numel(),), s, dtype=torch.int32), blank_state(q.device))
    if (used.queries or used.window) and lengths.each.dtype != torch.float32:
        rule = "must be torch.float32 if rows see different tokens"
        raise DtypeError("lengths.each", lengths.each.dtype, rule, "measure values in float32, rounded up")
    queries = used.queries or 1
    own = None if sinks is None else Sinks(sinks, q.shape[1] // queries, queries)
    counts = blank_counts(q.shape[0] * q.shape[1], q.device) if counts is None else counts
    least = planning.shortest(drop, limit, confidence)
    terms = stages.bounded(q, sketch, lengths.each, most, hint, scale, used, counts, least)
    if seed is None:
        chosen = stages.marked(terms, most, drop, s)
    else:
        chosen = stages.drawn(terms, most, planning.goal(drop, limit, q.dtype), Logs.of(confidence), seed, s)
    parts = stages.attended(q, k, v, chosen, scale, used, *(() if hot is None else (hot,)))
    if limit is None:
        return stages.merged(q, v, parts, terms, chosen, most, drop, scale, sinks=own)
    found = stages.merged(q, v, parts, terms, chosen, most, math.inf, scale, limit, report, own)
    stages.read_again(q, k, v, terms, most, scale, found, own)
    return found


def _check(q: Tensor, k: Tensor, v: Tensor, sketch: Sketch, lengths: Lengths, drop: float, scale: float) -> None:
    (h, d), (g, s) = q.shape[1:], k.shape[1:3]
    rows = h // max(g, 1)
    if h != rows * g or not 1 <= rows <= ROWS:
        rule = f"must be a multiple of the {g} key heads, by at most {ROWS}"
        raise ShapeError("heads of q", h, rule, "repeat keys and values for some of the query heads")
    if d % 16 or not 16 <= d <= 256:
        raise ShapeError("dim of q", d, "must be a multiple of 16 up to 256", "fill up q and k with zeros")
    if q.dtype not in _TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise DtypeError(
            "types of q, k, v", kinds, "must be one of the 16-bit types, or float32", "convert them to one"
        )
    if sketch.bits != 4:
        raise ParameterError("bits of the sketch", sketch.bits, "must be 4", "sketch the keys with bits=4")
    if sketch.rows > s or lengths.each.shape[2] != s or s == 0:
        value = f"{sketch.rows}, {lengths.each.shape[2]}, {s}"
        rule = "must be at most the keys, as many as the keys, and at least 1"
        raise ShapeError("sketched rows, lengths, keys", value, rule, "append to all three together")
    if not drop >= 0:
        raise ParameterError("drop", drop, "must be at least 0", "give the error that unread tokens may cause")
    if not 0 < scale < math.inf:
        raise ParameterError("scale", scale, "must be above 0", "turn the signs of q and of the scale")


def _checked_seed(confidence: float, seed: Tensor | None, k: Tensor) -> Int64[Tensor, "1"] | None:
    """The seed of draws; None where there are none."""
    if not 0 < confidence <= 1:
        rule = "must be above 0 and at most 1"
        raise ParameterError("confidence", confidence, rule, "try 0.999, or 1 for bounds that always hold")
    if confidence == 1:
        return None
    if seed is None or seed.dtype != torch.int64 or seed.shape != (1,) or seed.device != k.device:
        value = "None" if seed is None else f"{seed.dtype}, {tuple(seed.shape)}, {seed.device}"
        rule = f"must be one torch.int64 on {k.device}, since tokens are drawn"
        raise ParameterError("seed", value, rule, "try torch.tensor([0], device=k.device)")
    if k.shape[2] > 2**PLACES:
        rule = f"must be at most {2**PLACES} if tokens are drawn"
        raise ShapeError("keys", k.shape[2], rule, "leave the confidence at 1")
    return seed
