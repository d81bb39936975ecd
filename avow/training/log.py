"""The record of a run, one line every few steps, as CSV that a resumed run continues; for TensorBoard where it is."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from avow import file_io
from avow.errors import FileError


@dataclass(frozen=True)
class Progress:
    """How far a run is. The loss is the mean over the steps since the last one of these, in nats per character."""

    step: int
    steps: int
    epoch: float
    loss: float
    rate: float
    norm: float
    tokens_per_second: float
    mfu: float
    eta: float


COLUMNS = [field.name for field in fields(Progress)]
# What TensorBoard draws over the steps.
SCALARS = ("loss", "rate", "norm", "tokens_per_second", "mfu")


class Log:
    """`log.csv` of a run; what stands in it beyond `step` is forgotten, for it will be written again.

    Where TensorBoard is installed, its files lie beside it and forget the same.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [row for row in read_log(path) if float(row["step"]) <= step] if path.exists() else []
        whole = io.StringIO()
        writer = csv.DictWriter(whole, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
        file_io.write(path, whole.getvalue())
        with self._writable():
            self._board = _board(path.parent, step)

    def add(self, progress: Progress) -> None:
        """One more line, on the disk's side of a crash of this process."""
        with self._writable():
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow(asdict(progress))
            if self._board is not None:
                for name in SCALARS:
                    self._board.add_scalar(name, getattr(progress, name), progress.step)
                self._board.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None:
            # Every line was flushed when it was added: nothing is lost here, and what went wrong was said there.
            with contextlib.suppress(OSError):
                self._board.close()

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            remedy = f"{file_io.remedy(error)} and resume from the last checkpoint"
            raise FileError("log", self._path, rule, remedy) from error


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, which hides what an earlier one wrote beyond `step`; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a log; one that a crash cut short is left out, and so is one that holds anything but numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise FileError("log", path, rule, "move it away: a run goes on without it") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError("log", path, f"is no CSV ({error})", "move it away: a run goes on without it") from error
    lines = [{column: row.get(column) or "" for column in COLUMNS} for row in rows]
    return [line for line in lines if all(map(_is_number, line.values()))]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
