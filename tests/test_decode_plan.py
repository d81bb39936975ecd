"""Plans of decode loops: prices follow measured steps, bytes are those of a cache, figures say what they rest on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow import calibration_file
from avow.attend import Attended
from avow.calibration_file import RETRY_SECONDS, forget_memory
from avow.core import Sizes
from avow.decode import cpu
from avow.decode import plan as decode_plan
from avow.decode import step_rates as decode_rates
from avow.decode.plan import DecodePlan, plan_decode, share_of_heads
from avow.decode.step_rates import (
    Curve,
    StepRates,
    StepTimer,
    TooBusy,
    measure_steps,
    rates_file,
    share_read,
    shortest,
    step_rates,
    typical,
)
from avow.errors import AvowError
from avow.nn import KeyValueCache

SIZES = Sizes(1, 4, 2, 1, 0, 16, 16)
# Seconds per million tokens: exact 10, looking 1, reading 20.
RATES = StepRates(
    Curve.line(1e-4, 1e-5), Curve.line(3e-4, 1e-6), Curve.line(0.0, 2e-5), 4e-6, Curve.line(2e-4, 4e-5), "", "made up"
)


def planned(tokens: int = 100_000, kept: float = 0.1, rates: StepRates = RATES) -> DecodePlan:
    return DecodePlan(dataclasses.replace(SIZES, keys=tokens), kept, rates, 1000, 10, 100)


def test_a_step_costs_what_its_lines_say() -> None:
    plan = planned()
    assert plan.exact_seconds == pytest.approx(1e-4 + 1.0)
    assert plan.sparse_seconds == pytest.approx(3e-4 + 0.1 + 0.1 * 2.0)
    assert plan.sdpa_seconds == pytest.approx(2e-4 + 4.0)
    assert plan.sketch_seconds == pytest.approx(0.4)
    assert plan.chosen == "sparse" and plan.seconds == plan.sparse_seconds
    assert plan.steps_to_pay == 1 and planned(kept=0.44).steps_to_pay == 21


def test_sparse_pays_where_the_lines_cross() -> None:
    plan = planned()
    assert plan.pays_from == shortest("cpu") == cpu.SHORTEST
    near = planned(rates=dataclasses.replace(RATES, sparse=Curve.line(0.5, 1e-6)))
    assert near.pays_from == math.ceil((0.5 - 1e-4) / (1e-5 - 1e-6 - 0.1 * 2e-5))
    assert near.pays_from is not None
    for tokens, chosen in ((near.pays_from - 2, "exact"), (near.pays_from + 2, "sparse")):
        assert dataclasses.replace(near, sizes=dataclasses.replace(SIZES, keys=tokens)).chosen == chosen


# Cheaper up to 50,000 tokens, which fit into a processor's caches.
BENT = dataclasses.replace(RATES, exact=Curve((100.0, 50_000.0, 100_000.0), (1e-3, 0.1, 1.1)))


def test_times_are_straight_between_measured_ones_and_beyond_the_last() -> None:
    for tokens, seconds in ((100, 1e-3), (50_000, 0.1), (75_000, 0.6), (100_000, 1.1), (150_000, 2.1)):
        assert BENT.exact.seconds(tokens) == pytest.approx(seconds)
        assert BENT.times(4).exact.seconds(tokens / 4) == pytest.approx(seconds)


def test_sparse_pays_from_where_exact_steps_leave_the_processors_caches() -> None:
    plan = planned(rates=BENT)
    assert plan.pays_from is not None and 50_000 < plan.pays_from < 100_000
    for tokens, chosen in ((plan.pays_from - 2, "exact"), (plan.pays_from + 2, "sparse")):
        assert planned(tokens, rates=BENT).chosen == chosen


def test_sparse_pays_below_a_share_that_makes_both_equal() -> None:
    plan = planned()
    assert plan.pays_below is not None and 0 < plan.pays_below < 1
    equal = dataclasses.replace(plan, kept=plan.pays_below)
    assert equal.sparse_seconds == pytest.approx(equal.exact_seconds)
    assert planned(kept=0.9).chosen == "exact" and planned(kept=0.9).steps_to_pay is None
    assert planned(kept=0.9).pays_from is None
    assert planned(rates=dataclasses.replace(RATES, sparse=Curve.line(3e-4, 2e-5))).pays_below is None


def test_a_short_cache_is_read_in_full_and_says_so() -> None:
    plan = planned(cpu.SHORTEST - 1)
    assert plan.chosen == "exact" and plan.sparse_seconds is None and plan.sketch_seconds is None
    assert plan.why_not_sparse == "caches of fewer than 16,384 tokens are read in full"
    assert planned(cpu.SHORTEST).why_not_sparse == ""


def test_steps_that_cannot_be_sparse_say_why() -> None:
    plan = planned(rates=dataclasses.replace(RATES, sparse=None, unfit="there are several queries to a head"))
    assert plan.why_not_sparse == "there are several queries to a head"
    assert plan.sparse_seconds is None and plan.pays_from is None and plan.pays_below is None
    assert "there are several queries" in str(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_cache_without_spare_room(dtype: torch.dtype) -> None:
    tokens = 1024
    plan = plan_decode(tokens, 6, 3, 32, dtype=dtype, batch=2)
    held = {}
    for bits in (None, 4):
        cache = KeyValueCache(3, 32, batch=2, dtype=dtype, bits=bits, capacity=tokens)
        cache.append(*torch.randn(2, 2, 3, tokens, 32).to(dtype).unbind())
        held[bits] = cache.nbytes
    assert plan.exact_bytes == held[None] and plan.sparse_bytes == held[4] > held[None]
    assert plan.token_bytes == 2 * 2 * 3 * tokens * 32 * dtype.itemsize
    # With a hundredth of the tokens as rows that the device keeps.
    assert plan.offloaded_bytes == held[4] - plan.token_bytes + round(plan.token_bytes / 100)


def test_a_plan_says_whether_all_layers_fit_and_what_a_token_takes() -> None:
    linked = dataclasses.replace(RATES, link=1e-4)
    plan = dataclasses.replace(planned(rates=linked), layers=3)
    assert plan.offloaded_seconds == pytest.approx(3e-4 + 0.1 + 0.1 * 10.0)
    assert plan.offloaded_bytes == 120 and plan.sparse_bytes == 1110
    for memory, fits, said in (
        (3330, "on the device", "3.3 KiB: fit on the device, 901 ms a token"),
        (3329, "offloaded", "3.3 KiB: fit offloaded, 3.3 s a token"),
        (359, "no", "0.4 KiB: do not fit, not offloaded"),
    ):
        own = dataclasses.replace(plan, memory=memory)
        assert own.fits == fits == own.plain()["fits"]
        assert own.verdict[1] == f"3 layers of 1.0 KiB of keys and values in {said}"
    assert [row[0] for row in plan.table] == ["exact", "sparse", "PyTorch's SDPA", "offloaded"]
    assert plan.fits is None and len(plan.verdict) == 2
    # Without a bus there is nothing to offload to.
    bare = dataclasses.replace(planned(), memory=500)
    assert bare.offloaded_seconds is None and bare.fits == "no" and "offloaded" not in str(bare.table)


def test_a_plan_is_one_json_document() -> None:
    plain = json.loads(json.dumps(planned().plain(), allow_nan=False))
    assert plain["tokens"] == 100_000 and plain["chosen"] == "sparse" and plain["dtype"] == "float32"
    for name in ("exact_seconds", "sparse_seconds", "sdpa_seconds", "sketch_seconds", "pays_from", "pays_below"):
        assert plain[name] > 0, name
    assert json.loads(json.dumps(planned(64).plain()))["sparse_seconds"] is None


def test_a_plan_prints_its_figures_what_they_rest_on_and_what_follows() -> None:
    lines = str(dataclasses.replace(planned(), kept_source="assumed")).splitlines()
    assert lines[:2] == [
        "a decoding step over 100,000 tokens, one layer",
        "4 heads on 2 key heads, dimension 16, float32, cpu",
    ]
    assert [line.split()[0] for line in lines[3:6]] == ["exact", "sparse", "PyTorch's"] and "1 s" in lines[3]
    assert lines[6] == ("sparse: 10.0% of the tokens read, assumed: pass kept=, or find it with avow.nn.share_of_heads")
    assert "times: made up" in lines
    assert lines[-2].startswith("sparse: 300 ms a step, 3.3 times as fast as exact, 13.3 times as fast as SDPA")
    assert lines[-1].startswith(
        "sparse pays from 16,384 tokens on if 10.0% of them are read, and at 100,000 if less than 45%"
    )


def test_what_would_stay_on_a_device_is_said_of_a_device_alone() -> None:
    plan = planned()
    on_gpu = dataclasses.replace(plan, rates=dataclasses.replace(RATES, link=1e-4))
    said = ["host memory" in " ".join(one.notes()) for one in (plan, on_gpu)]
    assert said == [False, True]


def test_sparse_that_pays_at_any_share_says_so() -> None:
    plan = planned(rates=dataclasses.replace(RATES, read=Curve.line(0.0, 1e-6)))
    said = f"if 10.0% of them are read, and at {plan.sizes.keys:,} whatever share is read"
    assert plan.pays_below == 1.0 and plan.verdict[-1].endswith(said)


def test_nothing_is_measured_where_that_is_off() -> None:
    plan = avow.plan_decode(131_072, 32, 8, 128, dtype=torch.bfloat16)
    assert plan.rates.source == "typical rates: AVOW_CALIBRATION=off" and plan.sdpa_seconds is None
    assert plan.chosen == "sparse" and 0 < plan.seconds < plan.exact_seconds < 1


def test_twice_the_batch_takes_twice_as_long_beside_the_overhead() -> None:
    one, two = (plan_decode(2**20, 4, 2, 64, batch=batch) for batch in (1, 2))
    overhead = one.rates.exact.seconds(0)
    assert two.exact_seconds - overhead == pytest.approx(2 * (one.exact_seconds - overhead))
    assert plan_decode(2**20, 4, 2, 64, batch=64).token_bytes == 64 * one.token_bytes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": 0}, "tokens=0 must be a whole number of at least 1; try tokens=64"),
        ({"heads": 4, "key_heads": 3}, "key_heads=3 must divide heads=4; use 1, 2 or 4"),
        ({"kept": 1.5}, "kept=1.5 must be from 0 to 1; try kept=0.1"),
        ({"kept": math.nan}, "kept=nan must be from 0 to 1; try kept=0.1"),
        ({"queries": 9, "tokens": 8}, "queries=9 exceeds the 8 tokens; try queries=8"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be one of float64, float32, bfloat16, float16"),
        ({"device": "abacus"}, "device='abacus' must be 'cpu' or 'cuda'; the default is 'cpu'"),
        ({"heads": "many"}, "heads='many' must be a whole number; count in whole numbers"),
    ],
)
def test_a_wrong_argument_gets_name_value_rule_and_remedy(given: dict[str, Any], words: str) -> None:
    with pytest.raises(AvowError) as refused:
        plan_decode(**({"tokens": 1024, "heads": 4} | given))
    assert str(refused.value).startswith(words)


def test_what_a_certificate_says_was_read_is_understood() -> None:
    """On a GPU the sentence is another one, which kernels' own tests make."""
    k, v = torch.randn(2, 1, 1, 640, 16).unbind()
    cache = KeyValueCache(1, 16)
    cache.append(k, v)
    sharp = 40 * k[:, :, 100:101]
    assert share_read(cache.attend(sharp).certificate) == 1.0
    part = cache.attend(sharp, 1e-2, method="sparse").certificate
    assert part.method == "sparse" and 0 < share_read(part) < 0.5
    told = dataclasses.replace(part, reason="12.5% of the tokens were read in full, those that may matter")
    assert share_read(told) == 0.125
    assert share_read(dataclasses.replace(part, reason="all tokens were read: the sketch saved nothing")) == 1.0


