"""Counts, times and sizes as people read them: short, and the same wherever they are printed."""

from __future__ import annotations

NOTHING = "–"
"""What stands for a quantity that is not known."""


def seconds(x: float | None) -> str:
    """
    >>> [seconds(x) for x in (None, 0.0, 3e-7, 2.5e-5, 0.25, 0.9999, 90.0, 5432.1)]
    ['–', '0 s', '0.3 µs', '25 µs', '250 ms', '1 s', '90 s', '5,430 s']
    """
    if x is None:
        return NOTHING
    x = three_digits(x)
    return f"{x * 1e6:.3g} µs" if 0 < x < 1e-3 else f"{x * 1e3:.3g} ms" if 0 < x < 1 else f"{x:,.10g} s"


def three_digits(x: float) -> float:
    """The number that three digits show: its unit is chosen for this one, or 999.9 ms would be 1e+03 ms."""
    return float(f"{x:.3g}")


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


def ratio(x: float | None) -> str:
    """
    >>> ratio(0.5), ratio(12.3), ratio(None)
    ('0.50×', '12×', '–')
    """
    return NOTHING if x is None else f"{x:.2f}×" if x < 10 else f"{x:.0f}×"


def count(number: int, word: str) -> str:
    """
    >>> count(1, "head"), count(4096, "query")
    ('1 head', '4,096 queries')
    """
    several = f"{word[:-1]}ies" if word.endswith("y") and word != "key" else f"{word}s"
    return f"{number:,} {word if number == 1 else several}"
