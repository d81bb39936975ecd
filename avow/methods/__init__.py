"""One file, one method. Files here are found by looking: a new one needs no other edit."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from avow.core import Method
from avow.errors import UnknownMethod


def all_methods() -> dict[str, type[Method]]:
    """Every method by name, in the order of its file's name, `exact` first."""
    return dict(_found(tuple(__path__)))


@functools.cache
def _found(folders: tuple[str, ...]) -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(folders):
        path = f"{__name__}.{module.name}"
        for item in vars(importlib.import_module(path)).values():
            if isinstance(item, type) and issubclass(item, Method) and item.__module__ == path:
                found[item.name] = item
    return dict(sorted(found.items(), key=lambda pair: (pair[0] != "exact", pair[0])))


def method_named(name: str) -> type[Method]:
    """The method of that name."""
    methods = all_methods()
    if not isinstance(name, str) or name not in methods:
        raise UnknownMethod("method", repr(name), "is not a method", f"known methods: {', '.join(methods)}")
    return methods[name]
