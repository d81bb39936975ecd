"""Damaged runs resumed: they end in the bits of one that nothing happened to, or are refused by the name of a file."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from avow.errors import AvowError
from avow.training import checkpoint, load_model, train
from tests.helpers.runs import small
from tests.soak.damage import bytes_of, plain_of
from tests.soak.turns import Case, Found, Wrong, tried


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Copies of one run, two steps before its end."""
    config = small(folder)
    whole = train(config, folder / "whole")
    right = checkpoint.load(whole.checkpoint)
    before, last = checkpoint.checkpoints(folder / "whole" / "checkpoints")
    tokens = torch.arange(2, 8)[None]
    shutil.copytree(folder / "whole", folder / "begun")
    shutil.rmtree(folder / "begun" / "checkpoints" / last.name)
    log = (folder / "whole" / "log.csv").read_text()

    def case(seed: int) -> Found:
        rng, run = random.Random(seed), folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "begun", run)
        what = damage(rng, run, folder)
        asked = rng.choice((True, run / "checkpoints" / before.name))
        done = tried(lambda: train(config, run, resume=asked))
        if isinstance(done, AvowError):
            _check_named(done, run)
            return Found(f"{what}: refused")
        got = checkpoint.load(done.checkpoint)
        same = all(torch.equal(x, got.weights[name]) for name, x in right.weights.items())
        if not same or got.step != right.step or got.facts != right.facts or got.schedule != right.schedule:
            raise Wrong(f"{what}: the run went on otherwise")
        if json.dumps(got.optimiser["param_groups"]) != json.dumps(right.optimiser["param_groups"]):
            raise Wrong(f"{what}: the optimiser went on otherwise")
        there = (run / "log.csv").read_text().splitlines()
        if "log.csv" not in what and [line.split(",")[:2] for line in there] != [
            line.split(",")[:2] for line in log.splitlines()
        ]:
            raise Wrong(f"{what}: the log is another")
        return Found(f"{what}: went on")

    def asked_of(seed: int) -> Found:
        """The model of a damaged run: the one it was, or a refusal."""
        rng, run = random.Random(seed), folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "whole", run)
        what = damage(rng, run, folder)
        found = tried(lambda: load_model(run))
        if isinstance(found, AvowError):
            _check_named(found, run)
            return Found(f"{what}: no model")
        kept = {name for name, x in found[0].state_dict().items() if torch.equal(x, right.weights[name])}
        if what != "foreign" and kept != set(right.weights):
            older = checkpoint.checkpoints(run / "checkpoints")
            if [path.name for path in older] == [before.name, last.name]:
                raise Wrong(f"{what}: other weights were loaded")
        found[0](tokens)
        return Found(f"{what}: a model")

    yield lambda seed: case(seed) if seed % 3 else asked_of(seed)


def damage(rng: random.Random, run: Path, folder: Path) -> str:
    """Spoil a file of a run; what was spoilt."""
    there = sorted(path for path in run.rglob("*") if path.is_file())
    path = rng.choice([*there, *(file for file in there if file.name == "state.json")])
    kind = rng.randrange(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        other = rng.choice(there)
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        if other.parent != path.parent or other.name == "state.json":
            return f"{other.name} for {path.name}"
        return f"{path.name} for {other.name}"
    elif kind == 2 and path.suffix == ".json":
        changed = plain_of(rng, json.loads(path.read_text()))
        path.write_text(json.dumps(changed, indent=1, ensure_ascii=False))
    elif kind == 3:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(bytes_of(rng, path.read_bytes()))
    return path.name


def _check_named(refusal: AvowError, run: Path) -> None:
    if str(run) not in str(refusal):
        raise Wrong(f"a refusal that names no file of the run: {refusal}")
