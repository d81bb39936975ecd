"""The page of claims: verdicts on record at once, proofs run again, a search that can be followed, a quiz, a copy."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from typer.testing import CliRunner

from avow.cli import app
from avow.lab.claim_cases import CASE, case_chart
from avow.lab.page import PACKAGE, all_pages, json_bytes
from avow.lab.pages import claims
from avow.lab.pages.claims import ClaimsInputs
from avow.lab.rendering import render, static_files
from avow.lab.scenes import SCENES, claims_about
from avow.report.claims import sentence
from avow.theory.claims import Claim, catalogue
from avow.theory.claims.claim import Falsifier
from avow.theory.claims.random_search import AMENDED, STATED, check_variant, excess_along, search, trials, variants
from avow.theory.claims.running import judged_after_needs
from tests.helpers.lab import Lab, running
from tests.helpers.lab_visits import Opener, Visit
from tests.test_lab_access import violations

# Claims that are quick to judge, of every verdict that there is.
QUICK = ("softmax-categorical", "relu-linear-a", "relu-linear-b", "finite-mask", "project-out", "momentum-ema")
OWN = Path(__file__).parent / "helpers" / "sample_claims.py"


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Each test judges, searches and reads files for itself."""
    yield
    for kept in (claims._finding, claims._hunt, claims._own):
        kept.cache_clear()


# ---- what is on record, and the proof


def test_every_claim_comes_with_its_sentence_and_the_verdict_on_record() -> None:
    shown = claims.preview(ClaimsInputs())
    assert [row["id"] for row in shown["ledger"]] == list(catalogue())
    for row in shown["ledger"]:
        claim = catalogue()[row["id"]]
        assert (row["plain"], row["recorded"], row["topic"]) == (sentence(claim).short, claim.expected, claim.topic)
        assert "Σ" not in row["plain"], "long formulas stand below the title"
    assert sum(row["recorded"] == "refuted" for row in shown["ledger"]) >= 5, "none of them has been judged here"
    assert shown["claim"]["recorded"] == "corrected" and shown["claim"]["meaning"].startswith("False as stated")
    assert len(json_bytes(shown)) < 40_000, "previews stay small"


@pytest.mark.parametrize("id", QUICK)
def test_a_proof_is_the_ledgers_own_and_confirms_the_record(id: str) -> None:
    claim = catalogue()[id]
    answer, finding = claims.verdict(ClaimsInputs(claim=id)), claim.judge()
    assert answer["verdict"]["word"] == finding.verdict == claim.expected
    assert "again just now, in " in answer["verdict"]["says"] and answer["verdict"]["says"].endswith(", as recorded.")
    for step in finding.evidence:
        assert step.kind in answer["html"]
    broken = [step.says for step in finding.evidence if step.kind == "counterexample"]
    assert not broken or broken[0] in answer["reason"], "the reason is the counterexample"


def test_a_proof_of_a_while_ago_is_not_called_new(monkeypatch: pytest.MonkeyPatch) -> None:
    claims.verdict(ClaimsInputs(claim="finite-mask"))
    finding, since = claims._finding("finite-mask")
    for seconds, age in ((45, "45 s"), (100, "1 minute"), (185, "3 minutes")):
        monkeypatch.setattr(claims, "_finding", lambda id, s=seconds: (finding, since - s))
        says = claims.verdict(ClaimsInputs(claim="finite-mask"))["verdict"]["says"]
        assert f"Refuted again {age} ago, in " in says


def test_a_verdict_is_computed_and_no_stored_text(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = catalogue()["softmax-categorical"]
    broken = dataclasses.replace(claim, subject=claim.sabotage["squares of the weights"])
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {claim.id: broken})
    found = claims.verdict(ClaimsInputs(claim=claim.id))
    assert found["verdict"]["word"] == "refuted" and "it is recorded as proved." in found["verdict"]["says"]


def test_a_claim_whose_need_fails_gets_no_verdict() -> None:
    claim = dataclasses.replace(catalogue()["copy-gap"], needs=("softmax-categorical",))

    def judge(one: Any) -> Any:
        assert one.id != "copy-gap", "it is never judged"
        return one.judge_sabotage("squares of the weights")

    found = judged_after_needs(claim, judge)
    assert found.verdict == "no verdict" and "it needs the claim softmax-categorical" in found.trouble


