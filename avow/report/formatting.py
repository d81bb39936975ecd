"""Numbers as people read them: short, and the same in tables and on pages."""

from __future__ import annotations

from collections.abc import Mapping

from avow.core import Sizes

NOTHING = "–"


def error(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.1e}"


def ratio(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.2f}×" if x < 10 else f"{x:.0f}×"


def seconds(x: float | None) -> str:
    """
    >>> [seconds(x) for x in (None, 0.0, 3e-7, 2.5e-5, 0.25, 0.9999, 90.0, 5432.1)]
    ['–', '0 s', '0.3 µs', '25 µs', '250 ms', '1 s', '90 s', '5,430 s']
    """
    if x is None:
        return NOTHING
    x = _three_digits(x)
    return f"{x * 1e6:.3g} µs" if 0 < x < 1e-3 else f"{x * 1e3:.3g} ms" if 0 < x < 1 else f"{x:,.10g} s"


def _three_digits(x: float) -> float:
    """The number that three digits show: its unit is chosen for this one, or 999.9 ms would be 1e+03 ms."""
    return float(f"{x:.3g}")


def size(count: float) -> str:
    """Bytes on their way, by thousands as links count them.

    >>> size(1536), size(999_900), size(4e11), size(0)
    ('1.54 kB', '1 MB', '400 GB', '0 B')
    """
    count = _three_digits(count)
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} B"


def memory(x: float | None) -> str:
    """Bytes held at once.

    >>> memory(640), memory(3 * 2**19), memory(2.0**45)
    ('0.6 KiB', '1.5 MiB', '32.0 TiB')
    """
    if x is None:
        return NOTHING
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    factor, unit = next((pair for pair in units if x >= pair[0]), units[-1])
    return f"{x / factor:.1f} {unit}"


def count(number: int, word: str) -> str:
    """
    >>> count(1, "head"), count(4096, "query")
    ('1 head', '4,096 queries')
    """
    several = f"{word[:-1]}ies" if word.endswith("y") and word != "key" else f"{word}s"
    return f"{number:,} {word if number == 1 else several}"


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
