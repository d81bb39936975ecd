"""The arms of a knowledge experiment as the rows of a table."""

from __future__ import annotations

from typing import Any

from avow.bench.results import Row


def rows(experiment: dict[str, Any]) -> list[Row]:
    """What each arm answered, the majority's answer first; the experiment as its JSON has it."""
    return [_row({"arm": "majority answer", **experiment["majority"]}), *(_row(arm) for arm in experiment["rows"])]


def _row(arm: dict[str, Any]) -> Row:
    least, most = arm["interval"]
    return {
        "arm": arm["arm"],
        "right": arm["right"],
        "asked": arm["asked"],
        "accuracy": arm["accuracy"],
        "least": least,
        "most": most,
        "at half": arm.get("accuracy_at_half"),
        "weights": arm.get("parameters"),
        "seconds": arm.get("seconds"),
        "CPU seconds": arm.get("cpu_seconds"),
    }
