"""The processes of a run, one or as many as `torchrun` started, and a model that each of them holds whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from avow.errors import DtypeError, LostRank
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot
from avow.training.heartbeat import Watch
from avow.training.interrupt import listening
from avow.training.rendezvous import met

# Seconds that a process waits for the others, unless told.
WAIT = 600.0


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, where it computes, and the seconds that it waits for the others."""

    rank: int
    world: int
    device: torch.device
    wait_for: float = WAIT

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
def ranks(device: str, timeout: float = WAIT) -> Iterator[Ranks]:
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
    store, rank, world = next(rendezvous("env://"))
    own = met(store, rank, world, timeout)
    backend, wait = "nccl" if kind == "cuda" else "gloo", timedelta(seconds=timeout)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=wait)
    watch = Watch(own, rank, world, timeout)
    try:
        yield Ranks(rank, world, place, timeout)
    except (RuntimeError, LostRank) as error:
        # torchrun ends the processes that one leaves behind with SIGTERM: not before they have said why.
        with listening():
            lost = watch.lost()
        if lost is None:
            raise
        raise lost from error
    finally:
        watch.stop()
        dist.destroy_process_group()


class Whole:
    """A model that every process holds whole: several of them average their gradients."""

    def __init__(self, model: nn.Module, here: Ranks) -> None:
        self.model, self._here = model, here
        self._joined: DistributedDataParallel | None = None

    def joined(self, model: nn.Module) -> nn.Module:
        """The model, perhaps compiled, as one whose backward passes reach the other processes."""
        if self._here.world > 1:
            self._joined = DistributedDataParallel(model)
        return self._joined or model

    @contextmanager
    def exchanging(self, now: bool) -> Iterator[None]:
        """Gradients of the block's backward passes go to the other processes only where `now` says so.

        Micro-batches but the last of a step add up where they are, so that a step exchanges gradients once.
        """
        with nullcontext() if now or self._joined is None else self._joined.no_sync():
            yield

    def clipped(self, longest: float) -> Tensor:
        """Shorten the gradient of the whole model to at most `longest`; the length it had."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), longest)

    def state(self, optimiser: Optimizer) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Weights and optimiser state, as `save` writes them."""
        return self.model.state_dict(), optimiser.state_dict()

    def save(self, snapshot: Snapshot, folder: Path) -> Path:
        """Write a checkpoint when all processes ask for it; it is whole when they go on."""
        if self._here.rank == 0:
            checkpoint.save(snapshot, folder)
        self._here.wait()
        return checkpoint.final_of(folder, snapshot.step)

    def restore(self, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
        """Put a checkpoint, whose `state.json` is given, into a model of the same architecture; a snapshot of it."""
        snapshot = checkpoint.read(path, state)
        checkpoint.restore_weights(self.model, snapshot, path)
        optimiser.load_state_dict(dict(snapshot.optimiser))
        return snapshot

    def undivided(self, path: Path) -> nn.Module:
        """The model for those who use it when the other processes are gone; `path` is its last checkpoint."""
        return self.model


def placed(kind: str, model: nn.Module, here: Ranks) -> Whole:
    """The model over the processes of a run: replicated or sharded; one process holds it whole either way."""
    if kind == "replicated" or here.world == 1:
        return Whole(model, here)
    # Divided tensors take torch a second to load.
    from avow.training.sharding import Sharded

    return Sharded(model, here)
