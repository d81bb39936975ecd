"""What notebooks show of certificates, plans, audits and profiles: small HTML that needs nothing else."""

from __future__ import annotations

import dataclasses
import math
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import avow
from avow.core import notebook
from avow.core.certificate import LazyCertificate
from avow.integrations.transformers import Profile, profile
from avow.integrations.transformers.head_kinds import KINDS
from tests.helpers.model_folders import long_model
from tests.helpers.tiny_models import WORDS


class Reader(HTMLParser):
    """The text of some HTML; its tags must be closed in order, and none of them may fetch or run anything."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == [], "tags are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "b", "table", "tbody", "tr", "td", "th"}, tag
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(thing: Any) -> str:
    """The words of what a notebook shows, which is well formed, small, and fetches nothing."""
    html = thing._repr_html_()
    reader = Reader(html)
    assert reader.attributes <= {"style"} and "url(" not in html and len(html) < 20_000
    assert "color:#" not in html.replace("border-left", ""), "colours are the notebook's own, light or dark"
    return " | ".join(reader.texts)


def heads(n: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 1, 2, n, 16).unbind()
    return q, k, v


@pytest.fixture(scope="module")
def made() -> Profile:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AVOW_CALIBRATION", "off")
        return profile(long_model(), torch.randint(3, WORDS, (1, 90)), name="<tiny>")


@pytest.mark.parametrize("html", ["<b>", "<div><b></div></b>", "<script>1</script>"])
def test_the_reader_refuses_html_that_is_not_ours(html: str) -> None:
    with pytest.raises(AssertionError):
        Reader(html)


def test_a_certificate_has_its_bound_its_unit_and_its_kind() -> None:
    certificate = avow.attend(*heads()).certificate
    words = shown(certificate)
    assert f"{certificate.bound:.2e} of softmax attention, relative to the longest value" in words
    assert "deterministic, rounding included" in words and "exact" in words
    assert str(certificate).splitlines()[0] in words, "it is what print says"


def test_a_certificate_without_a_promise_says_why() -> None:
    certificate = avow.attend(*heads()).certificate
    rows = torch.full_like(certificate.rows, math.inf)
    none = dataclasses.replace(certificate, kind="none", bound=math.inf, rows=rows, reason="keys are too long")
    words = shown(none)
    assert words.startswith("no promise: keys are too long") and "softmax" not in words
    assert none._repr_html_().partition(">")[0] != certificate._repr_html_().partition(">")[0], "the edge differs"


def test_names_are_escaped() -> None:
    certificate = avow.attend(*heads()).certificate
    strange = dataclasses.replace(certificate, method="<img src=x>", reason="a & b", parameters={"<i>": "</td>"})
    words = shown(strange)
    assert "<img src=x> (<i>=</td>)" in words and "a & b" in words
    assert "<img" not in strange._repr_html_()
    assert "<b>a</b>" not in notebook.table(["<b>a</b>"], [["<b>a</b>"]]) + notebook.facts([("<b>a</b>", "<b>a</b>")])


def test_a_certificate_that_is_computed_at_the_first_look_is_shown() -> None:
    now = avow.attend(*heads(), tol=1.0).certificate
    looks = []

    def later() -> dict[str, Any]:
        looks.append(1)
        return vars(now)

    assert shown(LazyCertificate.of(later)) == shown(now) and looks


def test_a_plan_says_what_would_run_and_why_the_others_do_not() -> None:
    plan = avow.plan(*heads(), tol=1e-2)
    words = shown(plan)
    assert plan.chosen is not None
    assert words.startswith(f"tolerance 0.01: {plan.chosen.method.label} would run")
    assert "bounds are relative to the longest value" in words and "deterministic" in words
    for candidate in plan.ranked:
        assert candidate.method.label in words and candidate.lost in words
    assert plan._repr_html_().count("font-weight:700") == 1, "the chosen row is marked, and no other"
    without = dataclasses.replace(plan, ranked=tuple(dataclasses.replace(x, lost="no") for x in plan.ranked))
    assert "nothing here is expected to meet it" in shown(without) and "font-weight:700" not in without._repr_html_()


def test_a_decode_plan_says_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    plan = avow.plan_decode(4096, 8, 2)
    words = shown(plan)
    assert words.startswith(plan.verdict[0]) and "a decoding step over 4,096 tokens" in words
    assert plan.table[0][1] in words and plan.why_not_sparse in words


def test_an_audit_has_its_errors_and_the_certificate_that_they_earn() -> None:
    q, k, v = heads()
    audit = avow.audit(avow.attend(q, k, v).out, q, k, v)
    words = shown(audit)
    assert words.startswith(f"all {audit.errors.numel()} rows recomputed in float64")
    assert f"{float(audit.errors.amax()):.2e}" in words and "largest error, of the answer" in words
    assert "sampled, rounding included" in words and f"{audit.certificate.bound:.2e} of softmax" in words


def test_a_profile_has_its_headline_and_the_rule_of_every_kind(made: Profile) -> None:
    words = shown(made)
    assert words.startswith(made.headline) and "<tiny>" in words and "<tiny>" not in made._repr_html_()
    assert all(kind in words and rule in words for kind, rule in KINDS.items())
    assert "relative to the longest value" in words and "interrupted" not in words
    assert sum(made.kinds.values()) == len(made.heads) == 8
    stopped = dataclasses.replace(made, unmeasured=("model.layers.2.self_attn",))
    assert "2 of 3 layers" in shown(stopped) and "not measured, and exact in the plan: model.layers.2" in shown(stopped)
    assert repr(made) == f"<Profile of {made.headline}>" and "wide" in str(made)