def test_the_page_knows_every_claim_topic_and_verdict() -> None:
    choices = {one.name: one.rule.choices for one in ClaimsInputs.declared()}
    assert set(choices["topic"]) == {"every", claims.OWN_TOPIC, *(claim.topic for claim in catalogue().values())}
    assert {claim.expected for claim in catalogue().values()} <= set(choices["verdict"])
    shown = claims.preview(ClaimsInputs())
    assert "<math" in shown["claim"]["html"] and "What is true instead" in shown["claim"]["html"]
    assert all(len(id) <= 60 for id in catalogue())
    astray = claims.preview(ClaimsInputs(claim="copy-gaps"))
    assert str(astray["trouble"]).startswith("claim='copy-gaps' is not known; did you mean copy-gap")
    assert astray["ledger"] == shown["ledger"], "there is a list to choose from"


# ---- the search


def whole_search(id: str, **inputs: Any) -> list[dict[str, Any]]:
    """The slices of a search, as the page asks for them."""
    slices: list[dict[str, Any]] = []
    while not slices or not slices[-1]["done"]:
        after = slices[-1]["tried"] if slices else 0
        slices.append(claims.verdict(ClaimsInputs(claim=id, after=after, **inputs))["attack"])
    return slices


@pytest.mark.parametrize("id", ["relu-linear-a", "copy-possible", "copy-gap"])
def test_slices_of_a_search_end_where_the_whole_search_does(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SLICE_SECONDS", 0.002)
    slices, whole = whole_search(id, cases=400, seed=3), search(catalogue()[id], cases=400, seed=3)
    assert slices[-1]["tried"] == whole.tried and (slices[-1]["tone"] == "refuted") == whole.broken
    nearest = [mark for part in slices for mark in part["marks"] if mark[2]]
    assert nearest[-1][1] == whole.excess and nearest[-1][3] == [float(x) for x in whole.case.values()]
    assert [mark[1] for mark in nearest] == sorted(mark[1] for mark in nearest), "the nearest miss only improves"
    if id == "copy-gap":
        assert len(slices) > 2, "it can be followed, and stopped between slices"


def test_a_slice_of_a_search_that_nobody_began_here_is_the_same() -> None:
    first = whole_search("copy-gap", cases=300)
    claims._hunt.cache_clear()
    later = claims.verdict(ClaimsInputs(claim="copy-gap", cases=300, after=200))["attack"]
    assert later["done"] and later["says"] == first[-1]["says"] and later["marks"][0][0] == 201
    again = claims.verdict(ClaimsInputs(claim="copy-gap", cases=300, after=0))["attack"]
    assert again["marks"][0] == first[0]["marks"][0], "and one that is begun again begins at the start"


def test_the_end_of_a_search_is_told_in_words_with_its_case_drawn() -> None:
    (broken,) = whole_search("relu-linear-a")
    assert broken["word"] == "counterexample" and broken["says"].startswith("Broken by case 1: by 2.33.")
    assert [len(curve) for curve in broken["curves"]] == [42, 42, 42], "41 places along each number, and its own"
    m, b, x = broken["marks"][-1][3]
    assert broken["chart"]["series"][CASE] == [[x], [max(m * x + b, 0)]], "a unit is 0 where the line is below"
    whole = whole_search("relu-linear-a", variant=AMENDED, cases=300)[-1]
    assert whole["word"] == "none found" and whole["tone"] == "none" and whole["chart"] is None
    assert whole["says"].startswith("300 cases tried, and none breaks it. The nearest miss meets it with equality.")
    assert "That proves nothing" in whole["says"]


def test_a_search_that_runs_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SEARCH_SECONDS", 0.0)
    found = whole_search("lse-merge", cases=100_000)[-1]
    assert found["word"] == "none found" and 1 <= found["tried"] < 100_000
    assert "The time was up: 100,000 were asked for." in found["says"]


def test_equality_that_breaks_a_statement_is_told_as_such() -> None:
    found = whole_search("heads-identical")[-1]
    assert found["says"] == ("Broken by case 1: by 1. Balls evaluated it, so it is certain.")


def test_numbers_whose_names_do_not_say_it_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def excess(subject: Any, a: Any) -> Any:
        """x is 10^−a."""
        return -a

    own = Claim(
        "own", "t", "x", "supported", lambda _: iter(()), statement="x", falsifier=Falsifier({"a": (0, 6)}, excess)
    )
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {own.id: own})
    shown = claims.preview(ClaimsInputs(claim="own"))["claim"]
    assert shown["reads"] == "x is 10^−a." and [number["name"] for number in shown["numbers"]] == ["a"]
    assert not claims.preview(ClaimsInputs(claim="heads-identical"))["claim"]["reads"]


