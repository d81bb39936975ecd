"""A method's parameters, declared once: the check, the message, the command line's help, the lab's form.

rank: int = param(64, at_least(1), "landmarks per head")
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from avow.errors import ParameterError


@dataclass(frozen=True)
class Rule:
    """A condition on a value, and the words for it; a form needs its choices or its ends too."""

    words: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf


def at_least(low: float) -> Rule:
    return Rule(f"must be at least {low:g}", lambda value: value >= low)


def between(low: float, high: float) -> Rule:
    """Strictly above `low`, at most `high`."""
    return Rule(f"must be above {low:g} and at most {high:g}", lambda value: low < value <= high)


def from_to(low: float, high: float) -> Rule:
    return Rule(f"must be from {low} to {high}", lambda value: low <= value <= high, low=low, high=high)


def at_most_characters(count: int) -> Rule:
    return Rule(f"must have at most {count} characters", lambda value: len(value) <= count, high=count)


def one_of(*choices: str) -> Rule:
    return Rule(f"must be one of {', '.join(choices)}", lambda value: value in choices, choices)


def anything() -> Rule:
    return Rule("may be anything of its type", lambda value: True)


def as_float(value: object) -> float:
    """The number, or nan for what is none: numpy scalars and tensors of one element are numbers."""
    if isinstance(value, bool | str | bytes) or value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # what is no number raises, and is caught
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of one method."""

    name: str
    type: type
    default: Any
    rule: Rule
    help: str

    def check(self, owner: str, value: Any) -> None:
        """Raise unless `value` has the declared type and keeps the rule; None is allowed if it is the default."""
        if value is None and self.default is None:
            return
        numeric = self.type is float and isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, self.type) or numeric) or (isinstance(value, bool) and self.type is not bool):
            raise self._refusal(owner, repr(value), f"must be of type {self.type.__name__}")
        # Nan, and integers beyond what a float can hold.
        if (self.type is float and math.isnan(as_float(value))) or not self.rule.holds(value):
            raise self._refusal(owner, repr(value), self.rule.words)

    def read(self, owner: str, text: str) -> Any:
        """The value a command line's `name=text` means."""
        if self.type is bool:
            if text.lower() not in ("true", "false"):
                raise ParameterError(f"{owner}: {self.name}", text, "must be true or false", f"try {self.name}=true")
            return text.lower() == "true"
        try:
            value = self.type(text)
        except ValueError as error:
            raise self._refusal(owner, text, f"must be of type {self.type.__name__}") from error
        self.check(owner, value)
        return value

    def _refusal(self, owner: str, value: str, rule: str) -> ParameterError:
        name = f"{owner}: {self.name}" if owner else self.name
        return ParameterError(name, value, rule, f"the default is {self.default!r} ({self.help})")


def param(default: Any, rule: Rule, help: str) -> Any:
    """A dataclass field that carries its own rule and help."""
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help})


@functools.cache
def parameters_of(owner: type) -> tuple[Parameter, ...]:
    """The parameters a dataclass declares with `param`, in order; a `Literal` type is its own rule."""
    hints = typing.get_type_hints(owner)
    found = []
    for field in dataclasses.fields(owner):
        if "rule" not in field.metadata:
            continue
        kind, rule = hints[field.name], field.metadata["rule"]
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        if typing.get_origin(kind) is typing.Literal:
            kind, rule = str, one_of(*typing.get_args(kind))
        assert isinstance(kind, type), f"declare a plain type, not {kind}"
        found.append(Parameter(field.name, kind, field.default, rule, field.metadata["help"]))
    return tuple(found)


def check_parameters(owner: str, kind: type, given: dict[str, Any]) -> None:
    """Raise on a name that is not declared or a value that breaks its rule."""
    declared = {p.name: p for p in parameters_of(kind)}
    for name, value in given.items():
        if name not in declared:
            known = ", ".join(declared) or "none"
            place = f"{owner}: {name}" if owner else name
            raise ParameterError(place, repr(value), "is not a parameter", f"known parameters: {known}")
        declared[name].check(owner, value)
