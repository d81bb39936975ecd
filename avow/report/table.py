"""Boards and plans as tables for a terminal."""

from __future__ import annotations

from rich.text import Text

from avow.planner import BOUND_UNIT, Plan
from avow.report import formatting
from avow.report.compare import Board, Measured, Row
from avow.report.decoding import Decoding, Step
from avow.report.terminal import Columns

HEADINGS = ("method", "time", "memory", "error", "bound", "of answer", "bound of answer", "to softmax", "promise")
DECODING_HEADINGS = ("tol", "answered by", "time", "error", "bound", "of answer", "bound of answer", "holds", "because")
UNIT = "errors and bounds are relative to the longest value that a row sees"
_SHORT = {"deterministic": "always", "sampled": "sampled", "none": "none"}


def board_table(board: Board) -> Columns:
    """One workload's rows; what no other row beats is bold."""
    title = Text.assemble((f"{board.kind}: {board.summary}", "bold"), f"\n{formatting.shape(board.sizes)}")
    missing: dict[tuple[str, str], list[str]] = {}
    for row in board.rows:
        if row.measured is None:
            missing.setdefault((row.method.name, row.why), []).append(row.label)
    # What holds for several settings of a method is said once.
    notes = [f"{formatting.listed(labels)} not measured: {why}" for (_, why), labels in missing.items()]
    notes += sorted(
        {
            f"{row.method.name}: error and bound are those of {row.method.target}"
            for row in board.rows
            if row.own_mechanism
        }
    )
    rows, styles = [], []
    for row in board.rows:
        if row.measured is not None:
            name, time, _, error, bound, _, _, softmax, _ = cells(row)
            memory = f"{row.measured.peak_bytes / 2**20:.1f}"
            rows.append([name, time, memory, error, bound, softmax, _holds(row.measured)])
            styles.append("bold" if row.frontier else "")
    headings = ("method", "time", "MiB", "error", "bound", "to\nsoftmax", "holds")
    return Columns("lrrrrrr", headings, rows, title, [UNIT, *notes], styles)


def relative_table(board: Board) -> Columns:
    """The same rows' errors relative to the answer: they have no room beside the others in a narrow terminal."""
    found = [(row, row.measured) for row in board.rows if row.measured is not None]
    rows = [[*cells(row)[:1], *cells(row)[5:7], _holds(measured)] for row, measured in found]
    styles = ["bold" if row.frontier else "" for row, _ in found]
    title = Text.assemble((f"{board.kind}: errors relative to the length of the true answer", "bold"))
    return Columns("lrrr", ("method", "error", "bound", "holds"), rows, title, [], styles)


def _holds(found: Measured) -> str:
    return _SHORT.get(found.kind, f"{found.confidence:.4g}")


def decoding_table(found: Decoding) -> Columns:
    """Steps of decoding, one line a tolerance; what several have to say for themselves is said once."""
    title = Text.assemble(
        ("decoding", "bold"), f": the last query against {formatting.count(found.keys, 'key')} in a cache"
    )
    reasons: dict[str, list[str]] = {}
    for step in found.steps:
        if step.because:
            sure = f" at {step.confidence:g}" if step.confidence < 1 else ""
            reasons.setdefault(step.because, []).append(f"{step.tol:g}{sure}")
    notes = [f"{formatting.listed(labels)}: {why}" for why, labels in reasons.items()]
    rows = [step_cells(step)[:-1] for step in found.steps]
    return Columns("rrrrrrrr", DECODING_HEADINGS[:-1], rows, title, notes)


def step_cells(step: Step) -> list[str]:
    """What the page says of a step under `DECODING_HEADINGS`."""
    holds = "always" if step.confidence == 1 or step.method == "exact" else f"{step.confidence:g}"
    errors = (step.error, step.bound, step.relative_error, step.relative_bound)
    numbers = [formatting.ratio(step.ratio), *map(formatting.error, errors)]
    return [f"{step.tol:g}", step.method, *numbers, holds, step.because]


def cells(row: Row) -> list[str]:
    """What the page says of a row under `HEADINGS`."""
    found = row.measured
    if found is None:
        return [row.label, *[formatting.NOTHING] * 7, row.why]
    errors = (found.error, found.bound, found.relative_error, found.relative_bound)
    numbers = [formatting.ratio(found.ratio), formatting.memory(found.peak_bytes), *map(formatting.error, errors)]
    promise = found.kind if found.kind != "statistical" else f"{found.kind}, {found.confidence:g}"
    if row.own_mechanism:
        return [row.label, *numbers, formatting.error(found.to_softmax), f"{promise}, of {row.method.target}"]
    return [row.label, *numbers, "", promise]


def plan_table(plan: Plan) -> Columns:
    """Candidates from the chosen one down, and below them why the others lost; a reason that several share once."""
    rows, styles = [], []
    reasons: dict[str, list[str]] = {}
    for candidate in plan.ranked:
        chosen = candidate is plan.chosen
        label = formatting.label(candidate.method)
        bound = formatting.NOTHING if candidate.prospect is None else formatting.error(candidate.prospect.bound)
        price = formatting.seconds(candidate.seconds), formatting.memory(candidate.cost.peak_bytes)
        rows.append([f"{'→' if chosen else ' '} {label}", *price, bound])
        styles.append("bold" if chosen else "dim" if candidate.lost else "")
        why = candidate.lost or ("cheapest that keeps its word" if chosen else "keeps its word, costs more")
        reasons.setdefault(why, []).append(label)
    notes = [f"{why}: {formatting.listed(labels)}" for why, labels in reasons.items()]
    headings = ("  method", "predicted", "memory", "bound")
    return Columns("lrrr", headings, rows, f"plan for {plan.asked} ({plan.source})", [*notes, BOUND_UNIT], styles)