def test_a_curve_along_a_number_goes_through_the_case_it_is_of() -> None:
    claim = catalogue()["copy-gap"]
    trial = next(one for one in trials(claim) if one.number == 7)
    for place, x in enumerate(trial.case):
        assert (float(x), trial.excess) in list(excess_along(claim, STATED, trial.case, place))


def test_a_case_that_takes_long_has_no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_CURVES_SECONDS", 0.0)
    found = whole_search("perceiver-cost")[-1]
    assert found["word"] == "counterexample" and found["curves"] == []


DRAWN = ("relu-linear-a", "relu-linear-b", "copy-shortest", "copy-possible", "noise-isotropic", "heads-discrete")


@pytest.mark.parametrize("id", [*DRAWN, "relu-square-line", "momentum-ema"])
@pytest.mark.parametrize("seed", range(3))
def test_a_counterexample_on_the_claims_own_figure_is_off_by_its_excess(id: str, seed: int) -> None:
    claim = catalogue()[id]
    found = search(claim, seed=seed)
    case = {name: float(x) for name, x in found.case.items()}
    chart = case_chart(claim, STATED, case)
    assert found.broken and chart is not None and case_chart(claim, AMENDED, case) is None
    (x,), (y,) = chart.series[CASE]
    asked, drawn = list(chart.series.values())[:2]
    # Where the mark stands, the two curves are as far apart as the search says that the claim is broken.
    # The statement allows a quarter of the square of a piece.
    allowed = (case["reach"] / case["kinks a side"]) ** 2 / 4 if id == "relu-square-line" else 0
    wanted = None if id == "copy-shortest" else found.excess + allowed
    if id in ("copy-possible", "noise-isotropic", "heads-discrete"):
        asked, drawn = drawn, asked
        assert asked[1][0] - y == pytest.approx(found.excess, abs=2e-3)
    elif wanted is not None:
        near = min(range(len(asked[0])), key=lambda i: abs(asked[0][i] - x))
        exact = {"relu-linear-a": lambda: case["m"] * x + case["b"], "relu-linear-b": lambda: case["m"] * x + case["b"]}
        height = exact.get(id, lambda: x * x if id == "relu-square-line" else asked[1][near])()
        assert abs(height - y) == pytest.approx(wanted, rel=1e-6)
    else:
        assert y < asked[1][min(range(len(asked[0])), key=lambda i: abs(asked[0][i] - x))], "shorter than is said"


def test_a_title_is_a_sentence_and_its_long_terms_stand_below_it() -> None:
    said = sentence(catalogue()["nearest-key"])
    assert "at the squared distance ①, gets the largest weight, ②." in said.words and len(said.below) == 2
    assert said.short == "The key nearest to the query, at the squared distance …, gets the largest weight, …"
    assert all("<math" in term for term in said.below) and "<math" not in said.words
    short = sentence(catalogue()["relu-linear-a"])
    assert short.words.count("<math") == 2 and not short.below and short.short == catalogue()["relu-linear-a"].plain
    own = dataclasses.replace(catalogue()["nearest-key"], formal=None, plain="<b>{x}</b>", as_written=())
    assert sentence(own).words == "&lt;b&gt;{x}&lt;/b&gt;", "whatever stands in the words of a reader's own"


def test_the_reason_says_the_case_in_plain_numbers() -> None:
    said = claims.verdict(ClaimsInputs(claim="rnn-exploding-ratio"))
    assert "(T = 2, d = 1, W = [[2]], s = [[1/4], [1/4]]" in said["reason"] and "Fraction(" not in said["html"]
    proved = claims.verdict(ClaimsInputs(claim="copy-gap"))["reason"]
    assert proved.startswith("Proved in 12 steps") and "exp rises" in proved and "z3" not in proved


