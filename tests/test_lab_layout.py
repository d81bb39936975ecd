"""Where things stand: nothing moves under the hand, a small window shows a figure and a control, verdicts are live."""

from __future__ import annotations

import re

import pytest

from avow.lab.page import all_pages
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import SETTLED, Opener, Visit

pytestmark = pytest.mark.browser

# From now on, in every frame: how far any control has been from where it stands now, and which one.
WATCH = """() => {
  const places = () => new Map([...document.querySelectorAll(".control, [data-preset], .actions button")]
    .filter(one => one.checkVisibility()).map(one => [one, one.getBoundingClientRect()]));
  const first = places(), scrolled = scrollY;
  window.farthest = [0, ""];
  (function look() {
    for (const [one, now] of places()) {
      const then = first.get(one);
      if (!then) continue;
      const far = Math.max(Math.abs(now.x - then.x), Math.abs(now.y + scrollY - then.y - scrolled));
      if (far > farthest[0]) window.farthest = [far, one.dataset.name ?? one.textContent];
    }
    requestAnimationFrame(look);
  })();
}"""
SLIDERS = [
    ("explorer", "length"),
    ("explorer?show=noise", "x"),
    ("bench?method=random_features&kind=diffuse", "norm"),
    ("bench?method=sparse&kind=clustered&n=256", "drop"),
    ("relu", "eps"),
    ("relu?follow=a+formula", "start"),
    ("dynamics", "gain"),
]


def drag(found: Visit, slider: str, let_go: bool = True) -> None:
    """Along a slider, from its thumb to both ends."""
    found.page.locator(f"#{slider}").scroll_into_view_if_needed()
    box = found.page.locator(f"#{slider}").bounding_box()
    ends = found.page.eval_on_selector(f"#{slider}", "one => (one.value - one.min) / (one.max - one.min)")
    y = box["y"] + box["height"] / 2
    found.page.mouse.move(box["x"] + 8 + ends * (box["width"] - 16), y)
    found.page.mouse.down()
    for share in (0.95, 0.05, 0.5):
        found.page.mouse.move(box["x"] + share * box["width"], y, steps=12)
        found.page.wait_for_timeout(250)
    if let_go:
        found.page.mouse.up()


@pytest.mark.parametrize("viewport", [{"width": 1366, "height": 650}, {"width": 390, "height": 844}])
@pytest.mark.parametrize(("path", "slider"), SLIDERS)
def test_no_control_moves_while_one_is_dragged_nor_when_the_verdict_comes(
    visit: Opener, path: str, slider: str, viewport: dict[str, int]
) -> None:
    found = visit(path, viewport=viewport)
    found.complaints = QuietList()  # an input that breaks a rule on the way is refused, and the console says so too
    found.settled()
    found.page.evaluate(WATCH)
    drag(found, slider)
    found.page.wait_for_timeout(600)
    found.settled()
    far, which = found.page.evaluate("farthest")
    assert far < 1, f"{which} moved by {far} pixels"


class QuietList(list[str]):
    """Complaints, but for those of the browser about a refused request."""

    def append(self, said: str) -> None:
        if not re.search("Failed to load resource.*422", said):
            super().append(said)


def test_a_control_that_moves_would_be_noticed(visit: Opener) -> None:
    found = visit("relu")
    found.settled()
    found.page.evaluate(WATCH)
    found.page.evaluate("document.getElementById('verdict').style.height = 'auto'")
    found.page.wait_for_function("() => farthest[0] > 5")


@pytest.mark.parametrize("name", all_pages())
def test_a_small_window_shows_the_first_control_and_the_figure(visit: Opener, name: str) -> None:
    found = visit(name, viewport={"width": 1366, "height": 650})
    found.settled()
    figures = "[data-picture], #stage, .picture .figure"
    for what in ("main :is(input:not([type=file]), [role=slider])", figures):
        seen = [one.bounding_box() for one in found.page.locator(what).all() if one.is_visible()]
        if seen:
            assert seen[0]["y"] >= 0 and seen[0]["y"] + seen[0]["height"] <= 650, what
    assert found.page.locator(".actions button:visible").count() >= 2


@pytest.mark.parametrize("path", ["explorer", "explorer?show=average", "explorer#asks=cat&key=the&key=black&key=dog"])
def test_a_small_window_shows_what_the_signs_of_one_head_mean(visit: Opener, path: str) -> None:
    found = visit(path, viewport={"width": 1366, "height": 650})
    found.settled()
    assert found.page.locator("#carried").is_visible() is ("asks" in path)
    box = found.page.locator("#signs").bounding_box()
    assert box["y"] + box["height"] <= 650
    assert found.page.locator("#stage").bounding_box()["height"] >= 270, "and the drawing is not made tiny for it"


