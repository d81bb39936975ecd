"""Comparisons and plans: the page, the picture file, the tables for a terminal, and the finding in a sentence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from avow.bench.compare import GOAL, SOFTMAX, Board, Comparison, Decoding, Measured, Point, Row, Step, frontier
from avow.core import Method
from avow.core.chart import Table
from avow.methods import method_named
from avow.planner import BOUND_UNIT, Plan
from avow.report import formatting
from avow.report.charts import Axis, Plot, Trace, figure, panels_png
from avow.report.style import FRONTIER, look
from avow.report.terminal import Columns

_HEADINGS = ("method", "time", "memory", "error", "bound", "of answer", "bound of answer", "to softmax", "promise")
_DECODING = ("tol", "answered by", "time", "error", "bound", "of answer", "bound of answer", "holds", "because")
_UNIT = "errors and bounds are relative to the longest value that a row sees"
_SHORT = {"deterministic": "always", "sampled": "sampled", "none": "none"}
_BUSY = "the machine was busy; times are not reliable"
_KEY = "filled: measured, open: proved, cross: the distance of another mechanism"


def headline(comparison: Comparison) -> str:
    """The finding in a sentence, after one for each bound that its own measurement refutes."""
    busy = f"{_BUSY[0].upper()}{_BUSY[1:]}: run it again when nothing else runs."
    return " ".join([*(f"{fault}." for fault in faults(comparison)), busy if comparison.busy else _finding(comparison)])


def faults(comparison: Comparison) -> list[str]:
    """A sentence for each bound that measured errors refute."""
    return [
        f"BROKEN: the bound of {name} on {board.kind} heads does not hold: an error of {m.error:.1e} was measured, and"
        f" {formatting.error(m.bound)} is promised{_likely(sure)}"
        for board in comparison.boards
        for name, m, sure in _promises(board)
        if m.broken
    ]


def _promises(board: Board) -> Iterator[tuple[str, Measured | Step, float]]:
    """What was measured of methods and of decoding steps: by whom, the numbers, how likely the bound holds."""
    for row, m in _measured(board):
        yield row.method.label, m, _probability(m)
    for step in board.decoding.steps if board.decoding else ():
        yield f"a decoding step at tolerance {step.tol:g}", step, step.confidence


def _probability(m: Measured) -> float:
    """The probability with which a bound holds."""
    return m.confidence if m.kind == "statistical" else 1.0


def _likely(probability: float) -> str:
    """The probability with which a bound holds, in words; empty if it is certain."""
    return f" with probability {probability:g}" if probability < 1 else ""


def _finding(comparison: Comparison) -> str:
    winners = {board.kind: board.winner for board in comparison.boards}
    without = [kind for kind, row in winners.items() if row is None]
    if len(without) == len(winners):
        keys = max(board.sizes.keys for board in comparison.boards)
        goal = f"and proves an error of {GOAL:g} of the longest value"
        none = "none of these methods is faster than exact attention"
        return f"At {keys:,} keys {none} {goal}{_instead(comparison)}."
    parts = []
    for kind, row in winners.items():
        if row is None or (m := row.measured) is None:
            continue
        answer = "" if m.relative_bound is None else f" ({m.relative_bound:.1e} of the answer)"
        parts.append(
            f"on {kind} heads {row.method.label} takes {m.ratio:.0%} of exact attention's time"
            f" and proves every row within {m.bound:.1e} of the longest value{answer}{_likely(_probability(m))}"
        )
    rest = f"; on {formatting.listed(without)} nothing faster than exact proves {GOAL:g}" if without else ""
    sentence = "; ".join(parts) + rest
    return sentence[0].upper() + sentence[1:] + "."


def boards_of_headline_first(comparison: Comparison) -> list[Board]:
    """The boards, those first that the headline names."""
    named = {board.kind for board in comparison.boards if board.winner is not None}
    if not named and (point := _fastest_at_length(comparison)):
        named = {point.kind}
    elif not named and (closest := _closest(comparison)):
        named = {closest.kind}
    return sorted(comparison.boards, key=lambda board: board.kind not in named)


def _longest(comparison: Comparison) -> list[Point]:
    """Points of softmax attention at the longest length of the sweep; a method whose bound was refuted has none."""
    length = max((point.length for point in comparison.scaling), default=0)
    broken = {row.method.name for board in comparison.boards for row in board.rows if row.broken}
    points = (point for point in comparison.scaling if point.length == length and point.method.target == SOFTMAX)
    return [point for point in points if point.method.name not in broken]


def _exact_seconds(points: list[Point]) -> float:
    return min((point.seconds for point in points if point.method.is_exact), default=0.0)


def _fastest_at_length(comparison: Comparison) -> Point | None:
    """What beats exact attention at the longest length of the sweep and proves the goal."""
    points = _longest(comparison)
    exact = _exact_seconds(points)
    faster = [point for point in points if point.seconds < exact and point.bound is not None and point.bound <= GOAL]
    return min(faster, key=lambda point: point.seconds, default=None)


class _Closest(NamedTuple):
    """What is faster than exact attention: its bound and its measured error, on a kind of heads."""

    bound: float
    error: float
    label: str
    kind: str


def _closest(comparison: Comparison) -> _Closest | None:
    """The smallest bound among what is faster than exact."""
    fast = [
        _Closest(m.bound, m.error, row.method.label, board.kind)
        for board in comparison.boards
        for row, m in _measured(board)
        if m.ratio < 1 and m.bound is not None and m.bound < 1
        if not row.own_mechanism and not row.method.is_exact and not row.broken
    ]
    return min(fast, default=None)


def _instead(comparison: Comparison) -> str:
    """What does win at a greater length, or else what comes closest."""
    if point := _fastest_at_length(comparison):
        share = point.seconds / _exact_seconds(_longest(comparison))
        what = f"{point.method.label} proves {point.bound:.1e} in {share:.0%} of the time"
        return f"; at {point.length:,} keys {what} on {point.kind} heads"
    if closest := _closest(comparison):
        numbers = f"{closest.bound:.1e} proved and {closest.error:.1e} measured"
        return f"; {closest.label} on {closest.kind} heads comes closest, with {numbers}"
    return ""


def _measured(board: Board) -> Iterator[tuple[Row, Measured]]:
    return ((row, row.measured) for row in board.rows if row.measured is not None)


def page(comparison: Comparison, command: str) -> str:
    """The report as a page; `command` is what made it."""
    from avow.report.page import render

    boards = boards_of_headline_first(comparison)
    figures = {f"frontier-{i}": figure(frontier_plot(board)) for i, board in enumerate(boards)}
    if comparison.scaling:
        figures["scaling-0"] = figure(_growth(comparison, "seconds", "seconds a call"))
        figures["scaling-1"] = figure(_growth(comparison, "peak_bytes", "memory, MiB", 2.0**-20))
    return render(
        "compare.html",
        figures,
        title="avow compare",
        headline=headline(comparison),
        boards=boards,
        machine=comparison.machine,
        # A win at the end of the sweep is seen in the figures of growth.
        growth_first=not any(board.winner for board in boards) and _fastest_at_length(comparison) is not None,
        rows_table=lambda board: Table("", _HEADINGS, [_cells(row) for row in board.rows]),
        marks=lambda board: [{"class": _rank(row)} for row in board.rows],
        steps_table=lambda decoding: Table("", _DECODING, [_step_cells(step) for step in decoding.steps]),
        step_marks=lambda decoding: [{"class": "broken" if step.broken else ""} for step in decoding.steps],
        command=command,
    )


def _rank(row: Row) -> str:
    if row.broken:
        return "broken"
    return "absent" if row.measured is None else "best" if row.frontier else "other"


def png(comparison: Comparison) -> bytes:
    """The frontiers as a picture file, one panel for each workload."""
    return panels_png([frontier_plot(board) for board in comparison.boards], headline(comparison), _KEY)


def frontier_plot(board: Board) -> Plot:
    """Time against error of every row that was measured."""
    points = [Setting(row.method, m.ratio, m.to_softmax, m.bound, _hover(row, m)) for row, m in _measured(board)]
    x = Axis("time relative to exact attention", log=True, format="×")
    return cost_plot(board.kind, x, Axis("error of the worst row", log=True), points)


class Setting(NamedTuple):
    """A method in a figure of cost against error: what it costs, its distance from softmax attention, its bound."""

    method: Method
    cost: float
    error: float
    bound: float | None
    hover: str


def cost_plot(title: str, x: Axis, y: Axis, settings: Sequence[Setting]) -> Plot:
    """Cost against error: a filled mark where a method was measured, an open one where its bound lies.

    Another mechanism is a cross: its answer has a distance from softmax attention, and no promise about it.
    """
    wins = frontier([(one.cost, one.error) for one in settings])
    best = sorted((one.cost, one.error) for one, won in zip(settings, wins, strict=True) if won)
    traces = [Trace("frontier", *_xy(best), "steps", FRONTIER, width=6, opacity=0.22, hover=None)]
    for name in dict.fromkeys(one.method.name for one in settings):
        own = [one for one in settings if one.method.name == name]
        measured, hover = _xy((one.cost, one.error) for one in own), [one.hover for one in own]
        labels = [_short_label(one.method) for one in own]
        if own[0].method.target != SOFTMAX:
            other = f"{name} (another mechanism)"
            traces.append(Trace(other, *measured, "crosses", look(name), size=10, hover=hover, labels=labels))
            continue
        # A bound of None is a gap in stems and marks alike.
        stems = _xy((one.cost, y) for one in own for y in (one.error, one.bound, None))
        bounds = _xy((one.cost, one.bound) for one in own)
        traces += [
            Trace(name, *stems, "line", look(name), width=1, legend=False, hover=None),
            Trace(name, *measured, "points", look(name), size=10, hover=hover, labels=labels),
            Trace(name, *bounds, "open points", look(name), size=10, legend=False, hover=hover),
        ]
    return Plot(title, x, y, traces, upright=1)


def _short_label(method: Method) -> str:
    """The settings of a method without its name, which the legend has."""
    return method.label.removeprefix(method.name).strip("()").replace("=", " ")


def _xy(points: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]


def _hover(row: Row, m: Measured) -> str:
    error, memory = formatting.error, formatting.memory(m.peak_bytes)
    lines = [row.method.label, f"{formatting.ratio(m.ratio)} of exact's time", f"{memory} at the peak"]
    if row.own_mechanism:
        return "\n".join([*lines, f"{error(m.to_softmax)} from softmax attention: it is another mechanism"])
    own = f"{error(m.relative_error)} measured, {error(m.relative_bound)} proved"
    promise = f"{error(m.error)} measured, {error(m.bound)} proved ({m.kind})"
    return "\n".join([*lines, promise, f"of the answer's length: {own}"])


def _growth(comparison: Comparison, field: str, title: str, unit: float = 1.0) -> Plot:
    """A field of every method's points against the number of keys."""
    traces = []
    for name in dict.fromkeys(point.method.name for point in comparison.scaling):
        points = [(p.length, getattr(p, field) * unit) for p in comparison.scaling if p.method.name == name]
        hover = [f"{name}, {length:,} keys: {y:.3g} {title}" for length, y in points]
        traces.append(Trace(name, *_xy(points), "line and points", look(name), hover=hover))
    lengths = sorted({point.length for point in comparison.scaling})
    return Plot("", Axis("keys", log=True, ticks=lengths), Axis(title, log=True), traces)


