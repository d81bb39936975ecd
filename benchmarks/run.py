"""`python -m benchmarks.run`: every benchmark in turn, as tables of ratios."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

from avow.atomic import write
from avow.bench.machine import machine
from avow.bench.results import Result
from benchmarks.options import Options

NAMES = ("overhead", "linear", "scaling", "planner", "heads")


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 where an answer failed its check. A missed goal is reported and is no failure."""
    parsed = _parser().parse_args(arguments)
    names = NAMES if parsed.only is None else tuple(parsed.only.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"--only: {', '.join(unknown)} is no benchmark; known: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    options = Options(parsed.quick, parsed.heads)
    print(machine(), flush=True)
    results, done = earlier(parsed.json), []
    for name in names:
        before = os.getloadavg()[0]
        result = importlib.import_module(f"benchmarks.{name}").run(options)
        busy = f"Processes that wanted the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} at the end."
        results[name] = dataclasses.replace(result, conditions=busy)
        done.append(results[name])
        print(f"\n{results[name].text()}", flush=True)
        # After each: a run that is interrupted keeps what it has.
        if parsed.json:
            write(parsed.json, json.dumps({key: value.plain() for key, value in results.items()}, indent=1))
        if parsed.markdown:
            write(parsed.markdown, page(results, options))
    return int(any(result.failures for result in done))


def earlier(path: Path | None) -> dict[str, Result]:
    """What an earlier run left in a file of results, in the usual order: `--only` then renews a part of it."""
    if path is None or not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {name: Result.of(stored[name]) for name in NAMES if name in stored}


def page(results: dict[str, Result], options: Options) -> str:
    """The results as a Markdown page: what was missed comes first."""
    quick = " --quick" if options.quick else ""
    command = f"python -m benchmarks.run{quick} --heads DIR --markdown docs/numbers.md"
    goals = [goal for result in results.values() for goal in result.goals]
    missed = [goal for goal in goals if not goal.met]
    skipped = [f"- {name}: not run, {result.skipped}" for name, result in results.items() if result.skipped]
    head = [
        "# Numbers",
        f"Measured on: {machine()}. Every figure is a ratio of times taken in turns in one run, or stands beside one; "
        "answers are checked against float64 first, and what fails is not timed. Sections may come from runs of their "
        "own (`--only`), on a machine that may have been busy: each says so. This page is written by the command, not "
        "by hand:",
        # The tests run every command of a page, or ask why not.
        f"<!-- not run here: it measures for long; `make bench` runs it -->\n```text\n{command}\n```",
        f"{len(goals) - len(missed)} of {len(goals)} goals met.",
    ]
    short = [f"- {goal.aim}: found {goal.found}" for goal in missed] + skipped
    if short:
        head.append("\n".join(["What falls short:", "", *short]))
    sections = [results[name].markdown() for name in NAMES if name in results]
    return "\n\n".join([*head, *sections]) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few rounds")
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--heads", metavar="DIR", help="a folder of *.safetensors files with q, k, v and q_positions")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also keep the results here, with those of an earlier run there"
    )
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write the results as a page")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
