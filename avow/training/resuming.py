"""A run goes on only from what it was, where all its processes say so.

What a run is, its checkpoints say: its number, which nobody else has, its configuration, and the digest of what it
reads. A run goes on from a checkpoint of its own folder, as the run that wrote it, with nothing beyond it left there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from avow.errors import FileError, ParameterError
from avow.training import checkpoint
from avow.training.config import TrainConfig
from avow.training.corpus import Corpus
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


def agree_on_texts(here: Ranks, digest: str, corpus: str) -> None:
    """Raise in all processes where they would read different texts; `digest` is of those that this one has."""
    mine = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
    first, *others = here.gathered({"data": mine}).values()
    for rank, other in enumerate(others, 1):
        if not torch.equal(other, first):
            rule = f"holds other texts for rank {rank} than for rank 0"
            raise FileError("corpus", corpus, rule, "give all processes the same texts")


def check_same(config: TrainConfig, facts: Mapping[str, Any], corpus: Corpus, path: Path, folder: Path) -> None:
    """Raise where a run of `folder` would be another one than that which wrote the checkpoint it goes on from."""
    changes = differences(config, facts["config"])
    if path.resolve().parent != folder.resolve():
        rule = f"is of another run, {path.parent.parent}, than {folder.parent}"
        for section, name, before, value in changes[:1]:
            rule += f": {section}.{name} is {before!r} there and {value!r} here"
        remedy = f"resume {path.parent.parent}, or begin a new run with its weights: run.start={path}"
        raise FileError("checkpoint", path, rule, remedy)
    for section, name, before, value in changes:
        rule = f"contradicts {before!r} of the checkpoint {path}"
        raise ParameterError(f"{section}: {name}", repr(value), rule, "resume with what the run began with")
    if facts["data"] != corpus.digest:
        rule = f"holds other texts than those that the run of {path} reads"
        remedy = f"put those back, or begin a new run with its weights: run.start={path}"
        raise FileError("corpus", config.data.corpus, rule, remedy)


def check_alone(facts: Mapping[str, Any], path: Path) -> None:
    """Raise where beside the checkpoint to go on from stands one of another run, or a later one that is whole."""
    for other in checkpoint.checkpoints(path.parent):
        if other.name == path.name or checkpoint.fault(other) is not None:
            continue
        if checkpoint.facts(other)["run"] != facts["run"]:
            raise FileError("checkpoint", other, f"is of another run than {path}", "move it away, then resume")
        if other.name > path.name:
            rule = f"is later than {path}, and the run would go on as if it were not there"
            raise FileError("checkpoint", other, rule, "resume from that one, or move it away first")


def set_aside_later(path: Path) -> None:
    """Give damaged checkpoints that were passed over, to go on from an earlier one, a name that no resuming takes."""
    for other in checkpoint.checkpoints(path.parent):
        if other.name > path.name:
            aside = other.with_name(f"damaged-{other.name}")
            shutil.rmtree(aside, ignore_errors=True)
            other.rename(aside)


def differences(config: TrainConfig, trained: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Any, Any]]:
    """Where a configuration would learn something else: section, field, the value before and the value now."""
    return [
        (section, name, trained.get(section, {}).get(name), value)
        for section, fields in json.loads(config.to_json()).items()
        for name, value in fields.items()
        if trained.get(section, {}).get(name) != value and not (section == "run" and name in FREE)
    ]
