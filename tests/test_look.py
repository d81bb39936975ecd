"""`avow.look` gives the lab's first page for any model and text: one file that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import avow
from avow.errors import FileError, ParameterError
from avow.lab.look import ReadingPage
from avow.lab.stories import story_from
from tests.test_reading import TEXT, Letters
from tests.test_reading import model as model


@pytest.fixture(scope="module")
def page(model: LlamaForCausalLM) -> ReadingPage:
    return avow.look(model, TEXT + "</script><b>", Letters(), write=1)


def test_the_page_holds_the_reading_and_loads_nothing(page: ReadingPage) -> None:
    (script,) = re.findall(r"<script>(\(window\.avowStories.*?)</script>", page.html, re.DOTALL)
    plain = story_from(script.replace("<\\/", "</"))
    assert "".join(plain["words"]).count("</script>") <= 1 and plain["prompt"] == 1 + len(TEXT) + len("</script><b>")
    assert not re.search(r"(src|href)=\"(?!#|data:)", page.html.partition("<body")[0])
    assert re.findall(r"<script[^>]+src=", page.html) == []


def test_a_notebook_shows_it_in_a_frame_of_its_own(page: ReadingPage) -> None:
    shown = page._repr_html_()
    assert shown.startswith('<iframe srcdoc="') and shown.count("<") == 2
    assert repr(page) == "ReadingPage(126 tokens read by 8 heads; save('page.html') writes it)"


def test_it_is_saved_whole(page: ReadingPage, tmp_path: Path) -> None:
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(FileError):
        page.save(tmp_path / "page.html" / "page.html")


def test_a_model_without_its_tokenizer_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ParameterError, match="tokenizer=None must be the tokenizer"):
        avow.look(model, TEXT)


@pytest.mark.browser
def test_it_opens_from_a_disk_and_follows_its_slider(browser: Any, page: ReadingPage, tmp_path: Path) -> None:
    page.save(tmp_path / "page.html")
    tab = browser.new_page()
    faults: list[str] = []
    tab.on("pageerror", lambda fault: faults.append(str(fault)))
    tab.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    tab.goto(f"file://{tmp_path / 'page.html'}")
    tab.wait_for_function("document.getElementById('sentence').textContent.includes('Nothing is left out')")
    tab.focus("#tolerance")
    for _ in range(5):
        tab.keyboard.press("ArrowRight")
    tab.wait_for_function("document.getElementById('read-so-far').textContent !== '100%'")
    assert faults == []
    tab.close()
