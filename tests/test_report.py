"""Measurements measure, the frontier is the frontier, files are whole or absent, and the page needs nothing else."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor

import avow
from avow.bench.clock import pace, peak_bytes
from avow.bench.compare import (
    DECODING_TOLERANCES,
    Bench,
    Board,
    Comparison,
    Decoding,
    Measured,
    Point,
    Row,
    Step,
    audited,
    decoding,
    frontier,
    last_query,
)
from avow.bench.workloads import workload
from avow.core import Computed, Kind, Method, Problem, Promise, Sizes
from avow.methods import method_named
from avow.methods.exact import Exact
from avow.nn import KeyValueCache
from avow.report import formatting
from avow.report.charts import figure
from avow.report.compare import (
    board_tables,
    boards_of_headline_first,
    decoding_table,
    faults,
    frontier_plot,
    headline,
    page,
    png,
)
from avow.report.page import DOCUMENTATION
from avow.report.style import look
from avow.report.terminal import progress

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    bench = Bench(list(avow.all_methods()), {}, pairs=1)
    loads = [workload(kind, 2, 96, 16) for kind in ("copying", "clustered")]
    boards = tuple(bench.board(load, lambda step: None) for load in loads)
    return Comparison(
        boards, tuple(bench.scaling((loads[0].first(n) for n in (48, 96)), lambda step: None)), "a machine"
    )


def test_the_peak_is_what_is_held_at_once() -> None:
    mebi = 2**18  # float32 numbers in a MiB

    def together() -> None:
        a = torch.ones(4 * mebi)
        b = torch.ones(2 * mebi)
        del a, b

    def in_turn() -> None:
        a = torch.ones(4 * mebi)
        del a
        torch.ones(2 * mebi)

    assert peak_bytes(together, CPU) == pytest.approx(6 * 2**20, rel=0.01)
    assert peak_bytes(in_turn, CPU) == pytest.approx(4 * 2**20, rel=0.01)


def test_a_slower_call_has_a_larger_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def taking(seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += seconds

        return call

    # A clock of its own: on a busy machine nothing takes as long as it should.
    monkeypatch.setattr("avow.core.timing.time", SimpleNamespace(perf_counter=lambda: now))
    slow = pace(taking(0.02), taking(0.002), CPU, 3)
    assert slow.ratio == pytest.approx(10) and slow.seconds == pytest.approx(0.02)
    assert pace(taking(0.002), taking(0.02), CPU, 3).ratio == pytest.approx(0.1)


def test_the_measured_error_sees_a_wrong_row() -> None:
    w = workload("diffuse", 1, 32, 8)
    exact = method_named("exact")()
    out, _ = avow.attend(w.q, w.k, w.v)
    assert audited(out, w, exact, 0).bound < 1e-5 > audited(out, w, exact, 0).relative / 100
    out[0, 0, 17] += 1.0
    assert audited(out, w, exact, 0).relative > audited(out, w, exact, 0).bound > 0.1


def test_nothing_on_the_frontier_is_beaten_and_everything_off_it_is() -> None:
    points = [(1.0, 1e-7), (0.5, 1e-2), (0.7, 1e-1), (0.5, 1e-2), (2.0, 1e-7)]
    assert frontier(points) == [True, True, False, True, False]
    assert frontier([]) == []


def test_every_method_is_measured_on_every_workload(comparison: Comparison) -> None:
    for board in comparison.boards:
        assert {row.method.name for row in board.rows if row.measured is not None} == set(avow.all_methods())
        for row in board.rows:
            if row.measured is not None and row.measured.kind == "deterministic" and row.measured.bound is not None:
                assert row.measured.error <= row.measured.bound


def test_another_mechanism_is_judged_by_its_own_target_and_shown_by_its_distance(comparison: Comparison) -> None:
    copying = comparison.boards[0]
    (row,) = [row for row in copying.rows if row.method.name == "separable"]
    assert row.measured is not None and row.measured.error < 1e-3 < 0.1 < row.measured.to_softmax
    (trace,) = [t for t in figure(frontier_plot(copying))["traces"] if "separable" in t["name"]]
    assert trace["y"] == [row.measured.to_softmax]
    assert not row.proves(1e-2)


def test_another_temperature_is_another_target() -> None:
    w = workload("clustered", 1, 64, 8)
    warm = method_named("separable")(temperature=2.0)
    row = Bench(["separable"], {"separable": warm}, pairs=1).board(w, lambda step: None).rows[0]
    assert row.measured is not None and row.measured.error < 1e-3
    out, _ = avow.attend(w.q, w.k, w.v, method="separable")
    assert audited(out, w, warm, 0).bound > row.measured.error


def test_what_would_take_too_long_is_named_not_run() -> None:
    board = Bench(["exact"], {}, patience=0.0).board(workload("diffuse", 1, 16, 8), lambda step: None)
    assert all(row.measured is None and "raise --patience" in row.why for row in board.rows)


def test_what_is_far_slower_than_exact_waits_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.bench.compare._SOON", 0.0)
    monkeypatch.setattr("avow.bench.compare._FAR", 1e-9)
    work = workload("diffuse", 1, 16, 8)
    (row,) = Bench(["separable"], {}).board(work, lambda step: None).rows
    assert row.measured is None
    text = r"expected to take \d+ times as long as exact attention of all queries; --set one of its settings to wait"
    assert re.fullmatch(text, row.why)
    (asked,) = Bench(["separable"], {"separable": method_named("separable")()}).board(work, lambda step: None).rows
    assert asked.measured is not None


class Noisy(Exact):
    """Exact attention plus an error in some rows, with a promise of its own."""

    # One of so many rows is wrong.
    every: ClassVar[int] = 1
    kind: ClassVar[Kind] = "deterministic"

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        computed = super().compute(problem, generator)
        wrong = torch.arange(problem.q.shape[-2]) % self.every == self.every - 1
        return dataclasses.replace(computed, out=computed.out + 0.5 * wrong[:, None])

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        return Promise(self.kind, super().promise(problem, computed, confidence).rows, confidence)


class Often(Noisy):
    kind = "statistical"


class Seldom(Noisy):
    kind, every = "statistical", 150


class Once(Noisy):
    every = 150


class Silent(Noisy):
    kind = "none"


@pytest.mark.parametrize(
    ("method", "broken"), [(Exact, False), (Noisy, True), (Once, True), (Often, True), (Seldom, False), (Silent, False)]
)
def test_a_bound_that_measured_errors_refute_is_broken(method: type[Method], broken: bool) -> None:
    own = method()
    made = Bench(["exact"], {"exact": own}, pairs=1).board(workload("diffuse", 1, 300, 8), lambda step: None)
    (row,) = made.rows
    assert row.broken is broken and row.plain()["broken"] is broken
    assert row.proves(1e-2) is (not broken and method is not Silent)
    comparison = Comparison((made,), (), "a machine")
    console = Console(width=120, file=io.StringIO())
    console.print(*board_tables(made))
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), page(comparison, "avow compare"), headline(comparison)):
        assert ("BROKEN" in text) is broken
    assert bool(faults(comparison)) is broken
    if broken:
        words = "BROKEN: the bound of exact(precision=native) on diffuse heads does not hold: an error of"
        assert headline(comparison).startswith(words)


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_decoding_step_whose_error_refutes_its_bound_is_broken(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KeyValueCache.attend

    def attend(cache: KeyValueCache, q: Tensor, *arguments: Any, **options: Any) -> Any:
        answer = honest(cache, q, *arguments, **options)
        return answer._replace(out=answer.out + off)

    monkeypatch.setattr(KeyValueCache, "attend", attend)
    made = Bench(["sparse"], {}, pairs=1).board(workload("copying", 1, 300, 8), lambda step: None)
    assert made.decoding is not None and len(made.decoding.steps) == 4
    assert [step.broken for step in made.decoding.steps] == [off > 0] * 4
    comparison = Comparison((made,), (), "a machine")
    console = Console(width=120, file=io.StringIO())
    console.print(decoding_table(made.decoding))
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), page(comparison, "avow compare"), headline(comparison)):
        assert ("BROKEN" in text) is (off > 0)
    said = faults(comparison)
    assert len(said) == 4 * (off > 0)
    assert all("the bound of a decoding step at tolerance" in one for one in said)
    assert [one.endswith("with probability 0.999") for one in said] == [False, False, False, True][: len(said)]


def test_a_bound_in_float64_is_not_broken_by_the_rounding_of_the_measurement() -> None:
    load = workload("copying", 2, 200, 8, dtype=torch.float64)
    for row in Bench(["exact", "latent", "separable"], {}, pairs=1).board(load, lambda step: None).rows:
        assert row.measured is not None and not row.broken, row.method.label


def test_no_win_is_told_of_a_method_whose_bound_is_broken() -> None:
    good = board("clustered", 0.25, 2e-3)
    exact, winner = good.rows
    assert winner.measured is not None
    bad = dataclasses.replace(winner, measured=dataclasses.replace(winner.measured, broken=True))
    points = (swept("exact", 1.0, 1e-5), swept("low_rank", 0.5, 2e-3))
    said = headline(Comparison((dataclasses.replace(good, rows=(exact, bad)),), points, ""))
    assert said.startswith("BROKEN") and "% of" not in said and "closest" not in said


def board(kind: str, ratio: float, bound: float, promise: str = "deterministic") -> Board:
    """Exact attention and one low-rank row with chosen numbers."""

    def row(name: str, ratio: float, bound: float, promise: str) -> Row:
        return Row(method_named(name)(), Measured(1.0, ratio, 1, 1e-6, 1e-6, promise, 0.99, bound, 1e-5, 0.02))

    sizes = Sizes(1, 1, 1, 2048, 2048, 8, 8)
    return Board(kind, "", sizes, (row("exact", 1.0, 1e-5, "deterministic"), row("low_rank", ratio, bound, promise)))


def test_the_headline_names_the_winner_and_where_there_is_none() -> None:
    made = Comparison((board("diffuse", 0.25, 2e-3), board("copying", 0.25, 2.0)), (), "")
    assert headline(made) == (
        "On diffuse heads low_rank(rank=64) takes 25% of exact attention's time and proves every row within"
        " 2.0e-03 of the longest value (2.0e-02 of the answer);"
        " on copying nothing faster than exact proves 0.01."
    )


def test_a_statistical_winner_is_said_to_be_one() -> None:
    assert "(2.0e-02 of the answer) with probability 0.99" in headline(
        Comparison((board("diffuse", 0.5, 2e-3, "statistical"),), (), "")
    )


def test_no_time_is_a_finding_if_the_machine_was_busy() -> None:
    busy = dataclasses.replace(board("diffuse", 0.09, 2e-3), busy=True)
    made = Comparison((board("copying", 0.25, 2e-3), busy), (), "")
    assert headline(made) == "The machine was busy; times are not reliable: run it again when nothing else runs."
    assert "The machine was busy; times are not reliable." in page(made, "avow compare")
    console = Console(width=120, file=io.StringIO())
    console.print(*board_tables(busy))
    assert isinstance(console.file, io.StringIO) and "the machine was busy; times are" in console.file.getvalue()
    assert busy.plain()["busy"] is True and board("diffuse", 1.0, 1.0).plain()["busy"] is False


@pytest.mark.parametrize(("used", "waited"), [(1.0, False), (0.5, True)])
def test_a_call_that_waits_for_a_cpu_is_noticed(monkeypatch: pytest.MonkeyPatch, used: float, waited: bool) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.01

    monkeypatch.setattr("avow.core.timing.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr("avow.bench.clock.time", SimpleNamespace(process_time=lambda: used * now))
    measured = pace(call, call, CPU, 3)
    assert measured.waited is waited and measured.baseline == pytest.approx(0.01)


@pytest.mark.parametrize(("ratio", "bound"), [(1.5, 2e-3), (0.5, 0.2)])
def test_a_headline_never_claims_what_was_slower_or_unproved(ratio: float, bound: float) -> None:
    assert headline(Comparison((board("diffuse", ratio, bound),), (), "")).startswith(
        "At 2,048 keys none of these methods is faster than exact attention and proves an error of 0.01 of the longest"
    )


def swept(name: str, seconds: float, bound: float | None) -> Point:
    return Point("clustered", method_named(name)(), 8192, seconds, 1, bound)


def test_a_win_that_comes_with_length_is_told_with_its_length() -> None:
    boards = (board("clustered", 1.3, 2e-3),)
    made = Comparison(boards, (swept("exact", 1.0, 1e-5), swept("low_rank", 0.5, 2e-3)), "")
    assert headline(made).endswith(
        "; at 8,192 keys low_rank(rank=64) proves 2.0e-03 in 50% of the time on clustered heads."
    )


@pytest.mark.parametrize("other", [("low_rank", 1.5, 2e-3), ("low_rank", 0.5, 0.2), ("separable", 0.1, 1e-5)])
def test_no_win_is_told_that_is_slow_or_unproved_or_of_another_mechanism(other: tuple[str, float, float]) -> None:
    made = Comparison((board("clustered", 1.3, 2e-3),), (swept("exact", 1.0, 1e-5), swept(*other)), "")
    assert "at 8,192 keys" not in headline(made)


def test_what_the_headline_names_comes_first() -> None:
    won = Comparison((board("copying", 0.25, 2.0), board("diffuse", 0.25, 2e-3)), (), "")
    assert [one.kind for one in boards_of_headline_first(won)] == ["diffuse", "copying"]
    closest = Comparison((board("copying", 1.3, 0.5), board("diffuse", 0.5, 0.2)), (), "")
    assert "on diffuse heads comes closest" in headline(closest)
    assert [one.kind for one in boards_of_headline_first(closest)] == ["diffuse", "copying"]
    none = Comparison((board("copying", 1.3, 0.5), board("diffuse", 1.5, 0.2)), (), "")
    assert [one.kind for one in boards_of_headline_first(none)] == ["copying", "diffuse"]


def test_a_win_at_a_greater_length_puts_the_growth_first() -> None:
    boards = (board("diffuse", 1.3, 2e-3), board("clustered", 1.3, 2e-3))
    swept_points = (swept("exact", 1.0, 1e-5), swept("low_rank", 0.5, 2e-3))
    html = page(Comparison(boards, swept_points, "a machine"), "avow compare")
    assert html.index('id="scaling-0"') < html.index('id="frontier-0"')
    assert [one.kind for one in boards_of_headline_first(Comparison(boards, swept_points, ""))] == [
        "clustered",
        "diffuse",
    ]
    html = page(Comparison((board("diffuse", 0.3, 2e-3),), swept_points, "a machine"), "avow compare")
    assert html.index('id="scaling-0"') > html.index('id="frontier-0"')


def test_points_are_labelled_by_their_settings(comparison: Comparison) -> None:
    traces = [one for one in figure(frontier_plot(comparison.boards[0]))["traces"] if one["name"] == "low_rank"]
    assert [one.get("labels") for one in traces] == [None, ["rank 16", "rank 64", "rank 96"], None]


def outside(html: str) -> list[str]:
    """Everything a page would fetch from elsewhere."""
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"""(?:src|href)\s*=(?!\s*["']?data:)""", tag)]


