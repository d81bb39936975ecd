"""One head by hand: its presets make their point, its verdicts are proofs, and its numbers are attention's."""

from __future__ import annotations

import contextlib
import io
import math
import re
from importlib import resources
from typing import Any

import pytest
import torch

from avow.errors import InsideHull, OutOfReach, ParameterError
from avow.lab.pages import explorer
from avow.lab.pages.explorer import PAGE, ExplorerInputs, bearings, pointed, sphere
from avow.theory.claims import catalogue
from avow.theory.constructions.queries import enclosed, read
from tests.helpers.lab_visits import Opener, Visit


def facts(answer: dict[str, Any]) -> dict[str, str]:
    return {fact["label"]: fact["value"] for fact in answer["facts"]}


def word(**inputs: Any) -> str:
    return str(PAGE.verdict(ExplorerInputs(**inputs))["verdict"]["word"]) if PAGE.verdict else ""


@pytest.mark.parametrize("preset", PAGE.presets)
def test_every_preset_makes_its_point(preset: str) -> None:
    inside = "keys" in PAGE.presets[preset]
    assert (
        word(**PAGE.presets[preset]) == "impossible" if inside else word(**PAGE.presets[preset]) in ("kept", "proved")
    )


@pytest.mark.parametrize("space", ["plane", "sphere"])
@pytest.mark.parametrize("n", [3, 8, 12])
def test_every_key_can_be_copied_and_a_query_that_looks_away_is_refuted(space: str, n: int) -> None:
    for target in range(n):
        assert word(space=space, n=n, target=target) == "kept"
        own = PAGE.preview(ExplorerInputs.of({"space": space, "n": n, "target": target}))["shown"]
        away = {"angle": math.remainder(own["angle"] + 180, 360), "rise": -own["rise"]}
        assert word(space=space, n=n, target=target, **away) == "not kept"
        assert word(space=space, n=n, target=target, length=0.0) == "not kept"


def test_an_average_that_no_query_gives_is_impossible_and_the_keys_that_rule_it_out_are_named() -> None:
    found = explorer.verdict(ExplorerInputs(show="average", target=0, other=4))["verdict"]
    assert found["tone"] == "refuted" and found["word"] == "impossible"
    assert "No query reads just keys 0 and 4 alike" in found["says"]


def test_one_head_fails_where_two_survive() -> None:
    found = facts(explorer.verdict(ExplorerInputs(show="noise", c=0.5)))
    assert found["Chance with one head"] == "0" and found["Chance with two heads"] == "1"
    quiet = facts(explorer.verdict(ExplorerInputs(show="noise", c=0.05)))
    assert quiet["Chance with two heads"] == "1"
    gaussian = facts(explorer.verdict(ExplorerInputs(show="noise", law="Gaussian", variance=0.5)))
    assert gaussian["Chance with one head"].startswith("0.0390837") and gaussian["Chance with two heads"].startswith(
        "0.848"
    )


def test_a_preview_says_what_the_verdict_proves() -> None:
    for inputs in ({}, {"angle": 20.0}, {"show": "average"}, {"show": "route", "angle": 30.0}, {"space": "sphere"}):
        preview, verdict = (f(ExplorerInputs(**inputs)) for f in (explorer.preview, explorer.verdict))
        assert float(facts(preview)["Logit gap"]) == pytest.approx(float(facts(verdict)["Logit gap"]), rel=1e-3)
        read_ = sum(float(preview["stage"]["weights"][i]) for i in preview["stage"]["wanted"])
        assert read_ == pytest.approx(float(facts(verdict)["Weight of what is read"]), abs=1e-9)


def test_a_certificate_that_is_broken_is_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = explorer._attended

    def wrong(scene: Any) -> Any:
        out, certificate = attended(scene)
        return out + 1e-3, certificate

    monkeypatch.setattr(explorer, "_attended", wrong)
    found = explorer.verdict(ExplorerInputs())["verdict"]
    assert found["word"] == "broken" and "BROKE its promise" in found["says"]


def test_bearings_lead_back_to_the_vector() -> None:
    for point in sphere(7):
        assert torch.allclose(pointed(3, **bearings(point * 5)), point * 5, atol=1e-5)


