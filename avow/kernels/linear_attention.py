r"""Causal linear attention, forward and backward, at the speed of memory.

.. math:: out_i = \frac{q_i S_i}{q_i \cdot t_i}, \quad S_i = \sum_{j \le i} k_j v_j^T, \quad t_i = \sum_{j \le i} k_j

and without the division where no normaliser is asked for. There is no feature map: q and k are the features. Sums are
in float32 for inputs of 16 and 32 bits. Backward, the gradient of q is a scan over v and k, and those of k and v are
scans from the end over q and the gradient: nothing of the size of a chunk's state is ever kept.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from avow.errors import DtypeError, ShapeError
from avow.kernels import causal_scan, chunking
from avow.kernels.causal_scan import Sums
from avow.kernels.chunking import Cut
from avow.kernels.scan_kernels import COLUMNS, NORMALISED, PLAIN, ROWS

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Beyond this many numbers in a row, a state has no room in registers.
_WIDEST = 512
# Rows of a chunk of the twin.
_CHUNK = 64


class LinearState(NamedTuple):
    """All that is remembered of the keys and values so far, one for each sequence and key head."""

    sums: Float32[Tensor, "s g m e"]
    total: Float32[Tensor, "s g m"]


def linear_attention(
    q: Float[Tensor, "b h n m"],
    k: Float[Tensor, "b g n m"],
    v: Float[Tensor, "b g n e"],
    normalise: bool = False,
    initial: LinearState | None = None,
    starts: Int[Tensor, "sequences+1"] | None = None,
) -> tuple[Float[Tensor, "b h n e"], LinearState]:
    """What every row collects from the keys up to its own, and the state after the last.

    `starts` are where packed sequences begin in a batch of one, and where the last ends. Query heads that share a key
    head lie beside each other. The final state's total is empty where nothing is normalised.
    """
    check(q, k, v, starts)
    sums = total = None
    if initial is not None:
        sums, total = (x.contiguous() for x in initial)
    out, _, last, last_total, _, _ = _forward(q, k, v, sums, total if normalise else None, starts, normalise)
    return out, LinearState(last, last_total)


def check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> None:
    """Say what no kernel here can do."""
    if q.dtype not in _TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        kinds, rule = f"{q.dtype}, {k.dtype}, {v.dtype}", "must be one of the 16-bit types, or float32"
        raise DtypeError("types of q, k, v", kinds, rule, "convert them to one")
    if q.shape[1] % max(k.shape[1], 1) or not k.shape[1]:
        rule = f"must be a multiple of the {k.shape[1]} key heads"
        raise ShapeError("heads of q", q.shape[1], rule, "repeat keys and values for some of the query heads")
    if q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]:
        told, rule = f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]}", "must be the same number"
        raise ShapeError("lengths of q, k, v", told, rule, "row i sees keys up to i: pass one key for each query")
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        told, rule = f"{q.shape[3]}, {v.shape[3]}", f"must be at most {_WIDEST}"
        raise ShapeError("widths of k, v", told, rule, "split the values by columns, or use fewer features")
    if starts is not None and q.shape[0] != 1:
        rule = "must be 1 where sequences are packed"
        raise ShapeError("batch", q.shape[0], rule, "put the sequences one after the other, and say where each starts")


def _parts(q: Tensor, e: int, starts: Tensor | None, normalise: bool) -> Cut:
    b, h, n, m = q.shape
    whole = chunking.cut(n, b * h, m, e, q.element_size(), not normalise and q.dtype != torch.float16)
    return chunking.cut_packed(whole, starts, n)


@torch.library.custom_op("avow::linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    initial_total: Tensor | None,
    starts: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, normalisers, the final state, and what lies before each part, for the backward pass."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    parts, mode = _parts(q, v.shape[3], starts, normalise), NORMALISED if normalise else PLAIN
    known = causal_scan.before(k, v, parts, mode, False, initial, initial_total)
    found = causal_scan.scanned(q, k, v, known, parts, mode)
    return found.out, found.norm, found.final, found.final_total, known.sums, known.totals


@_forward.register_fake
def _(q, k, v, initial, initial_total, starts, normalise):
    (b, h, n, m), g, e = q.shape, k.shape[1], v.shape[3]
    sequences = b if starts is None else len(starts) - 1
    parts = torch.library.get_ctx().new_dynamic_size() if starts is not None else _parts(q, e, None, normalise).parts
    wide = m if normalise else 0
    shapes = ((b, h, n if normalise else 0), (sequences, g, m, e), (sequences, g, wide), (b * g, parts, m, e))
    return q.new_empty(b, h, n, e), *blank(q, *shapes, (b * g, parts, wide))


@torch.library.custom_op("avow::linear_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    last: Tensor | None,
    last_total: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    sums: Tensor,
    totals: Tensor,
    starts: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state; `last` are those of the final state."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    parts = _parts(q, v.shape[3], starts, normalise)
    g, siblings = k.shape[1], q.shape[1] // k.shape[1]
    weight = slope = weighted_slope = None
    felt = gradient
    if normalise:
        weight, slope, felt, weighted_slope = causal_scan.weighted(gradient, out, norm)
    forward = Sums(sums, totals)
    rows, columns = (ROWS, COLUMNS) if normalise else (PLAIN, PLAIN)
    dq = causal_scan.scanned(gradient, v, k, forward, parts, rows, False, True, weight, slope).out
    # What comes from after the last row enters once for each key head: with the first of its query heads.
    ends = [None if x is None else first_of(x, siblings) for x in (last, last_total if normalise else None)]
    known = causal_scan.before(q, felt, parts, columns, True, ends[0], ends[1], weighted_slope)
    # Sums over the heads that share a key head are rounded once.
    kept = q.dtype if siblings == 1 else torch.float32
    by_value = causal_scan.scanned(k, q, felt, known, parts, PLAIN, True, kept=kept, plain=not normalise)
    by_key = causal_scan.scanned(v, felt, q, known, parts, columns, True, True, None, weighted_slope, kept)
    dk, dv, state, total = (shared(x, g) for x in (by_key.out, by_value.out, by_value.final, by_key.final_total))
    return dq, dk.to(k.dtype), dv.to(v.dtype), state, total


@_backward.register_fake
def _(gradient, last, last_total, q, k, v, out, norm, sums, totals, starts, normalise):
    sequences = k.shape[0] if starts is None else len(starts) - 1
    g, m, e = k.shape[1], k.shape[3], v.shape[3]
    state, total = (sequences, g, m, e), (sequences, g, m if normalise else 0)
    return *like_inputs(gradient, q, k, v), *blank(q, state, total)


def like_inputs(gradient, q, k, v, *rest):
    """Room for gradients of q, k and v: all that tracing needs to know of how they are computed."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def blank(q: Tensor, *shapes: tuple[int | torch.SymInt, ...]) -> list[Float32[Tensor, "..."]]:
    """Room for numbers of float32, of some shapes."""
    return [q.new_empty(shape, dtype=torch.float32) for shape in shapes]


