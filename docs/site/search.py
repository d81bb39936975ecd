"""A search that needs no network: one page that holds the text of all others, and a script that looks through it.

The box on every page is a plain form that leads to that page, so it works from files, and only there a script runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from docs.site.page import Page, relative

ADDRESS = "search.html"
_SCRIPT = Path(__file__).with_name("search.js")


class Part(NamedTuple):
    """What stands below one heading of a page."""

    anchor: str
    heading: str
    text: str


class _Parts(HTMLParser):
    """The text of a page by its headings. Numbers in tables are left out: nobody looks for 0.745."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[tuple[str, list[str], list[str]]] = []
        self._in_heading = self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if re.fullmatch("h[1-4]", tag):
            self._in_heading = True
            self.parts.append((dict(attrs).get("id") or "", [], []))
        self._in_cell = self._in_cell or tag == "td"

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-4]", tag):
            self._in_heading = False
        self._in_cell = self._in_cell and tag != "td"
        if tag in ("p", "li", "td", "th", "pre") and self.parts:
            self.parts[-1][2].append(" ")

    def handle_data(self, data: str) -> None:
        if self.parts:
            _, heading, text = self.parts[-1]
            numeric = self._in_cell and not re.search(r"[^\W\d]", data)
            (heading if self._in_heading else text).append("" if numeric else data)


def parts(html: str) -> list[Part]:
    """The parts of a page, in order."""
    found = []
    for anchor, heading, text in _Parts(html).parts:
        found.append(Part(anchor, "".join(heading), " ".join("".join(text).split())))
    return found


def form(start: str) -> str:
    """The box of a page at that address."""
    return (
        f'<form class="search" role="search" action="{relative(ADDRESS, start)}">'
        '<input type="search" name="q" aria-label="search these pages" placeholder="search"></form>'
    )


def body(pages: Sequence[Page]) -> str:
    """The page that searches: a box, the results, and the text of all pages."""
    index = [
        [page.title, page.address, [[part.anchor, part.heading, part.text] for part in parts(page.body)]]
        for page in pages
    ]
    # "<" must not end the element that holds the text.
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<h1>Search</h1>
{form(ADDRESS).replace('class="search"', 'class="search large"')}
<p id="found" role="status"><noscript>The search is a script, and scripts are switched off.</noscript></p>
<ol id="results"></ol>
<script type="application/json" id="index">{text}</script>
<script>{_SCRIPT.read_text()}</script>
"""
