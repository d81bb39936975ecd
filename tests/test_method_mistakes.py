"""What a method returns is checked once, before its certificate: an impossible promise is an error that names it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.core import Computed, Cost, Method, Problem, Promise, Sizes
from avow.errors import InputError, ToleranceUnreachable
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.numerics.softmax import softmax_average

Q, K, V = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()


def method(compute: Any = None, promise: Any = None, cost: Any = None) -> Exact:
    """Exact attention with another answer, another promise or another cost, each made from its own."""

    class Other(Exact):
        def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Any:
            computed = super().compute(problem, generator)
            return compute(computed) if compute else computed

        def promise(self, problem: Problem, computed: Computed, confidence: float) -> Any:
            given = super().promise(problem, computed, confidence)
            return promise(given) if promise else given

        def cost(self, sizes: Sizes) -> Any:
            return cost if cost is not None else super().cost(sizes)

    return Other()


def of_rows(change: Any) -> Any:
    return lambda given: dataclasses.replace(given, rows=change(given.rows))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (method(lambda x: x.out), "exact: compute()=a float32 tensor of shape (1, 2, 5, 4) must be a Computed; return"),
        (method(lambda x: 1.0), "exact: compute()=1.0 must be a Computed; return Computed(out) from compute"),
        (
            method(lambda x: Computed(x.out[..., :3])),
            "exact: compute().out=a float32 tensor of shape (1, 2, 5, 3) must be a",
        ),
        (method(lambda x: Computed([1.0])), "exact: compute().out=[1.0] must be a tensor of shape (1, 2, 5, 4)"),
        (method(promise=lambda x: 0.1), "exact: promise()=0.1 must be a Promise; return Promise("),
        (
            method(promise=lambda x: Promise("certain", x.rows)),
            "exact: promise().kind='certain' must be one of deterministic, statistical, sampled, none; use",
        ),
        (
            method(promise=of_rows(lambda x: x[..., :1])),
            "exact: promise().rows=a float64 tensor of shape (1, 2, 1) must be a",
        ),
        (method(promise=of_rows(lambda x: 0.1)), "exact: promise().rows=0.1 must be a tensor of numbers of shape"),
        (method(promise=of_rows(lambda x: x - 1)), "is not a bound; return at least 0 for every row, and inf if"),
        (method(promise=of_rows(lambda x: x * math.nan)), "exact: promise().rows=nan is not a bound; return"),
        (
            method(promise=lambda x: dataclasses.replace(x, confidence=2)),
            "exact: promise().confidence=2 must be a probability, from 0 to 1",
        ),
        (method(cost=1), "exact: cost()=1 must be a Cost; return Cost(flops, pointwise, launches, peak_bytes)"),
    ],
)
def test_what_no_method_may_return_is_an_error(wrong: Exact, words: str) -> None:
    for tol in (None, 0.5):
        with pytest.raises(InputError) as caught:
            avow.attend(Q, K, V, method=wrong, tol=tol)
        assert words in str(caught.value)


def test_one_row_without_a_number_is_enough() -> None:
    def spoil(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[0, 1, 3] = math.nan
        return rows

    with pytest.raises(InputError, match="is not a bound"):
        avow.attend(Q, K, V, method=method(promise=of_rows(spoil)))


def test_an_infinite_bound_may_be_returned_and_proves_nothing() -> None:
    certificate = avow.attend(Q, K, V, method=method(promise=of_rows(lambda x: x + math.inf))).certificate
    assert not certificate.keeps(tol=1.0)


def test_an_estimate_that_raises_leaves_the_other_methods_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise ValueError("no idea")

    monkeypatch.setattr(LowRank, "estimate_bound", raises)
    q, k, v = torch.randn(3, 1, 2, 2048, 16).unbind()
    plan = avow.plan(q, k, v, tol=1e-2)
    assert {x.lost for x in plan.ranked if x.method.name == "low_rank" and x.estimate is not None} == {
        "estimate_bound raised ValueError: no idea"
    }
    assert plan.chosen is not None and avow.attend(q, k, v, tol=1e-2).certificate.keeps(1e-2)


@dataclass(frozen=True)
class Window(Method):
    """Attention to the first keys alone: all that a method without a proof has to say."""

    name: ClassVar[str] = "window"
    summary: ClassVar[str] = "attention to the first keys"

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        first = problem.k.shape[-2] // 2
        return Computed(scaled_dot_product_attention(problem.q, problem.k[..., :first, :], problem.v[..., :first, :]))

    def cost(self, sizes: Sizes) -> Cost:
        return Exact().cost(sizes)

    def reference(self, problem: Problem) -> torch.Tensor:
        return softmax_average(problem)


def test_a_method_without_a_proof_promises_nothing_and_can_be_audited_and_compared() -> None:
    certificate = avow.attend(Q, K, V, method=Window()).certificate
    assert certificate.kind == "none" and not certificate.keeps(tol=2.0)
    assert certificate.reason == "window has no proof"
    sampled = avow.attend(Q, K, V, method=Window(), coverage=0.99).certificate
    assert 0.01 < sampled.bound < 2 and sampled.keeps(tol=2.0)
    assert list(Window.grid(Problem.of(Q, K, V).sizes)) == [Window()]
    with pytest.raises(ToleranceUnreachable) as refused:
        avow.attend(Q, K, V, method=Window(), tol=1e-2)
    assert str(refused.value) == (
        'window: tol=0.01 cannot be proved: window has no proof; use method="auto", or coverage=0.99 to have a sample'
        " of its rows recomputed"
    )
