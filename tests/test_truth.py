"""The reference that judges certificates: it knows answers that are known otherwise, and shares nothing with avow."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb
from torch import Tensor

from tests.faults import FLOATS
from tests.helpers import truth
from tests.helpers.truth import KNOWN, LATENT, SEPARABLE, SOFTMAX, Question, errors, verdict

PARAMETERS = {SOFTMAX: {}, SEPARABLE: {"temperature": 0.7}, LATENT: {"latents": 3, "segment": 4}}


def question(target: str = SOFTMAX, dtype: torch.dtype = torch.float32, size: float = 1.0, **about: object) -> Question:
    q, k, v = (torch.randn(2, h, length, 4, dtype=torch.float64) for h, length in ((4, 5), (2, 11), (2, 11)))
    q, k, v = (x.to(dtype) for x in (q * size, k, v))
    return Question(q, k, v, target=target, parameters=PARAMETERS[target], **about)  # type: ignore[arg-type]


def answer(asked: Question) -> Tensor:
    """What floats hold for the truth."""
    return torch.from_numpy(truth._TARGETS[asked.target](asked, truth._Arrays.of(asked))[0].astype(np.float64))


def test_it_imports_nothing_of_what_it_judges() -> None:
    tree = ast.parse(Path(truth.__file__).read_text())
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in found if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in found if isinstance(node, ast.ImportFrom)]
    assert names and not [name for name in names if name.startswith("avow")]


def test_two_keys_weigh_as_their_logits_say() -> None:
    # Weights 1/(1 + e^−2) and the rest: an answer by hand, in float64.
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = torch.tensor([2.0, 0.0]).double().reshape(1, 1, 2, 1), torch.tensor([1.0, 0.0]).double().reshape(1, 1, 2, 1)
    out = one / (1 + math.exp(-2))
    asked = Question(one, k, v, scale=1.0)
    assert verdict(asked, out, torch.full((1, 1, 1), 1e-15)).broken == 0
    assert verdict(asked, out * (1 + 1e-12), torch.full((1, 1, 1), 1e-15)).broken == 1


def test_the_bias_of_the_first_broken_certificate_is_read_as_it_was_given() -> None:
    # bfloat16, k = (0, 260), bias (3.09375, −256): the second key has the larger logit, by 0.90625.
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 260.0]), torch.tensor([1.0, 0.0])
    bias = torch.tensor([[3.09375, -256.0]])
    asked = Question(*(x.reshape(1, 1, -1, 1).bfloat16() for x in (q, k, v)), bias.bfloat16(), scale=1.0)
    share = 1 / (1 + math.exp(260 - 256 - 3.09375))
    assert float(answer(asked)) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("target", KNOWN)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e-40])
def test_floats_are_as_near_to_balls_as_they_say(target: str, dtype: str, size: float) -> None:
    bias = torch.randn(5, 11) * 5
    bias[:, ::4] = -math.inf
    for mask, causal in ((None, False), (bias, True), (bias > 0, False)):
        asked = question(target, FLOATS[dtype], size, mask=mask, causal=causal)
        out = answer(asked) * (1 + 1e-4)  # off by so much that a distance is known well
        error, own, _ = errors(asked, out)
        for row in ((0, 0, 0), (1, 3, 4), (0, 2, 2)):
            actual = truth._at_precision(400, asked, out.numpy(), *row)
            assert abs(float(actual.mid()) - float(error[row])) <= float(own[row]) + 1e-15 * float(error[row])
            assert actual.rad() < arb(1e-40)


@pytest.mark.parametrize("target", KNOWN)
def test_a_truth_is_accepted_and_a_lie_is_not(target: str) -> None:
    asked = question(target)
    bounds = torch.full((2, 4, 5), 1e-13, dtype=torch.float64)
    out = answer(asked)
    assert verdict(asked, out, bounds).broken == 0
    out[1, 2, 3] += 1e-9
    found = verdict(asked, out, bounds)
    assert found.broken == 1 and found.which == ((1, 2, 3),)


def test_what_floats_cannot_decide_goes_to_balls() -> None:
    # Logits of 1e17 leave float64 no digit behind the point, and the keys are one part in 1e16 apart.
    q = torch.full((1, 1, 1, 1), 1e9).float()
    k = torch.tensor([1e8, 1e8 + 8]).float().reshape(1, 1, 2, 1)
    v = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    asked = Question(q, k, v, scale=1 / 3)
    found = verdict(asked, torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), 1e-6))
    assert found.by_balls == 1 and found.broken == 0
    assert verdict(asked, torch.full((1, 1, 1, 1), 1e-3), torch.full((1, 1, 1), 1e-6)).broken == 1


def test_nan_in_an_answer_or_in_a_bound_breaks_a_promise_and_no_bound_promises_nothing() -> None:
    asked, bounds = question(), torch.full((2, 4, 5), 3.0, dtype=torch.float64)
    out = answer(asked)
    assert verdict(asked, out * math.nan, bounds).broken == 40
    assert verdict(asked, out, bounds * math.nan).broken == 40
    assert verdict(asked, out * 1e6, bounds * math.inf).broken == 0


def test_a_row_that_sees_nothing_must_be_zero() -> None:
    asked = question(mask=torch.zeros(5, 11, dtype=torch.bool))
    bounds = torch.zeros(2, 4, 5, dtype=torch.float64)
    assert verdict(asked, torch.zeros(2, 4, 5, 4), bounds).broken == 0
    assert verdict(asked, torch.full((2, 4, 5, 4), 1e-30), bounds).broken == 40


def test_the_unit_is_the_longest_value_that_a_row_sees() -> None:
    q, k, v = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), torch.tensor([1.0, 1000.0]).reshape(1, 1, 2, 1)
    asked = Question(q, k, v, causal=True)
    error, _, longest = errors(asked, torch.tensor([1.5, 501.0]).reshape(1, 1, 2, 1))
    assert longest.tolist() == [[[1.0, 1000.0]]]
    assert error[0, 0].tolist() == pytest.approx([0.5, 5e-4], rel=1e-12)


def test_nothing_is_judged_while_subnormal_numbers_are_read_as_zero() -> None:
    asked = question()
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="judge outside"):
            errors(asked, torch.zeros(2, 4, 5, 4))
    finally:
        torch.set_flush_denormal(False)


def test_overlapping_memory_is_read_as_the_numbers_it_shows() -> None:
    base = torch.randn(1, 1, 14)
    asked = Question(base.unfold(-1, 4, 1), base.unfold(-1, 4, 1), base.unfold(-1, 4, 1)[..., :1].expand(1, 1, 11, 3))
    plain = Question(*(x.contiguous() for x in (asked.q, asked.k, asked.v)))
    assert torch.equal(answer(asked), answer(plain))
