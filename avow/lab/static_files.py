"""Scripts and rules of look that pages fetch, the lab's own and those of the reports, read once."""

from __future__ import annotations

import functools
from importlib import resources

# The look of the reports is the lab's too.
_SHARED = ("style.css", "article.css", "paper.css", "themed.js", "paper.js")
TYPES = {"js": "text/javascript", "css": "text/css"}


@functools.cache
def static_files() -> dict[str, str]:
    """What may be fetched, by name: no path ever comes from a request."""
    own, report = resources.files("avow.lab") / "static", resources.files("avow.report")
    found = [*own.iterdir(), *(report / name for name in _SHARED)]
    return {item.name: item.read_text(encoding="utf-8") for item in found if item.name.rpartition(".")[2] in TYPES}
