"""What the caller of a benchmark may choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Small sizes; a folder of real heads; a folder of texts and questions; where long runs are kept and resumed."""

    quick: bool = False
    heads: Path | None = None
    corpus: Path | None = None
    runs: Path | None = None
