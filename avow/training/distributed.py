"""The processes of a run, one or as many as `torchrun` started: how they find, watch and divide work between them."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from avow.errors import AvowError, DtypeError, LostRank, ParameterError, ShapeError
from avow.nn.attention import Shard
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot
from avow.training.run_folder import listening

T = TypeVar("T")
# Seconds that a process waits for the others by default.
WAIT = 600.0
# Seconds between two signs of life, and those without one after which a process counts as lost, if there is time.
BEAT, PATIENCE = 0.25, 3.0
# What finding out who is lost may take, as a share of a run's timeout, which was waited for before.
SHARE = 0.25


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

    def gathered(self, value: T) -> list[T]:
        """What every process gives, by rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns in every process, by rank; if it fails in one of them, all raise."""
        result, failure = None, None
        try:
            result = act()
        except (OSError, AvowError) as error:
            failure = error
        everyone = self.gathered((result, failure))
        for _, other in everyone:
            if other is not None:
                raise failure or other
        return [cast(T, value) for value, _ in everyone]


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
    own = private_store(store, rank, world, timeout)
    backend, wait = "nccl" if kind == "cuda" else "gloo", timedelta(seconds=timeout)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=wait)
    heartbeat = Heartbeat(own, rank, world, timeout)
    try:
        yield Ranks(rank, world, place, timeout)
    except (RuntimeError, LostRank) as error:
        # When one process ends, torchrun ends the others with SIGTERM: not before they have said why.
        with listening():
            lost = heartbeat.lost()
        if lost is None:
            raise
        raise lost from error
    finally:
        heartbeat.stop()
        dist.destroy_process_group()


def private_store(store: Store, rank: int, world: int, timeout: float) -> Store:
    """A part of the store that these processes alone know, when all of them are here.

    A store may outlive those who wrote into it: torchrun keeps one through all restarts, and what dead processes left
    in it, addresses above all, reads like what the living wrote. So the first process makes up a name, and it holds
    when every other one has answered to it with a random word, which the first repeats: then its author knows that the
    first process is alive.
    """
    word, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("name", word)
        missing = set(range(1, world))
        while missing:
            missing -= {one for one in missing if store.check([f"{word} answer {one}"])}
            _pause(until, f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}", timeout)
        for one in range(1, world):
            store.set(f"{word} seen {one}", store.get(f"{word} answer {one}").decode())
        return PrefixStore(word, store)
    while True:
        # An old name may stand there until the first process is here.
        name = store.get("name").decode() if store.check(["name"]) else ""
        if name:
            store.set(f"{name} answer {rank}", word)
            if store.check([f"{name} seen {rank}"]) and store.get(f"{name} seen {rank}").decode() == word:
                return PrefixStore(name, store)
        _pause(until, "rank 0, or another,", timeout)


def _pause(until: float, missing: str, timeout: float) -> None:
    if time.monotonic() > until:
        remedy = "see why it did not start, or raise run.timeout"
        raise LostRank(missing, "absent", f"when the rendezvous timed out after {timeout:g} s", remedy)
    time.sleep(0.01)


class Heartbeat:
    """Gives signs of life of this process until it is stopped, and tells which others give none.

    A process that ends takes its connections with it, and the error at their other ends names nobody; one that hangs
    is noticed when the whole timeout is over. Signs of life go through the store, so that survivors can name it.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        # A thread needs a connection of its own: one that waits for an answer blocks all others on the same one.
        shared: Any = store
        self._signs, self._store = (PrefixStore("watch", shared.clone()) for _ in range(2))
        self._rank, self._world, self._patience = rank, world, min(PATIENCE, SHARE * timeout)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give no more signs of life."""
        self._over.set()
        self._thread.join(BEAT)  # Waiting for a store that is gone takes long, and nobody misses the thread.

    def lost(self) -> LostRank | None:
        """The error that names others who give no sign of life; None if all do. It takes a few seconds to tell."""
        try:
            before = self._counts()
            time.sleep(self._patience)
            silent = [rank for rank, count in self._counts().items() if count == before[rank]]
            if not silent:
                return None
            # Whoever finds out first is right: those who find out later miss that one, too. No rank names itself.
            first = json.loads(self._store.compare_set("lost", "", json.dumps(silent)))
            silent = [rank for rank in first if rank != self._rank] or silent
        except RuntimeError:
            if self._rank == 0:
                return None
            silent = [0]  # It kept the store, which is gone.
        name = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        remedy = "resume from the last checkpoint, as torchrun --max-restarts does by itself"
        return LostRank(name, "lost", "gave no sign of life, and nobody can go on alone", remedy)

    def _counts(self) -> dict[int, int]:
        """How many signs of life each of the others has given."""
        return {rank: self._store.add(str(rank), 0) for rank in range(self._world) if rank != self._rank}

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._signs.add(str(self._rank), 1)
            except RuntimeError:
                return  # The store is gone; whoever needs it will say so.


class Replicated:
    """A model that every process holds whole: several of them average their gradients."""

    sharded = False

    def __init__(self, model: nn.Module, here: Ranks) -> None:
        self.model, self._here = model, here
        self._parallel: DistributedDataParallel | None = None

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model, perhaps compiled, as one whose backward passes reach the other processes."""
        if self._here.world > 1:
            self._parallel = DistributedDataParallel(model)
        return self._parallel or model

    @contextmanager
    def gradient_sync(self, now: bool) -> Iterator[None]:
        """Inside, gradients of backward passes go to the other processes only if `now` says so.

        Micro-batches but the last of a step add up where they are, so that a step exchanges gradients once.
        """
        with nullcontext() if now or self._parallel is None else self._parallel.no_sync():
            yield

    def clip_gradients(self, longest: float) -> Tensor:
        """Shorten the gradient of the whole model to at most `longest`; the length it had."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), longest)

    def restore(self, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
        """Put a checkpoint, whose `state.json` is given, into a model of the same architecture; a snapshot of it."""
        snapshot = checkpoint.load(path, state)
        checkpoint.restore_weights(self.model, snapshot, path)
        optimiser.load_state_dict(dict(snapshot.optimiser))
        return snapshot

    def full_model(self, path: Path) -> nn.Module:
        """The model for use when the other processes are gone; `path` is its last checkpoint."""
        return self.model


def place_model(kind: str, model: nn.Module, here: Ranks) -> Replicated:
    """The model over the processes of a run: replicated or sharded; one process holds it whole either way."""
    if kind == "replicated" or here.world == 1:
        return Replicated(model, here)
    # Divided tensors take torch a second to load.
    from avow.training.sharding import Sharded

    return Sharded(model, here)


class Grid:
    """Where this process stands: in `row` of `rows`, at `place` of `places`, its `mesh` of data × sequence.

    Rows read examples of their own, and the processes of a row hold each sequence in parts. Rank r stands in row
    r // sequence, at place r % sequence: neighbours in a row are neighbours in `torchrun`, where links are fast. Every
    process holds its part of each sequence, reads from the parts before it, and adds the losses of its own targets.
    Weights and gradients do not depend on the grid, so both are shared among all processes as without it.
    """

    def __init__(self, here: Ranks, sequence: int) -> None:
        if here.world % sequence:
            divisors = ", ".join(str(n) for n in range(1, here.world + 1) if here.world % n == 0)
            rule = f"does not divide the {here.world} processes of this run"
            remedy = f"use one of {divisors}, or start a multiple of {sequence}"
            raise ParameterError("run: sequence", sequence, rule, remedy)
        self.rows, self.places = here.world // sequence, sequence
        self.row, self.place = divmod(here.rank, sequence)
        self.mesh: DeviceMesh | None = None
        if sequence > 1:
            numbers = torch.arange(here.world).view(self.rows, sequence)
            # Groups that a mesh makes by itself have torch's default timeout, not that of the run.
            wait = timedelta(seconds=here.wait_for)
            groups = [dist.new_subgroups_by_enumeration(x.tolist(), timeout=wait)[0] for x in (numbers.T, numbers)]
            axes = ("data", "sequence")
            self.mesh = DeviceMesh.from_group(groups, here.device.type, mesh=numbers, mesh_dim_names=axes)

    def cut(
        self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"]
    ) -> tuple[Int[Tensor, "b part"], Int[Tensor, "b part"], Shard | None]:
        """This process's part of some sequences, and where it lies; parts differ in length by one at most."""
        if self.mesh is None:
            return ids, targets, None
        length = ids.shape[1]
        if length < self.places:
            rule = f"is fewer tokens than the {self.places} processes that share a sequence"
            raise ShapeError("length", length, rule, f"pad it to {self.places}, or lower run.sequence")
        begin, end = (place * length // self.places for place in (self.place, self.place + 1))
        return ids[:, begin:end], targets[:, begin:end], Shard(begin, self.mesh.get_group("sequence"))
