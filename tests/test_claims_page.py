"""The page of claims: everything about each claim, nothing from elsewhere, and no word mistaken for markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import sympy

from avow.report.claims import claims_page, headline
from avow.report.mathml import display, formula
from avow.report.page import DOCUMENTATION
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Claim, Finding, claim
from avow.theory.claims.evidence import Evidence, as_json
from tests.helpers import sample_claims
from tests.test_report import outside


def judged(claims: Sequence[Claim]) -> list[Finding]:
    """Claims judged in this very process, with their broken variants and their pictures."""
    found = []
    for one in claims:
        sabotages = {name: one.judge_sabotage(name).rejected for name in one.sabotage}
        picture = as_json(one.picture().plain()) if one.picture else None
        found.append(replace(one.judge(), sabotages=sabotages, picture=picture))
    return found


def sample() -> list[Finding]:
    return judged([one for one in vars(sample_claims).values() if isinstance(one, Claim)])


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return sample()


@pytest.fixture(scope="module")
def page(findings: list[Finding]) -> str:
    return claims_page(findings, "avow claims run <x>")


def article(page: str, id: str) -> str:
    found = re.search(rf'<article id="{id}".*?</article>', page, re.DOTALL)
    assert found is not None
    return found[0]


def without_scripts(page: str) -> str:
    return re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_needs_nothing_else(page: str) -> None:
    own = without_scripts(page)
    assert outside(own) == []
    addresses = set(re.findall(r"https?://[^\"' ]*", own)) - {"http://www.w3.org/1998/Math/MathML"}
    assert addresses == {DOCUMENTATION}
    assert "default-src 'none'" in own


def test_every_claim_stands_in_the_overview_and_has_an_article_its_link_leads_to(
    page: str, findings: list[Finding]
) -> None:
    overview = page[: page.index("<section>")]
    for finding in findings:
        assert f'<a href="#{finding.claim.id}">' in overview
        assert finding.verdict in article(page, finding.claim.id)


def test_an_article_holds_all_there_is_to_say(page: str) -> None:
    shown = article(page, "square-grows")
    for words in (
        '<span class="badge corrected">corrected</span>',
        "A number&#39;s square is never below it.",
        "What is true instead",
        "It is not where <math",
        "counterexample</span> half of a half",
        "x: 1/2",
        "Of what is true instead",
        "broken on purpose: a number above 1 → rejected",
        "<td>0.25</td>",
        'Rests on <a href="#binomial">',
    ):
        assert words in shown, words
    proved = article(page, "binomial")
    assert "x &lt; y means less" in proved and "Used by" not in proved
    assert 'id="picture-binomial"' in proved and proved.count("<math") == 2


def test_the_figures_are_those_of_the_charts(page: str) -> None:
    figures = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert figures is not None
    (figure,) = json.loads(figures[1]).values()
    assert [trace["name"] for trace in figure["traces"]] == ["x²", "x < 2"]


def test_a_page_without_figures_carries_no_chart_script(findings: list[Finding]) -> None:
    page = claims_page([replace(finding, picture=None) for finding in findings], "")
    assert "svgText" not in page and len(page) < 100_000


def test_the_headline_counts_and_says_that_all_is_well(findings: list[Finding]) -> None:
    assert headline(findings) == (
        "4 claims: 1 proved, 1 corrected, 1 refuted and 1 supported."
        " All as recorded, and all 5 broken variants rejected."
    )


def test_the_headline_names_what_is_not_as_recorded(findings: list[Finding]) -> None:
    proved, *rest = findings
    broken = replace(proved, verdict="no verdict", trouble="<b>it broke</b>", sabotages={"no mixed term": False})
    said = headline([broken, *rest])
    assert "Not as recorded: binomial." in said
    assert "Broken on purpose, yet accepted: binomial (no mixed term)." in said
    shown = article(claims_page([broken, *rest], ""), "binomial")
    assert "recorded as proved" in shown and "accepted</b>" in shown and "&lt;b&gt;it broke" in shown


def test_no_word_of_a_claim_becomes_markup() -> None:
    evil = "<script>alert(1)</script>"

    @claim(
        f"id-{evil}",
        topic=evil,
        expected="corrected",
        statement=rf"\text{{{evil}}} x",
        plain=evil,
        assumptions=(evil,),
        amended=rf"\badcommand{{{evil}}}",
        amended_plain=evil,
        needs=(evil,),
        sabotage={evil: None},
    )
    def spiteful(_: object) -> list[object]:
        raise ValueError(evil)

    assert evil not in without_scripts(claims_page(judged([spiteful]), evil))


@pytest.mark.parametrize(
    ("latex", "part"),
    [
        (r"a < b", "<mo>&lt;</mo>"),
        (r"p \iff q", "<mo>⟺</mo>"),
        (r"2\ln n", '<mn>2</mn><mspace width="0.17em" /><mi>ln</mi><mspace width="0.17em" /><mi>n</mi>'),
        (r"\operatorname{softmax}(x)", '<mi>softmax</mi><mo stretchy="false">(</mo>'),
        (r"\arg\max_j s_j", '<mi>arg</mi><mspace width="0.17em" /><msub><mi>max</mi><mi>j</mi></msub><mspace'),
        (
            r"\argmax_j s_j",
            '<msub><mi movablelimits="true">arg\u2009max</mi><mi>j</mi></msub><mspace width="0.17em" />',
        ),
        (r"A\mathbf{1}", "<mn>𝟏</mn>"),
        (r"x \to \infty", "<mi>∞</mi>"),
        (r"\text{if } a", "<mtext>if\xa0</mtext>"),
    ],
)
def test_formulas_become_mathml(latex: str, part: str) -> None:
    assert part in formula(latex) and formula(latex).startswith("<math")


@pytest.mark.parametrize("latex", [r"\badcommand{x}", r"\left( x", "{"])
def test_a_formula_that_cannot_be_read_is_shown_as_it_was_written(latex: str) -> None:
    assert formula(latex) == f'<code class="latex">{latex}</code>'


def test_a_display_breaks_outside_brackets_only_and_its_words_are_words() -> None:
    shown = display(r"f(a, b)^2 = c,\ d \text{ for <all> } x")
    assert shown.count("<math") == 3 and "</math> for &lt;all&gt; <math" in shown
    first = shown[: shown.index("</math>")]
    assert "<mi>b</mi>" in first and "<mi>d</mi>" not in first


def test_a_display_breaks_before_arrows_and_within_text_style_but_not_at_thin_spaces() -> None:
    assert display(r"2\ln n\,x\!y \Rightarrow b").count("<math") == 2
    assert display(r"\textstyle a; b").count("<math") == 2 and display(r"\tfrac{a;}{b}").count("<math") == 1


def test_sides_that_are_one_are_not_called_an_equation(page: str) -> None:
    def check(_: object) -> Iterator[Evidence]:
        yield toolbox.identity(sympy.Symbol("x"), sympy.Symbol("x"), "the same")

    same = judged([Claim("same", topic="t", statement="x", plain="x", expected="supported", check=check)])
    assert "both sides are <math" in claims_page(same, "") and "both sides are" not in page


def undrawn(claims: Sequence[Claim]) -> list[str]:
    """Claims with a formula that the page could only show as source."""
    return [one.id for one in claims if "<code" in display(one.statement) + display(one.amended or "x")]


def test_every_formula_of_the_catalogue_is_drawn() -> None:
    from avow.theory.claims import catalogue

    assert undrawn(list(catalogue().values())) == []


def test_a_formula_that_is_not_drawn_would_be_noticed() -> None:
    assert undrawn([replace(sample_claims.cosine_small, statement=r"\nonsense x")]) == ["cosine-small"]
