"""Optimisers keep their word: conversions walk alike, averages are unbiased, decay spares what it says, rates end."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.optim import (
    AveragedWeights,
    adam_l2,
    adamw,
    average_from_momentum,
    decay_groups,
    momentum_from_average,
    warmup_cosine,
)


def walked(gradients: Tensor, **options: float) -> Tensor:
    """Where `torch.optim.SGD` goes, from 0."""
    weight = nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], **options)  # type: ignore[arg-type]
    path = []
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


def averaged(gradients: Tensor, beta: float, delta: float) -> Tensor:
    """Where steps by −δ times the running average of the gradients go, from 0."""
    weight = average = torch.zeros(gradients.shape[1], dtype=torch.float64)
    path = []
    for gradient in gradients:
        average = beta * average + (1 - beta) * gradient
        weight = weight - delta * average
        path.append(weight)
    return torch.stack(path)


@pytest.mark.parametrize(("beta", "delta"), [(0.9, 0.5), (0.0, 0.1), (0.99, 3.0), (0.5, 2.0)])
def test_sgd_with_the_converted_momentum_walks_as_the_average_does(beta: float, delta: float) -> None:
    gradients = torch.randn(40, 3, dtype=torch.float64)
    momentum, rate = momentum_from_average(beta, delta)
    wanted = averaged(gradients, beta, delta)
    torch.testing.assert_close(walked(gradients, lr=rate, momentum=momentum), wanted, rtol=1e-12, atol=1e-13)
    assert average_from_momentum(momentum, rate) == pytest.approx((beta, delta), rel=1e-14)


def test_neither_the_step_in_the_decay_nor_dampening_is_that_walk() -> None:
    gradients = torch.randn(40, 3, dtype=torch.float64)
    wanted = averaged(gradients, 0.9, 0.5)
    for other in ({"lr": 0.05, "momentum": 0.45}, {"lr": 0.5, "momentum": 0.9, "dampening": 0.9}):
        assert float((walked(gradients, **other) - wanted).abs().max()) > 0.1


class Small(nn.Module):
    """A matrix, a bias, a norm, a table, a table tied to a head, and a matrix two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.map_norm = nn.LayerNorm(4), nn.LayerNorm((5, 4))
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[-1]]
        return self.head(self.norm(self.frozen(self.second(self.first(x)).tanh())) * self.gain)


def test_matrices_decay_and_nothing_else_and_every_parameter_is_in_one_group() -> None:
    model = Small()
    names = {id(p): name for name, p in model.named_parameters()}
    decays, spared = ([names[id(p)] for p in group["params"]] for group in decay_groups(model, 0.1))
    assert decays == ["first.weight", "frozen.weight"]
    assert sorted(decays + spared) == sorted(names.values())
    assert {"tokens.weight", "places.weight", "norm.weight", "map_norm.weight", "gain", "first.bias"} <= set(spared)
    assert [group["weight_decay"] for group in decay_groups(model, 0.1)] == [0.1, 0.0]


def test_the_two_adams_share_groups_and_differ_in_what_decay_does() -> None:
    decoupled, coupled = adamw(Small(), 1e-2), adam_l2(Small(), 1e-2)
    assert type(decoupled) is torch.optim.AdamW and type(coupled) is torch.optim.Adam
    for one, other in zip(decoupled.param_groups, coupled.param_groups, strict=True):
        assert [p.shape for p in one["params"]] == [p.shape for p in other["params"]]
        shared = one.keys() - {"params", "decoupled_weight_decay"}
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}


def taken(make: Callable[..., torch.optim.Optimizer], size: float) -> float:
    """The share of a weight of 1 that one step's decay takes, where steady gradients have the given size."""
    ends = []
    for decay in (0.1, 0.0):
        torch.manual_seed(0)
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = make(model, 1e-6, weight_decay=decay)
        for step in range(400):
            nn.init.ones_(model.weight)
            model.weight.grad = torch.full((1, 1), size * (-1) ** step, dtype=torch.float64)
            optimizer.step()
        ends.append(float(model.weight.detach()))
    return (ends[1] - ends[0]) / 1e-6


def test_decoupled_decay_is_blind_to_gradients_and_the_penalty_is_not() -> None:
    # η = 1e-6, λ = 0.1, θ = 1: AdamW takes ηλ; Adam with the penalty ηλ/√v̂, v̂ = size² + λ².
    for size in (1.0, 10.0):
        assert taken(adamw, size) == pytest.approx(0.1, rel=1e-4)
        assert taken(adam_l2, size) == pytest.approx(0.1 / math.hypot(size, 0.1), rel=0.01)


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> nn.Module:
    ids = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    return model


def test_a_fused_step_is_the_same_step() -> None:
    for make in (adamw, adam_l2):
        ends = []
        for fused in (False, True):
            torch.manual_seed(0)
            model = Small()
            ends.append(trained(make(model, 1e-2, fused=fused), model, 5).state_dict())
        for name in ends[0]:
            torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.9999])
