r"""Exact attention over shards of the keys, one shard a process: all processes get one answer and its certificate.

Each process attends to its own keys, reports its answer with the logarithm of its normaliser, and merges what all
reported in the order of ranks (`avow.certificates.compose`): every process computes the same bits. The logarithm
:math:`\ell` is taken in float64, with :math:`S_i = |scale| \|q_i\| \max_j \|k_j\|` and u the unit of float64 within

.. math:: \lambda_i = (\gamma_{d+8} + 8u) S_i + \gamma_{s+8} + 8 \cdot 746\,u + 4u |\ell_i|

of the real one: each logit is off by the first term; the terms that matter lie within 746 of the top, so that their
exponentials are right to the third in their logarithms; their sum is by the second, what is stored by the last.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor

from avow.attend import Attended
from avow.attend import attend as attend_here
from avow.certificates.compose import Partial, merge
from avow.contract import Certificate, Problem
from avow.errors import AvowError, InputError, NotDifferentiable, ParameterError, ShapeError, ToleranceUnreachable
from avow.maths import rounding
from avow.maths.heads import per_query_head
from avow.maths.masks import row_tiles
from avow.maths.norms import lengths, row_norms, slack


def attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    group: dist.ProcessGroup | None = None,
    tol: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """Softmax attention of the same queries to the keys of all processes; `k` and `v` are this process's shard.

    Every query sees every key; shards may differ in length and may be empty. Where processes disagree on queries,
    types, heads, `scale` or `tol`, or one of them cannot attend, all of them raise an error that names the rank. No
    gradient flows.
    """
    _check(q, k, v, tol, group, scale, enable_gqa)
    # A half-precision answer is rounded once, after the merge. Where a tolerance needs it, float64 is next.
    first = rounding.accumulator(q.dtype)
    for kind in dict.fromkeys((first, first if tol is None else torch.float64)):
        whole = _merged(q.to(kind), k.to(kind), v.to(kind), group, scale, enable_gqa)
        out, certificate = whole.answer(q.dtype)
        if tol is None or certificate.keeps(tol):
            return Attended(out, certificate)
    rule = f"is less than can be proved, {certificate.bound:.3g}"
    remedy = "ask for less, or convert q, k and v to a wider type"
    raise ToleranceUnreachable("tol", tol, rule, remedy, certificate.bound)


def _merged(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None, scale: float | None, enable_gqa: bool
) -> Partial:
    try:
        mine: Partial | AvowError = _answered(q, k, v, scale, enable_gqa)
    except AvowError as problem:
        mine = problem
    shape = (*q.shape[:-1], v.shape[-1])
    said = _told(mine if isinstance(mine, AvowError) else (mine.words, mine.slack), group)
    for rank, one in enumerate(said):
        if isinstance(one, AvowError):
            raise InputError(f"rank {rank}: {one.name}", one.value, one.rule, one.remedy) from one
    if isinstance(mine, AvowError):
        raise mine
    numbers = _packed(mine)
    everyone = [torch.zeros_like(numbers) for _ in said]
    dist.all_gather(everyone, numbers, group=group)
    parts = [_unpacked(x, shape, *words) for x, words in zip(everyone, said, strict=True)]
    return functools.reduce(merge, parts)


def _answered(q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool) -> Partial:
    """What this process's keys answer."""
    out, certificate = attend_here(q, k, v, method="exact", scale=scale, enable_gqa=enable_gqa)
    p = Problem.of(q, k, v, scale=scale, enable_gqa=enable_gqa)
    if p.empty:
        return Partial.nothing(out.shape, out.device)
    longest = per_query_head(lengths(v).amax(-1, keepdim=True), q.shape[1]).expand(out.shape[:-1])
    lse = _logarithms(p)
    u, (d, s) = rounding.unit(torch.float64), (q.shape[-1], k.shape[-2])
    keys = per_query_head(row_norms(k, "k").amax(-1, keepdim=True), q.shape[1])
    reach = abs(p.scale) * row_norms(q, "q") * keys
    off = (rounding.gamma(d + 8, u) + 8 * u) * reach + rounding.gamma(s + 8, u) + 8 * 746 * u + 4 * u * lse.abs()
    off = off * rounding.OUTWARD + 4 * d * rounding.tiny(torch.float64) * max(1.0, abs(p.scale))
    return Partial.of(out, lse, off, longest, certificate, slack(v.shape[-1], torch.float64))


def _logarithms(p: Problem) -> Float64[Tensor, "b h n"]:
    keys = per_query_head(p.k.double(), p.q.shape[1]).mT
    tiles = row_tiles(p.q.shape[-2], p.q.shape[0] * p.q.shape[1] * p.k.shape[-2])
    found = [torch.logsumexp(p.scale * (p.q[..., rows, :].double() @ keys), -1) for rows in tiles]
    return torch.cat(found, -1)


def _packed(part: Partial) -> Float64[Tensor, "b h n c"]:
    """All the numbers of a row side by side."""
    one_each = (part.lse, part.longest, part.pairs, part.unsure, part.drift, *part.means)
    return torch.cat([torch.stack(one_each, -1), part.out], -1)


def _unpacked(
    x: Float64[Tensor, "b h n c"], shape: tuple[int, ...], words: Certificate | None, loose: float
) -> Partial:
    lse, longest, pairs, unsure, drift, *means = x[..., : x.shape[-1] - shape[-1]].unbind(-1)
    out = x[..., x.shape[-1] - shape[-1] :]
    return Partial(out, lse, longest, torch.stack(means), pairs, unsure, drift, loose, words)


def _told(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every process says, by rank."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tol: float | None,
    group: dist.ProcessGroup | None,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Raise, in every process alike, where one of them asks for something else than the first."""
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or use avow.attend"
        raise ParameterError("group", group, "needs processes that know each other", remedy)
    facts = {
        "tol": tol,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "type of q": str(q.dtype),
        "type of k": str(k.dtype),
        "type of v": str(v.dtype),
        "shape of q": tuple(q.shape),
        "shape of k without its length": (*k.shape[:-2], *k.shape[-1:]),
        "shape of v without its length": (*v.shape[:-2], *v.shape[-1:]),
        "gradients of q, k or v": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        "digest of q": hashlib.sha256(q.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
    }
    first, *others = _told(facts, group)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                rule = f"must be as at rank 0, {first[name]}"
                raise InputError(f"{name} at rank {rank}", value, rule, "give all processes the same")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ShapeError("shapes of q, k, v", shapes, "must have four axes", "add axes for batch and heads")
    if facts["gradients of q, k or v"]:
        raise NotDifferentiable("requires_grad", True, "has no gradient over processes", "use torch.no_grad()")