def test_an_enclosure_holds_attention_and_sees_an_answer_that_is_off() -> None:
    queries, keys, values = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 3)
    found = read(queries, keys, values)
    true = enclosed(queries, keys, values, found.outputs, kept=(0, 2))
    for weight, (low, high) in zip(found.weights.mean(0).tolist(), true.weights, strict=True):
        assert low - 1e-15 <= weight <= high + 1e-15 and high - low < 1e-15
    assert true.gap[0] - 1e-12 <= found.gap((0, 2)) <= true.gap[1] + 1e-12
    assert true.error < 1e-14
    off = enclosed(queries, keys, values, found.outputs + 0.01, kept=(0,))
    assert off.error == pytest.approx(0.01 * math.sqrt(3) / float(values.norm(dim=1).max()), rel=1e-6)


def test_one_key_has_no_gap_to_bound_and_values_of_zero_are_read_as_zero() -> None:
    query, key, nothing = torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2)
    alone = enclosed(query, key, nothing, nothing, kept=(0,))
    assert alone.gap == (math.inf, math.inf) and alone.error == 0.0 and alone.weights == ((1.0, 1.0),)
    assert enclosed(query, key, nothing, nothing + 1, kept=(0,)).error == math.inf
    assert read(query, key, nothing).gap((0,)) == math.inf


def test_an_estimate_is_what_verify_proves() -> None:
    from avow.theory.constructions import average_query, copy_query

    for made in (copy_query(torch.eye(5), 2, 0.01), average_query(torch.eye(5), (0, 3), 0.05)):
        assert made.estimate == pytest.approx(made.verify().achieved, rel=1e-9)


# ---- keys that were moved


def keys_of(**inputs: Any) -> torch.Tensor:
    return PAGE.preview(ExplorerInputs(**inputs))["stage"]["keys"]  # type: ignore[no-any-return]


def test_a_key_stands_where_the_address_says_and_the_others_stay() -> None:
    keys = keys_of(keys="1_0.25_-0.5*3_0_1")
    assert keys[1].tolist() == [0.25, -0.5] and keys[3].tolist() == [0.0, 1.0]
    assert torch.equal(keys[[0, 2, 4, 5, 6, 7]], keys_of()[[0, 2, 4, 5, 6, 7]])


def test_places_of_the_other_space_and_of_keys_that_are_no_more_are_left_alone() -> None:
    assert torch.equal(keys_of(keys="1_0.5_0.5_0.5*9_0_0"), keys_of())
    assert keys_of(space="sphere", keys="1_0.5_0.5_0.5*2_0_0")[1].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("keys", ["1", "1_2", "1_0_1.31", "1_0_nan", "1_0_0_0_0", "x_0_0", "1_0_0;2_0_0", "1_1e0_0"])
def test_keys_that_are_no_places_are_refused_with_the_rule(keys: str) -> None:
    with pytest.raises(
        ParameterError, match=r"keys=.* must say key_x_y, each number from -1\.3 to 1\.3, with \* between"
    ):
        PAGE.preview(ExplorerInputs(keys=keys))


@pytest.mark.parametrize(("space", "place"), [("plane", "1_0.3_0.2"), ("sphere", "1_0.1_0.1_0.1")])
def test_a_key_inside_the_hull_is_proved_to_be_the_mean_of_others(space: str, place: str) -> None:
    inputs = ExplorerInputs(space=space, keys=place)  # type: ignore[arg-type]
    answer = explorer.verdict(inputs)
    assert answer["verdict"]["word"] == "impossible" and "Key 1 lies in the hull" in answer["verdict"]["says"]
    keys, shares = keys_of(space=space, keys=place).double(), torch.tensor(answer["shares"], dtype=torch.float64)
    assert shares.min() >= 0 and shares[1] == 0 and float(shares.sum()) == pytest.approx(1)
    assert torch.allclose(shares @ keys, keys[1])
    for angle in range(-180, 180, 15):  # whatever the query
        turned = explorer.verdict(ExplorerInputs(space=space, keys=place, angle=float(angle), length=30.0))  # type: ignore[arg-type]
        assert turned["verdict"]["word"] == "impossible"


