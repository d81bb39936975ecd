"""The examples in docstrings are run."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from typing import Any

import pytest

import avow


class Finder(doctest.DocTestFinder):
    """Examples of decorated functions too: the plain finder takes them for another module's."""

    def _from_module(self, module: types.ModuleType | None, object: Any) -> bool:
        written = inspect.unwrap(object) if inspect.isfunction(object) else object
        return bool(super()._from_module(module, written))  # type: ignore[misc]  # it has no types


def failures(module: types.ModuleType) -> doctest.TestResults:
    runner = doctest.DocTestRunner(verbose=False)
    for examples in Finder().find(module):
        runner.run(examples, out=lambda text: None)
    return runner.summarize(verbose=False) if runner.failures else doctest.TestResults(0, runner.tries)


@pytest.mark.commands
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


def test_an_example_of_a_decorated_function_is_run() -> None:
    module = types.ModuleType("decorated")

    def written() -> Iterator[None]:
        """Something.

        >>> 1 + 1
        3
        """
        yield

    module.__dict__["open"] = contextlib.contextmanager(types.FunctionType(written.__code__, module.__dict__))
    module.__dict__["open"].__wrapped__.__doc__ = module.__dict__["open"].__doc__ = written.__doc__
    assert failures(module).failed == 1
    assert doctest.testmod(module, report=False).attempted == 0