def test_an_average_is_the_corrected_one_written_out(decay: float) -> None:
    model = nn.Linear(3, 2, bias=False).double()
    averages, total = AveragedWeights(model, decay), torch.zeros(2, 3, dtype=torch.float64)
    for step in range(1, 30):
        nn.init.normal_(model.weight)
        averages.update()
        total = decay * total + (1 - decay) * model.weight.detach()
        with averages.swapped():
            torch.testing.assert_close(model.weight.detach(), total / (1 - decay**step), rtol=1e-11, atol=1e-11)
    assert averages.updates == 29


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_stand_still_are_their_own_average_to_the_last_bit(dtype: torch.dtype) -> None:
    model = Small().to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    averages = AveragedWeights(model, 0.997)
    for _ in range(50):
        averages.update()
    with averages.swapped() as inside:
        assert inside is model
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_an_average_that_starts_from_the_first_weights_would_be_caught() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    averages = AveragedWeights(model, 0.9)
    biased = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        averages.update()
        biased.update_parameters(model)
    with averages.swapped():
        assert float(model.weight.detach()) == pytest.approx((0.09 + 0.2) / 0.19, rel=1e-14)
    assert float(biased.module.weight.detach()) == pytest.approx(1.1)


def test_small_moves_of_16_bit_weights_are_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    averages = AveragedWeights(model, 0.999)
    nn.init.constant_(model.weight, 1.0)
    averages.update()
    nn.init.constant_(model.weight, 3.0)
    for _ in range(3000):
        averages.update()
    kept = averages.state_dict()["averages"]["weight"]
    assert kept.dtype == torch.float32
    # The first weight's share after 3001 updates is β^3000·(1 − β)/(1 − β^3001).
    share = 0.999**3000 * 0.001 / (1 - 0.999**3001)
    assert float(kept) == pytest.approx(3 - 2 * share, rel=1e-5)


def test_the_models_own_weights_come_back_even_after_an_error() -> None:
    model = Small()
    averages = AveragedWeights(model, 0.9)
    averages.update()
    optimizer = adamw(model, 1e-2)
    trained(optimizer, model, 2)
    averages.update()
    own = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), averages.swapped():
        assert not torch.equal(model.first.weight, own["first.weight"])
        raise RuntimeError("stop")
    assert all(torch.equal(weight, own[name]) for name, weight in model.state_dict().items())
    averages.update()


def test_a_saved_average_goes_on_as_if_nothing_had_happened() -> None:
    def run(stop: int | None) -> Tensor:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        averages = AveragedWeights(model, 0.9)
        for step in range(12):
            if step == stop:
                saved = averages.state_dict()
                averages.update()  # what was saved is not touched by what comes after
                averages = AveragedWeights(model, 0.9)
                averages.load_state_dict(saved)
            nn.init.normal_(model.weight)
            averages.update()
        return averages.state_dict()["averages"]["weight"]

    assert torch.equal(run(None), run(5))


def rates(warmup: int, total: int, floor: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_cosine(optimizer, warmup, total, floor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("warmup", "total", "floor"), [(10, 100, 0.1), (0, 7, 0.0), (3, 4, 1.0), (99, 100, 0.3)])
def test_the_rate_rises_falls_and_stays_where_it_ends(warmup: int, total: int, floor: float) -> None:
    found = rates(warmup, total, floor, 5 * total)
    assert found[0] == pytest.approx(2 / (warmup + 1)) and max(found) == found[warmup] == 2.0
    assert all(a < b for a, b in itertools.pairwise(found[: warmup + 1]))
    assert all(a >= b for a, b in itertools.pairwise(found[warmup:]))
    assert set(found[total:]) == {2.0 * floor}
    if total - warmup > 1 and floor < 1:
        assert found[total - 1] > 2.0 * floor


def test_torchs_own_cosine_comes_back_up_and_would_be_caught() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(200):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] > 1.9


@pytest.mark.parametrize("optimizer_first", [True, False], ids=["optimiser loaded first", "both built first"])
def test_a_schedule_resumed_from_json_gives_the_same_rates_bit_for_bit(optimizer_first: bool) -> None:
    wanted = rates(5, 40, 0.1, 60)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    schedule = warmup_cosine(optimizer, 5, 40)
    for _ in range(17):
        optimizer.step()
        schedule.step()
    saved = json.loads(json.dumps([optimizer.state_dict(), schedule.state_dict()]))
    again = torch.optim.SGD([weight], lr=2.0)
    if optimizer_first:
        again.load_state_dict(saved[0])
        resumed = warmup_cosine(again, 5, 40)
    else:
        resumed = warmup_cosine(again, 5, 40)
        again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    found = []
    for _ in range(17, 60):
        found.append(again.param_groups[0]["lr"])
        again.step()
        resumed.step()
    assert found == wanted[17:]


def test_a_longer_schedule_goes_on_with_its_own_rates() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    schedule = warmup_cosine(optimizer, 5, 40)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.2, "where the shorter one ended"
    longer = warmup_cosine(optimizer, 5, 80)
    longer.load_state_dict(schedule.state_dict())
    found = []
    for _ in range(40, 90):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        longer.step()
    assert found == rates(5, 80, 0.1, 90)[40:]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def swapped_twice() -> None:
    averages = AveragedWeights(nn.Linear(1, 1))
    averages.update()
    with averages.swapped():
        averages.update()