def test_a_key_near_the_hull_takes_a_query_longer_than_the_stage_and_that_is_said() -> None:
    inputs = ExplorerInputs(keys="1_0.53_0.53")
    shown = explorer.preview(inputs)["shown"]
    assert shown["length"] == pytest.approx(40.0, rel=1e-6)
    answer = explorer.verdict(inputs)
    assert answer["verdict"]["word"] == "not kept"
    assert float(facts(answer)["Length that it takes"].removeprefix("≥ ")) > 40
    assert re.search(r"Any query that does it is at least \d+(\.\d)? long\.$", answer["verdict"]["says"])
    assert "Any query" not in explorer.verdict(ExplorerInputs(angle=90.0))["verdict"]["says"], "it is long enough"


# ---- what is on the screen


@pytest.mark.parametrize("angle", [0.0, 2.0, 5.0, 22.0, 45.0, -90.0, 171.0])
def test_a_routed_token_is_judged_where_it_is_held(angle: float) -> None:
    inputs = ExplorerInputs(show="route", angle=angle)
    answer, stage = explorer.verdict(inputs), explorer.preview(inputs)["stage"]
    off = float((stage["outputs"] - stage["values"][stage["wanted"][0]]).norm())
    assert answer["verdict"]["word"] == ("kept" if off <= 0.01 else "not kept")
    assert ("is off by" in answer["verdict"]["says"]) == (off > 0.01)


def test_this_draw_of_a_noisy_key_is_told_apart_from_the_law() -> None:
    near, far = (explorer.verdict(ExplorerInputs(show="noise", x=x))["verdict"]["says"] for x in (1.0, 0.5))
    assert near.endswith(": within 0.1.") and far.endswith(": more than 0.1.")
    assert "At the X shown, 0.5, one head is off by" in far


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"angle": 70.0},
        {"keys": "1_0.3_0.2"},
        {"space": "sphere", "n": 5},
        {"show": "average"},
        {"show": "average", "other": 4},
        {"show": "route", "angle": 22.0},
        {"show": "route"},
    ],
)
def test_what_a_preview_expects_is_what_is_proved(inputs: dict[str, Any]) -> None:
    assert explorer.preview(ExplorerInputs(**inputs))["live"]["word"] == word(**inputs)


SNIPPETS = [
    ({}, "holds"),
    ({"angle": 80.0}, "BROKEN"),
    ({"keys": "1_0.3_0.2"}, InsideHull),
    ({"show": "average"}, "holds"),
    ({"show": "average", "other": 4}, OutOfReach),
    ({"show": "noise"}, "(0.0, 0.0)\n(1.0, 1.0)"),
    ({"show": "noise", "law": "Gaussian", "variance": 0.5}, "(0.039"),
    ({"show": "route"}, "tensor(True)"),
    ({"show": "route", "angle": 22.0}, "tensor(False)"),
]


@pytest.mark.parametrize(("inputs", "expected"), SNIPPETS)
def test_what_is_copied_as_python_gives_the_verdict(inputs: dict[str, Any], expected: Any) -> None:
    code, printed = explorer.preview(ExplorerInputs(**inputs))["python"], io.StringIO()
    if isinstance(expected, str):
        with contextlib.redirect_stdout(printed):
            exec(code, {})
        assert expected in printed.getvalue()
    else:
        with pytest.raises(expected):
            exec(code, {})


def test_every_scene_links_to_claims_that_there_are() -> None:
    page = (resources.files("avow.lab") / "templates" / "explorer.html").read_text(encoding="utf-8")
    linked = re.findall(r'"([\w-]+-[\w-]+)": "', page)
    assert len(linked) >= 8 and set(linked) <= set(catalogue())


# ---- the page


def key_centre(found: Visit, i: int) -> tuple[float, float]:
    box = found.page.locator("#stage .key").nth(i).locator("circle").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def stage_centre(found: Visit) -> tuple[float, float]:
    box = found.page.locator("#stage").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.browser
