"""`avow …`: every command is a thin reading of arguments around one call of the library."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import avow
from avow.cli import bench, claims, compare, construct, knowledge, lab, plan, profile, train, verify
from avow.cli.compare import methods_help as methods_help
from avow.errors import AvowError


class Polite(TyperGroup):
    """Mistakes end in one line, not in a traceback; an interrupt ends at once."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AvowError as problem:
            typer.echo(f"avow: {problem}", err=True)
            raise typer.Exit(2) from problem
        except KeyboardInterrupt as problem:
            typer.echo("avow: interrupted; nothing was written", err=True)
            raise typer.Exit(130) from problem


app = typer.Typer(
    cls=Polite,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention that keeps its word.",
)


def main() -> None:
    """The entry point."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avow {avow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


app.command()(compare.compare)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(verify.verify)
app.add_typer(claims.app, name="claims")
app.add_typer(construct.app, name="construct")
app.add_typer(train.app, name="train")
app.command()(knowledge.knowledge)
app.add_typer(bench.app, name="bench")
app.command()(lab.lab)
