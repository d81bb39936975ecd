"""Scripts and rules of look that pages fetch: avow's own, read once."""

from __future__ import annotations

import functools
from importlib import resources

from avow.report.claims_style import ARTICLE
from avow.report.document import STYLE, THEMED

TYPES = {"js": "text/javascript", "css": "text/css"}


@functools.cache
def static_files() -> dict[str, str]:
    """What may be fetched, by name: no path ever comes from a request."""
    found = {
        item.name: item.read_text(encoding="utf-8")
        for item in (resources.files("avow.lab") / "static").iterdir()
        if item.name.rpartition(".")[2] in TYPES
    }
    return found | {"style.css": STYLE, "themed.js": THEMED, "article.css": ARTICLE}
