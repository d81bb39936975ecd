"""Processes that hold sequences in parts learn what one does; any number goes on from a checkpoint, none is missed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from avow.errors import FileError, LostRank, ParameterError, ShapeError
from avow.nn.attention import Attention, Shard
from avow.training import checkpoint, distributed, load_model, read_config, train
from avow.training.batches import Batches
from avow.training.distributed import Grid, Heartbeat, Ranks, private_store
from avow.training.run_folder import read_log
from tests.helpers import lose
from tests.helpers.grid import ROTARY, SAME, STEPS
from tests.helpers.runs import small

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what one process, two and four did; to start them costs more than to train."""
    folder = tmp_path_factory.mktemp("grid")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.grid", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    train(small(folder, *SAME), folder / "one")
    train(small(folder, *ROTARY), folder / "one_rotary")
    train(small(folder, *ROTARY), folder / "four_to_one_rotary", resume=True)
    return folder


def curves(folder: Path, name: str) -> dict[str, np.ndarray]:
    lines = read_log(folder / name / "log.csv")
    columns = ("step", "loss", "lr", "norm", "held_out_loss")
    # A line without a held-out loss has none in any of the runs.
    return {column: np.array([getattr(line, column) for line in lines], dtype=float) for column in columns}


def assert_same_curves(folder: Path, name: str) -> None:
    alone, found = (curves(folder, x) for x in ("one_rotary" if name.endswith("rotary") else "one", name))
    for column, values in alone.items():
        np.testing.assert_allclose(found[column], values, atol=1e-5, rtol=0)
    assert len(found["loss"]) == 6 and found["loss"][0] - found["loss"][-1] > 0.1, "a curve, and no flat line"
    assert np.isfinite(found["held_out_loss"]).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("name", ["two", "two_by_two", "four_rotary"])
def test_processes_that_share_sequences_learn_what_one_does(grid: Path, name: str) -> None:
    assert_same_curves(grid, name)


def test_parts_that_forget_where_they_begin_learn_something_else(grid: Path) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_curves(grid, "misplaced")


@pytest.mark.parametrize("name", ["four_to_two_rotary", "four_to_one_rotary"])
def test_fewer_processes_go_on_from_what_four_wrote_in_shares(grid: Path, name: str) -> None:
    start = checkpoint.described(checkpoint.checkpoints(grid / name / "checkpoints")[0])
    assert start["format"] == checkpoint.SHARES and len(start["digests"]) == 4 and start["step"] == 3
    assert_same_curves(grid, name)


def test_a_model_from_shares_is_the_one_that_a_single_process_trained(grid: Path) -> None:
    one, four = (load_model(grid / name)[0].state_dict() for name in ("one_rotary", "four_rotary"))
    assert one.keys() == four.keys()
    for name, x in one.items():
        torch.testing.assert_close(four[name], x, atol=1e-5, rtol=0)


def spoil_lose(path: Path) -> str:
    (path / "shard-00003-model-00001-of-00001.safetensors").unlink()
    return "is damaged: shard-00003-model-00001-of-00001.safetensors is not what was written"


def spoil_cut(path: Path) -> str:
    file = path / "shard-00002-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return "is damaged: shard-00002-model-00001-of-00001.safetensors is not what was written"


def spoil_unfinished(path: Path) -> str:
    (path / "state.json").unlink()
    return "holds no state.json"


def spoil_stranger(path: Path) -> str:
    shutil.copy(path / "shard-00001-model-00001-of-00001.safetensors", path / "shard-00005.safetensors")
    return "is damaged: shard-00005.safetensors is not what was written"


