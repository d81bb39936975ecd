"""Training runs as they lie on disk, read while they are being written: what is half there is left for later.

Names of runs come from a listing made here; nothing that a page says is ever joined to a path.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.training.run_folder import COLUMNS

# Where `avow lab --runs` says runs are; the processes that compute inherit it.
VARIABLE = "AVOW_LAB_RUNS"
USUAL = "out"
_WRITTEN = "written at"
# How deep, how many folders, how many runs, and how much of a file.
_DEEP, _FOLDERS, _RUNS, _BYTES = 4, 4000, 200, 1 << 25
# A curve has this many points at most, and a run that was silent for so long is taken for stopped.
_POINTS, _SILENT = 500, 120.0


@dataclass(frozen=True)
class Run:
    """A folder that `avow train` writes to: how far it is, and what it was told."""

    name: str
    curves: dict[str, list[float]]
    written: float
    about: str

    @property
    def group(self) -> str:
        """The folder it stands in, as the reader sees it."""
        return self.name.rpartition("/")[0]

    @property
    def step(self) -> int:
        return int(self.last("step") or 0)

    @property
    def steps(self) -> int:
        return int(self.last("steps") or 0)

    def last(self, column: str) -> float | None:
        return self.curves[column][-1] if self.curves["step"] else None

    @property
    def state(self) -> str:
        if not self.curves["step"]:
            return "has not begun"
        if self.step >= self.steps:
            return "finished"
        return "running" if time.time() - self.written < _SILENT else "stopped"


def folder() -> Path:
    return Path(os.environ.get(VARIABLE) or USUAL)


def all_runs() -> list[Run]:
    """Every run below the folder, by name."""
    root = folder()
    told = (_run(root, path) for path in _folders(root) if _plain_file(path / "config.json"))
    found = itertools.islice((run for run in told if run is not None), _RUNS)
    return sorted(found, key=lambda run: run.name)


def knowledge() -> list[tuple[str, dict[str, Any]]]:
    """The figures of every knowledge experiment below the folder that has come to its end, the newest first."""
    root = folder()
    found: list[tuple[float, str, dict[str, Any]]] = []
    for path in _folders(root):
        told = _json(path / "knowledge.json")
        if isinstance(told.get("rows"), list) and isinstance(told.get("headline"), str):
            found.append((told[_WRITTEN], _name(root, path), told))
    return [(name, told) for _, name, told in sorted(found, key=lambda one: -one[0])]


def _folders(root: Path) -> Iterator[Path]:
    """The folder and those below it; links are not followed."""
    for place, inside, _ in itertools.islice(os.walk(root), _FOLDERS):
        path = Path(place)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if len(path.relative_to(root).parts) >= _DEEP:
            inside.clear()
        yield path


def _plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else root.resolve().name


def _run(root: Path, path: Path) -> Run | None:
    log, told = path / "log.csv", _json(path / "config.json")
    if not isinstance(told.get("model"), dict) or not isinstance(told.get("data"), dict):
        return None
    curves, written = columns_of(b""), 0.0
    if _plain_file(log):
        try:
            curves, written = _curves(log, *_version(log))
        except OSError:
            return None  # It went while we looked.
    return Run(_name(root, path), curves, written, _about(told))


def _about(told: dict[str, Any]) -> str:
    model, data = told["model"], told["data"]
    layers = model.get("layers")
    sizes = f"{layers} {'layer' if layers == 1 else 'layers'} of {model.get('width')}"
    return f"{model.get('attention')}, {sizes}, {data.get('task')}"


def _version(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size


@functools.lru_cache(256)
def _curves(path: Path, written: int, size: int) -> tuple[dict[str, list[float]], float]:
    """The columns of a log, thinned, and when it was written."""
    return thinned(columns_of(_content(path))), written / 1e9


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BYTES)


def columns_of(content: bytes) -> dict[str, list[float]]:
    """The columns of a log. Only lines that have ended count, for a number that was cut short is another number."""
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    curves: dict[str, list[float]] = {name: [] for name in COLUMNS}
    reader = csv.reader(io.StringIO(whole, newline=""))
    if next(reader, None) != COLUMNS:
        return curves
    for row in reader:
        try:
            numbers = [float(cell) for cell in row]
        except ValueError:
            continue
        if len(numbers) == len(COLUMNS) and all(map(math.isfinite, numbers[:2])):
            for name, number in zip(COLUMNS, numbers, strict=True):
                curves[name].append(number)
    return curves


def thinned(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """At most so many points, the first and the last among them."""
    count = len(curves["step"])
    if count <= _POINTS:
        return curves
    places = [round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)]
    return {name: [column[place] for place in places] for name, column in curves.items()}


def _json(path: Path) -> dict[str, Any]:
    """What a file says and when it was written, or nothing where it is no JSON, or not yet."""
    try:
        return _told(path, *_version(path)) if _plain_file(path) else {}
    except OSError:
        return {}


@functools.lru_cache(256)
def _told(path: Path, written: int, size: int) -> dict[str, Any]:
    try:
        told = json.loads(_content(path))
    except (ValueError, RecursionError):
        return {}
    return {**told, _WRITTEN: written / 1e9} if isinstance(told, dict) else {}