def test_words_of_the_field_are_explained_where_a_claim_uses_them() -> None:
    shown = [one["label"] for one in claims.preview(ClaimsInputs(claim="average-two"))["claim"]["terms"]]
    assert shown == ["orthonormal", "ε"] and not claims.preview(ClaimsInputs(claim="momentum-ema"))["claim"]["terms"]


def test_every_claim_offers_all_its_variants_and_no_note() -> None:
    for claim in catalogue().values():
        shown = claims.preview(ClaimsInputs(claim=claim.id))["claim"]
        if not claim.not_applicable():
            assert shown["variants"] == variants(claim) and shown["note"] == ""
            assert [number["name"] for number in shown["numbers"]] == list(claim.falsifier.ranges)  # type: ignore[union-attr]
            check_variant(claim, shown["variants"][-1])


def test_a_claim_of_a_package_that_is_not_here_has_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(catalogue()["finite-mask"], requires=("no_such_package",))
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {absent.id: absent})
    shown = claims.preview(ClaimsInputs(claim=absent.id))["claim"]
    assert shown["note"] == "no_such_package is not installed here, so there is nothing to try."
    assert shown["variants"] == []


def test_the_server_tells_every_mistake(lab: Lab) -> None:
    for inputs, words in (
        (
            {"claim": "finite-mask", "variant": "x" * 80, "after": 0},
            "is not a variant of finite-mask; one of 'as stated', 'infinite masks', 'one finite, one infinite'",
        ),
        ({"claim": "<b>", "after": 0}, "claim='<b>' is not known; choose from the list"),
        (
            {"claim": "finite-mask", "after": -1},
            "from 0 to 100000; the default is None (Cases that the search has tried already)",
        ),
    ):
        wrong = lab.post("/api/claims/verdict", inputs)
        assert wrong.status == 422 and wrong.mistake.endswith(words)


# ---- where a claim can be seen, and a file of one's own


def test_every_scene_is_an_address_that_its_page_takes() -> None:
    assert set(SCENES) <= set(catalogue())
    for id, scene in SCENES.items():
        page = all_pages()[scene.page]
        given = {name: value for name, (value,) in parse_qs(scene.query, strict_parsing=bool(scene.query)).items()}
        numbers = {one.name for one in page.inputs.declared() if one.type is not str}
        page.inputs.of({name: float(x) if name in numbers else x for name, x in given.items()} | _whole(page, given))
        assert id in claims_about(scene.page)
    with pytest.raises(Exception, match="show='fly' must be one of"):
        all_pages()["explorer"].inputs.of({"show": "fly"})


def _whole(page: Any, given: dict[str, str]) -> dict[str, Any]:
    return {one.name: int(given[one.name]) for one in page.inputs.declared() if one.type is int and one.name in given}


def test_a_page_names_the_claims_about_it_and_they_name_it() -> None:
    shown = render("explorer", PACKAGE, "token", all_pages()["explorer"])
    assert 'href="/claims?claim=copy-possible"' in shown and "claims about this page" in shown
    assert "about this page" not in render("runs", PACKAGE, "token", all_pages()["runs"])
    scene = claims.preview(ClaimsInputs(claim="heads-discrete"))["claim"]["scene"]
    assert scene == {"page": "explorer", "query": "show=noise&heads=two", "words": "Scale a key under two heads"}
    assert claims.preview(ClaimsInputs(claim="finite-mask"))["claim"]["scene"] is None


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(claims.VARIABLE, str(OWN))


@pytest.mark.usefixtures("own")
def test_claims_of_ones_own_stand_beside_the_catalogue() -> None:
    shown = claims.preview(ClaimsInputs(claim="square-grows"))
    ids = [row["id"] for row in shown["ledger"] if row["topic"] == claims.OWN_TOPIC]
    assert {"binomial", "square-grows"} <= set(ids) and len(shown["ledger"]) == len(catalogue()) + len(ids)
    assert shown["claim"]["note"] == "", "its statement says where to look for cases"
    found = claims.verdict(ClaimsInputs(claim="square-grows"))
    assert found["verdict"]["word"] == "corrected", "after binomial, which it needs and which is in the file too"
    assert "?claim=binomial" in found["html"]


def test_without_a_file_there_are_none_and_a_request_cannot_name_one(lab: Lab) -> None:
    assert all(row["topic"] != claims.OWN_TOPIC for row in claims.preview(ClaimsInputs())["ledger"])
    assert "claims" not in {one.name for one in ClaimsInputs.declared()}
    assert lab.post("/api/claims/preview", {"claims": str(OWN)}).status == 422


