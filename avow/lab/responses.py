"""Answers and mistakes as JSON; a mistake has the four parts that every error of avow has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from avow.errors import AvowError

# How a mistake begins once it is written, and no answer does.
MISTAKE = b'{"error": '
# What someone sent is shown back, but not the whole of it.
_SHOWN = 200


def plain(fact: Any) -> Any:
    """Numbers, words, lists and tables as JSON can hold them; numbers that it cannot hold are spelled out."""
    if fact is None or isinstance(fact, bool | int | str):
        return fact
    if isinstance(fact, float):
        return fact if math.isfinite(fact) else str(fact)
    if isinstance(fact, Mapping):
        return {str(name): plain(value) for name, value in fact.items()}
    if isinstance(fact, list | tuple):
        return [plain(value) for value in fact]
    return plain(fact.tolist()) if hasattr(fact, "tolist") else str(fact)


def json_bytes(fact: Any) -> bytes:
    """The same as one line of JSON."""
    try:
        # Most answers are lists of numbers, which are written as they are; those that JSON cannot hold are rare.
        return json.dumps(fact, allow_nan=False, default=plain).encode("ascii")
    except ValueError:
        return json.dumps(plain(fact), allow_nan=False).encode("ascii")


def error_body(kind: str, name: str, value: object, rule: str, remedy: str) -> dict[str, Any]:
    """The four parts, and what kind of mistake it was."""
    shown = value if isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + " …"
    return {"error": {"kind": kind, "name": name, "value": shown, "rule": rule, "remedy": remedy}}


def error_body_of(problem: BaseException) -> dict[str, Any]:
    """An error of avow with its own four parts; anything else was not foreseen, and says so."""
    if isinstance(problem, AvowError):
        return error_body(type(problem).__name__, problem.name, problem.value, problem.rule, problem.remedy)
    rule = f"was not foreseen and raised {type(problem).__name__}: {problem}"
    return error_body("Unforeseen", "this input", "as given", rule[:_SHOWN], "change it, and report the page's address")


class JsonResponse(Response):
    """JSON that holds nothing a browser could mistake for anything else."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json_bytes(content)
