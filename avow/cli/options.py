"""What several commands ask for, and how it is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from avow import file_io
from avow.bench.workloads import KINDS, Workload, read, workload
from avow.errors import ParameterError

Length = Annotated[int | None, typer.Option(help="Keys and queries; with --input, keep only the first so many keys.")]
Heads = Annotated[int, typer.Option(help="Heads to draw.")]
Dim = Annotated[int, typer.Option(help="Dimension of each head.")]
Input = Annotated[
    Path | None, typer.Option(help="Your own heads: a .safetensors file with q, k, v and, if you like, q_positions.")
]
Causal = Annotated[bool, typer.Option("--causal", help="A row sees only keys up to its own place.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of what is drawn.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute; auto: a GPU if there is one.")]
Threads = Annotated[int, typer.Option(help="CPU threads; more than 1 is unsteady on a busy machine.")]
Png = Annotated[Path | None, typer.Option(help="Write a picture here too, as .png.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


def split(text: str | None) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def place(device: str) -> str:
    """Where to compute: cpu or cuda."""
    there = torch.cuda.is_available()
    if device not in ("auto", "cpu", *(["cuda"] if there else [])):
        raise ParameterError("device", device, "is not available", "use --device cpu")
    return "cuda" if device != "cpu" and there else "cpu"


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Have torch use so many for a while."""
    if count < 1:
        raise ParameterError("threads", count, "must be at least 1", "try --threads 1")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def files(*paths: Path | None, png: Path | None = None) -> list[Path]:
    """Those places that were named, each fit to be written: told before the work, not after it."""
    if png is not None and png.suffix != ".png":
        raise ParameterError("png", png, "must be a .png file", f"try --png {png.with_suffix('.png')}")
    named = [path for path in (*paths, png) if path is not None]
    for i, path in enumerate(named):
        if path.absolute() in [other.absolute() for other in named[:i]]:
            raise ParameterError("path", path, "is given for two files", "name another place for one of them")
        file_io.ready(path)
    return named


def workloads(
    kinds: str, input: Path | None, length: int | None, heads: int, dim: int, seed: int, causal: bool, device: str
) -> list[Workload]:
    """The heads to look at: drawn, one workload for each kind, or those of a file."""
    if length is not None and length < 1:
        raise ParameterError("length", length, "must be at least 1", "try --length 8192")
    if input is not None:
        own = read(input, causal)
        return [(own if length is None else own.first(length)).to(device)]
    names = split(kinds)
    if not names:
        raise ParameterError("kinds", repr(kinds), "names no kind of workload", f"known kinds: {', '.join(KINDS)}")
    return [workload(name, heads, length or 8192, dim, seed, causal=causal).to(device) for name in names]


def command() -> str:
    """What was typed."""
    return " ".join(["avow", *sys.argv[1:]])