def test_the_command_takes_a_file_of_claims_and_refuses_one_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(claims.VARIABLE, "")
    seen: list[str] = []

    class Served:
        def run(self, sockets: Any) -> None:
            seen.append(os.environ[claims.VARIABLE])

    monkeypatch.setattr("avow.lab.server.server", lambda *_: Served())
    monkeypatch.setattr("avow.theory.claims.claims_in", lambda path: {})
    assert CliRunner().invoke(app, ["lab", "--no-open", "--claims", str(OWN)]).exit_code == 0
    assert CliRunner().invoke(app, ["lab", "--no-open"]).exit_code == 0
    assert seen == [str(OWN), ""]
    monkeypatch.undo()
    (tmp_path / "own.py").write_text("1 / 0")
    done = CliRunner().invoke(app, ["lab", "--no-open", "--claims", str(tmp_path / "own.py")])
    assert done.exit_code == 2 and "raised while loading: ZeroDivisionError" in " ".join(done.output.split())


def test_a_picture_of_ones_own_that_fails_is_told_and_the_verdict_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(catalogue()["finite-mask"], picture=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {broken.id: broken})
    found = claims.verdict(ClaimsInputs(claim=broken.id))
    assert found["verdict"]["word"] == "refuted" and "the picture raised ZeroDivisionError" in found["html"]


# ---- a copy without a server


def quick() -> dict[str, Any]:
    return {id: catalogue()[id] for id in ("copy-possible", *QUICK)}


def test_a_copy_has_every_claim_with_all_that_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "catalogue", quick)
    found = claims.static()
    assert all_pages()["claims"].static is claims.static and found["first"] == "copy-possible"
    for row in found["ledger"]:
        claim = catalogue()[row["id"]]
        assert (row["plain"], row["recorded"], row["word"]) == (sentence(claim).short, claim.expected, claim.expected)
        assert "<math" in row["html"] and "Evidence" in row["judged"]
        assert row["says"].startswith("Judged when this copy was made, in ") and row["reason"]
    json.loads(json_bytes(found))


# ---- in a browser


@pytest.mark.browser
def test_the_filter_of_refuted_lists_them_at_once_and_by_keyboard(visit: Opener) -> None:
    first = visit("claims?verdict=refuted")
    first.page.wait_for_selector("#ledger li:visible")
    seen = first.page.locator("#ledger li:visible code").all_inner_texts()
    assert seen == [id for id, claim in catalogue().items() if claim.expected == "refuted"] and len(seen) >= 5
    assert first.page.inner_text("#count") == f"{len(seen)} of {len(catalogue())} claims"
    first.judged("refuted")
    assert first.page.inner_text("#name") == seen[0], "the first of the list is open"
    first.page.focus("#filters input[name=topic]:checked")
    first.page.keyboard.press("ArrowRight")
    first.page.wait_for_url("**topic=softmax*")
    softmax = [id for id in seen if catalogue()[id].topic == "softmax"]
    assert first.page.locator("#ledger li:visible code").all_inner_texts() == softmax and softmax[2] == "finite-mask"
    first.page.focus("#ledger li:visible a")
    for _ in range(2):
        first.page.keyboard.press("ArrowDown")
    first.page.keyboard.press("Enter")
    assert first.judged("refuted").startswith("Refuted again just now, in ")
    assert first.inputs == {"verdict": "refuted", "topic": "softmax", "claim": "finite-mask"}
    assert first.page.inner_text("#title") == catalogue()["finite-mask"].plain
    second = visit(first.page.url.rpartition("/")[2])
    second.judged("refuted")
    assert second.page.inner_text("#name") == "finite-mask"
    assert second.page.locator("#ledger li:visible").count() == len(softmax)
    first.page.go_back()
    first.page.wait_for_function("id => document.getElementById('name').textContent === id", arg=softmax[0])