def first_of(x: Tensor, siblings: int) -> Tensor:
    """An entry for each query head: that of its key head with the first, zero with the others."""
    if siblings == 1:
        return x.contiguous()
    alone = x.new_zeros(x.shape[0], x.shape[1], siblings, *x.shape[2:])
    alone[:, :, 0] = x
    return alone.flatten(1, 2)


def shared(x: Tensor, groups: int) -> Tensor:
    """Sums over the query heads of each key head."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, x.shape[1] // groups)).sum(2)


def _keep(ctx, inputs, output):
    q, k, v, initial, initial_total, starts, normalise = inputs
    out, norm, _, _, sums, totals = output
    ctx.save_for_backward(q, k, v, out, norm, sums, totals, starts)
    ctx.normalise, ctx.given = normalise, (initial is not None, initial_total is not None)
    ctx.set_materialize_grads(False)


def _gradients(ctx, gradient, norm, last, last_total, *rest):
    q, k, v, out, norm, sums, totals, starts = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(out)
    found = _backward(gradient, last, last_total, q, k, v, out, norm, sums, totals, starts, ctx.normalise)
    state, total = (x if given else None for x, given in zip(found[3:], ctx.given, strict=True))
    return *found[:3], state, total, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def linear_attention_twin(
    q: Float[Tensor, "b h n m"],
    k: Float[Tensor, "b g n m"],
    v: Float[Tensor, "b g n e"],
    normalise: bool = False,
    initial: LinearState | None = None,
    starts: Int[Tensor, "sequences+1"] | None = None,
) -> tuple[Float[Tensor, "b h n e"], LinearState]:
    """The same in plain torch, on any device and for any type, float64 too."""
    if starts is not None:
        edges = starts.tolist()
        pieces = []
        for i, (start, stop) in enumerate(pairwise(edges)):
            begin = None if initial is None else LinearState(*(x[i : i + 1] for x in initial))
            some = slice(start, stop)
            pieces.append(linear_attention_twin(q[:, :, some], k[:, :, some], v[:, :, some], normalise, begin))
        states = (torch.cat(column) for column in zip(*(piece[1] for piece in pieces), strict=True))
        return torch.cat([piece[0] for piece in pieces], 2), LinearState(*states)
    wide = torch.promote_types(q.dtype, torch.float32)
    b, g, n, m = k.shape
    rows, keys, values = (x.to(wide) for x in (q, k, v))
    rows = rows.unflatten(1, (g, -1))  # (b, g, r, n, m)
    if initial is None:
        state = LinearState(keys.new_zeros(b, g, m, v.shape[3]), keys.new_zeros(b, g, m if normalise else 0))
    else:
        state = LinearState(initial.sums.to(wide), initial.total.to(wide))
    parts = []
    for start in range(0, n, _CHUNK):
        x, y, z = (t[..., start : start + _CHUNK, :] for t in (rows, keys, values))
        pairs = (x @ y.unsqueeze(2).mT).tril()
        found = pairs @ z.unsqueeze(2) + x @ state.sums.unsqueeze(2)
        if normalise:
            divisor = pairs.sum(-1) + (x @ state.total[:, :, None, :, None])[..., 0]
            tiny = torch.finfo(wide).tiny
            found = found / torch.where(divisor.abs() < tiny, 1.0, divisor).unsqueeze(-1)
        parts.append(found)
        total = state.total + y.sum(-2) if normalise else state.total
        state = LinearState(state.sums + y.mT @ z, total)
    out = torch.cat(parts, -2) if parts else rows.new_zeros(*rows.shape[:-1], v.shape[3])
    return out.flatten(1, 2).to(q.dtype), state
