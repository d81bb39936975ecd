"""A parameter is declared once; its check, its message and its reading from text all follow from that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from avow.errors import ParameterError
from avow.parameters import (
    Parameter,
    anything,
    at_least,
    between,
    check_parameters,
    from_to,
    one_of,
    param,
    parameters_of,
)


@dataclass(frozen=True)
class Sieve:
    """Parameters of every type a method may declare."""

    rank: int = param(64, at_least(1), "landmarks per head")
    share: float = param(0.5, between(0, 1), "of the keys")
    order: str = param("random", one_of("random", "greedy"), "how landmarks are drawn")
    centred: bool = param(True, anything(), "subtract the mean first")
    bits: int = param(4, from_to(1, 8), "of a number")
    width: float = param(1.0, at_least(0), "of a stripe")
    cache: int = field(default=0)


def declared(name: str) -> Parameter:
    return next(p for p in parameters_of(Sieve) if p.name == name)


def message(name: str, value: object) -> str:
    """What a value is told, or nothing when it is welcome."""
    try:
        check_parameters("sieve", Sieve, {name: value})
    except ParameterError as error:
        return str(error)
    return ""


def test_parameters_are_found_in_order_and_plain_fields_are_not() -> None:
    found = [(p.name, p.type, p.default, p.help) for p in parameters_of(Sieve)]
    assert found == [
        ("rank", int, 64, "landmarks per head"),
        ("share", float, 0.5, "of the keys"),
        ("order", str, "random", "how landmarks are drawn"),
        ("centred", bool, True, "subtract the mean first"),
        ("bits", int, 4, "of a number"),
        ("width", float, 1.0, "of a stripe"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", 1),
        ("share", 1.0),
        ("share", 1),
        ("share", 1e-300),
        ("order", "greedy"),
        ("centred", False),
        ("bits", 8),
    ],
)
def test_a_value_that_keeps_its_rule_is_welcome(name: str, value: object) -> None:
    assert message(name, value) == ""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rank", 0, "sieve: rank=0 must be at least 1; the default is 64 (landmarks per head)"),
        ("rank", 1.5, "sieve: rank=1.5 must be a whole number; the default is 64 (landmarks per head)"),
        ("rank", True, "sieve: rank=True must be a whole number; the default is 64 (landmarks per head)"),
        ("rank", None, "sieve: rank=None must be a whole number; the default is 64 (landmarks per head)"),
        ("share", 0.0, "sieve: share=0.0 must be above 0 and at most 1; the default is 0.5 (of the keys)"),
        ("share", 1.01, "sieve: share=1.01 must be above 0 and at most 1; the default is 0.5 (of the keys)"),
        ("share", math.nan, "sieve: share=nan must be above 0 and at most 1; the default is 0.5 (of the keys)"),
        ("width", 10**400, "sieve: width=an integer of 1329 bits must be at least 0; the default is 1.0 (of a stripe)"),
        ("share", "1", "sieve: share='1' must be a number; the default is 0.5 (of the keys)"),
        ("share", True, "sieve: share=True must be a number; the default is 0.5 (of the keys)"),
        (
            "order",
            "sorted",
            "sieve: order='sorted' must be one of random, greedy; the default is 'random' (how landmarks are drawn)",
        ),
        ("centred", 1, "sieve: centred=1 must be True or False; the default is True (subtract the mean first)"),
        ("cache", 3, "sieve: cache=3 is not a parameter; known parameters: rank, share, order, centred, bits, width"),
        ("bits", 9, "sieve: bits=9 must be from 1 to 8; the default is 4 (of a number)"),
        ("bits", 10**400, "sieve: bits=an integer of 1329 bits must be from 1 to 8; the default is 4 (of a number)"),
    ],
)
def test_a_value_that_breaks_its_rule_is_told_which_and_what_to_do(name: str, value: object, words: str) -> None:
    assert message(name, value) == words


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rank", "12", 12),
        ("share", "0.25", 0.25),
        ("share", "1e-3", 1e-3),
        ("order", "greedy", "greedy"),
        ("centred", "false", False),
        ("centred", "True", True),
    ],
)
def test_text_from_the_command_line_becomes_a_value(name: str, text: str, value: object) -> None:
    read = declared(name).read("sieve", text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rank", "many", "sieve: rank=many must be a whole number; the default is 64 (landmarks per head)"),
        ("rank", "0", "sieve: rank=0 must be at least 1; the default is 64 (landmarks per head)"),
        ("share", "nan", "sieve: share=nan must be above 0 and at most 1; the default is 0.5 (of the keys)"),
        ("centred", "yes", "sieve: centred=yes must be True or False; the default is True (subtract the mean first)"),
    ],
)
def test_text_that_means_nothing_is_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        declared(name).read("sieve", text)
    assert str(caught.value) == words


def test_every_default_keeps_its_own_rule() -> None:
    for parameter in parameters_of(Sieve):
        parameter.check("sieve", parameter.default)


def test_a_method_without_parameters_says_so() -> None:
    @dataclass(frozen=True)
    class Bare:
        pass

    with pytest.raises(ParameterError, match="known parameters: none"):
        check_parameters("bare", Bare, {"rank": 3})