def test_the_page_needs_nothing_else(comparison: Comparison) -> None:
    html = page(comparison, "avow compare")
    own = re.sub(r"<script\b.*?</script>", "", html, flags=re.DOTALL)
    assert outside(html) == [] and re.findall(r"https?://[^\"' ]*", own) == [DOCUMENTATION]
    assert '<link rel="icon" href="data:,">' in own, "a browser would ask the server for /favicon.ico"
    for row in comparison.boards[0].rows:
        assert row.method.label in html


@pytest.mark.parametrize(
    "tag", ['<script src="https://cdn.example/x.js">', "<link href=//example.org/a.css>", "<img src=a.png>"]
)
def test_a_page_that_fetches_would_be_caught(tag: str) -> None:
    assert outside(f"<p>{tag}</p>") == [tag]


def test_no_text_can_end_the_pages_data_early(comparison: Comparison) -> None:
    evil = Board("</script><b>", "<i>&", comparison.boards[0].sizes, comparison.boards[0].rows)
    html = page(Comparison((evil,), (), "<u>"), "avow --kinds '<s>'")
    assert "<b>" not in html.split("<script>")[0].split('id="figures"')[0]
    figures = re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert figures is not None and set(json.loads(figures[1])) == {"frontier-0"}


def test_the_picture_is_a_png_of_the_stated_size(comparison: Comparison) -> None:
    data = png(comparison)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1200, 600)


