"""The command line, called as a person would, within this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from avow.cli import app


def run(*arguments: str, code: int = 0) -> Any:
    """What a command says, where it ends with this code."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def refused(*arguments: str) -> str:
    """The one line that a mistake ends in."""
    done = run(*arguments, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr.strip())
