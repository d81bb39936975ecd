"""Pages as HTML: the row they are read in, and the scripts, styles and stories that they load."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

import avow
from avow.lab.examples import examples
from avow.lab.modules import bundle
from avow.lab.page import Page, all_pages, json_bytes, templates
from avow.lab.stories import story_texts

# The reports' style is the lab's too.
_SHARED = ("style.css", "article.css", "paper.css", "chart.js", "paper.js")
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_IMPORT = re.compile(r'@import "/static/([\w.]+)";')


@dataclass(frozen=True)
class Place:
    """A page as others link to it: its name, its words in the row and as a heading, what it is about, its address."""

    name: str
    label: str
    title: str
    summary: str
    address: str


def row(package: str, exported: bool = False) -> list[Place]:
    """The pages in a row, as every page shows it; those of the workshop share one."""
    pages = shown_pages(package, exported)
    places = [_place(page, package, exported) for page in pages if not page.workshop]
    if any(page.workshop for page in pages):
        address = "workshop.html" if exported else "/workshop"
        places.append(Place("workshop", "Workshop", "Workshop", "Smaller things to build and to watch.", address))
    return places


def workshop(package: str, exported: bool = False) -> list[Place]:
    """The pages that stand in the workshop."""
    return [_place(page, package, exported) for page in shown_pages(package, exported) if page.workshop]


def shown_pages(package: str, exported: bool) -> list[Page]:
    """All pages; in a copy those that show something without Python."""
    return [page for page in all_pages(package).values() if not exported or page.static or page.presets]


def _place(page: Page, package: str, exported: bool) -> Place:
    front = page is next(iter(all_pages(package).values()))
    address = ("index.html" if front else f"{page.name}.html") if exported else "/" if front else f"/{page.name}"
    return Place(page.name, page.label, page.title, page.summary, address)


def render(
    name: str, package: str, token: str, page: Page | None = None, lost: str = "", exported: bool = False
) -> str:
    """The HTML of a page, of the workshop, or of the page for who is `lost` at an address that is not here.

    An exported page has its styles and scripts in itself, and finds the other pages and the stories beside it.
    """
    in_row, in_workshop = row(package, exported), workshop(package, exported)
    ways = [*in_row, *in_workshop]
    here = next((i for i, place in enumerate(ways) if place.name == name), None)
    given: dict[str, Any] = {
        "page": page,
        "place": None if here is None else ways[here],
        "following": ways[here + 1] if here is not None and here + 1 < len(ways) else None,
        "row": in_row,
        "workshop": in_workshop,
        "token": token,
        "lost": lost,
        "exported": exported,
        "version": avow.__version__,
        "claims": "claims.html" if exported else "/claims",
        "static": static_files(),
        "stories": stories(),
        "story": None,
        "controls": page.inputs.controls() if page else {},
    }
    if exported:
        scripts = ["share.js", *([f"{page.name}.js"] if page is not None else [])]
        script = bundle(static_files(), [name for name in scripts if name in static_files()])
        given |= {"style": _style, "bundle": Markup(script), "data": _data(page)}
    # A page without a template of its own has no picture.
    template = templates(package).select_template([f"{name}.html", "page.html"])
    return template.render(given)


def render_alone(name: str, story: Mapping[str, str], script: str) -> str:
    """The HTML of a page by itself, with one story, whose script is in it."""
    page = all_pages()[name]
    place = Place(name, page.label, page.title, page.summary, "#main")
    given: dict[str, Any] = {"page": page, "place": place, "row": [place], "stories": [story], "static": static_files()}
    given |= {"following": None, "data": None}
    code = bundle(static_files(), ["share.js", f"{name}.js"])
    given |= {"exported": True, "style": _style, "bundle": Markup(code), "story": Markup(script.replace("</", "<\\/"))}
    return templates().get_template(f"{name}.html").render(given)


@functools.cache
def static_files() -> dict[str, str]:
    """The scripts and style sheets that may be fetched, by name: no request is ever joined to a path."""
    own, report = resources.files("avow.lab") / "static", resources.files("avow.report")
    files = [*own.iterdir(), *(report / name for name in _SHARED)]
    return {file.name: file.read_text(encoding="utf-8") for file in files if Path(file.name).suffix in TYPES}


def stories() -> list[Mapping[str, str]]:
    """Name, title and subject of each story, in the order they are shown."""
    return [{**story, "name": name} for name, story in story_texts().items()]


def _style(name: str) -> Markup:
    """A style sheet with those that it imports, as an element of a page."""
    text = _IMPORT.sub(lambda found: static_files()[found[1]], static_files()[name])
    return Markup(f"<style>\n{text}</style>")


def _data(page: Page | None) -> Markup | None:
    """What a page answers without a server, as JSON that no element of HTML ends."""
    if page is None:
        return None
    held = page.static() if page.static else {"examples": examples(page)}
    return Markup(json_bytes(held).decode("ascii").replace("<", "\\u003c"))
