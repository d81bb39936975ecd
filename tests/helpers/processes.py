"""Several processes that know each other, started once for many cases."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from avow.errors import AvowError

# Processes are born of one that has loaded everything already.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["avow.distributed", "torch.distributed.fsdp"])


def meet(rank: int, count: int, folder: str, seconds: float) -> None:
    """Join the processes that meet in a folder, with so many seconds as the group's timeout."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=limit)


def message(call: Callable[[], object]) -> str:
    """What a process is told by an error of avow's."""
    try:
        call()
    except AvowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _process(rank: int, count: int, job: Callable[[], Any], folder: str, seconds: float) -> None:
    meet(rank, count, folder, seconds)
    torch.save(job(), f"{folder}/{rank}.pt")
    # Who leaves first takes its connections along.
    dist.barrier()
    dist.destroy_process_group()


def together(count: int, job: Callable[[], Any], folder: Path, seconds: float = 300) -> list[Any]:
    """What a job gives in each of so many processes, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    crowd = [FRESH.Process(target=_process, args=(rank, count, job, str(folder), seconds)) for rank in range(count)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert [one.exitcode for one in crowd] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]
