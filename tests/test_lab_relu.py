"""The ReLU builder: its numbers are the constructions', its proofs hold, and no formula is ever run."""

from __future__ import annotations

from typing import Any

import pytest

from avow.errors import NonFiniteError, ParameterError
from avow.lab.pages import relu
from avow.lab.pages.relu import PAGE, ReluInputs
from avow.theory.constructions import relu_piecewise, relu_square
from avow.theory.constructions.formulas import parse
from tests.helpers.hostile_formulas import CODE, hostile
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import Opener, Visit


def facts(answer: dict[str, Any]) -> dict[str, str]:
    return {fact["label"]: fact["value"] for fact in answer["facts"]}


def own(formula: str, **inputs: Any) -> ReluInputs:
    return ReluInputs(follow="a formula", formula=formula, **inputs)


@pytest.mark.parametrize("preset", PAGE.presets)
def test_every_preset_keeps_its_word(preset: str) -> None:
    found = relu.verdict(ReluInputs(**PAGE.presets[preset]))
    assert found["verdict"]["word"] == "kept" and found["verdict"]["tone"] == "proved"


@pytest.mark.parametrize("eps", [0.1, 0.01, 1e-4, 1e-6])
def test_the_units_and_errors_of_the_square_are_those_of_the_constructions(eps: float) -> None:
    wide, deep = relu_square(eps), relu_square(eps, deep=True)
    for inputs, made in ((ReluInputs(layers="one", eps=eps), wide), (ReluInputs(layers="many", eps=eps), deep)):
        preview, verdict = (f(inputs) for f in (relu.preview, relu.verdict))
        for answer in (preview, verdict):
            assert facts(answer)["Units in one layer"] == f"{wide.units:,}"
            assert facts(answer)["Units in many layers"] == f"{deep.units:,}"
            assert sum(answer["built"]) == made.units and len(answer["built"]) == made.depth
        assert facts(verdict)["Proven error"] == f"≤ {made.verify().achieved:.6g}"
        assert facts(verdict)["Measured error"].startswith("≈ "), "beside a proof, what is none is marked"
        assert float(facts(preview)["Measured error"]) <= made.bound * (1 + 1e-6) + 1e-15


def test_a_formula_is_followed_as_the_construction_follows_it_and_the_sketch_foresees_its_units() -> None:
    for formula, start, end, within in (("exp(-x**2)", -3.0, 3.0, 1e-3), ("sin(3*x)", 0.0, 3.0, 0.03)):
        made = relu_piecewise(parse(formula), (start, end), within)
        inputs = own(formula, start=start, end=end, within=within)
        verdict, preview = facts(relu.verdict(inputs)), facts(relu.preview(inputs))
        assert verdict["Hidden units"] == str(made.units)
        assert int(preview["Hidden units"]) == pytest.approx(made.units, abs=1), "a proof may need one unit more"
        assert verdict["Proven error"] == f"≤ {made.verify().achieved:.6g}"
        assert float(verdict["Measured error"].removeprefix("≈ ")) <= made.bound <= within


def test_the_figure_of_units_against_error_is_what_the_constructions_take() -> None:
    for (errors, units), deep in zip(relu._both_ways().values(), (False, True), strict=True):
        for error, count in list(zip(errors, units, strict=True))[1:7]:
            assert relu_square(min(error * (1 + 1e-9), 0.99), deep).units == count
    errors, units = relu._counted("exp(-x**2)", -3.0, 3.0)
    for error, count in zip(errors, units, strict=True):
        assert relu_piecewise(parse("exp(-x**2)"), (-3, 3), error).units == pytest.approx(count, abs=1)


def test_a_network_that_is_off_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = relu_square(0.09)
    monkeypatch.setattr(relu, "_square", lambda eps, deep: worse)
    found = relu.verdict(ReluInputs(eps=0.01))["verdict"]
    assert found["word"] == "not kept" and found["tone"] == "refuted" and "could be off by" in found["says"]