def test_every_method_has_a_look_of_its_own() -> None:
    looks = [look(name) for name in avow.all_methods()]
    assert len(set(looks)) == len(looks)


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as tell:
        tell("one")
        tell("two")
    shown = capsys.readouterr()
    assert shown.err == "[1/2] one\n[2/2] two\n" and shown.out == ""


def test_the_time_left_is_that_of_the_steps_that_are_alike(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Begun at 0; the steps begin at 0, 100, 110 and 120 seconds: the first is unlike the others.
    clock = iter([0.0, 100.0, 110.0, 120.0])
    monkeypatch.setattr("avow.report.terminal.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress(4, alike=1) as tell:
        for step in ("load", "a", "b", "c"):
            tell(step)
    assert capsys.readouterr().err == "[1/4] load\n[2/4] a\n[3/4] b · 0:20 left\n[4/4] c · 0:10 left\n"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (formatting.error(None), "–"),
        (formatting.error(1.23e-4), "1.2e-04"),
        (formatting.ratio(0.256), "0.26×"),
        (formatting.ratio(12.4), "12×"),
        (formatting.seconds(0.0123), "12.3 ms"),
        (formatting.memory(3 * 2**20), "3.0 MiB"),
        (formatting.listed(["a"]), "a"),
        (
            method_named("random_features")(orthogonal=False).label,
            "random_features(features=256, orthogonal=False)",
        ),
    ],
)
def test_numbers_read_as_people_say_them(said: str, meant: str) -> None:
    assert said == meant


