"""The report of a knowledge experiment: every figure on it is one of its results, and what failed is named."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from avow.report import charts
from avow.report.knowledge import (
    HEADINGS,
    MAJORITY,
    ModelAnswers,
    accuracy_plot,
    evaluation_lines,
    evaluation_page,
    knowledge_page,
    knowledge_table,
    lines,
    recitation_table,
)
from avow.training import Answer, Evaluation, Outcome, Progress, corpus_of
from avow.training.evaluation import Recitation
from avow.training.knowledge import NOT_READ, Experiment, Result, arms
from avow.training.run_folder import Log


def answered(right: int, sure: float) -> Evaluation:
    """So many of the dev questions right; of the others, every second answer stands nowhere in the text."""
    dev = corpus_of("invented").dev
    some = []
    for i, asked in enumerate(dev):
        wrong = "Nowhere <b>" if i % 2 else next(q.answer for q in dev if q.answer != asked.answer)
        said = asked.answer if i < right else wrong
        some.append(Outcome(asked.where, asked.question, asked.answer, Answer(said, sure / (1 + i))))
    return Evaluation(tuple(some))


@pytest.fixture
def sample(tmp_path: Path) -> Experiment:
    """Two seeds each: exact attention reads and knows, separable attention fails once."""
    results = []
    for arm in arms("invented", ["exact", "separable"], seeds=2, device="cpu"):
        right = {NOT_READ: 5, "exact": 50 + arm.seed, "separable": 30}[arm.label]
        result = Result(arm, answered(right, 0.9), 1234, 20.0, 19.0)
        if arm.label == "separable" and arm.seed == 1:
            result = Result(arm, why="its process was ended by SIGKILL")
        results.append(result)
        (tmp_path / arm.name).mkdir()
        with Log(tmp_path / arm.name / "log.csv", 0) as log:
            log.add(Progress(20, 40, 0.5, 2.5, 1e-3, 1.0, 1.0, 0.1, 1.0))
            log.add(Progress(40, 40, 1.0, 1.25, 1e-3, 1.0, 1.0, 0.1, 0.0))
    return Experiment.of("invented", tmp_path, results)


def page_of(sample: Experiment) -> str:
    return knowledge_page(sample, "avow knowledge --seeds 2", "2 cores of something")


def figures(page: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_table_has_a_line_for_every_arm(sample: Experiment) -> None:
    found = {line.label: dict(zip(HEADINGS, line.cells, strict=True)) for line in lines(sample)}
    assert list(found) == [MAJORITY, NOT_READ, "exact", "separable"]
    assert found["exact"]["right"] == "50/64" and found["exact"]["accuracy"] == "78.1%"
    assert found["exact"]["interval"] == "66–88%" and found["exact"]["over seeds"] == "78%–80%"
    assert found["exact"]["at half"] == "100.0%", "the surest answers are the right ones here"
    assert found[MAJORITY]["right"] == f"{sample.majority.right}/64"
    assert found["separable"]["right"] == "30/64", "one of two seeds came to an end"


def test_the_terminal_shows_it_in_eighty_columns(sample: Experiment) -> None:
    shown = io.StringIO()
    Console(width=80, file=shown).print(knowledge_table(sample))
    assert "…" not in shown.getvalue() and "50/64" in shown.getvalue() and "78%–80%" in shown.getvalue()


def test_the_page_tells_what_the_results_say(sample: Experiment) -> None:
    page = page_of(sample)
    assert f"<h1>{sample.headline}</h1>" in unescape(page)
    assert sample.headline.startswith(
        "After reading, exact is right in 78% of 64 questions; without reading in 8%, always"
    )
    for line in lines(sample):
        for cell in filter(None, line.cells):
            assert f"<td>{cell}</td>" in page
    assert "avow knowledge --seeds 2</code> on 2 cores of something" in page
    for row in sample.rows:
        for result in row.results:
            assert f"<summary>{result.arm.name}</summary>" in page


def test_a_failure_is_named_beside_the_others_results(sample: Experiment) -> None:
    assert "separable-seed-1 came to no end: its process was ended by SIGKILL" in page_of(sample)
    whole = dataclasses.replace(sample, rows=sample.rows[:2])
    assert "came to no end" not in page_of(whole)


def test_charts_hold_the_figures(sample: Experiment) -> None:
    drawn = figures(page_of(sample))
    assert list(drawn) == ["accuracy", "loss", "abstention", "calibration"]
    bars = {bar["name"]: bar for bar in drawn["accuracy"]["traces"]}
    assert list(bars) == [MAJORITY, NOT_READ, "exact", "separable"]
    bar = bars["exact"]
    assert bar["x"] == [50 / 64] and bar["y"] == ["exact, 78%"]
    assert bar["intervals"] == [pytest.approx(answered(50, 0.9).interval, rel=1e-5)]
    assert [trace["y"] for trace in drawn["loss"]["traces"]] == [[2.5, 1.25]] * 3
    (exact,) = [trace for trace in drawn["abstention"]["traces"] if trace["name"] == "exact"]
    assert exact["y"][0] == 1.0 and exact["y"][-1] == 50 / 64


def test_answers_of_every_kind_are_shown_with_their_confidence(sample: Experiment) -> None:
    page = page_of(sample)
    assert ">Right</span>: 50 of 64" in page and ">Made up</span>: 7 of 64" in page and ">Wrong</span>: 7 of 64" in page
    surest = answered(50, 0.9).outcomes[0]
    row = f'<td class="wordy">{surest.question}</td><td>{surest.expected}</td><td>{surest.expected}</td><td>90.0%</td>'
    assert row in page
    mean = sum(o.answer.confidence for o in answered(50, 0.9).outcomes[:50]) / 50
    assert f"<tr><td>exact</td><td>50</td><td>{mean:.0%}</td><td>7</td>" in page
    assert "Nowhere &lt;b&gt;" in page and "Nowhere <b>" not in page


def test_where_nothing_ended_the_page_says_so(sample: Experiment) -> None:
    none = [Result(r.arm, why="it broke") for row in sample.rows for r in row.results]
    empty = Experiment.of("invented", sample.folder, none)
    assert "No pretrained model finished" in page_of(empty) and page_of(empty).count("it broke") == 6
    assert [line.cells[1] for line in lines(empty)][1:] == ["failed"] * 3


def test_the_picture_is_a_picture(sample: Experiment) -> None:
    assert charts.png(accuracy_plot(sample)).startswith(b"\x89PNG")
    not_read, exact, separable = [trace.look.colour for trace in accuracy_plot(sample).traces[1:]]
    assert len({not_read, exact, separable}) == 3, "arms are told apart"
    (curve,) = [trace for trace in figures(page_of(sample))["loss"]["traces"] if trace["name"] == "exact"]
    assert curve["colour"] == exact, "an arm looks the same in every figure"


def test_what_is_recited_stands_in_a_table_of_its_own(sample: Experiment) -> None:
    assert "extracted by the question" not in page_of(sample), "no text was given"
    some = answered(50, 0.9).outcomes
    recited = [dataclasses.replace(o, recited=Recitation(0.25, i % 2 == 0)) for i, o in enumerate(some[:60])]
    evaluation = Evaluation((*recited, *some[60:]))
    table = recitation_table(evaluation)
    assert table is not None and [row[:3] for row in table.rows] == [
        ("recited and extracted", 25, "0.25"),
        ("recited, not extracted", 5, "0.25"),
        ("extracted, not recited", 25, "0.25"),
        ("neither", 5, "0.25"),
        ("not in the text", 4, ""),
    ]
    assert [row[3] for row in table.rows] == [0, 5, 0, 5, 4]
    answers = ModelAnswers(Path("run"), "the questions", evaluation, None)
    page, shown = evaluation_page(answers, "avow train evaluate run"), io.StringIO()
    assert "<td>recited, not extracted</td><td>5</td><td>0.25</td><td>5</td>" in page.replace(' class="wordy"', "")
    for line in evaluation_lines(answers):
        Console(width=80, file=shown).print(line)
    assert re.search(r"recited, not extracted +5 +0\.25 +5", shown.getvalue()) and "…" not in shown.getvalue()
    rows = [
        dataclasses.replace(row, results=tuple(dataclasses.replace(r, evaluation=evaluation) for r in row.results))
        for row in sample.rows
    ]
    assert page_of(dataclasses.replace(sample, rows=tuple(rows))).count("extracted by the question") == 3