@pytest.mark.browser
def test_the_record_is_there_before_the_proof_and_links_lead_to_scenes_and_claims(visit: Opener) -> None:
    found = visit("claims?claim=copy-separated")
    found.page.wait_for_selector("#recorded.proved")
    assert found.judged("proved").endswith(", as recorded.")
    found.page.click("#judged footer a[href='?claim=copy-gap']")
    found.page.wait_for_selector("#ledger a[href$=copy-gap][aria-current]")
    found.page.wait_for_selector("#seen .figure svg .line", state="attached")
    found.page.go_back()
    found.page.wait_for_function("() => document.getElementById('name').textContent === 'copy-separated'")
    found.page.go_forward()
    found.page.wait_for_function("() => document.getElementById('name').textContent === 'copy-gap'")
    found.page.click("#scene")
    found.page.wait_for_url("**/explorer")
    found.page.click(".about summary")
    found.page.click(".about a[href$=copy-gap]")
    found.page.wait_for_url("**/claims?claim=copy-gap")


@pytest.mark.browser
def test_the_search_is_followed_and_another_press_draws_again(visit: Opener) -> None:
    found = visit("claims?claim=relu-linear-a")
    found.judged("corrected")
    found.page.click("#attack")
    found.page.wait_for_selector("#caught:not([hidden])")
    assert found.page.inner_text("#caught") == "counterexample"
    assert found.inputs == {"claim": "relu-linear-a", "hunt": "true"}
    assert (
        found.page.locator("#own svg .mark.broken").is_visible() and found.page.locator("#map svg .line").is_visible()
    )
    first = found.page.locator("#numbers output").all_inner_texts()
    found.page.click("#attack")
    found.page.wait_for_url("**seed=1*")
    found.page.wait_for_selector("#caught:not([hidden])")
    assert found.page.locator("#numbers output").all_inner_texts() != first
    found.page.locator("#numbers button").nth(2).click()
    assert "along x," in found.page.inner_text("#map figcaption")
    found.page.get_by_label(AMENDED).check()
    found.page.wait_for_selector("#caught", state="hidden")
    found.page.click("#attack")
    found.page.wait_for_function("() => document.getElementById('caught').textContent === 'none found'")
    found.page.wait_for_selector("#caught:not([hidden])")
    assert "That proves nothing" in found.page.inner_text("#outcome")


NEARER = """() => {
  const nearest = document.querySelector("#map .mark text")?.textContent ?? "";
  (window.nearest ??= new Set()).add(nearest);
  return window.nearest.size > 3 && document.getElementById("progress").value > 100;
}"""


@pytest.mark.browser
def test_a_search_shows_the_nearest_miss_improving_and_can_be_stopped(visit: Opener) -> None:
    found = visit("claims?claim=ratio-error&cases=100000&hunt=true")
    found.page.wait_for_function(NEARER)
    found.page.focus("#stop")
    found.page.keyboard.press("Enter")
    assert found.page.inner_text("#outcome").startswith("Stopped after ")
    assert found.page.evaluate("document.activeElement.id") == "attack" and found.page.locator("#stop").is_hidden()
    tried = found.page.inner_text("#tried")
    found.page.wait_for_timeout(900)
    assert found.page.inner_text("#tried") == tried and not tried.startswith("100,000"), "nothing goes on"


def easy() -> list[str]:
    """What the quiz asks first."""
    found = re.search(r"EASY = (\[.*\]);", static_files()["claims_quiz.js"])
    assert found is not None
    return list(json.loads(found[1]))


def test_the_quiz_begins_with_sentences_without_formulas_and_every_answer_among_them() -> None:
    first = [catalogue()[id] for id in easy()]
    assert {claim.expected for claim in first} == {"proved", "refuted", "corrected"}
    for claim in first:
        assert re.fullmatch(r"[A-Za-z ,.:]+", claim.plain) and not re.search(r"\b[b-zB-Z]\b", claim.plain), claim.id


