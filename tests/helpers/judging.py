"""What claims' tests ask for: a finding made once, the step that says some words, the number in a fact, a file."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from avow.theory.claims import Claim, Evidence, Finding, catalogue


def claims_of(module: ModuleType) -> list[Claim]:
    """The claims of a file, in its order."""
    return [item for item in vars(module).values() if isinstance(item, Claim)]


@functools.cache
def finding(id: str) -> Finding:
    """What comes of a claim of the catalogue, found once."""
    return catalogue()[id].judge()


def judged(one: Claim) -> Finding:
    """What comes of a claim, found once."""
    return finding(one.id)


def step(id: str, words: str) -> Evidence:
    """The one step of a claim's evidence that says these words."""
    (found,) = [one for one in finding(id).evidence if words in one.says]
    return found


def number(fact: Any) -> float:
    """The middle of a ball as it is printed."""
    return float(str(fact).strip("[]").split(" ")[0])


HEAD = """
    import os, signal, sys, time
    import sympy
    from avow.theory.claims import Statement, claim, real, toolbox
    x = real("x")
    def square(k):
        return Statement({x: "a number"}, {"it": sympy.Eq((x + 1) ** 2, x**2 + k * x + 1, evaluate=False)})
    words = dict(topic="mine", expected="proved", plain="x", formal=square(2))
"""


def written(folder: Path, body: str, name: str = "mine.py") -> Path:
    """A file of claims."""
    path = folder / name
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    return path
