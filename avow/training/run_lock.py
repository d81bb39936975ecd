"""One run at a time writes a folder: a lock of the operating system, which ends with the process that holds it.

The file that carries the lock holds the number of that process. It means nothing by itself: what a killed process left
locks nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from avow.errors import FileError
from avow.training.parallel import Ranks

LOCK = ".lock"
# Seconds between two looks at whether a lock is free.
_PAUSE = 0.05


@contextlib.contextmanager
def locked(folder: Path, name: str = "run", wait: float = 0.0) -> Iterator[None]:
    """Hold a folder until the block ends; raise where another process holds it, after so many seconds of waiting.

    `name` is what the folder is called in errors. What was made for the lock alone is gone when the block ends.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    file = _taken(folder, name, time.monotonic() + wait)
    try:
        # On a full disk the lock holds as well; only its holder is not named.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} {platform.node()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
            for one in made:
                one.rmdir()  # unless something was written there
        fcntl.flock(file, fcntl.LOCK_UN)  # for processes forked meanwhile, too, which closing would not do
        os.close(file)


@contextlib.contextmanager
def locked_by_first(folder: Path, here: Ranks) -> Iterator[None]:
    """The same for all processes of a run: the first holds the folder, and where it cannot, all of them raise."""
    with contextlib.ExitStack() as stack:
        problem: FileError | None = None
        if here.rank == 0:
            try:
                stack.enter_context(locked(folder))
            except FileError as error:
                problem = error
        if here.any(problem is not None):
            raise problem or FileError("run", folder, "was refused to rank 0", "see what rank 0 says of it")
        yield


def _taken(folder: Path, name: str, until: float) -> int:
    """The file that carries a folder's lock, open and locked."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and not os.path.lexists(folder):
                continue  # The folder was just given back by another process, which had made it.
            raise FileError(name, folder, f"cannot be written ({error.strerror})", "name another folder") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
            os.close(file)  # Who held it before has removed it meanwhile: it locks nothing any more.
            continue
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
        except OSError as error:
            os.close(file)
            rule = f"cannot be locked ({error.strerror})"
            remedy = "name a folder on a file system that has locks: without, another run could write there unnoticed"
            raise FileError(name, folder, rule, remedy) from error
        if time.monotonic() >= until:
            rule = f"is being written by {holder}"
            raise FileError(name, folder, rule, "wait until that ends, or name another folder")
        time.sleep(_PAUSE)


def _holder(file: int) -> str:
    number, _, machine = os.pread(file, 512, 0).decode(errors="replace").partition(" ")
    return f"process {number} on {machine}" if number.isdigit() else "another process"


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
