"""What happens to files: cut short, bits turned, lines lost, numbers changed for words."""

from __future__ import annotations

import json
import random
from typing import Any

# What stands in a field after a bad edit.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e308, -0.5, 10**30, "", "x", "nan", "NaN", "-Infinity", [], {}, [[]], {"a": None}),
    *("../../x", "\0", "é" * 9, [1, 2, 3], {"": ""}, "1", "true", float("nan"), float("inf")),
)


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """The bytes after an accident."""
    kind = rng.randrange(8)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1 and data:
        spoilt = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 3, 20))):
            spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(spoilt)
    if kind == 2:
        return data[:at] + rng.randbytes(rng.choice((1, 8, 100))) + data[at:]
    if kind == 3:
        return data[:at] + data[at + rng.choice((1, 4, 64)) :]
    if kind == 4:
        return rng.choice((b"", b"\0" * len(data), b"{}", b"[]", b"null", b"\xff\xfe", rng.randbytes(64)))
    if kind == 5:
        lines = data.split(b"\n")
        rng.shuffle(lines)
        return b"\n".join(lines)
    if kind == 6:
        lines = data.split(b"\n")
        lines[rng.randrange(len(lines))] = rng.choice(lines)
        return b"\n".join(lines)
    return data[: at // 2] + data[at:] + data[: at // 3]


def plain_of(rng: random.Random, value: Any) -> Any:
    """JSON's values after a bad edit: one of them, anywhere, is lost, strange, or changed a little."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {other: x for other, x in value.items() if other != name}
        if rng.random() < 0.1:
            return value | {rng.choice(("more", "", name + " ")): rng.choice(STRANGE)}
        return value | {name: plain_of(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1 :]
        return [*value[:at], plain_of(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((value + 1, -value, value * 2, float(value), str(value)))
    return rng.choice(STRANGE)


def text_of(rng: random.Random, text: str) -> str:
    """A JSON document after an accident or a bad edit."""
    if rng.random() < 0.3:
        return bytes_of(rng, text.encode()).decode(errors="replace")
    changed = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        changed = plain_of(rng, changed)
    return json.dumps(changed)
