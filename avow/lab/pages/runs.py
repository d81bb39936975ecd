"""Training runs on disk: their curves while they grow, and what the knowledge experiments found."""

from __future__ import annotations

import math
from typing import Any, Literal

from avow.core.chart import Chart
from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.lab.pages import runs_disk as disk
from avow.lab.pages.runs_disk import Run
from avow.report import formatting
from avow.report.charts import figure

# As many curves as there are colours.
_CURVES = 7
_COLUMNS = {
    "loss": ("loss", "loss, nats per character"),
    "learning rate": ("rate", "learning rate"),
    "gradient": ("norm", "length of the gradient"),
    "speed": ("tokens_per_second", "tokens per second"),
}
_HEADINGS = ("arm", "right", "accuracy", "interval", "at half", "weights", "time")


class Watched(Inputs):
    run: str = control("", "Run, or folder of runs", longest=300, quiet=True)
    curve: Literal["loss", "learning rate", "gradient", "speed"] = control("loss", "Curve")
    log: bool = control(True, "Logarithmic scale")


def preview(inputs: Watched) -> Answer:
    """Where every run stands now; curves of the chosen ones, and the tables of experiments that ended."""
    runs = disk.all_runs()
    trouble, chosen = None, list[Run]()
    try:
        chosen = _chosen(runs, inputs.run)
    except ParameterError as error:
        trouble = error
    place = str(disk.folder())
    facts = _facts(chosen) if len(chosen) == 1 else [fact("Runs", str(len(runs)), f"below {place}")]
    if len(chosen) != 1:
        facts += [fact(run.name.rpartition("/")[2], _loss(run), _progress(run)) for run in chosen]
    return {
        "facts": facts,
        "figures": {"curves": _drawn(chosen, inputs)} if any(run.curves["step"] for run in chosen) else {},
        "runs": [_listed(run, run in chosen) for run in _newest_folders_first(runs)],
        "knowledge": [_table(name, told) for name, told in disk.knowledge()],
        "folder": place,
        "trouble": trouble,
    }


def _chosen(runs: list[Run], name: str) -> list[Run]:
    """The run of that name, or those in the folder of that name, "." being the whole one; unless told, those beside the
    last one written.
    """
    if not name:
        if not runs:
            return []
        last = max(runs, key=lambda run: run.written)
        found = [run for run in runs if run.group == last.group]
        return sorted(sorted(found, key=lambda run: -run.written)[:_CURVES], key=lambda run: run.name)
    group = "" if name == "." else name
    found = [run for run in runs if run.name == name] or [run for run in runs if run.group == group]
    if not found:
        raise ParameterError("run", repr(name), "is none of the runs that are here", "choose one from the list")
    return found[:_CURVES]


def _newest_folders_first(runs: list[Run]) -> list[Run]:
    newest: dict[str, float] = {}
    for run in runs:
        newest[run.group] = max(run.written, newest.get(run.group, 0.0))
    return sorted(runs, key=lambda run: (-newest[run.group], run.group, run.name))


def _listed(run: Run, chosen: bool) -> dict[str, Any]:
    share = run.step / run.steps if run.steps else 0.0
    return {
        "name": run.name,
        "group": run.group,
        "state": run.state,
        "told": f"{_progress(run)} · {run.about}",
        "share": min(max(share, 0.0), 1.0),
        "chosen": chosen,
    }


def _progress(run: Run) -> str:
    return ", ".join(filter(None, (run.state, _where(run))))


def _where(run: Run) -> str:
    if not run.curves["step"]:
        return ""
    return f"{run.step:,} steps" if run.state == "finished" else f"step {run.step:,} of {run.steps:,}"


def _loss(run: Run) -> str:
    found = run.last("loss")
    return "–" if found is None else f"{found:.4g}"


