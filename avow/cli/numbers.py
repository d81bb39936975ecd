"""Numbers, lists, types and keys, read from what a person typed or saved."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from avow import file_io
from avow.cli.options import split
from avow.core import DTYPES, named
from avow.errors import FileError, ParameterError

_DTYPES = {named(dtype): dtype for dtype in DTYPES}


def fraction(name: str, text: str) -> Fraction:
    """A number such as 0.1 or 1/3, exactly as it is written."""
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise ParameterError(name, repr(text), "is no number", f"try --{name} 0.5, or 1/3") from error


def fractions(name: str, text: str) -> list[Fraction]:
    """Numbers separated by commas."""
    found = [fraction(name, word) for word in split(text)]
    if not found:
        raise ParameterError(name, repr(text), "names no number", f"try --{name} 0.7,0.3")
    return found


def indices(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(word) for word in split(text)]
    except ValueError as error:
        raise ParameterError(name, repr(text), "must be whole numbers", f"try --{name} 0,1") from error


def routes(given: Sequence[str]) -> dict[int, list[int]]:
    """Who reads whom, from words such as 0=1 and 1=0,2."""
    table: dict[int, list[int]] = {}
    for text in given:
        reader, equals, sources = text.partition("=")
        if not (equals and reader.strip().isdigit() and split(sources)):
            raise ParameterError("route", repr(text), "must read TOKEN=SOURCES", "try --route 0=1 --route 1=0,2")
        if int(reader) in table:
            raise ParameterError("route", repr(text), "names a token twice", f"try --route {reader}=0,1 for a mean")
        table[int(reader)] = indices("route", sources)
    if not table:
        raise ParameterError("route", "nothing", "must name at least one route", "try --route 0=1")
    return table


def dtype_named(name: str) -> torch.dtype:
    """The type of that name."""
    if name not in _DTYPES:
        raise ParameterError("dtype", repr(name), "is not known", f"use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def keys_from(file: Path | None, orthonormal: int | None, random: int | None, dim: int | None, seed: int) -> Tensor:
    """Keys (n, d): those of a file, the first unit vectors, or random directions."""
    ways = {"--keys FILE": file, "--orthonormal N": orthonormal, "--random N": random}
    told = [way for way, value in ways.items() if value is not None]
    if len(told) != 1:
        value = " and ".join(told) or "nothing"
        raise ParameterError("keys", value, "must be given in one way", f"use one of {', '.join(ways)}")
    if file is not None:
        if dim is not None:
            rule, remedy = "is for keys that are drawn, and those of a file have theirs", "leave --dim out"
            raise ParameterError("dim", dim, rule, remedy)
        return tensor_in(file, "keys", "keys")
    count = orthonormal if orthonormal is not None else random
    assert count is not None
    width = count if dim is None else dim
    if count < 1 or width < 1:
        raise ParameterError("keys", f"{count} × {width}", "must have at least one key and one dimension", "try 8")
    if orthonormal is not None:
        if width < count:
            raise ParameterError("dim", dim, f"has no room for {count} orthonormal keys", f"try --dim {count}")
        return torch.eye(count, width, dtype=torch.float64)
    drawn = torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm(dim=1, keepdim=True)


def tensor_in(file: Path, name: str, option: str) -> Tensor:
    """One matrix of the safetensors file that an option names."""
    held, _ = file_io.load_tensors(file, option)
    if name not in held:
        rule = f"lacks {name} (it holds {', '.join(sorted(held)) or 'nothing'})"
        raise FileError(option, file, rule, f"save a tensor named {name}")
    return held[name]
