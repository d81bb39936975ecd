"""The one verb: a tolerance is kept or refused, never missed, by the cheapest method that can."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import avow
from avow.attend import own_arithmetic
from avow.calibration import Rate, Rates
from avow.core import BoundEstimate, Method, Problem
from avow.errors import ToleranceUnreachable
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from tests.helpers.truth import judge

attending = importlib.import_module("avow.attend")  # `avow.attend` itself is the verb


def tensors(n: int = 48, size: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (size * torch.randn(1, 2, n, 8) for _ in range(2))
    return q.to(dtype), k.to(dtype), torch.randn(1, 2, n, 8).to(dtype)


def clustered(n: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    centres = 0.5 * torch.randn(1, 2, 4, 8)
    q, k = (centres[:, :, torch.randint(4, (n,))] + 1e-4 * torch.randn(1, 2, n, 8) for _ in range(2))
    return q, k, torch.randn(1, 2, n, 8)


def cheap(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make some methods cost next to nothing and all others a fortune."""
    every = {f"{name}{form}": Rate(0.0, 0.0, 1e-3) for name in avow.all_methods() for form in ("", "/causal")}
    every |= {f"{name}{form}": Rate(0.0, 0.0, 1e-12) for name in names for form in ("", "/causal")}
    monkeypatch.setattr(attending, "rates", lambda *_, **__: Rates(every, "made up"))


def kept(method: Method, problem: Problem, attended: Any) -> bool:
    verdict = judge(method, problem, attended.out, attended.certificate.rows, None)
    return verdict.broken == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tol", [0.5, 1e-2, 1e-4, 1e-7, 1e-12, 1e-30])
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_a_tolerance_is_kept_or_refused(tol: float, dtype: torch.dtype, size: float) -> None:
    q, k, v = tensors(size=size, dtype=dtype)
    try:
        attended = avow.attend(q, k, v, tol=tol)
    except ToleranceUnreachable as refusal:
        assert refusal.best > tol
        return
    assert attended.certificate.kind == "deterministic" and attended.certificate.bound <= tol
    assert kept(Exact(), Problem.of(q, k, v), attended)


def test_without_a_tolerance_attention_is_exact() -> None:
    q, k, v = tensors()
    out, certificate = avow.attend(q, k, v)
    assert (certificate.method, certificate.parameters) == ("exact", {"precision": "native"})
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_where_nothing_cheaper_can_promise_exact_runs_and_its_name_is_on_the_certificate() -> None:
    q, k, v = tensors(size=5.0)
    attended = avow.attend(q, k, v, tol=1e-2)
    assert attended.certificate.method == "exact" and "exact" in str(attended.certificate)


def test_arithmetic_widens_until_the_tolerance_is_kept() -> None:
    q, k, v = tensors(size=8.0)
    found = [avow.attend(q, k, v, tol=tol).certificate.parameters["precision"] for tol in (1e-2, 1e-6)]
    assert found == ["native", "float64"]
    half = [x.bfloat16() for x in (q, k, v)]
    precise = avow.attend(*half, tol=4.5e-3).certificate
    assert precise.parameters["precision"] == "float32" or precise.parameters["precision"] == "float64"
    assert avow.attend(*half, tol=1e-2).certificate.parameters["precision"] == "native"
    small = [(0.1 * x).bfloat16() for x in (q, k)]
    assert avow.attend(*small, half[2], tol=4e-3).certificate.parameters["precision"] == "float32"


@pytest.mark.parametrize(
    ("dtype", "wider", "unit"),
    [(torch.bfloat16, "float32", 2.0**-8), (torch.float16, "float32", 2.0**-11), (torch.float32, "float64", 2.0**-24)],
    ids=str,
)
def test_what_the_output_type_cannot_hold_is_refused_with_the_type_that_can(
    dtype: torch.dtype, wider: str, unit: float
) -> None:
    q, k, v = tensors(dtype=dtype)
    with pytest.raises(ToleranceUnreachable) as caught:
        avow.attend(q, k, v, tol=unit / 10)
    refusal = caught.value
    assert unit / 10 < refusal.best < 1.5 * unit  # these answers are shorter than the longest value
    name = str(dtype).removeprefix("torch.")
    assert str(refusal) == (
        f"tol={unit / 10} is below {refusal.best:.2e}, the best bound that can be proved in {name}; "
        f"convert q, k and v to {wider}"
    )
    remedied = [x.to(getattr(torch, wider)) for x in (q, k, v)]
    assert avow.attend(*remedied, tol=unit / 10).certificate.bound <= unit / 10


