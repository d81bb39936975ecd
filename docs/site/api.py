"""Pages of the public names, from their signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

# What people import from, in the order in which they meet it.
MODULES = (
    "avow",
    "avow.nn",
    "avow.distributed",
    "avow.optim",
    "avow.theory.constructions",
    "avow.theory.claims",
    "avow.training",
    "avow.integrations.transformers",
    "avow.core",
    "avow.errors",
)
# Signatures longer than this have one parameter to a line.
_WIDE = 88


def public(module: types.ModuleType) -> dict[str, Any]:
    """The names a module offers: its `__all__`, or what it defines or re-exports of its own package."""
    if hasattr(module, "__all__"):
        found = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
        return dict(sorted(((name, x) for name, x in found.items() if not inspect.ismodule(x)), key=_rank))
    return {
        name: thing for name, thing in vars(module).items() if not name.startswith("_") and _of(thing, module.__name__)
    }


def _rank(named: tuple[str, Any]) -> int:
    """What one calls, then what one gets back, then what can go wrong."""
    thing = named[1]
    return inspect.isclass(thing) + (inspect.isclass(thing) and issubclass(thing, Exception))


def _of(thing: Any, module: str) -> bool:
    """Whether a class or a function is at home in a module or below it."""
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return False
    home = getattr(thing, "__module__", "") or ""
    return home == module or home.startswith(f"{module}.")


def module_page(name: str) -> tuple[str, list[str]]:
    """The page of a module in Markdown, and what is wrong with its docstrings."""
    module = importlib.import_module(name)
    offered = public(module)
    parts, faults = [f"# {name}", markdown_of(module.__doc__ or "")], []
    parts.append(" · ".join(f"[{item}](#{item.lower()})" for item in offered))
    for item, thing in offered.items():
        text = described(thing)
        if not text:
            faults.append(f"{name}.{item}: has no docstring")
        parts += [f"## {item}", _signature(item, thing), markdown_of(text)]
        if inspect.isclass(thing):
            parts += _members(thing)
    return "\n\n".join(part for part in parts if part) + "\n", faults


def described(thing: Any) -> str:
    """The docstring someone wrote; a dataclass or a named tuple writes one into the gap by itself."""
    if get_origin(thing) is Literal:
        return f"One of {', '.join(f'`{word}`' for word in get_args(thing))}."
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text


def _members(kind: type) -> Iterator[str]:
    """Methods and properties of a class that someone described, each under its name."""
    for name, thing in vars(kind).items():
        plain = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if name.startswith("_") or not (inspect.isfunction(plain) or isinstance(plain, property)):
            continue
        text = inspect.cleandoc(plain.__doc__ or "")
        if text:
            signature = _signature(f"{kind.__name__}.{name}", plain) if inspect.isfunction(plain) else ""
            yield "\n\n".join(part for part in (f"### {kind.__name__}.{name}", signature, markdown_of(text)) if part)


def _signature(name: str, thing: Callable[..., Any]) -> str:
    """A name with its parameters as one would write them, in one line or one to a line."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return ""  # all errors are made alike, and not by users
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    words, starred = [], False
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = "" if p.default is p.empty else f" = {_default(p.default)}"
        words.append(f"{stars}{p.name}{_annotation(': ', p.annotation)}{default}")
    back = "" if inspect.isclass(thing) else _annotation(" -> ", found.return_annotation)
    line = f"{name}({', '.join(words)}){back}"
    if len(line) > _WIDE:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){back}"
    return f"```python\n{line}\n```"


def _annotation(before: str, annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return before + (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(value: Any) -> str:
    """A default as Python writes it; an object that only has an address goes by its name."""
    return getattr(value, "__name__", "…") if repr(value).startswith("<") else repr(value)


def markdown_of(text: str) -> str:
    """A docstring as Markdown: its formulas between dollars, its examples in blocks."""
    text = inspect.cleandoc(text)
    text = re.sub(r"^\.\. math:: *(.*(?:\n(?: +.*|(?=\n +)))*)", _displayed, text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = re.sub(r"\[claim ([\w-]+)\]", r"(claim `\1`)", text)
    return re.sub(
        r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", lambda found: f"```python\n{found[0].rstrip()}\n```\n", text, flags=re.M
    )


def _displayed(found: re.Match[str]) -> str:
    lines = textwrap.dedent(found[1]).split()
    return f"$$\n{' '.join(lines)}\n$$\n"


def names_of(module: str) -> list[str]:
    """The public names of a module, by its name."""
    return list(public(importlib.import_module(module)))