def board_tables(board: Board) -> Iterator[Columns]:
    """One workload's rows; what no other row beats is bold.

    Errors relative to the answer have a table of their own: a narrow terminal has no room for them beside the others.
    """
    title = Text.assemble((f"{board.kind}: {board.summary}", "bold"), f"\n{formatting.shape(board.sizes)}")
    missing = (((row.method.name, row.why), row.method.label) for row in board.rows if row.measured is None)
    notes = [f"{labels} not measured: {why}" for (_, why), labels in _said_once(missing)]
    own = {(row.method.name, row.method.target) for row in board.rows if row.own_mechanism}
    notes += [f"{name}: error and bound are those of {target}" for name, target in sorted(own)]
    if board.busy:
        notes.append(_BUSY)
    if broken := [row.method.label for row in board.rows if row.broken]:
        notes.append(f"BROKEN: measured errors of {formatting.listed(broken)} are beyond the bound; do not rely on it")
    rows, relative, styles = [], [], []
    for row, m in _measured(board):
        name, time, _, error, bound, *of_answer, softmax, _ = _cells(row)
        holds = "BROKEN" if m.broken else _SHORT.get(m.kind, f"{m.confidence:.4g}")
        rows.append([name, time, f"{m.peak_bytes / 2**20:.1f}", error, bound, softmax, holds])
        relative.append([name, *of_answer, holds])
        styles.append("red" if m.broken else "bold" if row.frontier else "")
    headings = ("method", "time", "MiB", "error", "bound", "to\nsoftmax", "holds")
    yield Columns("lrrrrrr", headings, rows, title, [_UNIT, *notes], styles)
    own_title = f"{board.kind}: errors relative to the length of the true answer"
    yield Columns("lrrr", ("method", "error", "bound", "holds"), relative, own_title, [], styles)


