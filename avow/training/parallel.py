"""The processes of a run: one, or as many as `torchrun` started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from avow.errors import DtypeError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, and where it computes."""

    rank: int
    world: int
    device: torch.device

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes, as a new tensor."""
        x = x.clone()
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def any(self, here: bool) -> bool:
        """Whether it holds in some process; all of them get the same answer."""
        return here if self.world == 1 else bool(self.total(torch.tensor(float(here), device=self.device)))

    def gathered(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every process's tensors, the name ending in its rank."""
        if self.world == 1:
            return {f"{name}.0": x for name, x in states.items()}
        found: dict[str, Tensor] = {}
        for name, x in states.items():
            here = x.to(self.device)
            parts = [torch.zeros_like(here) for _ in range(self.world)]
            dist.all_gather(parts, here)
            found |= {f"{name}.{rank}": part.cpu() for rank, part in enumerate(parts)}
        return found

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def ranks(device: str) -> Iterator[Ranks]:
    """This process among those that `torchrun` started; gloo joins CPUs, NCCL joins GPUs."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DtypeError("device", "cuda", "is not available here", "use device=cpu, or device=auto")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(0, 1, torch.device(kind))
        return
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), world, place)
    finally:
        dist.destroy_process_group()
