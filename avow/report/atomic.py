"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from avow.errors import FileError


def write(path: Path, content: str | bytes) -> None:
    """Put content where `path` says, all of it or none: whatever stood there stays until the new file is whole."""
    ready(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as problem:
        raise FileError("path", path, f"cannot be written ({problem.strerror})", "name another place") from problem
    finally:
        temporary.unlink(missing_ok=True)


def ready(path: Path) -> None:
    """Make the folder of a file to come, or say why it cannot be written: before the work, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError("path", path, f"has no folder ({problem.strerror})", "name another place") from problem
    if path.is_dir():
        raise FileError("path", path, "is a folder", "name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise FileError("path", path, "lies in a folder that cannot be written", "name another place")
