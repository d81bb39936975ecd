"""Walks written out are those of torch's optimisers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from avow.lab.pages.dynamics import adam_trace, average_trace
from avow.optim import AveragedWeights, adam_l2, adamw

NUMBERS = [1.2, 0.7, 1.1, 0.4, 1.9, 1.0, 0.8] * 8
SIZES = torch.logspace(-3, 1, 9, dtype=torch.float64)


@pytest.mark.parametrize(("beta", "delta"), [(0.0, 0.5), (0.9, 0.5), (0.99, 10.0)])
def test_momentum_walks_as_torch_does_and_along_the_average(beta: float, delta: float) -> None:
    found = average_trace(NUMBERS, beta, delta)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=found.learning_rate, momentum=found.momentum)
    for number in NUMBERS:
        model.weight.grad = torch.full_like(model.weight, number)
        sgd.step()
    assert float(model.weight.detach()) == pytest.approx(found.by_sgd, rel=1e-12)
    assert found.apart <= 1e-12 * abs(found.by_sgd)


def test_the_corrected_average_is_that_of_averaged_weights() -> None:
    found = average_trace(NUMBERS, 0.9, 0.5)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    averaged = AveragedWeights(model, decay=0.9)
    for number, corrected in zip(NUMBERS, found.corrected, strict=True):
        nn.init.constant_(model.weight, number)
        averaged.update()
        assert corrected == pytest.approx(float(averaged.state_dict()["averages"]["weight"]), rel=1e-12)
    assert found.corrected[0] == pytest.approx(NUMBERS[0]) and found.plain[0] == pytest.approx(NUMBERS[0] / 10)


@pytest.mark.parametrize("strength", [0.01, 0.5, 3.0])
@pytest.mark.parametrize(("make", "name"), [(adam_l2, "penalty"), (adamw, "decay")], ids=["penalty", "decay"])
def test_adam_leaves_what_the_optimisers_leave(make: type, name: str, strength: float) -> None:
    signs = torch.tensor([(-1.0) ** step for step in range(60)], dtype=torch.float64)
    gradients = signs[:, None] * SIZES
    found = adam_trace(gradients, 0.02, (0.9, 0.99), **{name: strength})
    model = nn.Linear(len(SIZES), 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimiser = make(model, 0.02, weight_decay=strength, betas=(0.9, 0.99))
    for gradient, left in zip(gradients, found[1:], strict=True):
        model.weight.grad = gradient[None]  # (1, weights)
        optimiser.step()
        assert model.weight.detach()[0].tolist() == pytest.approx(left.tolist(), rel=1e-9, abs=1e-9)


def test_a_penalty_and_a_decay_are_not_the_same() -> None:
    gradients = SIZES.expand(20, -1)
    penalty, decay = (adam_trace(gradients, 0.02, (0.9, 0.99), **{name: 0.5}) for name in ("penalty", "decay"))
    assert float((penalty - decay).abs().amax()) > 0.01
