"""The imports of a tree as its files spell them: what the table of layers judges, and what the picture draws."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import: the module it names, where, and whether it waits inside a function."""

    target: str
    line: int
    at_use: bool


def part(module: str) -> str:
    """`avow.numerics.scan` is of `numerics`; `avow` itself is of `avow`."""
    return module.split(".")[1] if "." in module else module


def modules(root: Path) -> dict[str, Path]:
    """Every module of a tree, by its dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        words = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Every import of a file, spelled with `import`, `from`, or a literal `import_module`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def resolve(base: str, name: str) -> str:
        return f"{base}.{name}" if f"{base}.{name}" in known else base

    def visit(node: ast.AST, at_use: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno, at_use)
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(resolve(base, alias.name), node.lineno, at_use)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield Import(target, node.lineno, at_use)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_use = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                at_use = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_use)

    yield from visit(ast.parse(path.read_text(), str(path)), False)
