"""The page of a profile: its heat maps are drawn offline, in the dark and on a phone."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from avow.integrations.transformers import Profile, profile
from avow.integrations.transformers.head_kinds import KINDS
from avow.report.profile import heads_to_open, kind_rules, number_figure, profile_page, reading_figure
from tests.helpers.model_folders import long_model
from tests.helpers.tiny_models import WORDS
from tests.test_browser import Visit, browser  # noqa: F401  # a fixture
from tests.test_report import outside


@pytest.fixture(scope="module")
def made() -> Profile:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AVOW_CALIBRATION", "off")
        return profile(long_model(), torch.randint(3, WORDS, (1, 120)), name="<tiny>")


def test_every_head_has_its_square_with_its_number(made: Profile) -> None:
    drawn = number_figure(made, "Entropy", lambda head: head.figures.entropy)
    assert [list(column) for column in zip(*drawn["cells"], strict=True)] == [
        [head.figures.entropy for head in heads] for heads in made.layers.values()
    ]
    drawn = number_figure(made, "Tokens", lambda head: head.figures.tokens[1], log=True)
    low, high = drawn["colours"]["range"]
    assert low <= min(map(min, drawn["cells"])) and max(map(max, drawn["cells"])) <= high
    drawn = reading_figure(made, "random_features")
    assert drawn["cells"] == [[None] * 2] * 4 and drawn["texts"][3][1].startswith("head 3 of ")
    assert "no promise" in drawn["texts"][0][0]


def test_every_kind_has_its_rule_and_its_heads_are_counted(made: Profile) -> None:
    rules = kind_rules(made)
    assert [kind for kind, _, _ in rules] == list(KINDS) and sum(many for _, many, _ in rules) == 8
    page = profile_page(made, "avow profile", "one machine")
    assert all(escape(rule) in page for rule in KINDS.values())
    for layer, heads in enumerate(made.layers.values()):
        for row, head in enumerate(heads):
            kind = head.figures.kind
            assert f'aria-label="layer {layer}, head {row}: {kind}"' in page


def test_the_head_that_is_open_first_looks_for_words_if_one_does(made: Profile) -> None:
    name, heads = list(made.layers.items())[1]
    figures = dataclasses.replace(heads[2].figures, kind="same")
    changed = (*heads[:2], dataclasses.replace(heads[2], figures=figures), *heads[3:])
    told = dataclasses.replace(made, layers=made.layers | {name: changed})
    assert heads_to_open(told, [])["first"] == (1, 2)


def test_the_page_escapes_names_and_needs_no_network(made: Profile) -> None:
    page = profile_page(made, "avow profile <b>", "one machine")
    assert "&lt;tiny&gt;: " in page and "<tiny>" not in page and "avow profile &lt;b&gt;" in page
    assert page.count('class="figure"') == 5 and outside(page) == []
    page = profile_page(made, "avow profile", "one machine", ["</script><b>"] * 120)
    assert "</script><b>" not in page


@pytest.mark.browser
def test_the_maps_are_drawn_on_a_phone_in_the_dark(browser: Any, made: Profile, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "profile.html"
    path.write_text(profile_page(made, "avow profile", "one machine"))
    phone = Visit(browser, path, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert phone.page.locator("#reading .cell").count() == phone.page.locator("#rank .cell").count() == 8
    assert all(width > 200 and height > 100 for width, height in phone.sizes(".figure > svg"))
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert phone.complaints == [] and phone.requests == []
    phone.page.click("summary")
    assert phone.page.locator(".heads tbody tr").count() == 8


@pytest.mark.browser
def test_a_square_opens_its_head_by_mouse_keys_and_address(browser: Any, made: Profile, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "profile.html"
    path.write_text(profile_page(made, "avow profile", "one machine", [f" word{i}" for i in range(120)]))
    visit = Visit(browser, path, viewport={"width": 1366, "height": 650})
    page, title = visit.page, visit.page.locator("#head h3")
    assert title.inner_text().startswith("Layer 0, head ")
    page.click("#square-1-2")
    assert title.inner_text().startswith("Layer 1, head 2: ") and page.url.endswith("#head-1-2")
    reading = list(made.layers.values())[1][2].readings[3]
    row = page.locator(".readings li").nth(3)
    heaviest, mass = reading.tokens[0]
    assert f"word{reading.position} token {reading.position}" in row.inner_text()
    assert f"word{heaviest} {round(100 * mass)}%" in row.locator(".token").first.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert title.inner_text().startswith("Layer 0, head 3: ")
    page.keyboard.press("ArrowDown")
    assert title.inner_text().startswith("Layer 0, head 3: "), "there is no head below"
    assert page.locator("#squares [tabindex='0']").count() == 1
    page.evaluate("location.hash = '#head-1-1'")
    assert title.inner_text().startswith("Layer 1, head 1: ")
    assert visit.complaints == [] and visit.requests == []
