"""Processes agree before they compute: where one of them asks for something else, all raise the same error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from avow import errors
from avow.distributed.traffic import gathered
from avow.errors import AvowError, InputError

# What each process says first: few words, so that what agreeing costs is known beforehand.
PAGE = 2048


def agree(
    same: Mapping[str, object],
    own: Any,
    problem: AvowError | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """What every process has of its `own`, by rank, where all say the `same` and none of them has a problem.

    Otherwise all raise one error. It names the first rank that differs from most, and a problem by the rank that has
    it; a problem that all share is raised as it is.
    """
    texts = {name: str(value) for name, value in same.items()}
    story = None if problem is None else [type(problem).__name__, *map(str, _parts(problem))]
    words = told({"same": texts, "own": own, "problem": story}, group, device)
    for name in texts:
        said = [one["same"].get(name, "nothing") for one in words]
        usual = max(said, key=lambda value: (Counter(said)[value], -said.index(value)))
        for rank, value in enumerate(said):
            if value != usual:
                rule = f"must be as at rank {said.index(usual)}, {usual}"
                raise InputError(f"{name} at rank {rank}", value, rule, "give all processes the same")
    stories = [one["problem"] for one in words]
    for rank, (kind, *parts) in ((rank, one) for rank, one in enumerate(stories) if one is not None):
        if all(one == stories[rank] for one in stories):
            raise getattr(errors, kind)(*parts)
        name, *rest = parts
        raise InputError(f"rank {rank}: {name}", *rest) from problem
    return [one["own"] for one in words]


def told(words: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """What every process says, by rank: anything JSON can write."""
    text = json.dumps(words).encode()
    pages = gathered(_page(text, PAGE, device), group)
    sizes = [int.from_bytes(bytes(page[:8].tolist()), "big") for page in pages]
    if max(sizes) > PAGE - 8:
        # Long stories take a second round; nobody writes one but where something is wrong.
        pages = gathered(_page(text, max(sizes) + 8, device), group)
    return [
        json.loads(bytes(page[8 : size + 8].cpu().numpy().tobytes())) for page, size in zip(pages, sizes, strict=True)
    ]


def _page(text: bytes, size: int, device: torch.device) -> Tensor:
    """The text behind its length, cut or filled up to a size."""
    whole = (len(text).to_bytes(8, "big") + text)[:size].ljust(size, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)


def _parts(problem: AvowError) -> tuple[object, object, object, object]:
    return problem.name, problem.value, problem.rule, problem.remedy
