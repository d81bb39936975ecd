"""`avow …`: every command is a thin reading of arguments around one call of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import avow
from avow.cli import bench, claims, compare, construct, knowledge, lab, plan, profile, train, verify
from avow.cli.error_formatting import ErrorFormattingGroup

app = typer.Typer(
    cls=ErrorFormattingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention that keeps its word.",
)


def main(begin: Callable[[], None] | None = None) -> None:
    """The entry point; `begin` is called when what was typed is read and the command itself begins."""
    app(obj=begin)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avow {avow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command(cls=compare.Compared)(compare.compare)
app.command(cls=plan.Planned)(plan.plan)
app.add_typer(claims.app, name="claims")
app.add_typer(construct.app, name="construct")
app.command()(lab.lab)
app.command()(knowledge.knowledge)
app.add_typer(train.app, name="train")
app.command()(profile.profile)
app.command()(verify.verify)
app.add_typer(bench.app, name="bench")
