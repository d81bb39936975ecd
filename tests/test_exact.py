"""What only `exact` promises: every scale, every mask, every norm, and a bound that knows its own arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.core import Problem
from avow.errors import RangeError
from avow.methods import exact
from avow.methods.exact import Exact, _fused_on_cpu
from avow.numerics import rounding
from tests.helpers.truth import judge

LOWEST = torch.finfo(torch.float32).min


def tensors(n: int = 9, s: int = 9, d: int = 4, e: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 3, *shape).to(dtype) for shape in ((n, d), (s, d), (s, e))]


@contextmanager
def matmul_precision(word: str) -> Iterator[None]:
    """The user's switch for float32 products on a CPU, put back afterwards."""
    switch = torch.backends.mkldnn.matmul
    switch.fp32_precision = word
    try:
        yield
    finally:
        switch.fp32_precision = "none"


def broken_rows(problem: Problem, out: Tensor, bounds: Tensor) -> int:
    return judge(Exact(), problem, out, bounds.expand(problem.q.shape[:-1]), None).broken


@pytest.mark.parametrize("scale", [0.0, -0.5, -3.0])
def test_a_scale_of_zero_or_below_with_causality_is_computed_rightly(scale: float) -> None:
    q, k, v = tensors()
    out, certificate = avow.attend(q, k, v, causal=True, scale=scale)
    assert broken_rows(Problem.of(q, k, v, causal=True, scale=scale), out, certificate.rows) == 0
    assert certificate.bound < 1e-4


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_the_bare_kernel_answers_nan_there(scale: float) -> None:
    # When this fails PyTorch has mended its kernel, and the sign need no longer move into the queries.
    assert bool(scaled_dot_product_attention(*tensors(), is_causal=True, scale=scale).isnan().any())


@pytest.mark.parametrize("low", [LOWEST, -1e9])
def test_one_large_number_over_a_whole_row_changes_nothing(low: float) -> None:
    q, k, v = tensors()
    bias = torch.zeros(9, 9)
    bias[::2] = low
    plain, shifted = avow.attend(q, k, v), avow.attend(q, k, v, mask=bias)
    assert broken_rows(Problem.of(q, k, v), shifted.out, shifted.certificate.rows) == 0
    torch.testing.assert_close(shifted.out, plain.out, rtol=0, atol=1e-6)
    assert shifted.certificate.bound < 1e-3
    swallowed = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert not torch.allclose(swallowed, plain.out, atol=1e-2), "the bare kernel loses the logits; so would the test"


@pytest.mark.parametrize("low", [LOWEST, -1e9])
def test_a_large_negative_number_over_some_keys_hides_them(low: float) -> None:
    q, k, v = tensors()
    hidden = torch.rand(9, 9) < 0.5
    hidden[:, 0] = False
    finite = avow.attend(q, k, v, mask=torch.zeros(9, 9).masked_fill(hidden, low))
    infinite = avow.attend(q, k, v, mask=~hidden)
    torch.testing.assert_close(finite.out, infinite.out)


def test_norms_of_1e30_give_a_finite_answer_in_float64_arithmetic() -> None:
    q, k, v = tensors()
    q, k, v = q * 1e30, k * 1e30, v * 1e30
    out, certificate = avow.attend(q, k, v)
    assert bool(torch.isfinite(out).all())
    assert certificate.parameters == {"precision": "float64"} and certificate.bound <= 2.1
    assert broken_rows(Problem.of(q, k, v), out, certificate.rows) == 0
    assert not bool(torch.isfinite(scaled_dot_product_attention(q, k, v)).all())


def test_values_of_1e30_alone_keep_a_small_bound() -> None:
    q, k, v = tensors()
    out, certificate = avow.attend(q, k, v * 1e30, tol=1e-4)
    assert broken_rows(Problem.of(q, k, v * 1e30), out, certificate.rows) == 0


def test_native_arithmetic_that_would_overflow_is_refused() -> None:
    q, k, v = tensors()
    text = 'exact: precision=native torch.float32 would overflow; use precision="float64"'
    with pytest.raises(RangeError, match=re.escape(text)):
        avow.attend(q * 1e30, k * 1e30, v, method="exact", precision="native")
    assert avow.attend(q * 1e10, k * 1e10, v, method="exact", precision="native").certificate.bound <= 2.1


def test_logits_beyond_float64_are_refused() -> None:
    q, k, v = tensors(dtype=torch.float64)
    with pytest.raises(RangeError, match=re.escape("must be at most 1e+150; scale it down")):
        avow.attend(q * 1e155, k, v)
    with pytest.raises(RangeError, match=re.escape("largest norm of scale*|q|*|k|=")):
        avow.attend(q * 1e148, k * 1e148, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "e"), [(3, 7), (7, 3), (1, 5)])
def test_values_may_be_wider_or_narrower_than_keys(d: int, e: int, causal: bool) -> None:
    q, k, v = tensors(d=d, e=e)
    out, certificate = avow.attend(q, k, v, causal=causal)
    assert out.shape == (2, 3, 9, e)
    assert broken_rows(Problem.of(q, k, v, causal=causal), out, certificate.rows) == 0


