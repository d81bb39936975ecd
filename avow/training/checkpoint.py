"""All that a run needs to go on, in a folder that is either whole or not there.

A checkpoint is `step-00000100/` with weights, optimiser state and generators as safetensors, and `state.json` with
the rest and the digest of every file, its own among them. It is written under another name, flushed to the disk, and
renamed: a crash at any moment leaves the one before, and one that is there is never written over. Nothing in it is
pickled, so nothing in it can run. Processes that hold a model in shares write shares
(`avow.training.checkpoint_shares`), and everything here reads them as if they were whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from avow import file_io
from avow.errors import FileError

FORMAT = "avow checkpoint 3"
SHARES = f"{FORMAT} in shares"
TENSORS = ("weights", "optimiser", "generators")


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps; `facts` is what the trainer wants to remember besides, as JSON."""

    step: int
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    generators: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save(snapshot: Snapshot, folder: Path) -> Path:
    """Write a checkpoint among those of a run, and drop all others but the last."""
    final = final_of(folder, snapshot.step)
    check_absent(final)
    with failing_well(folder, snapshot.step):
        temporary = begin(folder, snapshot.step)
        flat, _ = flattened(snapshot.optimiser)
        digests = {}
        for name, tensors in zip(TENSORS, (snapshot.weights, flat, snapshot.generators), strict=True):
            # Tied weights share memory, which safetensors refuses: each name gets a copy of its own.
            content = safetensors.torch.save({key: x.detach().cpu().clone().contiguous() for key, x in tensors.items()})
            digests[f"{name}.safetensors"] = hashlib.sha256(content).hexdigest()
            file_io.put(temporary / f"{name}.safetensors", content)
        finish(snapshot, folder, FORMAT, digests)
    return final


def final_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands when it is whole."""
    return folder / f"step-{step:08d}"


def check_absent(final: Path) -> None:
    """Raise where a checkpoint of that step is there already: it is not the one to be written."""
    if final.exists():
        rule = "is there already, and this run did not write it"
        raise FileError("checkpoint", final, rule, "move it away, or train into another folder")


def unfinished(folder: Path, step: int) -> Path:
    """Where it is written before."""
    return folder / f".writing-{step:08d}"


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; what a killed run left is swept."""
    temporary = unfinished(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left)
    temporary.mkdir()
    return temporary


def finish(snapshot: Snapshot, folder: Path, kind: str, digests: Mapping[str, str]) -> None:
    """Give a checkpoint whose tensors are written its `state.json` and its name, and drop all others but the last."""
    temporary, final = unfinished(folder, snapshot.step), final_of(folder, snapshot.step)
    state = {
        "format": kind,
        "step": snapshot.step,
        "optimiser": flattened(snapshot.optimiser)[1],
        "schedule": snapshot.schedule,
        "facts": snapshot.facts,
        "digests": dict(digests),
    }
    file_io.put(temporary / "state.json", json.dumps(sealed(state), indent=1, ensure_ascii=False))
    file_io.settle(temporary, final)
    for old in [path for path in checkpoints(folder) if path != final][:-1]:
        shutil.rmtree(old)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as JSON has it, with a digest over all that it says."""
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "digest"}))
    return plain | {"digest": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


@contextlib.contextmanager
def failing_well(folder: Path, step: int) -> Iterator[None]:
    """Where a checkpoint cannot be written, leave nothing of it, and say what is left."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(unfinished(folder, step), ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        kept, rule = newest(folder), f"cannot be written ({error.strerror})"
        remedy = f"{file_io.remedy(error)} and {f'resume from {kept}' if kept else 'start again'}"
        raise FileError("checkpoint", final_of(folder, step), rule, remedy) from error


def load(path: Path) -> Snapshot:
    """The snapshot in a checkpoint folder, after every file was found whole."""
    return read(path, described(path))


def read(path: Path, state: Mapping[str, Any]) -> Snapshot:
    """The same where `described` found the files whole, and gave their state."""
    if state["format"] == SHARES:
        # What reads shares takes torch a second to load.
        from avow.training import checkpoint_shares

        weights, flat, generators = checkpoint_shares.read(path)
    else:
        weights, flat, generators = (
            file_io.load_tensors(path / f"{x}.safetensors", "checkpoint", _instead(path)).tensors for x in TENSORS
        )
    return snapshot_of(state, weights, flat, generators)


