"""The record of a run, one line every few steps, as CSV that a resumed run continues."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


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


class Log:
    """`log.csv` of a run; what stands in it beyond `step` is forgotten, for it will be written again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [row for row in read_log(path) if int(row["step"]) <= step] if path.exists() else []
        temporary = path.with_suffix(".writing")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(temporary, path)

    def add(self, progress: Progress) -> None:
        """One more line, on the disk's side of a crash of this process."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(asdict(progress))


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a log; one that a crash cut short is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row.get(column) for column in COLUMNS)]