def test_the_share_of_heads_is_that_of_their_steps() -> None:
    k, v = torch.randn(2, 1, 2, 1024, 16).unbind()
    sharp, flat = 40 * k[:, :, -4:].repeat_interleave(2, 1), torch.zeros(1, 4, 4, 16)
    assert share_of_heads(sharp, k, v) < 0.3 < share_of_heads(flat, k, v)
    with pytest.raises(AvowError, match="no keys or no queries"):
        share_of_heads(sharp[:, :, :0], k, v)


def test_more_heads_than_are_measured_cost_as_many_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sizes] = []

    def rates(z: Sizes, tell: object, again: bool) -> StepRates:
        asked.append(z)
        return RATES

    monkeypatch.setattr(decode_rates, "_of_few", rates)
    found = step_rates(Sizes(8, 16, 8, 1, 1000, 64, 64))
    (few,) = asked
    assert (few.batch, few.key_heads, few.heads) == (1, 16, 32)
    assert found.exact.seconds(1000) == pytest.approx(1e-4 + 1000 * 4e-5) and found.read.seconds(1000) == pytest.approx(
        1000 * 8e-5
    )
    assert found.sdpa is not None and found.sdpa.seconds(1000) == pytest.approx(2e-4 + 1000 * 16e-5)
    step_rates(Sizes(2, 6, 3, 1, 1000, 64, 64))
    assert (asked[1].batch, asked[1].key_heads, asked[1].heads) == (1, 6, 12)


