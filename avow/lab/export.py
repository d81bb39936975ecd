"""A copy of the lab as files: it opens from a disk and from any host, with no server and no network behind it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import avow
from avow import file_io
from avow.errors import FileError
from avow.lab.page import PACKAGE, all_pages
from avow.lab.rendering import render, row, workshop
from avow.lab.stories import story_names, story_script

# A folder with this file is an earlier copy, and may be replaced.
_MARK = "avow-export.json"


def export_lab(folder: Path, package: str = PACKAGE) -> int:
    """Write the copy to a folder that is new, empty or an earlier copy, whole or not at all; the number of files."""
    folder = folder.absolute()
    _check(folder)
    files = exported_files(package)
    with _beside(folder) as temporary:
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            file_io.put(temporary / name, content)
        _replace(folder, temporary)
    return len(files)


def exported_files(package: str = PACKAGE) -> dict[str, str]:
    """What the copy holds, by name."""
    pages = all_pages(package)
    files = {}
    for place in (*row(package, exported=True), *workshop(package, exported=True)):
        files[place.address] = render(place.name, package, "", pages.get(place.name), exported=True)
    files |= {f"stories/{name}.js": story_script(name) for name in story_names()}
    return files | {_MARK: json.dumps({"format": "avow export 1", "version": avow.__version__}) + "\n"}


def _check(folder: Path) -> None:
    """Raise if something else would be lost."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise FileError("--export", folder, "is not a folder", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise FileError("--export", folder, "is neither empty nor an earlier export", "name a new folder")


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder beside another; whatever happens, nothing is left of it there."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except OSError as error:
        raise FileError("--export", folder, f"cannot be written ({error.strerror})", file_io.remedy(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, temporary: Path) -> None:
    """Put a folder in the place of another; if that fails, the other one stays."""
    earlier = temporary.with_name(temporary.name + ".earlier")
    if folder.is_dir():
        folder.rename(earlier)
    try:
        file_io.settle(temporary, folder)
    except BaseException:
        if earlier.is_dir():
            earlier.rename(folder)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
