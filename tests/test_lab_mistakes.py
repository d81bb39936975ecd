"""What a reader does wrong, or meets: each mistake is told beside the field it is about, and nothing is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from avow.errors import ParameterError
from avow.lab.page import all_pages
from avow.lab.pages import explorer
from tests.helpers.lab import Lab, running
from tests.helpers.lab_visits import Visit

pytestmark = pytest.mark.browser


@pytest.fixture
def clumsy(browser: Any, lab: Lab) -> Iterator[Any]:
    """Visits by someone whose mistakes the browser's own console notes as well."""
    opened: list[Visit] = []

    def opener(path: str, where: Lab = lab) -> Visit:
        opened.append(Visit(browser, where, path))
        return opened[-1]

    yield opener
    for one in opened:
        assert not [said for said in one.complaints if "Failed to load resource" not in said]
        one.page.close()


# A line beside a field that begins so, and meanwhile no badge that claims anything.
TOLD = """([beside, words]) => [...document.querySelectorAll(`${beside} #trouble:not([hidden])`)].some(one =>
  one.textContent.startsWith(words)) && document.getElementById("mark").textContent === "no answer" &&
  !document.querySelector("#facts.sure")"""


def told(found: Visit, beside: str, words: str) -> None:
    """Wait until this is said there."""
    found.page.wait_for_function(TOLD, arg=[beside, words])


BROKEN = [
    ("explorer?n=99", "[data-name=n]", "n=99 must be from 3 to 12; the default is 8"),
    ("explorer?n=abc", "[data-name=n]", "n='abc' must be a whole number; "),
    ("explorer?angle=", "[data-name=angle]", "angle='' must be a number; "),
    (
        "explorer?n=5&target=9",
        "[data-name=target]",
        "target=9 must be below the number of keys, 5; move it to the left",
    ),
    ("explorer?show=average&other=1", "[data-name=other]", "other=1 must be another key than the first; move either"),
    ("explorer?show=foo", "main", "show='foo' must be one of copy, average, noise, route; "),
    ("bench?method=foo", "[data-name=method]", "method='foo' must be one of random_features, low_rank, sparse; "),
    ("claims?seed=-1", "[data-name=seed]", "seed=-1 must be from 0 to 99; "),
    ("claims?variant=no&hunt=true", "main", "variant='no' is not a variant of copy-possible; one of 'as stated'"),
    ("dynamics?beta=1", "[data-name=beta]", "beta=1 must be from 0 to 0.99; "),
    ("runs?log=maybe", "main", "log='maybe' must be True or False; "),
    ("runs?run=gone", "main", "run='gone' is not one of the runs that are here; choose one from the list"),
]


def test_an_address_that_breaks_a_rule_is_told_which_beside_its_control(clumsy: Any, lab: Lab) -> None:
    found = clumsy("")
    for path, beside, words in BROKEN:
        found.page.goto(lab.address + path)
        told(found, beside, words)


def test_a_mistake_ends_when_it_is_mended(clumsy: Any) -> None:
    found = clumsy("explorer?n=99")
    told(found, "[data-name=n]", "n=99")
    assert found.page.get_attribute("#n", "aria-invalid") == "true" and found.page.locator(".mistaken").count() == 1
    found.page.get_by_role("button", name="Copy one").click()
    found.judged("kept")
    assert found.page.locator("#trouble").is_hidden() and found.page.locator("[aria-invalid], .mistaken").count() == 0


def test_sliders_reach_their_ends_and_none_counts_keys_that_are_not_there(clumsy: Any) -> None:
    found = clumsy("explorer")
    found.judged("kept")
    found.page.focus("#eps")
    found.page.keyboard.press("End")
    assert found.page.inner_text("[for=eps] + output") == "0.3"
    found.page.focus("#target")
    found.page.keyboard.press("End")
    found.page.wait_for_function("() => document.getElementById('says').textContent.startsWith('Key 7 gets')")
    found.page.focus("#n")
    found.page.keyboard.press("Home")
    found.page.wait_for_function("() => document.getElementById('says').textContent.startsWith('Key 2 gets')")
    found.judged("kept")  # the address follows when the hand rests
    assert (
        found.inputs == {"n": "3", "target": "2", "eps": "0.3"}
        and found.page.inner_text("[for=target] + output") == "2"
    )
    with pytest.raises(ParameterError, match=r"^ahead=3 must be below the number of keys, 3; move it to the left$"):
        explorer.preview(explorer.ExplorerInputs(show="route", n=3, ahead=3))


# A verdict has come that says something else.
OTHERWISE = """first => !["preview", "proving …", "no answer"].includes(document.getElementById("mark").textContent) &&
  document.getElementById("says").textContent !== first"""


def test_a_file_that_is_none_is_told_beside_its_field_and_one_that_is_taken_back_is_gone(
    clumsy: Any, tmp_path: Path
) -> None:
    found, file = clumsy("bench?method=low_rank&kind=diffuse&n=64"), tmp_path / "a.safetensors"
    first = found.judged("kept")
    file.write_bytes(b"hello there")
    found.page.set_input_files("#file", file)
    told(found, ".control:has(#file)", "file=11 bytes is not a safetensors file")
    x = torch.randn(2, 64, 16)
    save_file({"q": x, "k": x[..., :8].contiguous(), "v": x.clone()}, file)
    found.page.set_input_files("#file", file)
    told(found, ".control:has(#file)", "file=as uploaded holds what does not fit together: k.shape[-1]=8 must equal")
    save_file({"q": x, "k": x.clone(), "v": x.clone()}, file)
    found.page.set_input_files("#file", file)
    found.page.wait_for_function(OTHERWISE, arg=first)
    assert found.page.inner_text("#held") == "k: 2×64×16, q: 2×64×16, v: 2×64×16"
    found.page.set_input_files("#file", [])
    assert found.judged("kept") == first and found.page.inner_text("#held") == ""


def test_who_is_lost_finds_every_page(clumsy: Any, lab: Lab) -> None:
    found = clumsy("explorer/<b>")
    assert found.page.inner_text("h1") == "There is no page /explorer/<b>"
    assert found.page.locator(".pages a").count() == len(all_pages())
    assert lab.get("/nowhere", accept="text/html").status == 404
    assert lab.get("/nowhere").mistake == "address=/nowhere is not known here; start from the front page"


def test_every_page_says_that_the_lab_has_ended(clumsy: Any) -> None:
    with running() as own:
        found = {path: clumsy(path, own) for path in ("explorer", "bench", "claims", "runs")}
        for one in found.values():
            one.page.wait_for_selector("#facts dd")
    found["explorer"].page.focus("#eps")
    found["explorer"].page.keyboard.press("ArrowRight")
    found["claims"].page.click("#ledger li:first-child a")
    found["bench"].page.set_input_files("#file", [{"name": "a.safetensors", "mimeType": "", "buffer": b"a"}])
    for one in found.values():  # the others ask by themselves
        told(one, "main", "the lab ")
        assert one.page.inner_text("#trouble").endswith("; start avow lab again, and open the address it prints")
