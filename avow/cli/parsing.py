"""Readers of what a person typed or saved: numbers, lists, types, keys, bandwidths, times, and formulas in x.

A formula is read and never run as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from avow import file_io
from avow.cli.options import split
from avow.core import DTYPES, dtype_name
from avow.errors import FileError, ParameterError
from avow.parameters import suggestion

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def fraction(name: str, text: str) -> Fraction:
    """A number such as 0.1 or 1/3, exactly as it is written."""
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise ParameterError(name, repr(text), "is not a number", f"try --{name} 0.5, or 1/3") from error


def fractions(name: str, text: str) -> list[Fraction]:
    """Numbers separated by commas."""
    numbers = [fraction(name, word) for word in split(text)]
    if not numbers:
        raise ParameterError(name, repr(text), "names no number", f"try --{name} 0.7,0.3")
    return numbers


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
        remedy = suggestion(name, _DTYPES, f"use one of {', '.join(_DTYPES)}")
        raise ParameterError("dtype", repr(name), "is not known", remedy)
    return _DTYPES[name]


def keys_from(file: Path | None, orthonormal: int | None, random: int | None, dim: int | None, seed: int) -> Tensor:
    """Keys (n, d): those of a file, the first unit vectors, or random directions."""
    ways = {"--keys FILE": file, "--orthonormal N": orthonormal, "--random N": random}
    ways_used = [way for way, value in ways.items() if value is not None]
    if len(ways_used) != 1:
        rule = "must be given in one way" if ways_used else "must be given"
        value = " and ".join(ways_used) or "(not given)"
        raise ParameterError("keys", value, rule, f"use one of {', '.join(ways)}")
    if file is not None:
        if dim is not None:
            raise ParameterError("dim", dim, "is for drawn keys, not for those of a file", "leave --dim out")
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
    tensors, _ = file_io.load_tensors(file, option)
    if name not in tensors:
        rule = f"lacks {name} (it holds {', '.join(sorted(tensors)) or 'nothing'})"
        raise FileError(option, file, rule, f"save a tensor named {name}")
    return tensors[name]


_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# What each unit is of bytes a second, of operations a second (in lower case), and of a second.
_BANDWIDTHS = {
    f"{prefix}{unit}/s": Decimal(factor) / parts
    for prefix, factor in (_PREFIXES | _BINARY).items()
    for unit, parts in (("B", 1), ("bit", 8), ("b", 8))
}
_OPERATIONS = {
    f"{prefix}flop{end}".lower(): Decimal(factor)
    for prefix, factor in _PREFIXES.items()
    for end in ("", "s", "/s", "s/s")
}
_TIMES = {unit: Decimal(10) ** power for unit, power in {"s": 0, "ms": -3, "us": -6, "µs": -6, "ns": -9}.items()}


def speed(name: str, text: str) -> float:
    """Bytes a second.

    >>> speed("link", "400GB/s"), speed("link", "100 Gbit/s")
    (400000000000.0, 12500000000.0)
    """
    return _quantity(name, text, _BANDWIDTHS, "a bandwidth", "400GB/s, or 100Gbit/s")


def operations(name: str, text: str) -> float:
    """Floating-point operations a second.

    >>> operations("compute", "990TFLOP/s")
    990000000000000.0
    """
    return _quantity(name, text, _OPERATIONS, "a number of operations a second", "400TFLOP/s")


def duration(name: str, text: str) -> float:
    """Seconds, at least 0.

    >>> duration("latency", "5us"), duration("latency", "0s")
    (5e-06, 0.0)
    """
    return _quantity(name, text, _TIMES, "a time", "5us, or 0.1ms", zero=True)


def _quantity(name: str, text: str, units: dict[str, Decimal], noun: str, example: str, zero: bool = False) -> float:
    """A number times its unit: finite, and above 0 or, if `zero`, at least that."""
    match = re.fullmatch(r"([0-9.eE+-]+)\s*(\S+)", text.strip())
    unit, remedy = match and (match[2].lower() if units is _OPERATIONS else match[2]), f"try --{name} {example}"
    if match is None or unit not in units:
        raise ParameterError(name, repr(text), f"is not {noun}", remedy)
    try:
        value = float(Decimal(match[1]) * units[unit])
    except ArithmeticError as error:
        raise ParameterError(name, repr(text), "has no number before its unit", remedy) from error
    if not 0 <= value < math.inf or (value == 0 and not zero):
        raise ParameterError(name, repr(text), f"must be {'at least' if zero else 'above'} 0 and finite", remedy)
    return value
