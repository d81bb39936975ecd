"""Rates are fitted, kept whole or not at all, and easy to ignore; an attempt that failed is remembered for a while."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import avow
from avow import calibration, calibration_file
from avow.calibration import TYPICAL, Rate, Rates, fit, measure_rates, rates, rates_file
from avow.calibration_file import RETRY_SECONDS, forget_memory
from avow.core import Cost, Sizes
from avow.methods.exact import Exact

SOME = {name: Rate(1e-6, 1e-10, 1e-12) for name in avow.all_methods()}
BUSY = "the machine was too busy to be measured"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of one's own, calibration on, and a process that has read nothing yet."""
    monkeypatch.delenv("AVOW_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_memory()
    yield rates_file("cpu")
    forget_memory()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements that are made up and counted."""
    calls: list[str] = []

    def pretend(device: str = "cpu") -> dict[str, Rate]:
        calls.append(device)
        return SOME

    monkeypatch.setattr(calibration, "measure_rates", pretend)
    return calls


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since 1970, which only the test moves."""
    now = [calibration_file.time.time()]
    monkeypatch.setattr(calibration_file.time, "time", lambda: now[0])
    return now


COSTS = [Cost(10**6, 10**4, 12, 0), Cost(10**8, 10**5, 20, 0), Cost(10**9, 10**7, 16, 0), Cost(10**7, 10**8, 90, 0)]


@pytest.mark.parametrize(
    "planted",
    [Rate(5e-6, 4e-10, 8e-12), Rate(0.0, 1e-9, 2e-12), Rate(3e-6, 0.0, 0.0), Rate(0.0, 0.0, 7e-12)],
    ids=["all", "no launches", "launches only", "flops only"],
)
def test_planted_rates_are_recovered(planted: Rate) -> None:
    found = fit([(cost, planted.seconds(cost)) for cost in COSTS])
    for cost in COSTS:
        assert found.seconds(cost) == pytest.approx(planted.seconds(cost), rel=1e-6)
    assert (found.launch, found.pointwise, found.flop) == pytest.approx(
        (planted.launch, planted.pointwise, planted.flop), rel=1e-6, abs=1e-18
    )


def test_rates_are_never_negative_however_odd_the_runs() -> None:
    odd = fit([(COSTS[0], 1.0), (COSTS[1], 1e-3), (COSTS[2], 1e-6), (COSTS[3], 5e-2)])
    assert min(odd.launch, odd.pointwise, odd.flop) >= 0 and max(odd.launch, odd.pointwise, odd.flop) > 0


def test_noise_moves_predictions_no_further_than_itself() -> None:
    planted = Rate(5e-6, 4e-10, 8e-12)
    noise = (1.1, 0.9, 1.05, 0.95)
    found = fit([(cost, planted.seconds(cost) * n) for cost, n in zip(COSTS, noise, strict=True)])
    for cost in COSTS:
        assert found.seconds(cost) == pytest.approx(planted.seconds(cost), rel=0.15)


def test_off_means_typical_rates_and_no_file(
    cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    found = rates()
    assert found == Rates({}, "typical rates: AVOW_CALIBRATION=off")
    sizes = Sizes(1, 2, 2, 64, 64, 8, 8)
    assert found.seconds(Exact(), sizes) == TYPICAL.seconds(Exact().cost(sizes)) > 0
    assert measured == [] and list(tmp_path.iterdir()) == []


def test_the_first_call_measures_says_so_and_later_ones_read(cache: Path, measured: list[str]) -> None:
    said: list[str] = []
    assert rates("cpu", tell=said.append).source.startswith("measured on 2")
    assert said == ["measuring how fast this machine runs each method: about 2 s, at most 6 s, once"]
    for restart in (lambda: None, forget_memory):  # the same process, and the next
        restart()
        found = rates("cpu", tell=said.append)
        assert found.measured == SOME and found.source.startswith("measured on 2") and str(cache) in found.source
    assert measured == ["cpu"] and len(said) == 1


def test_a_process_reads_the_file_once(cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates("cpu")
    forget_memory()
    reads: list[Path] = []
    read = calibration_file.file_io.read_document

    def counted(path: Path) -> str:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(calibration_file.file_io, "read_document", counted)
    q = torch.randn(1, 1, 64, 8)
    for _ in range(3):
        avow.attend(q, q, q, tol=0.1)
    assert reads == [cache]
    forget_memory()
    cache.unlink()
    q = torch.randn(1, 1, 65, 8)  # a kind of problem of which nothing is known yet
    for _ in range(3):  # nor does it look again for a file that is not there
        avow.attend(q, q, q, tol=0.1)
    assert reads == [cache, cache]


def test_attend_never_measures(cache: Path, measured: list[str]) -> None:
    assert rates("cpu", measure=False) == Rates({}, "typical rates: nothing measured yet")
    assert measured == [] and not cache.exists()


def test_the_library_tells_a_log_and_prints_nothing(
    cache: Path, measured: list[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.randn(1, 1, 16, 8)
    with caplog.at_level("INFO", "avow.calibration"):
        avow.plan(q, q, q, tol=0.1)
    assert measured == ["cpu"] and [line.startswith("measuring how fast") for line in caplog.messages] == [True]
    assert capfd.readouterr() == ("", "")


def test_again_measures_whatever_is_known(cache: Path, measured: list[str]) -> None:
    rates("cpu")
    rates("cpu", again=True)
    assert measured == ["cpu", "cpu"]


def test_a_file_is_named_after_all_it_depends_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.name.startswith(f"rates-v{calibration.VERSION}-cpu-") and cache.name.endswith("threads.json")
    assert f"torch{torch.__version__.split('+')[0]}-" in cache.name
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    newer = rates_file("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({cache, newer, rates_file("cpu")}) == 3


def test_a_newer_version_measures_again(cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates("cpu")
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    rates("cpu")
    assert measured == ["cpu", "cpu"]


def test_rates_that_lack_a_method_are_measured_again(cache: Path, measured: list[str]) -> None:
    write(cache, {name: rate for name, rate in PLAIN.items() if name != "low_rank"})
    assert rates("cpu").measured == SOME
    assert measured == ["cpu"]


PLAIN: dict[str, Any] = {name: {"launch": 1e-6, "pointwise": 1e-10, "flop": 1e-12} for name in avow.all_methods()}


def write(path: Path, found: Any, date: str = "2026-01-01T00:00:00+00:00", fault: Any = "") -> None:
    """A file as a measurement leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": date, "fault": fault, "found": found}))


def test_a_file_as_it_is_written_is_read(cache: Path, measured: list[str]) -> None:
    write(cache, PLAIN)
    assert rates("cpu").measured == SOME and measured == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "3",
        "\x00\x01",
        "[" * 100_000,
        json.dumps(PLAIN),  # as an older version wrote it
        *(
            json.dumps({"date": "2026-01-01T00:00:00+00:00", "fault": "", "found": found})
            for found in (
                None,
                3,
                {"exact": 3},
                {"exact": {"launch": 1}},
                {"exact": {"launch": 1, "pointwise": 2, "flop": 3, "more": 4}},
                *(
                    {name: {"launch": odd, "pointwise": 1.0, "flop": 1.0} for name in PLAIN}
                    for odd in ("1", None, -1.0, math.nan, math.inf, 1e308, [], True)
                ),
            )
        ),
        *(json.dumps({"date": date, "fault": "", "found": PLAIN}) for date in (3, "", "yesterday", "2026-01-01")),
        *(json.dumps({"date": "2026-01-01T00:00:00+00:00", "fault": fault, "found": PLAIN}) for fault in (3, None)),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(text: str, cache: Path, measured: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert rates("cpu", measure=False).measured == {}
    assert rates("cpu").measured == SOME and measured == ["cpu"]
    assert set(json.loads(cache.read_text())["found"]) == set(SOME)


def test_a_file_of_bytes_that_are_no_text_is_ignored(cache: Path, measured: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xff\xfe\xfa")
    assert rates("cpu").measured == SOME


def test_a_file_appears_whole_or_not_at_all(cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates("cpu")
    before = cache.read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration_file.keep(cache, None, None, "failed")
    assert cache.read_text() == before
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "half-written files are left behind"


def test_a_home_that_cannot_be_written_is_said_and_costs_one_measurement_a_process(
    cache: Path, measured: list[str]
) -> None:
    cache.parent.parent.mkdir(parents=True, exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    first = rates("cpu")
    assert first.measured == SOME and f", not kept: {cache} has no folder" in first.source
    assert rates("cpu").measured == SOME and measured == ["cpu"]


PROCESS = """
import sys
from avow import calibration
from avow.calibration import Rate, rates
names = list(calibration.all_methods())
calibration.measure_rates = lambda device: {name: Rate(float(sys.argv[1]) / 1e9, 0.0, 0.0) for name in names}
for _ in range(20):
    found = rates("cpu", again=True).measured
    assert {rate.launch for rate in found.values()} == {float(sys.argv[1]) / 1e9}
"""


def test_processes_that_measure_at_the_same_time_leave_one_whole_file(cache: Path) -> None:
    # A file's name has the number of threads: the processes use as many as this one.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    running = [subprocess.Popen([sys.executable, "-c", PROCESS, str(i)], env=environment) for i in (1, 2, 3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    (one,) = {rate.launch for rate in rates("cpu", measure=False).measured.values()}
    assert one in (1e-9, 2e-9, 3e-9) and [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_machine_that_is_too_busy_is_left_alone_within_the_limit(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow(call: object, device: torch.device, repeats: int) -> float:
        now[0] += 1.0
        return 1.0

    monkeypatch.setattr(calibration.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(calibration, "least_seconds", slow)
    source = rates("cpu").source
    assert source.startswith(f"typical rates: {BUSY} (") and source.endswith("); tried again after an hour")
    assert now[0] == 7.0  # the limit, and the run in which it passed


def test_a_failure_is_remembered_for_an_hour_by_this_process_and_the_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    tries: list[str] = []
    monkeypatch.setattr(calibration, "measure_rates", lambda device: tries.append(device))
    rates("cpu")
    for wait, many in ((0.0, 1), (RETRY_SECONDS - 2, 1), (3.0, 2), (RETRY_SECONDS - 2, 2)):
        clock[0] += wait
        for restart in (lambda: None, forget_memory):
            restart()
            assert rates("cpu").measured == {}
        assert len(tries) == many
    assert rates("cpu", measure=False).source.startswith(f"typical rates: {BUSY} (")
    rates("cpu", again=True)
    assert len(tries) == 3


def test_a_failure_of_the_future_is_not_believed(cache: Path, measured: list[str], clock: list[float]) -> None:
    write(cache, None, "2990-01-01T00:00:00+00:00", BUSY)
    assert rates("cpu").measured == SOME and measured == ["cpu"]


def test_a_slow_method_is_measured_at_small_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first call of every process would wait for it, and the machine be taken for busy."""
    asked: list[tuple[str, int]] = []

    def clock(compute: Any, device: torch.device, repeats: int) -> float:
        method, keys = compute.func.__self__, compute.args[0].k.shape[-2]
        asked.append((method.name, keys))
        return 0.04 if method.name == "sparse" else 1e-4

    monkeypatch.setattr(calibration, "least_seconds", clock)
    monkeypatch.setattr(calibration, "_PATIENCE", math.inf)
    assert measure_rates("cpu") is not None
    assert {keys for name, keys in asked if name == "sparse"} == {64}
    assert {keys for name, keys in asked if name == "exact"} == {64, 256, 768, 1536}


def test_every_method_gets_rates_with_positive_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny problems in place of those that take a while: the fit is the same.
    def tiny(batch: int, heads: int, groups: int, n: int, s: int, d: int, e: int, *rest: object) -> Sizes:
        return Sizes(batch, heads, groups, max(n // 16, 32), max(s // 16, 32), d // 4, e // 4, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "Sizes", tiny)
    monkeypatch.setattr(calibration, "_PATIENCE", math.inf)
    found = Rates(measure_rates("cpu") or {}, "measured")
    for name, kind in avow.all_methods().items():
        assert {name, f"{name}/causal"} <= set(found.measured)
        for causal in (False, True):
            sizes = Sizes(1, 4, 4, 512, 512, 32, 32, causal=causal)
            assert all(found.seconds(method, sizes) > 0 for method in kind.grid(sizes))


def test_causal_forms_have_rates_of_their_own() -> None:
    known = Rates({"exact": Rate(0, 0, 1.0), "exact/causal": Rate(0, 0, 2.0)}, "made up")
    whole, causal = Sizes(1, 1, 1, 8, 8, 4, 4), Sizes(1, 1, 1, 8, 8, 4, 4, causal=True)
    assert known.seconds(Exact(), causal) == 2 * known.seconds(Exact(), whole) > 0


class Clock:
    """Says how long calls take by their order, and runs none of them."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def __call__(self, call: Callable[[], object]) -> float:
        return self.left.pop(0)


# Of bfloat16, float16 and float32, each plain and causal; of 32 launches, of writing, of a product.
H200 = (4e-4, 2e-4, 4e-4, 2e-4, 2e-3, 1e-3, 32 * 5e-6, 2**24 * 1e-12, 2 * 2048**3 * 2e-14)


def test_a_gpus_figures_are_those_that_a_few_calls_took(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_HEADS", 1), ("_LENGTH", 8), ("_NUMBERS", 2**24), ("_SIDE", 2048)):
        monkeypatch.setattr(calibration, name, value)
    found = calibration.roofline(torch.device("cpu"), Clock(*H200))
    assert (found.launch, found.write, found.product) == pytest.approx((5e-6, 1e-12, 2e-14))
    flops = 4 * 8 * 8 * 128
    assert found.exact[torch.bfloat16] == pytest.approx(4e-4 / flops)
    assert found.exact_causal[torch.float32] == pytest.approx(1e-3 / flops)


def roof() -> calibration.Roofline:
    exact = {torch.bfloat16: 2e-15, torch.float32: 2e-14}
    return calibration.Roofline({}, "made up", 5e-6, 1e-12, 2e-14, exact, {kind: x / 2 for kind, x in exact.items()})


def test_short_calls_take_as_long_as_their_launches_and_long_ones_as_their_work() -> None:
    def sizes(n: int, dtype: torch.dtype = torch.bfloat16, causal: bool = False) -> Sizes:
        return Sizes(1, 16, 16, n, n, 128, 128, dtype, "cuda", causal)

    known, long, short = roof(), sizes(65536), sizes(64)
    assert known.seconds(Exact(), short) == 2 * 5e-6
    assert known.seconds(Exact(), long) == pytest.approx(2e-15 * Exact().cost(long).flops)
    assert known.seconds(Exact(), sizes(65536, causal=True)) == pytest.approx(known.seconds(Exact(), long) / 2)
    assert known.seconds(Exact("float32"), long) == pytest.approx(10 * known.seconds(Exact(), long))
    linear = avow.all_methods()["polynomial"](1)
    assert known.seconds(linear, short) == 5e-6 * linear.cost(short).launches > known.seconds(Exact(), short)
    assert known.seconds(linear, long) == pytest.approx(5e-6 * linear.cost(long).launches), "tile by tile"


def test_a_gpu_is_measured_once_by_whoever_comes_first_and_never_during_a_capture(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    capturing = [True]
    monkeypatch.setattr(calibration, "rates_file", lambda device: cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(calibration, "roofline", lambda device, time: asked.append(str(device)) or roof())
    calibration._measured_roofline.cache_clear()
    assert rates("cuda", measure=False).source == "typical rates: nothing measured yet" and not asked
    capturing[0] = False
    assert rates("cuda", measure=False) == rates("cuda", measure=False) == roof() and asked == ["cuda"]
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    assert rates("cuda", measure=False).source == "typical rates: AVOW_CALIBRATION=off"
    assert rates("cuda", measure=False).seconds(Exact(), Sizes(1, 1, 1, 9, 9, 8, 8, device="cuda")) == 2 * 6e-6
    calibration._measured_roofline.cache_clear()
