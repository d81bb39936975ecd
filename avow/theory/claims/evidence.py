"""What a check yields: a step of a proof, a counterexample, or what a search did not find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["symbolic", "rational", "balls", "counterexample", "search"]
# Which cases a step speaks of: all that the statement does, or some of them.
Coverage = Literal["for all", "these cases"]
PROOFS: frozenset[str] = frozenset({"symbolic", "rational", "balls"})


class Unproved(Exception):
    """A step of a check that does not hold, or that could not be shown to."""


@dataclass(frozen=True)
class Evidence:
    """One step: what kind, about which statement, in words, with the numbers worth keeping (as JSON has them).

    Attributes:
        kind: how it was shown: by symbols, fractions, balls, a counterexample, or a search.
        says: the step in words.
        facts: numbers to show beside it, by name.
        amended: whether it is about the correction and not about the statement.
        coverage: which cases it speaks of.
    """

    kind: Kind
    says: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    amended: bool = False
    coverage: Coverage = "for all"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or not isinstance(self.says, str) or not isinstance(self.facts, Mapping):
            raise TypeError(f"evidence is of a kind, says something and has facts by name, unlike {self!r}")

    def plain(self) -> dict[str, Any]:
        """The step as JSON has it."""
        return as_json(vars(self))


def as_json(fact: Any) -> Any:
    """A number, a word, or lists and tables of them, as JSON can hold it; what it cannot hold is spelled out."""
    if fact is None or isinstance(fact, bool | int):
        return fact
    if isinstance(fact, str):
        return fact.encode(errors="replace").decode()
    if isinstance(fact, float):
        return fact if math.isfinite(fact) else str(fact)
    if isinstance(fact, Mapping):
        return {str(name): as_json(value) for name, value in fact.items()}
    if isinstance(fact, list | tuple | set | frozenset):
        return [as_json(value) for value in fact]
    return as_json(fact.tolist()) if hasattr(fact, "tolist") else str(fact)