def test_what_is_wrong_is_said_of_the_field_it_is_about() -> None:
    with pytest.raises(
        ParameterError, match=r"^formula='__import__\(\"os\"\)' holds .* which is not known here; known"
    ):
        relu.preview(own('__import__("os")'))
    with pytest.raises(NonFiniteError, match=r"^formula=nan or inf at x=0 must be finite; change the interval$"):
        relu.preview(own("1/x"))
    with pytest.raises(NonFiniteError, match=r"^formula=nan or inf at x=0 must be finite"):
        relu.preview(own("(10**6)**64 * x"))
    with pytest.raises(ParameterError, match=r"^within=0.0001 needs more than 400 units; give a larger eps$"):
        relu.preview(own("sin(40*x)", within=1e-4))
    with pytest.raises(ParameterError, match=r"^end=3.0 must lie beyond the start, 4; move it to the right$"):
        relu.preview(own("x", start=4.0))


def test_no_hostile_formula_is_run_or_breaks_or_hangs_the_lab(lab: Lab) -> None:
    formulas = hostile(210)
    assert len(formulas) >= 200 and len(set(formulas)) > 180
    taken = 0
    for formula in formulas:
        found = lab.post("/api/relu/preview", {"follow": "a formula", "formula": formula})
        assert found.status in (200, 422), formula
        if found.status == 422:
            kind = found.said["error"]["kind"]
            assert found.mistake and kind not in ("Unforeseen", "TookTooLong"), f"{formula!r}: {found.mistake}"
        taken += found.status == 200
    assert 0 < taken < len(formulas) / 2, "harmless ones are taken, and most are not harmless"


@pytest.mark.parametrize("formula", [text for text in CODE if "import" in text or "exec" in text or "open" in text])
def test_a_formula_like_code_is_refused_by_the_parser_itself(formula: str) -> None:
    with pytest.raises(ParameterError, match=r"^formula="):
        parse(formula)


# ---- in a browser


@pytest.mark.browser
def test_a_mistake_stands_beside_the_field_and_goes_when_it_is_mended(browser: Any, lab: Lab) -> None:
    found = Visit(browser, lab, "relu?follow=a+formula")
    assert found.judged("kept").startswith("11 units in one layer stay within 0.029")
    found.page.fill("#formula", "x.__class__")
    found.page.wait_for_selector("[data-name=formula] #trouble:not([hidden])")
    said = found.page.inner_text("#trouble")
    assert said.startswith("formula='x.__class__' holds 'x.__class__', which is not known here; known: sqrt, ln, exp")
    assert found.page.get_attribute("#formula", "aria-invalid") == "true"
    assert found.page.inner_text("#mark") == "no answer"
    found.page.fill("#formula", "x**3")
    assert "stay within" in found.judged("kept")
    assert found.page.locator("#trouble").is_hidden() and found.page.get_attribute("#formula", "aria-invalid") is None
    assert found.inputs == {"follow": "a formula", "formula": "x**3"}
    found.page.close()


@pytest.mark.browser
def test_a_formula_and_its_interval_come_back_from_the_address(visit: Opener) -> None:
    first = visit("relu")
    assert first.judged("kept").startswith("4 units in one layer")
    assert first.page.locator("#network .unit").count() == 4
    first.page.get_by_role("button", name="A step").click()
    first.judged("kept")
    first.page.focus("#within")
    first.page.keyboard.press("Home")
    first.page.keyboard.press("PageUp")
    first.page.wait_for_url("**within=*")
    first.judged("kept")
    second = visit(first.page.url.rpartition("/")[2])
    second.judged("kept")
    assert second.page.input_value("#formula") == "tanh(8*x)"
    assert second.page.inner_text("#facts") == first.page.inner_text("#facts")
    first.page.go_back()
    assert first.judged("kept").startswith("4 units in one layer")
