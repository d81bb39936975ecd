"""The claims there are: those of the catalogue, and those of a file of one's own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from avow.claims.claim import Claim
from avow.errors import FileError, ParameterError

_CATALOGUE = "avow.claims.catalogue"
# Topics from the ground up; one that is not named here comes after them.
_TOPICS = ("softmax", "queries", "heads", "efficient", "costs", "relu", "dynamics", "lemmas", "neighbours")


def catalogue() -> dict[str, Claim]:
    """Every claim of the catalogue by id, topic after topic."""
    return dict(_catalogue())


@functools.cache
def _catalogue() -> dict[str, Claim]:
    folders = importlib.import_module(_CATALOGUE).__path__
    names = [module.name for module in pkgutil.iter_modules(folders)]
    found: dict[str, Claim] = {}
    # The file named after a topic comes before others on it.
    for name in sorted(names, key=lambda name: (_rank(name), name)):
        path = f"{_CATALOGUE}.{name}"
        for one in _claims_of(importlib.import_module(path), path):
            if one.id in found:
                rule = f"is the id of two claims, in {found[one.id].source} and in {path}"
                raise ParameterError("claim: id", repr(one.id), rule, "rename one of them")
            found[one.id] = one
    return dict(sorted(found.items(), key=lambda pair: _rank(pair[1].topic)))


def _rank(topic: str) -> int:
    return _TOPICS.index(topic) if topic in _TOPICS else len(_TOPICS)


def claims_in(path: str | Path) -> dict[str, Claim]:
    """The claims of a Python file of one's own, by id."""
    path = Path(path)
    if not path.is_file():
        raise FileError("claims file", path, "does not exist", "check the path")
    if path.suffix != ".py":
        raise FileError("claims file", path, "is not a Python file", "give a file whose name ends in .py")
    try:
        module = load(str(path))
    except (Exception, SystemExit) as problem:
        rule = f"raised while loading: {_told(problem, path)}"
        raise FileError("claims file", path, rule, "mend it there, and try again") from problem
    found: dict[str, Claim] = {}
    for one in _claims_of(module, str(path.resolve())):
        if one.id in found:
            raise FileError("claims file", path, f"has two claims called {one.id!r}", "rename one of them")
        if one.id in _catalogue():
            rule = f"has a claim called {one.id!r}, and so does the catalogue"
            raise FileError("claims file", path, rule, "give it an id of its own")
        found[one.id] = one
    if not found:
        remedy = 'write one: @avow.claims.claim("my-claim", topic=…, expected="proved", …)'
        raise FileError("claims file", path, "holds no claims", remedy)
    return found


def load(source: str) -> Any:
    """The module of a claim: a dotted name, or a Python file, loaded anew and beside its neighbours."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(f"claims_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _claims_of(module: Any, source: str) -> list[Claim]:
    """The claims at the top of a module, in its order, each once, with their source noted."""
    found = {id(item): item for item in vars(module).values() if isinstance(item, Claim)}
    # One that was imported belongs to the module that wrote it.
    own = [one for one in found.values() if getattr(one.check, "__module__", module.__name__) == module.__name__]
    return [dataclasses.replace(one, source=source) for one in own]


def _told(problem: BaseException, path: Path) -> str:
    """An exception in one line, with the line of the file that raised it."""
    steps = traceback.extract_tb(problem.__traceback__)
    lines = [step.lineno for step in steps if Path(step.filename) == path.resolve()]
    if isinstance(problem, SyntaxError):
        lines.append(problem.lineno)
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(problem).__name__}: {problem}{where}"
