"""The report of a comparison, as a page."""

from __future__ import annotations

from html import escape
from typing import Any

from avow.core.chart import Table
from avow.report import formatting
from avow.report.compare import Board, Comparison
from avow.report.document import report
from avow.report.figures import frontier_figure, scaling_figures
from avow.report.markup import html_table
from avow.report.table import DECODING_HEADINGS, HEADINGS, cells, step_cells

_STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1rem; }
th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 11rem; }
tr.best td:first-child { font-weight: 650; }
tr.absent { color: var(--soft); }
"""


def page(comparison: Comparison, command: str) -> str:
    """The whole report; `command` is what made it."""
    figures: dict[str, Any] = {f"frontier-{i}": frontier_figure(board) for i, board in enumerate(comparison.boards)}
    scaling = ""
    if comparison.scaling:
        figures |= {f"scaling-{i}": figure for i, figure in enumerate(scaling_figures(comparison))}
        scaling = _SCALING
    body = f"""<p class="soft">{_HOW_TO_READ}</p>
{"".join(_section(board, i) for i, board in enumerate(comparison.boards))}
{scaling}
<h2>How this was measured</h2>
<p class="soft"><code>{escape(command)}</code> on {escape(comparison.machine)}.</p>
<p class="soft">{_METHOD}</p>"""
    return report("avow compare", comparison.headline, body, figures, _STYLE)


_HOW_TO_READ = (
    "Each method stands twice: filled where its error was measured, open where its certificate puts the bound. Left of "
    "the dotted line is faster than exact attention; lower is closer to it. Errors are in units of the largest value "
    "norm a row sees, so a bound of 2 says nothing; columns of answer have them relative to the true answer, which is "
    "far shorter where values cancel. A cross is another mechanism: its distance from softmax attention is shown, and "
    "its own promise is about its own definition."
)
_METHOD = (
    "Times are whole calls, certificate included, each run in turn with exact attention; the ratio is the median of "
    "the pairs. Memory is the most held at once beyond the inputs. The error is the largest of 459 rows drawn at "
    "random and recomputed in float64: with 99% confidence, 99% of all rows are no worse."
)
_STEPS = (
    "Decoding: the last query against {keys} that a KeyValueCache holds, its sketch in place. Times are relative"
    " to the exact answer from that cache; avow bench decode compares with PyTorch's own."
)
_SCALING = """<h2>Growth with length</h2>
<p class="soft">Each method at its default setting, on logarithmic axes: slope 1 is linear, slope 2 quadratic.</p>
<div class="pair"><div class="figure" id="scaling-0"></div><div class="figure" id="scaling-1"></div></div>"""


def _section(board: Board, i: int) -> str:
    return f"""<h2>{escape(board.kind)}</h2>
<p class="soft">{escape(board.summary)} · {formatting.shape(board.sizes)}</p>
<div class="figure" id="frontier-{i}"></div>
{_table(board)}
{_decoding(board)}
"""


def _decoding(board: Board) -> str:
    """Steps of decoding, where they were measured."""
    if board.decoding is None or not board.decoding.steps:
        return ""
    rows = [step_cells(step) for step in board.decoding.steps]
    return f"""<p class="soft">{_STEPS.format(keys=formatting.count(board.decoding.keys, "key"))}</p>
{html_table(Table("", DECODING_HEADINGS, rows))}"""


def _table(board: Board) -> str:
    ranks = ["absent" if row.measured is None else "best" if row.frontier else "other" for row in board.rows]
    table = Table("", HEADINGS, [cells(row) for row in board.rows])
    return html_table(table, marks=[f'class="{rank}"' for rank in ranks])
