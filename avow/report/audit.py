"""What watching a model's attention found: the page, and the table of layers for pages and terminals."""

from __future__ import annotations

import itertools

from avow.core.chart import Chart, Table
from avow.integrations.attention_audit import CACHE, AttentionAudit, LayerAudit
from avow.report.formatting import error


def audit_page(report: AttentionAudit, model: str, tokens: int, command: str, machine: str) -> str:
    """The report as a page; `command` is what made it, `machine` where."""
    from avow.report.charts import figure
    from avow.report.page import render

    layers = list(report.layers.values())
    return render(
        "audit.html",
        {"errors": figure(errors_chart(report))},
        title="avow audit",
        headline=report.verdict,
        report=report,
        table=audit_table(report),
        marks=[{"class": "alarm"} if layer.alarms else {} for layer in layers],
        worst=worst_table(report),
        model=model,
        tokens=tokens,
        command=command,
        machine=machine,
    )


def audit_table(report: AttentionAudit, short: bool = False) -> Table:
    """A row for each layer; if `short`, what is the same in the names of all layers stands in the title alone."""
    headings = (
        "layer",
        "computed by",
        "calls",
        "rows",
        "drawn",
        "largest\nerror",
        "of the\nanswer",
        "allowed",
        "alarms",
    )
    before, after = _shared(list(report.layers)) if short else ("", "")
    rows = [
        (
            _without(before, after, x.name),
            x.kernel,
            x.calls,
            x.rows,
            x.recomputed,
            error(x.error),
            error(x.relative),
            error(allowed(x)),
            x.alarms,
        )
        for x in report.layers.values()
    ]
    return Table(f"Layers {before}*{after}" if before + after else "Layers", headings, rows)


def _without(before: str, after: str, name: str) -> str:
    """The name of a layer or of its cache, without what all layers' names begin and end with."""
    layer = name.removesuffix(CACHE)
    return layer.removeprefix(before).removesuffix(after) + name[len(layer) :]


def _shared(names: list[str]) -> tuple[str, str]:
    """What the names of several layers begin and end with, in whole parts between dots, such as `model.layers.`."""
    layers = {name.removesuffix(CACHE) for name in names}
    before = "".join(f"{part}." for part in _same([name.split(".") for name in layers]))
    after = "".join(f".{part}" for part in reversed(_same([name.split(".")[::-1] for name in layers])))
    distinct = len(layers) > 1 and all(len(name) > len(before) + len(after) for name in layers)
    return (before, after) if distinct else ("", "")


def _same(rows: list[list[str]]) -> list[str]:
    """The entries with which all rows begin."""
    return [
        entries[0] for entries in itertools.takewhile(lambda entries: len(set(entries)) == 1, zip(*rows, strict=False))
    ]


def allowed(layer: LayerAudit) -> float | None:
    """What was allowed of the row whose error comes nearest to it."""
    return layer.worst[0].allowed if layer.worst else None


def worst_table(report: AttentionAudit) -> Table:
    """The rows with the largest errors beside what is allowed, of layers with an alarm; else of all."""
    some = [(layer.name, row) for layer in report.alarms or report.layers.values() for row in layer.worst]
    some.sort(key=lambda pair: -pair[1].error / max(pair[1].allowed, 1e-300))
    rows = [
        (name, row.call, list(row.place), error(row.error), error(row.relative), error(row.allowed))
        for name, row in some[:12]
    ]
    return Table("Worst rows", ("layer", "call", "sequence, head, row", "error", "of the answer", "allowed"), rows)


def errors_chart(report: AttentionAudit) -> Chart:
    """The largest error of each layer's answers and of its cache, and what was allowed."""
    layers = {name: layer for name, layer in report.layers.items() if layer.recomputed}
    place = {name: i for i, name in enumerate(dict.fromkeys(name.removesuffix(CACHE) for name in layers))}
    kinds: dict[str, list[LayerAudit]] = {"answers": [], "caches": []}
    for name, layer in layers.items():
        kinds["caches" if name.endswith(CACHE) else "answers"].append(layer)
    series = {
        name: ([place[x.name.removesuffix(CACHE)] for x in some], [x.error for x in some])
        for name, some in kinds.items()
        if some
    }
    answers = kinds["answers"]
    series["allowed of answers"] = [place[x.name] for x in answers], [x.worst[0].allowed for x in answers]
    return Chart("Largest errors", "layer", "relative to the longest value", series, log_y=True, marks="points")
