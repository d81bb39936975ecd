"""Several modules of JavaScript as one script: pages that were opened from a disk cannot load modules.

Each module becomes a function that is called at once and returns what the module exports, so names of two modules never
meet. Only what our own modules use is understood, and everything else is refused: `import {a, b} from "./x.js"`,
`import "./x.js"`, and `export` before a `function`, an `async function`, a `class` or one `const`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_IMPORT = re.compile(r'^import (?:\{(?P<names>[^{}]*)\} from )?"\./(?P<file>[\w.]+)";[^\S\n]*\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function\*?|function\*?|class|const) +([A-Za-z_$][\w$]*))", re.MULTILINE)
# What is left of a module's own words where they could not be read.
_LEFT = re.compile(r"^(?:import\b|export\b).*|\bimport\(.*", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_$][\w$]*")


class NotBundled(ValueError):
    """A module that is written in a way that is not understood here."""


def bundle(files: Mapping[str, str], entries: Sequence[str]) -> str:
    """One script that does what these modules do, in this order; each that they import stands once, before them."""
    order: list[str] = []
    for entry in entries:
        _collect(files, entry, order, [])
    script = "\n".join(_function(name, files[name]) for name in order)
    # Whatever a string holds, it does not end the element that the script stands in.
    return re.sub(r"</(?=script)|<(?=!--)", lambda found: "<\\" + found[0][1:], script, flags=re.IGNORECASE)


def _collect(files: Mapping[str, str], name: str, order: list[str], under: list[str]) -> None:
    if name in under:
        raise NotBundled(f"{name} imports itself, by way of {', '.join(under)}")
    if name in order:
        return
    for found in _IMPORT.finditer(files[name]):
        _collect(files, found["file"], order, [*under, name])
    order.append(name)


def _function(name: str, source: str) -> str:
    """A module as a constant that holds what it exports."""
    exported = _EXPORT.findall(source)
    inside = _EXPORT.sub("", _IMPORT.sub(_constants, source))
    left = _LEFT.search(inside)
    if left is not None:
        raise NotBundled(f"{name}: {left[0]!r} is not understood")
    return f"const {_constant(name)} = (() => {{\n{inside}\nreturn {{{', '.join(exported)}}};\n}})();"


def _constants(found: re.Match[str]) -> str:
    """An import as a line that takes names from a module's constant."""
    if found["names"] is None:
        return ""
    names = [name.strip() for name in found["names"].split(",") if name.strip()]
    parts = [[word.strip() for word in name.split(" as ")] for name in names]
    if not all(_NAME.fullmatch(word) for part in parts for word in part):
        raise NotBundled(f"{found[0]!r} is not understood")
    return f"const {{{', '.join(': '.join(part) for part in parts)}}} = {_constant(found['file'])};\n"


def _constant(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)
