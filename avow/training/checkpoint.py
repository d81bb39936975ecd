"""All that a run needs to continue, in a folder that is either complete or not there; and the rules of continuing.

A checkpoint is `step-00000100/` with weights, optimiser state and generators as safetensors, the file of its tokenizer
if it has one, and `state.json` with the rest and the digest of every file, its own among them. It is written under
another name, flushed to the disk, and renamed: a crash at any moment leaves the one before, and one that is there is
never written over. Nothing in it is pickled, so nothing in it can run. Processes that hold a model in shards write
shards (`avow.training.sharding`), and everything here reads them as if they were whole.

A run continues only as the run that wrote the checkpoint: of the same folder, configuration and texts. It may be given
more steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from avow import file_io
from avow.errors import FileError, ParameterError
from avow.extras import require
from avow.nn import ModelConfig, build
from avow.parameters import declared
from avow.training.data import Corpus
from avow.training.tokenizer import FileTokenizer, Tokenizer, tokenizer_from

if TYPE_CHECKING:
    from avow.training.config import TrainConfig
    from avow.training.distributed import Ranks

FORMAT = "avow checkpoint 4"
SHARES = f"{FORMAT} in shares"
TENSORS = ("weights", "optimiser", "generators")
TOKENIZER = "tokenizer.json"
# What may change when a run is resumed: where and how often, never what is learnt.
FREE = ("device", "compile", "parallel", "sequence", "timeout", "graphs", "save_every", "log_every", "evaluate_every")
# How long a run is may grow when it is resumed.
LENGTHS = (("schedule", "steps"), ("schedule", "epochs"))


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps; `facts` is what the trainer wants to remember besides, as JSON.

    `tokenizer_file` is the content of the tokenizer's own file, if it has one.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    generators: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    tokenizer_file: str | None = None


def save(snapshot: Snapshot, folder: Path, here: Ranks, sharded: bool = False) -> Path:
    """Write a checkpoint when all processes ask for it, and drop all others but the last; if one fails, all raise."""
    final, temporary = folder / _name(snapshot.step), folder / f".writing-{snapshot.step:08d}"
    tensors = tensors_of(snapshot)

    def begin() -> None:
        if final.exists():
            rule = "is there already, and this run did not write it"
            raise FileError("checkpoint", final, rule, "move it away, or train into another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".writing-*"):  # by a run that was killed
            shutil.rmtree(left)
        temporary.mkdir()

    def write() -> dict[str, str]:
        if sharded:
            # What writes shards takes torch a second to load.
            from avow.training import sharding

            return sharding.write_share(tensors, temporary, here.rank)
        return _write(tensors, temporary) if here.rank == 0 else {}

    def finish() -> None:
        digests = {name: digest for digests in written for name, digest in digests.items()}
        if snapshot.tokenizer_file is not None:
            content = snapshot.tokenizer_file.encode()
            file_io.put(temporary / TOKENIZER, content)
            digests[TOKENIZER] = hashlib.sha256(content).hexdigest()
        state = {
            "format": SHARES if sharded else FORMAT,
            "step": snapshot.step,
            # AdamW keeps tensors alone for each weight, and nothing plain.
            "optimiser": {"param_groups": snapshot.optimiser["param_groups"], "plain": {}},
            "schedule": snapshot.schedule,
            "facts": snapshot.facts,
            "digests": digests,
        }
        file_io.put(temporary / "state.json", json.dumps(sealed(state), indent=1, ensure_ascii=False))
        file_io.settle(temporary, final)
        for old in [path for path in checkpoints(folder) if path != final][:-1]:
            shutil.rmtree(old)

    first = here.rank == 0
    try:
        here.together(lambda: begin() if first else None)
        written = here.together(write)
        here.together(lambda: finish() if first else None)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        good, rule = newest(folder), f"cannot be written ({error.strerror})"
        remedy = f"{file_io.remedy(error)} and {f'resume from {good}' if good else 'start again'}"
        raise FileError("checkpoint", final, rule, remedy) from error
    return final


def _name(step: int) -> str:
    return f"step-{step:08d}"


def tensors_of(snapshot: Snapshot) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a snapshot by kind; those of the optimiser are called `number.entry`."""
    states = snapshot.optimiser["state"].items()
    optimiser = {f"{number}.{name}": x for number, entries in states for name, x in entries.items()}
    return dict(zip(TENSORS, (snapshot.weights, optimiser, snapshot.generators), strict=True))


