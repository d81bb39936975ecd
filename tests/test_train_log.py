"""A run's record: CSV always, TensorBoard where it is installed, and what is redone is not drawn twice."""

from __future__ import annotations

import builtins
import dataclasses
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from avow.errors import FileError
from avow.training import Progress
from avow.training.run_folder import OPTIONAL, SCALARS, Log, loss_chart, read_log


def line(step: int, loss: float = 1.0) -> Progress:
    return Progress(step, 10, 0.5, loss, 1e-3, 2.0, 3000.0, 0.25, 9.0)


def drawn(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard would draw of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_every_figure_of_a_line_is_drawn_beside_the_csv(tmp_path: Path) -> None:
    with Log(tmp_path / "log.csv", 0) as log:
        log.add(line(1, 3.0))
        log.add(line(2, 2.0))
    assert drawn(tmp_path, "loss") == [(1, 3.0), (2, 2.0)]
    for name in (name for name in SCALARS if name not in OPTIONAL):
        ((_, value), *_) = drawn(tmp_path, name)
        assert value == pytest.approx(getattr(line(1, 3.0), name))


def test_a_line_is_drawn_before_the_run_ends(tmp_path: Path) -> None:
    with Log(tmp_path / "log.csv", 0) as log:
        log.add(line(1, 3.0))
        assert drawn(tmp_path, "loss") == [(1, 3.0)] and len(read_log(tmp_path / "log.csv")) == 1


def written_twice(folder: Path, resumed_at: int) -> list[tuple[int, float]]:
    with Log(folder / "log.csv", 0) as log:
        for step in (1, 2, 3, 4):
            log.add(line(step, 9.0))
    # Files are read in the order of their names, which begin with the second: a run that goes on is later.
    time.sleep(1.1)
    with Log(folder / "log.csv", resumed_at) as log:
        for step in (3, 4, 5):
            log.add(line(step, 1.0))
    return drawn(folder, "loss")


def test_a_resumed_run_hides_what_it_does_again(tmp_path: Path) -> None:
    assert written_twice(tmp_path, 2) == [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert [(line.step, line.loss) for line in read_log(tmp_path / "log.csv")] == drawn(tmp_path, "loss")


def test_without_purging_it_would_be_drawn_twice(tmp_path: Path) -> None:
    assert written_twice(tmp_path, 4) == [(1, 9.0), (2, 9.0), (3, 9.0), (4, 9.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_where_tensorboard_is_not_installed_there_is_csv_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "tensorboard" or name == "torch.utils.tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    with Log(tmp_path / "log.csv", 0) as log:
        log.add(line(1))
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    assert len(read_log(tmp_path / "log.csv")) == 1


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with Log(tmp_path / "log.csv", 0) as log:
        (tmp_path / "log.csv").unlink()
        (tmp_path / "log.csv").mkdir()
        words = "log.csv cannot be written (Is a directory); let this process write there and resume from the last"
        with pytest.raises(FileError, match=re.escape(words)):
            log.add(line(1))


def test_what_is_no_line_of_numbers_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with Log(path, 0) as log:
        for step in (1, 2, 3):
            log.add(line(step))
    lines = path.read_text().splitlines()
    spoilt = [lines[0], lines[0], lines[1] + ",7", lines[2].replace("1.0", "x"), lines[3][:9], lines[1], lines[3]]
    # The last line has not ended: its last number may have been longer.
    path.write_text("\n".join(spoilt))
    with Log(path, 9):
        assert [line.step for line in read_log(path)] == [1]


def test_a_held_out_loss_stands_in_its_lines_alone(tmp_path: Path) -> None:
    measured = dataclasses.replace(line(2), held_out_loss=1.5, perplexity=4.48, bits_per_character=None)
    with Log(tmp_path / "log.csv", 0) as log:
        for one in (line(1), measured):
            log.add(one)
    assert read_log(tmp_path / "log.csv") == [line(1), measured]
    assert drawn(tmp_path, "held_out_loss") == [(2, 1.5)]
    chart = loss_chart(read_log(tmp_path / "log.csv"), "a run")
    assert chart.series == {"in training": ([1, 2], [1.0, 1.0]), "held out": ([2], [1.5])}
    assert list(loss_chart([line(1)], "a run").series) == ["in training"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not CSV ('utf-8' codec can't decode byte 0xff"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
    ],
    ids=["bytes", "folder"],
)
def test_a_log_that_cannot_be_read_is_said(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(tmp_path / "log.csv")
    with pytest.raises(
        FileError, match=f"log={re.escape(f'{tmp_path}/log.csv {words}')}.*; move it away: a run goes on"
    ):
        Log(tmp_path / "log.csv", 0)
