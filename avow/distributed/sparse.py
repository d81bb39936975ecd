r"""Sparse attention over shards of the keys: every process gets the answer, and each reads only what matters to all.

Shards first tell each other what their sketches say: how heavy their heaviest tokens may be, and how much weight, at
most and at least, stands in bins below that. So all know where one cut through the tokens of all shards leaves no more
unread than the tolerance allows; each reads what is before it, and a shard with nothing there reads nothing. What was
read and what was left add up over shards to one proof (`avow.distributed.shares`); a row whose proof falls short reads
on, up to a cut that is sure to do. On how tokens are spread over shards nothing depends but which of them are sketched
together.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended, checked_wishes
from avow.certificates import measure_norms
from avow.contract import Problem
from avow.distributed.rounds import over_processes
from avow.distributed.sparse_rounds import Wish, shard_script
from avow.errors import AvowError, InputError, NotDifferentiable, ParameterError, ShapeError
from avow.methods.sparse import Sparse


def attend_sparse(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    method: Sparse | None = None,
    group: dist.ProcessGroup | None = None,
    tol: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """Softmax attention of the same queries to the keys of all processes, read in part; `k` and `v` are this shard.

    Every query sees every key; shards may differ in length and may be empty. The certificate is deterministic and the
    same in every process. With `tol`, no row's bound exceeds it, and together the processes read about as little as
    one would that had all keys; without, `method.drop` is what unread tokens may do. Where processes disagree on what
    they ask, or one of them cannot attend, all of them raise an error that names the rank. No gradient flows.
    """
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or use avow.attend"
        raise ParameterError("group", group, "needs processes that know each other", remedy)
    chosen = Sparse() if method is None else method
    try:
        problem: Problem | AvowError = _checked(q, k, v, chosen, tol, scale, enable_gqa)
    except AvowError as refused:
        problem = refused
    keys = _agreed(problem, _facts(q, k, v, chosen, tol, scale, enable_gqa), k.shape[-2] if k.dim() > 1 else 0, group)
    assert isinstance(problem, Problem)  # or an error was raised
    wish = Wish(tol, chosen, sum(keys), max(keys), len(keys))
    with torch.no_grad():
        (attended, _), _ = over_processes(shard_script(problem, wish), group)
    return attended


def _checked(
    q: Tensor, k: Tensor, v: Tensor, method: Sparse, tol: float | None, scale: float | None, enable_gqa: bool
) -> Problem:
    """The problem of this shard with its norms, or the error that keeps it from attending."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ShapeError("shapes of q, k, v", shapes, "must have four axes", "add axes for batch and heads")
    if method.chance > 0:
        raise ParameterError("method: chance", method.chance, "has no proof over shards", "use chance=0")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotDifferentiable("requires_grad", True, "has no gradient over processes", "use torch.no_grad()")
    checked_wishes(tol, None)
    problem = Problem.of(q.detach(), k.detach(), v.detach(), scale=scale, enable_gqa=enable_gqa)
    return dataclasses.replace(problem, norms=measure_norms(problem))


def _facts(
    q: Tensor, k: Tensor, v: Tensor, method: Sparse, tol: float | None, scale: float | None, enable_gqa: bool
) -> dict[str, Any]:
    """What must be the same in all processes."""
    return {
        "tol": tol,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "parameters of method": dict(method.parameters),
        "type of q": str(q.dtype),
        "type of k": str(k.dtype),
        "type of v": str(v.dtype),
        "shape of q": tuple(q.shape),
        "shape of k without its length": (*k.shape[:-2], *k.shape[-1:]),
        "shape of v without its length": (*v.shape[:-2], *v.shape[-1:]),
        "digest of q": hashlib.sha256(q.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def _agreed(mine: Problem | AvowError, facts: dict[str, Any], keys: int, group: dist.ProcessGroup | None) -> list[int]:
    """How many keys each process has; raises, in all of them alike, where one differs from the first or cannot attend.

    A process by itself raises what it found wrong as it is.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (facts, keys, mine if isinstance(mine, AvowError) else None), group=group)
    for rank, (theirs, _, _) in enumerate(said):
        for name, value in theirs.items():
            if value != said[0][0][name]:
                rule = f"must be as at rank 0, {said[0][0][name]}"
                raise InputError(f"{name} at rank {rank}", value, rule, "give all processes the same")
    errors = [(rank, problem) for rank, (_, _, problem) in enumerate(said) if problem is not None]
    if len(errors) == len(said):
        raise errors[0][1]
    for rank, problem in errors:
        raise InputError(f"rank {rank}: {problem.name}", problem.value, problem.rule, problem.remedy) from problem
    return [count for _, count, _ in said]
