"""The report: one HTML file that needs nothing else, neither network nor folder."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import plotly.offline

from avow.report.compare import Board, Comparison
from avow.report.figures import frontier_figure, scaling_figures
from avow.report.table import HEADINGS, cells

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
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1rem; }
.scroll { overflow-x: auto; background: var(--card); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 11rem; }
tr.best td:first-child { font-weight: 650; }
tr.absent { color: var(--soft); }
"""

# The theme is read from the page's own colours, and again when the reader switches between light and dark.
_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
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
function draw() {
  for (const [id, figure] of Object.entries(figures))
    Plotly.react(id, figure.data, themed(figure.layout), {responsive: true, displayModeBar: false});
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""


def page(comparison: Comparison, command: str) -> str:
    """The whole report; `command` is what made it."""
    figures: dict[str, Any] = {f"frontier-{i}": frontier_figure(board) for i, board in enumerate(comparison.boards)}
    scaling = ""
    if comparison.scaling:
        figures |= {f"scaling-{i}": figure for i, figure in enumerate(scaling_figures(comparison))}
        scaling = _SCALING
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>avow compare</title>
<style>{_STYLE}</style>
</head>
<body>
<p class="soft">avow compare</p>
<h1>{escape(comparison.headline)}</h1>
<p class="soft">{_HOW_TO_READ}</p>
{"".join(_section(board, i) for i, board in enumerate(comparison.boards))}
{scaling}
<h2>How this was measured</h2>
<p class="soft"><code>{escape(command)}</code> on {escape(comparison.machine)}.</p>
<p class="soft">{_METHOD}</p>
<script type="application/json" id="figures">{_safe(json.dumps(figures, allow_nan=False))}</script>
<script>{plotly.offline.get_plotlyjs()}</script>
<script>{_DRAW}</script>
</body>
</html>
"""


_HOW_TO_READ = (
    "Each method stands twice: filled where its error was measured, open where its certificate puts the bound. Left of "
    "the dotted line is faster than exact attention; lower is closer to it. Errors are in units of the largest value "
    "norm a row sees, so a bound of 2 says nothing. A cross is another mechanism: its distance from softmax attention "
    "is shown, and its own promise is about its own definition."
)
_METHOD = (
    "Times are whole calls, certificate included, each run in turn with exact attention; the ratio is the median of "
    "the pairs. Memory is the most held at once beyond the inputs. The error is the largest of 459 rows drawn at "
    "random and recomputed in float64: with 99% confidence, 99% of all rows are no worse."
)
_SCALING = """<h2>Growth with length</h2>
<p class="soft">Each method at its default setting, on logarithmic axes: slope 1 is linear, slope 2 quadratic.</p>
<div class="pair"><div class="figure" id="scaling-0"></div><div class="figure" id="scaling-1"></div></div>"""


def _section(board: Board, i: int) -> str:
    z = board.sizes
    shape = (
        f"{z.heads} heads, {z.queries:,} queries, {z.keys:,} keys, dimension {z.dim}{', causal' if z.causal else ''}"
    )
    return f"""<h2>{escape(board.kind)}</h2>
<p class="soft">{escape(board.summary)} · {shape}</p>
<div class="figure" id="frontier-{i}"></div>
{_table(board)}
"""


def _table(board: Board) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    body = ""
    for row in board.rows:
        rank = "absent" if row.measured is None else "best" if row.frontier else "other"
        body += f'<tr class="{rank}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>\n"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _safe(text: str) -> str:
    """JSON that no HTML parser can mistake for the end of its script."""
    return text.replace("<", "\\u003c")
