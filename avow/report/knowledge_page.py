"""The report of a knowledge experiment, as a page."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from avow.core.chart import Chart, Table
from avow.report.charts import figure
from avow.report.document import report
from avow.report.evaluation import said
from avow.report.formatting import NOTHING
from avow.report.knowledge_plot import bars, colour
from avow.report.knowledge_table import HEADINGS, columns, lines
from avow.report.markup import html_table
from avow.training import Evaluation, Outcome, corpus_of
from avow.training.knowledge import Experiment, Result, outcomes_by_kind

# Answers of each kind that the page shows.
_SHOWN = 5


def knowledge_page(experiment: Experiment, command: str, machine: str) -> str:
    """The whole report; `command` is what made it, `machine` where."""
    figures: dict[str, Any] = {"accuracy": bars(experiment)}
    drawn = ""
    for id, (chart, words) in _charts(experiment).items():
        figures[id] = _painted(figure(chart), experiment)
        if id == "calibration":
            figures[id] = _weighed(figures[id], experiment)
        drawn += f'<h2>{escape(chart.title)}</h2>\n<p class="soft">{words}</p>\n<div class="figure" id="{id}"></div>\n'
    asked = experiment.majority.asked
    body = f"""<p class="soft">Models read short texts about people and are then asked {asked} times where someone was
born. The people asked about stand in the text; their questions are in no training set. What is right is
exactly right, character by character. {_HOW_TO_READ}</p>
<div class="figure bars" id="accuracy" style="height: {6 + 2.6 * len(figures["accuracy"]["data"][0]["y"])}rem"></div>
{_table(experiment)}
{_failures(experiment)}
{drawn}{_answers(experiment)}
<h2>How this was made</h2>
<p class="soft"><code>{escape(command)}</code> on {escape(machine)}, with the corpus
<code>{escape(experiment.corpus)}</code>. Each arm is a run in <code>{escape(str(experiment.folder))}</code>, and
<code>avow train evaluate</code> or <code>sample</code> takes its folder.</p>
{_configurations(experiment)}"""
    return report("avow knowledge", experiment.headline, body, figures, _STYLE)


_HOW_TO_READ = (
    "Whiskers and <i>interval</i> are 95% intervals (Clopper and Pearson) over the questions; with several seeds, "
    "every figure is of the run of middling accuracy. <i>At half</i> is the accuracy where a model answers only the "
    "half of the questions that it is surest of."
)
_STYLE = """
tr.best td { font-weight: 650; }
tr.failed { color: var(--soft); }
.answers td, .answers th { text-align: left; }
.answers td:first-child { white-space: normal; min-width: 9rem; }
.answers td:last-child, .answers th:last-child { text-align: right; }
h3 { font-size: 1rem; margin: 1.3rem 0 .3rem; }
.right { color: var(--proved); } .wrong { color: var(--corrected); } .made-up { color: var(--refuted); }
.trouble { border-left: 3px solid var(--refuted); padding-left: 1rem; }
details { margin: .7rem 0; } summary { cursor: pointer; font-size: .92rem; }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .7rem .9rem; font-size: .8rem; }
"""


def _table(experiment: Experiment) -> str:
    found = list(lines(experiment))
    kept = columns(found)
    rows = [[line.cells[place] for place in kept] for line in found]
    ranks = ["failed" if line.evaluation is None else "best" if line.best else "other" for line in found]
    table = Table("", [HEADINGS[place] for place in kept], rows)
    return html_table(table, marks=[f'class="{rank}"' for rank in ranks])


def _failures(experiment: Experiment) -> str:
    return "".join(
        f'<p class="trouble">{escape(result.arm.name)} came to no end: {escape(result.why)}</p>\n'
        for result in experiment.failures
    )


def _charts(experiment: Experiment) -> dict[str, tuple[Chart, str]]:
    """Loss, abstention and calibration of every arm's middle run, each with words to read it by."""
    found = [row.middle for row in experiment.rows if row.middle is not None]
    judged = _judged(experiment)
    losses = {result.arm.label: curve for result in found if (curve := experiment.losses(result))[0]}
    charts = {}
    if losses:
        chart = Chart("Loss in training", "step", "nats per character", losses, log_y=True)
        words = (
            "Whoever reads nothing soon has its few questions by heart; most of a text cannot be foretold, and its loss"
        )
        charts["loss"] = (chart, f"{words} stays up.")
    if judged:
        curves = {label: next(iter(known.abstention().series.values())) for label, known in judged}
        chart = Chart("Accuracy where a model may abstain", "share answered, the surest first", "share right", curves)
        charts["abstention"] = (chart, "A model that knows what it does not know falls from left to right.")
        bins: dict[str, Any] = {label: _bins(known) for label, known in judged}
        bins["calibrated"] = ((0.0, 1.0), (0.0, 1.0))
        title = "Does confidence say how often an answer is right?"
        chart = Chart(title, "mean confidence", "share right", bins, marks="points")
        words = "Answers in ten bins of confidence, a mark for each, larger where it stands for more answers: below the"
        charts["calibration"] = (chart, f"{words} dotted line a model believes too much.")
    return charts


