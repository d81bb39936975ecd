"""How every command tells what came of it: one JSON document, or words and tables; on stderr what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer


def document(told: dict[str, Any]) -> None:
    """Print one JSON document; nothing in it is beyond ASCII, so that every terminal and pipe can carry it."""
    typer.echo(json.dumps(told, indent=1, allow_nan=False))


def wrote(paths: Iterable[Path]) -> None:
    """Name the files that are there now, on stderr."""
    for path in paths:
        typer.echo(f"wrote {path}", err=True)
