"""Pages of the public names, from their signatures and docstrings (the layout is that of `avow.core.docstring`).

What a parameter means is taken from the docstring, or for a field of a dataclass from the help it was declared with or
from the text below it, or from the docstring of the module if its functions share it. A parameter that nothing is said
of is a fault. What several modules offer is described on the page of the first, and the others link to it.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from avow.core.docstring import Docstring, parse

# What people import from, in the order in which they meet it.
MODULES = (
    "avow",
    "avow.bounds",
    "avow.nn",
    "avow.distributed",
    "avow.optim",
    "avow.theory.constructions",
    "avow.theory.claims",
    "avow.theory.claims.toolbox",
    "avow.training",
    "avow.integrations.transformers",
    "avow.core",
    "avow.errors",
)
# Of these, functions alone have to say what each parameter is: classes are what functions return.
OF_FUNCTIONS = ("avow.theory.constructions", "avow.training")
# So many rows of a table that an earlier function of the page has, too, become one that refers to it.
_REPEATED = 3
# Signatures longer than this have one parameter to a line.
_WIDE = 88


def public(module: types.ModuleType) -> dict[str, Any]:
    """The names a module offers: its `__all__`, or what it defines, re-exports, or imports under its own name."""
    if hasattr(module, "__all__"):
        found = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
        return dict(sorted(((name, x) for name, x in found.items() if not inspect.ismodule(x)), key=_rank))
    offered = reexported(module)
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and (name in offered or _of(thing, module.__name__))
    }


def reexported(module: types.ModuleType) -> set[str]:
    """The names that a module imports as themselves, `from a import b as b`, which offers them to others."""
    try:
        body = ast.parse(inspect.getsource(module)).body
    except (OSError, TypeError):
        return set()
    imported = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in imported if alias.asname == alias.name}


def homes(modules: tuple[str, ...]) -> dict[int, str]:
    """Of each class and function, by its `id`, the first module that offers it, and its name there."""
    found: dict[int, str] = {}
    for module in modules:
        for name, thing in public(importlib.import_module(module)).items():
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(id(thing), f"{module}.{name}")
    return found


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


def module_page(name: str, home: Mapping[int, str] | None = None) -> tuple[str, list[str]]:
    """The page of a module in Markdown, and what is wrong with its docstrings.

    What another module is the `home` of is linked and not described again.
    """
    module = importlib.import_module(name)
    offered = public(module)
    parts, faults = [f"# {name}", markdown_of(parse(module.__doc__).text)], []
    parts.append(" · ".join(f"[{item}](#{anchor})" for item, anchor in anchors(name).items()))
    said: dict[str, Any] = {}
    for item, thing in offered.items():
        place = (home or {}).get(id(thing), f"{name}.{item}")
        if place != f"{name}.{item}":
            parts += [f"## {item}", f"`{place}` describes it."]
            continue
        found = faults_of(item, thing)
        if name in OF_FUNCTIONS and not inspect.isfunction(thing):
            found = [] if described(thing) else [f"{item}: has no docstring"]
        faults += [f"{name}.{fault}" for fault in found]
        before = _alike(thing, said)
        parts += [f"## {item}", *_described(item, thing, before, said.get(before))]
        if inspect.isfunction(thing):
            said[item] = thing
        if inspect.isclass(thing):
            for member, plain in members(thing).items():
                parts += [f"### {item}.{member}", *_described(f"{item}.{member}", plain)]
    return "\n\n".join(part for part in parts if part) + "\n", faults


def described(thing: Any) -> str:
    """The docstring someone wrote; a dataclass or a named tuple writes one into the gap by itself."""
    if get_origin(thing) is Literal:
        return f"One of {', '.join(f'`{word}`' for word in get_args(thing))}."
    if isinstance(thing, str | int | float | tuple | frozenset | dict):
        return f"A constant: `{thing!r}`."
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text


def faults_of(name: str, thing: Any) -> list[str]:
    """What a public name's docstring, and those of its members, leave unsaid or say of what does not exist."""
    if not described(thing):
        return [f"{name}: has no docstring"]
    said, known = meanings(thing), [p.name for p in parameters(thing)]
    found = [f"{name}: does not say what {one} is" for one in known if one not in said]
    wrong = [one for one in parse(described(thing)).args if one not in known]
    found += [f"{name}: speaks of {one}, which is not a parameter" for one in wrong]
    if inspect.isclass(thing):
        for member, plain in members(thing).items():
            found += [] if isinstance(plain, property) else faults_of(f"{name}.{member}", plain)
    return found


