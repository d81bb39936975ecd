"""The page of a profile: its heat maps are drawn offline, in the dark and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from avow.integrations.transformers import Profile, profile
from avow.report.profile import kinds_figure, number_figure, profile_page, reading_figure
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
    drawn = kinds_figure(made)
    assert drawn["letters"][3][1] == list(made.layers.values())[1][3].figures.kind[0]
    drawn = reading_figure(made, "random_features")
    assert drawn["cells"] == [[None] * 2] * 4 and drawn["texts"][3][1].startswith("head 3 of ")
    assert "no promise" in drawn["texts"][0][0]


def test_the_page_escapes_names_and_needs_no_network(made: Profile) -> None:
    page = profile_page(made, "avow profile <b>", "one machine")
    assert "&lt;tiny&gt;: " in page and "<tiny>" not in page and "avow profile &lt;b&gt;" in page
    assert page.count('class="figure"') == 6 and outside(page) == []


@pytest.mark.browser
def test_the_maps_are_drawn_on_a_phone_in_the_dark(browser: Any, made: Profile, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "profile.html"
    path.write_text(profile_page(made, "avow profile", "one machine"))
    phone = Visit(browser, path, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert phone.page.locator("#kinds .cell").count() == phone.page.locator("#rank .cell").count() == 8
    assert all(width > 200 and height > 100 for width, height in phone.sizes(".figure > svg"))
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert phone.complaints == [] and phone.requests == []
    phone.page.click("summary")
    assert phone.page.locator(".heads tbody tr").count() == 8