@pytest.mark.parametrize("path", ["explorer", "explorer?space=sphere&target=0"])
def test_a_key_dragged_into_the_hull_loses_its_cone_and_the_proof_is_drawn(visit: Opener, path: str) -> None:
    found = visit(path)
    found.judged("kept")
    i = 1 if path == "explorer" else 0
    assert found.page.locator("#stage .reads").count() == 1 and found.page.locator("#stage .hull.full").count() == 0
    (x, y), (a, b) = key_centre(found, i), stage_centre(found)
    size = found.page.locator("#stage .key").nth(i).locator("circle").bounding_box()["width"]
    found.page.mouse.move(x + 0.35 * size, y)  # beside the output and the query's tip
    found.page.mouse.down()
    found.page.mouse.move(a + 0.1 * (x - a) + 0.35 * size, b + 0.1 * (y - b), steps=8)
    found.page.wait_for_function("() => document.getElementById('mark').textContent === '≈ impossible'")
    assert found.page.locator("#stage .reads, #stage .wins").count() == 0
    assert found.page.locator("#stage .hull.full").count() == 1
    found.page.mouse.up()
    assert "lies in the hull of the others: it is" in found.judged("impossible")
    assert found.page.locator("#stage line.share").count() >= 3
    assert found.inputs["keys"].startswith(f"{i}_") and "angle" in found.inputs
    again = visit(found.page.url.rpartition("/")[2])
    again.judged("impossible")
    assert again.page.inner_text("#facts") == found.page.inner_text("#facts"), "the address holds the keys"
    found.page.click("#replace")
    found.judged("kept")
    assert "keys" not in found.inputs and found.page.locator("#stage .reads").count() == 1


@pytest.mark.browser
def test_weights_and_what_to_expect_follow_the_hand_without_the_lab(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    found.page.route("**/api/**", lambda route: None)  # nobody answers
    knob = found.page.locator(".handle .knob").bounding_box()
    (a, b), share = stage_centre(found), "document.querySelector('#weights .wanted').style.getPropertyValue('--share')"
    found.page.mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2)
    found.page.mouse.down()
    found.page.mouse.move(a - 90, b + 40, steps=4)
    assert found.page.inner_text("#mark") == "≈ not kept" and float(found.page.evaluate(share)) < 0.01
    assert "and 0.99 is asked" in found.page.inner_text("#says")
    found.page.mouse.up()
    found.page.unroute("**/api/**")


@pytest.mark.browser
def test_what_the_hand_sees_is_what_the_lab_computes(visit: Opener) -> None:
    found = visit("explorer?show=average&space=sphere&n=9&target=2&other=5")
    found.settled()
    call = """async stage => {
      const {read} = await import("/static/stage.js"), {bestDirection, keeps} = await import("/static/cone.js");
      const there = read(stage), best = bestDirection(stage.keys, stage.wanted);
      const {keys, wanted, queries, eps} = stage;
      return [there.weights, there.outputs, best !== null, keeps(keys, wanted, queries[0], eps)];
    }"""
    for inputs in (
        {},
        {"keys": "1_0.3_0.2"},
        {"keys": "1_0.5_0.6*2_0.9_0.9"},
        {"keys": "1_0.7_0.7*2_0.7_0.7"},
        {"show": "average"},
        {"show": "average", "other": 4},
        {"show": "average", "space": "sphere", "target": 2, "other": 5, "n": 9},
        {"space": "sphere", "keys": "1_0.1_0.1_0.1", "angle": 20.0},
        {"space": "sphere", "n": 12, "target": 7},
    ):
        answer = explorer.preview(ExplorerInputs(**inputs))  # type: ignore[arg-type]
        stage = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in answer["stage"].items()}
        stage["handle"] = {}
        weights, outputs, possible, kept = found.page.evaluate(call, stage)
        assert weights == pytest.approx(stage["weights"], abs=1e-9)
        assert outputs == pytest.approx(stage["outputs"], abs=1e-9)
        assert possible == (answer["live"]["word"] != "impossible"), inputs
        if possible:
            assert kept == (answer["live"]["word"] == "kept"), inputs


