"""What several commands ask for, and how it is read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from avow.errors import ParameterError
from avow.workloads import KINDS, Workload, read, workload


def kinds_help() -> str:
    """Every kind of workload in a line."""
    lines = ["Kinds of heads to draw, separated by commas.", "", "\b"]
    return "\n".join(lines + [f"{name}: {kind.summary}" for name, kind in KINDS.items()])


Length = Annotated[int | None, typer.Option(help="Keys and queries; with --input, keep only the first so many keys.")]
Heads = Annotated[int, typer.Option(help="Heads to draw.")]
Dim = Annotated[int, typer.Option(help="Dimension of each head.")]
Input = Annotated[
    Path | None, typer.Option(help="Your own heads: a .safetensors file with q, k, v and, if you like, q_positions.")
]
Causal = Annotated[bool, typer.Option(help="Whether a row sees only keys up to its own place.")]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn and of random methods.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


def split(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def workloads(
    kinds: str, input: Path | None, length: int | None, heads: int, dim: int, seed: int, causal: bool, device: str
) -> list[Workload]:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ParameterError("device", device, "is not at hand", "use --device cpu")
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
    return " ".join(["avow", *sys.argv[1:]])
