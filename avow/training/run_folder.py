"""The folder of a run: one process at a time writes it, its log, and how the run is asked to stop."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from avow import file_io
from avow.core.chart import Chart
from avow.errors import FileError

if TYPE_CHECKING:
    from avow.training.distributed import Ranks

LOCK = ".lock"
CONFIG = "run.toml"


@contextlib.contextmanager
def locked(folder: Path, name: str = "run", wait: float = 0.0) -> Iterator[None]:
    """Hold a folder until the block ends; raise if another process holds it, after so many seconds of waiting.

    The lock is the operating system's and ends with the process that holds it; the number of that process in the file
    is for error messages alone. `name` is what the folder is called there. Folders made for the lock alone are removed.
    """
    new_folders = [one for one in (folder, *folder.parents) if not one.exists()]
    file = _lock_file(folder, name, time.monotonic() + wait)
    try:
        # On a full disk the lock holds as well; only its holder is not named.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} {platform.node()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
            for one in new_folders:
                one.rmdir()  # unless something was written there
        fcntl.flock(file, fcntl.LOCK_UN)  # for processes forked meanwhile, too, which closing would not do
        os.close(file)


@contextlib.contextmanager
def locked_by_first(folder: Path, here: Ranks, wait: float = 0.0) -> Iterator[None]:
    """The same for all processes of a run: the first holds the folder, and if it cannot, all of them raise."""
    with contextlib.ExitStack() as stack:
        here.together(lambda: stack.enter_context(locked(folder, wait=wait)) if here.rank == 0 else None)
        yield


def _lock_file(folder: Path, name: str, until: float) -> int:
    """The file that carries a folder's lock, open and locked."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and not os.path.lexists(folder):
                continue  # Another process, which had made the folder, has just removed it.
            raise FileError(name, folder, f"cannot be written ({error.strerror})", "name another folder") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
            os.close(file)  # Its last holder has removed the file meanwhile: it locks nothing any more.
            continue
        except BlockingIOError:
            number, _, machine = os.pread(file, 512, 0).decode(errors="replace").partition(" ")
            holder = f"process {number} on {machine}" if number.isdigit() else "another process"
            os.close(file)
        except OSError as error:
            os.close(file)
            rule = f"cannot be locked ({error.strerror})"
            remedy = "name a folder on a file system that has locks: without, another run could write there unnoticed"
            raise FileError(name, folder, rule, remedy) from error
        if time.monotonic() >= until:
            rule = f"is being written by {holder}"
            raise FileError(name, folder, rule, "wait until that ends, or name another folder")
        time.sleep(0.05)


@dataclass(frozen=True)
class Progress:
    """How far a run is. The loss is the mean over the steps since the last one of these, in nats per token.

    The last three are of the held-out examples, in nats per token, as a perplexity and in bits per character; None at
    steps that measure no held-out loss, and bits also if tokens stand for no characters.
    """

    step: int
    steps: int
    epoch: float
    loss: float
    lr: float
    norm: float
    tokens_per_second: float
    mfu: float
    eta: float
    held_out_loss: float | None = None
    perplexity: float | None = None
    bits_per_character: float | None = None


COLUMNS = [field.name for field in fields(Progress)]
# Columns that may be empty.
OPTIONAL = ("held_out_loss", "perplexity", "bits_per_character")
# What TensorBoard draws over the steps.
SCALARS = ("loss", "lr", "norm", "tokens_per_second", "mfu", *OPTIONAL)


class Log:
    """`log.csv` of a run; lines beyond `step` are dropped, for they will be written again.

    If TensorBoard is installed, its files lie beside it and drop the same.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        lines = [line for line in read_log(path) if line.step <= step] if path.exists() else []
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(map(asdict, lines))
        file_io.write(path, text.getvalue())
        self._board: Any = None
        with self._writable(), contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            # It hides what an earlier one wrote beyond the step.
            self._board = SummaryWriter(str(path.parent), purge_step=step + 1)

    def add(self, progress: Progress) -> None:
        """Append a line; it survives a crash of this process."""
        with self._writable():
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow(asdict(progress))
            if self._board is not None:
                for name in SCALARS:
                    if (value := getattr(progress, name)) is not None:
                        self._board.add_scalar(name, value, progress.step)
                self._board.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._board is not None:
            # Every line was flushed when it was added: nothing is lost here, and errors were raised there.
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


def read_log(path: Path) -> list[Progress]:
    """The lines of a log; what is not a whole line of numbers is left out."""
    try:
        return parse_log(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is not CSV ({error})"
        raise FileError("log", path, rule, "move it away: a run goes on without it") from error


def parse_log(text: str) -> list[Progress]:
    """The lines of a log in memory.

    Only lines that have ended count, for a number that was cut short is another number. A log of other columns has
    none.
    """
    rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    lines: list[Progress] = []
    with contextlib.suppress(csv.Error):
        if next(rows, None) != COLUMNS:
            return []
        for row in rows:
            with contextlib.suppress(ValueError):
                lines.append(_line(row))
    return lines


def _line(row: list[str]) -> Progress:
    """A line of a log; raises `ValueError` if it is not one."""
    cells = dict(zip(COLUMNS, row, strict=True))
    numbers = {name: float(cell) for name, cell in cells.items() if cell or name not in OPTIONAL}
    step, steps = (int(cells[name]) for name in ("step", "steps"))
    return Progress(**numbers | {"step": step, "steps": steps})  # type: ignore[arg-type]


def loss_chart(lines: Sequence[Progress], title: str) -> Chart:
    """The loss in training and, if it was measured, the held-out loss, over the steps."""
    held_out = [(line.step, line.held_out_loss) for line in lines if line.held_out_loss is not None]
    series: dict[str, tuple[list[float], list[float]]] = {
        name: ([step for step, _ in points], [loss for _, loss in points])
        for name, points in (("in training", [(line.step, line.loss) for line in lines]), ("held out", held_out))
        if points
    }
    return Chart(title, "step", "loss, nats per token", series)


@contextlib.contextmanager
def listening() -> Iterator[list[int]]:
    """Inside, the first Ctrl-C or SIGTERM is put on the list, for a loop to see between two steps; the second acts as
    ever."""
    signals: list[int] = []
    # Python delivers signals to the main thread alone, and lets no other choose what they do.
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def note(kind: int, frame: FrameType | None) -> None:
        signals.append(kind)
        restore()

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield signals
    finally:
        restore()