# Measuring.


class PlantedTimer(StepTimer):
    """Seconds that follow RATES from what a call did, whatever it took."""

    sketched = False
    disturbed = False

    def once(self, call: Callable[[], object]) -> float:
        answer = call()
        tokens = STEPS[-1]
        if isinstance(answer, Tensor):
            assert RATES.sdpa is not None
            return RATES.sdpa.seconds(tokens)
        assert isinstance(answer, Attended)
        certificate = answer.certificate
        if certificate.method == "exact":
            return RATES.exact.seconds(tokens)
        first, self.sketched = not self.sketched, True
        seconds = RATES.sparse_seconds(tokens, share_read(certificate))
        assert seconds is not None
        return seconds + first * tokens * RATES.sketch


STEPS: list[int] = []


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, sdpa = decode_rates._Steps.attend, decode_rates._Steps.sdpa
    STEPS.clear()

    def seen(self: Any, *arguments: Any) -> Any:
        STEPS.append(self.tokens)
        return attend(self, *arguments)

    def seen_by_sdpa(self: Any, *arguments: Any) -> Any:
        STEPS.append(self.tokens)
        return sdpa(self, *arguments)

    monkeypatch.setattr(decode_rates._Steps, "attend", seen)
    monkeypatch.setattr(decode_rates._Steps, "sdpa", seen_by_sdpa)
    monkeypatch.setattr(decode_rates, "StepTimer", PlantedTimer)
    monkeypatch.setitem(decode_rates._BYTES, "cpu", 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_rates_are_recovered_from_real_steps(planted: None, dtype: torch.dtype) -> None:
    found, disturbed = measure_steps(dataclasses.replace(SIZES, dtype=dtype))
    assert not disturbed and found.unfit == "" and found.sparse is not None and found.sdpa is not None
    # Shares in certificates have three digits.
    for name, wanted in RATES.curves.items():
        line = found.curves[name]
        assert line is not None and wanted is not None
        for tokens in (4096, 16_384, 100_000) if name in ("sparse", "read") else (0, 1000, 100_000):
            assert line.seconds(tokens) == pytest.approx(wanted.seconds(tokens), rel=0.1, abs=3e-3)
    assert found.read.seconds(16_384) == pytest.approx(RATES.read.seconds(16_384), rel=0.01)
    assert found.sketch == pytest.approx(RATES.sketch, rel=0.05)
    assert max(STEPS) == cpu.SHORTEST, "measured where steps are sparse by themselves"


def test_the_share_is_that_of_steps_that_were_timed_although_it_depends_on_the_step_before() -> None:
    class Steps:
        tokens, before = 1000, 0

        def attend(self, kind: int, tol: float, method: str) -> Attended:
            share, self.before = max(decode_rates._SHARES[kind], decode_rates._SHARES[self.before]), kind
            return Attended(torch.zeros(1), SimpleNamespace(method="sparse", reason=f"{share:.1%} of the tokens"))  # type: ignore[arg-type]

    class Timer:
        def least(self, call: Callable[[], Attended]) -> float:
            return [1.0 + share_read(call().certificate) for _ in range(2)][-1]

    point = decode_rates._Point.of(Timer(), Steps(), "sparse")  # type: ignore[arg-type]
    assert point == pytest.approx((1000, 1.05, 1.0, 1.0))


def test_queries_of_measured_heads_read_the_share_that_they_are_made_for() -> None:
    steps = decode_rates._Steps(dataclasses.replace(SIZES, heads=8), 4096)
    shares = [share_read(steps.attend(kind, 1e-2, "sparse").certificate) for kind in range(2)]
    assert shares == pytest.approx(decode_rates._SHARES, abs=0.06) and shares[0] > 0.01


def test_several_queries_are_measured_as_they_run(planted: None) -> None:
    found, _ = measure_steps(dataclasses.replace(SIZES, queries=3))
    assert (found.sparse is None) == bool(found.unfit) and found.exact.seconds(2000) > found.exact.seconds(1000)


def test_float64_is_never_sparse_by_itself_and_says_why(planted: None) -> None:
    found, _ = measure_steps(dataclasses.replace(SIZES, dtype=torch.float64))
    assert found.sparse is None and "float64" in found.unfit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("linux", [False, True])
def test_a_timer_gives_up_and_notices_that_it_waited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, linux: bool
) -> None:
    wall, own = [0.0], [0.0]
    for name, clock in (("monotonic", wall), ("perf_counter", wall), ("process_time", own), ("thread_time", own)):
        monkeypatch.setattr(decode_rates.time, name, lambda clock=clock: clock[0])
    monkeypatch.setattr(decode_rates.torch, "get_num_threads", lambda: threads)
    queue = tmp_path / "7" / "schedstat"
    queue.parent.mkdir()
    monkeypatch.setattr(decode_rates, "Path", lambda path: tmp_path)

    def step(seconds: float, busy: float) -> Callable[[], None]:
        def call() -> None:
            wall[0] += seconds
            own[0] += busy
            if linux:
                queue.write_text(f"1 {1e9 * (wall[0] - own[0]):.0f} 3")

        return call

    step(0.0, 0.0)()
    timer = StepTimer("cpu", 10.0)
    assert timer.least(step(0.1, 0.09)) == pytest.approx(0.09 if threads == 1 else 0.1) and not timer.disturbed
    for _ in range(12):
        assert timer.once(step(0.5, 0.2)) == pytest.approx(0.2 if threads == 1 else 0.5)
    assert timer.disturbed
    wall[0] += 10
    with pytest.raises(TooBusy):
        timer.once(step(0.1, 0.1))


