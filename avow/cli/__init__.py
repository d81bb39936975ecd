"""`avow …`: every command reads its arguments and makes one call of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import avow
from avow.cli import (
    audit,
    bench,
    claims,
    compare,
    construct,
    knowledge,
    lab,
    plan,
    plan_decode,
    plan_ranks,
    profile,
    train,
)
from avow.cli.error_formatting import ErrorFormattingGroup
from avow.cli.options import option

app = typer.Typer(
    cls=ErrorFormattingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention that keeps its word.",
)


def main(begin: Callable[[], None] | None = None) -> None:
    """The entry point; `begin` is called once the arguments are read and the command itself begins."""
    app(obj=begin)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avow {avow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(cls=compare.Compared)(compare.compare)
app.command(cls=plan.Planned)(plan.plan)
app.command(cls=plan_decode.Planned)(plan_decode.plan_decode)
app.command()(plan_ranks.plan_ranks)
app.add_typer(claims.app, name="claims")
app.add_typer(construct.app, name="construct")
app.command()(lab.lab)
app.command()(knowledge.knowledge)
app.add_typer(train.app, name="train")
app.command()(profile.profile)
app.command()(profile.verify)
app.command()(audit.audit)
app.add_typer(bench.app, name="bench")
