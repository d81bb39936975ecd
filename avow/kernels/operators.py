"""Decoding by kernels as operators of torch: `torch.compile` and `torch.export` see a step as two nodes.

`torch.ops.avow.append_tokens` writes tokens behind the others of a store, `torch.ops.avow.decode_step` answers the last
queries, and `torch.ops.avow.exact_step` does so from all tokens. A store is the tensors of
`avow.kernels.append_tokens.TokenStore`, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from avow.kernels.append_tokens import TokenStore, append
from avow.kernels.finalize import Sinks
from avow.kernels.gather_attention import read_whole
from avow.kernels.hot_rows import HotRows
from avow.kernels.pausing import Used
from avow.kernels.sparse_decode import Lengths, decode
from avow.numerics.sketch import Sketch


# Schemas are read from annotations: these are torch's own, without shapes.
@torch.library.custom_op("avow::append_tokens", mutates_args=("store",))
def append_tokens(k: Tensor, v: Tensor, store: Sequence[Tensor], counts: Tensor | None) -> None:
    """Puts the tokens of k (b, g, l, d) and v (b, g, l, e) behind the others: of each sequence the first `counts`."""
    # Kernels read numbers as they lie there, and a view may stand for their negatives, or skip some.
    counts = None if counts is None else counts.contiguous()
    append(TokenStore(*store), k.resolve_neg(), v.resolve_neg(), counts=counts)


@append_tokens.register_fake
def _(*given: object, **named: object) -> None:
    return None


@torch.library.custom_op("avow::exact_step", mutates_args=("report",))
def exact_step(
    q: Tensor, store: Sequence[Tensor], report: Tensor, sinks: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """The answers (b, h, n, e) to the last n queries, q (b, h, n, d), from all tokens that the device counts."""
    known, (b, h, n, d) = TokenStore(*store), q.shape
    k, v, norms, most = (x.unflatten(0, (b, -1)) for x in (known.k, known.v, known.norms, known.most))
    used = Used(known.used, None, None if n == 1 else n, window)
    own = None if sinks is None else Sinks(sinks.resolve_neg().float().contiguous(), h, n)
    rows = q.resolve_neg().contiguous().view(b, h * n, d)
    return read_whole(rows, k, v, norms, most, scale, used, report, own).view(b, h, n, -1)


@exact_step.register_fake
def _(q: Tensor, store: Sequence[Tensor], *rest: object, **named: object) -> Tensor:
    return q.new_empty(*q.shape[:3], store[1].shape[-1])


@torch.library.custom_op("avow::decode_step", mutates_args=("state", "report", "counts", "seed", "hot"))
def decode_step(
    q: Tensor,
    store: Sequence[Tensor],
    hot: Sequence[Tensor],
    state: Tensor,
    report: Tensor,
    counts: Tensor,
    seed: Tensor | None,
    sinks: Tensor | None,
    drop: float,
    limit: float,
    confidence: float,
    scale: float,
    window: int | None,
) -> Tensor:
    """The answers (b, h, n, e) to the last n queries, q (b, h, n, d), of which `report` (5, b, h·n) then tells.

    `hot` are the tensors of `HotRows`, or none.
    """
    known, (b, h, n, d) = TokenStore(*store), q.shape
    k, v, norms, codes, scales, zero, radius, reach, metric, size = (x.unflatten(0, (b, -1)) for x in known[:10])
    found = decode(
        q.resolve_neg().contiguous().view(b, h * n, d),
        k,
        v,
        Sketch(codes, scales, zero, radius, reach, metric, size, 4),
        Lengths(norms, known.most.unflatten(0, (b, -1))),
        drop,
        scale,
        None,
        limit,
        confidence,
        seed,
        used=Used(known.used, state, None if n == 1 else n, window),
        report=report,
        sinks=None if sinks is None else sinks.resolve_neg().float().contiguous(),
        counts=counts,
        hot=HotRows(*hot) if hot else None,
    )
    return found.out.view(b, h, n, -1)


@decode_step.register_fake
def _(q: Tensor, store: Sequence[Tensor], *rest: object, **named: object) -> Tensor:
    return q.new_empty(*q.shape[:3], store[1].shape[-1])