def test_making_the_caches_counts_as_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(decode_rates.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(decode_rates, "_Steps", lambda z, tokens: now.__setitem__(0, now[0] + 6.0))
    with pytest.raises(TooBusy):
        measure_steps(SIZES)


# Keeping.


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of one's own, calibration on, and a process that has read nothing yet."""
    monkeypatch.delenv("AVOW_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_memory()
    yield rates_file(SIZES)
    forget_memory()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measurements that are made up: each is what the list holds first, if anything; then what was asked for."""
    asked: list[Any] = []

    def pretend(z: Sizes) -> tuple[StepRates, bool]:
        asked.append(z)
        return dataclasses.replace(RATES, source=""), False

    monkeypatch.setattr(decode_rates, "measure_steps", pretend)
    return asked


def test_steps_are_measured_once_for_each_shape_and_said(file: Path, measured: list[Any]) -> None:
    said: list[str] = []
    sizes = dataclasses.replace(SIZES, keys=5000)
    for restart in (lambda: None, lambda: None, forget_memory):
        restart()
        found = step_rates(sizes, said.append)
        assert found.exact == RATES.exact and found.source.startswith("measured on 2") and str(file) in found.source
    assert measured == [SIZES] and said[-1] == (
        "measuring decoding steps of these heads on this machine, once: 2 to 5 s, given up after 10 s if other work "
        "has the processors"
    )
    many = len(said)
    step_rates(dataclasses.replace(sizes, dtype=torch.bfloat16), said.append)
    assert len(measured) == 2 and len(said) == many + 1
    step_rates(sizes, said.append, again=True)
    assert len(measured) == 3


def test_what_was_measured_without_numba_is_measured_again_with_it(
    file: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, unfit = [False], dataclasses.replace(RATES, sparse=None, unfit="numba is not installed")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found(name) if installed[0] else None)
    monkeypatch.setattr(decode_rates, "measure_steps", lambda z: (RATES if installed[0] else unfit, False))
    said: list[str] = []
    assert step_rates(SIZES, said.append).unfit == "numba is not installed" and len(said) == 1
    assert "-without-numba" in rates_file(SIZES).name and file.name == rates_file(SIZES).name.replace(
        "-without-numba", ""
    )
    installed[0] = True
    assert step_rates(SIZES, said.append).sparse == RATES.sparse, "in the same process"
    forget_memory()
    assert step_rates(SIZES, said.append).sparse == RATES.sparse and len(said) == 2, "and in the next"


def test_a_compiler_that_failed_is_asked_again_after_an_hour(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, why = [calibration_file.time.time()], ["numba could not compile (OSError: no space left)"]
    monkeypatch.setattr(calibration_file.time, "time", lambda: now[0])
    monkeypatch.setattr(decode_rates, "prepare", lambda tell: why[0])
    monkeypatch.setattr(
        decode_rates,
        "measure_steps",
        lambda z: (dataclasses.replace(RATES, sparse=None, unfit=why[0]) if why[0] else RATES, False),
    )
    assert step_rates(SIZES).unfit == why[0]
    why[0] = ""
    assert step_rates(SIZES).sparse is None
    now[0] += RETRY_SECONDS + 5
    assert step_rates(SIZES).sparse == RATES.sparse


def test_typical_rates_without_numba_have_no_sparse_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typical(SIZES, "").sparse is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert typical(SIZES, "").sparse is None and plan_decode(2**17, 4).chosen == "exact"


def test_every_shape_has_a_file_of_its_own() -> None:
    others = (
        {"heads": 8},
        {"heads": 2, "key_heads": 1},
        {"dim": 32},
        {"value_dim": 32},
        {"queries": 2},
        {"dtype": torch.float16},
    )
    assert len({rates_file(dataclasses.replace(SIZES, **other)) for other in ({}, *others)}) == 1 + len(others)  # type: ignore[arg-type]


def test_a_busy_machine_is_left_alone_for_an_hour(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, now = [], [calibration_file.time.time()]
    monkeypatch.setattr(calibration_file.time, "time", lambda: now[0])

    def busy(z: Sizes) -> tuple[StepRates, bool]:
        tries.append(z)
        raise TooBusy

    monkeypatch.setattr(decode_rates, "measure_steps", busy)
    for wait, many in ((0.0, 1), (RETRY_SECONDS - 5, 1), (10.0, 2)):
        now[0] += wait
        for restart in (lambda: None, forget_memory):
            restart()
            found = step_rates(SIZES)
            assert found == typical(SIZES, found.source)
            assert found.source.startswith("typical rates: the machine was too busy to be measured (")
        assert len(tries) == many


def test_a_disturbed_measurement_is_used_said_and_made_again_after_an_hour(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, now = [], [calibration_file.time.time()]
    monkeypatch.setattr(calibration_file.time, "time", lambda: now[0])
    monkeypatch.setattr(decode_rates, "measure_steps", lambda z: (RATES, tries.append(z) is None))
    for wait, many in ((0.0, 1), (RETRY_SECONDS - 5, 1), (10.0, 2)):
        now[0] += wait
        found = step_rates(SIZES)
        assert found.exact == RATES.exact and found.source.endswith(
            "; other work disturbed the measurement: times may be too high"
        )
        assert len(tries) == many


GOOD = json.loads(json.dumps(dataclasses.asdict(RATES)))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"exact": None},
        {"exact": [1.0]},
        {"exact": [1.0, "2"]},
        {"exact": [-1.0, 2.0]},
        {"read": None},
        {"read": math.nan},
        {"read": [[0.0, 1.0], [0.0, 1e9]]},
        {"sketch": None},
        {"sparse": None},
        {"unfit": "nothing"},
        {"unfit": 3},
        {"source": 3},
        {"more": 3},
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(file: Path, measured: list[Any], spoilt: dict[str, Any]) -> None:
    about = {"date": "2026-01-01T00:00:00+00:00", "fault": ""}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(about | {"found": GOOD}))
    assert step_rates(SIZES).read == RATES.read and measured == [], "a file that is not damaged is read"
    forget_memory()
    file.write_text(json.dumps(about | {"found": GOOD | spoilt}))
    assert step_rates(SIZES).read == RATES.read and measured == [SIZES]
    assert json.loads(file.read_text())["found"]["read"] == GOOD["read"]


def test_the_library_is_silent_while_it_measures(
    file: Path, measured: list[Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "avow.decode.plan"):
        avow.plan_decode(1000, 4, 2, 16)
    assert measured == [SIZES] and any("measuring decoding steps" in line for line in caplog.messages)
    assert capfd.readouterr() == ("", "")


def test_the_plan_of_the_module_is_the_public_one() -> None:
    assert avow.plan_decode is decode_plan.plan_decode and "plan_decode" in dir(avow)