@pytest.mark.parametrize("spoil", [spoil_lose, spoil_cut, spoil_unfinished, spoil_stranger])
def test_part_of_a_checkpoint_is_no_checkpoint(grid: Path, tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    shutil.copytree(grid / "four_rotary", tmp_path / "run")
    good, bad = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    words = spoil(bad)
    with pytest.raises(FileError, match=re.escape(f"{words}; resume from the previous good one, {good}")):
        train(small(grid, *ROTARY), tmp_path / "run", resume=True)
    assert checkpoint.newest(bad.parent) == good


def test_where_one_process_cannot_write_all_are_told_and_nothing_is_left(grid: Path) -> None:
    said = {(grid / f"full.{rank}.txt").read_text() for rank in range(2)}
    path = grid / "full" / "checkpoints"
    words = "cannot be written (File too large); make room and start again"
    assert said == {f"checkpoint={path / 'step-00000000'} {words}"}
    assert list(path.iterdir()) == []


def test_shares_of_another_architecture_are_refused(grid: Path, tmp_path: Path) -> None:
    path = checkpoint.checkpoints(grid / "four_rotary" / "checkpoints")[-1]
    state = json.loads((path / "state.json").read_text())
    state["facts"]["config"]["model"]["layers"] = 3
    shutil.copytree(path, tmp_path / path.name)
    (tmp_path / path.name / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    with pytest.raises(FileError, match=re.escape("is of another architecture: blocks.2.")):
        load_model(tmp_path / path.name)


def test_processes_that_do_not_fill_a_grid_are_all_told(grid: Path) -> None:
    said = {(grid / f"three.{rank}.txt").read_text() for rank in range(4)}
    words = "does not divide the 4 processes of this run; use one of 1, 2, 4, or start a multiple of 3"
    assert said == {f"run: sequence=3 {words}"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["model.block=8", "run.sequence=9"],
            "run: sequence=9 is more processes than the 8 tokens of a sequence, model.",
        ),
        (["model.attention=separable"], "run: sequence=2 needs exact attention to read from the parts of others, and"),
        (
            ["run.compile=true"],
            "run: sequence=2 waits for other processes within a pass, which run.compile=true cannot;",
        ),
        (["run.sequence=0"], "run: sequence=0 must be at least 1"),
        (["run.timeout=0"], "run: timeout=0.0 must be above 0 and at most 86400"),
    ],
)
def test_a_sequence_that_cannot_be_cut_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(words)):
        read_config(None, ["schedule.steps=3", "run.sequence=2", *flags])


def test_processes_that_see_different_checkpoints_do_not_go_on() -> None:
    class Apart(Ranks):
        def gathered(self, value: Any) -> list[Any]:
            return [(value[0], step) for step in (12, 12, -1)]

    words = "checkpoints=runs holds none for rank 2, and step 12 for rank 0; give all processes one folder"
    with pytest.raises(FileError, match=re.escape(words)):
        checkpoint.check_same(Apart(0, 3, torch.device("cpu")), "00ff", ["people"], 12, Path("runs"))


def test_processes_that_would_read_different_texts_are_refused() -> None:
    class Apart(Ranks):
        def gathered(self, value: Any) -> list[Any]:
            return [(digest, value[1]) for digest in ("00ff", "01ff", "00ff")]

    words = "data=people holds other texts for rank 1 than for rank 0; give all processes the same texts"
    with pytest.raises(FileError, match=re.escape(words)):
        checkpoint.check_same(Apart(0, 3, torch.device("cpu")), "00ff", ["people"], -1, Path("runs"))
    checkpoint.check_same(Ranks(0, 1, torch.device("cpu")), "00ff", ["people"], -1, Path("runs"))


def test_one_process_alone_cannot_share_a_sequence(tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match="run: sequence=2 does not divide the 1 processes of this run; use one of 1,"
    ):
        train(small(tmp_path, "run.sequence=2"), tmp_path / "run")


def test_attention_that_is_not_exact_cannot_read_from_others() -> None:
    attention = Attention(8, 2, "separable", causal=True)
    with pytest.raises(
        ParameterError, match=r"attention=separable cannot read a sequence that processes hold in parts"
    ):
        attention(torch.randn(1, 4, 8), shard=Shard(0, None))  # type: ignore[arg-type]


class Line:
    """In place of a mesh: processes of one row, here imagined."""

    def get_group(self, name: str) -> str:
        return name


def placed(place: int, places: int) -> Grid:
    grid = Grid(Ranks(0, 1, torch.device("cpu")), 1)
    grid.mesh, grid.place, grid.places = cast(Any, Line()), place, places
    return grid


@pytest.mark.parametrize(("length", "places"), [(12, 4), (13, 4), (61, 2), (5, 5), (7, 3)])
def test_parts_make_up_the_whole_and_differ_by_one_token_at_most(length: int, places: int) -> None:
    ids = torch.arange(2 * length).view(2, length)
    parts = [placed(place, places).cut(ids, ids + 1) for place in range(places)]
    assert torch.equal(torch.cat([one for one, _, _ in parts], 1), ids)
    assert torch.equal(torch.cat([two for _, two, _ in parts], 1), ids + 1)
    assert all(shard is not None and int(one[0, 0]) == shard.start for one, _, shard in parts)
    lengths = {one.shape[1] for one, _, _ in parts}
    assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1


