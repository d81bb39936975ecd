"""Reading all tokens in parts: the same answer, joined, and bounds that hold however it was parted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from avow.decode import split_k_exact as reading
from avow.nn import KeyValueCache
from avow.numerics import cpu_sums
from tests.helpers.caches import errors, queries, tokens

TYPES = [torch.float32, torch.bfloat16, torch.float16]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each answer was read in; five threads are thought to be there, and parts may be short."""
    seen: list[int] = []
    bare, quick = reading._parts, reading.SplitKExact.quick

    def spied(rows: Tensor, k: Tensor, v: Tensor, scale: float, parts: int) -> tuple[Tensor, Tensor]:
        seen.append(parts)
        return bare(rows, k, v, scale, parts)

    def spied_quick(*given: Any) -> Any:
        found = quick(*given)
        seen.extend([] if found is None else [1])
        return found

    monkeypatch.setattr(reading, "_parts", spied)
    monkeypatch.setattr(reading.SplitKExact, "quick", spied_quick)
    monkeypatch.setattr(reading, "_SHORTEST", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    return seen


def filled(k: Tensor, v: Tensor) -> KeyValueCache:
    cache = KeyValueCache(k.shape[1], k.shape[3], batch=k.shape[0], dtype=k.dtype)
    for some in zip(k.split(500, 2), v.split(500, 2), strict=True):
        cache.append(*some)
    return cache


@each_type
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 1003])
@pytest.mark.parametrize("heads", [(1, 3, 3), (1, 1, 1), (2, 6, 2), (3, 5, 5)], ids=str)
def test_however_it_is_parted_every_row_is_within_its_bound(
    dtype: torch.dtype, length: int, heads: tuple[int, int, int], counts: list[int]
) -> None:
    b, h, g = heads
    k, v = (torch.randn(b, g, length, 24).to(dtype) for _ in range(2))
    cache = filled(k, v)
    for sharp in (0.0, 1.0, 12.0):
        q = queries(k, h, sharp=sharp)
        out, certificate = cache.attend(q, 0.1)
        assert out.shape == q.shape and out.dtype == dtype
        assert certificate.method == "exact" and certificate.bound == float(certificate.rows.amax()) <= 0.1
        assert certificate.rows.shape == q.shape[:-1]
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
    if length >= 1000 and b * g % 5:
        assert min(counts) > 1


