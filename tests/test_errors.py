"""Errors say four things, survive a trip between processes, and form the tree that their module draws."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch

from avow import errors
from avow.errors import AvowError, InputError, NotDifferentiable, ParameterError, ToleranceUnreachable, is_out_of_memory

EVERY = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, AvowError)]


@pytest.mark.parametrize("kind", EVERY)
def test_a_message_gives_name_value_rule_and_remedy(kind: type[AvowError]) -> None:
    error = kind("low_rank: rank", 96, "exceeds 64 keys", "use rank<=64")
    assert str(error) == "low_rank: rank=96 exceeds 64 keys; use rank<=64"
    assert (error.name, error.value, error.rule, error.remedy) == (
        "low_rank: rank",
        96,
        "exceeds 64 keys",
        "use rank<=64",
    )


def same(one: AvowError, other: AvowError) -> bool:
    return type(one) is type(other) and str(one) == str(other) and vars(one) == vars(other)


@pytest.mark.parametrize("kind", EVERY)
def test_an_error_survives_pickling(kind: type[AvowError]) -> None:
    error = kind("tol", 1e-9, "is below what float32 can hold", "use float64")
    assert same(pickle.loads(pickle.dumps(error)), error)


def test_the_best_bound_survives_pickling() -> None:
    error = ToleranceUnreachable("tol", 1e-9, "cannot be proved", "use float64", best=2e-7)
    copy = pickle.loads(pickle.dumps(error))
    assert copy.best == 2e-7
    assert same(copy, error)


def test_two_errors_that_differ_are_told_apart() -> None:
    error = ToleranceUnreachable("tol", 1e-9, "cannot be proved", "use float64", best=2e-7)
    assert not same(error, ToleranceUnreachable("tol", 1e-9, "cannot be proved", "use float64"))
    assert not same(error, ParameterError("tol", 1e-9, "cannot be proved", "use float64"))


def test_what_the_caller_can_mend_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=re.escape("rank=0 must be at least 1; use rank=1")):
        raise ParameterError("rank", 0, "must be at least 1", "use rank=1")
    assert not issubclass(ToleranceUnreachable, ValueError)
    assert not issubclass(NotDifferentiable, ValueError)


def drawn(text: str) -> dict[str, str]:
    """Child to parent, read off a tree drawn with box lines."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        found = re.match(r"^ {4}([│├└─ ]*)(\w+)(?: \(\w+\))?(?: {2,}|$)", line)
        if found:
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            if depth:
                parents[found[2]] = path[depth - 1]
    return parents


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    assert drawn(errors.__doc__ or "") == {x.__name__: x.__bases__[0].__name__ for x in EVERY if x is not AvowError}
    assert InputError.__bases__ == (AvowError, ValueError)


def test_a_branch_in_the_wrong_place_would_be_read_there() -> None:
    assert drawn("    A\n    ├── B (ValueError)   why\n    │   └── C   why\n    └── D") == {
        "B": "A",
        "C": "B",
        "D": "A",
    }


@pytest.mark.parametrize("size", [2**50, 2**60])
def test_a_cpu_and_a_gpu_without_memory_are_told_from_other_errors(size: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(size, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    wrapped = RuntimeError("a compiler failed")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = caught.value
    assert is_out_of_memory(wrapped)
