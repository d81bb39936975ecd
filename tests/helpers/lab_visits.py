"""Visits to the lab's pages in a real browser; `lab`, `browser` and `visit` are fixtures of every test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.helpers.lab import Lab, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# No name is looked up, and no address but loopback is reached.
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-sync", ALONE])
        yield launched
        launched.close()


# Whatever a page first shows is there: what it found, and the verdict if it has one.
SETTLED = """() => {
  const facts = document.getElementById("facts"), verdict = document.getElementById("verdict");
  if (document.readyState !== "complete" || (facts && !facts.querySelector("dd"))) return false;
  const word = document.getElementById("mark")?.textContent;
  return !verdict || verdict.hidden || !/^(starting …|preview|proving …|≈.*)$/.test(word);
}"""


class Visit:
    """A page of the lab, with all it complained of and all it asked of anyone else; that is cut off."""

    def __init__(self, browser: Any, lab: Lab, path: str, **options: Any) -> None:
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page = browser.new_page(**options)
        # On a busy machine the processes that compute take long to wake up.
        self.page.set_default_timeout(120_000)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda problem: self.complaints.append(str(problem)))

        self.page.on("request", lambda asked: self._asked(asked.url, lab.address))
        self.page.goto(lab.address + path)

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:", "blob:")):
            self.strangers.append(url)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning", "trace"):
            self.complaints.append(message.text)

    def settled(self) -> None:
        """Wait until the page stands still."""
        self.page.wait_for_function(SETTLED)

    def judged(self, word: str) -> str:
        """Wait for a verdict of this word; what it says."""
        self.page.wait_for_function("word => document.getElementById('mark').textContent === word", arg=word)
        return str(self.page.inner_text("#says"))

    def fact(self, label: str) -> str:
        found = self.page.locator(f"#facts dt:has-text('{label}') + dd").inner_text()
        return str(found).split("\n")[0]

    @property
    def inputs(self) -> dict[str, str]:
        """What the address holds."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    def close(self) -> None:
        assert (self.complaints, self.strangers) == ([], []), f"{self.complaints[:3]}, {self.strangers[:3]}"
        self.page.close()


@pytest.fixture
def visit(browser: Any, lab: Lab) -> Iterator[Callable[..., Visit]]:
    """Opens pages, and sees to it that none complained or asked anyone but the lab."""
    opened: list[Visit] = []

    def opener(path: str, **options: Any) -> Visit:
        opened.append(Visit(browser, lab, path, **options))
        return opened[-1]

    yield opener
    for one in opened:
        one.close()


Opener = Callable[..., Visit]
