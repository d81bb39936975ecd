"""What every page shares: one HTML file that needs nothing else, neither network nor folder, light or dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

import plotly.offline

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d8dde3; --page: #fff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --line: #343b44; --page: #12161c; --card: #1a2029; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: clamp(1.25rem, 3.2vw, 1.8rem); line-height: 1.3; margin: .3rem 0 .6rem; text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .1rem; }
p { margin: .3rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.figure { width: 100%; height: 25rem; margin: .6rem 0; }
.scroll { overflow-x: auto; background: var(--card); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: .2em; }
a:hover { text-decoration-color: currentColor; }
:focus-visible { outline: 2px solid #3a86d8; outline-offset: 2px; }
code { font-size: .88em; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .7rem .9rem; font-size: .83rem; }
pre code { font-size: inherit; overflow-wrap: normal; }
ul, ol { margin: .2rem 0; padding-left: 1.3rem; max-width: 52rem; }
summary { cursor: pointer; }
.formula { overflow-x: auto; overflow-y: hidden; padding: .35rem 0; line-height: 2; }
.formula code { line-height: 1.5; }
math, .formula { font-size: 1.12rem; font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math",
  "Libertinus Math", "DejaVu Math TeX Gyre", "Noto Sans Math", "DejaVu Serif", math; }
li math, td math { font-size: 1rem; }
"""

# Paper is white, as wide as it is, and nothing on it scrolls or unfolds. The class stands while the browser prepares
# to print, since figures are drawn before the rules for print hold; its width is that of A4 between these margins.
_PRINT = """
:root.paper { color-scheme: light; --ink: #1c2128; --soft: #59636e; --line: #d8dde3; --page: #fff; --card: #f6f8fa; }
:root.paper body { width: 17.8cm; max-width: none; padding: 0; }
:root.paper .figure { height: 19rem; }
@page { size: A4; margin: 1.6cm; }
@media print {
  :root { color-scheme: light; --ink: #1c2128; --soft: #59636e; --line: #d8dde3; --page: #fff; --card: #f6f8fa; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  p, ul, ol { max-width: none; }
  .scroll, .formula { overflow: visible; background: none; border-radius: 0; }
  table { font-size: 8pt; }
  th, td { padding: .2rem .45rem; }
  th { white-space: normal; }
  pre { white-space: pre-wrap; overflow: visible; border: 1px solid var(--line); }
  tr, .figure, pre, .formula { break-inside: avoid; }
  h1, h2, h3, h4, h2 + p, summary, .caption { break-after: avoid; }
  .screen { display: none; }
  a { text-decoration: none; }
}
"""

# The theme is read from the page's own colours, and again when the reader switches between light and dark. A figure
# is drawn when it comes near the window, so that a page of fifty opens at once; before printing all of them are.
_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent), drawn = new Set();
function themed(layout) {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const narrow = window.innerWidth < 600;
  const axis = own => ({gridcolor: of("--line"), linecolor: of("--line"), zeroline: false, automargin: true, ...own,
    title: {standoff: 8, ...own.title}});
  return {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "system-ui, sans-serif", size: narrow ? 11 : 13, color: of("--ink")},
    hoverlabel: {bgcolor: of("--card"), bordercolor: of("--line"), font: {color: of("--ink")}, align: "left"},
    margin: {l: 8, r: 12, t: 8, b: 8}, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    shapes: (layout.shapes || []).map(s => ({...s, line: {...s.line, color: of("--soft")}}))};
}
function draw(id) {
  drawn.add(id);
  const layout = themed(figures[id].layout), on = document.getElementById(id);
  if (paper.contains("paper")) { layout.width = on.clientWidth; layout.height = on.clientHeight; }
  Plotly.react(id, figures[id].data, layout, {responsive: true, displayModeBar: false});
}
const near = new IntersectionObserver(seen => seen.forEach(entry => {
  if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(entry.target.id);
}), {rootMargin: "800px"});
Object.keys(figures).forEach(id => near.observe(document.getElementById(id)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
addEventListener("beforeprint", () => Object.keys(figures).forEach(draw));
addEventListener("afterprint", () => Object.keys(figures).forEach(draw));
"""

_UNFOLD = """
const paper = document.documentElement.classList;
addEventListener("beforeprint", () => {
  paper.add("paper");
  for (const folded of document.querySelectorAll("details:not([open])")) folded.dataset.folded = folded.open = true;
});
addEventListener("afterprint", () => {
  paper.remove("paper");
  for (const opened of document.querySelectorAll("details[data-folded]")) {
    opened.open = false;
    delete opened.dataset.folded;
  }
});
"""


def document(title: str, body: str, figures: Mapping[str, Any], style: str = "", script: str = "") -> str:
    """A whole page. Each figure, as plotly reads it, is drawn in the body's element of that id."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    drawing = ""
    if figures:
        drawing = (
            f'<script type="application/json" id="figures">{_safe(json.dumps(figures, allow_nan=False))}</script>\n'
            f"<script>{plotly.offline.get_plotlyjs()}</script>\n<script>{_DRAW}</script>\n"
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}{style}{_PRINT}</style>
</head>
<body>
{body}
<script>{_UNFOLD}</script>
{drawing}{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def _safe(text: str) -> str:
    """JSON that no HTML parser can mistake for the end of its script."""
    return text.replace("<", "\\u003c")
