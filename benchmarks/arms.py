"""The arms of a knowledge experiment as the rows of a table."""

from __future__ import annotations

from typing import Any

from avow.bench.results import Row


def rows(experiment: dict[str, Any]) -> list[Row]:
    """What each arm answered, the majority's answer first; the experiment as its JSON has it."""
    finished = (arm for arm in experiment["rows"] if arm["seed"] is not None)
    return [_row({"arm": "majority answer", **experiment["majority"]}), *(_row(arm) for arm in finished)]


def recitations(experiment: dict[str, Any]) -> list[Row]:
    """How many answers each arm recites from the text and extracts by the question."""
    return [{"arm": arm, **kind} for arm, run in _middle_runs(experiment) for kind in run["recitation"]]


def coverage(experiment: dict[str, Any]) -> list[Row]:
    """How often each arm is right if it answers only its surest questions."""
    return [
        {"arm": arm, "answered": share, "right": right}
        for arm, run in _middle_runs(experiment)
        for share, right in run["coverage"]
    ]


def calibration(experiment: dict[str, Any]) -> list[Row]:
    """How often each arm's answers of about one confidence are right."""
    return [{"arm": arm, **one} for arm, run in _middle_runs(experiment) for one in run["calibration"]]


def _middle_runs(experiment: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The run of each arm whose figures its row has."""
    return [(arm["arm"], run) for arm in experiment["rows"] for run in arm["runs"] if run["seed"] == arm["seed"]]


def _row(arm: dict[str, Any]) -> Row:
    least, most = arm["interval"]
    # Rows of several seeds have the figures of the middle one; the majority has no runs.
    shares = [run["accuracy"] for run in arm.get("runs", []) if "accuracy" in run] or [arm["accuracy"]]
    return {
        "arm": arm["arm"],
        "seeds": len(shares),
        "mean accuracy": sum(shares) / len(shares),
        "lowest": min(shares),
        "highest": max(shares),
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