def decoding_table(decoding: Decoding) -> Columns:
    """Steps of decoding, one line a tolerance."""
    where = f": the last query against {formatting.count(decoding.keys, 'key')} in a cache"
    labelled = ((s.because, f"{s.tol:g}{f' at {s.confidence:g}' if s.confidence < 1 else ''}") for s in decoding.steps)
    notes = [f"{labels}: {why}" for why, labels in _said_once(labelled) if why]
    if any(step.broken for step in decoding.steps):
        notes.append("BROKEN: measured errors of these steps are beyond the bound; do not rely on it")
    rows = [_step_cells(step)[:-1] for step in decoding.steps]
    styles = ["red" if step.broken else "" for step in decoding.steps]
    return Columns("rrrrrrrr", _DECODING[:-1], rows, Text.assemble(("decoding", "bold"), where), notes, styles)


def _step_cells(step: Step) -> list[str]:
    """A step under `_DECODING`."""
    holds = "always" if step.confidence == 1 or method_named(step.method).is_exact else f"{step.confidence:g}"
    holds = "BROKEN" if step.broken else holds
    errors = (step.error, step.bound, step.relative_error, step.relative_bound)
    numbers = [formatting.ratio(step.ratio), *map(formatting.error, errors)]
    return [f"{step.tol:g}", step.method, *numbers, holds, step.because]


