"""What models know: answers to questions and the knowledge experiment, as pages, a picture and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from avow.core.chart import Table
from avow.report import formatting
from avow.report.charts import Axis, Plot, Trace, figure, line_mode
from avow.report.style import FRONTIER, LOOKS, Look
from avow.report.terminal import Columns
from avow.training import Evaluation, Outcome, corpus_of
from avow.training.evaluation import COVERAGES, mean_confidence
from avow.training.knowledge import NOT_READ, Experiment, outcomes_by_kind

# Answers of each kind that a terminal and a page show.
_SHOWN, _SHOWN_ON_PAGE = 4, 5

MAJORITY = "majority answer"
HEADINGS = ("arm", "right", "accuracy", "interval", "over seeds", "at half", "weights", "time", "CPU")
_SEEDS, _CPU = HEADINGS.index("over seeds"), HEADINGS.index("CPU")
# An arm that has read has a colour of its own, one that has not is grey.
_GREY = Look("#9aa4af", "cross", "P")


@dataclass(frozen=True)
class ModelAnswers:
    """A checkpoint's answers to some questions, beside those of the majority if training questions are available."""

    checkpoint: Path
    questions: str
    evaluation: Evaluation
    majority: Evaluation | None

    @property
    def confidence(self) -> float:
        return mean_confidence(self.evaluation.outcomes)

    @property
    def headline(self) -> str:
        low, high = self.evaluation.interval
        return f"{_share(self.evaluation)} (95% interval {low:.1%} to {high:.1%})"

    @property
    def baseline(self) -> str:
        """The majority's figure in a line, or why there is none."""
        if self.majority is None:
            return "no training questions available, so no majority to compare with"
        return f"the majority answer, {self.majority.outcomes[0].answer.text!r}: {_share(self.majority)}"

    def plain(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        return {
            "checkpoint": str(self.checkpoint),
            "questions": self.questions,
            **self.evaluation.plain(),
            "mean_confidence": self.confidence,
            "majority": None if self.majority is None else self.majority.plain(),
        }

    @property
    def surest(self) -> list[Outcome]:
        """The answers, the most confident first."""
        return sorted(self.evaluation.outcomes, key=lambda outcome: -outcome.answer.confidence)


def evaluation_lines(answers: ModelAnswers) -> Iterator[RenderableType]:
    """The evaluation for a terminal."""
    yield Text(answers.headline, style="bold")
    yield Text(answers.baseline)
    yield Text("")
    rows = [(f"{coverage:.0%}", f"{answers.evaluation.accuracy_at(coverage):.1%}") for coverage in COVERAGES]
    yield Columns("lr", ("answered, surest first", "right"), rows)
    yield Text(f"mean confidence {answers.confidence:.1%}")
    if recited := recitation_table(answers.evaluation):
        yield Text("")
        yield Columns("lrrrr", recited.headings, [[str(cell) for cell in row] for row in recited.rows])
    for right in (True, False):
        outcomes = [outcome for outcome in answers.surest if outcome.right == right]
        if not outcomes:
            continue
        cells = [_answer_cells(outcome) for outcome in outcomes[:_SHOWN]]
        yield Text("")
        if right:
            yield Columns("wwr", ("right", "answer", "confidence"), [(*row[:2], row[3]) for row in cells])
        else:
            yield Columns("wwwr", ("wrong", "answer", "expected", "confidence"), cells)
        if len(outcomes) > _SHOWN:
            yield Text(f"and {len(outcomes) - _SHOWN:,} more", style="dim")


def recitation_table(evaluation: Evaluation) -> Table | None:
    """Which answers the model writes after the text's own words and after the question; None if no text was given."""
    if all(outcome.recited is None for outcome in evaluation.outcomes):
        return None
    rows = []
    for row in evaluation.recitation():
        loss, sure = row["loss"], row["confidence_of_wrong"]
        figures = ("" if loss is None else f"{loss:.2f}", row["wrong"], "" if sure is None else f"{sure:.1%}")
        rows.append((row["kind"], row["questions"], *figures))
    return Table("", ("answer", "asked", "nats a token", "wrong", "confidence of these"), rows)


def evaluation_page(answers: ModelAnswers, command: str) -> str:
    """The evaluation as a page; `command` is what made it."""
    from avow.report.page import render

    shown = {"abstention": answers.evaluation.abstention(), "calibration": answers.evaluation.calibration()}
    rows = [(*(cells := _answer_cells(o))[:3], o.right, cells[3]) for o in answers.surest]
    return render(
        "evaluation.html",
        {id: figure(chart) for id, chart in shown.items()},
        title="avow train evaluate",
        headline=answers.headline,
        answers=answers,
        charts=shown,
        recited=recitation_table(answers.evaluation),
        table=Table("", ("question", "answer", "expected", "right", "confidence"), rows),
        command=command,
    )


def _answer_cells(outcome: Outcome) -> tuple[str, str, str, str]:
    """Question, answer, expected answer and confidence; an answer that did not end is seen to go on."""
    text = outcome.answer.text if outcome.answer.ended else f"{outcome.answer.text}…"
    return outcome.question, text, outcome.expected, f"{outcome.answer.confidence:.1%}"


def _share(evaluation: Evaluation) -> str:
    return f"{evaluation.right:,} of {evaluation.asked:,} right: {evaluation.accuracy:.1%}"


@dataclass(frozen=True)
class Line:
    """A line of the experiment's table: its cells under `HEADINGS`, its answers if any, whether it is the best read."""

    cells: tuple[str, ...]
    evaluation: Evaluation | None
    best: bool = False

    @property
    def label(self) -> str:
        return self.cells[0]


def lines(experiment: Experiment) -> Iterator[Line]:
    """The majority's line, then one for each arm."""
    *first, half = _answered(experiment.majority)
    yield Line((MAJORITY, *first, "", half, formatting.NOTHING, "", ""), experiment.majority)
    for row in experiment.rows:
        if row.middle is None:
            yield Line((row.label, "failed", *[formatting.NOTHING] * 7), None)
            continue
        result, evaluation = row.middle
        *first, half = _answered(evaluation)
        spent = (formatting.seconds(result.seconds), formatting.seconds(result.cpu_seconds))
        spread = "–".join(f"{end:.0%}" for end in row.spread or ())
        cells = (row.label, *first, spread, half, f"{result.parameters:,}", *spent)
        yield Line(cells, evaluation, row is experiment.best)


def knowledge_table(experiment: Experiment) -> Columns:
    """The table for a terminal; the best of those that read is bold, and columns that say nothing are left out."""
    rows = list(lines(experiment))
    places = _columns(rows)
    if _SEEDS in places:
        places.remove(_CPU)  # Eighty characters have no room for it.
    cells = [[line.cells[place] for place in places] for line in rows]
    styles = ["bold" if line.best else "" for line in rows]
    return Columns("l" + "r" * (len(places) - 1), [HEADINGS[place] for place in places], cells, styles=styles)


def _columns(rows: list[Line]) -> list[int]:
    """The places of those columns in which something stands."""
    return [place for place in range(len(HEADINGS)) if any(line.cells[place] for line in rows)]


def _answered(evaluation: Evaluation) -> tuple[str, str, str, str]:
    low, high = evaluation.interval
    # Rounded outward, as its ends were found.
    interval = f"{math.floor(100 * low)}–{math.ceil(100 * high)}%"
    share = f"{evaluation.right}/{evaluation.asked}"
    return share, f"{evaluation.accuracy:.1%}", interval, f"{evaluation.accuracy_at(0.5):.1%}"


def knowledge_page(experiment: Experiment, command: str, machine: str) -> str:
    """The report as a page; `command` is what made it, `machine` where."""
    from avow.report.page import render

    rows, plots = list(lines(experiment)), _plots(experiment)
    places = _columns(rows)
    ranks = ["failed" if line.evaluation is None else "best" if line.best else "other" for line in rows]
    answers = list(_answers(experiment))
    configs = {result.arm.name: result.arm.config.to_toml() for row in experiment.rows for result in row.results}
    return render(
        "knowledge.html",
        {"accuracy": figure(accuracy_plot(experiment))} | {id: figure(plot) for id, plot in plots.items()},
        title="avow knowledge",
        headline=experiment.headline,
        experiment=experiment,
        arms=Table("", [HEADINGS[place] for place in places], [[line.cells[p] for p in places] for line in rows]),
        marks=[{"class": rank} for rank in ranks],
        charts=plots,
        counts=Table("", ["arm", "right", "sure", "wrong", "sure", "made up", "sure"], [arm["row"] for arm in answers]),
        answers=answers,
        configurations=configs.items(),
        command=command,
        machine=machine,
    )


def accuracy_plot(experiment: Experiment) -> Plot:
    """Accuracies with their intervals, a bar for each arm."""
    traces = []
    for line in lines(experiment):
        if (e := line.evaluation) is None:
            continue
        label, hover = f"{line.label}, {e.accuracy:.0%}", [f"{line.label}: {e.accuracy:.1%}, {e.right}/{e.asked}"]
        look = _look(experiment, line.label)
        # Pale enough that a whisker is seen upon it, in the light and in the dark.
        style: dict[str, Any] = {"opacity": 0.6, "legend": False, "hover": hover, "intervals": [e.interval]}
        traces.append(Trace(line.label, [e.accuracy], [label], "bars", look, **style))
    x = Axis("questions answered right, with 95% intervals", format="%", range=(0, 1.02))
    return Plot(experiment.headline, x, Axis("", names=[trace.y[0] for trace in traces]), traces)


def _look(experiment: Experiment, label: str) -> Look:
    """The look of an arm, the same in every figure."""
    read = [row.label for row in experiment.rows if row.label != NOT_READ]
    return LOOKS[read.index(label) % len(LOOKS)] if label in read else _GREY


def _plots(experiment: Experiment) -> dict[str, Plot]:
    """Loss, abstention and calibration of every arm's middle run."""
    middles = [row.middle for row in experiment.rows if row.middle is not None]
    losses, abstention, calibration = [], [], []
    for i, (result, e) in enumerate(middles):
        label, look = result.arm.label, _look(experiment, result.arm.label)
        if (curve := experiment.losses(result))[0]:
            losses.append(Trace(label, *curve, line_mode(curve[0]), look, dash=i))
        abstention.append(Trace(label, *next(iter(e.abstention().series.values())), "line", look, dash=i))
        bins = e.bins()
        sizes = [5 + 24 * math.sqrt(some.size / e.asked) for some in bins]
        xs, ys = [some.confidence for some in bins], [some.right for some in bins]
        calibration.append(Trace(label, xs, ys, "points", look, size=sizes, opacity=0.8))
    right, plots = Axis("share right"), {}
    if losses:
        plots["loss"] = Plot("Loss in training", Axis("step"), Axis("nats per token", log=True), losses)
    if abstention:
        title, x = "Accuracy where a model may abstain", Axis("share answered, the surest first")
        plots["abstention"] = Plot(title, x, right, abstention)
        title, even = "Does confidence say how often an answer is right?", (0.0, 1.0)
        calibration.append(Trace("calibrated", even, even, "line", FRONTIER, dash=2, width=1, hover=None))
        plots["calibration"] = Plot(title, Axis("mean confidence"), right, calibration)
    return plots


def _answers(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """How many answers of each kind every arm gives, how sure it is of them, and some of them to read."""
    corpus = corpus_of(experiment.corpus)
    for row in experiment.rows:
        if row.middle is None:
            continue
        _, evaluation = row.middle
        kinds = outcomes_by_kind(evaluation, corpus)
        counts: list[Any] = []
        for outcomes in kinds.values():
            counts += [len(outcomes), f"{mean_confidence(outcomes):.0%}" if outcomes else formatting.NOTHING]
        groups = [
            {"kind": kind, "count": len(outcomes), "table": _answers_table(outcomes)}
            for kind, outcomes in kinds.items()
            if outcomes
        ]
        yield {
            "label": row.label,
            "asked": evaluation.asked,
            "open": row in (experiment.best, experiment.not_read),
            "row": [row.label, *counts],
            "recited": recitation_table(evaluation),
            "groups": groups,
        }


def _answers_table(outcomes: list[Outcome]) -> Table:
    """The surest, the least sure, and some between."""
    count = min(_SHOWN_ON_PAGE, len(outcomes))
    places = sorted({round(i * (len(outcomes) - 1) / max(count - 1, 1)) for i in range(count)})
    headings = ("question", "answer", "expected", "confidence")
    return Table("", headings, [_answer_cells(outcomes[place]) for place in places])
