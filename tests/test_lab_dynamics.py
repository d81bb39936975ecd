"""The dynamics page: its curves are those of the library's own parts, and its proved points hold what was measured."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from avow.lab.pages import dynamics
from avow.lab.pages.dynamics import PAGE, DynamicsInputs, preview, verdict
from avow.nn import gradient_horizon
from avow.nn.recurrent import GradientHorizon
from tests.helpers.lab_visits import Opener


def curve(answer: dict[str, Any], figure: str, name: str) -> list[float]:
    return next(trace["y"] for trace in answer["figures"][figure]["traces"] if trace["name"] == name)


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("gain", [0.3, 1.0, 1.4])
def test_the_measured_curve_is_the_library_s_and_no_proved_point_is_below_it(activation: Any, gain: float) -> None:
    inputs = DynamicsInputs(activation=activation, gain=gain, back=40)
    cell, x = dynamics.cell_of(activation, gain), dynamics.cell_inputs()
    found = gradient_horizon(cell, 40, x[:40])
    drawn = curve(preview(inputs), "gradients", "measured")
    assert drawn[0] == pytest.approx(1) and drawn[40] == pytest.approx(found.measured, rel=1e-6)
    answer = verdict(inputs)
    assert answer["verdict"]["tone"] == "proved"
    proved = next(trace for trace in answer["figures"]["gradients"]["traces"] if trace["name"] == "proved")
    assert proved["x"][-1] == 40 and proved["y"][-1] == found.bound
    assert all(bound >= drawn[t] * (1 - 1e-9) for t, bound in zip(map(int, proved["x"]), proved["y"], strict=True))


def test_below_one_the_verdict_holds_for_every_input_and_above_it_for_these() -> None:
    below, above = verdict(DynamicsInputs()), verdict(DynamicsInputs(gain=1.2))
    assert "Whatever the inputs, the gradient halves every 6.58 steps" in below["verdict"]["says"]
    assert "On these inputs the gradient is at most" in above["verdict"]["says"]
    assert [fact["value"] for fact in below["facts"]][-1] == "every input"


def test_a_bound_that_is_broken_is_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cell: object, steps: int, inputs: object) -> GradientHorizon:
        return GradientHorizon(steps, 0.1, 0.2, "product", 0.9)

    monkeypatch.setattr(dynamics, "gradient_horizon", broken)
    found = verdict(DynamicsInputs())["verdict"]
    assert found["tone"] == "refuted" and found["word"] == "broken"


@pytest.mark.parametrize("bound", [0.1, 0.9, 1.0, 2 / 3, 9.994, 9.996, 171.2, 1.2345e-42, 9.9999e-7, 3e10])
def test_a_bound_that_is_shown_shorter_is_still_one(bound: float) -> None:
    for digits in (3, 4):
        shown = float(dynamics._up(bound, digits))
        assert bound <= shown <= bound * (1 + 10.0 ** (1 - digits) * 1.01)


def test_the_defaults_make_the_point() -> None:
    answer = preview(DynamicsInputs())
    penalised = curve(answer, "decay", "Adam with L2")
    decoupled = curve(answer, "decay", "decoupled decay (AdamW)")
    assert penalised[-1] - penalised[0] > 0.5 > 0.05 > max(decoupled) - min(decoupled)
    assert curve(answer, "gradients", "measured")[-1] < 0.01
    assert curve(answer, "averages", "average from 0")[0] < 0.5 < curve(answer, "averages", "corrected average")[0]


@pytest.mark.parametrize("preset", PAGE.presets)
def test_every_preset_has_its_verdict(preset: str) -> None:
    answer = verdict(DynamicsInputs(**PAGE.presets[preset]))
    assert answer["verdict"]["word"] == "proved"


def test_the_ends_of_every_slider_are_drawn() -> None:
    sliders = [one for one in DynamicsInputs.declared() if one.type in (int, float)]
    for slider, end in itertools.product(sliders, ("low", "high")):
        inputs = DynamicsInputs.of({slider.name: getattr(slider.rule, end)})
        drawn = preview(inputs)["figures"]
        ys = [y for one in drawn.values() for trace in one["traces"] for y in trace["y"]]
        assert all(y is not None and math.isfinite(y) for y in ys)
        assert verdict(inputs)["verdict"]["word"] == "proved"
    assert len(sliders) == 6


@pytest.mark.browser
def test_every_panel_is_drawn_and_follows_its_sliders(visit: Opener) -> None:
    found = visit("dynamics")
    assert "halves every 6.58 steps" in found.judged("proved")
    for panel in ("gradients", "averages", "decay"):
        found.page.wait_for_selector(f"#{panel} svg .line", state="attached")
        assert found.page.locator(f"#panel-{panel} input[type=range]").count() == 2
    assert found.page.locator("#controls input").count() == 0, "each control stands in its panel"
    before = found.page.inner_text("#says-decay")
    found.page.focus("#penalty")
    found.page.keyboard.press("PageUp")
    found.page.wait_for_function("before => document.getElementById('says-decay').textContent !== before", arg=before)
    found.page.focus("#gain")
    for _ in range(3):
        found.page.keyboard.press("PageUp")
    found.page.wait_for_function("() => document.getElementById('says').textContent.startsWith('On these inputs')")
    assert float(found.inputs["gain"]) > 1 and float(found.inputs["penalty"]) > 0.5
    found.page.wait_for_function("() => document.querySelectorAll('#gradients .keys button').length === 3")
