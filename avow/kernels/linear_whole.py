r"""Linear attention in which every row sees every key: one reading of keys and values, one of queries.

.. math:: out_i = \frac{q_i S}{q_i \cdot t}, \quad S = \sum_j k_j v_j^T, \quad t = \sum_j k_j

and without the division where no normaliser is asked for. Gradients are of the same two kinds, sums over rows and
products with a state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from avow.kernels import causal_scan, chunking
from avow.kernels.chunking import divided, padded
from avow.kernels.linear_attention import LinearState, blank, check, like_inputs, shared
from avow.kernels.scan_kernels import COLUMNS, NORMALISED, PLAIN, PRECISION, ROWS
from avow.kernels.tile_ops import TINY, into, tile

_NORMALISED, _ROWS, _COLUMNS = (tl.constexpr(mode) for mode in (NORMALISED, ROWS, COLUMNS))
# Rows of a chunk, and chunks per program.
_CHUNK, _MANY = 64, 8


@triton.jit
def _collected(
    x,
    weight,
    slope,
    state,
    total,
    out,
    norm,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    state_row: tl.constexpr,
    state_column: tl.constexpr,
    rows,
    H: tl.constexpr,
    RX: tl.constexpr,
    RS: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MANY: tl.constexpr,
    MODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows times a state; RX heads of the output share one of x, RS share a state."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + (own // RX).to(tl.int64) * x_head
    place = (head // RS).to(tl.int64)
    row, feature = tl.arange(0, C), tl.arange(0, MP)
    column = block * EB + tl.arange(0, EB)
    inside = (feature < M)[:, None] & (column < E)[None, :]
    entry = feature[:, None] * state_row + column[None, :] * state_column
    sums = tl.load(state + place * (M * E) + entry, mask=inside, other=0.0)
    if MODE == _NORMALISED:
        beside = tl.load(total + place * M + feature, mask=feature < M, other=0.0)
    if MODE == _ROWS or MODE == _COLUMNS:
        beside = tl.load(total + place * E + column, mask=column < E, other=0.0)
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        xs = tile(x + start * x_row, x_row, row, feature, left, M, MP)
        found = into(xs, sums, PRECISION)
        if MODE == _NORMALISED:
            divisor = tl.sum(xs.to(tl.float32) * beside[None, :], 1)
            tl.store(norm + rest + row, divisor, mask=(row < left) & (block == 0))
            found = found / tl.where(tl.abs(divisor) < TINY, 1.0, divisor)[:, None]
        if MODE == _ROWS:
            w = tl.load(weight + rest + row, mask=row < left, other=0.0)
            u = tl.load(slope + rest + row, mask=row < left, other=0.0)
            found = (found + u[:, None] * beside[None, :]) * w[:, None]
        if MODE == _COLUMNS:
            found = found + beside[None, :]
        goal = out + rest * E + row[:, None] * E + column[None, :]
        tl.store(goal, found.to(out.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])


def _collect(
    x: Tensor,
    state: LinearState,
    heads: int,
    mode: int,
    turned: bool = False,
    weight: Tensor | None = None,
    slope: Tensor | None = None,
    kept: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows times a state, or its transpose, for so many heads; and the normalisers they were divided by."""
    (b, hx, n, m), sums = x.shape, state.sums
    e = sums.shape[2 if turned else 3]
    out = x.new_empty(b, heads, n, e, dtype=x.dtype if kept is None else kept)
    norm = x.new_empty(b, heads, n if mode == NORMALISED else 0, dtype=torch.float32)
    columns = min(padded(e), 64 if m <= 256 else 32)
    chunk = _CHUNK if m <= 256 and x.element_size() == 2 else 32
    _collected[(b * heads, max(1, divided(n, chunk * _MANY)), divided(e, columns))](
        x,
        weight,
        slope,
        sums,
        state.total,
        out,
        norm,
        *x.stride()[:3],
        1 if turned else e,
        m if turned else 1,
        n,
        H=heads,
        RX=heads // hx,
        RS=heads // sums.shape[1],
        M=m,
        MP=padded(m),
        E=e,
        EB=columns,
        C=chunk,
        MANY=_MANY,
        MODE=mode,
        PRECISION=PRECISION,
        num_warps=4 if max(m, columns) <= 64 else 8,
        num_stages=3 if m <= 128 else 2,
    )
    return out, norm


def _whole(y: Tensor, z: Tensor, mode: int, slope: Tensor | None = None) -> LinearState:
    """Sums over all rows, parts added up in their order."""
    b, h, n, m = y.shape
    parts = chunking.cut(n, b * h, m, z.shape[3], y.element_size())
    found = causal_scan.summed(y, z, parts, mode, False, slope, True)
    sums, totals = found.sums.sum(1), found.totals.sum(1)
    return LinearState(sums.unflatten(0, (b, h)), totals.unflatten(0, (b, h)))


def linear_attention_whole(
    q: Float[Tensor, "b h n m"], k: Float[Tensor, "b g s m"], v: Float[Tensor, "b g s e"], normalise: bool = False
) -> Float[Tensor, "b h n e"]:
    """What every row collects from all keys."""
    check(q, q[:, : k.shape[1]], q[:, : k.shape[1]], None)
    check(k, k, v, None)
    return _forward(q, k, v, normalise)[0]


@torch.library.custom_op("avow::linear_attention_whole", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, normalise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, normalisers, and the state."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    mode = NORMALISED if normalise else PLAIN
    state = _whole(k, v, mode)
    return *_collect(q, state, q.shape[1], mode), *state


@_forward.register_fake
def _(q, k, v, normalise):
    (b, h, n, m), g, e = q.shape, k.shape[1], v.shape[3]
    norm, total = (b, h, n if normalise else 0), (b, g, m if normalise else 0)
    return q.new_empty(b, h, n, e), *blank(q, norm, (b, g, m, e), total)


@torch.library.custom_op("avow::linear_attention_whole_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    sums: Tensor,
    total: Tensor,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    weight = slope = weighted_slope = None
    weighted = gradient
    rows, columns = (ROWS, COLUMNS) if normalise else (PLAIN, PLAIN)
    if normalise:
        weight, slope, weighted, weighted_slope = causal_scan.weighted(gradient, out, norm)
    g = k.shape[1]
    dq = _collect(gradient, LinearState(sums, total), q.shape[1], rows, True, weight, slope)[0]
    felt = LinearState(*(shared(x, g).contiguous() for x in _whole(q, weighted, columns, weighted_slope)))
    dk = _collect(v, felt, g, columns, True)[0]
    return dq, dk, _collect(k, felt, g, PLAIN)[0]


_backward.register_fake(like_inputs)


def _keep(ctx, inputs, output):
    q, k, v, normalise = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.normalise = normalise
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    return *_backward(gradient, *ctx.saved_tensors, ctx.normalise), None


_forward.register_autograd(_gradients, setup_context=_keep)


def linear_attention_whole_twin(
    q: Float[Tensor, "b h n m"], k: Float[Tensor, "b g s m"], v: Float[Tensor, "b g s e"], normalise: bool = False
) -> Float[Tensor, "b h n e"]:
    """The same in plain torch, on any device and for any type, float64 too."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, keys, values = q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide), v.to(wide)
    found = rows @ (keys.mT @ values).unsqueeze(2)
    if normalise:
        divisor = rows @ keys.sum(-2)[:, :, None, :, None]
        found = found / torch.where(divisor.abs() < torch.finfo(wide).tiny, 1.0, divisor)
    return found.flatten(1, 2).to(q.dtype)
