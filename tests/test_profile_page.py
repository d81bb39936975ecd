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


@pytest.fixture(scope="module")
def made() -> Profile:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AVOW_CALIBRATION", "off")
        return profile(long_model(), torch.randint(3, WORDS, (1, 120)), name="<tiny>")


def test_every_head_has_its_square_with_its_number(made: Profile) -> None:
    (trace,) = number_figure(made, lambda head: head.figures.entropy)["data"]
    assert [list(column) for column in zip(*trace["z"], strict=True)] == [
        [head.figures.entropy for head in heads] for heads in made.layers.values()
    ]
    (trace,) = number_figure(made, lambda head: head.figures.tokens[1], log=True)["data"]
    assert trace["zmin"] <= min(map(min, trace["z"])) and max(map(max, trace["z"])) <= trace["zmax"]
    (trace,) = kinds_figure(made)["data"]
    assert trace["text"][3][1] == list(made.layers.values())[1][3].figures.kind[0]
    (trace,) = reading_figure(made, "random_features")["data"]
    assert trace["z"] == [[None] * 2] * 4 and "no promise" in trace["customdata"][0][0]


def test_the_page_escapes_names_and_needs_no_network(made: Profile) -> None:
    page = profile_page(made, "avow profile <b>", "one machine")
    assert "&lt;tiny&gt;: " in page and "<tiny>" not in page and "avow profile &lt;b&gt;" in page
    assert page.count('class="figure"') == 6 and "https://" not in page.split("<script>")[0]


@pytest.mark.browser
def test_the_maps_are_drawn_on_a_phone_in_the_dark(browser: Any, made: Profile, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "profile.html"
    path.write_text(profile_page(made, "avow profile", "one machine"))
    phone = Visit(browser, path, viewport={"width": 360, "height": 740}, color_scheme="dark")
    phone.page.wait_for_selector("#kinds .heatmaplayer image", state="attached")
    phone.page.locator("#rank").scroll_into_view_if_needed()
    phone.page.wait_for_selector("#rank .heatmaplayer image", state="attached")
    assert all(width > 200 and height > 100 for width, height in phone.sizes(".figure svg.main-svg"))
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert phone.complaints == [] and phone.requests == []
    phone.page.click("summary")
    assert phone.page.locator(".heads tbody tr").count() == 8