@each_type
def test_parts_answer_as_one_does(dtype: torch.dtype, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (torch.randn(1, 3, 2000, 16).to(dtype) for _ in range(2))
    cache, q = filled(k, v), queries(k, 6)
    parted, parts = cache.attend(q, 0.1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    single, one = cache.attend(q, 0.1)
    assert counts == [5, 1]
    apart = torch.linalg.vector_norm(parted.double() - single.double(), dim=-1)
    longest = torch.linalg.vector_norm(v.double(), dim=-1).amax()
    assert bool((apart <= (parts.rows + one.rows) * longest).all())
    assert parts.bound > one.bound


def test_a_part_left_out_breaks_the_bound(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (torch.randn(1, 3, 2000, 16) for _ in range(2))
    cache, q, told = filled(k, v), queries(k, 6, sharp=0.5), reading._parts

    def short(rows: Tensor, k: Tensor, v: Tensor, scale: float, parts: int) -> tuple[Tensor, Tensor]:
        out, logs = told(rows, k, v, scale, parts)
        return out[:, 1:], logs[:, 1:]

    monkeypatch.setattr(reading, "_parts", short)
    out, certificate = cache.attend(q, 0.1)
    assert not bool((errors(q, k, v, out) <= certificate.rows).all())


@each_type
def test_answers_as_long_as_their_values_are_not_rounded_twice(dtype: torch.dtype, counts: list[int]) -> None:
    # All values are one another's: an answer has their length, and rounding it twice would be too much for bfloat16.
    k, v = torch.randn(1, 3, 2000, 16).to(dtype), torch.full((1, 3, 2000, 16), 1.0).to(dtype)
    cache, q = filled(k, v), queries(k, 6)
    for _ in range(3):
        out, certificate = cache.attend(q, 1e-2)
        assert certificate.bound <= 1e-2
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
    assert counts == ([5, 1, 1] if dtype == torch.bfloat16 else [5, 5, 5])


def test_a_single_row_in_float32_is_never_summed_alone(counts: list[int]) -> None:
    if not cpu_sums.fewest_rows(torch.float32, 64):
        pytest.skip("this CPU adds in an order that nothing is assumed of")
    n, ulp = 20000, 2.0**-23
    k = torch.zeros(1, 1, n, 64)
    k[..., 0] = math.log(1.5 * ulp)
    k[0, 0, 0, 0] = 0.0
    sizes = torch.tensor([0.3334, 0.3332, 0.1668, -0.1668, 0.5001, 1.0, -0.3332, -0.3334, 0.8334])
    v = sizes[torch.randint(len(sizes), (8, 64))].repeat(n // 8, 1)[None, None].contiguous()
    v[0, 0, 0] = 1.0
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 8.0
    out, certificate = filled(k, v).attend(q, 1e-2, method="exact")
    # The bare kernel on one row of one feature; the others are there to find the worst.
    weights = torch.softmax(k[0, 0, :, 0].double(), 0)
    truth = weights @ v[0, 0].double()
    bare = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0, 0].double()
    assert float((out[0, 0, 0].double() - truth).abs().max()) <= certificate.bound < float((bare - truth).abs().max())


@each_type
def test_what_is_unusual_is_left_to_the_general_way(dtype: torch.dtype, counts: list[int]) -> None:
    k, v = (torch.randn(1, 2, 300, 16).to(dtype) for _ in range(2))
    q = queries(k, 4)
    assert bool((filled(k, v * 0).attend(q, 1e-2).out == 0).all())
    out, certificate = filled(k * 3000, v).attend(q * 30)
    assert bool((errors(q * 30, k * 3000, v, out) <= certificate.rows).all())
    assert counts == []
    with sdpa_kernel(SDPBackend.MATH):
        out, certificate = filled(k, v).attend(q, 1e-2)
    assert counts == [] and bool((errors(q, k, v, out) <= certificate.rows).all())


@each_type
def test_a_window_is_read_as_all_tokens_are(dtype: torch.dtype, counts: list[int]) -> None:
    """Values that were forgotten, or stand before the window in its first group, are no unit of the error."""
    cache = KeyValueCache(2, 16, dtype=dtype, window=128)
    k, v = (torch.randn(1, 2, 300, 16).to(dtype) for _ in range(2))
    v[:, :, : 300 - 128 + 2] *= 50
    cache.append(k[:, :, :-3], v[:, :, :-3])
    for end in (298, 299, 300):
        cache.append(k[:, :, end - 1 : end], v[:, :, end - 1 : end])
        q = queries(k[:, :, :end], 4)
        out, certificate = cache.attend(q, 1e-2)
        seen = k[:, :, end - 128 : end], v[:, :, end - 128 : end]
        alone = filled(*seen).attend(q, 1e-2)
        assert torch.equal(out, alone.out) and bool((errors(q, *seen, out) <= certificate.rows).all())
        torch.testing.assert_close(certificate.rows, alone.certificate.rows, rtol=0.5, atol=0)
        torch.testing.assert_close(certificate.relative_rows, alone.certificate.relative_rows, rtol=0.5, atol=0)
    assert len(counts) == 6, "the general way was not needed"


@pytest.mark.parametrize(
    ("heads", "length", "dtype", "threads", "parts"),
    [
        (3, 65_536, torch.float32, 2, 2),
        (8, 65_536, torch.float32, 2, 1),
        (3, 65_536, torch.float32, 16, 16),
        (8, 65_536, torch.bfloat16, 16, 2),
        (8, 1_048_576, torch.bfloat16, 1, 16),
        (3, 4_000, torch.float32, 2, 1),
        (7, 65_536, torch.float32, 1, 1),
    ],
)
def test_parts_are_as_few_as_keep_all_threads_busy(
    heads: int, length: int, dtype: torch.dtype, threads: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert reading.parts_for(heads, length, dtype) == parts


def test_tokens_that_come_later_count(counts: list[int]) -> None:
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 400)
    cache.append(k[:, :, :300], v[:, :, :300])
    cache.attend(queries(k, 4), 1e-2)
    # Longer keys and values than any before: bounds know them at once.
    k[:, :, 300:], v[:, :, 300:] = 30 * k[:, :, 300:], 100 * v[:, :, 300:]
    before = cache.attend(queries(k[:, :, :300], 4), 1e-2).certificate.bound
    cache.append(k[:, :, 300:], v[:, :, 300:])
    q = queries(k[:, :, :300], 4)
    out, certificate = cache.attend(q, 1e-2)
    assert certificate.bound > 2 * before
    assert bool((errors(q, k, v, out) <= certificate.rows).all())
