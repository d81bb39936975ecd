"""Errors say four things, survive a trip between processes, and form the tree that their module draws."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from avow import errors
from avow.errors import (
    AvowError,
    InputError,
    NotDifferentiable,
    ParameterError,
    ToleranceUnreachable,
    is_out_of_memory,
    value_text,
)

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


@dataclass
class Box:
    """What prints whatever it holds."""

    content: Any


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.full((2, 3), 7.5), "a float32 tensor of shape (2, 3)"),
        (torch.ones(1, dtype=torch.int64), "an int64 tensor of shape (1,)"),
        (torch.tensor(7.5, dtype=torch.float64), "a float64 tensor of shape ()"),
        (torch.nn.Parameter(torch.ones(2)), "a float32 tensor of shape (2,)"),
        (torch.ones(2, device="meta"), "a float32 tensor of shape (2,)"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested float32 tensor"),
        (np.full((2, 3), 7.5), "a float64 array of shape (2, 3)"),
        ([1, torch.full((4,), 7.5)], "[1, a float32 tensor of shape (4,)]"),
        ({"mask": (torch.full((4,), 7.5),)}, "{'mask': (a float32 tensor of shape (4,),)}"),
        (Box(torch.full((4,), 7.5)), "Box"),
        (Box("small"), "Box(content='small')"),
        (object(), "object"),
        (Mute(), "Mute"),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
        ("x" * 99, f"'{'x' * 27}...{'x' * 28}'"),
        (10**5000, "an integer of 16610 bits"),
        ((2, 3), "(2, 3)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_tensors_and_what_holds_them_are_shown_by_shape_and_type(value: object, text: str) -> None:
    assert value_text(value) == text
    error = ParameterError("tol", value, "must be a number", "try tol=1e-2")
    given = value if isinstance(value, str) else text
    assert str(error) == f"tol={given} must be a number; try tol=1e-2"
    assert "tensor(" not in repr(error) and not any(isinstance(x, torch.Tensor) for x in vars(error).values())


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
