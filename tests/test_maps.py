"""The map at the head of a package names every file in it, and none that is not there."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

PACKAGES = [
    "avow.report",
    "avow.core",
    "avow.numerics",
    "avow.nn",
    "avow.distributed",
    "avow.training",
    "avow.integrations.transformers",
]


def named(text: str) -> list[str]:
    """The files that a map names: the first words of its indented lines."""
    return re.findall(r"^    (\w+) ", text, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_map_shows_what_is_there(package: str) -> None:
    module = importlib.import_module(package)
    there = [found.name for found in pkgutil.iter_modules(module.__path__)]
    assert sorted(named(module.__doc__ or "")) == sorted(there)


def test_a_map_that_forgets_or_invents_is_caught() -> None:
    assert named("Files.\n\nSome:\n    one   the first\n    two   the second\n") == ["one", "two"]
    assert named("one is the first of two\n") == []
