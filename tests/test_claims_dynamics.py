"""Claims on recurrences and optimisers: torch doing as they say."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from avow.numerics import intervals
from avow.theory.claims.catalogue import optimisers, recurrent


def test_the_gradient_in_balls_is_autograd_s() -> None:
    weights = torch.tensor(recurrent.CONTRACTION, dtype=torch.float64) / 10

    def run(h: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            h = weights @ h.tanh() + 0.5
        return h

    jacobian = torch.autograd.functional.jacobian(run, torch.zeros(3, dtype=torch.float64))
    found = recurrent.jacobian(recurrent.tenths(recurrent.CONTRACTION), [recurrent.arb(0)] * 3, 5)
    shown = torch.tensor([[float(found[i, j]) for j in range(3)] for i in range(3)], dtype=torch.float64)
    torch.testing.assert_close(shown, jacobian)
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= 0.9**5


def test_autograd_multiplies_factors_of_the_old_states_from_the_left() -> None:
    """What `rnn-chain` proves of its recurrence, of torch's gradient; as written the product is another matrix."""
    weights = torch.tensor(recurrent.CONTRACTION, dtype=torch.float64) / 10
    h = torch.zeros(3, dtype=torch.float64)
    in_order = as_written = torch.eye(3, dtype=torch.float64)
    for _ in range(4):
        before, h = h, weights @ h.tanh() + 0.5
        in_order = weights @ torch.diag(1 - before.tanh() ** 2) @ in_order
        as_written = as_written @ torch.diag(1 - h.tanh() ** 2) @ weights
    found = recurrent.jacobian(recurrent.tenths(recurrent.CONTRACTION), [recurrent.arb(0)] * 3, 4)
    jacobian = torch.tensor([[float(found[i, j]) for j in range(3)] for i in range(3)], dtype=torch.float64)
    torch.testing.assert_close(in_order, jacobian)
    assert float((as_written - jacobian).norm()) > 0.1 * float(jacobian.norm())


@pytest.mark.parametrize(("start", "low", "high"), [(0.0, 3.0**10, 3.0**10), (2.9, 0.0, 0.1**10), (3.0, 0.0, 0.1**10)])
def test_one_unit_explodes_from_nought_and_never_from_three(start: float, low: float, high: float) -> None:
    h = x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    for _ in range(10):
        x = 3 * x.tanh()
    (gradient,) = torch.autograd.grad(x, h)
    assert low <= float(gradient) <= high


def test_sylvester_tells_long_from_short() -> None:
    identity = recurrent.tenths(((10, 0), (0, 10)))
    assert recurrent._shorter(identity, recurrent.arb(1.01))
    assert not recurrent._shorter(identity, recurrent.arb(0.99))


def stepped(optimiser: type[torch.optim.Optimizer], gradients: list[float], **options: Any) -> float:
    """A weight that starts at 1, after torch's own steps."""
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    steps = optimiser([theta], **options)  # type: ignore[call-arg]
    for g in gradients:
        theta.grad = torch.tensor(g, dtype=torch.float64)
        steps.step()
    return float(theta.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_torch_s_sgd_penalises_as_the_claim_has_it(momentum: float) -> None:
    """Its weight_decay is the penalty's gradient 2γθ; only without momentum is it the decay 2ηγ."""
    gradients = [0.3, -0.7, 0.2]
    found = stepped(torch.optim.SGD, gradients, lr=0.1, momentum=momentum, weight_decay=0.5)
    penalised, decayed = optimisers._decays(0.1, 0.25, 2 * 0.1 * 0.25, momentum, 1.0, gradients)
    assert found == pytest.approx(penalised, abs=1e-12)
    assert (found == pytest.approx(decayed, abs=1e-12)) == (momentum == 0.0)


def test_torch_s_adam_shrinks_weights_with_large_gradients_less_and_adamw_all_alike() -> None:
    def shrunk(optimiser: type[torch.optim.Optimizer], size: float) -> float:
        """What decay alone took off after gradients of ± size, whose own moves are taken away again."""
        gradients = [size if t % 2 else -size for t in range(200)]
        options = {"lr": 1e-4}
        bare = stepped(optimiser, gradients, weight_decay=0.0, **options)
        return bare - stepped(optimiser, gradients, weight_decay=1e-2, **options)

    small, large = shrunk(torch.optim.Adam, 1.0), shrunk(torch.optim.Adam, 100.0)
    assert small / large == pytest.approx(100, rel=0.05)
    assert shrunk(torch.optim.AdamW, 1.0) == pytest.approx(shrunk(torch.optim.AdamW, 100.0), rel=1e-3)


def test_torch_s_adam_averages_the_penalty_s_gradients_too() -> None:
    """The run that refutes the line of the sources: it ends at 0, where the line says 1/24."""
    options = {"lr": 0.5, "betas": (0.5, 0.5), "eps": 0.0, "weight_decay": 1.0}
    assert stepped(torch.optim.Adam, [1.0, 1.5], **options) == pytest.approx(0, abs=1e-12)
    (case,) = [step.facts for step in optimisers.adam_l2_line.judge().evidence if step.kind == "counterexample"]
    assert case["x"] == "[1, 1/2, 0]"


def test_momentum_and_averages_meet_in_the_amended_pair_only() -> None:
    beta, delta, gradients = Fraction(9, 10), Fraction(3), [Fraction(k * k - 5) for k in range(6)]
    wanted = optimisers._averaged(beta, delta, gradients)
    assert optimisers._travelled(*optimisers.CONVERSION.amended(beta, delta), gradients) == wanted
    assert optimisers._travelled(*optimisers.CONVERSION.stated(beta, delta), gradients) != wanted


def test_adam_in_balls_is_torch_s_adam() -> None:
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([theta], lr=0.05, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(150):
        adam.zero_grad()
        ((theta - 1) ** 2 / 2 + theta**2 / 2).backward()
        adam.step()
    with intervals.precision(512):
        found = optimisers._with_adam(Fraction(1, 2), 150)
    assert float(theta.detach()) == pytest.approx(float(found), abs=1e-9)