def loaded(**changes: Any) -> None:
    averages = AveragedWeights(nn.Linear(2, 1), 0.9)
    averages.load_state_dict(averages.state_dict() | changes)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: momentum_from_average(1.0, 0.1), "beta=1.0 must be at least 0 and below 1; try beta=0.9"),
        (
            lambda: momentum_from_average(0.9, math.nan),
            "delta=nan must be a number of at least 0; use a step size such as delta=0.1",
        ),
        (lambda: average_from_momentum(-0.1, 1.0), "momentum=-0.1 must be at least 0 and below 1; try momentum=0.9"),
        (
            lambda: average_from_momentum(0.9, -1.0),
            "learning_rate=-1.0 must be a number of at least 0; use a step size such as learning_rate=0.1",
        ),
        (
            lambda: decay_groups(nn.Linear(1, 1), -0.1),
            "weight_decay=-0.1 must be a number of at least 0; use 0 for none, or weight_decay=0.1",
        ),
        (
            lambda: decay_groups(nn.ReLU(), 0.1),
            "model=ReLU has no parameters to optimise; pass a module that has weights",
        ),
        (
            lambda: adamw(nn.Linear(1, 1), -1e-3),
            "learning_rate=-0.001 must be a number of at least 0; use a step size such as learning_rate=1e-3",
        ),
        (
            lambda: adam_l2(nn.Linear(1, 1), 1e-3, betas=(0.9, 1.0)),
            "betas[1]=1.0 must be at least 0 and below 1; try betas[1]=0.9",
        ),
        (
            lambda: adamw(nn.Linear(1, 1), 1e-3, epsilon=-1.0),
            "epsilon=-1.0 must be a number of at least 0; use epsilon=1e-8",
        ),
        (
            lambda: warmup_cosine(optimizer(), 10, 10),
            "warmup=10 must be below total=10; warm up for about a tenth of the steps",
        ),
        (
            lambda: warmup_cosine(optimizer(), 0, 0),
            "total=0 must be at least 1; count the optimiser's steps",
        ),
        (
            lambda: warmup_cosine(optimizer(), 1.5, 10),  # type: ignore[arg-type]
            "warmup=1.5 must be a whole number; count in whole numbers",
        ),
        (
            lambda: warmup_cosine(optimizer(), 1, 10, 1.5),
            "floor=1.5 must be a share from 0 to 1; floor=0.1 ends at a tenth of the learning rate",
        ),
        (lambda: AveragedWeights(nn.Linear(1, 1), 1.0), "decay=1.0 must be at least 0 and below 1; try decay=0.9"),
        (
            lambda: AveragedWeights(nn.ReLU()),
            "model=ReLU has no parameters to average; pass a module that has weights",
        ),
        (
            lambda: AveragedWeights(nn.Linear(1, 1)).swapped().__enter__(),
            "AveragedWeights: updates=0 must be at least 1 for an average to exist; call update() after a step of the"
            " optimiser",
        ),
        (
            swapped_twice,
            "AveragedWeights=update() is not for a model that holds its averages; leave the swapped() block first",
        ),
        (
            lambda: loaded(decay=0.5),
            "decay=0.9 must equal the saved 0.5; build AveragedWeights(model, decay=0.5)",
        ),
        (
            lambda: loaded(averages={"weight": torch.zeros(1, 2)}),
            "averages=bias must be both in the model and in what was saved; load the average of the same model",
        ),
        (
            lambda: loaded(averages={"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}),
            "averages['weight'].shape=(1, 3) must have the model's shape (1, 2); load the average of the same model",
        ),
        (
            lambda: loaded(averages=[torch.zeros(1, 2)]),
            "averages=list must map names of parameters to tensors; pass what state_dict() returned",
        ),
        (
            lambda: loaded(averages={"weight": 3.0, "bias": None}),
            "averages=dict must map names of parameters to tensors; pass what state_dict() returned",
        ),
        (
            lambda: loaded(averages={7: torch.zeros(1, 2), "weight": torch.zeros(1, 2), "bias": torch.zeros(1)}),
            "averages=7 must be both in the model and in what was saved; load the average of the same model",
        ),
        (
            lambda: loaded(averages={"weight": torch.zeros(1, 2, dtype=torch.int64), "bias": torch.zeros(1)}),
            "averages['weight'].dtype=torch.int64 must be floating-point, as torch.float32 is; load the average of the "
            "same model",
        ),
        *(
            (
                lambda updates=updates: loaded(updates=updates),
                f"updates={updates!r} must be a whole number of at least 0; pass what state_dict() returned",
            )
            for updates in (-1, "many", None, 1.5, True)
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_value_rule_and_remedy(act: Callable[[], object], message: str) -> None:
    with pytest.raises((DtypeError, ParameterError, ShapeError), match=f"^{re.escape(message)}$"):
        act()
