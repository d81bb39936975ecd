"""The page of claims: verdicts are the ledger's, the search breaks what is broken, and says when it proves nothing."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, get_args

import pytest
from flint import arb

from avow.claims import catalogue
from avow.claims.hunting import AMENDED, STATED, Hunt, balled, hunted, variants
from avow.claims.hunts import HUNTS
from avow.claims.running import judged_after_needs
from avow.errors import ParameterError
from avow.lab.pages import claims
from avow.lab.pages.claims import Asked
from tests.lab import Lab
from tests.lab_visits import Opener, Visit

# Claims that are quick to judge, of every verdict that there is.
QUICK = ("softmax-categorical", "relu-linear-a", "relu-linear-b", "finite-mask", "project-out", "momentum-ema")
# Variants that are wrong in saying too little, or right to begin with: no case can break them, and the ledger's check
# rejects them all the same.
UNBREAKABLE = {
    ("softmax-perturbation", "true, but not the least"),
    ("relu-linear-a", "a network that is right to begin with"),
    ("momentum-ema", "a conversion that is right to begin with"),
    ("relu-linear-b", "the two units that do it"),
}


# ---- the search


@pytest.mark.parametrize("id", HUNTS)
def test_the_search_breaks_what_is_false_and_nothing_that_is_proved(id: str) -> None:
    claim, hunt = catalogue()[id], HUNTS[id]
    for variant in variants(claim):
        true = variant == (AMENDED if claim.amended else STATED) and claim.expected in ("proved", "corrected")
        found = hunted(claim, hunt, variant, cases=400 if true else 4000)
        assert found.broken == (not true and (id, variant) not in UNBREAKABLE), f"{variant}: {found}"
        assert found.tried == found.budget or found.broken


def test_a_case_is_the_same_for_the_same_seed_and_lies_in_its_ranges() -> None:
    claim, hunt = catalogue()["rounding-gamma"], HUNTS["rounding-gamma"]
    one, same, other = (hunted(claim, hunt, cases=200, seed=seed) for seed in (3, 3, 4))
    assert one.case == same.case and one.excess == same.excess and one.case != other.case
    for name, (low, high) in hunt.ranges.items():
        assert Fraction(str(low)) <= one.case[name] <= Fraction(str(high))


def test_more_cases_come_nearer() -> None:
    claim, hunt = catalogue()["softmax-perturbation"], HUNTS["softmax-perturbation"]
    few, many = (hunted(claim, hunt, cases=cases) for cases in (50, 3000))
    assert few.excess < many.excess < 0


def test_what_was_found_breaks_it_in_fractions_too() -> None:
    claim = catalogue()["relu-linear-a"]
    found = hunted(claim, HUNTS[claim.id])
    m, b, x = found.case.values()
    assert claim.subject.stated.at(m, b, x) != m * x + b and all(isinstance(part, Fraction) for part in (m, b, x))


def test_a_search_that_runs_out_of_time_says_so() -> None:
    claim = catalogue()["lse-merge"]
    found = hunted(claim, HUNTS[claim.id], cases=100_000, seconds=0.05)
    assert not found.broken and 1 <= found.tried < 100_000
    assert "The time was up: 100,000 were asked for." in claims._told(found)[1]


def test_an_equality_that_balls_cannot_tell_from_zero_is_no_counterexample() -> None:
    always = Hunt({"x": (0, 1)}, lambda subject: lambda case: abs(case[0].sqrt() ** 2 - case[0]))
    assert not hunted(catalogue()["lse-merge"], always, cases=100).broken
    never = Hunt({"x": (0, 1)}, lambda subject: lambda case: arb("nan"))
    assert hunted(catalogue()["lse-merge"], never, cases=20).excess == -float("inf")


def test_a_search_refuses_what_it_does_not_know() -> None:
    claim = catalogue()["lse-merge"]
    with pytest.raises(ParameterError, match=r"^variant='upside down' is none of lse-merge; one of 'as stated', "):
        hunted(claim, HUNTS[claim.id], "upside down")
    with pytest.raises(ParameterError, match=r"^cases=0 must lie between 1 and 100,000; try 2000$"):
        hunted(claim, HUNTS[claim.id], cases=0)
    with pytest.raises(TypeError, match="nothing that balls are known for here"):
        import sympy

        balled(sympy.gamma, 1)


# ---- the page


@pytest.mark.parametrize("id", QUICK)
def test_a_verdict_is_the_ledgers_own(id: str) -> None:
    claim = catalogue()[id]
    answer, finding = claims.verdict(Asked(claim=id)), claim.judge()
    assert answer["verdict"]["word"] == finding.verdict == claim.expected
    for step in finding.evidence:
        assert step.kind in answer["html"]
    assert answer["attack"] is None


def test_a_verdict_is_computed_and_no_stored_text(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = catalogue()["softmax-categorical"]
    broken = dataclasses.replace(claim, subject=claim.sabotage["squares of the weights"])
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {claim.id: broken})
    for kept in (claims._judged, claims._found):
        kept.cache_clear()
    found = claims.verdict(Asked(claim=claim.id))
    for kept in (claims._judged, claims._found):
        kept.cache_clear()
    assert found["verdict"]["word"] == "no verdict" and "It is recorded as proved." in found["verdict"]["says"]


def test_a_claim_whose_need_fails_gets_no_verdict() -> None:
    claim = catalogue()["copy-gap"]
    assert claim.needs == ("softmax-categorical",)

    def judge(one: Any) -> Any:
        assert one.id != "copy-gap", "it is never judged"
        return one.judge_sabotage("squares of the weights")

    found = judged_after_needs(claim, judge)
    assert found.verdict == "no verdict" and "it needs the claim softmax-categorical" in found.trouble


def test_the_attack_is_told_in_words_with_its_case() -> None:
    broken = claims.verdict(Asked(claim="relu-linear-a", hunt=True))["attack"]
    assert broken["word"] == "counterexample" and broken["says"].startswith("Broken by case ")
    assert "rejects 3 of 3 variants broken on purpose" in broken["says"] and "<th>m</th>" in broken["html"]
    whole = claims.verdict(Asked(claim="relu-linear-a", hunt=True, variant=AMENDED, cases=300))["attack"]
    assert whole["word"] == "none found" and whole["tone"] == "none"
    assert whole["says"].startswith("300 cases tried, and none breaks it. The nearest miss meets it with equality.")
    assert "That proves nothing" in whole["says"]


def test_where_there_is_nothing_to_draw_the_check_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = claims.preview(Asked(claim="svd-energy"))["claim"]
    assert shown["variants"] == [] and shown["broken"] == list(catalogue()["svd-energy"].sabotage)
    assert shown["note"] == (
        "It is judged as a whole, and there are no cases to draw. Attack its check instead: "
        "give it 2 variants broken on purpose, and it must reject each."
    )
    assert claims.preview(Asked(claim="finite-mask"))["claim"]["note"].startswith(
        "It is broken already: its evidence has"
    )
    assert claims.preview(Asked(claim="l2-only-sgd"))["claim"]["note"].endswith("give it a broken one to reject.")
    assert claims.preview(Asked(claim="relu-linear-a"))["claim"]["note"] == ""
    found = claims.verdict(Asked(claim="finite-mask", hunt=True))["attack"]
    assert (found["word"], found["tone"]) == ("all rejected", "proved") and "rejects 2 of 2" in found["says"]
    assert found["html"].count("rejected") == 2 and "infinite masks" in found["html"]
    monkeypatch.setattr(claims, "_sabotages", lambda id: {"a check <b>": False, "another": True})
    blind = claims.verdict(Asked(claim="finite-mask", hunt=True))["attack"]
    assert (blind["word"], blind["tone"]) == ("accepted", "refuted") and "proves nothing" in blind["says"]
    assert "a check &lt;b&gt;" in blind["html"]


def test_a_claim_of_a_package_that_is_not_here_has_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(catalogue()["finite-mask"], requires=("no_such_package",))
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {absent.id: absent})
    shown = claims.preview(Asked(claim=absent.id))["claim"]
    assert shown["note"] == "no_such_package is not installed here, so there is nothing to try."
    assert shown["broken"] == []


def test_the_page_knows_every_claim_topic_and_verdict() -> None:
    topics = get_args(Asked.model_fields["topic"].annotation)
    assert set(topics) == {"every", *(claim.topic for claim in catalogue().values())}
    shown = claims.preview(Asked())
    assert [row["id"] for row in shown["ledger"]] == list(catalogue()) and set(HUNTS) <= set(catalogue())
    assert "<math" in shown["claim"]["html"] and "What is true instead" in shown["claim"]["html"]
    assert all(len(id) <= 60 for id in catalogue())
    with pytest.raises(ParameterError, match=r"^claim='copy-gaps' is not known; did you mean copy-gap"):
        claims.preview(Asked(claim="copy-gaps"))


def test_the_server_keeps_a_verdict_and_never_a_mistake(lab: Lab) -> None:
    answers = [lab.post("/api/claims/verdict", {"claim": "finite-mask"}) for _ in range(2)]
    assert answers[0].status == 200 and answers[0].body == answers[1].body, "seconds and all: it was judged once"
    for _ in range(2):
        wrong = lab.post("/api/claims/verdict", {"claim": "finite-mask", "variant": "x" * 80, "hunt": True})
        assert wrong.status == 200, "where nothing can be drawn, no variant is asked for"
        wrong = lab.post("/api/claims/verdict", {"claim": "<b>", "hunt": True})
        assert wrong.status == 422 and wrong.mistake == "claim='<b>' is not known; choose from the list"
        wrong = lab.post("/api/claims/verdict", {"claim": "relu-linear-a", "variant": "no", "hunt": True})
        assert wrong.status == 422 and wrong.mistake.startswith("variant='no' is none of relu-linear-a; one of")


# ---- in a browser


@pytest.mark.browser
def test_filters_work_by_keyboard_and_come_back_from_the_address(visit: Opener) -> None:
    first = visit("claims")
    assert first.judged("corrected") == "False as stated; what is true instead is proved."
    first.page.wait_for_selector("#judged .figure svg .scatterlayer path", state="attached")
    first.page.focus("#filters input[name=topic]:checked")
    first.page.keyboard.press("ArrowRight")
    first.page.wait_for_url("**topic=softmax*")
    seen = first.page.locator("#ledger li:visible code").all_inner_texts()
    assert seen == [id for id, claim in catalogue().items() if claim.topic == "softmax"]
    first.page.focus("#ledger li:visible a")
    first.page.keyboard.press("ArrowDown")
    first.page.keyboard.press("ArrowUp")
    first.page.keyboard.press("Enter")
    first.judged("proved")
    assert first.inputs == {"topic": "softmax", "claim": "softmax-categorical"}
    second = visit(first.page.url.rpartition("/")[2])
    second.judged("proved")
    assert second.page.inner_text("#name") == "softmax-categorical"
    assert second.page.locator("#ledger li:visible").count() == len(seen)
    first.page.go_back()
    first.judged("corrected")


@pytest.mark.browser
def test_the_button_searches_and_another_press_draws_anew(visit: Opener) -> None:
    found = visit("claims")
    found.judged("corrected")
    found.page.click("#attack")
    found.page.wait_for_selector("#caught:not([hidden])")
    assert found.page.inner_text("#caught") == "counterexample" and found.inputs == {"hunt": "true"}
    first = found.page.inner_text("#case")
    found.page.click("#attack")
    found.page.wait_for_function("before => document.getElementById('case').innerText !== before", arg=first)
    assert found.inputs == {"hunt": "true", "seed": "1"}
    found.page.get_by_label(AMENDED).check()
    found.page.wait_for_selector("#caught", state="hidden")
    found.page.click("#attack")
    found.page.wait_for_function("() => document.getElementById('caught').textContent === 'none found'")
    assert "That proves nothing" in found.page.inner_text("#outcome")


@pytest.mark.browser
def test_where_there_are_no_cases_the_button_gives_the_check_broken_variants(visit: Opener) -> None:
    found = visit("claims?claim=finite-mask")
    found.judged("refuted")
    assert found.page.locator("#variants, #budget").evaluate_all("all => all.every(one => one.hidden)")
    assert found.page.locator("#broken li").all_inner_texts() == list(catalogue()["finite-mask"].sabotage)
    found.page.get_by_role("button", name="Give them to the check").click()
    found.page.wait_for_selector("#case .broken .badge.proved")
    assert found.page.inner_text("#caught") == "all rejected" and found.page.locator("#attack").is_hidden()
    found.page.click("#ledger a[href$=relu-linear-a]")
    found.judged("corrected")
    assert found.page.locator("#note, #broken").evaluate_all("all => all.every(one => one.hidden)")
    assert found.page.inner_text("#attack") == "Search for a counterexample"


@pytest.mark.browser
def test_an_address_of_no_claim_is_told_so(browser: Any, lab: Lab) -> None:
    found = Visit(browser, lab, "claims?claim=copy-gaps")
    found.page.wait_for_selector("#trouble:not([hidden])")
    assert "claim = 'copy-gaps' is not known; did you mean copy-gap" in found.page.inner_text("#trouble")
    found.page.close()
