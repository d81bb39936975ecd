"""A model sharded over processes: each holds a share of every weight and of its optimiser's state, and writes that.

To those who read a checkpoint it does not matter: names, shapes and numbers are those of an undivided model, and any
number of processes reads what others wrote. `torch.distributed.checkpoint` plans who writes what; the files are
safetensors, whose headers say where in the whole a part belongs.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from avow import file_io
from avow.nn import build
from avow.nn.perceiver import Crossing
from avow.nn.transformer import Block
from avow.training import checkpoint
from avow.training.checkpoint import SHARES, TENSORS, Snapshot
from avow.training.distributed import Ranks, Replicated

Named = Mapping[str, Tensor]


class Sharded(Replicated):
    """A model of which every process holds a share; the weights of a block are whole while it computes, and no longer.

    Gradients are averaged as those of a replicated model are, and each process keeps those of its share.
    """

    sharded = True

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

    def restore(self, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
        """Take this process's share of a checkpoint, and of a sharded one read no more; the snapshot has no weights."""
        reader = _reader(path) if state["format"] == SHARES else None
        contents = _contents(reader) if reader else _flat(checkpoint.tensors_of(checkpoint.load(path, state)))
        shapes = {name: tuple(x.shape) for name, x in _of_kind(contents, "weights").items()}
        checkpoint.check_architecture(self.model, shapes, path)
        weights = self.model.state_dict()
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]

        def share(name: str, x: Tensor) -> Tensor:
            """What this process holds of a tensor, or room for it if it is still in the file."""
            kind, number, *_ = name.split(".")
            like = parameters[int(number)] if kind == "optimiser" else weights.get(name.removeprefix("weights."))
            # What is kept of a weight lies as the weight does; the rest are counts, which all processes hold.
            if not isinstance(like, DTensor) or like.shape != x.shape:
                return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x
            if x.is_meta:
                return torch.zeros_like(like, requires_grad=False)
            return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

        flat = {name: share(name, x) for name, x in contents.items()}
        if reader:
            _fill(flat, reader)
        self.model.load_state_dict(_of_kind(flat, "weights"))
        snapshot = checkpoint.snapshot_of(state, {}, _of_kind(flat, "optimiser"), _of_kind(flat, "generators"))
        optimiser.load_state_dict(dict(snapshot.optimiser))
        return snapshot

    def full_model(self, path: Path) -> nn.Module:
        whole = build(cast(Any, self.model).config)
        checkpoint.restore_weights(whole, checkpoint.load(path), path)
        return whole.to(self._here.device).train(self.model.training)


def write_share(tensors: Mapping[str, Named], folder: Path, rank: int) -> dict[str, str]:
    """Write this process's share of a snapshot; the digest of its file. All processes must ask.

    What all of them hold is written by one; of the generators each writes its own, and so has a file.
    """
    own = {name: x for name, x in tensors["generators"].items() if name.endswith(f".{rank}")}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        state_dict_saver.save(_flat({**tensors, "generators": own}), storage_writer=writer)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        # torch's own is not an Exception, and no handler of those would see it.
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror) from cause
        raise RuntimeError(str(cause)) from cause
    name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"  # as torch calls it
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}


def read(path: Path) -> list[dict[str, Tensor]]:
    """All tensors of a sharded checkpoint, undivided: weights, optimiser (`number.entry`), generators (`kind.rank`)."""
    reader = _reader(path)
    flat = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in _contents(reader).items()}
    _fill(flat, reader)
    return [_of_kind(flat, kind) for kind in TENSORS]


def _flat(tensors: Mapping[str, Named]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": x for kind, some in tensors.items() for name, x in some.items()}


def _of_kind(flat: Named, kind: str) -> dict[str, Tensor]:
    """The entries whose names begin with a kind, without it."""
    return {name.removeprefix(f"{kind}."): x for name, x in flat.items() if name.startswith(f"{kind}.")}


def _reader(path: Path) -> HuggingFaceStorageReader:
    """What reads the shards of a checkpoint, whose headers are not longer than they may be."""
    for file in sorted(path.glob("*.safetensors")):
        file_io.check_header(file, "checkpoint", "resume from another checkpoint")
    return HuggingFaceStorageReader(str(path))


def _contents(reader: HuggingFaceStorageReader) -> dict[str, Tensor]:
    """The shapes and types of all tensors, as tensors on the meta device."""
    return {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def _fill(flat: dict[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    """Read into some tensors, divided or not, what a checkpoint has under their names."""
    with warnings.catch_warnings():
        # Processes agree on nothing here, on purpose: each reads what it needs.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(flat, storage_reader=reader, no_dist=True)
