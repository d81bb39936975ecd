"""Several processes that know each other, started once for many cases."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _process(rank: int, count: int, job: Callable[[], Any], folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )
    torch.save(job(), f"{folder}/{rank}.pt")
    # Who leaves first takes its connections along.
    dist.barrier()
    dist.destroy_process_group()


def together(count: int, job: Callable[[], Any], folder: Path, seconds: float = 60) -> list[Any]:
    """What a job gives in each of so many processes, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = multiprocessing.get_context("spawn")
    crowd = [
        fresh.Process(target=_process, args=(rank, count, job, str(folder), seconds), daemon=True)
        for rank in range(count)
    ]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert [one.exitcode for one in crowd] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]