def test_fewer_tokens_than_processes_are_refused() -> None:
    words = "length=3 is fewer tokens than the 4 processes that share a sequence; pad it to 4, or lower run.sequence"
    with pytest.raises(ShapeError, match=re.escape(words)):
        placed(0, 4).cut(torch.ones(2, 3), torch.ones(2, 3))


def test_every_process_of_a_sequence_gets_a_token() -> None:
    class Short:
        def __len__(self) -> int:
            return 2

        def rows(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.ones((len(indices), 3), np.int64), np.ones((len(indices), 3), np.int64)

    for narrowest, width in ((1, 8), (8, 8), (12, 12), (16, 16)):
        (micro,) = Batches(Short(), 2, 0, block=16, narrowest=narrowest)[0].micros
        assert micro.ids.shape == micro.targets.shape == (2, width)
        assert int(micro.ids.sum()) == int(micro.targets.sum()) == 6


def test_a_run_that_loses_a_process_comes_back_and_ends_the_same(grid: Path, tmp_path: Path) -> None:
    (kill,) = lose.lost(tmp_path, ranks=2, sequence=2, times=1, steps=STEPS, seed=1)
    assert kill.named and kill.seconds < lose.TIMEOUT
    # The last checkpoint before the kill, and so some steps were done twice or none.
    assert kill.resumed % 3 == 0 and kill.step - 3 <= kill.resumed <= kill.step + 3
    assert lose.ends_alike(tmp_path / "run", grid / "in_peace")
    assert not lose.ends_alike(tmp_path / "run", grid / "two")


def test_whoever_gives_no_sign_of_life_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "BEAT", 0.02)
    store = HashStore()
    # A hundred signs of life in the time that is waited for one: some come on a busy machine, too.
    first, second, third = (Heartbeat(store, rank, 3, timeout=8.0) for rank in range(3))
    try:
        assert first.lost() is None
        second.stop()
        assert str(first.lost()).startswith("rank 1=lost gave no sign of life, and nobody can go on alone; resume from")
        # The first one leaves, having said why; the last one does not take it for the cause.
        first.stop()
        assert str(third.lost()).startswith("rank 1=lost")
    finally:
        for one in (first, second, third):
            one.stop()


def test_nobody_is_told_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "BEAT", 0.02)
    store = HashStore()
    first, second = (Heartbeat(store, rank, 2, timeout=0.5) for rank in range(2))
    try:
        second.stop()
        assert str(first.lost()).startswith("rank 1=lost")
        # The second had only been held up, and comes to look when the first has ended.
        first.stop()
        assert str(second.lost()).startswith("rank 0=lost")
    finally:
        first.stop()


@pytest.mark.parametrize("timeout", [1.0, 600.0])
def test_processes_of_a_run_wait_for_each_other_until_its_timeout(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "rendezvous", lambda where: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(distributed, "private_store", lambda store, rank, world, seconds: store)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, timeout, **more: told.append(timeout))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: None)
    with distributed.ranks("cpu", timeout) as here:
        assert here.wait_for == timeout
    assert told == [timedelta(seconds=timeout)]


def together(store: HashStore, rank: int, found: list[object]) -> threading.Thread:
    def come() -> None:
        private = private_store(store, rank, 2, 20)
        private.set(f"from {rank}", "here")
        found.append(private.get(f"from {1 - rank}"))

    thread = threading.Thread(target=come)
    thread.start()
    return thread


def test_a_meeting_forgets_those_who_met_before() -> None:
    store, found = HashStore(), []  # type: tuple[HashStore, list[object]]
    for _ in range(3):
        second = together(store, 1, found)  # It finds the old name, and an old answer of its own to it.
        second.join(0.1)
        assert second.is_alive()
        first = together(store, 0, found)
        first.join()
        second.join()
    assert found == [b"here"] * 6


@pytest.mark.parametrize(
    ("rank", "words"),
    [(0, "ranks 1, 2=absent when the rendezvous timed out"), (1, "rank 0, or another,=absent")],
)
def test_a_meeting_does_not_wait_for_ever(rank: int, words: str) -> None:
    with pytest.raises(LostRank, match=re.escape(words)):
        private_store(HashStore(), rank, 3, 0.1)