def described(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, after every file was found whole; its tensors stay where they are."""
    try:
        return _whole(path)
    except _Fault as wrong:
        raise FileError("checkpoint", path, str(wrong), _instead(path)) from None


def facts(path: Path) -> dict[str, Any]:
    """What the trainer noted in a checkpoint, without reading its tensors into memory."""
    return dict(described(path)["facts"])


def snapshot_of(
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    flat: Mapping[str, Tensor],
    generators: Mapping[str, Tensor],
) -> Snapshot:
    """A snapshot of a `state.json` and the tensors it speaks of."""
    optimiser = _nested(flat, state["optimiser"])
    return Snapshot(state["step"], weights, optimiser, state["schedule"], generators, state["facts"])


def restore_weights(model: nn.Module, snapshot: Snapshot, path: Path) -> None:
    """Put a snapshot's weights into a model of the same architecture; of another, say how they differ."""
    check_architecture(model, {name: tuple(x.shape) for name, x in snapshot.weights.items()}, path)
    model.load_state_dict(dict(snapshot.weights))


def check_architecture(model: nn.Module, other: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise where the shapes of a checkpoint's weights are not those of such a model."""
    own = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            has = [f"{where} {shapes.get(name, 'absent')}" for where, shapes in (("here", own), ("there", other))]
            rule = f"is of another architecture: {name} is {', '.join(has)}"
            raise FileError("checkpoint", path, rule, "use the model configuration it was trained with")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest(folder: Path) -> Path | None:
    """The last checkpoint of a run that is whole."""
    return next((path for path in reversed(checkpoints(folder)) if fault(path) is None), None)


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None where it is whole."""
    try:
        _whole(path)
    except _Fault as wrong:
        return str(wrong)
    return None


class _Fault(Exception):
    """What is wrong with a checkpoint, in words."""


def _whole(path: Path) -> dict[str, Any]:
    """The state of a checkpoint of which every file is what was written; a fault where one is not."""
    try:
        state = json.loads(file_io.read_document(path / "state.json"))
    except FileNotFoundError:
        raise _Fault("holds no state.json" if path.exists() else "does not exist") from None
    except (OSError, ValueError, RecursionError):
        raise _Fault("has a state.json that cannot be read") from None
    if not isinstance(state, dict) or state.get("format") not in (FORMAT, SHARES):
        kind = str(state.get("format")) if isinstance(state, dict) else ""
        other = kind.startswith(FORMAT.rstrip("0123456789"))
        raise _Fault(f"is an {kind!r}, and this version reads {FORMAT!r}" if other else f"is no {FORMAT!r}")
    if state.get("digest") != sealed(state)["digest"]:
        raise _Fault("is damaged: state.json is not what was written")
    if path.name.startswith("step-") and path.name != final_of(path.parent, state["step"]).name:
        raise _Fault(f"holds step {state['step']} under another's name")
    whole = [f"{x}.safetensors" for x in TENSORS]
    # Whatever lies beside shares would be read with them.
    there = {file.name for file in path.glob("*.safetensors")} | state["digests"].keys()
    for name in whole if state["format"] == FORMAT else sorted(there):
        with contextlib.suppress(OSError):
            if hashlib.sha256((path / name).read_bytes()).hexdigest() == state["digests"].get(name):
                continue
        raise _Fault(f"is damaged: {name} is not what was written")
    return state


def _instead(path: Path) -> str:
    others = [other for other in checkpoints(path.parent) if other.name < path.name and fault(other) is None]
    return (
        f"resume from the previous good one, {others[-1]}" if others else "there is no previous good one; start again"
    )


def flattened(optimiser: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, entries in optimiser["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            else:
                plain.setdefault(str(number), {})[name] = value
    return tensors, {"param_groups": optimiser["param_groups"], "plain": plain}


def _nested(flat: Mapping[str, Tensor], described: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    for number, entries in described["plain"].items():
        state.setdefault(int(number), {}).update(entries)
    # JSON has no tuples, and AdamW's betas are one.
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in described["param_groups"]]
    return {"state": state, "param_groups": groups}


def generators() -> dict[str, Tensor]:
    """The states of torch's own generators, of the CPU and of the current GPU."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Go on drawing where `generators` was called."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