def _write(tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> dict[str, str]:
    """Write a file for each kind of tensors; the digest of each."""
    require("safetensors", purpose="to save checkpoints", extra="train")
    from safetensors.torch import save as serialized

    digests = {}
    for kind, some in tensors.items():
        # Tied weights share memory, which safetensors refuses: each name gets a copy of its own.
        content = serialized({name: x.detach().cpu().clone().contiguous() for name, x in some.items()})
        digests[f"{kind}.safetensors"] = hashlib.sha256(content).hexdigest()
        file_io.put(folder / f"{kind}.safetensors", content)
    return digests


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as JSON has it, with a digest over all that it says."""
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "digest"}))
    return plain | {"digest": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def load(path: Path, state: Mapping[str, Any] | None = None) -> Snapshot:
    """The snapshot in a checkpoint folder, after every file was checked: by `described`, if its state is given."""
    state = described(path) if state is None else state
    if state["format"] == SHARES:
        from avow.training import sharding

        return snapshot_of(state, *sharding.read(path))
    files = (path / f"{kind}.safetensors" for kind in TENSORS)
    remedy = "resume from another checkpoint"
    return snapshot_of(state, *(file_io.load_tensors(file, "checkpoint", remedy).tensors for file in files))


def snapshot_of(state: Mapping[str, Any], weights: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Snapshot:
    """A snapshot of a `state.json` and the tensors it speaks of, in the order of `TENSORS`."""
    flat, generators = others
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = value
    # JSON has no tuples, and AdamW's betas are one.
    groups = [group | {"betas": tuple(group["betas"])} for group in state["optimiser"]["param_groups"]]
    optimiser = {"state": states, "param_groups": groups}
    return Snapshot(state["step"], weights, optimiser, state["schedule"], generators, state["facts"])


def restore_weights(model: nn.Module, snapshot: Snapshot, path: Path) -> None:
    """Put a snapshot's weights into a model of the same architecture; of another, say how they differ."""
    check_architecture(model, {name: tuple(x.shape) for name, x in snapshot.weights.items()}, path)
    model.load_state_dict(dict(snapshot.weights))


def check_architecture(model: nn.Module, other: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise if the shapes of a checkpoint's weights are not those of such a model."""
    own = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            rule = f"is of another architecture: {name} is here {own.get(name, 'absent')}"
            rule += f", there {other.get(name, 'absent')}"
            raise FileError("checkpoint", path, rule, "use the model configuration it was trained with")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, good or damaged."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest(folder: Path, before: Path | None = None) -> Path | None:
    """The last good checkpoint of a run, or the last one before another."""
    paths = [path for path in checkpoints(folder) if before is None or path.name < before.name]
    return next((path for path in reversed(paths) if fault(path) is None), None)


def described(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, after every file was checked; its tensors stay where they are."""
    state = _checked_state(path)
    if not isinstance(state, str):
        return state
    good = newest(path.parent, path)
    remedy = f"resume from the previous good one, {good}" if good else "there is no previous good one; start again"
    raise FileError("checkpoint", path, state, remedy)


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is good."""
    state = _checked_state(path)
    return state if isinstance(state, str) else None


def _checked_state(path: Path) -> dict[str, Any] | str:
    """The state of a checkpoint of which every file is what was written; else what is wrong with it."""
    try:
        state = json.loads(file_io.read_document(path / "state.json"))
    except FileNotFoundError:
        return "holds no state.json" if path.exists() else "does not exist"
    except (OSError, ValueError, RecursionError):
        return "has a state.json that cannot be read"
    if not isinstance(state, dict) or state.get("format") not in (FORMAT, SHARES):
        kind = str(state.get("format")) if isinstance(state, dict) else ""
        other = kind.startswith(FORMAT.rstrip("0123456789"))
        return f"is an {kind!r}, and this version reads {FORMAT!r}" if other else f"is not an {FORMAT!r}"
    if state.get("digest") != sealed(state)["digest"]:
        return "is damaged: state.json is not what was written"
    if path.name.startswith("step-") and path.name != _name(state["step"]):
        return f"holds step {state['step']} under another's name"
    # Every file beside shards would be read with them.
    present = {file.name for file in path.glob("*.safetensors")} if state["format"] == SHARES else set()
    present |= {f"{x}.safetensors" for x in TENSORS} if state["format"] == FORMAT else set()
    for name in sorted(present | state["digests"].keys()):
        with contextlib.suppress(OSError):
            if hashlib.sha256((path / name).read_bytes()).hexdigest() == state["digests"].get(name):
                continue
        return f"is damaged: {name} is not what was written"
    return state


def generators() -> dict[str, Tensor]:
    """The states of torch's own generators, of the CPU and of the current GPU."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Draw from where `generators` was called."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@declared()
def load_model(path: str | Path) -> tuple[nn.Module, Tokenizer]:
    """The model in evaluation mode, and its tokenizer: of a checkpoint, or of the last one of a run's folder.

    Args:
        path: a checkpoint, or the folder of a run.

    Returns:
        The model and its tokenizer.

    Raises:
        FileError: the file is missing, damaged, or not a checkpoint.
    """
    path = last_of(path)
    snapshot = load(path)
    model = build(ModelConfig.of(snapshot.facts["config"]["model"]))
    restore_weights(model, snapshot, path)
    return model.eval(), load_tokenizer(path, snapshot.facts)


def load_tokenizer(path: Path, facts: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint that was checked, of which these are the facts."""
    plain = facts["tokenizer"]
    content = (path / TOKENIZER).read_text(encoding="utf-8") if plain["kind"] == FileTokenizer.kind else None
    return tokenizer_from(plain, content)


def last_of(path: str | Path) -> Path:
    """The checkpoint that a path means, good or damaged: itself, or the last one of a run's folder."""
    path = Path(path)
    if (path / "checkpoints").is_dir():
        if not (paths := checkpoints(path / "checkpoints")):
            raise FileError("run", path, "has no checkpoint yet", "train it first")
        return paths[-1]
    if not (path / "state.json").exists() and not path.name.startswith("step-"):
        rule = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
        raise FileError("run", path, rule, "give the folder of a run, or one of its checkpoints")
    return path


def resume_point(
    config: TrainConfig, corpus: Corpus, folder: Path, resume: bool | Path, here: Ranks
) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that a run of `folder` continues from, if any, and its state, if all processes agree on it.

    A folder with a run in it is not begun again by accident. Beside it there may be no checkpoint of another run, nor a
    later one that is good; later ones that are damaged are renamed.
    """
    paths = checkpoints(folder)
    if paths and not resume:
        remedy = "continue it with --resume (resume=True in Python), or train into another folder"
        raise FileError("run", folder.parent, "holds a run already", remedy)
    path = resume if isinstance(resume, Path) else paths[-1] if paths else None
    state = {} if path is None else described(path)
    check_same(here, corpus.digest, config.data.sources, state.get("step", -1), folder)
    if path is None:
        return None, state
    check_same_run(config, state["facts"], corpus, path, folder)
    others = [other for other in checkpoints(path.parent) if other.name != path.name]
    for other in others:
        if isinstance(beside := _checked_state(other), str):
            continue
        if beside["facts"]["run"] != state["facts"]["run"]:
            raise FileError("checkpoint", other, f"is of another run than {path}", "move it away, then resume")
        if other.name > path.name:
            rule = f"is later than {path}, and the run would go on as if it were not there"
            raise FileError("checkpoint", other, rule, "resume from that one, or move it away first")
    for damaged in [other for other in others if here.rank == 0 and other.name > path.name]:
        aside = damaged.with_name(f"damaged-{damaged.name}")
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
    return path, state


def check_same(here: Ranks, digest: str, sources: Sequence[str], step: int, folder: Path) -> None:
    """Raise in all processes if they would read different texts or continue from different steps; -1: the beginning."""
    (first_digest, first_step), *others = here.gathered((digest, step))
    for rank, (other_digest, other_step) in enumerate(others, 1):
        if other_digest != first_digest:
            rule = f"holds other texts for rank {rank} than for rank 0"
            raise FileError("data", ", ".join(sources), rule, "give all processes the same texts")
        if other_step != first_step:
            theirs, first = (f"step {n}" if n >= 0 else "none" for n in (other_step, first_step))
            rule = f"holds {theirs} for rank {rank}, and {first} for rank 0"
            raise FileError("checkpoints", folder, rule, "give all processes one folder that all of them see")


def check_same_run(config: TrainConfig, facts: Mapping[str, Any], corpus: Corpus, path: Path, folder: Path) -> None:
    """Raise if a run of `folder` would be another one than that which wrote the checkpoint it continues from."""
    changes = differences(config, facts["config"])
    if path.resolve().parent != folder.resolve():
        rule = f"is of another run, {path.parent.parent}, than {folder.parent}"
        for section, name, before, value in changes[:1]:
            rule += f": {section}.{name} is {before!r} there and {value!r} here"
        remedy = f"resume {path.parent.parent}, or begin a new run with its weights: run.start={path}"
        raise FileError("checkpoint", path, rule, remedy)
    for section, name, before, value in changes:
        # Whether it is longer now is known when the data is counted: see `check_longer`.
        if (section, name) not in LENGTHS:
            rule = f"contradicts {before!r} of the checkpoint {path}"
            raise ParameterError(f"{section}: {name}", repr(value), rule, "resume with what the run began with")
    if facts["data"] != corpus.digest:
        rule = f"holds other texts than those that the run of {path} reads"
        remedy = f"put those back, or begin a new run with its weights: run.start={path}"
        raise FileError("data", ", ".join(config.data.sources), rule, remedy)


def check_longer(steps: int, before: int, path: Path) -> None:
    """Raise if a run that has `before` steps by its checkpoint is given fewer."""
    if steps < before:
        rule = f"is fewer steps than the {before:,} of the checkpoint {path}"
        raise ParameterError("schedule: steps", steps, rule, f"resume with {before:,} steps or more")


def differences(config: TrainConfig, trained: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Any, Any]]:
    """Where a configuration would learn something else: section, field, the value before and the value now.

    A run of an earlier version knew nothing of later fields, whose defaults change nothing.
    """
    return [
        (section, field.name, before, value)
        for section, fields in config.plain().items()
        for field in dataclasses.fields(getattr(config, section))
        if (value := fields[field.name]) != (before := trained.get(section, {}).get(field.name, field.default))
        and not (section == "run" and field.name in FREE)
    ]
