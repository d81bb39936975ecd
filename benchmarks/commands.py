"""Commands that measure by themselves, and what of their answers is kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from avow.bench.results import Result, Row
from benchmarks.arms import rows
from benchmarks.options import Options

_ROOT = Path(__file__).parents[1]


def compare(options: Options) -> list[Result]:
    """`avow compare` on one thread; unless quick, it draws the README's picture."""
    small = ["--length", "256", "--quick"] if options.quick else ["--png", str(_ROOT / "docs" / "frontier.png")]
    found = _asked("compare", "--threads", "1", *small)
    whole = [_call(board["kind"], row) for board in found["workloads"] for row in board["rows"] if row["seconds"]]
    steps = [
        _step(board["kind"], board["decoding"]["keys"], step)
        for board in found["workloads"]
        if board["decoding"]
        for step in board["decoding"]["steps"]
    ]
    longer: list[Row] = [
        {"method": point["method"], "keys": point["length"], "seconds a call": point["seconds"]}
        for point in found["scaling"]
    ]
    return [
        Result("compare: whole calls", whole, remarks=[found["headline"]]),
        Result("compare: the last query, from a cache", steps),
        Result("compare: longer heads", longer),
    ]


def _call(kind: str, row: dict[str, Any]) -> Row:
    return {
        "heads": kind,
        "method": row["method"],
        "setting": ", ".join(f"{name}={value}" for name, value in list(row["parameters"].items())[:1]),
        "seconds": row["seconds"],
        "time": row["ratio"],
        "error": row["error"],
        "bound": row["bound"],
        "to softmax": row["to_softmax"] if row["target"] != "softmax attention" else None,
        "bound over error": row["bound"] / row["error"] if row["bound"] and row["error"] else None,
    }


def _step(kind: str, keys: int, step: dict[str, Any]) -> Row:
    return {
        "heads": kind,
        "keys": keys,
        "tolerance": step["tol"],
        "confidence": step["confidence"],
        "answered by": step["method"],
        "tokens read": tokens_read(step["because"]),
        "times exact": step["ratio"],
    }


def tokens_read(reason: str) -> float | None:
    """The share of tokens that an answer read, as the reason of its certificate states it.

    >>> tokens_read("10.4% of the tokens were read in full"), tokens_read("all tokens were read"), tokens_read("")
    (0.104, 1.0, None)
    """
    if share := re.search(r"([\d.]+)% of", reason):
        return round(float(share[1]) / 100, 6)
    return 1.0 if "all tokens were read" in reason else None


def knowledge(options: Options) -> Result:
    """`avow knowledge` as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        small = ["--attentions", "exact", "--steps", "5"] if options.quick else []
        found = _asked("knowledge", "--device", "cpu", "--out", folder, *small)
    return Result("knowledge: questions about invented people", rows(found))


def shards(options: Options) -> Result:
    """Every way over up to 256 shards in one process."""
    from avow.bench import shards as simulation

    result, _ = simulation.run([2**i for i in range(3 if options.quick else 9)], lambda step: None)
    return result


def fuzz(options: Options) -> Result:
    """Random problems of every method against their certificates."""
    from tests.fuzz import CONFIDENCE, run

    found = run(200 if options.quick else 50_000, seed=0)
    row: Row = {
        "cases": found.cases.total(),
        "rows": found.rows,
        "broken": found.broken + found.nan,
        "statistical rows": found.chancy_rows,
        "misses": found.chancy_misses,
    }
    remarks = [f"Statistical rows promise with probability {CONFIDENCE:g}."]
    return Result("fuzz: random problems", [row], remarks=remarks, failures=[] if found.sound else found.stories)


def _asked(*words: str) -> dict[str, Any]:
    """What a command of avow answers, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "avow", *words, "--json"],
            cwd=folder,
            # Two threads are what a reader's machine has; a count for this process would be that of the command.
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            | {"PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
