"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import types

import avow


def failures(module: types.ModuleType) -> doctest.TestResults:
    return doctest.testmod(module, verbose=False, report=False)


def test_every_example_shows_what_really_happens() -> None:
    attempted = 0
    for found in pkgutil.walk_packages(avow.__path__, "avow."):
        # The first runs when imported, the other needs a package that the tests do without.
        if found.name.split(".")[1] in ("__main__", "kernels"):
            continue
        result = failures(importlib.import_module(found.name))
        assert result.failed == 0, found.name
        attempted += result.attempted
    assert attempted > 0


def test_an_example_that_lies_is_caught() -> None:
    liar = types.ModuleType("liar", "\n>>> 1 + 1\n3\n")
    assert failures(liar).failed == 1
