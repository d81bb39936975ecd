"""Numbers as people read them: short, and the same in tables and on pages."""

from __future__ import annotations

from avow.contract import Method

NOTHING = "–"


def label(method: Method) -> str:
    """A method with what tells this setting from others: its first parameter, and all that is not as usual."""
    declared = method.declared()
    told = [
        f"{p.name}={getattr(method, p.name)}"
        for i, p in enumerate(declared)
        if i == 0 or getattr(method, p.name) != p.default
    ]
    return f"{method.name}({', '.join(told)})"


def error(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.1e}"


def ratio(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.2f}×" if x < 10 else f"{x:.0f}×"


def seconds(x: float | None) -> str:
    if x is None:
        return NOTHING
    return f"{x * 1e3:.3g} ms" if x < 1 else f"{x:.3g} s"


def memory(x: float | None) -> str:
    if x is None:
        return NOTHING
    return f"{x / 2**20:.1f} MiB" if x < 2**30 else f"{x / 2**30:.1f} GiB"


def listed(words: list[str]) -> str:
    """
    >>> listed(["copying", "averaging", "diffuse"])
    'copying, averaging and diffuse'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number(x: object) -> str:
    """A cell of any table: numbers short, the rest as it is.

    >>> [number(x) for x in (3, 0.123456, 1e-9, 1234567.0, True, None, "½")]
    ['3', '0.1235', '1e-09', '1234567', 'yes', '–', '½']
    """
    if x is None:
        return NOTHING
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, float):
        return str(int(x)) if x.is_integer() and abs(x) < 1e7 else f"{x:.4g}"
    return str(x)
