"""Where it breaks: its numbers are attend's, its certificates give way before its answers do."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from safetensors.torch import save

import avow
from avow.bench.trials import run_trial, token_marks
from avow.bench.workloads import Workload, workload
from avow.core import Problem
from avow.errors import FileError
from avow.lab.pages import bench
from avow.lab.pages.bench import (
    KNOBS,
    MADE,
    METHODS,
    PAGE,
    REAL,
    BenchInputs,
    judged,
    preview,
    real_head,
    uploaded_head,
    verdict,
)
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.report.formatting import percent
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import Opener, Visit

SMALL: dict[str, Any] = {"n": 128, "d": 16}
FEATURES: dict[str, Any] = {"method": "random_features", "kind": "diffuse"}
STRETCHED = "bench?method=random_features&kind=diffuse"


def drawn_head(kind: str, length: int) -> Workload:
    return workload(kind, 1, length, 16)


def facts(answer: dict[str, Any]) -> dict[str, str]:
    return {fact["label"]: fact["value"] for fact in answer["facts"]}


def trace(figure: dict[str, Any], name: str) -> dict[float, float]:
    (found,) = [one for one in figure["traces"] if one.get("name") == name]
    return dict(zip(found["x"], found["y"], strict=True))


def costs(figure: dict[str, Any], name: str) -> list[float]:
    """What the settings of a method cost: its filled marks."""
    (own,) = [one["x"] for one in figure["traces"] if one["name"] == name and one["mode"] == "points"]
    return list(own)


# ---- numbers


@pytest.mark.parametrize("method", [RandomFeatures(64), LowRank(16), Sparse(0.05)])
def test_a_try_is_what_attend_answers_measured_against_float64(method: Any) -> None:
    load = workload("clustered", 1, 128, 16)
    found = run_trial(load, method)
    out, certificate = avow.attend(
        load.q, load.k, load.v, method=method.name, generator=torch.Generator().manual_seed(0), **method.parameters
    )
    truth = torch.nn.functional.scaled_dot_product_attention(load.q.double(), load.k.double(), load.v.double())
    errors = (out.double() - truth).norm(dim=-1)[0, 0] / load.v.double().norm(dim=-1).amax()
    assert torch.allclose(found.errors, errors, rtol=1e-6, atol=1e-12)
    assert torch.equal(found.certificate.rows[0, 0], certificate.rows[0, 0]) and found.bound == certificate.bound
    assert found.broken == 0 and bool((found.errors <= found.certificate.rows[0, 0]).all())


def test_the_certificate_of_random_features_gives_way_before_the_answer_does() -> None:
    drawn_curve = preview(BenchInputs(**FEATURES), {})["figures"]["breaking"]
    bounds, errors = trace(drawn_curve, "certified bound"), trace(drawn_curve, "measured error")
    assert all(errors[place] <= bounds[place] for place in KNOBS["random_features"].places)
    warned = min(place for place, bound in bounds.items() if bound >= 1)
    failed = min(place for place, error in errors.items() if error >= 0.1)
    assert 3 * warned < failed < 30, "norms that break the answer are far above those that break the promise"
    answer = verdict(BenchInputs(**FEATURES), {})
    assert answer["verdict"]["word"] == "warned" and re.search(r"off by \d\.\d+%\.$", answer["verdict"]["says"])
    assert facts(answer)["Features for 1%"] == "no feasible number"


def test_a_rank_above_the_number_of_clusters_is_enough_and_one_below_is_not() -> None:
    words = {
        rank: verdict(BenchInputs(method="low_rank", kind="clustered", rank=rank, **SMALL), {})["verdict"]["word"]
        for rank in (4, 24)
    }
    assert words == {4: "warned", 24: "kept"}


def test_a_wider_tolerance_reads_fewer_tokens_and_stays_within_it() -> None:
    read = {}
    for drop in (0.001, 0.1):
        answer = verdict(BenchInputs(method="sparse", kind="clustered", drop=drop, **SMALL), {})
        assert answer["verdict"]["word"] == "kept"
        assert float(facts(answer)["Certificate"].removeprefix("error ≤ ").rstrip("%")) <= 100 * drop * 1.01
        read[drop] = float(facts(answer)["Tokens read in full"].rstrip("%"))
    assert read[0.1] < read[0.001] / 2


@pytest.mark.parametrize("kind", ["clustered", "averaging", "copying", "diffuse"])
@pytest.mark.parametrize("drop", [0.01, 0.2])
def test_exactly_the_tokens_that_were_read_are_lit(kind: str, drop: float) -> None:
    head = drawn_head(kind, 192).some(8)
    found = run_trial(head, Sparse(drop))
    marks = token_marks(head, found)
    counted = Sparse(drop).compute(Problem.of(head.q, head.k, head.v)).trace.read[0, 0]
    assert [len(row) - row.count("0") for row in marks] == counted.tolist()
    assert found.read == float(counted.sum()) / (8 * 192)
    assert f"read {found.read:.1%} of the tokens" in found.certificate.reason
    assert found.error <= found.bound and not found.broken


def test_what_a_copying_row_copies_is_the_brightest() -> None:
    head = drawn_head("copying", 128).some(6)
    weights = torch.softmax(head.q.double() @ head.k.double().transpose(-1, -2) / 4, -1)[0, 0]
    marks = token_marks(head, run_trial(head, Sparse(0.01)))
    for row, best in zip(marks, weights.argmax(-1).tolist(), strict=True):
        assert row[best] == "9"


def test_a_step_that_reads_less_moves_fewer_bytes_and_the_sketch_is_counted() -> None:
    head = drawn_head("clustered", 128)
    trials = [run_trial(head, Sparse(drop)) for drop in (0.0, 0.1)]
    assert trials[0].read == 1 < trials[0].traffic < 1.25, "all of it, and the sketch"
    assert trials[1].traffic - trials[1].read == pytest.approx(trials[0].traffic - trials[0].read)
    assert all(one.cost == one.traffic for one in trials)
    other = run_trial(head, LowRank(16))
    assert math.isnan(other.traffic) and other.cost == other.operations


def test_operations_are_those_of_the_whole_head_however_few_rows_are_tried() -> None:
    head = drawn_head("clustered", 512)
    few, every = run_trial(head, RandomFeatures(64), head.some(8)), run_trial(head, RandomFeatures(64))
    assert few.operations == every.operations and len(few.errors) == 8


# ---- real heads


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("method", [RandomFeatures(64), LowRank(16), Sparse(0.05)])
def test_a_real_head_is_causal_and_every_promise_is_kept(kind: str, method: Any) -> None:
    head = real_head(kind)
    assert head.causal and head.q.shape == head.k.shape == head.v.shape and head.q.shape[-1] == 64
    q, k, v = (x.double() for x in (head.q, head.k, head.v))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
    own = {"generator": torch.Generator().manual_seed(0), **method.parameters, **head.call}
    out, certificate = avow.attend(head.q, head.k, head.v, method=method.name, **own)
    longest = v[0, 0].norm(dim=-1).cummax(0).values
    found = run_trial(head, method)
    errors = (out[0, 0].double() - truth).norm(dim=-1) / longest
    assert torch.allclose(found.errors, errors, rtol=1e-5, atol=1e-9) and found.bound == certificate.bound
    assert found.broken == 0


def test_a_row_of_a_causal_head_lights_no_token_that_it_does_not_see() -> None:
    rows = real_head("wide").some(16)
    marks = token_marks(rows, run_trial(rows, Sparse(0.01)))
    for row, place in zip(marks, rows.positions.tolist(), strict=True):  # type: ignore[union-attr]
        assert set(row[place + 1 :]) <= {"0"}
    found = run_trial(rows, Sparse(0.0))
    assert found.read == 1, "all that it sees"


def test_a_head_of_a_kind_can_be_asked_for_by_its_name_and_is_told_of() -> None:
    for kind in REAL:
        answer = preview(BenchInputs.of({"kind": kind}), {})
        assert REAL[kind] in answer["about"] and "32 of 193 rows over 193 keys" in answer["about"]
        assert answer["shown"] == {"norm": 1.0}, "as the model has it"


def test_the_heads_are_those_that_the_model_was_asked_for() -> None:
    heads = pytest.importorskip("benchmarks.stories", reason="transformers is not installed").HEADS
    assert set(heads) == set(REAL)
    for kind, (layer, head) in heads.items():
        assert REAL[kind].startswith(f"Layer {layer}, head {head} of SmolLM2")


# ---- the same rows everywhere


SETTINGS: list[dict[str, Any]] = [
    FEATURES,
    FEATURES | {"n": 1024, "norm": 2.0},
    FEATURES | {"kind": "induction"},
    {},
    {"kind": "clustered", "method": "low_rank"},
    {"kind": "clustered", "method": "sparse", "n": 512},
]


@pytest.mark.parametrize("inputs", SETTINGS)
def test_figure_and_card_tell_the_same_rows_before_and_after_it_is_let_go(inputs: dict[str, Any]) -> None:
    chosen = BenchInputs(**inputs)
    first, last = preview(chosen, {}), verdict(chosen, {})
    assert first["facts"] == last["facts"][: len(first["facts"])]
    assert first["live"] == {name: last["verdict"][name] for name in ("tone", "word", "says")}
    assert first["figures"]["promises"] == last["figures"]["promises"]
    tried = re.search(r"(all|\d+ of) ([\d,]+) rows over [\d,]+ keys", first["about"])
    assert tried is not None and tried[0] in first["facts"][0]["about"] and tried[0] in last["verdict"]["steps"][0]
    marks = [one for one in first["figures"]["breaking"]["traces"] if one["mode"].endswith("points")]
    error = facts(first)["Largest error"]
    assert [percent(one["y"][0], 6) for one in marks if one["mode"] == "points"] == [error]
    assert f"measured {float(error.rstrip('%')):.3g}%." in first["sentence"]


def test_bounds_in_sentences_are_rounded_up() -> None:
    for bound, words in ((0.0281355, "2.82%"), (2.00002, "201%"), (0.5, "50%"), (2**-20, "9.54e-05%")):
        assert percent(bound, bound=True) == words and float(words.rstrip("%")) >= 100 * bound
    assert percent(math.inf, bound=True) == percent(10.1, bound=True) == "over 1000%"


def test_the_curve_passes_through_what_the_knob_gives() -> None:
    knob = KNOBS["low_rank"]
    drawn = preview(BenchInputs(method="low_rank", kind="clustered", rank=64), {})
    assert drawn["knob"] == {"name": "rank", "at": 64.0, "ends": (1, 256)} and 64 in knob.places
    curve = trace(drawn["figures"]["breaking"], "measured error")
    assert percent(curve[64], 6) == facts(drawn)["Largest error"]


@pytest.mark.parametrize("inputs", SETTINGS)
def test_what_is_copied_as_python_gives_the_bound_and_the_error(
    inputs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = preview(BenchInputs(**inputs), {})
    scope: dict[str, Any] = {}
    exec(answer["python"], scope)
    assert f"error ≤ {percent(scope['certificate'].bound, 6, bound=True)}" == facts(answer)["Certificate"]
    measured = float(capsys.readouterr().out.splitlines()[-1])
    assert measured == pytest.approx(float(facts(answer)["Largest error"].rstrip("%")) / 100, rel=0.02)


def test_a_file_and_a_real_head_have_their_own_lines_of_python() -> None:
    tensors = of_a_file()
    code = preview(BenchInputs(method="low_rank", file="x", n=64), tensors)["python"]
    assert 'load_file("yours.safetensors")' in code and "heads.safetensors" not in code


# ---- all methods


def test_every_setting_of_every_method_stands_among_the_costs() -> None:
    answer = verdict(BenchInputs(**SMALL), {})
    drawn_costs = answer["figures"]["costs"]
    named = {one["name"] for one in drawn_costs["traces"] if one.get("name")}
    assert named >= {"frontier", "exact", "low_rank", "random_features", "sparse"}
    assert named >= {"separable (another mechanism)", "latent (another mechanism)"}
    legend = {one["words"]: one["own_mechanism"] for one in answer["legend"]}
    names = {name.replace("_", " ") for name in named - {"frontier"}}
    assert {words + (" (another mechanism)" if own else "") for words, own in legend.items()} == names
    assert set(costs(drawn_costs, "exact")) == {1.0}
    assert len(set(costs(drawn_costs, "low_rank"))) == 3
    assert len(set(costs(drawn_costs, "sparse"))) > 1, "bytes depend on how much is read"
    texts = [text for one in drawn_costs["traces"] if one["name"] == "sparse" for text in one.get("hover") or ()]
    assert len(texts) == 6 and all("promised" in text and "of exact attention's bytes read" in text for text in texts)


def test_time_is_measured_beside_exact_attention() -> None:
    drawn_costs = verdict(BenchInputs(cost="time", **SMALL), {})["figures"]["costs"]
    assert drawn_costs["x"]["title"] == "time relative to exact attention"
    assert all(0 < x < math.inf for one in drawn_costs["traces"] for x in one["x"])


# ---- verdicts


def test_a_promise_that_is_broken_is_called_broken() -> None:
    head = drawn_head("clustered", 128)
    found = run_trial(head, LowRank(16))
    assert judged(found, head)["word"] == "kept"
    worst = int(found.errors.argmax())
    certificate = dataclasses.replace(found.certificate, rows=found.certificate.rows * 1e-9, bound=1e-12)
    lying = dataclasses.replace(found, certificate=certificate, broken=1)
    said = judged(lying, head)
    assert (said["tone"], said["word"]) == ("refuted", "broken") and "1 of 128 rows" in said["says"]
    assert float(lying.certificate.rows[0, 0][worst]) < float(lying.errors[worst])


def test_a_method_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LowRank.promise

    def lie(self: Any, *given: Any) -> Any:
        promise = honest(self, *given)
        return dataclasses.replace(promise, rows=promise.rows * 1e-5)

    monkeypatch.setattr(LowRank, "promise", lie)
    answer = verdict(BenchInputs(method="low_rank", kind="clustered", **SMALL), {})
    assert answer["verdict"]["word"] == "broken"


def test_a_statistical_promise_may_fail_as_often_as_it_says() -> None:
    head, method = KNOBS["random_features"].put(drawn_head("diffuse", 128), BenchInputs(features=64), 0.3)
    found = run_trial(head, method)
    assert found.certificate.kind == "statistical" and found.certificate.confidence == 0.99

    def word(broken: int) -> str:
        return str(judged(dataclasses.replace(found, broken=broken), head)["word"])

    assert [word(0), word(1), word(2)] == ["kept", "kept", "broken"]


@pytest.mark.parametrize("preset", PAGE.presets)
def test_no_preset_is_broken(preset: str) -> None:
    inputs = BenchInputs(**{**PAGE.presets[preset], "n": 192})
    assert verdict(inputs, {})["verdict"]["word"] in ("kept", "warned")


# ---- files


def of_a_file(heads: int = 4, groups: int = 2, n: int = 96, d: int = 16) -> dict[str, torch.Tensor]:
    return {"q": torch.randn(heads, n, d), "k": torch.randn(groups, n, d), "v": torch.randn(groups, n, d)}


def test_a_head_of_a_file_attends_to_its_own_group() -> None:
    tensors = of_a_file()
    head = uploaded_head(tensors, 64, 7)  # there are four: the seventh is the third
    assert torch.equal(head.q[0, 0], tensors["q"][3, :64]) and torch.equal(head.k[0, 0], tensors["k"][1, :64])
    assert run_trial(head, LowRank(16)).broken == 0
    inputs = BenchInputs(method="low_rank", file="x", n=64, head=3)
    assert facts(verdict(inputs, tensors)) == facts(verdict(dataclasses.replace(inputs, head=7), tensors))
    assert facts(preview(inputs, tensors)) != facts(preview(dataclasses.replace(inputs, head=2), tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", list(KNOBS))
def test_files_of_any_precision_keep_their_promises(method: str, dtype: torch.dtype) -> None:
    tensors = {name: x.to(dtype) for name, x in of_a_file(1, 1).items()}
    knob = KNOBS[method]
    head, approximation = knob.put(uploaded_head(tensors, 64, 0), BenchInputs(), min(knob.places))
    found = run_trial(head, approximation)
    assert found.broken == 0 and judged(found, head)["word"] in ("kept", "warned")


def test_values_that_are_all_zero_are_answered_without_error() -> None:
    tensors = of_a_file(1, 1) | {"v": torch.zeros(1, 96, 16)}
    found = run_trial(uploaded_head(tensors, 64, 0), LowRank(8))
    assert found.error == 0.0 and found.broken == 0


def test_files_that_hold_something_else_are_told_what_is_missing() -> None:
    with pytest.raises(FileError, match=r"lacks q and k and v \(it holds a\); save tensors named q, k and v"):
        uploaded_head({"a": torch.randn(2, 8, 4)}, 8, 0)
    with pytest.raises(FileError, match=r"holds q of shape \(8,\)"):
        uploaded_head(of_a_file() | {"q": torch.randn(8)}, 8, 0)
    with pytest.raises(
        FileError, match=r"holds what does not fit together: k.shape\[-1\]=8 must equal q.shape\[-1\]=16"
    ):
        uploaded_head(of_a_file() | {"k": torch.randn(2, 96, 8)}, 8, 0)


def test_some_rows_are_evenly_taken_and_all_keys_stay() -> None:
    head = drawn_head("diffuse", 128)
    some = head.some(4)
    assert torch.equal(some.q, head.q[..., [0, 32, 64, 96], :]) and some.k is head.k
    assert head.some(500) is head


# ---- the page


def drag_knob(found: Visit, place: float, let_go: bool = True) -> None:
    """Along the axis, to a place between its ends."""
    knob, axis = (found.page.locator(one).bounding_box() for one in ("#knob", "#axis"))
    found.page.mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2)
    found.page.mouse.down()
    found.page.mouse.move(axis["x"] + place * axis["width"], knob["y"] + knob["height"] / 2, steps=10)
    if let_go:
        found.page.mouse.up()


def knob_place(found: Visit) -> float:
    knob, axis = (found.page.locator(one).bounding_box() for one in ("#knob", "#axis"))
    return float((knob["x"] + knob["width"] / 2 - axis["x"]) / axis["width"])


@pytest.mark.browser
def test_the_mark_stands_on_the_axis_when_another_method_has_a_longer_legend(visit: Opener) -> None:
    found = visit("bench", viewport={"width": 390, "height": 844})
    found.settled()
    lines = set()
    for preset in ("Vectors stretched", "A real head, sparse"):
        found.page.click(f"[data-preset] >> text='{preset}'")
        found.settled()
        found.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        lines.add(found.page.locator("#breaking .keys").bounding_box()["height"])
        grid = found.page.locator("#breaking svg[role=application] > g > path").first.bounding_box()
        knob = found.page.locator("#knob").bounding_box()
        assert abs(grid["y"] + grid["height"] - knob["y"] - knob["height"] / 2) < 2
    assert len(lines) == 2, "the legend has grown"


@pytest.mark.browser
def test_the_mark_is_dragged_along_its_axis_with_the_verdict_live(visit: Opener) -> None:
    found = visit(STRETCHED, viewport={"width": 1366, "height": 650})
    assert "gave warning" in found.judged("warned")
    assert found.page.inner_text("#sentence").startswith("Queries and keys stretched ×8. The certificate is")
    drag_knob(found, 0.1, let_go=False)
    assert abs(knob_place(found) - 0.1) < 0.01, "it is under the hand"
    found.page.wait_for_function("() => document.getElementById('mark').textContent === '≈ kept'")
    found.page.wait_for_function(
        "() => document.getElementById('sentence').textContent.includes('is off by more than')"
    )
    assert float(found.page.input_value("#norm")) < -0.5, "the slider follows"
    found.page.mouse.up()
    assert "within its promise" in found.judged("kept")
    norm = float(found.inputs["norm"])
    assert 0.1 < norm < 0.3 and found.page.inner_text("#sentence").startswith(
        f"Queries and keys stretched ×{norm:g}. Proved with probability 0.99: no row"
    )
    middle = found.page.locator("#breaking svg[role=application] .points").first.bounding_box()
    knob = found.page.locator("#knob").bounding_box()
    assert abs(middle["x"] + middle["width"] / 2 - knob["x"] - knob["width"] / 2) < 2, "the mark stands above the knob"


@pytest.mark.browser
@pytest.mark.parametrize(
    ("path", "name", "keys", "value"),
    [
        (STRETCHED, "norm", ["End"], "30"),
        ("bench?method=low_rank&kind=clustered", "rank", ["ArrowRight", "PageUp", "ArrowLeft"], "26"),
        ("bench?method=sparse&kind=induction", "drop", ["Home"], "0.0001"),
        ("bench?method=sparse&kind=induction", "drop", ["Shift+ArrowRight"], "0.04"),
    ],
)
def test_the_mark_moves_by_the_keyboard_alone(visit: Opener, path: str, name: str, keys: list[str], value: str) -> None:
    found = visit(path)
    found.settled()
    found.page.focus("#knob")
    for key in keys:
        found.page.keyboard.press(key)
    found.page.wait_for_url(re.compile(f"{name}={value}$"))
    found.settled()
    assert found.page.get_attribute("#knob", "aria-valuetext") == found.page.inner_text(f"[for={name}] + output")
    assert found.page.evaluate("document.activeElement.id") == "knob"


@pytest.mark.browser
def test_figure_and_card_tell_the_same_rows_on_the_page(visit: Opener) -> None:
    found = visit("bench?method=sparse&kind=induction")
    found.settled()
    for place in (0.3, 0.7):
        drag_knob(found, place)
        found.settled()
        found.page.wait_for_selector("#costs:not(.stale)")
        rows = "32 of 193 rows over 193 keys"
        assert rows in found.page.inner_text("#what") and rows in found.page.inner_text("#facts")
        assert "Each of 32 rows (of 193)" in found.page.inner_text("#says")
        assert f"measured {found.fact('Largest error')}." in found.page.inner_text("#sentence")
        assert "Operations" not in found.page.inner_text("#facts") and found.fact("Bytes read").endswith("×")


@pytest.mark.browser
@pytest.mark.parametrize("path", ["bench", STRETCHED])
def test_nothing_moves_while_the_mark_is_dragged(visit: Opener, path: str) -> None:
    found = visit(path, viewport={"width": 1366, "height": 650})
    found.settled()
    places = "[...document.querySelectorAll('.control, .main, #facts')].map(one => one.getBoundingClientRect().y)"
    before = found.page.evaluate(places)
    for place in (0.05, 0.95, 0.5):
        drag_knob(found, place, let_go=False)
        found.page.wait_for_timeout(300)
        assert found.page.evaluate(places) == before
        found.page.mouse.up()
        found.settled()
        assert found.page.evaluate(places) == before
    figure = found.page.locator("#breaking").bounding_box()
    assert figure["y"] > 0 and figure["y"] + figure["height"] <= 650


@pytest.mark.browser
@pytest.mark.parametrize("viewport", [{"width": 1366, "height": 650}, {"width": 390, "height": 844}])
def test_every_head_and_method_is_explained_before_it_is_chosen(visit: Opener, viewport: dict[str, int]) -> None:
    found = visit("bench", viewport=viewport)
    found.settled()
    choices = found.page.locator(".choices input")
    assert choices.count() == len(REAL | MADE | METHODS)
    for one in choices.all():
        bubble = found.page.locator(f"#{one.get_attribute('aria-describedby')}")
        assert bubble.is_hidden()
        one.locator("xpath=..").hover()
        assert bubble.is_visible()
        assert bubble.inner_text() == (REAL | MADE | METHODS)[one.get_attribute("value")] + "."
        box = bubble.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= viewport["width"]
    found.page.mouse.move(0, 0)
    assert found.page.locator(".means:visible").count() == 0
    found.page.focus("input[value=sparse]")
    found.page.keyboard.press("Shift")  # a key: the focus is one to be seen
    assert found.page.locator(".means:visible").all_inner_texts() == [METHODS["sparse"] + "."]


@pytest.mark.browser
def test_a_real_head_has_no_draw_to_choose_and_a_made_one_has(visit: Opener) -> None:
    found = visit("bench?method=random_features&kind=resting")
    found.settled()
    assert "Layer 18, head 3 of SmolLM2" in found.page.inner_text("#what")
    assert found.page.locator("#head").is_hidden() and found.page.locator("#d").is_hidden()
    assert found.page.input_value("#norm") == "0", "as the model has it"
    found.page.check("input[value=clustered]")
    found.page.wait_for_function("() => document.getElementById('what').textContent.includes('8 tight clusters')")
    found.settled()
    assert found.page.locator("#head").is_visible() and found.inputs == {
        "method": "random_features",
        "kind": "clustered",
    }


@pytest.mark.browser
def test_the_bench_warns_before_it_fails_and_a_shorter_norm_is_kept(visit: Opener) -> None:
    found = visit(STRETCHED)
    assert "gave warning" in found.judged("warned")
    assert found.page.locator("#facts.sure").count() == 1 and found.page.locator("#strip").is_hidden()
    for figure in ("breaking", "costs", "promises"):
        found.page.wait_for_selector(f"#{figure} svg .points", state="attached")
    found.page.focus("#norm")
    found.page.keyboard.press("Home")
    assert "within its promise" in found.judged("kept")
    assert found.inputs == FEATURES | {"norm": "0.1"}
    assert found.page.locator("#costs.stale").count() == 0


@pytest.mark.browser
def test_tokens_light_up_and_fewer_of_them_when_more_may_be_dropped(visit: Opener) -> None:
    found = visit("bench?method=sparse&kind=clustered&n=192", color_scheme="dark")
    found.judged("kept")

    def lit_pixels() -> int:
        drawn_pixels = """() => {
          const canvas = document.getElementById("tokens"), {width, height} = canvas;
          const copy = Object.assign(document.createElement("canvas"), {width, height});
          const brush = copy.getContext("2d", {willReadFrequently: true});
          brush.drawImage(canvas, 0, 0);
          const pixels = brush.getImageData(0, 0, width, height).data;
          return pixels.filter((value, i) => i % 4 === 3 && value > 0).length;
        }"""
        return int(found.page.evaluate(drawn_pixels))

    inputs = BenchInputs(method="sparse", kind="clustered", n=192)
    rows = preview(inputs, {})["strip"]["rows"]
    before = lit_pixels()
    assert before == sum(len(row) - row.count("0") for row in rows)
    assert found.page.get_attribute("#tokens", "aria-label").startswith("Of 192 tokens, 32 queries read")
    found.page.focus("#drop")
    found.page.keyboard.press("End")
    found.page.wait_for_url(re.compile(r"drop=0\.5$"))
    found.judged("kept")
    assert 0 < lit_pixels() < before


@pytest.mark.browser
def test_a_file_of_ones_own_takes_the_place_of_the_drawn_head(visit: Opener, lab: Lab) -> None:
    tensors = {name: x.contiguous() for name, x in of_a_file(1, 1).items()}
    found = visit("bench?method=low_rank&rank=96&n=128")
    found.page.set_input_files(
        "#file", {"name": "mine.safetensors", "mimeType": "application/octet-stream", "buffer": save(tensors)}
    )
    found.page.wait_for_selector("#held:has-text('q: 1×96×16')")
    expected = facts(verdict(BenchInputs(method="low_rank", rank=96, n=128, file="x"), tensors))
    found.page.wait_for_selector("#facts.sure dd:has-text('all 96 rows over 96 keys')")
    shown, computed = (float(x.rstrip("%")) for x in (found.fact("Largest error"), expected["Largest error"]))
    assert shown == pytest.approx(computed, rel=0.01)
    assert bench.PAGE.takes_files