def _bins(known: Evaluation) -> tuple[list[float], list[float]]:
    found = known.bins()
    return [some.confidence for some in found], [some.right for some in found]


def _painted(drawn: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """A figure in the colours of the arms; what stands for none of them is a thin grey line."""
    labels = {escape(row.label): row.label for row in experiment.rows}
    for trace in drawn["data"]:
        chosen = colour(experiment, labels.get(trace["name"], ""))
        trace["line"]["color"] = trace["marker"]["color"] = chosen
        if trace["name"] not in labels:
            trace |= {"mode": "lines", "line": {"color": chosen, "width": 1, "dash": "dot"}}
    return drawn


def _weighed(drawn: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """A figure whose marks are as large as the bins that they stand for, by area."""
    known = {escape(label): evaluation for label, evaluation in _judged(experiment)}
    for trace in drawn["data"]:
        if trace["name"] in known:
            found = known[trace["name"]]
            trace["marker"] |= {"size": [5 + 24 * math.sqrt(some.size / found.asked) for some in found.bins()]}
            trace["marker"] |= {"opacity": 0.8}
    return drawn


def _judged(experiment: Experiment) -> list[tuple[str, Evaluation]]:
    """The answers of every arm's middle run."""
    found = [row.middle for row in experiment.rows if row.middle is not None]
    return [(result.arm.label, result.evaluation) for result in found if result.evaluation is not None]


_KINDS = {
    "right": ("Right", "as the text says"),
    "wrong": ("Wrong", "words of the text, but not the answer"),
    "made up": ("Made up", "words that stand nowhere in the text"),
}


def _answers(experiment: Experiment) -> str:
    """How many answers of each kind every arm gives and how sure it is of them, and some of them to read."""
    corpus = corpus_of(experiment.corpus)
    counts, parts = [], ""
    for row in experiment.rows:
        if row.middle is None or row.middle.evaluation is None:
            continue
        kinds = outcomes_by_kind(row.middle.evaluation, corpus)
        counts.append([row.label, *(cell for some in kinds.values() for cell in (len(some), _sure(some)))])
        told = ""
        for kind, outcomes in kinds.items():
            name, meaning = _KINDS[kind]
            count = f"{len(outcomes)} of {row.middle.evaluation.asked}"
            if outcomes:
                told += f'<h3><span class="{kind.replace(" ", "-")}">{name}</span>: {count}, {meaning}</h3>\n'
                told += _shown(outcomes)
        shown = " open" if row in (experiment.best, experiment.not_read) else ""
        parts += f"<details{shown}><summary>Some answers of {escape(row.label)}</summary>\n{told}</details>\n"
    if not parts:
        return ""
    headings = ["arm", *(heading for name, _ in _KINDS.values() for heading in (name.lower(), "sure"))]
    return f"""<h2>Right, wrong and made up</h2>
<p class="soft">What a model did not read it makes up, and says with what confidence: the mean of it stands beside each
count.</p>
{html_table(Table("", headings, counts))}
{parts}"""


def _sure(outcomes: list[Outcome]) -> str:
    return f"{math.fsum(o.answer.confidence for o in outcomes) / len(outcomes):.0%}" if outcomes else NOTHING


def _shown(outcomes: list[Outcome]) -> str:
    """The surest, the least sure, and some between."""
    count = min(_SHOWN, len(outcomes))
    places = sorted({round(i * (len(outcomes) - 1) / max(count - 1, 1)) for i in range(count)})
    some = [outcomes[place] for place in places]
    rows = [(o.question, said(o), o.expected, f"{o.answer.confidence:.1%}") for o in some]
    return html_table(Table("", ("question", "answer", "expected", "confidence"), rows), "answers") + "\n"


def _configurations(experiment: Experiment) -> str:
    results: list[Result] = [result for row in experiment.rows for result in row.results]
    told = ""
    for result in results:
        text = json.dumps(json.loads(result.arm.config.to_json()), indent=1)
        told += f"<details><summary>{escape(result.arm.name)}</summary><pre>{escape(text)}</pre></details>\n"
    # Pages of JSON, which every run's folder has too: not for paper.
    return f'<div class="screen"><h3>Configurations</h3>\n{told}</div>'
