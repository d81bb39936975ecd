"""A run goes on only from what it was, where all its processes say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from avow.errors import FileError, ParameterError
from avow.training import checkpoint
from avow.training.config import TrainConfig
from avow.training.parallel import Ranks

# What may change when a run is resumed: where and how often, never what is learnt.
FREE = ("device", "compile", "parallel", "sequence", "timeout", "graphs", "save_every", "log_every")


def origin(folder: Path, resume: bool | Path) -> Path | None:
    """The checkpoint to go on from; a folder with a run in it is not begun again by accident."""
    if isinstance(resume, Path):
        return resume
    there = checkpoint.checkpoints(folder)
    if there and not resume:
        raise FileError("run", folder.parent, "holds a run already", "resume it, or train into another folder")
    return there[-1] if there else None


def agree(here: Ranks, step: int, folder: Path) -> None:
    """Raise in all processes where they would go on from different steps; -1 is the beginning."""
    steps = [int(x) for x in here.gathered({"step": torch.tensor([step])}).values()]
    for rank, other in enumerate(steps):
        if other != steps[0]:
            found = [f"step {n}" if n >= 0 else "none" for n in (other, steps[0])]
            rule = f"holds {found[0]} for rank {rank}, and {found[1]} for rank 0"
            raise FileError("checkpoints", folder, rule, "give all processes one folder that all of them see")


def check_same(config: TrainConfig, trained: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Raise where a run would learn something else than the one it goes on from."""
    for section, fields in json.loads(config.to_json()).items():
        for name, value in fields.items():
            before = trained.get(section, {}).get(name)
            if before != value and not (section == "run" and name in FREE):
                rule = f"contradicts {before!r} of the checkpoint {path}"
                raise ParameterError(f"{section}: {name}", repr(value), rule, "resume with what the run began with")
