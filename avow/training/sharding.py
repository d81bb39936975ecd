"""A model sharded over processes: each holds a share of every weight and of its optimiser's state, and writes that.

To those who read a checkpoint it does not matter: names, shapes and numbers are those of an undivided model, and any
number of processes reads what others wrote. `torch.distributed.checkpoint` plans who writes what; the files are
safetensors, whose headers say where in the whole a part belongs. The folder gets its name when every process has
written its file and the first has noted their digests: what one process could not finish is not a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from avow import file_io
from avow.nn import build
from avow.nn.perceiver import Crossing
from avow.nn.transformer import Block
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot
from avow.training.distributed import Ranks, Replicated

_T = TypeVar("_T")


class Sharded(Replicated):
    """A model of which every process holds a share; the weights of a block are whole while it computes, and no longer.

    Gradients are averaged as those of a replicated model are, and each process keeps those of its share.
    """

    def __init__(self, model: nn.Module, here: Ranks) -> None:
        super().__init__(model, here)
        mesh = init_device_mesh(here.device.type, (here.world,))
        for module in model.modules():
            if isinstance(module, Block | Crossing):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    @contextmanager
    def gradient_sync(self, now: bool) -> Iterator[None]:
        cast(FSDPModule, self.model).set_requires_gradient_sync(now)
        yield

    def clip_gradients(self, longest: float) -> Tensor:
        # Each process knows the length of its share; the sum of their squares is what everyone must clip by.
        return cast(DTensor, super().clip_gradients(longest)).full_tensor()

    def save(self, snapshot: Snapshot, folder: Path) -> Path:
        return save(snapshot, folder, self._here)

    def restore(self, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
        if state["format"] == checkpoint.SHARES:
            return load_into(self.model, optimiser, state, path)
        snapshot = checkpoint.read(path, state)
        self._scatter(optimiser, snapshot, path)
        return snapshot

    def _scatter(self, optimiser: Optimizer, snapshot: Snapshot, path: Path) -> None:
        """Take this process's share of a snapshot that is whole."""
        checkpoint.check_architecture(self.model, {name: tuple(x.shape) for name, x in snapshot.weights.items()}, path)
        options = states.StateDictOptions(full_state_dict=True)
        # Tensors are scattered one by one, so all processes must take them in the same order; files have none.
        weights: dict[str, Any] = {name: snapshot.weights[name] for name in sorted(snapshot.weights)}
        states.set_model_state_dict(self.model, weights, options=options)
        saved: Any = snapshot.optimiser
        if not saved["state"]:
            return  # Before the first step there is none, and the schedule brings the rate.
        known = {id(p): name for name, p in self.model.named_parameters()}
        names = [[known[id(p)] for p in group["params"]] for group in optimiser.param_groups]
        flat = list(chain(*names))
        by_name: dict[str, Any] = {
            "state": {flat[number]: dict(sorted(entry.items())) for number, entry in sorted(saved["state"].items())},
            "param_groups": [group | {"params": own} for group, own in zip(saved["param_groups"], names, strict=True)],
        }
        states.set_optimizer_state_dict(self.model, optimiser, by_name, options=options)

    def full_model(self, path: Path) -> nn.Module:
        whole = build(cast(Any, self.model).config)
        checkpoint.restore_weights(whole, checkpoint.load(path), path)
        return whole.to(self._here.device).train(self.model.training)


def save(snapshot: Snapshot, folder: Path, here: Ranks) -> Path:
    """Write a checkpoint of which each process holds a share; all of them must ask, and all raise if one cannot."""
    final = checkpoint.final_of(folder, snapshot.step)
    if here.any(here.rank == 0 and final.exists()):
        checkpoint.check_absent(final)
    # What all processes hold is written by one of them; of the generators each writes its own, and so has a file.
    own = {name: x for name, x in snapshot.generators.items() if name.endswith(f".{here.rank}")}
    parts = zip(checkpoint.TENSORS, (snapshot.weights, checkpoint.flattened(snapshot.optimiser)[0], own), strict=True)
    flat = {f"{kind}.{name}": x for kind, tensors in parts for name, x in tensors.items()}
    temporary = checkpoint.unfinished_of(folder, snapshot.step)
    with checkpoint.removing_unfinished(folder, snapshot.step):
        _together(here, lambda: checkpoint.begin(folder, snapshot.step) if here.rank == 0 else None)
        digest = _together(here, lambda: _write_share(flat, temporary, here.rank))
        everyone = here.gathered({"digest": torch.frombuffer(bytearray(digest), dtype=torch.uint8)})
        digests = {_file(rank): everyone[f"digest.{rank}"].numpy().tobytes().hex() for rank in range(here.world)}
        last = checkpoint.SHARES, digests
        _together(here, lambda: checkpoint.finish(snapshot, folder, *last) if here.rank == 0 else None)
    return final