def test_decoding_is_measured_from_a_cache_and_says_how_it_answered() -> None:
    found = decoding(workload("copying", 2, 4200, 16), 0, 1)
    assert found.keys == 4200 and [(step.tol, step.confidence) for step in found.steps] == list(DECODING_TOLERANCES)
    for step in found.steps:
        assert step.error <= step.bound <= step.tol and step.ratio > 0
        assert step.method == "sparse" and re.match(r"read \d+\.\d% of the tokens in full", step.because)
    flat = decoding(workload("diffuse", 1, 4200, 16), 0, 1).steps[2]
    assert float(flat.because.split()[1].rstrip("%")) > 90, "a flat head has nothing to leave out"


def test_the_last_query_sees_what_it_saw() -> None:
    w = workload("copying", 1, 50, 8, causal=True)
    places = dataclasses.replace(w, q=w.q[..., 10:20, :], positions=torch.arange(10, 20))
    assert last_query(w).k.shape[-2] == 50
    assert last_query(places).k.shape[-2] == 20 and torch.equal(last_query(places).q[0, :, 0], w.q[0, :, 19])
    assert last_query(dataclasses.replace(places, causal=False)).k.shape[-2] == 50
    assert last_query(dataclasses.replace(w, q=w.q[..., :7, :])).k.shape[-2] == 7


