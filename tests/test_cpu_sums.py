"""Sums over many keys on a CPU: how often the fused kernel rounds them, and bounds that know it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.certificates import measure_norms
from avow.contract import Problem
from avow.maths import cpu_sums, rounding
from avow.methods.exact import Exact

ROUNDED = 2.0**-23
"""The unit in the last place of one."""
usual = pytest.mark.skipif(not cpu_sums.many_at_once(), reason="this CPU adds in an order that nothing is assumed of")


def near_ties(n: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries whose first key has nearly all the weight, n - 1 that add about half a unit each, and their values."""
    q, k = torch.zeros(1, 1, rows, 64), torch.zeros(1, 1, n, 64)
    q[..., 0], k[..., 0] = 1.0, math.log(1.5 * ROUNDED)
    k[0, 0, 0, 0] = 0.0
    sizes = torch.tensor([0.3334, 0.3332, 0.1668, -0.1668, 0.5001, 1.0, -0.3332, -0.3334, 0.8334])
    v = sizes[torch.randint(len(sizes), (8, 64))].repeat(n // 8, 1)[None, None]
    v[0, 0, 0] = 1.0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    # Of 64 patterns the one that is rounded worst is left: a row's error then has the length of one feature's.
    off = (scaled_dot_product_attention(q, k, v, scale=1.0) - truth(q, k, v)).abs()[0, 0, -1]
    return q, k, torch.zeros_like(v).index_copy(-1, off.argmax(), v[..., off.argmax()].unsqueeze(-1))


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q.double() @ k.double().mT, -1) @ v.double()


def errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    longest = torch.linalg.vector_norm(v.double(), dim=-1).amax()
    return torch.linalg.vector_norm(out.double() - truth(q, k, v), dim=-1) / longest


@usual
@pytest.mark.parametrize("rows", [1, 33])
def test_a_row_that_is_alone_in_its_block_is_not_rounded_at_every_few_keys(rows: int) -> None:
    q, k, v = near_ties(32768, rows)
    out, certificate = avow.attend(q, k, v, scale=1.0)
    assert out.shape == q.shape
    assert bool((errors(out, q, k, v) <= certificate.rows).all())
    # The bare kernel breaks that bound in the last row: it is alone.
    assert float(errors(scaled_dot_product_attention(q, k, v, scale=1.0), q, k, v)[0, 0, -1]) > certificate.bound


@usual
def test_masked_and_causal_rows_are_never_alone_either() -> None:
    q, k, v = near_ties(4096, 33)
    mask = torch.ones(33, 4096, dtype=torch.bool)
    mask[:, 1::2] = False
    for options in ({"mask": mask}, {"mask": mask.float().log()}, {"causal": True}):
        out, certificate = avow.attend(q, k, v, scale=1.0, **options)
        problem = Problem.of(q, k, v, scale=1.0, **options)
        off = torch.linalg.vector_norm(out.double() - Exact().reference(problem), dim=-1)
        assert out.shape == q.shape
        assert bool((off <= certificate.rows).all())


@usual
@pytest.mark.parametrize("n", [4096, 32768])
def test_where_the_kernel_is_switched_off_the_bound_holds_all_the_same(n: int) -> None:
    q, k, v = near_ties(n)
    with sdpa_kernel(SDPBackend.MATH):
        out, certificate = avow.attend(q, k, v, scale=1.0)
    assert bool((errors(out, q, k, v) <= certificate.rows).all())
    bias = torch.zeros(1, 1, 1, n, requires_grad=True)
    learnt, promised = avow.attend(q, k, v, mask=bias, scale=1.0)
    assert bool((errors(learnt.detach(), q, k, v) <= promised.rows).all())
    learnt.sum().backward()
    assert bias.grad is not None and bool(bias.grad.isfinite().all())


def test_a_kernel_that_rounds_more_often_is_found_out_and_costs_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 2048, 16).unbind()
    tight = avow.attend(q[:, :, :4], k, v).certificate
    monkeypatch.setattr(cpu_sums, "strayed", lambda rows: 3000.0)
    monkeypatch.setattr("avow.methods.exact.many_at_once", cpu_sums.many_at_once.__wrapped__)
    loose = avow.attend(q[:, :, :4], k, v).certificate
    assert not cpu_sums.many_at_once.__wrapped__()
    assert loose.bound >= 2 * 2048 * rounding.unit(torch.float32)
    assert "any order" in loose.assumptions[0]
    if cpu_sums.many_at_once():
        assert tight.bound < loose.bound and "tiles of 512 keys" in tight.assumptions[0]


@usual
def test_one_row_is_what_strays() -> None:
    assert cpu_sums.strayed(rows=1) > 2 * cpu_sums.strayed(rows=2)


@usual
@pytest.mark.parametrize("n", [65_536, 262_144, 1_048_576])
def test_bfloat16_answers_for_long_caches_are_proved_to_a_hundredth(n: int) -> None:
    q, k = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.ones(1, 1, 1, 4, dtype=torch.bfloat16).expand(1, 1, n, 4)
    problem = Problem.of(q, k, k)
    bound = Exact().foresee(problem, measure_norms(problem), 1.0).bound
    assert 2 * 2.0**-8 < bound < 1e-2


@usual
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_do_not_stray_with_the_number_of_keys(dtype: torch.dtype) -> None:
    # Each of the later products is half a unit of the first and a little more: rounded one by one they would double.
    n, weight = 2**18, 2.0**-13
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, n, 2), torch.full((1, 1, n, 2), 1.03125 * 2.0**-24 / weight)
    high = float(torch.tensor(math.log(weight)).to(dtype))
    q[:], k[..., 0], k[..., 1] = 1.0, high, math.log(weight) - high
    k[0, 0, 0], v[0, 0, 0] = 0.0, 1.0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, certificate = avow.attend(q, k, v, method="exact", precision="native", scale=1.0)
    assert bool((errors(out, q, k, v) <= certificate.rows).all())
    # What they would be off by if each were rounded up.
    assert certificate.bound < n * 0.48 * ROUNDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exp_for_half_precision_is_as_right_as_is_counted_and_no_more(dtype: torch.dtype) -> None:
    far = torch.linspace(0, 16, 2001).to(dtype)
    q, k = torch.zeros(2001, 1, 1, 16, dtype=dtype), torch.zeros(2001, 1, 64, 16, dtype=dtype)
    q[..., 0], k[:, 0, 1:, 0] = 1.0, -far[:, None]
    _, told = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, scale=1.0)
    off = (told.double().flatten() - k[:, 0, :, 0].double().logsumexp(-1)).abs().amax()
    assert float(off) <= rounding.exponentials(64, dtype, "cpu")
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert float(off) > 2 * rounding.EXP_ULPS * rounding.unit(torch.float32)
