"""Plans of decode loops: as a table, and in a sentence or two."""

from __future__ import annotations

from rich.text import Text

from avow.core import dtype_name
from avow.decode.plan import DecodePlan
from avow.report import formatting
from avow.report.terminal import Columns


def plan_table(plan: DecodePlan) -> Columns:
    """A step by each way with its memory, and below what the figures rest on."""
    z, sdpa = plan.sizes, plan.sdpa_seconds
    ways = {
        "exact": (plan.exact_seconds, plan.exact_bytes),
        "sparse": (plan.sparse_seconds, plan.sparse_bytes),
        "PyTorch's SDPA": (sdpa, plan.token_bytes),
    }
    rows = [
        [name, formatting.seconds(seconds), _beside(sdpa, seconds), formatting.memory(held)]
        for name, (seconds, held) in ways.items()
    ]
    shared = "" if z.heads == z.key_heads else f" on {z.key_heads} key heads"
    parts = [formatting.count(z.heads, "head") + shared, f"dimension {z.dim}", dtype_name(z.dtype), z.device]
    parts += [f"batch {z.batch}"] * (z.batch > 1) + [f"{z.queries} queries a step"] * (z.queries > 1)
    heading = f"a decoding step over {formatting.count(z.keys, 'token')}, one layer"
    title = Text.assemble((heading, "bold"), "\n", ", ".join(parts))
    styles = ["bold" if name == plan.chosen else "" for name in ways]
    headings = ("", "predicted", "of SDPA", "memory")
    return Columns("lrrr", headings, rows, title, _notes(plan), styles)


def _beside(sdpa: float | None, seconds: float | None) -> str:
    return formatting.NOTHING if sdpa is None or seconds is None else formatting.ratio(seconds / sdpa)


def _notes(plan: DecodePlan) -> list[str]:
    notes = []
    if plan.why_not_sparse:
        notes.append(f"sparse is not used: {plan.why_not_sparse}")
    else:
        advice = ": name it with --kept, or find it with --input or --kind" if plan.kept_source == "assumed" else ""
        notes.append(f"sparse: {plan.kept:.1%} of the tokens read, {plan.kept_source}{advice}")
    if plan.sketch_seconds is not None:
        paid = "" if plan.steps_to_pay is None else f", which {formatting.count(plan.steps_to_pay, 'step')} pay for"
        notes.append(f"the sketch takes {formatting.seconds(plan.sketch_seconds)} once{paid}")
    notes.append(
        f"if keys and values were in host memory, {formatting.memory(plan.offloaded_bytes)} would stay on the device "
        "(the sketch and lengths of values); that is not built yet"
    )
    notes.append("memory is that of the tokens; buffers without capacity= may have room for twice as many")
    if plan.sdpa_seconds is None:
        notes.append("SDPA was not measured")
    return [*notes, f"times: {plan.rates.source}"]


def verdict(plan: DecodePlan) -> list[str]:
    """The faster way, and where sparse decoding pays."""
    faster = ""
    if plan.chosen == "sparse":
        faster = f", {plan.exact_seconds / plan.seconds:.1f} times as fast as exact"
    if plan.sdpa_seconds is not None:
        faster += f", {plan.sdpa_seconds / plan.seconds:.1f} times as fast as SDPA"
    lines = [f"{plan.chosen}: {formatting.seconds(plan.seconds)} a step{faster}"]
    if plan.rates.sparse is None:
        return lines
    if plan.pays_from is None:
        return [*lines, f"sparse pays at no length if {plan.kept:.1%} of the tokens are read"]
    below = "" if plan.pays_below is None else f", and here if less than {plan.pays_below:.0%} are"
    return [*lines, f"sparse pays from {plan.pays_from:,} tokens on if {plan.kept:.1%} of them are read{below}"]
