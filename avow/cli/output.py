"""How every command prints its result: one JSON document, or text and tables; on stderr the files it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer


def present(as_json: bool, plain: dict[str, Any], *parts: Any) -> None:
    """Print a result: as one JSON document, or its tables and lines for people."""
    from avow.report.terminal import show

    if as_json:
        document(plain)
    else:
        show(*parts)


def document(plain: dict[str, Any]) -> None:
    """Print one JSON document, in ASCII so that every terminal and pipe can carry it."""
    typer.echo(json.dumps(plain, indent=1, allow_nan=False))


def wrote(paths: Iterable[Path]) -> None:
    """Name the files that were written, on stderr."""
    for path in paths:
        typer.echo(f"wrote {path}", err=True)
