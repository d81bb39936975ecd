"""Speeds and times as people write them: 400GB/s, 100Gbit/s, 5us, 990TFLOP/s."""

from __future__ import annotations

import math
import re

from avow.errors import ParameterError

_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SPEED = re.compile(r"([0-9.eE+-]+)\s*(Ki|Mi|Gi|Ti|[kKMGTP]?)(B|bit|b)/s")
_FLOPS = re.compile(r"([0-9.eE+-]+)\s*([kKMGTP]?)FLOPS?(?:/s)?", re.IGNORECASE)
_TIME = re.compile(r"([0-9.eE+-]+)\s*(s|ms|us|µs|ns)")
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}


def speed(name: str, text: str) -> float:
    """Bytes a second.

    >>> speed("link", "400GB/s"), speed("link", "100 Gbit/s")
    (400000000000.0, 12500000000.0)
    """
    found = _SPEED.fullmatch(text.strip())
    remedy = f"try --{name} 400GB/s, or 100Gbit/s"
    if not found:
        raise ParameterError(name, repr(text), "is no speed", remedy)
    number, prefix, unit = found.groups()
    factor = (_FACTORS | _BINARY)[prefix] * (1.0 if unit == "B" else 0.125)
    return _checked(name, text, _number(name, text, number, remedy) * factor, remedy)


def operations(name: str, text: str) -> float:
    """Floating-point operations a second.

    >>> operations("compute", "990TFLOP/s")
    990000000000000.0
    """
    found, remedy = _FLOPS.fullmatch(text.strip()), f"try --{name} 400TFLOP/s"
    if not found:
        raise ParameterError(name, repr(text), "is no number of operations a second", remedy)
    prefix = found[2] if found[2] in _FACTORS else found[2].upper()
    return _checked(name, text, _number(name, text, found[1], remedy) * _FACTORS[prefix], remedy)


def duration(name: str, text: str) -> float:
    """Seconds; none at all are allowed.

    >>> duration("latency", "5us"), duration("latency", "0s")
    (5e-06, 0.0)
    """
    found, remedy = _TIME.fullmatch(text.strip()), f"try --{name} 5us, or 0.1ms"
    if not found:
        raise ParameterError(name, repr(text), "is no time", remedy)
    value = _number(name, text, found[1], remedy) / _IN_A_SECOND[found[2]]
    if not 0 <= value < math.inf:
        raise ParameterError(name, repr(text), "must be at least 0 and finite", remedy)
    return value


def _number(name: str, text: str, number: str, remedy: str) -> float:
    try:
        return float(number)
    except ValueError as error:
        raise ParameterError(name, repr(text), "has no number before its unit", remedy) from error


def _checked(name: str, text: str, value: float, remedy: str) -> float:
    if not 0 < value < math.inf:
        raise ParameterError(name, repr(text), "must be above 0 and finite", remedy)
    return value