# From now on, every word that the badge has.
WORDS = """() => {
  const mark = document.getElementById("mark");
  window.words = new Set();
  new MutationObserver(() => words.add(mark.textContent)).observe(mark, {childList: true, characterData: true});
}"""


def test_the_verdict_is_live_while_a_slider_is_held(visit: Opener) -> None:
    found = visit("relu")
    found.judged("kept")
    found.page.evaluate(WORDS)
    drag(found, "eps", let_go=False)
    assert found.page.inner_text("#mark") == "≈ kept" and "within about" in found.page.inner_text("#says")
    assert not found.page.locator("#facts.sure").count() and found.page.get_attribute("#verdict", "aria-busy") == "true"
    found.page.mouse.up()
    found.judged("kept")
    assert "everywhere" in found.page.inner_text("#says") and found.page.get_attribute("#verdict", "aria-busy") is None
    assert set(found.page.evaluate("[...words]")) == {"≈ kept", "kept"}, "it is never blank"


def test_facts_have_three_digits_and_the_others_are_there_for_the_pointer(visit: Opener) -> None:
    found = visit("relu?eps=0.00123")
    found.judged("kept")
    bound = found.page.locator("#facts dt:has-text('Proven error') + dd")
    shown, whole = bound.inner_text().split("\n")[0], bound.get_attribute("title")
    assert re.fullmatch(r"≤ 0\.00\d{3}", shown) and whole.startswith("≤ 0.00")
    assert float(whole[2:]) <= float(shown[2:]) < float(whole[2:]) * 1.01, "a bound is rounded up"


DIGITS = [
    ("0.997312", "", "0.997"),
    ("≤ 0.00980392", "", "≤ 0.00981"),
    ("0.1234", "It is at most", "0.124"),
    ("≥ 0.99991", "", "≥ 0.999"),
    ("error ≤ 2.3401e-07", "", "error ≤ 2.35e-07"),
    ("1024", "", "1024"),
    ("1,024 of 4,096", "", "1,024 of 4,096"),
    ("1234.5678", "", "1235"),
    ("12.3456%", "", "12.3%"),
    ("0.99996", "", "0.99996"),
    ("0.12", "", "0.12"),
    ("(0.12345, -0.6789)", "", "(0.123, -0.679)"),
]


def test_numbers_lose_digits_and_never_their_meaning(visit: Opener) -> None:
    found = visit("relu")
    for text, label, few in DIGITS:
        call = "async ([text, label]) => (await import('/static/lab.js')).digits(text, label)"
        assert found.page.evaluate(call, [text, label]) == few


def test_a_lab_that_was_started_again_is_noticed_and_the_page_keeps_what_was_set(visit: Opener, lab: Lab) -> None:
    found = visit("relu?layers=many")
    found.judged("kept")
    # The page's own token is that of a lab that has ended.
    found.page.route("**/relu*", lambda route: _with_old_token(route))
    found.page.goto(lab.address + "relu?layers=many&eps=0.002")
    found.page.wait_for_function("() => document.querySelector('meta[name=avow-token]').content !== 'old'")
    found.page.wait_for_function(SETTLED)
    assert found.inputs == {"layers": "many", "eps": "0.002"} and found.page.locator("#trouble").is_hidden()
    found.complaints = [said for said in found.complaints if "403" not in said]


def test_a_token_that_stays_wrong_is_told_and_the_page_is_not_loaded_for_ever(visit: Opener, lab: Lab) -> None:
    found = visit("workshop")
    found.page.route("**/relu*", lambda route: _with_old_token(route, again=True))
    found.page.goto(lab.address + "relu")
    found.page.wait_for_selector("#trouble:not([hidden])")
    assert "load the page again" in found.page.inner_text("#trouble")
    found.complaints = [said for said in found.complaints if "403" not in said]


_loads: list[str] = []


def _with_old_token(route, again: bool = False) -> None:  # type: ignore[no-untyped-def]  # playwright is optional
    """The first time, or every time, a page as an earlier lab wrote it."""
    if route.request.resource_type != "document" or (not again and route.request.url in _loads):
        route.fallback()
        return
    _loads.append(route.request.url)
    answer = route.fetch()
    old = re.sub('avow-token" content="[^"]*"', 'avow-token" content="old"', answer.text())
    route.fulfill(response=answer, body=old)
