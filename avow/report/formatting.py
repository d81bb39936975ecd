"""Numbers as people read them: short, and the same in tables and on pages."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal

from avow.core import Sizes
from avow.core.quantities import NOTHING as NOTHING
from avow.core.quantities import count as count
from avow.core.quantities import memory as memory
from avow.core.quantities import ratio as ratio
from avow.core.quantities import seconds as seconds
from avow.core.quantities import three_digits


def error(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.1e}"


def percent(x: float, digits: int = 3, bound: bool = False) -> str:
    """A share of a hundred in a few digits; a bound is rounded up, so that it stays one.

    >>> percent(0.00279), percent(0.0282001), percent(0.0282001, bound=True), percent(37.0)
    ('0.279%', '2.82%', '2.83%', 'over 1000%')
    """
    rounded = Context(prec=digits, rounding=ROUND_CEILING if bound else ROUND_HALF_EVEN)
    return "over 1000%" if x > 10 else f"{float(rounded.multiply(Decimal(x), Decimal(100))):.{digits}g}%"


def size(count: float) -> str:
    """Bytes on their way, by thousands as links count them.

    >>> size(1536), size(999_900), size(4e11), size(0)
    ('1.54 kB', '1 MB', '400 GB', '0 B')
    """
    count = three_digits(count)
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} B"


def shape(z: Sizes) -> str:
    """The sizes of a problem in a line."""
    shared = "" if z.heads == z.key_heads else f" on {z.key_heads:,}"
    parts = [count(z.heads, "head") + shared, count(z.queries, "query"), count(z.keys, "key"), f"dimension {z.dim}"]
    return ", ".join(parts + (["causal"] if z.causal else []))


def listed(words: list[str]) -> str:
    """
    >>> listed(["copying", "averaging", "diffuse"])
    'copying, averaging and diffuse'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def between(ends: tuple[float, float]) -> str:
    """A number that is known to lie between two: as many digits as both ends share, at most ten.

    >>> between((0.12345, 0.12346)), between((1.0, 2.0))
    ('0.1235', '1 to 2')
    """
    for digits in range(10, 1, -1):
        low, high = (f"{end:.{digits}g}" for end in ends)
        if low == high:
            return low
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


def number(x: object) -> str:
    """A cell of any table, or a fact: numbers short, lists in a row, the rest as it is.

    >>> [number(x) for x in (3, 0.123456, 1e-9, 1234567.0, True, None, "½", [1, {"a": 2.0}])]
    ['3', '0.1235', '1e-09', '1234567', 'yes', '–', '½', '1, a 2']
    """
    if isinstance(x, list | tuple):
        return ", ".join(map(number, x))
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {number(value)}" for name, value in x.items())
    if x is None:
        return NOTHING
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, float):
        return str(int(x)) if x.is_integer() and abs(x) < 1e7 else f"{x:.4g}"
    return str(x)