def test_in_float64_the_remedy_is_smaller_logits() -> None:
    q, k, v = tensors(dtype=torch.float64)
    with pytest.raises(ToleranceUnreachable, match=r"shrink the logits: scale·\|q\|·\|k\| is too large"):
        avow.attend(1e9 * q, 1e9 * k, v, tol=1e-3)


@pytest.mark.parametrize(
    ("method", "parameters"), [("low_rank", {"rank": 4}), ("random_features", {"features": 4}), ("separable", {})]
)
def test_a_named_method_that_cannot_keep_the_tolerance_refuses(method: str, parameters: dict[str, int]) -> None:
    q, k, v = tensors()
    free = avow.attend(q, k, v, method=method, **parameters).certificate
    with pytest.raises(ToleranceUnreachable, match=f"{method}: tol=1e-12 is below the .* it can prove") as caught:
        avow.attend(q, k, v, method=method, tol=1e-12, **parameters)
    assert caught.value.best > 1e-12 and free.bound > 1e-12
    assert '; use method="auto" or a wider tol' in str(caught.value)


@pytest.mark.parametrize("precision", ["native", "float32", "float64"])
def test_a_named_precision_is_obeyed_and_held_to_the_tolerance(precision: str) -> None:
    q, k, v = tensors()
    certificate = avow.attend(q, k, v, method="exact", precision=precision).certificate
    assert certificate.parameters == {"precision": precision}
    with pytest.raises(ToleranceUnreachable, match="exact: tol="):
        avow.attend(q, k, v, method="exact", precision=precision, tol=certificate.bound / 2)


def test_a_confidence_makes_statistical_promises_acceptable(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch, "random_features")
    q, k, v = tensors(size=1e-3)
    assert avow.attend(q, k, v, tol=0.5).certificate.method == "exact"
    certificate = avow.attend(q, k, v, tol=0.5, confidence=0.9).certificate
    assert (certificate.method, certificate.kind, certificate.confidence) == ("random_features", "statistical", 0.9)
    assert certificate.bound <= 0.5


def test_a_coverage_makes_sampled_promises_acceptable() -> None:
    q, k, v = tensors(n=600, size=0.1)
    certificate = avow.attend(q, k, v, method="random_features", coverage=0.99, confidence=0.95).certificate
    assert (certificate.kind, certificate.coverage, certificate.confidence) == ("sampled", 0.99, 0.95)
    assert certificate.parameters == {"features": 256, "orthogonal": True} and certificate.cost is not None
    promised = avow.attend(q, k, v, method="random_features", confidence=0.95).certificate
    assert certificate.bound < promised.bound
    assert avow.attend(q, k, v, coverage=0.99).certificate.kind == "deterministic"


def test_a_cheap_method_that_can_promise_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch, "low_rank")
    for q, k, v in (clustered(), tensors(n=128, size=0.01)):
        attended = avow.attend(q, k, v, tol=1e-2)
        assert attended.certificate.method == "low_rank" and attended.certificate.bound <= 1e-2
        assert kept(LowRank(attended.certificate.parameters["rank"]), Problem.of(q, k, v), attended)


def test_the_same_method_is_not_chosen_where_it_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch, "exact")
    assert avow.attend(*clustered(), tol=1e-2).certificate.method == "exact"


def test_a_try_that_failed_is_told_on_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch, "low_rank")
    monkeypatch.setattr(LowRank, "estimate_bound", lambda *_: BoundEstimate(1e-9, "deterministic", False))
    q, k, v = tensors(n=128, size=4.0)
    certificate = avow.attend(q, k, v, tol=1e-2).certificate
    assert certificate.method == "exact" and certificate.bound <= 1e-2
    assert re.match(r"low_rank\(rank=16\) could prove only \d", certificate.reason)
    assert certificate.reason in str(certificate)


