"""What every page shares: one HTML file that needs nothing else, neither network nor folder, light or dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

import plotly.offline

_FOLDER = resources.files("avow.report")
STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")
# A module in the lab; a report has it in line.
THEMED = (_FOLDER / "themed.js").read_text(encoding="utf-8")
_INLINE = THEMED.replace("export function", "function")

# The theme is read from the page's own colours, and again when the reader switches between light and dark. A figure
# is drawn when it comes near the window, so that a page of fifty opens at once; before printing all of them are.
_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent), drawn = new Set();
function draw(id) {
  drawn.add(id);
  Plotly.react(id, figures[id].data, themed(figures[id].layout), {responsive: true, displayModeBar: false});
}
const near = new IntersectionObserver(seen => seen.forEach(entry => {
  if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(entry.target.id);
}), {rootMargin: "800px"});
Object.keys(figures).forEach(id => near.observe(document.getElementById(id)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
// Figures follow the width of a window by themselves, but not that of paper.
addEventListener("beforeprint", () => Object.entries(figures).forEach(([id, figure]) => {
  const own = figure.layout, on = document.getElementById(id);
  figure.layout = {...own, width: on.clientWidth, height: on.clientHeight};
  draw(id);
  figure.layout = own;
}));
addEventListener("afterprint", () => drawn.forEach(id => { draw(id); Plotly.Plots.resize(id); }));
"""

_PAPER = {end: (_FOLDER / f"paper.{end}").read_text(encoding="utf-8") for end in ("css", "js")}


def document(title: str, body: str, figures: Mapping[str, Any], style: str = "", script: str = "") -> str:
    """A whole page. Each figure, as plotly reads it, is drawn in the body's element of that id."""
    style += _PAPER["css"]  # last, so that paper has the last word
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    drawing = ""
    if figures:
        drawing = (
            f'<script type="application/json" id="figures">{_safe(json.dumps(figures, allow_nan=False))}</script>\n'
            f"<script>{plotly.offline.get_plotlyjs()}</script>\n<script>{_INLINE}{_DRAW}</script>\n"
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}{style}</style>
</head>
<body>
{body}
<script>{_PAPER["js"]}</script>
{drawing}{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def report(
    command: str, headline: str, body: str, figures: Mapping[str, Any], style: str = "", script: str = ""
) -> str:
    """The page that a command makes: its name, what it found in a sentence, then the body."""
    head = f'<p class="soft">{escape(command)}</p>\n<h1>{escape(headline)}</h1>\n'
    return document(command, head + body, figures, style, script)


def _safe(text: str) -> str:
    """JSON that no HTML parser can mistake for the end of its script."""
    return text.replace("<", "\\u003c")