@pytest.mark.parametrize(("word", "unit"), [("bf16", 2.0**-8), ("tf32", 2.0**-10)])
def test_products_that_are_narrower_widen_the_bound(word: str, unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_narrows_on_cpu", lambda *_: True)
    q, k, v = tensors()
    before = avow.attend(q, k, v).certificate.bound
    wide = avow.attend(q.double(), k.double(), v.double()).certificate.bound
    with matmul_precision(word):
        lowered = avow.attend(q, k, v).certificate.bound
        assert before < 1e-4 < unit < lowered
        assert avow.attend(q.double(), k.double(), v.double()).certificate.bound == wide
    assert avow.attend(q, k, v).certificate.bound == before


@pytest.mark.parametrize("word", ["bf16", "tf32"])
def test_a_switch_that_changes_no_product_on_this_cpu_changes_no_bound(word: str) -> None:
    q, k, v = tensors()
    before = avow.attend(q, k, v).certificate.bound
    with matmul_precision(word):
        out, certificate = avow.attend(q, k, v)
        narrows = rounding._narrows_on_cpu(word, torch.backends.mkldnn.enabled)
    assert (certificate.bound > 2.0**-10) if narrows else (certificate.bound == before)
    assert broken_rows(Problem.of(q, k, v), out, certificate.rows) == 0


def _biased(dtype: torch.dtype, biases: str) -> tuple[Tensor, ...]:
    """q, k, v and a bias of the inputs' own type, whose differences that type has no room for."""
    torch.manual_seed(0)
    keys = {"two keys": ((0.0, 260.0), (3.09375, -256.0)), "far apart": ((-60160.0, 59904.0), (60160.0, -59904.0))}
    if biases in keys:
        k, bias = (torch.tensor(x) for x in keys[biases])
        shaped = (torch.ones(1, 1), k[:, None], torch.tensor([[1.0], [-1.0]]), bias[None])
        return tuple(x.to(dtype)[None, None] for x in shaped)
    q, k, v = torch.randn(3, 1, 2, 48, 8).unbind()
    return q.to(dtype), (8 * k).to(dtype), v.to(dtype), (6 * torch.randn(1, 2, 48, 48)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", ["two keys", "Gaussian", "far apart"])
def test_a_bias_in_half_precision_is_added_as_it_is(dtype: torch.dtype, biases: str) -> None:
    q, k, v, bias = _biased(dtype, biases)
    out, certificate = avow.attend(q, k, v, mask=bias, scale=1.0)
    logits = q.double() @ k.double().mT + bias.double()
    truth = torch.softmax(logits, -1) @ v.double()
    longest = v.double().norm(dim=-1).amax(-1)[..., None]
    error = (out.double() - truth).norm(dim=-1) / longest
    assert certificate.parameters["precision"] == "native"
    assert bool((error <= certificate.rows).all())
    # What was lost in half precision breaks the bound: the test can fail.
    top = bias.amax(-1, keepdim=True)
    lost = torch.softmax(q.double() @ k.double().mT + (bias - top).double(), -1) @ v.double()
    assert bool(((lost - truth).norm(dim=-1) / longest > certificate.rows).any())


_LAYOUTS = {
    "one row for all keys": lambda: torch.randn(1, 2, 1, 16).expand(1, 2, 2**17, 16),
    "overlapping rows": lambda: torch.full((1, 2, 2**17 + 15), 1.0).add_(2e-5).unfold(-1, 16, 1),
    "transposed": lambda: torch.full((1, 2, 16, 2**17), 1.00002).mT,
    "every other feature": lambda: torch.full((1, 2, 2**17, 32), 1.00002)[..., ::2],
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_values_of_any_layout_are_summed_as_the_bound_says(layout: str) -> None:
    v = _LAYOUTS[layout]()
    q, k = torch.zeros(1, 2, 40, 16), torch.zeros(1, 1, 1, 16).expand(v.shape)
    out, certificate = avow.attend(q, k, v)
    error = (out.double() - v.double().mean(-2, keepdim=True)).norm(dim=-1) / v.double().norm(dim=-1).amax()
    assert float(error.amax()) <= certificate.bound < 1e-3


def test_overlapping_rows_given_to_the_kernel_itself_would_break_the_bound() -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 2, 1, 16).expand(1, 2, 2**18, 16)
    q, k = torch.zeros(1, 2, 40, 16), torch.zeros(1, 1, 1, 16).expand(v.shape)
    bound = avow.attend(q, k, v).certificate.bound
    error = (_fused_on_cpu(q, k, v, None, False, 1.0) - v[:, :, :1]).norm(dim=-1) / v[:, :, :1].norm(dim=-1)
    assert float(error.amax()) > bound


@pytest.mark.parametrize("size", [1e-36, 1e-40, 1e-44])
@pytest.mark.parametrize("method", ["exact", "sparse", "low_rank", "random_features", "separable", "latent"])
def test_no_bound_is_beyond_what_the_answers_length_tells(method: str, size: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 128, 16).unbind()
    out, certificate = avow.attend(q, k, size * v, method=method)
    assert certificate.bound <= 2.01
    assert float(out.double().norm(dim=-1).amax()) <= 1.01 * float((size * v).double().norm(dim=-1).amax())


def test_values_near_underflow_are_summed_near_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 512, 16).unbind()
    v = (1e-35 * v).contiguous()
    out, certificate = avow.attend(q, k, v)
    assert certificate.bound < 1e-2  # sums of products that underflow could promise 2 only
    assert broken_rows(Problem.of(q, k, v), out, certificate.rows) == 0


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
@pytest.mark.parametrize("precision", ["native", "float32", "float64"])
def test_a_half_precision_bound_contains_the_rounding_of_the_output(
    dtype: torch.dtype, unit: float, precision: str
) -> None:
    q, k, v = tensors(dtype=dtype)
    out, certificate = avow.attend(q, k, v, method="exact", precision=precision)
    assert float(certificate.relative_rows.min()) >= unit
    problem = Problem.of(q, k, v)
    assert broken_rows(problem, out, certificate.rows) == 0
    # Outputs do round: a bound without their unit would be broken.
    assert broken_rows(problem, out, torch.tensor(unit / 100)) > 0


def test_wider_arithmetic_never_has_the_wider_bound() -> None:
    q, k, v = (8 * x for x in tensors(dtype=torch.bfloat16))
    bounds = [
        avow.attend(q, k, v, method="exact", precision=word).certificate.bound
        for word in ("native", "float32", "float64")
    ]
    assert bounds[0] > bounds[1] > bounds[2] >= 2.0**-8


def test_the_certificate_of_one_key_is_only_rounding() -> None:
    q, k, v = tensors(s=1)
    out, certificate = avow.attend(1e8 * q, 1e8 * k, v)
    assert torch.equal(out, v.expand_as(out))
    assert certificate.bound < 1e-5
    assert avow.attend(1e8 * q, 1e8 * tensors()[1], tensors()[2]).certificate.bound > 1


def test_near_ties_among_huge_logits_keep_the_bound() -> None:
    # Two keys one unit in the last place apart, at logits near 1e4: rounding alone decides between them.
    q = 1e4 * (1 + torch.rand(1, 4, 64, 3)) / math.sqrt(3)
    k = torch.rand(1, 4, 1, 3) + 0.5
    k = torch.cat([k, torch.nextafter(k, torch.tensor(math.inf))], -2)
    v = torch.tensor([[1.0], [-1.0]]).expand(1, 4, 2, 1)
    out, certificate = avow.attend(q, k, v, scale=1.0)
    problem = Problem.of(q, k, v, scale=1.0)
    assert broken_rows(problem, out, certificate.rows) == 0
    assert certificate.bound < 0.1
    # What would do for ordinary logits is broken here: the logits do round.
    ordinary = avow.attend(q / 1e4, k, v, scale=1.0).certificate.bound
    assert broken_rows(problem, out, torch.tensor(ordinary)) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_settings_are_the_input_type_and_all_that_are_wider(dtype: torch.dtype) -> None:
    sizes = Problem.of(*tensors(dtype=dtype)).sizes
    words = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3}
    found = [Exact("native"), *(Exact(word) for word in ("float32", "float64"))]
    assert len(list(Exact.grid(sizes))) == words[dtype]
    assert [method for method in found if method in list(Exact.grid(sizes))] == list(Exact.grid(sizes))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> list[torch.dtype]:
    """Attention in half precision on a GPU whose fused kernels raise this; the types of the calls that were made."""
    calls = []

    def call(q: Tensor, *_: Tensor, **__: object) -> Tensor:
        calls.append(q.dtype)
        if q.dtype == torch.float16:
            raise error
        return q

    monkeypatch.setattr(exact, "scaled_dot_product_attention", call)
    monkeypatch.setattr(exact, "_quickest", lambda *_: [SDPBackend.FLASH_ATTENTION])
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, dtype=torch.float16, device="cuda")
        exact._fastest(q, q, q, None, False, 1.0)
    return calls


def test_a_kernel_that_does_not_take_these_sizes_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = RuntimeError("No available kernel. Aborting execution.")
    assert on_a_gpu(monkeypatch, refusal) == [torch.float16, torch.float32]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: an illegal memory access"),
    ],
)
def test_any_other_error_of_a_kernel_is_raised_and_nothing_larger_tried(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    with pytest.raises(type(error), match="memory"):
        on_a_gpu(monkeypatch, error)


def test_without_room_to_measure_kernels_the_call_itself_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def measured(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def kernels(backends: list[SDPBackend], set_priority: bool) -> AbstractContextManager[None]:
        chosen.extend(backends)
        return nullcontext()

    monkeypatch.setattr(exact, "scaled_dot_product_attention", lambda q, *_, **__: q)
    monkeypatch.setattr(exact, "_quickest", measured)
    monkeypatch.setattr(exact, "sdpa_kernel", kernels)
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, dtype=torch.float16, device="cuda")
        exact._fastest(q, q, q, None, False, 1.0)
    assert chosen == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
