"""Methods that kernels answer for: the same results, and certificates that hold for the kernels' own rounding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import avow
from avow.core import Computed, Method, Problem
from avow.errors import NotDifferentiable
from avow.kernels import availability
from avow.kernels.interpreted import interpret

interpret()

from triton.runtime import interpreter

from avow.kernels import chunking, feature_attention, problems
from avow.methods import random_features
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.nn.memory import RandomDraw, memory_of
from avow.numerics import features as feature_maps
from avow.numerics import kernel_rounding, scan

pytestmark = pytest.mark.kernels

KINDS = [torch.bfloat16, torch.float16, torch.float32]
at_kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def cut_short(x: Any) -> Any:
    """A block of float32 as tensor cores read it where TF32 is asked for: without its last thirteen bits."""
    if x.data.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
    return interpreter.TensorHandle(bits.view(np.float32), x.dtype)


@pytest.fixture(autouse=True)
def fitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This device has kernels, in short parts, whose TF32 products are as coarse as a GPU's."""
    monkeypatch.setattr(availability, "is_available", lambda device: True)
    monkeypatch.setattr(chunking, "_WHOLE", 16)
    dot = interpreter.InterpreterBuilder.create_dot

    def coarse(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        if precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = cut_short(a), cut_short(b)
        return dot(self, a, b, d, precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", coarse)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        yield


def drawn(kind: torch.dtype, h: int, g: int, n: int, d: int, e: int, size: float = 1.0) -> tuple[Tensor, ...]:
    shapes = ((1, h, n, d), (1, g, n, d), (1, g, n, e))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return (size * q).to(kind), (size * k).to(kind), v.to(kind)


def hostile(kind: torch.dtype) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Inputs that kernels take, each bad for a sum of its own."""
    yield "grouped heads, odd sizes", drawn(kind, 2, 1, 43, 20, 17)
    yield "one key", drawn(kind, 1, 1, 1, 16, 16)
    yield "tiny", drawn(kind, 1, 1, 20, 16, 16, 1e-4)
    q, k, v = drawn(kind, 1, 1, 36, 16, 16)
    k[:, :, 17] *= 2
    yield "a loud key in the middle", (q, k, v)
    q, k, v = drawn(kind, 1, 1, 36, 16, 16)
    # What is rounded the same way many times does not average out.
    yield "one key many times, one value", (q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), torch.ones_like(v))
    q, k, v = drawn(kind, 1, 1, 36, 16, 16)
    yield (
        "values that cancel",
        (q, k[:, :, :1].expand_as(k), v * torch.tensor([1.0, -1.0]).to(kind).repeat(18)[:, None]),
    )
    q, k, v = drawn(kind, 1, 1, 30, 16, 16)
    # A row of small values under a head of large ones.
    yield "large values come late", (q, k, v * torch.logspace(-2, 3, 30)[:, None].to(kind))


def estimate(p: Problem, directions: Tensor) -> Tensor:
    """What these very directions give in float64, pair by pair."""
    siblings = p.q.shape[1] // p.k.shape[1]
    q, k, v = p.q.double(), *(x.double().repeat_interleave(siblings, 1) for x in (p.k, p.v))
    root = math.sqrt(abs(p.scale))
    keys = k * root @ directions.mT - 0.5 * abs(p.scale) * k.square().sum(-1, keepdim=True)
    rows = q * math.copysign(root, p.scale) @ directions.mT
    log = torch.logsumexp(rows.unsqueeze(-2) + keys.unsqueeze(-3), -1)
    n = q.shape[2]
    return torch.softmax(log.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf), -1) @ v


def apart(p: Problem, out: Tensor, truth: Tensor) -> Tensor:
    """Errors of rows in lengths of the largest value they see."""
    lengths = torch.linalg.vector_norm(p.v.double(), dim=-1)
    seen = lengths.cummax(-1).values if p.causal else lengths.amax(-1, keepdim=True).expand(-1, -1, p.q.shape[2])
    seen = seen.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / seen


def rounded(method: RandomFeatures, p: Problem, computed: Computed) -> Tensor:
    """The part of a certificate that is about arithmetic, row by row; that about chance would hide it."""
    trace, norms = computed.trace, p.norms
    radii = feature_maps.radii(p, trace.frame, trace.query_radius, trace.key_radius, norms)
    longest = float(torch.linalg.vector_norm(trace.directions, dim=-1).amax())
    moved, rest = method._rounding(p, *radii, longest, trace)
    return (moved + rest).expand(p.q.shape[:3])


@at_kinds
def test_features_are_rounded_by_less_than_the_certificate_says(kind: torch.dtype) -> None:
    for name, (q, k, v) in hostile(kind):
        p = Problem.of(q, k, v, causal=True, enable_gqa=q.shape[1] != k.shape[1])
        method = RandomFeatures(40)
        computed = method.compute(p)
        assert computed.trace.kernel is not None, name
        bound = rounded(method, p, computed)
        errors = apart(p, computed.out, estimate(p, computed.trace.directions))
        assert bool((errors <= bound).all()), f"{name}: {float((errors / bound).max())} of its bound"
        assert float(bound.max()) < 0.1, name
        # The same judge sees a kernel that lost the last bits of its directions.
        short = estimate(p, computed.trace.directions.to(torch.float8_e4m3fn).double())
        if name == "grouped heads, odd sizes" and kind == torch.float32:
            assert bool((apart(p, short.to(kind), estimate(p, computed.trace.directions)) > bound).any())


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale_is_the_same_estimate(scale: float) -> None:
    q, k, v = drawn(torch.float32, 1, 1, 24, 16, 16, 0.5)
    p = Problem.of(q, k, v, causal=True, scale=scale)
    computed = RandomFeatures(40).compute(p)
    assert computed.trace.kernel is not None
    torch.testing.assert_close(computed.out.double(), estimate(p, computed.trace.directions), rtol=1e-4, atol=1e-5)


@at_kinds
def test_attend_keeps_its_certificate_with_kernels(kind: torch.dtype) -> None:
    for name, (q, k, v) in islice(hostile(kind), 0, None, 3):
        shared = q.shape[1] != k.shape[1]
        asked: list[tuple[str, dict[str, Any], tuple[bool, ...]]] = [
            ("random_features", {"features": 40}, (True,)),
            ("separable", {}, (True, False)),
        ]
        for method, settings, causals in asked:
            for causal in causals:
                p = Problem.of(q, k, v, causal=causal, enable_gqa=shared)
                out, cert = avow.attend(q, k, v, method=method, causal=causal, enable_gqa=shared, **settings)
                truth = (RandomFeatures() if method == "random_features" else Separable()).reference(p)
                errors = apart(p, out, truth)
                assert bool((errors <= cert.rows).all()), f"{name}, {method}"


@at_kinds
@pytest.mark.parametrize(("causal", "temperature"), [(True, 1.0), (False, 0.3)])
def test_separable_attention_is_certified_by_how_its_kernels_round(
    kind: torch.dtype, causal: bool, temperature: float
) -> None:
    method = Separable(temperature)
    for name, (q, k, v) in hostile(kind):
        p = Problem.of(q, k, v, causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        computed = method.compute(p)
        assert computed.trace.kernel is not None, name
        promise = method.promise(p, computed, 1.0)
        errors = apart(p, computed.out, method.reference(p))
        assert bool((errors <= promise.rows).all()), name
        assert float(promise.rows.max()) < 0.05, name


def test_steep_and_loud_inputs_keep_their_certificates_without_kernels() -> None:
    steep = torch.sort(torch.randn(1, 1, 60, 16), 2).values * 200
    q, k, v = drawn(torch.float32, 1, 1, 60, 16, 16)
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (Separable(), (q, steep, v)),
        (Separable(), (1e6 * q, k, v)),
        (Separable(), (q, k, 1e12 * v)),
        (Separable(), (q, k, 1e-20 * v)),
        (RandomFeatures(40), (20 * q, k, v)),
        (RandomFeatures(40), (q, 20 * k, v)),
        (RandomFeatures(40), (q, k, 1e12 * v)),
    ]
    for method, inputs in cases:
        p = Problem.of(*inputs, causal=True)
        computed = method.compute(p)
        assert computed.trace.kernel is None
        if isinstance(method, Separable):
            bound = method.promise(p, computed, 1.0).rows
            assert bool((apart(p, computed.out, method.reference(p)) <= bound).all())


def test_masks_frames_and_other_lengths_are_left_to_the_plain_path() -> None:
    q, k, v = drawn(torch.float32, 1, 1, 40, 16, 16)
    for method in (RandomFeatures(40), Separable()):
        for p in (
            Problem.of(q, k, v, causal=True, mask=torch.rand(40) > 0.3),
            Problem.of(q[:, :, :30], k, v, causal=True),
            Problem.of(q.double(), k.double(), v.double(), causal=True),
        ):
            assert method.compute(p).trace.kernel is None
    # Over all keys, features are centred first, and the kernels know no frame but the plain one.
    assert RandomFeatures(40).compute(Problem.of(q, k, v)).trace.kernel is None


@pytest.mark.parametrize(("d", "e"), [(65, 16), (16, 65)])
def test_wide_heads_in_float32_are_left_to_the_plain_path(d: int, e: int) -> None:
    q, k, v = drawn(torch.float32, 1, 1, 20, d, e, 0.5)
    for method in (RandomFeatures(20), Separable()):
        assert method.compute(Problem.of(q, k, v, causal=True)).trace.kernel is None
        short = Problem.of(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
        assert method.compute(short).trace.kernel is not None


def test_a_normaliser_that_left_float32_leaves_the_answer_to_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(torch.float32, 1, 1, 40, 16, 16)
    p = Problem.of(q, k, v, causal=True)
    plain = feature_attention.feature_attention

    def broken(*arguments: Any) -> Any:
        found = plain(*arguments)
        return found._replace(log_normaliser=found.log_normaliser.clone().fill_(math.inf), out=found.out * math.nan)

    monkeypatch.setattr(feature_attention, "feature_attention", broken)
    computed = RandomFeatures(40).compute(p)
    assert computed.trace.kernel is None
    assert bool(torch.isfinite(computed.out).all())


def gradients(method: Any, inputs: tuple[Tensor, ...], seed: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    p = Problem.of(*leaves, causal=True, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1])
    out = method.compute(p, torch.Generator().manual_seed(1)).out
    return list(torch.autograd.grad(out, leaves, seed.to(out.dtype)))


@at_kinds
@pytest.mark.parametrize("method", [RandomFeatures(40), Separable(0.5)], ids=lambda m: m.name)
def test_gradients_are_those_of_float64(method: Any, kind: torch.dtype) -> None:
    inputs = drawn(kind, 2, 1, 40, 16, 16, 0.7)
    seed = torch.randn(1, 2, 40, 16).to(kind)
    truth = gradients(method, tuple(x.double() for x in inputs), seed.double())
    entry = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-19}[kind]
    for name, found, true in zip("qkv", gradients(method, inputs, seed), truth, strict=True):
        off = float(torch.linalg.vector_norm(found.double() - true) / torch.linalg.vector_norm(true))
        assert off <= entry, f"d{name} is {off:.3g} off"


def test_a_state_goes_from_kernels_to_the_plain_path_and_back() -> None:
    q, k, v = drawn(torch.bfloat16, 2, 1, 60, 16, 16, 0.5)
    method, parts = RandomFeatures(40), (slice(0, 20), slice(20, 25), slice(25, 60))
    whole = method.compute(Problem.of(q, k, v, causal=True, enable_gqa=True), torch.Generator().manual_seed(2))
    for plain in ((), (0,), (1, 2)):
        state, outs = None, []
        for i, part in enumerate(parts):
            p = Problem.of(q[:, :, part], k[:, :, part], v[:, :, part], causal=True, enable_gqa=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(availability, "is_available", lambda device, plain=i in plain: not plain)
                computed = method.compute(p, torch.Generator().manual_seed(2), state)
            assert (computed.trace.kernel is None) == (i in plain)
            state = computed.trace.final_state
            outs.append(computed.out)
        torch.testing.assert_close(torch.cat(outs, 2), whole.out, rtol=2e-2, atol=1e-2)


def test_a_gradient_of_a_state_is_refused_and_one_beside_it_is_not() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(torch.bfloat16, 1, 1, 30, 16, 16, 0.5))
    computed = RandomFeatures(40).compute(Problem.of(q, k, v, causal=True))
    computed.out.sum().backward()
    assert k.grad is not None
    with pytest.raises(NotDifferentiable, match="state=sums over keys has no gradient when kernels made it; pass the"):
        computed.trace.final_state.sums.sums.sum().backward()


@pytest.mark.parametrize("method", [RandomFeatures(20), Separable()], ids=lambda m: m.name)
def test_gradients_are_the_same_when_a_checkpoint_computes_the_answer_again(method: Any) -> None:
    inputs = drawn(torch.bfloat16, 1, 1, 20, 16, 16, 0.5)

    def call(*leaves: Tensor) -> Tensor:
        computed = method.compute(Problem.of(*leaves, causal=True), torch.Generator().manual_seed(1))
        assert computed.trace.kernel is not None
        out: Tensor = computed.out
        return out

    leaves = [x.requires_grad_() for x in inputs]
    plain = torch.autograd.grad(call(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_many_features_and_their_gradients_are_those_of_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.requires_grad_() for x in drawn(torch.float32, 1, 1, 20, 16, 16, 0.5)]
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(availability, "is_available", lambda device, kernels=kernels: kernels)
        computed = RandomFeatures(600).compute(Problem.of(*leaves, causal=True), torch.Generator().manual_seed(0))
        assert (computed.trace.kernel is not None) == kernels
        found.append([computed.out, *torch.autograd.grad(computed.out.square().sum(), leaves)])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(mine, 1.01 * plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["separable", "random_features"])
def test_a_decoder_takes_single_tokens_in_by_kernels(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(torch.float32, 2, 1, 12, 16, 16, 0.5)
    method = Separable(0.5) if attention == "separable" else RandomFeatures(20)
    draw = None if attention == "separable" else RandomDraw(RandomFeatures(20), 16)
    taken = []
    name = "column_step" if attention == "separable" else "feature_step"
    honest = getattr(problems, name)

    def counted(*arguments: Any) -> Any:
        taken.append(honest(*arguments))
        return taken[-1]

    monkeypatch.setattr(problems, name, counted)
    answers = []
    for kernels in (True, False):
        monkeypatch.setattr(availability, "is_available", lambda device, kernels=kernels: kernels)
        memory, cuts_at = memory_of(method, draw, 12), [0, 7, 8, 9, 12]
        parts = [slice(*pair) for pair in pairwise(cuts_at)]
        answers.append(torch.cat([memory.read(q[:, :, i], k[:, :, i], v[:, :, i]) for i in parts], 2))
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
    # Of four reads with kernels, the two of one token were answered by a step.
    assert [out is not None for out in taken] == [False, True, True, False]


def test_steps_change_the_state_in_place_and_answer_as_the_plain_path_does() -> None:
    q, k, v = drawn(torch.float32, 2, 1, 6, 16, 20, 0.5)
    whole = Separable(0.5).compute(Problem.of(q, k, v, causal=True, enable_gqa=True)).out
    state = scan.nothing(v, 16, 16)
    for i in range(6):
        one = slice(i, i + 1)
        p = Problem.of(q[:, :, one], k[:, :, one], v[:, :, one], causal=True, enable_gqa=True)
        out = Separable(0.5).step(p, state)
        assert out is not None
        torch.testing.assert_close(out, whole[:, :, one], rtol=1e-4, atol=1e-5)
    assert float(state.total.min()) >= 1
    method = RandomFeatures(40)
    read = method.compute(Problem.of(q, k, v, causal=True, enable_gqa=True), torch.Generator().manual_seed(3))
    begin = scan.nothing(v, 40, 1)
    memory = random_features.FeatureState(read.trace.directions, read.trace.frame, begin)
    for i in range(6):
        one = slice(i, i + 1)
        p = Problem.of(q[:, :, one], k[:, :, one], v[:, :, one], causal=True, enable_gqa=True)
        out = method.step(p, memory)
        assert out is not None
        torch.testing.assert_close(out, read.out[:, :, one], rtol=1e-4, atol=1e-5)
    # What is too loud for one reference is not taken in at all.
    before = begin.sums.clone()
    assert method.step(Problem.of(30 * p.q, p.k, p.v, causal=True, enable_gqa=True), memory) is None
    assert torch.equal(begin.sums, before)


def test_a_gpu_without_kernels_says_why_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    availability.is_available.cache_clear()
    assert not availability.is_available(torch.device("cpu"))
    monkeypatch.setattr(availability, "why_not", lambda device: "Triton is not installed")
    with pytest.warns(RuntimeWarning, match="linear attention runs without its kernels: Triton is not installed"):
        assert not availability.is_available(torch.device("cuda"))
    availability.is_available.cache_clear()
    q, k, v = drawn(torch.float32, 1, 1, 20, 16, 16)
    assert Separable().compute(Problem.of(q, k, v)).trace.kernel is None


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_the_longest_rows_that_kernels_take_have_answers_and_gradients(kind: torch.dtype) -> None:
    """Keys against a direction, rows along one and against one: logarithms of features up to the limit."""
    method, draw = RandomFeatures(64), lambda: torch.Generator().manual_seed(5)
    directions = method.draw(32, draw(), torch.device("cpu"))
    longest = float(torch.linalg.vector_norm(directions, dim=-1).amax())
    length = 0.99 * kernel_rounding._REACH / (longest + kernel_rounding.lift(64)) * 32**0.25
    q, k, v = (x.float() for x in drawn(kind, 2, 2, 60, 32, 32))
    q, k = (x / torch.linalg.vector_norm(x, dim=-1).amax() * length for x in (q, k))
    unit = directions / torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    k[:, :, 5], q[:, :, -1], q[:, :, -2] = -length * unit[0], length * unit[0], -length * unit[1]
    inputs = tuple(x.to(kind) for x in (q, k, v))
    computed = method.compute(Problem.of(*inputs, causal=True), draw())
    assert computed.trace.kernel is not None
    truth = method.compute(Problem.of(*(x.double() for x in inputs), causal=True), draw()).out
    assert float((computed.out.double() - truth).abs().amax()) < 0.05
    seed = torch.randn(1, 2, 60, 32).to(kind)
    wanted = gradients(method, tuple(x.double() for x in inputs), seed.double())
    for own, true in zip(gradients(method, inputs, seed), wanted, strict=True):
        assert float(torch.linalg.vector_norm(own.double() - true)) < 0.02 * float(torch.linalg.vector_norm(true))


def test_nan_lengths_reach_nothing() -> None:
    assert kernel_rounding.reaches(64, 8.0, 1.0, 1.0)
    for bad in (math.nan, math.inf):
        assert not kernel_rounding.reaches(64, 8.0, bad, 1.0)
        assert not kernel_rounding.reaches(64, 8.0, 1.0, bad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("method", [Separable(0.5), RandomFeatures(20)], ids=lambda method: method.name)
def test_derivatives_forward_take_the_plain_path(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(torch.float32, 2, 1, 12, 16, 16, 0.5)
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(availability, "is_available", lambda device, kernels=kernels: kernels)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            problem = Problem.of(q, k, v, causal=True, enable_gqa=True)
            return method.compute(problem, torch.Generator().manual_seed(0)).out

        found.append(torch.func.jvp(call, tuple(inputs), tuple(inputs)))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)
