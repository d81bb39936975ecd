"""The page of claims: verdicts are the ledger's, the search breaks what is broken, and says when it proves nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from avow.lab.pages import claims
from avow.lab.pages.claims import ClaimsInputs
from avow.theory.claims import catalogue
from avow.theory.claims.random_search import AMENDED, search, variants
from avow.theory.claims.running import judged_after_needs
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import Opener, Visit

# Claims that are quick to judge, of every verdict that there is.
QUICK = ("softmax-categorical", "relu-linear-a", "relu-linear-b", "finite-mask", "project-out", "momentum-ema")


# ---- the page


@pytest.mark.parametrize("id", QUICK)
def test_a_verdict_is_the_ledgers_own(id: str) -> None:
    claim = catalogue()[id]
    answer, finding = claims.verdict(ClaimsInputs(claim=id)), claim.judge()
    assert answer["verdict"]["word"] == finding.verdict == claim.expected
    for step in finding.evidence:
        assert step.kind in answer["html"]
    assert answer["attack"] is None


def test_a_verdict_is_computed_and_no_stored_text(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = catalogue()["softmax-categorical"]
    broken = dataclasses.replace(claim, subject=claim.sabotage["squares of the weights"])
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {claim.id: broken})
    for kept in (claims._judged, claims._finding):
        kept.cache_clear()
    found = claims.verdict(ClaimsInputs(claim=claim.id))
    for kept in (claims._judged, claims._finding):
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
    broken = claims.verdict(ClaimsInputs(claim="relu-linear-a", hunt=True))["attack"]
    assert broken["word"] == "counterexample" and broken["says"].startswith("Broken by case ")
    assert "rejects 3 of 3 variants broken on purpose" in broken["says"] and "<th>m</th>" in broken["html"]
    whole = claims.verdict(ClaimsInputs(claim="relu-linear-a", hunt=True, variant=AMENDED, cases=300))["attack"]
    assert whole["word"] == "none found" and whole["tone"] == "none"
    assert whole["says"].startswith("300 cases tried, and none breaks it. The nearest miss meets it with equality.")
    assert "That proves nothing" in whole["says"]


def test_a_search_that_runs_out_of_time_says_so() -> None:
    claim = catalogue()["lse-merge"]
    found = search(claim, cases=100_000, seconds=0.05)
    assert not found.broken and 1 <= found.tried < 100_000
    assert "The time was up: 100,000 were asked for." in claims._WORDS.say("search", found, 0.0, [])


def test_equality_that_breaks_a_statement_is_told_as_such() -> None:
    found = claims.verdict(ClaimsInputs(claim="heads-identical", hunt=True))["attack"]
    assert found["says"].startswith("Broken by case 1: its two sides are equal, and they must not be. Balls")
    assert not found["reads"], "the names of its numbers say what they are"


def test_numbers_whose_names_do_not_say_it_are_explained() -> None:
    found = claims.verdict(ClaimsInputs(claim="noise-isotropic", hunt=True))["attack"]
    assert found["reads"] == "Two keys with orthonormal means, turned by a part of a full turn."


def test_every_claim_offers_all_its_variants_and_no_note() -> None:
    for claim in catalogue().values():
        shown = claims.preview(ClaimsInputs(claim=claim.id))["claim"]
        if not claim.not_applicable():
            assert shown["variants"] == variants(claim) and shown["note"] == ""


def test_a_claim_of_a_package_that_is_not_here_has_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(catalogue()["finite-mask"], requires=("no_such_package",))
    monkeypatch.setattr(claims, "catalogue", lambda: catalogue() | {absent.id: absent})
    shown = claims.preview(ClaimsInputs(claim=absent.id))["claim"]
    assert shown["note"] == "no_such_package is not installed here, so there is nothing to try."
    assert shown["variants"] == []


def test_the_page_knows_every_claim_topic_and_verdict() -> None:
    topics = next(one.rule.choices for one in ClaimsInputs.declared() if one.name == "topic")
    assert set(topics) == {"every", *(claim.topic for claim in catalogue().values())}
    shown = claims.preview(ClaimsInputs())
    assert [row["id"] for row in shown["ledger"]] == list(catalogue())
    assert "<math" in shown["claim"]["html"] and "What is true instead" in shown["claim"]["html"]
    assert all(len(id) <= 60 for id in catalogue())
    astray = claims.preview(ClaimsInputs(claim="copy-gaps"))
    assert str(astray["trouble"]).startswith("claim='copy-gaps' is not known; did you mean copy-gap")
    assert astray["ledger"] == shown["ledger"], "there is a list to choose from"


def test_the_server_keeps_a_verdict_and_never_a_mistake(lab: Lab) -> None:
    answers = [lab.post("/api/claims/verdict", {"claim": "finite-mask"}) for _ in range(2)]
    assert answers[0].status == 200 and answers[0].body == answers[1].body, "seconds and all: it was judged once"
    for _ in range(2):
        wrong = lab.post("/api/claims/verdict", {"claim": "finite-mask", "variant": "x" * 80, "hunt": True})
        assert wrong.status == 422 and wrong.mistake.endswith(
            "is not a variant of finite-mask; one of 'as stated', 'infinite masks', 'one finite, one infinite'"
        )
        wrong = lab.post("/api/claims/verdict", {"claim": "<b>", "hunt": True})
        assert wrong.status == 422 and wrong.mistake == "claim='<b>' is not known; choose from the list"
        wrong = lab.post("/api/claims/verdict", {"claim": "relu-linear-a", "variant": "no", "hunt": True})
        assert wrong.status == 422 and wrong.mistake.startswith(
            "variant='no' is not a variant of relu-linear-a; one of"
        )


# ---- in a browser


@pytest.mark.browser
def test_filters_work_by_keyboard_and_come_back_from_the_address(visit: Opener) -> None:
    first = visit("claims")
    assert first.judged("corrected") == "False as stated; what is true instead is proved."
    first.page.wait_for_selector("#judged .figure svg .line", state="attached")
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
def test_a_case_of_many_numbers_scrolls_by_itself_on_a_phone(visit: Opener) -> None:
    found = visit("claims?claim=permutation&hunt=true&variant=positions", viewport={"width": 390, "height": 844})
    found.page.wait_for_selector("#case table")
    within = "all => all.every(one => one.getBoundingClientRect().right <= innerWidth)"
    assert found.page.locator("#breaking, #outcome, #case, #budget").evaluate_all(within)
    assert not found.page.locator("#case table").evaluate_all(within), "eleven numbers are wider than a phone"


@pytest.mark.browser
def test_an_address_of_no_claim_is_told_so(browser: Any, lab: Lab) -> None:
    found = Visit(browser, lab, "claims?claim=copy-gaps")
    found.page.wait_for_selector("#trouble:not([hidden])")
    assert "claim='copy-gaps' is not known; did you mean copy-gap" in found.page.inner_text("#trouble")
    assert found.page.inner_text("#mark") == "no answer"
    found.page.click("#ledger a[href$='=copy-gap']")
    found.page.wait_for_selector("#ledger a[aria-current] .badge.proved")
    assert found.page.locator("#trouble").is_hidden()
    found.page.close()