@pytest.mark.browser
def test_the_quiz_is_answered_by_keyboard_keeps_its_score_and_has_an_address(visit: Opener) -> None:
    found = visit("claims")
    found.judged("corrected")
    found.page.focus("#modes input:checked")
    found.page.keyboard.press("ArrowRight")
    found.page.wait_for_selector("#quiz:not([hidden])")
    found.page.wait_for_function("() => document.getElementById('question').textContent.startsWith('Statement 2 of')")
    assert found.page.locator("#ledger, #recorded, #verdict").evaluate_all(
        "all => all.every(one => !one.checkVisibility())"
    ), "nothing gives the answer away"
    asked = found.inputs["claim"]
    assert found.inputs["mode"] == "guess first" and asked == easy()[1], "the verdict on the first has just been read"
    answer = ["proved", "refuted", "corrected"].index(catalogue()[asked].expected) + 1
    found.page.keyboard.press(str(answer))
    assert found.page.inner_text("#score") == "1 of 1 right" and found.page.inner_text("#right").startswith("Right: ")
    assert found.page.evaluate("document.activeElement.id") == "next"
    found.page.keyboard.press(str(answer % 3 + 1))
    assert found.page.inner_text("#score") == "1 of 1 right", "a guess is made once"
    found.page.keyboard.press("Enter")
    found.page.wait_for_function("before => !location.search.includes(`claim=${before}`)", arg=asked)
    second = found.inputs["claim"]
    found.page.wait_for_function(
        "words => document.getElementById('asked').textContent === words", arg=catalogue()[second].plain
    )
    wrong = next(i for i, word in enumerate(("proved", "refuted", "corrected")) if word != catalogue()[second].expected)
    found.page.keyboard.press("Tab")
    if not found.page.evaluate("!!document.activeElement.closest('#guesses')"):
        found.page.keyboard.press("Tab")  # a formula that is too wide can be scrolled
    for _ in range(wrong):
        found.page.keyboard.press("Tab")
    found.page.keyboard.press("Space")
    assert found.page.inner_text("#score") == "1 of 2 right" and found.page.inner_text("#right").startswith("No: ")
    found.page.wait_for_function("() => !document.getElementById('reason').textContent.startsWith('The check runs')")
    found.page.reload()
    found.page.wait_for_selector("#reveal:not([hidden])")
    assert found.page.inner_text("#score") == "1 of 2 right", "the score is the tab's"
    other = visit(found.page.url.rpartition("/")[2])
    other.page.wait_for_selector("#quiz:not([hidden])")
    assert other.page.inner_text("#asked") == catalogue()[second].plain and other.page.locator("#reveal").is_hidden()
    found.page.click("#open")
    found.page.wait_for_selector("#chosen:visible")
    assert found.inputs == {"claim": second}


@pytest.mark.browser
def test_the_quiz_ends_with_what_was_guessed_wrongly(visit: Opener) -> None:
    found = visit("claims?mode=guess+first&topic=neighbours&claim=mpmath-iv-exp")
    found.page.wait_for_selector("#quiz:not([hidden])")
    found.page.get_by_role("button", name="True", exact=False).first.click()
    found.page.click("#next")
    found.page.wait_for_url("**claim=auto-lirpa-softmax*")
    found.page.wait_for_selector("#reveal", state="hidden")
    right = catalogue()["auto-lirpa-softmax"].expected
    found.page.click(f"#guesses [data-guess={right}]")
    found.page.click("#next")
    assert found.page.inner_text("#finished h2") == "You guessed 1 of 2 right."
    assert catalogue()["mpmath-iv-exp"].plain in found.page.inner_text("#finished ul")
    found.page.click("#restart")
    assert found.page.locator("#asking").is_visible() and found.page.inner_text("#score") == ""


@pytest.mark.browser
def test_a_topic_has_its_own_questions_whatever_verdict_was_filtered(visit: Opener) -> None:
    found = visit("claims?verdict=refuted")
    found.judged("refuted")
    found.page.check("#modes input[value='guess first']", force=True)
    found.page.wait_for_selector("#quiz:not([hidden])")
    shown = found.page.locator("[data-name=topic] label:has(input[value=neighbours]) small")
    topic = [one.id for one in catalogue().values() if one.topic == "neighbours"]
    assert shown.inner_text().strip() == str(len(topic)), "guesses are of all verdicts"
    found.page.check("[data-name=topic] input[value=neighbours]", force=True)
    found.page.wait_for_function("() => /^Statement [12] of 2/.test(document.getElementById('question').textContent)")
    assert found.inputs["claim"] in topic
    found.page.check("#modes input[value=read]", force=True)
    found.page.wait_for_function("() => document.querySelector('#ledger li:not([hidden]) [aria-current]')")


