"""Files and folders that are whole or not there, whatever comes between: an error, Ctrl-C, a crash, a power cut.

What is new is written beside its place under another name, flushed to the disk, and renamed; the folder it lies in is
flushed after that, since a name may be lost as a content may. Where it fails, nothing of it is left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from avow.errors import FileError


def write(path: Path, content: str | bytes) -> None:
    """Put content where `path` says, all of it or none: whatever stood there stays until the new file is whole."""
    _place(path)
    with _beside(path) as temporary:
        put(temporary, content)
        settle(temporary, path)


def ready(path: Path) -> None:
    """Make the folder of a file to come and try it, or say why it cannot be written: before the work, not after it."""
    _place(path)
    # Only trying tells: rights do not speak of /proc, of a full disk, of names that are too long.
    with _beside(path) as temporary:
        temporary.touch(exist_ok=False)


def _place(path: Path) -> None:
    """Make the folder of a file to come; what is no file is never replaced by one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError("path", path, f"has no folder ({error.strerror})", "name another place") from error
    # Not those of Path, which raise where a name is too long.
    if os.path.isdir(path):
        raise FileError("path", path, "is a folder", "name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError("path", path, "is no plain file", "name another place")  # A device must not be replaced.


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside a file's; whatever happens, nothing is left under it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
    except OSError as error:
        raise FileError("path", path, f"cannot be written ({error.strerror})", "name another place") from error
    finally:
        # Where nothing could be written, nothing can be removed either.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remedy(error: OSError) -> str:
    """What to do about a file that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "make room" if full else "let this process write there"


def put(path: Path, content: str | bytes) -> None:
    """Write a file that was not there, down to the disk."""
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def settle(temporary: Path, final: Path) -> None:
    """Give a file, or a folder whose files are on the disk, its name: in one moment, and for good."""
    if temporary.is_dir():
        _flush(temporary)
    os.replace(temporary, final)
    _flush(final.parent)


def _flush(folder: Path) -> None:
    """Make the names in a folder durable, not only the contents of its files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
