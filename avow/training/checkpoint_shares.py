"""Checkpoints in shares: each process writes and reads its own part, and any number of them reads what others wrote.

`torch.distributed.checkpoint` plans who writes what; the files are safetensors, whose headers say where in the whole a
part belongs. The folder gets its name when every process has written its file and the first has noted their digests:
what one process could not finish is no checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from avow import file_io
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot
from avow.training.parallel import Ranks

# What the name of a tensor begins with, in shares; a whole checkpoint has a file for each.
_KINDS = tuple(f"{kind}." for kind in checkpoint.TENSORS)


class Parts(NamedTuple):
    """The tensors of a checkpoint by name, those of the optimiser as `number.entry`, of generators as `kind.rank`."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    generators: dict[str, Tensor]


def save(snapshot: Snapshot, folder: Path, here: Ranks) -> Path:
    """Write a checkpoint of which each process holds a share; all of them must ask, and all raise where one cannot."""
    final = checkpoint.final_of(folder, snapshot.step)
    if here.any(here.rank == 0 and final.exists()):
        checkpoint.check_absent(final)
    # What all processes hold is written by one of them; of the generators each writes its own, and so has a file.
    own = {name: x for name, x in snapshot.generators.items() if name.endswith(f".{here.rank}")}
    parts = Parts(dict(snapshot.weights), checkpoint.flattened(snapshot.optimiser)[0], own)
    temporary = checkpoint.unfinished(folder, snapshot.step)
    with checkpoint.failing_well(folder, snapshot.step):
        _together(here, lambda: checkpoint.begin(folder, snapshot.step) if here.rank == 0 else None)
        digest = _together(here, lambda: _written(parts, temporary, here.rank))
        everyone = here.gathered({"digest": torch.frombuffer(bytearray(digest), dtype=torch.uint8)})
        digests = {_file(rank): everyone[f"digest.{rank}"].numpy().tobytes().hex() for rank in range(here.world)}
        last = checkpoint.SHARES, digests
        _together(here, lambda: checkpoint.finish(snapshot, folder, *last) if here.rank == 0 else None)
    return final


def read(path: Path) -> Parts:
    """All tensors of a checkpoint in shares, undivided."""
    reader = _reader(path)
    flat = {name: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in _contents(reader).items()}
    _fill(flat, reader)
    return Parts(*({name.removeprefix(k): x for name, x in flat.items() if name.startswith(k)} for k in _KINDS))


def load_into(model: nn.Module, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
    """Put into a model and its optimiser what this process holds of a checkpoint in shares; it reads no more of it.

    `state` is its `state.json`. The snapshot returned has the generators, but no weights: those are where they belong.
    """
    reader = _reader(path)
    contents = _contents(reader)
    there = {name: tuple(about.size) for name, about in contents.items()}
    for_weights, for_optimiser, for_generators = _KINDS
    shapes = {name.removeprefix(for_weights): size for name, size in there.items() if name.startswith(for_weights)}
    checkpoint.check_architecture(model, shapes, path)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    weights = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    flat = {f"{for_weights}{name}": x for name, x in weights.items()}
    for name, about in contents.items():
        if name.startswith(for_optimiser):
            # What is kept of a parameter lies as the parameter does; the rest are counts, which all processes hold.
            of = parameters[int(name.removeprefix(for_optimiser).partition(".")[0])]
            same = about.size == of.shape
            flat[name] = torch.zeros_like(of, requires_grad=False) if same else torch.zeros(about.size)
        elif name.startswith(for_generators):
            flat[name] = torch.zeros(about.size, dtype=about.properties.dtype)
    _fill(flat, reader)
    model.load_state_dict(weights)
    kept = {name.removeprefix(for_optimiser): x for name, x in flat.items() if name.startswith(for_optimiser)}
    draws = {name.removeprefix(for_generators): x for name, x in flat.items() if name.startswith(for_generators)}
    found = checkpoint.snapshot_of(state, {}, kept, draws)
    optimiser.load_state_dict(dict(found.optimiser))
    return found


def _written(parts: Parts, folder: Path, rank: int) -> bytes:
    """The digest of this process's file, when it is written."""
    flat = {f"{kind}{name}": x for kind, some in zip(_KINDS, parts, strict=True) for name, x in some.items()}
    try:
        state_dict_saver.save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        found = next(iter(error.failures.values()))[0]
        # torch's own is no Exception, and would pass by all who handle one.
        raise (
            OSError(found.errno, found.strerror) if isinstance(found, OSError) else RuntimeError(str(found))
        ) from found
    return hashlib.sha256((folder / _file(rank)).read_bytes()).digest()


def _together(here: Ranks, act: Callable[[], Any]) -> Any:
    """What comes of it here; where it fails in some process, all of them raise."""
    found, problem = None, None
    try:
        found = act()
    except OSError as one:
        problem = one
    code = 0 if problem is None else problem.errno or errno.EIO
    codes = here.gathered({"errno": torch.tensor([code])})
    for failed in map(int, codes.values()):
        if failed:
            raise problem or OSError(failed, f"{os.strerror(failed)}, in another process")
    return found


def _file(rank: int) -> str:
    """The name that torch gives to the file of a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def _reader(path: Path) -> HuggingFaceStorageReader:
    """What reads the shares of a checkpoint, whose headers are not longer than they may be."""
    for file in sorted(path.glob("*.safetensors")):
        file_io.check_header(file, "checkpoint", "resume from another checkpoint")
    return HuggingFaceStorageReader(str(path))


def _contents(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    about = reader.read_metadata().state_dict_metadata
    return {name: one for name, one in about.items() if isinstance(one, TensorStorageMetadata)}


def _fill(flat: dict[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    """Read into some tensors, divided or not, what a checkpoint has under their names."""
    with warnings.catch_warnings():
        # Nothing is agreed upon between processes, and that is meant: each reads what it needs.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(flat, storage_reader=reader, no_dist=True)