def _facts(chosen: list[Run]) -> list[dict[str, str]]:
    run = chosen[0]
    facts = [fact("State", run.state, _where(run)), fact("Loss", _loss(run), "nats per character, last")]
    finite = [loss for loss in run.curves["loss"] if math.isfinite(loss)]
    if finite:
        facts.append(fact("Lowest", f"{min(finite):.4g}", "among the steps that were written down"))
    speed, eta = run.last("tokens_per_second"), run.last("eta")
    if speed is not None:
        facts.append(fact("Speed", f"{speed:,.0f} tokens/s"))
    if eta is not None and run.state == "running":
        facts.append(fact("Still to go", formatting.seconds(eta)))
    return [*facts, fact("Model", run.about)]


def _drawn(chosen: list[Run], inputs: Watched) -> dict[str, Any]:
    column, title = _COLUMNS[inputs.curve]
    series = {
        run.name.rpartition("/")[2] or run.name: (run.curves["step"], run.curves[column])
        for run in chosen
        if run.curves["step"]
    }
    drawn = figure(Chart(title, "step", title, series, log_y=inputs.log))
    for trace in drawn["data"]:
        trace["showlegend"] = True
    # Where a reader has zoomed in, new points do not zoom out again.
    drawn["layout"]["uirevision"] = f"{inputs.run} {inputs.curve} {inputs.log}"
    return drawn


def _table(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """The table of an experiment as `avow knowledge` left its figures; what is missing is a dash."""
    majority = told.get("majority")
    majority = {"arm": "majority answer", **majority} if isinstance(majority, dict) else None
    lines = [majority] if majority else []
    lines += [row for row in told["rows"] if isinstance(row, dict)]
    best = max((_number(row.get("accuracy")) or 0.0 for row in lines), default=0.0)
    rows = []
    for row in lines:
        accuracy = _number(row.get("accuracy"))
        won = row is not majority and bool(accuracy) and accuracy == best
        rows.append({"cells": _cells(row, accuracy), "share": accuracy or 0.0, "best": won})
    return {"name": name, "headline": told["headline"], "headings": _HEADINGS, "rows": rows}


def _cells(row: dict[str, Any], accuracy: float | None) -> list[str]:
    right, asked, half, weights, seconds = (
        _number(row.get(key)) for key in ("right", "asked", "accuracy_at_half", "parameters", "seconds")
    )
    ends = row.get("interval")
    low, high = map(_number, ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
    whole = low is not None and high is not None
    return [
        str(row.get("arm")),
        formatting.NOTHING if right is None or asked is None else f"{right:.0f}/{asked:.0f}",
        formatting.NOTHING if accuracy is None else f"{accuracy:.1%}",
        f"{math.floor(100 * low)}–{math.ceil(100 * high)}%"
        if whole and low is not None and high is not None
        else formatting.NOTHING,
        formatting.NOTHING if half is None else f"{half:.1%}",
        formatting.NOTHING if weights is None else f"{weights:,.0f}",
        formatting.seconds(seconds),
    ]


def _number(x: object) -> float | None:
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) else None


PAGE = Page(
    name="runs",
    title="Runs",
    summary="Training runs on this machine: losses while they fall, and what models know after reading.",
    order=60,
    inputs=Watched,
    preview=preview,
    sign=(
        '<path class="faint" d="M4 44h88M4 44V4"/>'
        '<path d="M6 6 12 14 18 13 24 22 30 20 38 28 46 27 54 32 62 31 72 35 82 34 90 37"/>'
    ),
    body=r"""<div id="none" class="card" hidden><h2>No run yet below <code class="folder"></code></h2>
<p>Here is one that takes seconds; this page finds it by itself, and its loss falls as you watch:</p>
<pre><code>avow train pretrain <span class="folder"></span>/first \
  schedule.steps=200 data.batch=32 model.layers=2 model.width=64</code></pre>
<p>The whole experiment, several models with and without reading, takes minutes:</p>
<pre><code>avow knowledge --out <span class="folder"></span>/knowledge</code></pre>
<p class="soft">Runs in another folder: <code>avow lab --runs FOLDER</code>.</p></div>
<div class="figure" id="curves" hidden></div>
<div id="knowledge"></div>
<nav id="runs" aria-label="Runs on disk"></nav>""",
)
