"""Boards and plans as tables for a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from avow.planner import Plan
from avow.report import words
from avow.report.compare import Board, Row
from avow.report.decoding import Decoding, Step

HEADINGS = ("method", "time", "memory", "error", "bound", "to softmax", "promise")
DECODING_HEADINGS = ("tol", "answered by", "time", "error", "bound", "holds", "because")
_SHORT = {"deterministic": "always", "sampled": "sampled", "none": "none"}


def board_table(board: Board) -> Table:
    """One workload's rows; what no other row beats is bold."""
    z = board.sizes
    shape = f"{z.heads} heads × {z.queries:,} queries × {z.keys:,} keys × {z.dim}{', causal' if z.causal else ''}"
    title = Text.assemble((f"{board.kind}: {board.summary}", "bold"), f"\n{shape}")
    missing: dict[tuple[str, str], list[str]] = {}
    for row in board.rows:
        if row.measured is None:
            missing.setdefault((row.method.name, row.why), []).append(row.label)
    # What holds for several settings of a method is said once.
    notes = [f"{words.listed(labels)} not measured: {why}" for (_, why), labels in missing.items()]
    notes += sorted(
        {
            f"{row.method.name}: error and bound are those of {row.method.target}"
            for row in board.rows
            if row.own_mechanism
        }
    )
    table = Table(
        title=title, title_justify="left", title_style="", caption=Text("\n".join(notes)), caption_justify="left"
    )
    table.box, table.pad_edge = None, False
    table.add_column("method", no_wrap=True)
    for heading in ("time", "MiB", "error", "bound", "to\nsoftmax", "holds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in board.rows:
        if row.measured is not None:
            name, time, _, *errors, _ = cells(row)
            memory = f"{row.measured.peak_bytes / 2**20:.1f}"
            short = _SHORT.get(row.measured.kind, f"{row.measured.confidence:.4g}")
            table.add_row(*map(Text, [name, time, memory, *errors, short]), style="bold" if row.frontier else "")
    return table


def decoding_table(found: Decoding) -> Group:
    """Steps of decoding, one line a tolerance; what several have to say for themselves is said once."""
    title = Text.assemble(("decoding", "bold"), f": the last query against {found.keys:,} keys in a cache")
    reasons: dict[str, list[str]] = {}
    for step in found.steps:
        if step.because:
            sure = f" at {step.confidence:g}" if step.confidence < 1 else ""
            reasons.setdefault(step.because, []).append(f"{step.tol:g}{sure}")
    notes = [Text(f"{words.listed(labels)}: {why}") for why, labels in reasons.items()]
    table = Table(box=None, pad_edge=False)
    for heading in DECODING_HEADINGS[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    for step in found.steps:
        table.add_row(*map(Text, step_cells(step)[:-1]))
    return Group(title, table, *notes)


def step_cells(step: Step) -> list[str]:
    """What the page says of a step under `DECODING_HEADINGS`."""
    holds = "always" if step.confidence == 1 or step.method == "exact" else f"{step.confidence:g}"
    numbers = [words.ratio(step.ratio), words.error(step.error), words.error(step.bound)]
    return [f"{step.tol:g}", step.method, *numbers, holds, step.because]


def cells(row: Row) -> list[str]:
    """What the page says of a row under `HEADINGS`."""
    found = row.measured
    if found is None:
        return [row.label, *[words.NOTHING] * 5, row.why]
    numbers = [
        words.ratio(found.ratio),
        words.memory(found.peak_bytes),
        words.error(found.error),
        words.error(found.bound),
    ]
    promise = found.kind if found.kind != "statistical" else f"{found.kind}, {found.confidence:g}"
    if row.own_mechanism:
        return [row.label, *numbers, words.error(found.to_softmax), f"{promise}, of {row.method.target}"]
    return [row.label, *numbers, "", promise]


def plan_table(plan: Plan) -> Table:
    """Candidates from the chosen one down, each with the reason it lost."""
    wish = "no tolerance" if plan.tol is None else f"tolerance {plan.tol:g}"
    table = Table(title=f"plan for {wish} ({plan.source})", title_justify="left", title_style="bold", box=None)
    table.add_column("")
    table.add_column("method", no_wrap=True)
    for heading in ("predicted", "memory", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why")
    for candidate in plan.ranked:
        chosen = candidate is plan.chosen
        bound = words.NOTHING if candidate.prospect is None else words.error(candidate.prospect.bound)
        why = candidate.lost or ("cheapest that keeps its word" if chosen else "keeps its word, costs more")
        mark, style = ("→", "bold") if chosen else ("", "" if not candidate.lost else "dim")
        told = (
            words.label(candidate.method),
            words.seconds(candidate.seconds),
            words.memory(candidate.cost.peak_bytes),
            bound,
        )
        table.add_row(mark, *told, Text(why), style=style)
    return table
