"""Docstrings as data: the prose, and what is said of each parameter, of the return value and of each error.

Public functions and classes have one layout:

    What the caller gets, in one line.

    More of it.

    Args:
        q: queries, (batch, heads, n, dim).
        k, v: keys and values; several names may share an entry,
            and an entry may go on in the next line.

    Returns:
        What comes back.

    Raises:
        ShapeError: what must not be.

    >>> 40 + 2
    42

A class that people make has `Args`, one that they only read has `Attributes`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass, field

_HEADINGS = ("Args", "Attributes", "Returns", "Raises")


@dataclass
class Docstring:
    """The parts of a docstring; `text` is the prose, `examples` all that follows the last section."""

    text: str = ""
    args: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)
    examples: str = ""

    @property
    def described(self) -> dict[str, str]:
        """What is said of each parameter or attribute."""
        return self.args | self.attributes


def parse(text: str | None) -> Docstring:
    """The parts of a docstring. Text that has none of the sections is all prose."""
    lines: dict[str, list[str]] = {name: [] for name in ("text", *_HEADINGS, "examples")}
    place = "text"
    for line in inspect.cleandoc(text or "").splitlines():
        heading = line.removesuffix(":")
        if line.endswith(":") and heading in _HEADINGS:
            place = heading
            continue
        if place in _HEADINGS and line and not line.startswith(" "):
            place = "examples"
        lines[place].append(line)
    plain = {name: textwrap.dedent("\n".join(part)).strip("\n") for name, part in lines.items()}
    entries = {name: _entries(plain[name]) for name in ("Args", "Attributes", "Raises")}
    returns = " ".join(plain["Returns"].split())
    args, attributes, raises = entries.values()
    return Docstring(plain["text"], args, attributes, returns, raises, plain["examples"])


def _entries(section: str) -> dict[str, str]:
    """What a section says of each name; lines that begin with neither a name nor a blank belong to the entry before."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        start = re.match(r"((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (.*)", line)
        if start:
            names = [name.lstrip("*") for name in start[1].split(", ")]
            entries |= dict.fromkeys(names, start[2])
        else:
            entries |= {name: f"{entries[name]} {line.strip()}".strip() for name in names}
    return entries
