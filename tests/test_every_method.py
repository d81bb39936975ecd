"""Promises every method makes, whatever it computes: found by looking, judged alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

import avow
from avow.core import Computed, Method, Problem
from avow.core.certify import certify
from avow.core.requirement import RandomStream
from avow.methods import OWN, all_methods
from avow.methods.exact import Exact
from tests.helpers.truth import judge

METHODS = list(all_methods().values())
every_method = pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.name)
either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])

# PyTorch counts its CPU attention kernel nowhere; its own formula for the others applies.
_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(q, k, v)
}


def small(kind: type[Method]) -> Method:
    """The method with small whole numbers where it counts something."""
    return kind(**{p.name: int(min(5, p.rule.high)) for p in kind.declared() if p.type is int})


def tensors(
    n: int = 17,
    s: int = 17,
    heads: int = 4,
    groups: int = 4,
    d: int = 6,
    e: int = 6,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(2, heads, n, d), torch.randn(2, groups, s, d), torch.randn(2, groups, s, e)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def answer(method: Method, problem: Problem, seed: int = 0) -> Tensor:
    return method.compute(problem, torch.Generator().manual_seed(seed)).out


def kept(method: Method, problem: Problem, shrink: float = 1.0) -> bool:
    """Whether every row keeps its bound, shrunk by a factor."""
    computed = method.compute(problem, torch.Generator().manual_seed(0))
    certificate = certify(method, problem, computed, 0.999)
    mask = None if problem.kernel == "rbf" else problem.bias
    rows = certificate.rows.reshape(problem.q.shape[:-1]) * shrink
    return judge(method, problem, computed.out, rows, mask).broken == 0


def without_test_file(names: Iterable[str]) -> list[str]:
    return [name for name in names if not (Path(__file__).parent / f"test_{name}.py").exists()]


def test_every_method_of_avow_has_a_test_file_of_its_own() -> None:
    assert without_test_file(OWN) == []
    assert without_test_file(["exact", "flattened"]) == ["flattened"], "a missing file would be seen"


@every_method
@either_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_its_certificate_on_odd_sizes(kind: type[Method], causal: bool, dtype: torch.dtype) -> None:
    for n, s in ((1, 1), (1, 19), (7, 5), (5, 7), (65, 67), (131, 129)):
        q, k, v = tensors(n, s, 4, 2, 5, 3, dtype)
        method = dataclasses.replace(small(kind), **({"rank": min(5, s)} if kind.name == "low_rank" else {}))
        assert kept(method, Problem.of(q, k, v, causal=causal, enable_gqa=True))


def long_problem(sharpness: float, causal: bool) -> Problem:
    q, k, v = (x[:1] for x in tensors(96, 1500, 2, 1, 8, 8))
    return Problem.of(sharpness * q, k, v, causal=causal, enable_gqa=True)


@every_method
@either_way
def test_keeps_its_certificate_in_every_setting_on_long_sequences(kind: type[Method], causal: bool) -> None:
    # Heads that look at few keys and heads that look at all: what a setting leaves out must show in its bound.
    for sharpness in (0.3, 3.0):
        problem = long_problem(sharpness, causal)
        for method in kind.grid(problem.sizes):
            assert kept(method, problem), method


def test_a_method_that_leaves_out_keys_without_a_word_is_caught() -> None:
    class Windowed(Exact):
        """Exact attention to the last 1,000 keys, which promises what exact attention does."""

        def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
            last = dataclasses.replace(problem, k=problem.k[..., -1000:, :], v=problem.v[..., -1000:, :])
            return dataclasses.replace(super().compute(problem, generator), out=super().compute(last, generator).out)

    assert not kept(Windowed(), long_problem(0.3, causal=False))


@every_method
def test_a_certificate_ten_thousand_times_too_small_is_caught(kind: type[Method]) -> None:
    method, problem = small(kind), Problem.of(*tensors(33, 33))
    # Only a bound of zero, for values that are copied, is none too small.
    nothing = torch.zeros(problem.q.shape[:-1])
    copies = judge(method, problem, answer(method, problem), nothing, None).broken == 0
    assert copies or not kept(method, problem, shrink=1e-4)


@every_method
@either_way
def test_operations_are_counted_to_the_last(kind: type[Method], causal: bool) -> None:
    for n, s, heads, groups in ((17, 17, 4, 4), (70, 130, 4, 2), (130, 70, 4, 1), (1100, 1100, 2, 2)):
        q, k, v = tensors(n, s, heads, groups)
        for mask in (None, torch.ones(2, 1, 1, s, dtype=torch.bool), torch.randn(n, s)):
            if kind.name != "exact" and n > 1000 and mask is not None:
                continue
            problem = Problem.of(q, k, v, causal=causal, enable_gqa=True, mask=mask)
            method = small(kind)
            with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
                answer(method, problem)
            assert method.cost(problem.sizes).flops == counter.get_total_flops()


@every_method
@either_way
def test_gradients_are_those_of_the_computed_function(kind: type[Method], causal: bool) -> None:
    q, k, v = (x[:1].double().requires_grad_() for x in tensors(5, 6, 2, 1, 3, 2))
    padding = torch.tensor([True, True, False, True, True, True])

    def through(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return answer(small(kind), Problem.of(q, k, v, causal=causal, mask=padding, enable_gqa=True))

    assert torch.autograd.gradcheck(through, (q, k, v))


@every_method
def test_gradients_flow_through_long_sequences_and_biases(kind: type[Method]) -> None:
    q, k, v = (x.double().requires_grad_() for x in tensors(1100, 1100, 1, 1, 3, 2))
    bias = torch.zeros(1100, dtype=torch.float64, requires_grad=True)
    problem, given = Problem.of(q, k, v, causal=True, mask=bias), (q, k, v, bias)
    # To whatever the target depends on: a mechanism may ignore its keys.
    targets = torch.autograd.grad(small(kind).reference(problem).square().sum(), given, allow_unused=True)
    found = torch.autograd.grad(answer(small(kind), problem).square().sum(), given, allow_unused=True)
    assert [x is not None and bool(x.any()) for x in found] == [x is not None and bool(x.any()) for x in targets]
    assert all(bool(torch.isfinite(x).all()) for x in found if x is not None)


@every_method
@either_way
def test_masked_keys_leave_the_normaliser(kind: type[Method], causal: bool) -> None:
    q, k, v = tensors()
    seen = torch.rand(2, 1, 1, 17) < 0.6
    hidden = ~seen.expand(2, 4, 17, 17)[..., 0, :]
    k2, v2 = k.clone(), v.clone()
    k2[hidden], v2[hidden] = 7.0, -9.0
    first = answer(small(kind), Problem.of(q, k, v, mask=seen, causal=causal))
    second = answer(small(kind), Problem.of(q, k2, v2, mask=seen, causal=causal))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, answer(small(kind), Problem.of(q, k, v, causal=causal)))


@every_method
@either_way
def test_a_row_that_sees_nothing_is_zero(kind: type[Method], causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    mask = torch.rand(17, 17) < 0.5
    mask[3] = mask[0] = False
    for seen in (mask, torch.arange(17).expand(2, 1, 1, 17) >= 4):
        out, certificate = avow.attend(q, k, v, method=kind.name, mask=seen, causal=causal, **small(kind).parameters)
        blind = ~(seen.expand(2, 1, 17, 17) & (torch.ones(17, 17).tril().bool() if causal else True)).any(-1)[:, 0]
        if blind.any():
            assert float(out.detach().transpose(1, 2)[blind].abs().max()) == 0.0
            assert float(certificate.rows.transpose(1, 2)[blind].abs().max()) == 0.0
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
        assert all(bool(torch.isfinite(x).all()) for x in grads if x is not None)


@every_method
@pytest.mark.parametrize("n, now", [(40, 23), (900, 451)])
def test_the_future_is_not_seen(kind: type[Method], n: int, now: int) -> None:
    q, k, v = tensors(n, n)
    later = torch.arange(n) >= now
    k2, v2 = (torch.where(later[:, None], torch.randn_like(x), x) for x in (k, v))
    first, second = (Problem.of(q, key, value, causal=True) for key, value in ((k, v), (k2, v2)))
    if small(kind).selects_landmarks or small(kind).selects_tokens:
        # What is read is chosen with a look at all keys: both answers stay within their own certificates of one target.
        assert kept(small(kind), first) and kept(small(kind), second)
        return
    torch.testing.assert_close(answer(small(kind), first)[..., :now, :], answer(small(kind), second)[..., :now, :])
    assert not torch.allclose(answer(small(kind), first)[..., now:, :], answer(small(kind), second)[..., now:, :])


@every_method
@either_way
def test_strides_do_not_matter_and_inputs_are_left_alone(kind: type[Method], causal: bool) -> None:
    q, k, v = tensors()
    expected = answer(small(kind), Problem.of(q, k, v, causal=causal))
    strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    strange[1] = torch.stack([k, k], -1)[..., 1]
    before = [x.clone() for x in strange]
    torch.testing.assert_close(answer(small(kind), Problem.of(*strange, causal=causal)), expected)
    assert all(torch.equal(x, y) for x, y in zip(strange, before, strict=True))


@every_method
@either_way
def test_one_expanded_head_is_that_head_repeated(kind: type[Method], causal: bool) -> None:
    q, k, v = (x[:1, :1].expand(2, 4, -1, -1) for x in tensors())
    out, _ = avow.attend(q, k, v, method=kind.name, causal=causal, **small(kind).parameters)
    copied, _ = avow.attend(q.clone(), k.clone(), v.clone(), method=kind.name, causal=causal, **small(kind).parameters)
    assert out.shape == copied.shape and bool(torch.isfinite(out).all())


@every_method
@either_way
def test_grouped_heads_equal_repeated_keys(kind: type[Method], causal: bool) -> None:
    if small(kind).random and small(kind).selects_landmarks:
        # Each key head draws landmarks of its own; the certificate is the promise that holds for both.
        assert kept(small(kind), Problem.of(*tensors(groups=2), causal=causal, enable_gqa=True))
        return
    q, k, v = tensors(groups=2)
    shared = answer(small(kind), Problem.of(q, k, v, causal=causal, enable_gqa=True))
    k4, v4 = (x.repeat_interleave(2, 1) for x in (k, v))
    apart = answer(small(kind), Problem.of(q, k4, v4, causal=causal))
    torch.testing.assert_close(
        shared, apart, rtol=1e-4, atol=1e-5
    ) if causal or kind.name != "random_features" else None
    assert kept(small(kind), Problem.of(q, k, v, causal=causal, enable_gqa=True))


@every_method
def test_any_number_of_leading_axes(kind: type[Method]) -> None:
    q, k, v = (x.double() for x in tensors())
    whole = answer(small(kind), Problem.of(q[:1], k[:1], v[:1]))
    flat, _ = avow.attend(
        q[0], k[0], v[0], method=kind.name, generator=RandomStream().manual_seed(0), **small(kind).parameters
    )
    assert flat.shape == (4, 17, 6)
    torch.testing.assert_close(flat, whole[0])
    deep = [x.reshape(1, 2, 4, 17, 6) for x in (q, k, v)]
    mask = torch.rand(1, 2, 1, 17, 17) < 0.8
    assert avow.attend(*deep, mask=mask, method=kind.name, **small(kind).parameters).out.shape == (1, 2, 4, 17, 6)


@every_method
def test_all_chance_is_the_generators(kind: type[Method]) -> None:
    q, k, v = tensors(33, 33)
    problem, method = Problem.of(q, k, v), small(kind)
    before = torch.get_rng_state()
    assert torch.equal(answer(method, problem, seed=1), answer(method, problem, seed=1))
    assert kind.random or torch.equal(answer(method, problem, seed=1), answer(method, problem, seed=2))
    method.estimate_bound(problem, 0.9)
    avow.plan(q, k, v, tol=1e-2, confidence=0.9)
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator was drawn from"
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


@every_method
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty_sequences_give_empty_or_zero_answers(kind: type[Method], shape: tuple[int, int]) -> None:
    n, s = shape
    q, k, v = (x.requires_grad_() for x in (torch.randn(2, 4, n, 6), torch.randn(2, 4, s, 6), torch.randn(2, 4, s, 3)))
    least: dict[str, Any] = {p.name: 1 for p in kind.declared() if p.type is int}
    out, certificate = avow.attend(q, k, v, method=kind.name, **least)
    assert out.shape == (2, 4, n, 3) and float(out.detach().abs().sum()) == 0.0 and certificate.bound == 0.0
    out.sum().backward()


@every_method
@either_way
@pytest.mark.parametrize("lead", [(0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)], ids=str)
def test_no_heads_at_all_give_an_empty_answer(
    kind: type[Method], causal: bool, lead: tuple[int, int], shape: tuple[int, int]
) -> None:
    n, s = shape
    q, k = torch.randn(*lead, n, 6), torch.randn(*lead, s, 6)
    least: dict[str, Any] = {p.name: 1 for p in kind.declared() if p.type is int}
    out, certificate = avow.attend(q, k, k, method=kind.name, causal=causal, **least)
    assert out.shape == (*lead, n, 6) and certificate.bound == 0.0
    assert certificate.cost is not None and min(certificate.cost.flops, certificate.cost.peak_bytes) >= 0


@every_method
@either_way
def test_compiles_into_one_graph(kind: type[Method], causal: bool) -> None:
    problem = Problem.of(*tensors(70, 70), causal=causal)
    method = small(kind)

    def out(p: Problem) -> Tensor:
        return method.compute(p).out

    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(out, fullgraph=True, backend="aot_eager")(problem)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled, out(problem))


@pytest.mark.parametrize("kind", [k for k in METHODS if k.target == "softmax attention"], ids=lambda kind: kind.name)
def test_rbf_is_dot_product_attention_with_shifted_logits(kind: type[Method]) -> None:
    q, k, v = (x.double() for x in tensors())
    problem = Problem.of(q, k, v, kernel="rbf", sigma=0.7)
    distances = -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / 1.4
    torch.testing.assert_close(small(kind).reference(problem), torch.softmax(distances, -1) @ v)
    for causal in (False, True):
        assert kept(small(kind), Problem.of(q, k, v, kernel="rbf", sigma=0.7, causal=causal))


@every_method
def test_the_certificate_survives_json(kind: type[Method]) -> None:
    _, certificate = avow.attend(*tensors(), method=kind.name, **small(kind).parameters)
    assert avow.Certificate.from_json(certificate.to_json()) == certificate
    assert kind.name in str(certificate)


@every_method
def test_settings_fit_the_sizes_they_are_offered_for(kind: type[Method]) -> None:
    sizes = Problem.of(*tensors(40, 40)).sizes
    offered = list(kind.grid(sizes))
    assert offered
    for method in offered:
        method.check(sizes)
        assert math.isfinite(method.cost(sizes).flops)


def test_the_judge_accepts_the_truth_and_rejects_a_lie() -> None:
    kind = all_methods()["exact"]
    problem = Problem.of(*tensors(9, 9, dtype=torch.float64))
    truth = kind().reference(problem)
    bounds = torch.full(problem.q.shape[:-1], 1e-12, dtype=torch.float64)
    assert judge(kind(), problem, truth, bounds, None).broken == 0
    lie = truth.clone()
    lie[0, 0, 0, 0] += 1e-9
    assert judge(kind(), problem, lie, bounds, None).broken == 1
    assert isinstance(Computed(truth).out, Tensor)
