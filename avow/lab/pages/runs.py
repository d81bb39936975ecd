"""Training runs on disk: their curves while they grow, and what the knowledge experiments found.

Files are read while they are being written: what is half there is left for later. Names of runs come from a listing
made here; nothing that a page says is ever joined to a path.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from avow.core.chart import Chart
from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, Words, control, fact
from avow.report import formatting
from avow.report.charts import figure
from avow.training.run_folder import COLUMNS, CONFIG, parse_log

# Where `avow lab --runs` says runs are; the processes that compute inherit it.
VARIABLE = "AVOW_LAB_RUNS"
DEFAULT_FOLDER = "out"
# How deep, how many folders, how many runs, and how much of a file.
_DEEP, _FOLDERS, _RUNS, _BYTES = 4, 4000, 200, 1 << 25
# A configuration is short, and TOML is slow to read.
_CONFIG_BYTES = 1 << 16
# A curve has this many points at most, and a run that was silent for so long is taken for stopped.
_POINTS, _SILENT = 500, 120.0
# As many curves as there are colours.
_CURVES = 7
_COLUMNS = {
    "loss": ("loss", "loss, nats per token"),
    "held-out loss": ("held_out_loss", "held-out loss, nats per token"),
    "learning rate": ("lr", "learning rate"),
    "gradient": ("norm", "length of the gradient"),
    "speed": ("tokens_per_second", "tokens per second"),
}
_WORDS, _KNOWLEDGE = Words("runs.txt"), Words("runs_knowledge.html")

# By column; None where a line has no such number.
Curves = dict[str, list[Any]]


@dataclass(frozen=True)
class RunsInputs(Inputs):
    run: str = control("", "Run, or folder of runs", longest=300, quiet=True)
    curve: Literal["loss", "held-out loss", "learning rate", "gradient", "speed"] = control("loss", "Curve")
    log: bool = control(True, "Logarithmic scale")


@dataclass(frozen=True)
class Run:
    """A folder that `avow train` writes to: its log so far, when that was written, and its configuration in words."""

    name: str
    curves: Curves
    written: float
    about: str

    @property
    def group(self) -> str:
        """The folder it stands in, as the reader sees it."""
        return self.name.rpartition("/")[0]

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]

    def last(self, column: str) -> float:
        """The last number of a column; 0 before there is one."""
        return self.curves[column][-1] if self.curves["step"] else 0.0

    @property
    def state(self) -> str:
        if not self.curves["step"]:
            return "has not begun"
        if self.last("step") >= self.last("steps"):
            return "finished"
        return "running" if time.time() - self.written < _SILENT else "stopped"

    @property
    def place(self) -> str:
        if not self.curves["step"]:
            return ""
        step, steps = self.last("step"), self.last("steps")
        return f"{step:,.0f} steps" if self.state == "finished" else f"step {step:,.0f} of {steps:,.0f}"

    @property
    def summary(self) -> str:
        return ", ".join(filter(None, (self.state, self.place)))

    @property
    def loss(self) -> str:
        return f"{self.last('loss'):.4g}" if self.curves["step"] else formatting.NOTHING


def preview(inputs: RunsInputs) -> Answer:
    """The state of every run; curves of the chosen ones, and the tables of experiments that ended."""
    runs, chosen, trouble = all_runs(), [], None
    try:
        chosen = _chosen(runs, inputs.run)
    except ParameterError as error:
        trouble = error
    facts = [fact("Runs", str(len(runs)), f"below {folder()}")]
    facts += [fact(run.short_name, run.loss, run.summary) for run in chosen]
    if len(chosen) == 1:
        lowest = min(filter(math.isfinite, chosen[0].curves["loss"]), default=None)
        facts = _WORDS.facts("run", chosen[0], lowest)
    newest = {run.group: max(one.written for one in runs if one.group == run.group) for run in runs}
    return {
        "facts": facts,
        "figures": {"curves": _drawn(chosen, inputs)} if any(run.curves["step"] for run in chosen) else {},
        "runs": [
            {
                "name": run.name,
                "group": run.group,
                "state": run.state,
                "summary": f"{run.summary} · {run.about}",
                "share": min(max(run.last("step") / (run.last("steps") or 1), 0.0), 1.0),
                "chosen": run in chosen,
            }
            for run in sorted(runs, key=lambda run: (-newest[run.group], run.group, run.name))
        ],
        "knowledge": [_table(name, results) for name, results in knowledge()],
        "folder": str(folder()),
        "trouble": trouble,
    }


def _chosen(runs: list[Run], name: str) -> list[Run]:
    """The run of that name, or those in the folder of that name, "." being the whole one; by default, those beside the
    last one written.
    """
    if not name:
        last = max(runs, key=lambda run: run.written, default=None)
        beside = [run for run in runs if last and run.group == last.group]
        return sorted(sorted(beside, key=lambda run: -run.written)[:_CURVES], key=lambda run: run.name)
    group = "" if name == "." else name
    chosen = [run for run in runs if run.name == name] or [run for run in runs if run.group == group]
    if not chosen:
        raise ParameterError("run", repr(name), "is not one of the runs that are here", "choose one from the list")
    return chosen[:_CURVES]


def _drawn(chosen: list[Run], inputs: RunsInputs) -> dict[str, Any]:
    column, title = _COLUMNS[inputs.curve]
    drawn_runs = [run for run in chosen if run.curves["step"]]
    series = {}
    for run in drawn_runs:
        points = [(x, y) for x, y in zip(run.curves["step"], run.curves[column], strict=True) if y is not None]
        series[run.short_name or run.name] = [x for x, _ in points], [y for _, y in points]
    drawn = figure(Chart(title, "step", title, series, log_y=inputs.log))
    for trace in drawn["traces"]:
        trace["legend"] = True
    return drawn


def _table(name: str, results: dict[str, Any]) -> str:
    """The table of an experiment, in HTML."""
    majority, rows = results.get("majority"), [row for row in results["rows"] if isinstance(row, dict)]
    best = max(rows, key=_accuracy, default=None)
    above = [{"arm": "majority answer", **majority}] if isinstance(majority, dict) else []
    best = best if best is not None and _accuracy(best) > max(map(_accuracy, above), default=0) else None
    return _KNOWLEDGE.html("knowledge", name, results["headline"], [*above, *rows], best)


def _accuracy(row: dict[str, Any]) -> float:
    accuracy = row.get("accuracy")
    return float(accuracy) if isinstance(accuracy, int | float) else 0.0


# ---- files


def folder() -> Path:
    return Path(os.environ.get(VARIABLE) or DEFAULT_FOLDER)


def all_runs() -> list[Run]:
    """Every run below the folder, by name."""
    runs = filter(None, map(_run, _folders()))
    return sorted(itertools.islice(runs, _RUNS), key=lambda run: run.name)


def knowledge() -> list[tuple[str, dict[str, Any]]]:
    """The figures of every knowledge experiment below the folder that has ended, the newest first."""
    experiments = [(_name(path), *_read(path / "knowledge.json", _json)) for path in _folders()]
    experiments.sort(key=lambda one: -one[2])
    return [
        (name, results)
        for name, results, _ in experiments
        if isinstance(results.get("rows"), list) and isinstance(results.get("headline"), str)
    ]


def _folders() -> Iterator[Path]:
    """The folder and those below it; links are not followed."""
    for place, inside, _ in itertools.islice(os.walk(folder()), _FOLDERS):
        path = Path(place)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if len(path.relative_to(folder()).parts) >= _DEEP:
            inside.clear()
        yield path


def _name(path: Path) -> str:
    return path.relative_to(folder()).as_posix() if path != folder() else path.resolve().name


def _run(path: Path) -> Run | None:
    config, _ = _read(path / CONFIG, _toml)
    model, data = config.get("model"), config.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return None
    curves, written = _read(path / "log.csv", curves_of)
    layers = model.get("layers")
    sizes = f"{layers} {'layer' if layers == 1 else 'layers'} of {model.get('width')}"
    about = f"{model.get('attention')}, {sizes}, {data.get('task')}"
    return Run(_name(path), curves, written, " ".join(about.split()))


def _read(path: Path, parse: Callable[[bytes], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """What a file says and when it was written; what an empty one would say if it cannot be read."""
    try:
        if path.is_file() and not path.is_symlink():
            facts = path.stat()
            return _parsed(path, parse, facts.st_mtime_ns, facts.st_size), facts.st_mtime_ns / 1e9
    except OSError:
        pass  # It went while we looked.
    return parse(b""), 0.0


@functools.lru_cache(512)
def _parsed(path: Path, parse: Callable[[bytes], dict[str, Any]], written: int, size: int) -> dict[str, Any]:
    """What a file says, as long as its time and size stay the same."""
    with path.open("rb") as file:
        return parse(file.read(_BYTES))


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _toml(content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8")) if len(content) <= _CONFIG_BYTES else {}
    except (ValueError, RecursionError):
        return {}


def curves_of(content: bytes) -> Curves:
    """The columns of a log, thinned to so many points, the first and the last among them.

    Lines with a held-out loss are rarer than others, and stay.
    """
    lines = parse_log(content.decode("utf-8", errors="replace"))
    if len(lines) > _POINTS:
        every = {round(i * (len(lines) - 1) / (_POINTS - 1)) for i in range(_POINTS)}
        held_out = [i for i, line in enumerate(lines) if line.held_out_loss is not None]
        every |= set(held_out[:: -(-len(held_out) // _POINTS) or 1])
        lines = [lines[i] for i in sorted(every)]
    return {name: [getattr(line, name) for line in lines] for name in COLUMNS}


_SUMMARY = "Training runs on this machine: losses while they fall, and what models know after reading."
PAGE = Page("runs", "Runs", _SUMMARY, 60, RunsInputs, preview, workshop=True)