@pytest.mark.browser
def test_every_query_of_the_region_reads_the_key_and_its_edge_is_the_edge(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    call = """async ([keys, wanted]) => {
      const {cone, keeps, times} = await import("/static/cone.js"), {reads} = cone(keys, wanted, 0.01, 25, 40);
      const inside = reads.map(query => keeps(keys, wanted, times(query, 1.001), 0.01));
      const near = reads.slice(4, 44).map(query => keeps(keys, wanted, times(query, 0.99), 0.01));
      return [inside.every(Boolean), near.some(Boolean)];
    }"""
    assert found.page.evaluate(call, [keys_of().tolist(), [1]]) == [True, False]


@pytest.mark.browser
def test_keys_move_by_the_keyboard_alone(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    found.page.focus("#stage .key:nth-child(2)")
    for _ in range(5):
        found.page.keyboard.press("Shift+ArrowLeft")
    found.judged("impossible")
    assert found.inputs["keys"] == "1_0.21_0.71"
    assert "at 0.21, 0.71" in found.page.evaluate("document.activeElement.getAttribute('aria-valuetext')")
    found.page.keyboard.press("Home")
    found.judged("kept")
    assert "keys" not in found.inputs
    found.page.goto(found.page.url.partition("?")[0] + "?space=sphere")
    found.judged("kept")
    found.page.focus("#stage .key:nth-child(2)")
    found.page.keyboard.press("Shift+PageDown")
    found.page.wait_for_url(re.compile("keys=1_"))
    moved = torch.tensor([float(x) for x in found.inputs["keys"].split("_")[1:]])
    assert float(moved.norm()) < 0.95, "it went away from the reader, into the sphere"


@pytest.mark.browser
def test_a_held_token_is_expected_to_fail_and_proved_to(visit: Opener) -> None:
    found = visit("explorer?show=route")
    found.judged("kept")
    assert found.page.locator("#stage .arc").count() == 8 and found.page.locator("#find").is_hidden()
    found.page.focus(".handle")
    for _ in range(2):
        found.page.keyboard.press("Shift+ArrowLeft")
    assert found.page.inner_text("#mark") == "≈ not kept"
    assert "is off by 0." in found.judged("not kept")


@pytest.mark.browser
@pytest.mark.parametrize("show", ["copy", "average", "noise", "route"])
def test_each_scene_shows_the_links_to_its_claims(visit: Opener, show: str) -> None:
    found = visit(f"explorer?show={show}")
    found.settled()
    links = found.page.locator(".claims a:visible")
    assert links.count() >= 2 and all(one.get_attribute("href").startswith("/claims?claim=") for one in links.all())


@pytest.mark.browser
def test_keys_carry_the_words_of_a_head_of_page_1_and_keep_them(visit: Opener) -> None:
    carried = "#asks=blue&key=start&key=teapot&key=incomprehensibly"
    found = visit(f"explorer{carried}")
    found.judged("kept")
    labels = found.page.locator("#stage .key text")
    assert labels.all_text_contents() == ["0 start", "1 teapot", "2 incomprehe…", *"34567"]
    assert found.page.locator("#stage .key title").nth(2).text_content() == "incomprehensibly"
    assert found.page.locator("#weights small").all_text_contents() == ["start", "teapot", "incomprehensibly"]
    assert "query of “blue”" in found.page.inner_text("#signs") and found.page.is_visible("#carried")
    assert found.page.get_attribute("#stage .key:nth-child(2)", "aria-label").startswith("Key 1 “teapot”, to be read:")
    assert "rubber band" in found.page.inner_text(".meant >> nth=1")
    found.page.focus("#stage .key:nth-child(2)")
    found.page.keyboard.press("Shift+ArrowLeft")
    found.page.wait_for_url(re.compile("keys=1_"))
    assert found.page.url.endswith(carried), "the link that is copied holds them"
    boxes = [one.bounding_box() for one in labels.all()]
    stage = found.page.locator("#stage").bounding_box()
    assert all(stage["x"] <= box["x"] and box["x"] + box["width"] <= stage["x"] + stage["width"] for box in boxes)
    found.page.click("[data-preset]:has-text('A noisy key')")
    found.judged("proved")
    assert labels.all_text_contents() == list("012") and found.page.is_hidden("#carried"), "its keys are no words"
