"""A checkpoint is whole or refused, and a failed save leaves the one before."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from avow import file_io
from avow.errors import FileError
from avow.optim import adamw, warmup_cosine
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot, checkpoints, load, newest, restore_weights
from avow.training.distributed import Ranks


def save(taken: Snapshot, folder: Path) -> Path:
    return checkpoint.save(taken, folder, Ranks(0, 1, torch.device("cpu")))


def model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, width), nn.Linear(width, 5))


def snapshot(step: int, module: nn.Module | None = None) -> Snapshot:
    """After one real step of AdamW, so that there is state to keep."""
    module = module or model()
    optimiser = adamw(module, 0.1)
    schedule = warmup_cosine(optimiser, 2, 10)
    module(torch.tensor([1, 2])).square().sum().backward()
    optimiser.step()
    schedule.step()
    return Snapshot(
        step,
        module.state_dict(),
        optimiser.state_dict(),
        schedule.state_dict(),
        checkpoint.generators(),
        {"note": "ñ", "third": 1 / 3},
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    return one == other


def test_everything_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    saved = snapshot(3)
    found = load(save(saved, tmp_path))
    for part in ("step", "weights", "optimiser", "schedule", "generators", "facts"):
        one, other = getattr(saved, part), getattr(found, part)
        assert same(dict(one) if part == "weights" else one, other), part
    assert not same(dict(saved.weights), dict(snapshot(3).weights))


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save(snapshot(3), tmp_path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_tied_weights_are_kept(tmp_path: Path) -> None:
    tied = model(5)
    tied[1].weight = tied[0].weight
    found = load(save(snapshot(1, tied), tmp_path))
    assert torch.equal(found.weights["0.weight"], found.weights["1.weight"])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 30, 4):
        save(snapshot(step), tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000030"]


def spoil_truncate(path: Path) -> None:
    content = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(content[: len(content) // 2])


def spoil_flip(path: Path) -> None:
    content = bytearray((path / "optimiser.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "optimiser.safetensors").write_bytes(content)


def spoil_cut_state(path: Path) -> None:
    (path / "state.json").write_text((path / "state.json").read_text()[:50])


def spoil_foreign(path: Path) -> None:
    (path / "state.json").write_text(json.dumps({"step": 2, "model": {}}))


def spoil_age(path: Path) -> None:
    respell(path, {"format": "avow checkpoint 1"})


def spoil_lose(path: Path) -> None:
    (path / "generators.safetensors").unlink()


def respell(path: Path, changed: dict[str, object]) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changed))


def spoil_unlist(path: Path) -> None:
    respell(path, {"digests": {}})


def spoil_step(path: Path) -> None:
    respell(path, {"step": 3})


def spoil_schedule(path: Path) -> None:
    respell(path, {"schedule": {"last_epoch": 1}})


def spoil_digests(path: Path) -> None:
    respell(path, {"digests": None})


def spoil_name(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_truncate, "is damaged: weights.safetensors is not what was written"),
        (spoil_flip, "is damaged: optimiser.safetensors is not what was written"),
        (spoil_cut_state, "has a state.json that cannot be read"),
        (spoil_foreign, "is not an 'avow checkpoint 4'"),
        (spoil_age, "is an 'avow checkpoint 1', and this version reads 'avow checkpoint 4'"),
        (spoil_lose, "is damaged: generators.safetensors is not what was written"),
        (spoil_unlist, "is damaged: state.json is not what was written"),
        (spoil_step, "is damaged: state.json is not what was written"),
        (spoil_schedule, "is damaged: state.json is not what was written"),
        (spoil_digests, "is damaged: state.json is not what was written"),
        (spoil_name, "holds step 1 under another's name"),
    ],
)
def test_a_damaged_one_is_refused_and_the_previous_good_one_named(tmp_path: Path, spoil, words: str) -> None:  # type: ignore[no-untyped-def]
    good, bad = save(snapshot(1), tmp_path), save(snapshot(2), tmp_path)
    spoil(bad)
    with pytest.raises(FileError, match=re.escape(f"{words}; resume from the previous good one, {good}")):
        load(bad)
    assert newest(tmp_path) == good
    spoil_truncate(good)
    with pytest.raises(FileError, match="there is no previous good one; start again"):
        load(bad)


def test_one_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    other = save(snapshot(2), tmp_path)
    before = dict(load(other).weights)
    words = "step-00000002 is there already, and this run did not write it; move it away, or train into another folder"
    with pytest.raises(FileError, match=re.escape(words)):
        save(snapshot(2), tmp_path)
    assert same(dict(load(other).weights), before) and [path.name for path in tmp_path.iterdir()] == [other.name]
    # A damaged one is no better: who wrote it is not known.
    spoil_truncate(other)
    with pytest.raises(FileError, match=re.escape(words)):
        save(snapshot(2), tmp_path)


def test_the_state_that_was_found_whole_is_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(snapshot(3), tmp_path)
    reading, reads = file_io.read_document, 0

    def once(file: Path) -> str:
        nonlocal reads
        reads += file.name == "state.json"
        return reading(file)

    monkeypatch.setattr(file_io, "read_document", once)
    assert load(path).step == 3 and reads == 1


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load(tmp_path / "step-00000009")


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = save(snapshot(1), tmp_path)
    words = "is of another architecture: 0.weight is here (5, 6), there (5, 4); use the model configuration"
    with pytest.raises(FileError, match=re.escape(words)):
        restore_weights(model(6), load(path), path)
    with pytest.raises(FileError, match=re.escape("0.bias is here (5,), there absent")):
        restore_weights(nn.Sequential(nn.Linear(4, 5)), load(path), path)
    other = model()
    restore_weights(other, load(path), path)
    assert same(dict(other.state_dict()), dict(load(path).weights))


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    good = save(snapshot(1), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to write past this, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(FileError, match=re.escape(f"make room and resume from {good}")):
            save(snapshot(2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(good).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load(save(snapshot(2), tmp_path)).step == 2


def test_ctrl_c_in_a_save_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(snapshot(1), tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(snapshot(2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_a_killed_save_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".writing-00000001").mkdir()
    (tmp_path / ".writing-00000001" / "weights.safetensors").write_bytes(b"half")
    assert newest(tmp_path) is None
    save(snapshot(2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_generators_go_on_where_they_were() -> None:
    states = checkpoint.generators()
    first = torch.rand(3)
    assert not torch.equal(first, torch.rand(3))
    checkpoint.restore_generators(states)
    assert torch.equal(first, torch.rand(3))
