"""`avow compare`: the error-cost frontier of every method on a workload."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import avow
from avow.bench.workloads import KINDS, Workload, workload
from avow.cli import options
from avow.cli.options import AsJson, Causal, Device, Dim, Heads, Input, Length, Png, Seed, Threads, option
from avow.core import Method, Sizes
from avow.errors import ParameterError
from avow.methods import method_named

Compared = options.command_with(lambda: options.kinds() | options.methods())


def compare(
    length: Length = None,
    heads: Heads = 1,
    dim: Dim = 64,
    kinds: Annotated[str, option("Kinds of heads to draw, separated by commas; see below.")] = ",".join(KINDS),
    methods: Annotated[str | None, option("Methods, separated by commas; default: all; see below.")] = None,
    settings: Annotated[
        list[str] | None,
        option("Compare a method at this setting only; may be repeated.", "--set", metavar="METHOD.NAME=VALUE"),
    ] = None,
    input: Input = None,
    causal: Causal = False,
    seed: Seed = 0,
    device: Device = "cpu",
    quick: Annotated[bool, option("Time each call once, and leave out the growth with length.", "--quick")] = False,
    patience: Annotated[float, option("Leave out what is expected to take more seconds a call.")] = 20.0,
    threads: Threads = 2,
    html: Annotated[Path | None, options.report_option("out/compare.html")] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Error against time for every method, as a table and a report."""
    from avow import file_io
    from avow.bench.clock import machine
    from avow.bench.compare import Bench, Comparison
    from avow.report import compare as report
    from avow.report.terminal import bold, progress

    device = options.place(device)
    if not patience > 0:
        raise ParameterError("patience", patience, "must be above 0", "try --patience 20")
    loads = options.workloads(kinds, input, length, heads, dim, seed, causal, device)
    names = options.split(methods) or list(avow.all_methods())
    fixed = _fixed(settings or [], names, [load.sizes for load in loads])
    for name in names:
        method_named(name)
    html = options.report_file(html, Path("out/compare.html"))
    written = options.files(html, png=png)
    bench = Bench(names, fixed, seed, 1 if quick else 5, patience)
    # The lengths of the sweep: around a drawn workload's own, up to that of a file.
    keys, shares = loads[0].k.shape[-2], (0.0625, 0.125, 0.25, 0.5, 1) if input else (0.25, 0.5, 1, 2, 4)
    lengths = [] if quick else sorted({max(1, int(keys * share)) for share in shares})
    steps = sum(len(list(bench.grid(name, load.sizes))) for load in loads for name in names)
    steps += len(loads) * bench.decodes + len(lengths) * len(names)

    def longest(load: Workload) -> Workload:
        """The same heads at the longest length of the sweep."""
        if input or not lengths:
            return load
        return workload(load.kind, heads, max(lengths), dim, seed, causal=causal).to(device)

    with options.use_threads(threads), progress(steps) as tell:
        boards = tuple(bench.board(load, tell, longest(load)) for load in loads)
        longer = longest(loads[-1])
        scaling = tuple(bench.scaling((longer.first(n) for n in lengths), tell))
        comparison = Comparison(boards, scaling, machine(device))
    headline = report.headline(comparison)
    if html:
        file_io.write(html, report.page(comparison, options.command()))
    if png:
        file_io.write(png, report.png(comparison))
    tables: list[Any] = []
    for board in boards:
        tables += [part for table in report.board_tables(board) for part in (table, "")]
        if board.decoding is not None and board.decoding.steps:
            tables += [report.decoding_table(board.decoding), ""]
    wrong = report.faults(comparison)
    parts, plain = (*tables, bold(headline)), {"headline": headline, "faults": wrong} | comparison.plain()
    options.present(as_json, plain, *parts, written=written, reported=html is not None, faults=wrong)


def _fixed(settings: list[str], names: list[str], sizes: list[Sizes]) -> dict[str, Method]:
    """The methods that `--set` pins to one setting."""
    given: dict[str, dict[str, Any]] = {}
    for text in settings:
        left, equals, value = text.partition("=")
        owner, dot, name = left.partition(".")
        if not (equals and dot and owner and name):
            raise ParameterError("set", repr(text), "must read METHOD.NAME=VALUE", "try --set low_rank.rank=32")
        declared = {p.name: p for p in method_named(owner).declared()}
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise ParameterError(f"{owner}: {name}", repr(value), "is not a parameter", f"known parameters: {known}")
        if owner not in names:
            raise ParameterError("set", repr(text), "sets a method that is not compared", f"add {owner} to --methods")
        given.setdefault(owner, {})[name] = declared[name].read(owner, value)
    fixed = {owner: method_named(owner)(**parameters) for owner, parameters in given.items()}
    for method, size in product(fixed.values(), sizes):
        method.check(size)
    return fixed
