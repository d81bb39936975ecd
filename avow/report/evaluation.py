"""What came of asking a model: figures and answers for a terminal, and a page with the charts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from avow.core.chart import Table
from avow.report.charts import figure
from avow.report.document import report
from avow.report.markup import html_table
from avow.report.terminal import Columns
from avow.training import Evaluation, Outcome

# Shares of the questions that a model may choose to answer.
COVERAGES = (0.25, 0.5, 0.75, 1.0)
# A terminal shows so many right answers, and as many wrong ones.
_SHOWN = 4


@dataclass(frozen=True)
class Asked:
    """A checkpoint's answers to some questions, beside those of the majority where training questions are at hand."""

    checkpoint: Path
    questions: str
    found: Evaluation
    majority: Evaluation | None

    @property
    def confidence(self) -> float:
        """The mean over all answers, right or wrong."""
        return math.fsum(o.answer.confidence for o in self.found.outcomes) / self.found.asked

    @property
    def headline(self) -> str:
        low, high = self.found.interval
        return f"{_share(self.found)} (95% interval {low:.1%} to {high:.1%})"

    @property
    def baseline(self) -> str:
        """The majority's figure in a line, or why there is none."""
        if self.majority is None:
            return "no training questions at hand, so no majority to compare with"
        return f"the majority answer, {self.majority.outcomes[0].answer.text!r}: {_share(self.majority)}"

    def plain(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        return {
            "checkpoint": str(self.checkpoint),
            "questions": self.questions,
            **self.found.plain(),
            "mean_confidence": self.confidence,
            "coverage": [[coverage, self.found.accuracy_at(coverage)] for coverage in COVERAGES],
            "majority": None if self.majority is None else self.majority.plain(),
        }

    def surest(self, right: bool) -> list[Outcome]:
        """Right answers, or wrong ones, the most confident first."""
        some = [outcome for outcome in self.found.outcomes if outcome.right == right]
        return sorted(some, key=lambda outcome: -outcome.answer.confidence)


def told(asked: Asked) -> Iterator[RenderableType]:
    """The evaluation for a terminal."""
    yield Text(asked.headline, style="bold")
    yield Text(asked.baseline)
    yield Text("")
    rows = [(f"{coverage:.0%}", f"{asked.found.accuracy_at(coverage):.1%}") for coverage in COVERAGES]
    yield Columns("lr", ("answered, surest first", "right"), rows)
    yield Text(f"mean confidence {asked.confidence:.1%}")
    for right in (True, False):
        some = asked.surest(right)
        if some:
            yield Text("")
            yield _answers(some[:_SHOWN], right)
            if len(some) > _SHOWN:
                yield Text(f"and {len(some) - _SHOWN:,} more", style="dim")


def page(asked: Asked, command: str) -> str:
    """The evaluation as a page; `command` is what made it."""
    charts = {"abstention": asked.found.abstention(), "calibration": asked.found.calibration()}
    parts = "".join(
        f'<h2>{escape(chart.title)}</h2>\n<div class="figure" id="{id}"></div>\n' for id, chart in charts.items()
    )
    headings = ("question", "answer", "expected", "right", "confidence")
    rows = [(o.question, said(o), o.expected, o.right, f"{o.answer.confidence:.1%}") for o in _by_confidence(asked)]
    body = f"""<p class="soft">{escape(str(asked.checkpoint))}, asked {escape(asked.questions)}.
{escape(_sentence(asked.baseline))} Mean confidence {asked.confidence:.1%}.</p>
<p class="soft">{_HOW_TO_READ}</p>
{parts}<h2>Every answer, the most confident first</h2>
{html_table(Table("", headings, rows))}
<p class="soft"><code>{escape(command)}</code></p>"""
    return report(
        "avow train evaluate", asked.headline, body, {id: figure(chart) for id, chart in charts.items()}, _STYLE
    )


_STYLE = "td, th { text-align: left; } td.wordy { white-space: normal; min-width: 14rem; }"
_HOW_TO_READ = (
    "An answer is right where it is the expected one, character by character. Its confidence is the probability that "
    "the model gives to just these characters and the end after them: where the model knows what it does not know, "
    "the most confident answers are the right ones, and one that may abstain answers those alone."
)


def _share(found: Evaluation) -> str:
    return f"{found.right:,} of {found.asked:,} right: {found.accuracy:.1%}"


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def said(outcome: Outcome) -> str:
    """An answer; one that did not come to an end is seen to go on."""
    return outcome.answer.text if outcome.answer.ended else f"{outcome.answer.text}…"


def _by_confidence(asked: Asked) -> list[Outcome]:
    return sorted(asked.found.outcomes, key=lambda outcome: -outcome.answer.confidence)


def _answers(some: list[Outcome], right: bool) -> Columns:
    """Right answers, or wrong ones beside those that were expected."""
    rows = [(o.question, said(o), o.expected, f"{o.answer.confidence:.1%}") for o in some]
    if right:
        return Columns("wwr", ("right", "answer", "confidence"), [(*row[:2], row[3]) for row in rows])
    return Columns("wwwr", ("wrong", "answer", "expected", "confidence"), rows)