@pytest.mark.browser
def test_a_copy_opened_from_a_disk_shows_filters_and_asks(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "catalogue", quick)
    file = tmp_path / "claims.html"
    file.write_text(render("claims", PACKAGE, "", all_pages()["claims"], exported=True))
    context = browser.new_context(offline=True)
    page, complaints, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{file.as_uri()}?verdict=refuted")
    page.wait_for_selector("#ledger li:visible")
    assert page.locator("#ledger li:visible code").all_inner_texts() == ["relu-linear-b", "finite-mask"]
    page.click("#ledger a[href$=finite-mask]")
    assert page.inner_text("#title") == catalogue()["finite-mask"].plain and page.inner_text("#mark") == "refuted"
    assert page.inner_text("#says").startswith("Judged when this copy was made") and "<ol" in page.inner_html("#judged")
    page.goto(f"{file.as_uri()}?claim=relu-linear-b")
    page.wait_for_selector("#seen .figure svg .line", state="attached")
    page.click("#ledger a[href$=finite-mask]")
    assert page.locator("#attack").is_hidden() and "not in a copy" in page.inner_text("#note")
    page.check("#modes input[value='guess first']", force=True)
    page.wait_for_selector("#quiz:not([hidden])")
    page.keyboard.press("3")
    assert "of 1 right" in page.inner_text("#score") and page.inner_text("#reason")
    page.click("#next")
    assert page.locator("#reveal").is_hidden() and "mode=guess+first" in page.url
    page.go_back()
    page.wait_for_selector("#reveal:not([hidden])")
    assert complaints == [] and not [url for url in asked if not url.startswith(("file:", "data:"))]
    context.close()


@pytest.mark.browser
def test_claims_of_ones_own_have_a_filter_of_their_own(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(claims.VARIABLE, str(OWN))
    with running() as lab:
        found = Visit(browser, lab, "claims?topic=yours&claim=binomial")
        found.judged("proved")
        assert "binomial" in found.page.locator("#ledger li:visible code").all_inner_texts()
        assert found.page.locator("#filters label:has-text('yours')").is_visible()
        found.close()


@pytest.mark.browser
def test_where_the_package_is_absent_there_is_no_button(visit: Opener) -> None:
    found = visit("claims?claim=auto-lirpa-softmax")
    if not catalogue()["auto-lirpa-softmax"].not_applicable():
        pytest.skip("the package is installed here")
    found.judged("not applicable")
    assert "so there is nothing to try" in found.page.inner_text("#note")
    assert found.page.locator("#variants, #budget, #attack").evaluate_all("all => all.every(one => one.hidden)")
    found.page.click("#ledger a[href$=relu-linear-a]")
    found.judged("corrected")
    assert found.page.locator("#note").is_hidden() and found.page.locator("#attack").is_visible()


@pytest.mark.browser
def test_a_case_of_many_numbers_fits_a_phone(visit: Opener) -> None:
    found = visit("claims?claim=permutation&hunt=true&variant=positions", viewport={"width": 390, "height": 844})
    found.page.wait_for_selector("#caught:not([hidden])")
    within = "all => all.every(one => one.getBoundingClientRect().right <= innerWidth)"
    assert found.page.locator("#breaking, #outcome, #case, #budget, #numbers output").evaluate_all(within)


@pytest.mark.browser
def test_an_address_of_no_claim_is_told_so(browser: Any, lab: Lab) -> None:
    found = Visit(browser, lab, "claims?claim=copy-gaps")
    found.page.wait_for_selector("#trouble:not([hidden])")
    assert "claim='copy-gaps' is not known; did you mean copy-gap" in found.page.inner_text("#trouble")
    assert found.page.inner_text("#mark") == "no answer"
    found.page.click("#ledger a[href$='=copy-gap']")
    found.page.wait_for_selector("#recorded.proved")
    found.judged("proved")
    assert found.page.locator("#trouble").is_hidden()
    found.page.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_neither_the_quiz_nor_a_search_has_a_violation(visit: Opener, lab: Lab, scheme: str) -> None:
    found = visit("claims?mode=guess+first&claim=finite-mask", color_scheme=scheme)
    found.page.wait_for_selector("#quiz:not([hidden])")
    assert violations(found.page) == []
    found.page.click("#guesses [data-guess=proved]")
    found.page.wait_for_function("() => !document.getElementById('reason').textContent.startsWith('The check runs')")
    assert violations(found.page) == []
    found.page.goto(lab.address + "claims?claim=relu-linear-a&hunt=true")
    found.page.wait_for_selector("#caught:not([hidden])")
    found.page.wait_for_selector("#seen .figure svg")
    assert violations(found.page) == []
