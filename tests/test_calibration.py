"""Rates are fitted, cached whole or not at all, and easy to ignore."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

import avow
from avow import calibration
from avow.calibration import TYPICAL, Rate, Rates, cache_file, fit, measure_rates, rates
from avow.core import Cost, Sizes
from avow.methods.exact import Exact

SOME = {name: Rate(1e-6, 1e-10, 1e-12) for name in avow.all_methods()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, calibration on, and measurements that are made up and counted."""
    monkeypatch.delenv("AVOW_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_file("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def pretend(device: str = "cpu") -> dict[str, Rate]:
        calls.append(device)
        return SOME

    monkeypatch.setattr(calibration, "measure_rates", pretend)
    return calls


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


def test_the_first_call_measures_and_later_ones_read(cache: Path, measured: list[str]) -> None:
    assert rates("cpu").source == "measured just now"
    assert rates("cpu") == Rates(SOME, f"measured, cached in {cache}")
    assert measured == ["cpu"]


def test_attend_never_measures(cache: Path, measured: list[str]) -> None:
    assert rates("cpu", measure=False) == Rates({}, "typical rates: nothing measured yet")
    assert measured == [] and not cache.exists()


def test_a_cache_is_named_after_all_it_depends_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"-v{calibration.VERSION}-cpu-torch" in cache.name and cache.name.endswith("threads.json")
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    assert cache_file("cpu") != cache != cache_file("cuda")


def test_a_newer_version_measures_anew(cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates("cpu")
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    rates("cpu")
    assert measured == ["cpu", "cpu"]


def test_a_cache_that_lacks_a_method_is_measured_anew(cache: Path, measured: list[str]) -> None:
    calibration._write(cache, {name: rate for name, rate in SOME.items() if name != "low_rank"})
    assert rates("cpu").measured == SOME
    assert measured == ["cpu"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "3",
        '{"exact": 3}',
        '{"exact": {"launch": 1}}',
        '{"exact": {"launch": 1, "pointwise": 2, "flop": 3, "more": 4}}',
        "\x00\x01",
        *(
            json.dumps({name: {"launch": odd, "pointwise": 1.0, "flop": 1.0} for name in avow.all_methods()})
            for odd in ("1", None, -1.0, math.nan, math.inf, 1e308, [], True)
        ),
        "[" * 100_000,
    ],
)
def test_an_unreadable_cache_is_ignored_and_replaced(text: str, cache: Path, measured: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert rates("cpu", measure=False).measured == {}
    assert rates("cpu").measured == SOME and measured == ["cpu"]
    assert set(json.loads(cache.read_text())) == set(SOME)


def test_a_cache_of_bytes_that_are_no_text_is_ignored(cache: Path, measured: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xff\xfe\xfa")
    assert rates("cpu").measured == SOME


def test_a_cache_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration._write(cache, SOME)
    before = cache.read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration._write(cache, {"exact": Rate(1.0, 1.0, 1.0)})
    assert cache.read_text() == before
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "half-written files are left behind"


def test_a_cache_that_cannot_be_written_costs_nothing(cache: Path, measured: list[str]) -> None:
    cache.parent.parent.mkdir(parents=True, exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    assert rates("cpu") == Rates(SOME, "measured just now")


def test_a_machine_that_is_too_busy_is_left_alone_and_nothing_is_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[object] = []

    def slow(call: object, device: torch.device, repeats: int) -> float:
        runs.append(call)
        return 1.0

    monkeypatch.setattr(calibration, "least_seconds", slow)
    assert rates("cpu") == Rates({}, "typical rates: this machine is too busy to be measured")
    assert len(runs) == 6 and not cache.exists()


def test_a_slow_method_is_measured_at_small_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first call of every process would wait for it, and the machine be taken for busy."""
    asked: list[tuple[str, int]] = []

    def clock(compute: Any, device: torch.device, repeats: int) -> float:
        method, keys = compute.func.__self__, compute.args[0].k.shape[-2]
        asked.append((method.name, keys))
        return 0.04 if method.name == "sparse" else 1e-4

    monkeypatch.setattr(calibration, "least_seconds", clock)
    assert measure_rates("cpu") is not None
    assert {keys for name, keys in asked if name == "sparse"} == {64}
    assert {keys for name, keys in asked if name == "exact"} == {64, 256, 768, 1536}


def test_every_method_gets_rates_with_positive_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny problems in place of those that take a while: the fit is the same.
    def tiny(batch: int, heads: int, groups: int, n: int, s: int, d: int, e: int, *rest: object) -> Sizes:
        return Sizes(batch, heads, groups, max(n // 16, 32), max(s // 16, 32), d // 4, e // 4, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "Sizes", tiny)
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
