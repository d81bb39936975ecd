"""`avow lab`: the local page."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from avow.cli.options import AsJson, option


def lab(
    port: Annotated[int, option("Port to listen on; any free one by default.", min=0, max=65535)] = 0,
    show: Annotated[bool, option("Open the page in the browser.", "--open/--no-open")] = True,
    runs: Annotated[Path, option("Folder whose training runs are shown.")] = Path("out"),
    claims: Annotated[
        Path | None, option("Your own Python file of claims, shown too; it is run: read it first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The local page: see attention keep its word.

    Serves only this machine, until Ctrl-C.
    """
    from avow.lab.server import bound, server

    # Worker processes that read runs inherit it; a page never names a folder.
    os.environ["AVOW_LAB_RUNS"] = str(runs)
    os.environ["AVOW_LAB_CLAIMS"] = _checked(claims) if claims else ""

    def ready(address: str) -> None:
        typer.echo(json.dumps({"address": address}) if as_json else f"avow lab is at {address} (Ctrl-C ends it)")
        if show:
            webbrowser.open(address)

    # Ctrl-C is the normal end.
    with bound(port) as listening, contextlib.suppress(KeyboardInterrupt):
        server(listening, secrets.token_urlsafe(32), ready).run(sockets=[listening])


def _checked(claims: Path) -> str:
    """Where a file of claims is; one that cannot be loaded is refused before the lab starts."""
    from avow.theory.claims import claims_in

    claims_in(claims)
    return str(claims.resolve())