def test_a_tolerance_that_the_type_cannot_say_is_left_out() -> None:
    w = workload("copying", 1, 70, 8, dtype=torch.bfloat16)
    assert {step.tol for step in decoding(w, 0, 1).steps} == {1e-1, 1e-2}


def test_only_who_compares_sparse_sees_decoding() -> None:
    w = workload("diffuse", 1, 70, 8)
    alone = Bench(["exact"], {}, pairs=1).board(w, lambda step: None)
    assert alone.decoding is None and alone.plain()["decoding"] is None
    assert "Decoding" not in page(Comparison((alone,), (), ""), "")
    longer = Bench(["sparse"], {}, pairs=1).board(w, lambda step: None, workload("diffuse", 1, 90, 8))
    assert longer.decoding is not None and longer.decoding.keys == 90
    html = page(Comparison((longer,), (), "a machine"), "")
    assert "Decoding on a machine: the last query against 90 keys" in html and "of the tokens in full" in html
    single = dataclasses.replace(longer, decoding=dataclasses.replace(longer.decoding, keys=1))
    assert "the last query against 1 key that" in page(Comparison((single,), (), ""), "")


def test_what_several_steps_say_is_said_once() -> None:
    def step(tol: float, confidence: float, method: str, because: str) -> Step:
        return Step(tol, confidence, 1e-3, 0.5, 1e-6, 1e-3, method, because, 1e-5, 0.02)

    steps = (step(0.1, 1, "sparse", "all"), step(0.01, 0.999, "sparse", "all"), step(0.01, 0.999, "exact", ""))
    console = Console(width=80, file=io.StringIO())
    console.print(decoding_table(Decoding(4096, steps)))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].strip() == "decoding: the last query against 4,096 keys in a cache"
    assert lines[-1].strip() == "0.1 and 0.01 at 0.999: all"
    assert [line.split()[-1] for line in lines[2:5]] == ["always", "0.999", "always"]
