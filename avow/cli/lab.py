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

from avow.cli.options import AsJson
from avow.errors import MissingPackage


def lab(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; any free one by default.")] = 0,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    runs: Annotated[Path, typer.Option(help="Folder below which training runs are shown.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """The local page: see attention keep its word.

    Serves this machine alone, until Ctrl-C.
    """
    try:
        from avow.lab.server import bound, server
    except ImportError as error:
        rule, remedy = "is needed for the lab", "pip install 'avow[lab,rigor]'"
        raise MissingPackage(error.name or "fastapi", "missing", rule, remedy) from error

    # The processes that look at runs inherit it; a page never names a folder.
    os.environ["AVOW_LAB_RUNS"] = str(runs)

    def ready(address: str) -> None:
        typer.echo(json.dumps({"address": address}) if as_json else f"avow lab is at {address} (Ctrl-C ends it)")
        if show:
            webbrowser.open(address)

    # Ctrl-C is how it is meant to end.
    with bound(port) as listening, contextlib.suppress(KeyboardInterrupt):
        server(listening, secrets.token_urlsafe(32), ready).run(sockets=[listening])
