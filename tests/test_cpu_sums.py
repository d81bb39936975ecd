"""Sums over many keys on a CPU: how often the fused kernel rounds them, and bounds that know it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.core import Problem
from avow.methods.exact import Exact
from avow.numerics import cpu_sums, rounding

ROUNDED = 2.0**-23
"""The unit in the last place of one."""
FLOAT = torch.float32
usual = pytest.mark.skipif(
    not cpu_sums.fewest_rows(FLOAT, 64), reason="this CPU adds in an order that nothing is assumed of"
)


def near_ties(n: int, rows: int = 1, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries whose first key has nearly all the weight, n - 1 that add about half a unit each, and their values."""
    heads = -(-64 // width)
    q, k = torch.zeros(1, heads, rows, width), torch.zeros(1, heads, n, width)
    q[..., 0], k[..., 0] = 1.0, math.log(1.5 * ROUNDED)
    k[:, :, 0, 0] = 0.0
    sizes = torch.tensor([0.3334, 0.3332, 0.1668, -0.1668, 0.5001, 1.0, -0.3332, -0.3334, 0.8334])
    v = sizes[torch.randint(len(sizes), (1, heads, 8, width))].repeat(1, 1, n // 8, 1)
    v[:, :, 0] = 1.0
    # Of 64 patterns the one that is rounded worst is left: a row's error then has the length of one feature's.
    off = (scaled_dot_product_attention(q, k, v, scale=1.0) - truth(q, k, v)).abs()[0, :, -1]
    head, feature = divmod(int(off.argmax()), width)
    alone = torch.zeros(1, 1, n, width)
    alone[0, 0, :, feature] = v[0, head, :, feature]
    return q[:, :1], k[:, :1], alone


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
    monkeypatch.setattr(cpu_sums, "strayed", lambda rows, dtype, width: 3000.0)

    def asked(dtype: torch.dtype, width: int) -> int:
        return cpu_sums._fewest_rows.__wrapped__(dtype, width, torch.backends.mkldnn.enabled)

    monkeypatch.setattr("avow.methods.exact.fewest_rows", asked)
    loose = avow.attend(q[:, :, :4], k, v).certificate
    assert asked(FLOAT, 16) == 0
    assert loose.bound >= 2 * 2048 * rounding.unit(torch.float32)
    assert "any order" in loose.assumptions[0]
    if cpu_sums.fewest_rows(FLOAT, 16):
        assert tight.bound < loose.bound and "tiles of 512 keys" in tight.assumptions[0]


@usual
def test_what_is_asked_does_not_depend_on_who_asks() -> None:
    plain = cpu_sums.strayed(1, FLOAT, 64)
    cpu_sums._near_ties.cache_clear()
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert cpu_sums.strayed(1, FLOAT, 64) == plain


@usual
def test_one_row_is_what_strays() -> None:
    fewest = cpu_sums.fewest_rows(FLOAT, 64)
    assert cpu_sums.strayed(1, FLOAT, 64) > 2 * cpu_sums.strayed(fewest, FLOAT, 64)


@pytest.mark.parametrize("width", [1, 2, 5, 8, 11, 12, 16, 33, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33, 34])
def test_near_ties_of_every_width_and_few_rows_stay_within_their_bounds(width: int, rows: int) -> None:
    q, k, v = near_ties(16384, rows, width)
    for heads in (1, 3):
        many = [x.expand(1, heads, -1, -1) for x in (q, k, v)]
        out, certificate = avow.attend(*many, scale=1.0, method="exact", precision="native")
        assert bool((errors(out, *many) <= certificate.rows).all())


def test_rows_that_are_few_are_found_by_asking_and_blocks_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def strays(rows: int, dtype: torch.dtype, width: int) -> float:
        return 3000.0 if rows < 4 else 100.0

    def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        seen.append(q.shape[2])
        assert mask is None or mask.shape[2] == q.shape[2]
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    monkeypatch.setattr(cpu_sums, "strayed", strays)
    assert cpu_sums._fewest_rows.__wrapped__(FLOAT, 16, True) == (
        4 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 0
    )
    monkeypatch.setattr("avow.methods.exact.fewest_rows", lambda dtype, width: 4)
    monkeypatch.setattr("avow.methods.exact._fused_on_cpu", fused)
    for n in (1, 3, 4, 31, 32, 33, 194, 256, 770):
        q, k, v = torch.randn(3, 1, 2, n, 16).unbind()
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        for options in ({}, {"causal": True}, {"mask": mask}):
            found = Exact().compute(Problem.of(q, k, v, **options)).out
            plain = scaled_dot_product_attention(q, k, v, options.get("mask"), is_causal="causal" in options)
            assert torch.allclose(found, plain, atol=1e-5)
    assert seen == [x for n in (4, 4, 4, 31, 32, 36, 196, 256, 772) for x in (n, n, n)]


@usual
@pytest.mark.parametrize("n", [65_536, 262_144, 1_048_576])
def test_bfloat16_answers_for_long_caches_are_proved_to_a_hundredth(n: int) -> None:
    q = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16) / 4
    k = q.expand(1, 1, n, 64)
    problem = Problem.of(q, k, k)
    bound = Exact().estimate_bound(problem, 1.0).bound
    assert 2 * 2.0**-8 < bound < 1e-2


@usual
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [2, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_do_not_stray_with_the_number_of_keys(dtype: torch.dtype, width: int, rows: int) -> None:
    # Each of the later products is half a unit of the first and a little more: rounded one by one they would double.
    n, weight = 2**18, 2.0**-13
    q, k = torch.zeros(1, 1, rows, width), torch.zeros(1, 1, n, width)
    v = torch.full((1, 1, n, width), 1.03125 * 2.0**-24 / weight)
    high = float(torch.tensor(math.log(weight)).to(dtype))
    q[:], v[..., 2:] = 1.0, 0.0
    k[..., 0], k[..., 1] = high, math.log(weight) - high
    k[0, 0, 0], v[0, 0, 0, :2] = 0.0, 1.0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, certificate = avow.attend(q, k, v, method="exact", precision="native", scale=1.0)
    assert bool((errors(out, q, k, v) <= certificate.rows).all())
    # What they would be off by if each were rounded up.
    if cpu_sums.fewest_rows(dtype, width):
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
