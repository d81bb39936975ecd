"""Packages whose modules are loaded when somebody first uses them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from avow.extras import missing


def lazy_modules(
    package: str,
    modules: Collection[str],
    names: Collection[str] = (),
    functions: Mapping[str, str] | None = None,
    needs: Mapping[str, Collection[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__`, which loads its modules at use, and its `__dir__`: these and its other names.

    `functions` are names that are loaded at use, too, each from a module of the package. `needs` names the optional
    packages that a name cannot be loaded without: `__dir__` leaves it out if one of them is missing, because `help`
    loads all that it lists.
    """
    homes = dict(functions or {})

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def loadable() -> list[str]:
        unloadable = {name for name, packages in (needs or {}).items() if missing(*packages, purpose="")}
        listed = {*modules, *names, *homes, "__all__", "__doc__", "__file__", "__name__", "__path__"}
        return sorted(listed - unloadable)

    return load, loadable
