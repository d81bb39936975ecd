"""Processes agree before they compute: where one of them asks for something else, all raise the same error."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from avow import errors
from avow.attend import checked_wishes
from avow.certificates import measure_norms
from avow.contract import Problem
from avow.distributed.traffic import PAGE, Group, gathered, group_of
from avow.errors import AvowError, InputError, ShapeError
from avow.maths.norms import check_range


@dataclass(frozen=True)
class Meeting:
    """What all processes know once they agree: which of them this is, and how many rows and keys each holds."""

    group: dist.ProcessGroup
    here: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    scale: float


def meet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    scale: float | None,
    enable_gqa: bool,
    shared_queries: bool,
    asked: Mapping[str, object],
    reading: bool,
) -> Meeting:
    """The processes of a group before they attend, agreed on all they must be; otherwise all raise the same error.

    They agree on `asked`, on types, heads and scale, on whether gradients will flow, and on the queries themselves
    where those are shared. `reading` looks for nan, inf and norms beyond float64, too.
    """
    processes = group_of(group)
    same = {**asked, "scale": scale, "enable_gqa": enable_gqa, **_facts(q, k, v, shared_queries)}
    problem: AvowError | None = None
    factor, sizes = 1.0, [0.0, 0.0, 0.0]
    try:
        canonical = _checked(q, k, v, scale, enable_gqa, asked.get("tol"))
        factor = canonical.scale
        if reading:
            sizes = list(measure_norms(canonical.detached()).most)
    except AvowError as found:
        problem = found
    lengths = [x.shape[-2] if isinstance(x, Tensor) and x.dim() > 1 else 0 for x in (q, k)]
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    known = agree(same, [*lengths, *sizes], problem, processes, device)
    rows, keys, query, key, value = zip(*known, strict=True)
    check_range(max(query), max(key), max(value), factor)
    return Meeting(processes, dist.get_rank(processes), rows, keys, factor)


def agree(
    same: Mapping[str, object],
    own: Any,
    problem: AvowError | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """What every process has of its `own`, by rank, where all say the `same` and none of them has a problem.

    Otherwise all raise one error. It names the first rank that differs from most, or the first that has a problem; a
    problem that all share is raised as it is.
    """
    texts = {name: _text(value) for name, value in same.items()}
    names = dist.get_process_group_ranks(group)
    story = None if problem is None else [type(problem).__name__, *map(str, _parts(problem))]
    words = told({"same": texts, "own": own, "problem": story}, group, device)
    for name in dict.fromkeys(name for one in words for name in one["same"]):
        said = [one["same"].get(name, "nothing") for one in words]
        usual = max(said, key=lambda value: (Counter(said)[value], -said.index(value)))
        for rank, value in enumerate(said):
            if value != usual:
                rule = f"must be as at rank {names[said.index(usual)]}, {usual}"
                raise InputError(f"{name} at rank {names[rank]}", value, rule, "give all processes the same")
    stories = [one["problem"] for one in words]
    if problem is not None and all(one == story for one in stories):
        raise problem
    for rank, one in enumerate(stories):
        if one is not None:
            kind, name, *rest = one
            raise getattr(errors, kind, InputError)(f"rank {names[rank]}: {name}", *rest) from problem
    return [one["own"] for one in words]


def told(words: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """What every process says, by rank: anything JSON can write."""
    text = json.dumps(words).encode()
    pages = gathered(_page(text, PAGE, device), group)
    sizes = [int.from_bytes(_bytes(page[:8]), "big") for page in pages]
    if max(sizes) > PAGE - 8:
        # Long stories take a second round; nobody writes one but where something is wrong.
        pages = gathered(_page(text, max(sizes) + 8, device), group)
    return [json.loads(_bytes(page[8 : size + 8])) for page, size in zip(pages, sizes, strict=True)]


def _page(text: bytes, size: int, device: torch.device) -> Tensor:
    """The text behind its length, cut or filled up to a size."""
    whole = (len(text).to_bytes(8, "big") + text)[:size].ljust(size, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)


def _bytes(page: Tensor) -> bytes:
    return page.cpu().numpy().tobytes()


def _text(value: object) -> str:
    """A value as it is compared and printed: 1 and 1.0 are the same wish."""
    return str(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _parts(problem: AvowError) -> tuple[object, object, object, object]:
    return problem.name, problem.value, problem.rule, problem.remedy


def _checked(q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool, tol: object) -> Problem:
    problem = Problem.of(q, k, v, scale=scale, enable_gqa=enable_gqa)
    if q.dim() != 4:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ShapeError("shapes of q, k, v", shapes, "must have four axes", "add axes for batch and heads")
    checked_wishes(tol, None)
    return problem


def _facts(q: Tensor, k: Tensor, v: Tensor, shared_queries: bool) -> dict[str, object]:
    tensors = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if isinstance(x, Tensor)}
    facts: dict[str, object] = {f"type of {name}": x.dtype for name, x in tensors.items()}
    for name, x in tensors.items():
        if name == "q" and shared_queries:
            facts["shape of q"] = tuple(x.shape)
        else:
            facts[f"shape of {name} without its length"] = (*x.shape[:-2], *x.shape[-1:])
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    facts["gradients of q, k or v"] = wanted
    if shared_queries and "q" in tensors:
        plain = q.detach().contiguous().cpu().view(-1).view(torch.uint8)
        facts["digest of q"] = hashlib.sha256(plain.numpy().tobytes()).hexdigest()
    return facts
