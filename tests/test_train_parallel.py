"""Two processes learn what one does, whether each holds the model or a share of it, and stop and go on together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.errors import ParameterError
from avow.training import checkpoint, load_model, read_config, train
from avow.training.distributed import Ranks, Replicated
from avow.training.loop import Trainer
from avow.training.run_folder import read_log
from tests.helpers.runs import small
from tests.helpers.two import EVEN, KINDS, STOPPED, gradients

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
ALONE = Ranks(0, 1, torch.device("cpu"))
each_kind = pytest.mark.parametrize("kind", KINDS)


def torchrun(folder: Path, *acts: str, stopped: bool = False) -> None:
    """Two processes do what `tests.helpers.two` knows, to their end or to the signal that stops them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.helpers.two",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(folder), *acts], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode != 0) == stopped and ("SignalException" in done.stderr) == stopped, done.stderr[-3000:]


def laid_aside(folder: Path, kind: str) -> None:
    """Check that `folder` holds what a signal at step 6 leaves, and lay a copy of it aside."""
    last = checkpoint.checkpoints(folder / kind / "half" / "checkpoints")[-1]
    # No scheduled save, and the first step after 6 at which processes ask each other whether to stop.
    assert last.name == "step-00000010" and checkpoint.fault(last) is None
    shutil.copytree(folder / kind / "half", folder / kind / "crossed")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes did, of both kinds, and of what one did alone.

    Runs are stopped by what a scheduler sends in one kind, by Ctrl-C in the other. A signal ends torchrun, so the
    acts are three of its runs: to start it costs more than to train.
    """
    folder = tmp_path_factory.mktemp("together")
    train(small(folder, *EVEN), folder / "alone")
    torchrun(folder, "compare", "whole", "stop:replicated:SIGTERM", stopped=True)
    laid_aside(folder, "replicated")
    torchrun(folder, "resume:replicated", "cross:replicated", "stop:sharded:SIGINT", stopped=True)
    laid_aside(folder, "sharded")
    torchrun(folder, "resume:sharded", "cross:sharded")
    return folder


def final(folder: Path) -> checkpoint.Snapshot:
    return checkpoint.load(checkpoint.checkpoints(folder / "checkpoints")[-1])


def assert_same_gradients(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    assert max(float((x - y).abs().max()) for x, y in zip(some, others, strict=True)) < 1e-6


@each_kind
def test_two_processes_have_the_gradients_of_one(together: Path, kind: str) -> None:
    alone = gradients(Trainer(small(together, *EVEN), together / "unused", ALONE))
    found = torch.load(together / f"{kind}.pt")
    assert_same_gradients(found["gradients"], alone)
    with pytest.raises(AssertionError):
        assert_same_gradients(found["wrong"], alone)
    # A mean of means is off by the number of processes, and by nothing else.
    assert_same_gradients([2 * x for x in found["wrong"]], alone)


@each_kind
def test_the_loss_curve_of_two_processes_is_that_of_one(together: Path, kind: str) -> None:
    alone, both = (read_log(path / "log.csv") for path in (together / "alone", together / kind / "even"))
    assert len(alone) == len(both) == 6
    for name in ("step", "loss", "lr", "norm", "held_out_loss"):
        one, two = (np.array([getattr(line, name) for line in lines], dtype=float) for lines in (alone, both))
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=0)
    assert both[0].loss - both[-1].loss > 0.1, "a curve, and no flat line"
    assert both[-1].held_out_loss is not None and both[0].held_out_loss is None


def test_a_process_keeps_its_share_of_weights_and_of_optimiser_state(together: Path) -> None:
    shares = {kind: torch.load(together / f"{kind}.pt")["kept"] for kind in KINDS}
    assert shares["replicated"] == (1.0, 1.0)
    assert all(0.45 < share < 0.55 for share in shares["sharded"])


def test_a_sharded_run_leaves_the_files_of_an_undivided_one(together: Path) -> None:
    one, two = (final(together / kind / "even") for kind in KINDS)
    states = [(entries, two.optimiser["state"][number]) for number, entries in one.optimiser["state"].items()]
    for mine, theirs in ((one.weights, two.weights), *states):
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            y = theirs[name]
            if name.endswith("attention.inward.bias"):
                # A bias of all keys moves no weight: its gradient is rounding, and so is Adam's step by it.
                x, y = (torch.cat([x[:16], x[32:]]) for x in (x, y))
            torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
    assert one.optimiser["param_groups"] == two.optimiser["param_groups"]
    assert one.optimiser["state"].keys() == two.optimiser["state"].keys() != set()


@each_kind
def test_a_model_trained_by_two_answers_alone(together: Path, kind: str) -> None:
    found = torch.load(together / f"{kind}.pt")
    model, _ = load_model(together / kind / "even")
    logits = model(torch.arange(2, 22)[None])
    assert torch.equal(logits, found["logits"]) and torch.equal(logits, found["returned"])
    start = checkpoint.checkpoints(together / kind / "even" / "checkpoints")[0]
    assert not torch.equal(logits, load_model(start)[0](torch.arange(2, 22)[None]))


@each_kind
def test_a_signal_to_torchrun_ends_in_a_checkpoint_from_which_the_same_bits_follow(together: Path, kind: str) -> None:
    whole, half = final(together / kind / "whole"), final(together / kind / "half")
    assert whole.step == half.step == 16
    assert all(torch.equal(x, half.weights[name]) for name, x in whole.weights.items())
    for number, entries in whole.optimiser["state"].items():
        assert all(torch.equal(x, half.optimiser["state"][number][name]) for name, x in entries.items())
    assert all(torch.equal(x, half.generators[name]) for name, x in whole.generators.items())
    files = (together / kind / name / "log.csv" for name in ("whole", "half"))
    logs = [[(line.step, line.loss, line.held_out_loss) for line in read_log(file)] for file in files]
    # Every third step, every fifth, at which a held-out loss is measured, and the last.
    assert logs[0] == logs[1] and [step for step, *_ in logs[0]] == [3, 5, 6, 9, 10, 12, 15, 16]


@each_kind
def test_a_run_goes_on_as_the_other_kind(together: Path, kind: str) -> None:
    whole, crossed = final(together / kind / "whole"), final(together / kind / "crossed")
    assert crossed.step == 16
    for name, x in whole.weights.items():
        torch.testing.assert_close(crossed.weights[name], x, atol=1e-5, rtol=0)


@each_kind
def test_one_process_goes_on_from_what_two_wrote(together: Path, kind: str, tmp_path: Path) -> None:
    config = small(together, *STOPPED, f"run.parallel={kind}")
    # Neither of the two drew what one draws: it begins draws of its own, the same each time.
    ends = []
    for name in ("one", "again"):
        shutil.copytree(together / kind / "whole", tmp_path / name)
        start, last = checkpoint.checkpoints(tmp_path / name / "checkpoints")
        assert checkpoint.described(start)["facts"]["world"] == 2
        shutil.rmtree(last)
        ends.append(train(config, tmp_path / name, resume=True).model.state_dict())
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
    assert not any(torch.equal(x, final(together / kind / "whole").weights[name]) for name, x in ends[0].items())


def test_one_process_shards_nothing_and_trains_alone(tmp_path: Path) -> None:
    ends = []
    for kind in KINDS:
        config = small(tmp_path, "schedule.steps=3", "schedule.warmup=1", f"run.parallel={kind}")
        assert type(Trainer(config, tmp_path / kind, ALONE).placed) is Replicated
        ends.append(train(config, tmp_path / kind).model.state_dict())
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


def test_a_third_kind_is_refused() -> None:
    text = "run: parallel='pipelined' must be one of replicated, sharded; the default is 'replicated'"
    with pytest.raises(ParameterError, match=re.escape(text)):
        read_config(None, ["schedule.steps=3", "run.parallel=pipelined"])