def test_auto_never_returns_a_certificate_above_the_tolerance_whatever_was_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Liars everywhere: each says it can, at no cost.
    cheap(monkeypatch, "low_rank", "random_features")
    for kind, word in ((LowRank, "deterministic"), (RandomFeatures, "statistical")):
        monkeypatch.setattr(kind, "estimate_bound", lambda *_, word=word: BoundEstimate(0.0, word, True))
    for tol in (0.3, 1e-2, 1e-4):
        for confidence in (None, 0.9):
            certificate = avow.attend(*tensors(n=96, size=3.0), tol=tol, confidence=confidence).certificate
            assert certificate.bound <= tol and certificate.kind == "deterministic"


def test_a_gradient_passes_through_whatever_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch, "low_rank")
    q, k, v = (x.requires_grad_() for x in clustered())
    out, certificate = avow.attend(q, k, v, tol=1e-2)
    assert certificate.method == "low_rank"
    out.sum().backward()
    assert all(x.grad is not None and bool(torch.isfinite(x.grad).all()) for x in (q, k, v))
    assert not certificate.rows.requires_grad


@pytest.mark.parametrize("tol", [np.float32(0.01), np.float64(0.01), torch.tensor(0.01)], ids=lambda x: str(type(x)))
def test_numbers_of_numpy_and_torch_are_numbers(tol: Any) -> None:
    assert avow.attend(*tensors(), tol=tol).certificate.bound <= 0.011


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)], ids=str)
def test_there_is_a_plan_where_there_is_nothing_to_attend_to(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape)
    for tol in (None, 1e-2):
        chosen = avow.plan(q, q, q, tol=tol).chosen
        assert chosen is not None and chosen.estimate is not None and chosen.estimate.bound == 0.0


def test_the_plan_is_what_attend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, tensors_of in ((("low_rank",), clustered()), (("exact",), clustered()), (("low_rank",), tensors())):
        cheap(monkeypatch, *names)
        chosen = avow.plan(*tensors_of, tol=1e-2).chosen
        certificate = avow.attend(*tensors_of, tol=1e-2).certificate
        assert chosen is not None
        assert (chosen.method.name, chosen.method.parameters) == (certificate.method, certificate.parameters)


class _OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]  # torch has a property here


@pytest.mark.parametrize("by_name", [False, True])
def test_autocast_is_off_for_the_device_of_every_tensor_given_by_position_or_by_name(by_name: bool) -> None:
    seen = own_arithmetic(lambda *_, **__: torch.is_autocast_enabled("cuda"))
    x = torch.zeros(1).as_subclass(_OnGpu)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert seen() and not (seen(q=x) if by_name else seen(x))
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("method", ["exact", "low_rank", "random_features", "separable"])
def test_autocast_around_a_call_changes_neither_answer_nor_promise(method: str) -> None:
    q, k, v = torch.randn(3, 1, 4, 96, 16).unbind()
    calm = avow.attend(q, k, v, method=method, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loud = avow.attend(q, k, v, method=method, generator=torch.Generator().manual_seed(0))
        narrow = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(loud.out, calm.out) and loud.certificate == calm.certificate
    assert narrow.dtype == torch.bfloat16, "autocast does narrow what it is let near"


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("scale", [1e40, 1e-40])
def test_a_scale_that_float32_cannot_hold_is_carried_in_float64(scale: float, causal: bool) -> None:
    size = 1 / math.sqrt(scale)
    q, k = (torch.randn(1, 2, 20, 8) * size for _ in range(2))
    v = torch.randn(1, 2, 20, 8)
    out, certificate = avow.attend(q, k, v, scale=scale, causal=causal)
    assert certificate.parameters == {"precision": "float64"}
    truth = avow.attend(q.double(), k.double(), v.double(), scale=scale, causal=causal).out
    assert float((out - truth).abs().max()) < 1e-6
