"""Checks side by side: on a GPU most of their time is the compilers', and those run on every core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

_PROCESSES = 12


def spread(device: str, check: Callable[..., list[str]], tasks: Sequence[tuple[Any, ...]]) -> list[list[str]]:
    """The faults a check finds in every task, in their order; on a GPU, in processes of their own."""
    if device == "cpu":
        return [check(*task) for task in tasks]
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        return list(pool.map(check, *zip(*tasks, strict=True)))
