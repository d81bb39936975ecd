"""The frontier as a picture file: one panel for each workload, on a shared scale of error."""

from __future__ import annotations

import io
import itertools
import textwrap
from typing import Any, NamedTuple

from avow.report.compare import Board, Comparison
from avow.report.style import INK, SOFT, calm, look


def png(comparison: Comparison) -> bytes:
    """The picture, 1200 × 600."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    boards = comparison.boards
    figure = Figure(figsize=(12, 6), dpi=100, facecolor="white")
    panels = figure.subplots(1, len(boards), sharey=True, squeeze=False)[0]
    title = textwrap.wrap(comparison.headline, 104)
    top = 0.89 - 0.045 * len(title)
    figure.subplots_adjust(left=0.062, right=0.985, top=top, bottom=0.125, wspace=0.07)
    figure.text(0.012, 0.965, "\n".join(title), fontsize=14, weight="bold", color=INK, va="top", linespacing=1.25)
    for panel, board in zip(panels, boards, strict=True):
        _draw(panel, board)
    panels[0].set_ylabel("error of the worst row, sampled and proved", color=SOFT)
    figure.text(0.52, 0.025, "time relative to exact attention", color=SOFT, ha="center")
    figure.text(0.985, 0.025, _KEY, color=SOFT, ha="right", fontsize=9)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]  # fixes the scales that labels are placed by
    for panel, board in zip(panels, boards, strict=True):
        _label(panel, board)
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return held.getvalue()


_KEY = "● measured   ○ proved   × another mechanism: its distance"


def _draw(panel: Any, board: Board) -> None:
    panel.set(xscale="log", yscale="log")
    panel.set_title(board.kind, loc="left", fontsize=13, color=INK, pad=8)
    calm(panel)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    panel.xaxis.set_minor_formatter(lambda x, _: "")
    panel.axvline(1, color=SOFT, linewidth=1, linestyle=(0, (1, 2)))
    for row in board.rows:
        found = row.measured
        if found is None:
            continue
        colour, _, marker = look(row.method.name)
        if row.own_mechanism:
            panel.plot(found.ratio, found.to_softmax, "x", color=colour, markersize=8, markeredgewidth=2)
            continue
        if found.bound is not None:
            panel.plot([found.ratio] * 2, [found.error, found.bound], color=colour, linewidth=1, alpha=0.7)
            open_mark = {"markerfacecolor": "white", "markeredgewidth": 1.6}
            panel.plot(found.ratio, found.bound, marker, color=colour, markersize=7, **open_mark)
        panel.plot(found.ratio, found.error, marker, color=colour, markersize=7)
    low, high = panel.get_xlim()
    panel.set_xlim(min(low, 0.5) / 1.4, max(high, 2) * 1.4)


# Two names on one another cannot be read, a mark under a name can hardly be seen, and one far away is not found.
_NAMES, _MARKS, _FAR = 20.0, 3.0, 0.8
# How far above or below its mark a name may stand, in pixels.
_UP = (15, -15, 26, -26, 37, -37, 50, -50, 65, -65)


class _Box(NamedTuple):
    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: _Box) -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        tall = min(self.high, other.high) - max(self.low, other.low)
        return max(wide, 0.0) * max(tall, 0.0)


def _label(panel: Any, board: Board) -> None:
    """Each method's name beside one of its marks, where it covers least of what is drawn."""
    from matplotlib.patheffects import withStroke

    frame = _Box(*panel.get_window_extent().extents)
    marks, stems = _taken(panel, board)
    line = panel.transData.transform((1, 1))[0]
    stems.append(_Box(line - 1, frame.low, line + 1, frame.high))
    names: list[_Box] = []
    for name in dict.fromkeys(row.method.name for row in board.rows if row.measured is not None):
        text = panel.text(0, 0, name, fontsize=9.5, color=look(name).colour, transform=None, va="center")
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        size = text.get_window_extent()
        best, least = (0.0, 0.0), float("inf")
        for box in marks[name]:
            x, y = (box.left + box.right) / 2, (box.low + box.high) / 2
            for left, middle in (
                (x + 9, y),
                (x - 9 - size.width, y),
                *((x - size.width * share, y + up) for up in _UP for share in (0.5, 0.1, 0.9)),
            ):
                place = _Box(left, middle - size.height / 2, left + size.width, middle + size.height / 2)
                covered = _MARKS * sum(place.overlap(other) for boxes in marks.values() for other in boxes)
                covered += _FAR * abs(middle - y)
                covered += sum(place.overlap(other) for other in stems)
                covered += _NAMES * sum(place.overlap(other) for other in names)
                inside = place.overlap(frame) / (size.width * size.height)
                covered += 1e4 * (1 - inside)
                if covered < least:
                    best, least = (left, middle), covered
        text.set_position(best)
        names.append(_Box(best[0], best[1] - size.height / 2, best[0] + size.width, best[1] + size.height / 2))


def _taken(panel: Any, board: Board) -> tuple[dict[str, list[_Box]], list[_Box]]:
    """Where marks and the stems between them lie, in pixels."""
    marks: dict[str, list[_Box]] = {}
    stems = []
    for row in board.rows:
        found = row.measured
        if found is None:
            continue
        ends = [found.to_softmax] if row.own_mechanism or found.bound is None else [found.error, found.bound]
        places = [panel.transData.transform((found.ratio, y)) for y in ends]
        marks.setdefault(row.method.name, []).extend(_Box(x - 6, y - 6, x + 6, y + 6) for x, y in places)
        stems += [_Box(a[0] - 1, min(a[1], b[1]), a[0] + 1, max(a[1], b[1])) for a, b in itertools.pairwise(places)]
    return marks, stems
