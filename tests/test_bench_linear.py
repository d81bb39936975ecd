"""`avow bench linear`: kernels, gradients and single tokens are checked first, and what fails has no speed."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import avow
from avow.bench import linear, linear_checks
from avow.bench.clock import Clock
from avow.bench.linear_checks import FEATURES, relative_error, token_steps, variants
from avow.bench.results import Row
from avow.cli import app
from avow.kernels.interpreted import interpret

interpret()
TINY = linear.Sizes(70, 1, (16,), (20,), 1, 1)


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """A GPU does not warn of inf."""
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        yield


def run(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["bench", "linear", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_cpu_measures_the_plain_path_beside_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PLAIN_QUICK", linear.Sizes(128, 1, (16,), (128,), 1, 1))
    done = run("--device", "cpu", "--quick", "--json")
    (result,) = json.loads(done.stdout)["results"]
    assert [row["method"] for row in result["rows"]] == ["separable", "random_features"]
    assert all(row["faster"] > 0 and row["training faster"] > 0 for row in result["rows"])
    assert "training faster" in run("--device", "cpu", "--quick").stdout


def test_an_answer_beyond_its_certificate_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PLAIN_QUICK", linear.Sizes(128, 1, (16,), (128,), 1, 1))
    honest = avow.attend

    def careless(*arguments: Any, **others: Any) -> Any:
        out, certificate = honest(*arguments, **others)
        return 100 * out, certificate

    monkeypatch.setattr(avow, "attend", careless)
    (result,) = json.loads(run("--device", "cpu", "--quick", "--json", code=1).stdout)["results"]
    assert result["rows"] == [] and len(result["failures"]) == 2
    assert result["failures"][0].startswith("separable, n = 128: an error of ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "cubic"], "only=cubic must be one of linear, random, separable, step; leave --only out"),
        (["--fuzz", "-1"], "fuzz='-1' must be at least 0; see avow bench linear --help"),
        (["--device", "cpu", "--tune"], "device=cpu is for kernels, which need a GPU; use a GPU, or --rehearse"),
    ],
    ids=str,
)
def test_nonsense_is_named(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["bench", "linear", *arguments])
    assert done.exit_code == 2 or done.exception is not None
    assert told in (done.output + str(done.exception))


def test_steps_that_pass_are_timed_and_steps_that_do_not_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = token_steps()["separable"]

    def careless(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        return honest.call(q, k, v, state) * 1.1

    monkeypatch.setitem(token_steps(), "separable", honest._replace(call=careless))
    monkeypatch.setattr(linear, "HEADS", 1)
    monkeypatch.setattr(linear_checks, "_TOKENS", 3)
    (result,) = linear.run("cpu", TINY, "step", lambda told: None, rehearsed=True)
    assert [row["step"] for row in result.rows] == ["random features"]
    assert len(result.failures) == 1 and result.failures[0].startswith("step, separable, batch 2: 0.")


def test_kernels_that_fail_their_check_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is faulty is told by variant; only the sound are timed.
    monkeypatch.setattr(linear_checks, "checked", lambda device, names, quick: {name: ["off"] for name in names})
    monkeypatch.setattr(
        linear, "timed", lambda device, sizes, sound, clock, limit, others: [{"kernel": x} for x in sound]
    )
    results = linear.run("cpu", TINY, "separable", lambda told: None, rehearsed=True)
    assert [result.rows for result in results] == [[]] and results[0].failures == ["off", "off"]


def test_a_kernel_is_judged_by_float64_and_by_its_own_formula() -> None:
    case = torch.float32, (1, 1, 1, 20, 16, 16)
    assert linear_checks.check("cpu", "separable", case) == []
    variant = variants()["separable"]
    with pytest.MonkeyPatch.context() as patch:
        wrong = variant._replace(call=lambda q, k, v: variant.call(q, k, v) + 1e-3 * v)
        patch.setitem(variants(), "separable", wrong)
        faults = linear_checks.check("cpu", "separable", case)
    assert len(faults) == 2 and "separable, float32, 1x1/1x20, d = 16, e = 16: out is 0.0" in faults[0]
    assert relative_error(torch.full((3,), math.nan), torch.ones(3)) == math.inf


@pytest.mark.kernels
def test_random_shapes_and_tables_come_out_at_tiny_sizes() -> None:
    (shapes,) = linear.shapes("cpu", 1, rehearsed=True)
    assert shapes.title == "1 random shapes and types, 0 faults"
    clock = Clock("cpu", 1, 1)
    rows: list[Row] = list(linear.timed("cpu", TINY, ["separable"], clock, 1e9))
    assert rows[0]["kernel"] == "separable" and float(rows[0]["of the limit"] or 0) > 0
    aims = list(linear.goals([rows[0] | {"of the limit": 0.71}]))
    assert [str(goal) for goal in aims] == [
        f"met: separable, {rows[0]['shape']} × 16: of the limit at least 0.7; found 0.71"
    ]
    (beside,) = linear.crossed("cpu", TINY, "separable, causal")
    assert float(beside["faster"] or 0) > 0
    assert len(list(linear.stages("cpu", TINY, clock, 1e9))) == 3
    late: Row = {"step": "separable", "batch": 64, "over the state's way": 1.6}
    assert [str(goal) for goal in linear.step_goals([late])] == [
        "MISSED: separable: a step within 1.5 of moving its state; found 1.6"
    ]


def test_peers_are_optional(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.peer("flash-linear-attention", "fla.ops.linear_attn", "chunk_linear_attn") is None
    assert "flash-linear-attention does not run here (ModuleNotFoundError" in capsys.readouterr().err
    assert linear.fla_call("linear", None) is None and linear.fla_call("separable", object()) is None

    def rival(q: Tensor, k: Tensor, v: Tensor, scale: float, normalize: bool) -> tuple[Tensor, bool]:
        return q, normalize

    call = linear.fla_call("random features", rival)
    assert call is not None and call(*torch.randn(3, 1, 1, 5, 16)).shape[-1] == FEATURES
