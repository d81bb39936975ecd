"""What commands share: options, how their values are read, lists for a command's help, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand

import avow
from avow import file_io
from avow.bench.workloads import KINDS, Workload, read, workload
from avow.calibration import is_off
from avow.errors import MissingPackage, ParameterError
from avow.extras import missing, require


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a command; its name is the parameter's unless others are given."""
    return typer.Option(*names, help=help, **more)


Length = Annotated[
    int | None,
    option(
        "Keys and queries; with --input, use only this many of the first keys.",
        min=1,
        show_default="8192, or all keys of --input",
    ),
]
Heads = Annotated[int, option("Heads to draw.", min=1)]
Dim = Annotated[int, option("Dimension of each head.", min=1)]
Input = Annotated[Path | None, option("Your own heads: a .safetensors file with q, k, v and optionally q_positions.")]
Causal = Annotated[bool, option("A row sees only the keys up to its own position.", "--causal")]
Seed = Annotated[int, option("Seed of random draws.", min=0, max=2**63 - 1)]
Device = Annotated[str, option("Where to compute; auto: a GPU if there is one.", metavar="auto|cpu|cuda")]
KeyHeads = Annotated[int | None, option("Key heads, which the query heads share; default: as many.", min=1)]
Batch = Annotated[int | None, option("Sequences at once; default: 1.", min=1)]
Dtype = Annotated[
    str | None, option("Type: float64, float32, bfloat16 or float16; default: float32, or the file's.", metavar="TYPE")
]
Recalibrate = Annotated[bool, option("Measure this machine again, whatever is known of it.", "--recalibrate")]
Threads = Annotated[int, option("CPU threads; times vary with more than 1 on a busy machine.", min=1)]
Png = Annotated[Path | None, option("Write a picture here too, as .png.")]
AsJson = Annotated[bool, option("Print one JSON document and nothing else on stdout.", "--json")]


# Lists at the end of a command's help: terms and their meanings by title.
Lists = dict[str, list[tuple[str, str]]]


def split(text: str | None) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def place(device: str) -> str:
    """Where to compute: cpu or cuda."""
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if device not in ("auto", *available):
        raise ParameterError("device", device, "is not available", "use --device cpu")
    return available[-1] if device == "auto" else device


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Have torch use this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def report_option(usual: str) -> Any:
    """The option that says where a report goes."""
    return option("Where the report goes.", "--html", show_default=usual)


def report_file(html: Path | None, usual: Path | None = None) -> Path | None:
    """Where a report goes: where someone asked for it, else the usual place; None if what draws it is missing.

    It is an error to ask for a report without the packages that draw it.
    """
    error = _no_report()
    if error is None:
        return html or usual
    if html is not None:
        raise error
    return None


def _no_report() -> MissingPackage | None:
    return missing("jinja2", "latex2mathml", "matplotlib", purpose="for the report")


def files(*paths: Path | None, png: Path | None = None) -> list[Path]:
    """The paths that are given; raises before the work, not after it, if one cannot be written."""
    if png is not None and png.suffix != ".png":
        raise ParameterError("png", png, "must be a .png file", f"try --png {png.with_suffix('.png')}")
    if png is not None:
        require("matplotlib", purpose="to draw pictures")
    named = [path for path in (*paths, png) if path is not None]
    for i, path in enumerate(named):
        if path.absolute() in [other.absolute() for other in named[:i]]:
            raise ParameterError("path", path, "is given for two files", "give one of them another path")
        file_io.ready(path)
    return named


def present(
    as_json: bool,
    plain: dict[str, Any],
    *parts: Any,
    written: Iterable[Path] = (),
    reported: bool = True,
    faults: Iterable[str] = (),
) -> None:
    """Print a result as one JSON document, or its tables and lines for people; on stderr its faults, and the files.

    A result that is not `reported` says what is missing for that. One with faults ends the command with an error.
    """
    from avow.report.terminal import show

    if as_json:
        document(plain)
    else:
        show(*parts)
    wrong = [f"avow: {fault}" for fault in faults]
    without = [] if reported else [f"no report was written: {_no_report()}"]
    for line in (*wrong, *(f"wrote {path}" for path in written), *without):
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)


def document(plain: dict[str, Any]) -> None:
    """Print one JSON document, in ASCII so that every terminal and pipe can carry it."""
    typer.echo(json.dumps(plain, indent=1, allow_nan=False))


def workloads(
    kinds: str, input: Path | None, length: int | None, heads: int, dim: int, seed: int, causal: bool, device: str
) -> list[Workload]:
    """The heads of a file, or drawn ones: a workload for each kind."""
    if input is not None:
        own = read(input, causal)
        return [(own if length is None else own.first(length)).to(device)]
    names = split(kinds)
    if not names:
        raise ParameterError("kinds", repr(kinds), "names no kind of workload", f"known kinds: {', '.join(KINDS)}")
    return [workload(name, heads, length or 8192, dim, seed, causal=causal).to(device) for name in names]


def refuse_with_input(**given: object) -> None:
    """Raise if one of these options is given beside a file, which says it, too."""
    for name, value in given.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ParameterError(option, value, "follows from the heads of --input", f"leave --{option} or --input out")


def tell(line: str) -> None:
    """Say on stderr what takes a while."""
    typer.echo(f"avow: {line}", err=True)


def again(recalibrate: bool) -> bool:
    """Whether to measure this machine again; raises if nothing may be measured."""
    if recalibrate and is_off():
        rule = "would measure this machine, and AVOW_CALIBRATION=off forbids it"
        raise ParameterError("recalibrate", True, rule, "unset AVOW_CALIBRATION")
    return recalibrate


def command() -> str:
    """The command line as it was typed."""
    return " ".join(["avow", *sys.argv[1:]])


def command_with(lists: Callable[[], Lists]) -> type[TyperCommand]:
    """A kind of command whose help ends in such lists."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            for title, terms in lists().items():
                with formatter.section(title):
                    formatter.write_dl(terms)

    return Command


def kinds() -> Lists:
    """Every kind of workload in a line."""
    return {"Kinds": [(name, kind.summary) for name, kind in KINDS.items()]}


def methods() -> Lists:
    """Every method with its parameters, as the methods themselves declare them."""
    terms = []
    for name, kind in avow.all_methods().items():
        terms.append((name, kind.summary))
        terms += [(f"  {name}.{p.name}={p.default}", p.help) for p in kind.declared()]
    return {"Methods": terms}


def configuration(**own: object) -> Lists:
    """The fields of a configuration; `own` are a command's own defaults."""
    from avow.nn import ModelConfig
    from avow.parameters import parameters_of
    from avow.training.config import SECTIONS

    lists = {}
    for section, kind in SECTIONS.items():
        terms = []
        for p in parameters_of(kind):
            choices = f" ({', '.join(p.rule.choices)})" if p.rule.choices else ""
            default = own.get(p.name, p.default)
            shown = ", ".join(default) if isinstance(default, tuple) else default
            terms.append((f"{section}.{p.name}={shown}", f"{p.help}{choices}"))
        lists[f"Fields of {section}, in a file or as section.name=value"] = terms
    usual = ModelConfig(vocabulary=1)
    about = [(field.name, field.metadata["help"]) for field in fields(usual) if field.name != "vocabulary"]
    lists["Fields of model"] = [(f"model.{name}={getattr(usual, name)}", help) for name, help in about]
    return lists