def meanings(thing: Any) -> dict[str, str]:
    """What is said of each parameter, or of each field of a class."""
    said: dict[str, str] = {}
    for owner in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else ():
        if owner.__module__.partition(".")[0] in ("builtins", "torch", "transformers", "abc", "typing", "enum"):
            continue
        fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
        said |= _texts_below(owner) | {x.name: x.metadata["help"] for x in fields if "help" in x.metadata}
        said |= parse(owner.__doc__).described
    return _shared(thing) | said | parse(described(thing)).described


def _shared(thing: Any) -> dict[str, str]:
    """What the module of a function says of parameters that several of its functions have."""
    if not inspect.isfunction(thing) or thing.__module__ not in sys.modules:
        return {}
    words = parse(sys.modules[thing.__module__].__doc__).args
    return {one.name: words[one.name] for one in parameters(thing) if one.name in words}


def _texts_below(kind: type) -> dict[str, str]:
    """The text below each field of a class."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, text in itertools.pairwise(body.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                said[name] = " ".join(words.split())
    return said


def parameters(thing: Any) -> list[inspect.Parameter]:
    """What a function takes, or what a class is made of; nothing for errors and enumerations, which are all alike."""
    if get_origin(thing) is Literal or (inspect.isclass(thing) and issubclass(thing, Exception | enum.Enum)):
        return []
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.name not in ("self", "cls")]


def members(kind: type) -> dict[str, Any]:
    """Methods and properties of a class that it or a class of avow above it has and somebody described."""
    found: dict[str, Any] = {}
    for owner in reversed(inspect.getmro(kind)):
        if owner is not kind and not owner.__module__.startswith("avow."):
            continue
        for name, thing in vars(owner).items():
            plain = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
            if name.startswith("_") or not (inspect.isfunction(plain) or isinstance(plain, property)):
                continue
            # Another library's functions are described by that library.
            own = isinstance(plain, property) or inspect.unwrap(plain).__module__ == owner.__module__
            if plain.__doc__ and own:
                found[name] = plain
    return found


def _alike(thing: Any, said: Mapping[str, Any]) -> str:
    """The first function of the page whose rows a table need not repeat; empty if there is none."""
    if not inspect.isfunction(thing):
        return ""
    return next((name for name, other in said.items() if len(_repeated(thing, other)) >= _REPEATED), "")


def _repeated(thing: Any, other: Any) -> set[str]:
    """The parameters that two functions have with the same type, default and meaning."""

    def rows(one: Any) -> dict[str, tuple[object, ...]]:
        said = meanings(one)
        return {p.name: (p.annotation, p.default, said.get(p.name)) for p in parameters(one)}

    theirs = rows(other)
    return {name for name, row in rows(thing).items() if theirs.get(name) == row}


def _described(name: str, thing: Any, alike: str = "", other: Any = None) -> list[str]:
    """Signature, prose, parameters, what comes back, what is raised, examples.

    What the `other` function, which the page calls `alike`, says in the same words is left to it.
    """
    said = parse(described(thing))
    parts = [] if isinstance(thing, property) else [_signature(name, thing)]
    parts += [markdown_of(said.text), _table(thing, said, alike, other)]
    if said.returns:
        parts.append(f"**Returns** {markdown_of(said.returns)}")
    if said.raises:
        theirs = parse(described(other)).raises if alike else {}
        same = [kind for kind, why in said.raises.items() if theirs.get(kind) == why]
        lines = [f"- {', '.join(f'`{kind}`' for kind in same)}: as [{alike}](#{alike.lower()})"] if same else []
        lines += [f"- `{kind}`: {markdown_of(why)}" for kind, why in said.raises.items() if kind not in same]
        parts.append("**Raises**\n\n" + "\n".join(lines))
    return [*parts, markdown_of(said.examples)]


def _table(thing: Any, said: Docstring, alike: str = "", other: Any = None) -> str:
    """The parameters, one to a row: name, type, default, meaning; those of an earlier function in one row."""
    known = [] if isinstance(thing, property) else parameters(thing)
    meaning = meanings(thing)
    set_later = [name for name in said.attributes if name not in [p.name for p in known]]
    if not meaning or not (known or set_later):
        return ""
    rows = [
        "| attribute | type | default | meaning |" if said.attributes else "| parameter | type | default | meaning |"
    ]
    rows.append("|---|---|---|---|")
    same = _repeated(thing, other) if alike else set()
    if same:
        names = ", ".join(f"`{p.name}`" for p in known if p.name in same)
        rows.append(f"| {names} | | | as [{alike}](#{alike.lower()}) |")
    for p in [p for p in known if p.name not in same]:
        kind = _annotation("", p.annotation)
        default = "" if p.default is p.empty else f"`{_default(p.default)}`"
        cells = [f"`{p.name}`", f"`{kind}`" if kind else "", default, markdown_of(meaning.get(p.name, ""))]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    rows += [f"| `{name}` | | | {markdown_of(said.attributes[name])} |" for name in set_later]
    return "\n".join(rows)


def _signature(name: str, thing: Callable[..., Any]) -> str:
    """A name with its parameters as one would write them, in one line or one to a line."""
    if get_origin(thing) is Literal or (inspect.isclass(thing) and issubclass(thing, Exception | enum.Enum)):
        return ""  # all errors are made alike, and not by users
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    words, starred = [], False
    for p in parameters(thing):
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
    """A docstring as Markdown: its formulas between dollars, its tables as lists, its examples in blocks."""
    text = inspect.cleandoc(text)
    text = re.sub(r"^\.\. math:: *(.*(?:\n(?: +.*|(?=\n +)))*)", _displayed, text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = _lists(re.sub(r"\[claim ([\w-]+)\]", r"(claim `\1`)", text))
    return re.sub(
        r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", lambda found: f"```python\n{found[0].rstrip()}\n```\n", text, flags=re.M
    )


# Some indented lines, and the line before them.
_INDENTED = re.compile(r"(?P<before>^(?! ).*\n)(?P<lines>(?:^ {4,}.*\n?)+)", re.MULTILINE)
# Two columns: a name, at least two blanks, and words.
_COLUMNS = re.compile(r" {4}(\S.*?) {2,}(\S.*)")


def _lists(text: str) -> str:
    """The text with its indented tables as lists, and other indented lines in blocks."""

    def made(found: re.Match[str]) -> str:
        if found["before"].startswith(">>> "):
            return found[0]
        lines = found["lines"].rstrip("\n").splitlines()
        rows = [_COLUMNS.fullmatch(line) for line in lines]
        before = found["before"].rstrip("\n")
        if all(row and re.match(r"[\w.]", row[1]) for row in rows):
            body = "\n".join(f"- `{row[1]}`: {row[2]}" for row in rows if row)
        else:
            body = "\n".join(["```text", *(line.removeprefix("    ") for line in lines), "```"])
        return f"\n{before}\n\n{body}\n\n" if before else f"\n{body}\n\n"

    return _INDENTED.sub(made, text)


def _displayed(found: re.Match[str]) -> str:
    lines = textwrap.dedent(found[1]).split()
    return f"$$\n{' '.join(lines)}\n$$\n"


def anchors(module: str) -> dict[str, str]:
    """Where on the page of a module each public name stands; of two that differ in capitals, the second is numbered."""
    found: dict[str, str] = {}
    for name in public(importlib.import_module(module)):
        before = sum(other.lower() == name.lower() for other in found)
        found[name] = name.lower() + (f"-{before}" if before else "")
    return found
