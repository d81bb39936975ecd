"""What every claim's test asks: the recorded verdict, rejected sabotages, and words that JSON can hold."""

from __future__ import annotations

import json
from types import ModuleType

from avow.claims import Claim, Finding

_FOUND: dict[str, Finding] = {}


def claims_of(module: ModuleType) -> list[Claim]:
    """The claims of a file, in its order."""
    return [item for item in vars(module).values() if isinstance(item, Claim)]


def judged(one: Claim) -> Finding:
    """What comes of a claim, found once."""
    if one.id not in _FOUND:
        _FOUND[one.id] = one.judge()
    return _FOUND[one.id]


def sound(one: Claim) -> None:
    """The claim is as recorded, each sabotage is rejected by the check itself, and all of it can be told and drawn."""
    found = one.judge()
    assert found.verdict == one.expected, found.trouble
    assert one.sabotage
    for name in one.sabotage:
        broken = one.judge_sabotage(name)
        assert broken.rejected, (name, broken.verdict, broken.trouble)
    assert json.loads(json.dumps(found.plain(), allow_nan=False))["evidence"]
    assert one.picture is not None
    assert json.loads(json.dumps(one.picture().plain(), allow_nan=False))["title"]
    assert one.statement and one.plain.endswith(".") and one.assumptions and one.used_by
