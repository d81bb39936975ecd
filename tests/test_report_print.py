"""Reports on paper: white whatever the screen was, whole, and as wide as the sheet; then the screen as it was."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

import avow
from avow.report.claims import claims_page
from avow.report.compare import page
from avow.report.knowledge import ModelAnswers, evaluation_page
from avow.report.page import DOCUMENTATION, asset, document, render
from avow.report.profile import profile_page
from tests.test_browser import Visit, browser  # noqa: F401  # a fixture
from tests.test_claims_page import sample as findings
from tests.test_knowledge_page import page_of, sample  # noqa: F401  # a fixture
from tests.test_profile_page import made  # noqa: F401  # a fixture
from tests.test_report import comparison  # noqa: F401  # a fixture

# The text of A4 between the margins that the stylesheet asks for, in CSS pixels.
SHEET = 673


@pytest.fixture
def reports(comparison: Any, made: Any, sample: Any) -> dict[str, str]:  # noqa: F811
    """The report of every command that writes one."""
    return {
        "compare": page(comparison, "avow compare"),
        "profile": profile_page(made, "avow profile", "one machine"),
        "claims": claims_page(findings(), "avow claims run"),
        "knowledge": page_of(sample),
        "evaluation": evaluation_page(
            ModelAnswers(Path("run/model"), "dev", sample.rows[1].middle[1], sample.majority), "avow train evaluate"
        ),
    }


def test_all_reports_have_one_template_and_one_stylesheet(reports: dict[str, str]) -> None:
    for name, html in reports.items():
        style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
        assert (
            style is not None and style[1].startswith(asset("style.css")) and style[1].endswith(asset("paper.css"))
        ), name
        assert html.count("<style>") == 1 and asset("paper.js") in html and asset("draw.js") in html, name


# What a reader downloads, sends or keeps.
LARGEST = 600_000


def test_every_report_is_small(reports: dict[str, str]) -> None:
    sizes = {name: len(html.encode()) for name, html in reports.items()}
    assert max(sizes.values()) <= LARGEST, sizes
    assert len(asset("chart.js").encode()) < 40_000, "figures cost a page little more than their numbers"


def test_numbers_of_figures_are_written_with_few_digits() -> None:
    figure = {"title": "", "traces": [{"x": [1 / 3, 2e-9 / 7], "y": [None, 5]}]}
    written = render("page.html", {"a": figure}, title="", body="", style="")
    assert '"traces":[{"x":[0.333333,2.85714e-10],"y":[null,5]}]' in written


def test_every_report_says_when_it_was_made_by_which_version_and_where_the_documents_are(
    reports: dict[str, str],
) -> None:
    for name, html in reports.items():
        above = html[html.index("<body>") : html.index("<h1>")]
        assert f"{datetime.date.today().isoformat()} · avow {avow.__version__} · " in above, name
        assert f'<a href="{DOCUMENTATION}">documentation</a>' in above, name


def test_every_report_begins_with_the_figure_of_its_headline(reports: dict[str, str]) -> None:
    for name, first in {"compare": "frontier-0", "profile": "reading", "knowledge": "accuracy"}.items():
        body = reports[name][reports[name].index("<h1>") :]
        figures = re.findall(r'class="figure[^"]*" id="([^"]*)"', body)
        assert figures[0] == first and "<table" not in body[: body.index(f'id="{first}"')], name


def own_colours(html: str) -> list[str]:
    """Colours that a page names beyond those of the one stylesheet and of paper."""
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    own = style[1].removeprefix(asset("style.css")).removesuffix(asset("paper.css"))
    return re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[^{}]*})|rgba?\([^)]*\)", own)


def test_all_reports_take_their_colours_from_the_one_stylesheet(reports: dict[str, str]) -> None:
    assert [found for html in reports.values() for found in own_colours(html)] == []
    assert own_colours(document("", "", style="#accuracy { color: #1a7f4b; }")) == ["#1a7f4b"]


def printing(visit: Visit) -> None:
    """Everything that a browser does to a page before it prints it."""
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.page.set_viewport_size({"width": SHEET, "height": 1000})
    visit.page.emulate_media(media="print")


def cut_off(visit: Visit) -> int:
    """How many tables and formulas are wider than their place."""
    wide = "all => all.filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1).length"
    found: int = visit.page.eval_on_selector_all(".scroll, .formula", wide)
    return found


def filled(visit: Visit) -> bool:
    """Whether a figure comes to be wider than paper; it measures its place a moment later."""
    for _ in range(50):
        if max(width for width, _ in visit.sizes(".figure > svg")) > SHEET:
            return True
        visit.page.wait_for_timeout(100)
    return False


def dark(colour: str) -> bool:
    return max(int(part) for part in re.findall(r"\d+", colour)[:3]) < 128


INK = "getComputedStyle(document.body).color"
LABELS = """() => {
  const found = [...document.querySelectorAll(".figure .tick.x")].map(one => getComputedStyle(one).fill);
  return found.length && found.every(Boolean) ? found : null;
}"""


def labels(visit: Visit) -> list[str]:
    """The ink of all labels, once none of them is being replaced."""
    found: list[str] = visit.page.wait_for_function(LABELS).json_value()
    return found


@pytest.mark.browser
def test_reports_print_whole_on_white_and_come_back(browser: Any, reports: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    for name, html in reports.items():
        path = tmp_path / f"{name}.html"
        path.write_text(html)
        visit = Visit(browser, path, viewport={"width": 1280, "height": 900}, color_scheme="dark")
        folded = visit.page.locator("details:not([open])").count()
        assert not dark(visit.page.evaluate(INK)), "on a dark screen ink is light"
        printing(visit)
        assert dark(visit.page.evaluate(INK)), name
        assert visit.page.locator("details:not([open])").count() == 0, name
        assert cut_off(visit) == 0, f"{name}: a table is cut off"
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= SHEET, name
        figures = json.loads(visit.page.inner_text("#figures") or visit.page.text_content("#figures"))
        drawn = visit.sizes(".figure > svg")
        assert len(drawn) >= len(figures) and all(width <= SHEET for width, _ in drawn), name
        assert all(map(dark, labels(visit))), f"{name}: figures are drawn in the ink of paper"
        visit.page.emulate_media(media="screen")
        visit.page.set_viewport_size({"width": 1280, "height": 900})
        visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not dark(visit.page.evaluate(INK)) and visit.page.locator("details:not([open])").count() == folded, name
        assert filled(visit), f"{name}: figures are as wide as the screen again"
        assert not any(map(dark, labels(visit))), name
        assert visit.complaints == [] and visit.requests == []


def widened(html: str, digits: int) -> str:
    """The page with so many digits in every cell of its tables."""
    return re.sub(r"(<td[^>]*>)[^<]*", r"\g<1>" + "8" * digits, html)


@pytest.mark.browser
@pytest.mark.parametrize("digits", [9, 12, 40, 400])
def test_tables_print_whole_however_many_digits_their_numbers_have(
    browser: Any,  # noqa: F811
    reports: dict[str, str],
    tmp_path: Path,
    digits: int,
) -> None:
    for name, html in reports.items():
        path = tmp_path / f"{name}.html"
        path.write_text(widened(html, digits))
        visit = Visit(browser, path, viewport={"width": 1280, "height": 900})
        before = visit.sizes("td")
        printing(visit)
        assert cut_off(visit) == 0, f"{name}: a table is cut off"
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= SHEET, name
        visit.page.emulate_media(media="screen")
        visit.page.set_viewport_size({"width": 1280, "height": 900})
        visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert visit.sizes("td") == before, f"{name}: on the screen tables are as large as they were"


@pytest.mark.browser
def test_a_table_that_keeps_its_size_on_paper_would_be_caught(
    browser: Any,  # noqa: F811
    reports: dict[str, str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "wide.html"
    path.write_text(widened(reports["compare"], 40).replace("wide.style.zoom = wide.clientWidth", "wide.clientWidth"))
    visit = Visit(browser, path, viewport={"width": 1280, "height": 900})
    printing(visit)
    assert cut_off(visit) > 0


@pytest.mark.browser
def test_a_page_without_rules_for_paper_would_be_caught(
    browser: Any,  # noqa: F811
    reports: dict[str, str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "bare.html"
    path.write_text(
        reports["claims"].replace(asset("paper.css"), "").replace(asset("paper.js"), "const paper = new Set();")
    )
    visit = Visit(browser, path, viewport={"width": 1280, "height": 900}, color_scheme="dark")
    printing(visit)
    assert not dark(visit.page.evaluate(INK)) and visit.page.locator("details:not([open])").count() > 0
