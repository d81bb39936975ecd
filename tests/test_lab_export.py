"""A copy of the lab as files: written whole or not at all, opened from a disk, with no server behind it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from avow.cli import app
from avow.errors import FileError
from avow.lab import export, rendering
from avow.lab.examples import examples
from avow.lab.export import export_lab, exported_files
from avow.lab.page import PACKAGE, all_pages
from avow.lab.rendering import row, workshop
from avow.lab.scenes import SCENES
from tests.helpers.lab_visits import SETTLED

TRIALS = "tests.helpers.lab_pages"


def listing(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.commands
def test_the_command_writes_every_page_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "examples", lambda page: [])  # the browser's test has them
    done = CliRunner().invoke(app, ["lab", "--export", str(tmp_path / "copy"), "--json"])
    assert done.exit_code == 0, done.output
    names = [place.address for place in (*row(PACKAGE, exported=True), *workshop(PACKAGE, exported=True))]
    assert set(names) <= set(listing(tmp_path / "copy")) and names[0] == "index.html"
    assert "runs.html" not in listing(tmp_path / "copy"), "it shows what is on this machine, with Python"
    assert done.stderr == "avow: computing the pages and their examples: a minute or two\n"
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "copy"), "files": len(listing(tmp_path / "copy"))}
    assert [one.name for one in tmp_path.iterdir()] == ["copy"], "nothing is left beside it"


def test_two_copies_are_the_same(tmp_path: Path) -> None:
    assert exported_files(TRIALS) == exported_files(TRIALS)


def test_an_earlier_copy_is_replaced_and_anything_else_is_kept(tmp_path: Path) -> None:
    export_lab(tmp_path / "copy", TRIALS)
    (tmp_path / "copy" / "index.html").write_text("old")
    (tmp_path / "copy" / "gone.html").write_text("old")
    export_lab(tmp_path / "copy", TRIALS)
    assert (tmp_path / "copy" / "index.html").read_text() != "old"
    assert "gone.html" not in listing(tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    export_lab(tmp_path / "empty", TRIALS)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(FileError, match=r"is neither empty nor an earlier export; name a new folder"):
        export_lab(tmp_path / "thesis", TRIALS)
    with pytest.raises(FileError, match="is not a folder"):
        export_lab(tmp_path / "thesis" / "chapter.txt", TRIALS)
    assert listing(tmp_path / "thesis") == ["chapter.txt"]


@pytest.mark.parametrize("where", ["put", "settle"])
def test_a_copy_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    export_lab(tmp_path / "copy", TRIALS)
    before = listing(tmp_path / "copy")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.file_io, where, full)
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\); make room"):
        export_lab(tmp_path / "copy", TRIALS)
    with pytest.raises(FileError):
        export_lab(tmp_path / "new", TRIALS)
    assert [one.name for one in tmp_path.iterdir()] == ["copy"] and listing(tmp_path / "copy") == before


def test_what_a_page_answers_without_a_server_is_in_it_and_ends_nothing() -> None:
    text = exported_files(TRIALS)["index.html"]
    _, _, rest = text.partition('id="static-data">')
    assert json.loads(rest.partition("</script>")[0]) == {"number": 1, "words": "</script><!--"}


def test_the_stories_stand_beside_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "story_names", lambda: ["tale"])
    monkeypatch.setattr(export, "story_script", {"tale": "window.told = true;"}.get)
    assert exported_files(TRIALS)["stories/tale.js"] == "window.told = true;"


@pytest.mark.parametrize("name", ["explorer", "dynamics"])
def test_examples_are_the_pages_own_answers_to_its_presets_and_to_every_scene_of_a_claim(name: str) -> None:
    page = all_pages()[name]
    found = examples(page)
    known = [page.inputs.of(one["inputs"]) for one in found]
    assert known[: len(page.presets)] == [page.inputs.of(dict(given)) for given in page.presets.values()]
    assert len(set(known)) == len(known), "none stands there twice"
    for one, inputs in zip(found, known, strict=True):
        assert page.verdict is not None
        assert one["verdict"]["verdict"] == page.verdict(inputs)["verdict"]


def test_a_scene_that_is_no_preset_is_an_example_too() -> None:
    page = dataclasses.replace(all_pages()["explorer"], presets={"Route tokens": {"show": "route"}})
    scenes = {scene.query for scene in SCENES.values() if scene.page == "explorer"}
    assert "show=noise&heads=two" in scenes
    found = [one["inputs"] for one in examples(page)]
    assert {"show": "noise", "heads": "two"} in found and len(found) == len(scenes | {"show=route"})


def shows_examples(page: Any) -> None:
    """Each example comes with its numbers and its proof, and nothing that needs Python can be moved."""
    said = set()
    for button in page.locator("[data-preset]").all():
        button.click()
        page.wait_for_function(SETTLED)
        assert button.get_attribute("aria-pressed") == "true" and page.locator(".stale:visible").count() == 0
        said.add(page.inner_html(".bench"))
    assert len(said) == page.locator("[data-preset]").count() > 4, "each says something else"
    assert page.locator(".bench [data-name] input:visible, [role=slider][aria-disabled]").count() == 0, (
        "nothing is dead"
    )
    assert page.locator(".bench button:disabled:visible").count() == 0
    assert "has no Python behind it" in page.inner_text(".notice")
    links = page.locator(".about a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert links and all(link.startswith("claims.html?claim=") for link in links)


@pytest.mark.browser
def test_in_a_copy_keys_are_dragged_without_a_proof(browser: Any, tmp_path: Path) -> None:
    page, complaints = browser.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    (tmp_path / "explorer.html").write_text(
        rendering.render("explorer", PACKAGE, "", all_pages()["explorer"], exported=True)
    )
    page.goto((tmp_path / "explorer.html").as_uri())
    page.wait_for_function(SETTLED)
    assert page.inner_text("#mark") == "kept"
    page.focus("#stage .handle")
    for _ in range(12):
        page.keyboard.press("Shift+ArrowRight")
    page.wait_for_function("() => document.getElementById('mark').textContent === '≈ not kept'")
    page.wait_for_function("() => document.getElementById('verdict').dataset.proving === 'a proof needs Python'")
    assert page.locator("#facts.stale").count() == 1, "its numbers are those of the example"
    page.click("[data-preset] >> nth=0")
    page.wait_for_function(SETTLED)
    assert page.inner_text("#mark") == "kept" and page.locator(".stale:visible").count() == 0
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_a_copy_on_a_disk_leads_from_page_to_page_without_a_server(browser: Any, tmp_path: Path) -> None:
    export_lab(tmp_path / "copy")
    context = browser.new_context(offline=True)
    page, complaints, asked = context.new_page(), [], []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "copy" / "index.html").as_uri())
    # The first page works as it does with a server: a story, and a slider that lets words go.
    page.wait_for_selector("#text .word")
    before = page.inner_text("#sentence")
    page.focus("#tolerance")
    page.keyboard.press("End")
    page.wait_for_function("before => document.getElementById('sentence').textContent !== before", arg=before)
    page.click("[data-story] >> nth=1")
    page.wait_for_selector("[data-story][aria-pressed=true] >> nth=0")
    ways = [*row(PACKAGE, exported=True), *workshop(PACKAGE, exported=True)]
    for here, following in zip(ways, [*ways[1:], ways[0]], strict=True):
        assert page.url.partition("?")[0].endswith(f"/copy/{here.address}")
        assert page.evaluate("document.body.dataset.static") == "yes" and page.locator("h1").count() >= 1
        own = all_pages(PACKAGE).get(here.name)
        if own is not None and own.static is None:
            shows_examples(page)
        elif here.name == "claims":
            assert page.locator("#ledger li").count() > 20
        page.click(".following a")
        page.wait_for_url(f"**/{following.address}*")
    assert complaints == [] and [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


@pytest.mark.browser
def test_a_script_that_is_forbidden_would_be_noticed(browser: Any, tmp_path: Path) -> None:
    export_lab(tmp_path / "copy", TRIALS)
    file = tmp_path / "copy" / "index.html"
    file.write_text(file.read_text().replace("</main>", "<img src='https://example.org/a.png'></main>"))
    page, complaints = browser.new_page(), []
    page.on("console", lambda said: complaints.append(said.text))
    page.goto(file.as_uri())
    assert any("Content Security Policy" in said for said in complaints)
    page.close()
