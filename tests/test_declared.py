"""Arguments are held to the types that a signature declares, and refused in the words of avow's errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.errors import DtypeError, ParameterError
from avow.parameters import declared


@declared("mix")
def mix(
    keys: Float[Tensor, "n d"],
    shares: Sequence[float] | Tensor,
    count: int = 3,
    *,
    routes: Mapping[int, int | Sequence[int]] | None = None,
    style: Literal["plain", "fancy"] = "plain",
    model: nn.Module | None = None,
    shown: bool = False,
    **more: Any,
) -> str:
    """What was given, once it is of the right types."""
    return f"{count} {style} {sorted(more)}"


@declared()
def read(path: str | Path, lines: Iterable[str] = (), tell: Callable[[str], None] | None = None) -> list[str]:
    return list(lines)


@declared()
@dataclass(frozen=True)
class Share:
    """A class is looked at when it is made."""

    of: str
    part: float | Fraction


KEYS = torch.ones(2, 3)


def test_what_is_of_the_declared_types_goes_through() -> None:
    assert mix(KEYS, [0.5, 1]) == "3 plain []"
    assert (
        mix(keys=KEYS, shares=torch.ones(2), count=np.int64(4), routes={0: 1, 1: (0, 1)}, other=1)
        == "4 plain ['other']"
    )
    assert mix(KEYS, np.ones(2), routes=None, model=nn.Linear(1, 1), style="fancy", shown=True) == "3 fancy []"
    assert mix(KEYS, [torch.tensor(0.5), Fraction(1, 2), float("nan"), 10**400]) == "3 plain []"
    assert Share("all", Fraction(1, 3)).part == Fraction(1, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mix([[1.0]], [1.0]), "mix: keys=[[1.0]] must be a torch.Tensor; wrap it with torch.as_tensor"),
        (lambda: mix(KEYS, 0.5), "mix: shares=0.5 must be a sequence or a torch.Tensor; put what there is in a list"),
        (lambda: mix(KEYS, "0.5"), "mix: shares='0.5' must be a sequence or a torch.Tensor; "),
        (lambda: mix(KEYS, {0: 0.5}), "mix: shares={0: 0.5} must be a sequence or a torch.Tensor; "),
        (lambda: mix(KEYS, [0.5, "a"]), "mix: shares[1]='a' must be a number; pass one such as 0.5"),
        (lambda: mix(KEYS, [0.5, True]), "mix: shares[1]=True must be a number; "),
        (lambda: mix(KEYS, [], 0.5), "mix: count=0.5 must be a whole number; the default is 3"),
        (lambda: mix(KEYS, [], True), "mix: count=True must be a whole number; the default is 3"),
        (
            lambda: mix(KEYS, [], torch.ones(2)),
            "mix: count=a float32 tensor of shape (2,) must be a whole number; the default is 3",
        ),
        (lambda: mix(KEYS, [], 2**63), "mix: count=9223372036854775808 must be a number of 64 bits; "),
        (lambda: mix(KEYS, [], routes=[0]), "mix: routes=[0] must be a mapping; pass a dict, or leave it out"),
        (lambda: mix(KEYS, [], routes={"a": 1}), "mix: routes: key='a' must be a whole number; "),
        (lambda: mix(KEYS, [], routes={0: [1, None]}), "mix: routes[0][1]=None must be a whole number; "),
        (lambda: mix(KEYS, [], routes={0: None}), "mix: routes[0]=None must be a whole number or a sequence; "),
        (lambda: mix(KEYS, [], style="loud"), "mix: style='loud' must be one of plain, fancy; the default is 'plain'"),
        (
            lambda: mix(KEYS, [], style=KEYS),
            "mix: style=a float32 tensor of shape (2, 3) must be one of plain, fancy; the default is 'plain'",
        ),
        (lambda: mix(KEYS, [], model="m"), "mix: model='m' must be a torch.nn.Module; pass one, or leave it out"),
        (lambda: mix(KEYS, [], shown=1), "mix: shown=1 must be True or False; the default is False"),
        (lambda: read(3), "path=3 must be text or a path; pass a str"),
        (lambda: read("x", "lines"), "lines='lines' must be a sequence; put what there is in a list, or leave it out"),
        (lambda: read("x", ["a", b"b"]), "lines[1]=b'b' must be text; pass a str, or leave it out"),
        (lambda: read("x", tell="out"), "tell='out' must be a function; pass what can be called, or leave it out"),
        (lambda: Share(1, 0.5), "of=1 must be text; pass a str"),
        (lambda: Share("all", "half"), "part='half' must be a number; pass one such as 0.5"),
        (lambda: read("x", list(range(99))), "lines[0]=0 must be text; "),
        (lambda: mix(["k" * 99], []), f"mix: keys=['{'k' * 27}...{'k' * 28}'] must be a torch.Tensor; "),
    ],
)
def test_what_is_not_is_refused_by_name_value_rule_and_remedy(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ParameterError, DtypeError), match=f"^{re.escape(words)}"):
        call()


def test_what_can_be_read_only_once_is_left_for_the_function() -> None:
    assert read("x", iter(["a", "b"])) == ["a", "b"]


def test_a_missing_argument_is_told_in_pythons_own_words() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'shares'"):
        mix(KEYS)  # type: ignore[call-arg]


def test_names_are_looked_up_where_the_function_was_written() -> None:
    with pytest.raises(ParameterError, match=re.escape("share=1 must be a tests.Share; pass one")):
        declared()(torch.no_grad()(halved))(1)


def halved(share: Share) -> float:
    return float(share.part) / 2


def test_without_the_declaration_the_wrong_type_would_go_through() -> None:
    assert inspect.unwrap(mix)([[1.0]], 0.5, "many") == "many plain []"
