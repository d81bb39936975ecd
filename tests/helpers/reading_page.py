"""The front page in a real browser, over made-up stories: its requests are answered here, with the lab's headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2

from avow.lab.page import templates
from avow.lab.security import HEADERS
from tests.helpers.readings import script

ADDRESS = "http://127.0.0.1:9/"
TYPES = {"js": "text/javascript", "css": "text/css"}
FOLDERS = (resources.files("avow.lab") / "static", resources.files("avow.report"))
STATIC = {
    file.name: file.read_text() for folder in FOLDERS for file in folder.iterdir() if file.name.endswith(tuple(TYPES))
}


def html(stories: dict[str, dict[str, Any]], static: bool = False) -> str:
    """The page as the lab writes it, or as an export that has no server behind it."""
    listed = [{"name": name, "title": one["title"], "about": one["about"]} for name, one in stories.items()]
    page = SimpleNamespace(name="reading", title="A real model", summary="")
    # What the layout of the lab takes besides is not this page's.
    lenient = templates().overlay(undefined=jinja2.ChainableUndefined)
    written = lenient.get_template("reading.html").render(
        page=page, pages=[page], token="a-token", static=STATIC, stories=listed
    )
    return written.replace("<body", "<body data-static", 1) if static else written


class ReadingPage:
    """A visit to the front page; `live` answers its requests by their path and what they sent."""

    def __init__(
        self,
        browser: Any,
        stories: dict[str, dict[str, Any]],
        search: str = "",
        live: Callable[[str, Any], Any] | None = None,
        static: bool = False,
        **options: Any,
    ) -> None:
        self.complaints: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **options})
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._document, self._stories, self._live = html(stories, static), stories, live
        self.page.route("**/*", self._answer)
        self.page.goto(ADDRESS + search)
        self.page.wait_for_selector("#text .word")

    def _answer(self, route: Any) -> None:
        path = urlsplit(route.request.url).path.strip("/")
        folder, _, name = path.rpartition("/")
        if folder == "static":
            route.fulfill(body=STATIC[name], content_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
        elif folder == "stories":
            story = name.removesuffix(".js")
            route.fulfill(body=script(story, self._stories[story]), content_type=TYPES["js"], headers=HEADERS)
        elif folder.startswith("api") and self._live:
            said = self._live(path.removeprefix("api/"), json.loads(route.request.post_data))
            route.fulfill(body=json.dumps(said), content_type="application/json", headers=HEADERS)
        elif not path:
            route.fulfill(body=self._document, content_type="text/html; charset=utf-8", headers=HEADERS)
        else:
            route.abort()

    @property
    def inputs(self) -> dict[str, str]:
        """What the address holds, once nothing moves."""
        self.page.wait_for_timeout(700)
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    @property
    def grey(self) -> int:
        """How many words are proved not to be needed."""
        return int(self.page.locator("#text .gone").count())

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; as a function, since the page's policy lets no text be evaluated."""
        self.page.wait_for_function(f"() => {condition}")

    def slide(self, position: int) -> None:
        self.page.locator("#tolerance").fill(str(position))

    def close(self) -> None:
        assert self.complaints == [], self.complaints[:3]
        self.page.close()