def _cells(row: Row) -> list[str]:
    """A row under `_HEADINGS`."""
    m = row.measured
    if m is None:
        return [row.method.label, *[formatting.NOTHING] * 7, row.why]
    errors = (m.error, m.bound, m.relative_error, m.relative_bound)
    numbers = [formatting.ratio(m.ratio), formatting.memory(m.peak_bytes), *map(formatting.error, errors)]
    promise = m.kind if m.kind != "statistical" else f"{m.kind}, {m.confidence:g}"
    promise = f"BROKEN ({promise}): an error beyond the bound was measured" if m.broken else promise
    if row.own_mechanism:
        return [row.method.label, *numbers, formatting.error(m.to_softmax), f"{promise}, of {row.method.target}"]
    return [row.method.label, *numbers, "", promise]


def plan_table(plan: Plan) -> Columns:
    """Candidates from the chosen one down, and below them why the others lost."""
    rows, styles, reasons = [], [], []
    for candidate in plan.ranked:
        chosen, label = candidate is plan.chosen, candidate.method.label
        bound = formatting.NOTHING if candidate.estimate is None else formatting.error(candidate.estimate.bound)
        price = formatting.seconds(candidate.seconds), formatting.memory(candidate.cost.peak_bytes)
        rows.append([f"{'→' if chosen else ' '} {label}", *price, bound])
        styles.append("bold" if chosen else "dim" if candidate.lost else "")
        why = candidate.lost or ("cheapest that meets the tolerance" if chosen else "also meets the tolerance, slower")
        reasons.append((why, label))
    notes = [f"{why}: {labels}" for why, labels in _said_once(reasons)]
    headings = ("  method", "predicted", "memory", "bound")
    return Columns("lrrr", headings, rows, f"plan for {plan.goal} ({plan.source})", [*notes, BOUND_UNIT], styles)


def _said_once(labelled: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """Each reason once, with the labels that share it."""
    shared: dict[Hashable, list[str]] = {}
    for reason, label in labelled:
        shared.setdefault(reason, []).append(label)
    return ((reason, formatting.listed(labels)) for reason, labels in shared.items())
