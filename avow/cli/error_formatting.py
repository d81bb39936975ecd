"""Errors and interrupts of the command line: one line on stderr, never a traceback."""

from __future__ import annotations

import difflib
import io
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from avow.errors import AvowError, FileError, MissingPackage, ParameterError, RangeError, is_out_of_memory
from avow.parameters import called_elsewhere
from avow.report.formatting import listed

# What typer raises for any wrong use of a command; it has no public name of its own.
_WRONG_USE: Any = typer.BadParameter.__base__
# Its rules, and ours in plain English.
_RULES = {
    "Input should be": "must be",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
ORDER = (
    "compare",
    *("plan", "plan-decode", "plan-ranks"),
    *("claims", "construct", "lab", "knowledge", "train", "profile", "verify", "audit", "bench"),
)


class ErrorFormattingGroup(TyperGroup):
    """A mistake ends in one line with name, value, rule and remedy; an interrupt ends at once."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which a new user tries them."""
        return [*ORDER, *(name for name in self.commands if name not in ORDER)]

    def main(self, *args: Any, **more: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A terminal that lacks a character shows a question mark.
                stream.reconfigure(errors="replace")
        try:
            return super().main(*args, **more | {"prog_name": "avow"})
        except OSError as error:
            # For example a full disk behind stdout.
            rule, remedy = f"failed ({error.strerror})", "check free space and permissions"
            typer.echo(f"avow: {FileError('file', error.filename or 'output', rule, remedy)}", err=True)
            sys.exit(1)

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except _WRONG_USE as error:
            _end(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            if ctx.obj is not None:
                ctx.obj()
            return super().invoke(ctx)
        except (AvowError, _WRONG_USE) as error:
            _end(error)
        except ImportError as error:
            package = (error.name or "avow").partition(".")[0]
            if package == "avow":
                raise
            # An optional package that is missing was named before; here an installed one is damaged.
            _end(MissingPackage("package", package, f"cannot be loaded ({error})", "install it again with pip"))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _end(RangeError("memory", "all available", "is not enough for these sizes", "try smaller ones"))
        except KeyboardInterrupt as error:
            typer.echo("avow: interrupted; nothing was written", err=True)
            raise typer.Exit(130) from error


def _end(error: Exception) -> NoReturn:
    """Print the error and exit; a group without a command prints its help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    typer.echo(f"avow: {error if isinstance(error, AvowError) else explained(error)}", err=True)
    raise typer.Exit(2) from error


def explained(error: Any) -> AvowError:
    """A wrong use of a command as the four parts that every error has."""
    here = error.ctx.command_path if error.ctx else "avow"
    remedy = f"see {here} --help"
    match type(error).__name__:
        case "NoSuchOption":
            name, ctx = error.option_name, error.ctx
            possible = error.possibilities or ()
            begun = [one for one in possible if one.startswith(name)]
            likely = begun or difflib.get_close_matches(name, possible, 1, 0.7)
            near = f"did you mean {likely[0]}?" if likely else remedy
            known = " ".join(filter(None, (_meant(name, ctx), _commands_with(name, ctx))))
            return ParameterError("option", name, f"is not known to {here}", known or _field_named(name, ctx) or near)
        case "BadOptionUsage":
            rule = "takes no value" if "does not take" in error.message else "must have a value"
            return ParameterError("option", error.option_name, rule, remedy)
        case "MissingParameter":
            what = (getattr(error.param, "help", "") or "").partition(":")[0].rstrip(".")
            rule = f"must be given: {what[0].lower()}{what[1:]}" if what else "must be given"
            typed = error.param.opts[0] if error.param.opts else _name(error.param)
            return ParameterError(typed, "(not given)", rule, remedy)
        case "BadParameter" if hasattr(error.__cause__, "errors"):
            (first, *_) = error.__cause__.errors()
            rule = first["msg"].partition(",")[0]
            for theirs, ours in _RULES.items():
                rule = rule.replace(theirs, ours)
            return ParameterError(_name(error.param), repr(first["input"]), rule, remedy)
    if hasattr(error.ctx and error.ctx.command, "list_commands"):
        known = error.ctx.command.list_commands(error.ctx)
        name = error.message.split("'")[1]
        near = " or ".join(difflib.get_close_matches(name, known))
        remedy = f"did you mean {near}?" if near else f"known commands: {', '.join(known)}"
        return ParameterError("command", name, f"is not known to {here}", remedy)
    value = error.message.partition("(s) (")[2].rstrip(")") or repr(error.message)
    if any(f"--{value}" in parameter.opts for parameter in (error.ctx.command.params if error.ctx else ())):
        remedy = f"did you mean --{value}?"
    return ParameterError("arguments", value, f"are not accepted by {here}", remedy)


def _meant(option: str, ctx: Any) -> str:
    """The option of this command that goes by this name elsewhere, as a question; empty if there is none."""
    options = {_field(_name(parameter)): _name(parameter) for parameter in ctx.command.params} if ctx else {}
    near = called_elsewhere(_field(option), options)
    return f"did you mean --{options[near]}?" if near else ""


def _commands_with(option: str, ctx: Any) -> str:
    """The commands that have an option: a group's own, else those named after the same verb; empty if none has it."""
    if ctx is None or ctx.parent is None:
        return ""
    commands, path = getattr(ctx.command, "commands", None), ctx.command_path
    if commands is None:
        verb, path = ctx.info_name.partition("-")[0], ctx.parent.command_path
        commands = {k: v for k, v in ctx.parent.command.commands.items() if k.partition("-")[0] == verb}
    with_it = [name for name, one in commands.items() if any(option in parameter.opts for parameter in one.params)]
    return f"{option} belongs to {listed([f'{path} {name}' for name in with_it])}" if with_it else ""


def _field_named(option: str, ctx: Any) -> str:
    """How to write a field of a configuration that was given as an option; empty if it is none."""
    if ctx is None or all(parameter.name != "flags" for parameter in ctx.command.params):
        return ""
    from avow.training.config import FIELDS
    from avow.training.field_names import OTHER_MEANINGS, meant

    name = _field(option)
    near = meant("", name, FIELDS)
    return OTHER_MEANINGS.get(name) or (f"fields are written without dashes: {near}=VALUE" if near else "")


def _name(parameter: Any) -> str:
    """A parameter as people type it, without its dashes."""
    return str((parameter.opts or [parameter.name])[0]).lstrip("-")


def _field(option: str) -> str:
    """An option as Python writes its name."""
    return option.lstrip("-").replace("-", "_")
