"""A sample of the fault matrix, and proof that it would notice: bounds shrunk, switches left on, raw errors."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import avow
from avow.core import Promise
from avow.methods.exact import Exact
from avow.methods.latent import Latent
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from tests import faults, faults_transformers
from tests.faults import (
    ENTRIES,
    FAULTS,
    FLOATS,
    ONCE_BROKEN,
    SWITCHES,
    Case,
    Outcome,
    Report,
    cases,
    run,
    run_case,
    sample,
)


def test_every_fault_meets_every_method_by_every_way_in_that_takes_it() -> None:
    single = {(case.entry, case.method, case.dtype, case.faults) for case in cases() if len(case.faults) < 2}
    for entry, methods in ENTRIES.items():
        for method, dtype in itertools.product(methods, FLOATS):
            for factor, levels in FAULTS.items():
                for level in levels[1:]:
                    case = Case(entry, method, dtype, ((factor, level),))
                    assert not case.fits or (entry, method, dtype, case.faults) in single


def test_every_pair_of_faults_occurs_and_the_design_is_always_the_same() -> None:
    design = cases()
    assert [str(case) for case in design] == [str(case) for case in cases()]
    assert [case.seed for case in design] == [case.seed for case in cases()]
    pairs = {case.faults for case in design if len(case.faults) == 2}
    for one, two in itertools.combinations(faults._levels(), 2):
        exact = Case("attend", "exact", "float32", (one, two))
        assert one[0] == two[0] or not exact.fits or (one, two) in pairs
    assert len(design) > 40_000


def test_no_promise_breaks_in_a_sample_of_the_matrix() -> None:
    report = run(sample(900))
    assert report.sound, "\n".join([str(report), *report.stories[:20]])
    assert report.cases > 900 and report.refused.total() < 100


@pytest.mark.parametrize("case", ONCE_BROKEN, ids=str)
def test_what_broke_once_holds(case: Case) -> None:
    assert case.fits or len(case.faults) > 2
    report = run([dataclasses.replace(case, seed=seed) for seed in range(2)])
    assert report.sound, report.stories
    # Where subnormal numbers are read as zero, it may be that no tolerance can be proved.
    assert not report.refused or "flush" in str(case), report


def test_no_promise_breaks_inside_models() -> None:
    report = Report()
    for case in faults_transformers.cases()[::7]:
        outcome = faults_transformers.run_case(case)
        if outcome is not None:
            report.add(outcome)
    assert report.sound, "\n".join(report.stories)
    assert report.cases > 30 and report.rows > 5_000


@pytest.mark.parametrize("kind", [Exact, Latent, LowRank, RandomFeatures, Separable, Sparse])
def test_a_bound_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    honest = kind.promise  # type: ignore[attr-defined]

    def boastful(*arguments: object) -> Promise:
        promise = honest(*arguments)
        return dataclasses.replace(promise, kind="deterministic", rows=promise.rows * 1e-4)

    monkeypatch.setattr(kind, "promise", boastful)
    usual = {Exact: "exact", Latent: "latent", LowRank: "low_rank", RandomFeatures: "random_features"}
    name = usual.get(kind, "separable" if kind is Separable else "sparse")
    near = [Case("attend", name, dtype, (("q numbers", "near-ties"),), seed) for dtype in FLOATS for seed in range(3)]
    report = run([*near, *(Case("attend", name, dtype, (("size", "square"),), 1) for dtype in FLOATS)])
    assert report.wrong and not report.sound


def test_autocast_that_is_not_left_is_caught_by_keyword_and_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    within = avow.attend.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(avow, "attend", within)
    for switch in ("autocast", "autocast by keyword"):
        some = [
            Case("attend", name, "float32", (("switch", switch),), 1) for name in ("low_rank", "separable", "latent")
        ]
        assert run(some).wrong, switch


def test_statistical_misses_are_counted_against_the_binomial_tail() -> None:
    report = Report()
    for _ in range(200):
        report.add(Outcome(ONCE_BROKEN[0], chances=1, misses=0))
    assert report.sound
    report.misses = 20  # what confidence 0.9 allows on average
    assert report.sound
    report.misses = 60
    assert not report.sound


def test_an_error_of_torch_and_a_refusal_without_a_reason_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def raised(*_: object, **__: object) -> None:
        raise RuntimeError("raw")

    case = Case("attend", "exact", "float32")
    monkeypatch.setattr(avow, "attend", raised)
    assert run_case(case).wrong == "RuntimeError: raw"

    def refused(*_: object, **__: object) -> None:
        raise avow.errors.RangeError("q", 1, "is too large", "shrink it")

    monkeypatch.setattr(avow, "attend", refused)
    assert run_case(case).wrong.startswith("refused for no reason: RangeError")
    loud = Case("attend", "exact", "float32", (("q numbers", "huge"),))
    assert run_case(loud).refused == "RangeError"


def _settings() -> tuple[object, ...]:
    tiny = torch.tensor(1e-39)
    return (
        float(tiny * 0.5) > 0,
        torch.get_float32_matmul_precision(),
        torch.backends.fp32_precision,
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.backends.cuda.math_sdp_enabled(),
    )


@pytest.mark.parametrize("switch", list(SWITCHES))
def test_a_switch_is_put_back_whatever_happens(switch: str) -> None:
    before = _settings()
    with pytest.raises(ZeroDivisionError), SWITCHES[switch]():
        raise ZeroDivisionError
    assert _settings() == before
