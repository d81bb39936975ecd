"""The benchmark of calls on a GPU, run on a CPU at small sizes: tables are whole, wrong answers are not timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import avow
from avow.attend import Attended
from benchmarks import gpu_attend
from benchmarks.planner import Point

SMALL = gpu_attend.Sizes((64, 130), (64,), 2, 16, torch.float32, 2, True)
CPU = torch.device("cpu")


def few(quick: bool) -> list[Point]:
    kinds = avow.all_methods()
    sizes = avow.Sizes(1, 2, 2, 64, 64, 16, 16)
    return [Point(kinds["exact"](), sizes), Point(kinds["separable"](), sizes)]


def test_every_table_is_there_with_every_row_and_a_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attend, "points", few)
    calls, planner, modules, training = gpu_attend.measure(CPU, SMALL)
    assert [result.failures for result in (calls, modules, training)] == [[], [], []]
    assert [row["n"] for row in calls.rows] == [64, 130] and {row["chosen"] for row in calls.rows} <= {"exact"}
    assert {"SDPA ms", "attend ms", "attend us on top", "tol ms", "tol us on top"} < set(calls.rows[0])
    assert [row["method"] for row in planner.rows] == [point.method.label for point in few(True)]
    assert set(modules.rows[0]) == {"n", "plain ms", "avow ms", "ratio"}
    assert set(training.rows[0]) == {"n", "exact ms", "separable ms", "random_features ms"}
    assert [len(result.goals) for result in (calls, planner, modules, training)] == [3, 1, 1, 2]
    captured = calls.goals[2]
    assert not captured.met, "what was not captured meets no goal"


def test_an_answer_beyond_its_bound_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = avow.attend

    def wrong(*given: Any, **options: Any) -> Any:
        out, certificate = real(*given, **options)
        return Attended(out + 0.1, certificate)

    monkeypatch.setattr(avow, "attend", wrong)
    result = gpu_attend._calls(CPU, SMALL)
    assert not result.rows and len(result.failures) == 4 and "off, and its bound is" in result.failures[0]


def test_a_bound_that_says_nothing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = avow.attend

    def vague(*given: Any, **options: Any) -> Any:
        out, certificate = real(*given, **options)
        return Attended(out, dataclasses.replace(certificate, bound=2.5))

    monkeypatch.setattr(avow, "attend", vague)
    assert not gpu_attend._calls(CPU, SMALL).rows


def test_modules_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attend.Plain, "forward", lambda self, x: 2 * self.outward(self.inward(x).chunk(3, -1)[2]))
    result = gpu_attend._modules(CPU, SMALL)
    assert not result.rows and "apart" in result.failures[0] and not result.goals[0].met