def read(path: Path) -> list[dict[str, Tensor]]:
    """All tensors of a sharded checkpoint, undivided: weights, optimiser (`number.entry`), generators (`kind.rank`)."""
    reader = _reader(path)
    flat = {name: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in _contents(reader).items()}
    _fill(flat, reader)
    return [_of_kind(flat, kind) for kind in checkpoint.TENSORS]


def load_into(model: nn.Module, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
    """Put into a model and its optimiser what this process holds of a sharded checkpoint; it reads no more of it.

    `state` is its `state.json`. The snapshot returned has the generators, but no weights: those are where they belong.
    """
    reader = _reader(path)
    contents = _contents(reader)
    shapes = {name: tuple(about.size) for name, about in _of_kind(contents, "weights").items()}
    checkpoint.check_architecture(model, shapes, path)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    flat = {f"weights.{name}": torch.zeros_like(x) for name, x in model.state_dict().items()}
    for name, about in contents.items():
        kind, _, rest = name.partition(".")
        if kind == "optimiser":
            # What is kept of a parameter lies as the parameter does; the rest are counts, which all processes hold.
            of = parameters[int(rest.partition(".")[0])]
            same = about.size == of.shape
            flat[name] = torch.zeros_like(of, requires_grad=False) if same else torch.zeros(about.size)
        elif kind == "generators":
            flat[name] = torch.zeros(about.size, dtype=about.properties.dtype)
    _fill(flat, reader)
    model.load_state_dict(_of_kind(flat, "weights"))
    snapshot = checkpoint.snapshot_of(state, {}, _of_kind(flat, "optimiser"), _of_kind(flat, "generators"))
    optimiser.load_state_dict(dict(snapshot.optimiser))
    return snapshot


def _write_share(flat: dict[str, Tensor], folder: Path, rank: int) -> bytes:
    """The digest of this process's file, when it is written."""
    try:
        state_dict_saver.save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        # torch's own is not an Exception, and no handler of those would see it.
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror) from cause
        raise RuntimeError(str(cause)) from cause
    return hashlib.sha256((folder / _file(rank)).read_bytes()).digest()


def _together(here: Ranks, act: Callable[[], _T]) -> _T:
    """What `act` returns here; if it fails in some process, all of them raise."""
    result, failure = None, None
    try:
        result = act()
    except OSError as error:
        failure = error
    code = 0 if failure is None else failure.errno or errno.EIO
    for other in map(int, here.gathered({"errno": torch.tensor([code])}).values()):
        if other:
            raise failure or OSError(other, f"{os.strerror(other)}, in another process")
    return cast(_T, result)


def _file(rank: int) -> str:
    """The name that torch gives to the file of a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def _reader(path: Path) -> HuggingFaceStorageReader:
    """What reads the shards of a checkpoint, whose headers are not longer than they may be."""
    for file in sorted(path.glob("*.safetensors")):
        file_io.check_header(file, "checkpoint", "resume from another checkpoint")
    return HuggingFaceStorageReader(str(path))


def _contents(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    about = reader.read_metadata().state_dict_metadata
    return {name: one for name, one in about.items() if isinstance(one, TensorStorageMetadata)}


def _of_kind(flat: Mapping[str, _T], kind: str) -> dict[str, _T]:
    """The entries whose names begin with a kind, without it."""
    return {name.removeprefix(f"{kind}."): x for name, x in flat.items() if name.startswith(f"{kind}.")}


def _fill(flat: dict[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    """Read into some tensors, divided or not, what a checkpoint has under their names."""
    with warnings.catch_warnings():
        # Processes agree on nothing here, on purpose: each reads what it needs.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(flat, storage_reader=reader, no_dist=True)
