"""Processes agree before they compute: where one of them asks for something else, all raise the same error.

Each call agrees once, by one message that carries all that was asked. Later only numbers are exchanged; if they say
that a process failed, a second message tells its error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from avow import errors
from avow.core import Problem, Sizes
from avow.distributed.point_to_point import PAGE, Group, group_device, group_of
from avow.distributed.protocols import Shard, all_gather, over_processes
from avow.errors import AvowError, DtypeError, InputError
from avow.numerics.norms import check_range

_Result = TypeVar("_Result")

# Processes whose losses are one compute its gradient each in their own way: so far these may be apart.
_ALIKE = 1e-2


@dataclass(frozen=True)
class Context(Shard):
    """This process's shard, with norms if they were measured, and what all processes know once they agree."""

    group: dist.ProcessGroup
    shared_queries: bool
    most: tuple[float, float, float]
    """The largest norms of queries, keys and values in any process, if they were measured."""
    payloads: tuple[Any, ...]
    """What else each process sent."""

    @property
    def sizes(self) -> Sizes:
        """Those of the whole problem."""
        queries = self.rows[0] if self.shared_queries else sum(self.rows)
        return dataclasses.replace(self.problem.sizes, queries=queries, keys=self.total)


def check_consistent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    scale: float | None,
    enable_gqa: bool,
    shared_queries: bool,
    options: Mapping[str, object],
    measure: bool,
    causal: bool = False,
    mask: Tensor | None = None,
    check: Callable[[Problem], None] | None = None,
    payload: Callable[[], object] | None = None,
) -> Context:
    """The processes of a group before they attend, agreed on all they must be; otherwise all raise the same error.

    They agree on `options`, on types, heads and scale, on whether gradients will flow, and on the queries themselves
    if those are shared. `measure` looks for nan, inf and norms beyond float64, too; `check` for what else would keep
    this process from attending; `payload` gives what else the others are to know. Whatever this process was given,
    nothing raises before the others have heard of it.
    """
    processes = group_of(group)

    def checked() -> Problem:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_dense(name, x)
        problem = Problem.of(q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
        if check is not None:
            check(problem)
        return problem.measure_norms() if measure else problem

    with outside_autocast():
        facts, no_facts = attempt(lambda: _facts(q, k, v, shared_queries))
        problem, unfit = attempt(checked)
        own, untold = attempt(lambda: None if payload is None else payload())
    same = {"causal": causal, "shared_queries": shared_queries, "scale": scale, "enable_gqa": enable_gqa}
    norms = None if problem is None else problem.known_norms
    most = (0.0, 0.0, 0.0) if norms is None else norms.most
    lengths = (0, 0) if problem is None else (problem.q.shape[-2], problem.k.shape[-2])
    known = agree({**options, **same, **(facts or {})}, [*lengths, most, own], unfit or no_facts or untold, processes)
    assert problem is not None  # or all would have raised
    rows, keys, each, payloads = zip(*known, strict=True)
    query, key, value = (max(column) for column in zip(*each, strict=True))
    check_range(query, key, value, problem.scale)
    rank = dist.get_rank(processes)
    return Context(problem, rank, rows, keys, processes, shared_queries, (query, key, value), payloads)


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Arithmetic as wide as the tensors, wherever they are: under autocast it is narrower than bounds allow for."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def attempt(check: Callable[[], _Result]) -> tuple[_Result | None, AvowError | None]:
    """What a check in this process gives, or the error that keeps it from going on, for `agree` to tell the others.

    What raises here alone would leave the others waiting, so an error of any other kind is sent, too.
    """
    try:
        return check(), None
    except AvowError as error:
        return None, error
    except Exception as error:
        rule = f"failed ({' '.join(str(error).split())[:200]})"
        wrapped = InputError("call", type(error).__name__, rule, "give this process what the others are given")
        wrapped.__cause__ = error
        return None, wrapped


def agree(same: Mapping[str, object], own: Any, error: AvowError | None, group: dist.ProcessGroup) -> list[Any]:
    """What every process has of its `own`, by rank, if all say the `same` and none of them has an error.

    Otherwise all raise one error. It names the first rank that differs from most, or the first that has an error; an
    error that all share is raised as it is.
    """
    names = dist.get_process_group_ranks(group)
    story = None
    if error is not None:
        story = [type(error).__name__, *map(str, (error.name, error.value, error.rule, error.remedy))]
    values = {name: _comparable(value) for name, value in same.items()}
    each = allgather_json({"same": values, "own": own, "error": story}, group)
    for name in dict.fromkeys(name for one in each for name in one["same"]):
        given = [one["same"].get(name, "nothing") for one in each]
        usual = max(given, key=lambda value: (Counter(given)[value], -given.index(value)))
        for rank, value in enumerate(given):
            if value != usual:
                rule = f"must be as at rank {names[given.index(usual)]}, {usual}"
                remedy = "give all processes the same"
                raise InputError(f"{name} at rank {names[rank]}", value, rule, remedy) from error
    stories = [one["error"] for one in each]
    if error is not None and all(one == story for one in stories):
        raise error
    for rank, one in enumerate(stories):
        if one is not None:
            kind, name, *rest = one
            raise getattr(errors, kind, InputError)(f"rank {names[rank]}: {name}", *rest) from error
    return [one["own"] for one in each]


def gather_numbers(own: Sequence[float], error: AvowError | None, context: Context) -> Float64[Tensor, "ranks numbers"]:
    """The numbers of every process, as many in each; if one of them has an error instead, all raise it."""
    mine = torch.tensor([error is not None, *own], dtype=torch.float64, device=group_device(context.group))
    each = over_processes(all_gather(mine, context.ranks), context.group)
    if bool(each[:, 0].any()):
        agree({}, None, error, context.group)  # whose it is, and what it says
    return each[:, 1:]


def check_one_loss(grad: Tensor, context: Context) -> None:
    """Raise, in every process alike, if they differentiate different losses."""
    norms = gather_numbers([float(grad.double().norm())], None, context)[:, 0].tolist()
    names = dist.get_process_group_ranks(context.group)
    for rank, norm in enumerate(norms):
        # nan and inf are like themselves alone.
        if not math.isclose(norm, norms[0], rel_tol=_ALIKE) and str(norm) != str(norms[0]):
            rule = f"must be as at rank {names[0]}, {norms[0]:.6g}"
            remedy = "compute the same loss in all processes, from the whole answer"
            raise InputError(f"norm of the gradient at rank {names[rank]}", f"{norm:.6g}", rule, remedy)


def allgather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every process gives, by rank: anything JSON can write."""
    # The device must not depend on what one process was given.
    text, device = json.dumps(value).encode(), group_device(group)
    pages = _gather_pages(text, PAGE, device, group)
    sizes = [int.from_bytes(page[:8], "big") for page in pages]
    if max(sizes) > PAGE - 8:
        # Long texts take a second round; they hardly occur but in errors.
        pages = _gather_pages(text, max(sizes) + 8, device, group)
    return [json.loads(page[8 : size + 8]) for page, size in zip(pages, sizes, strict=True)]


def _gather_pages(text: bytes, size: int, device: torch.device, group: dist.ProcessGroup) -> list[bytes]:
    """The texts of all processes behind their lengths, cut or filled up to a size."""
    whole = (len(text).to_bytes(8, "big") + text)[:size].ljust(size, b"\0")
    page = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)
    pages = over_processes(all_gather(page, dist.get_world_size(group)), group)
    return [one.cpu().numpy().tobytes() for one in pages]


def digest(x: Tensor) -> str:
    """Equal for equal bits, and for no others that anybody finds."""
    plain = x.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().data).hexdigest()


def _comparable(value: object) -> int | float | str:
    """A value as it is compared and printed. Numbers stay what they are: 1 and 1.0 are the same."""
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value if isinstance(value, int | float) else str(value)


def storage(x: Tensor) -> str:
    """How a tensor holds its numbers: `dense`, or what keeps it from being read row by row."""
    if x.is_nested:
        return "nested"
    if x.is_meta or x.layout != torch.strided:
        return "meta" if x.is_meta else str(x.layout).removeprefix("torch.")
    return type(x).__name__ if is_traceable_wrapper_subclass(x) else "dense"


def check_dense(name: str, x: Tensor) -> None:
    """Raise where a tensor has no numbers of its own to read, row by row; what is no tensor is refused elsewhere."""
    if isinstance(x, Tensor) and storage(x) != "dense":
        remedy = f"pass a dense tensor with the numbers of {name}"
        raise DtypeError(f"storage of {name}", storage(x), "must be dense over shards", remedy)


def _facts(q: Tensor, k: Tensor, v: Tensor, shared_queries: bool) -> dict[str, object]:
    """What processes must have in common of their tensors: the number of rows, and rows, only of shared queries."""
    facts: dict[str, object] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        facts[f"storage of {name}"] = kept = storage(x) if isinstance(x, Tensor) else type(x).__name__
        if isinstance(x, Tensor):
            # Processes answer each other's gradients: either all of them or none.
            facts[f"gradient of {name}"] = torch.is_grad_enabled() and x.requires_grad
        if kept == "dense":
            facts |= {f"storage of {name}": f"dense on {x.device.type}", f"type of {name}": x.dtype}
            if name == "q" and shared_queries:
                facts |= {"shape of q": tuple(x.shape), "digest of q": digest(x)}
            else:
                facts[f"shape of {name} without its length"] = (*x.shape[:-2], *x.shape[-1:])
    return facts
