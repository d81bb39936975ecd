"""What the caller of a benchmark may choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Small sizes, and a folder of real heads."""

    quick: bool = False
    heads: str | None = None
