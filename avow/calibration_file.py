"""What was measured of this machine: in memory for this process, in a file for the next.

Files are in `$XDG_CACHE_HOME/avow`, else `~/.cache/avow`. A file's name says what its measurement depends on: the
device and its processor, the torch release and the number of threads, so that machines that share a home folder do not
share measurements. A process reads a file once. A file that is damaged, or that another version wrote, counts as absent
and is replaced by the next measurement. Files are written whole or not at all, so processes that measure at the same
time do not disturb each other: the last one's file stays. If a file cannot be written, the measurement lasts as long as
the process.

An attempt that failed, for example because the machine was too busy, is kept too, with its date, for `RETRY_SECONDS`:
until then nothing is measured again unless somebody asks for it. So is a measurement that other work disturbed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from avow import file_io
from avow.errors import FileError

RETRY_SECONDS = 3600.0
"""How long a failed or disturbed measurement counts."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurement(Generic[_T]):
    """What was found; None if the attempt failed."""

    found: _T | None
    date: datetime
    path: Path
    fault: str = ""
    """Why there is nothing, or what disturbed the measurement; empty if it was a good one."""
    unkept: str = ""
    """Why no file holds it, if none does."""

    @property
    def is_current(self) -> bool:
        """Whether it still counts: a good one always does."""
        return not self.fault or -1 <= time.time() - self.date.timestamp() < RETRY_SECONDS

    @functools.cached_property
    def source(self) -> str:
        """Where figures come from that rest on it, in words."""
        when = self.date.astimezone()
        if self.found is None:
            return f"typical rates: {self.fault} ({when:%H:%M}); tried again after an hour"
        place = f"not kept: {self.unkept}" if self.unkept else f"kept in {self.path}"
        disturbed = f"; {self.fault}" if self.fault else ""
        return f"measured on {when:%Y-%m-%d}, {place}{disturbed}"


_memory: dict[Path, Measurement[Any] | None] = {}


def recall(path: Path, parse: Callable[[Any], _T | None]) -> Measurement[_T] | None:
    """The measurement of this file as `parse` reads it, if there is one that counts; the file is read once."""
    if path not in _memory:
        _memory[path] = _read(path, parse)
    known = _memory[path]
    return known if known is not None and known.is_current else None


def keep(path: Path, found: _T | None, plain: Any, fault: str = "") -> Measurement[_T]:
    """The measurement of this moment, kept in memory and, as `plain`, in the file."""
    date, unkept = datetime.fromtimestamp(time.time(), UTC), ""
    content = {"date": date.isoformat(timespec="seconds"), "fault": fault, "found": plain}
    try:
        file_io.write(path, json.dumps(content, indent=1))
    except FileError as error:
        unkept = f"{path} {error.rule}"
    measurement = Measurement(found, date, path, fault, unkept)
    _memory[path] = measurement
    return measurement


def forget(path: Path) -> None:
    """Have the next caller measure again."""
    _memory[path] = None
    with contextlib.suppress(OSError):
        path.unlink()


def forget_memory() -> None:
    """Have this process read its files again."""
    _memory.clear()


def file_for(name: str, device: str) -> Path:
    """Where a measurement of this device is kept."""
    return _file(os.environ.get("XDG_CACHE_HOME"), name, device, torch.get_num_threads())


def cache_folder() -> Path:
    """Where avow keeps what it can make again."""
    return _folder(os.environ.get("XDG_CACHE_HOME"))


def _folder(root: str | None) -> Path:
    try:
        return (Path(root) if root else Path.home() / ".cache") / "avow"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "avow"


@functools.lru_cache(maxsize=256)
def _file(root: str | None, name: str, device: str, threads: int) -> Path:
    release = torch.__version__.split("+")[0]
    return _folder(root) / f"{name}-{device}-{_processor(device)}-torch{release}-{threads}threads.json"


@functools.cache
def _processor(device: str) -> str:
    """The name of what computes, as a part of a file's name."""
    name = platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next(line.partition(":")[2] for line in lines if line.startswith("model name"))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unknown"


def _read(path: Path, parse: Callable[[Any], _T | None]) -> Measurement[_T] | None:
    """The measurement in a file; None if there is none that can be read."""
    try:
        content = json.loads(file_io.read_document(path))
        date, fault, plain = datetime.fromisoformat(content["date"]), content["fault"], content["found"]
        found = None if plain is None else parse(plain)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError):
        return None
    usual = date.tzinfo is not None and isinstance(fault, str) and (found is not None or (plain is None and fault))
    return Measurement(found, date, path, fault) if usual else None
