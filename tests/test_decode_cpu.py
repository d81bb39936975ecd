"""Compiled decoding on a CPU: bounds above every logit, answers within their certificates; whom it does not serve."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.core import Certificate
from avow.decode import cpu, key_value_cache
from avow.errors import NonFiniteError, ParameterError, ToleranceUnreachable
from avow.nn import KeyValueCache
from tests.helpers.caches import errors, queries, share, tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOL = {torch.float32: 1e-2, torch.bfloat16: 2e-2, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def short_caches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches are looked at as long ones are."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


def filled(count: int = 640, heads: int = 2, dim: int = 16, loud: float = 1.0, **options: Any) -> KeyValueCache:
    cache = KeyValueCache(heads, dim, **options)
    cache.append(*tokens(cache, count, loud))
    return cache


def of_step(cache: KeyValueCache, name: str) -> np.ndarray:
    """An array of the last step."""
    space = cache._cpu_steps._space
    assert space is not None
    return space._arrays[name]


def attempts(cache: KeyValueCache) -> int:
    space = cache._cpu_steps._space
    assert space is not None
    return space.attempt


def judged(cache: KeyValueCache, q: Tensor, tol: float, **options: Any) -> Certificate:
    """The certificate of an answer that was found within it."""
    out, certificate = cache.attend(q, tol, **options)
    k, v = cache.tokens
    found = errors(q, k, v, out, cache.window, options.get("sinks"))
    assert certificate.kind == "deterministic" and certificate.bound <= tol
    assert bool((found <= certificate.rows).all()), f"{float((found / certificate.rows).max()):.3g} times the bound"
    return certificate


# The look at the sketch


def upper_bounds(cache: KeyValueCache, q: Tensor) -> tuple[Tensor, Tensor]:
    """What a step took for upper bounds on logits, in bits, and the logits in float64."""
    cache.attend(q, 0.3, method="sparse")
    groups, (b, h, _, d) = cache._groups, q.shape
    space = of_step(cache, "upper")
    upper = torch.from_numpy(space.reshape(-1)[: b * h * groups * 64].copy()).view(b, h, groups * 64)
    k = cache.tokens[0][:, :, : groups * 64].double().repeat_interleave(h // cache.key_heads, 1)
    return upper.double(), (q.double() @ k.mT).squeeze(2) / math.sqrt(d) * math.log2(math.e)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "siblings"), [(1, 1), (7, 3), (15, 5), (16, 4), (64, 2), (130, 16)])
def test_no_logit_is_above_its_bound(dim: int, siblings: int, dtype: torch.dtype) -> None:
    cache = filled(2200, dim=dim, dtype=dtype)
    upper, logits = upper_bounds(cache, queries(cache.tokens[0], 2 * siblings))
    assert bool((logits <= upper).all())
    assert float((upper - logits).mean()) < 8  # and not far below it


def on_the_grid(count: int = 1280) -> KeyValueCache:
    """Keys that the sketch holds exactly: all that bounds have above logits is for rounding."""
    cache = KeyValueCache(1, 64)
    codes = torch.randint(16, (1, 1, count, 64)).float()
    codes[:, :, ::64], codes[:, :, 1::64] = 0.0, 15.0
    cache.append(codes * 0.25 + 16, torch.randn(1, 1, count, 64))
    return cache


def test_without_the_charge_for_rounding_logits_are_above_their_bounds() -> None:
    cache, broken = on_the_grid(), []
    for charged in (True, False):
        cache._sketch(0)
        if not charged:
            cache._buffers["reach"].zero_()
        cache._buffers["radius"].zero_()
        upper, logits = upper_bounds(cache, 3 * torch.randn(1, 4, 1, 64))
        broken.append(int((logits > upper).sum()))
    assert broken[0] == 0 < broken[1]


def test_a_sketch_that_claims_too_small_a_radius_is_caught() -> None:
    cache = filled(1280)
    cache._sketch(0)
    cache._buffers["radius"] *= 0.1
    upper, logits = upper_bounds(cache, queries(cache.tokens[0], 4))
    assert bool((logits > upper).any())


def test_powers_of_two_are_right_to_a_millionth() -> None:
    from numba import njit

    from avow.decode.cpu_stages import power_of_two

    @njit
    def each(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = power_of_two(x[i])

    x = np.concatenate([np.linspace(-126, 120, 2_000_001), np.arange(-126, 121) + 0.5, [-0.0, 0.0]]).astype(np.float32)
    out = np.empty_like(x)
    each(x, out)
    assert np.abs(out.astype(np.float64) / 2.0 ** x.astype(np.float64) - 1).max() < 2.0**-20
    assert out[-1] == out[-2] == 1
    each(np.float32([-127, -1e30, -np.inf, np.nan]), out[:4])
    assert (out[:3] == 2.0**-126).all() and np.isnan(out[3])


# Answers


@pytest.fixture(params=[False, True], ids=["", "flushed"])
def flushing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without subnormal numbers."""
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def hostile(family: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two key heads with three siblings each, made to break bounds."""
    k, v = torch.randn(2, 1, 2, 700, 16).unbind()
    q = 3 * torch.randn(1, 6, 1, 16)
    if family == "ties":
        k = k.round()
    elif family == "equal keys":
        k = k[:, :, :1].expand_as(k)
    elif family == "one loud key":
        k[:, :, 300] *= 40
    elif family == "louder groups":
        k[:, :, 256:] *= 30
    elif family == "huge keys":
        k *= 100
    elif family == "tiny keys":
        k *= 1e-30 if dtype != torch.float16 else 1e-5
    elif family == "large offset":
        k += 30
    elif family == "huge values":
        v *= 1e12 if dtype != torch.float16 else 1e3
    elif family == "tiny values":
        v *= 1e-12 if dtype != torch.float16 else 1e-3
    elif family == "one long value":
        v[:, :, 77] *= 1000
    elif family == "zero values":
        v[:, :, ::2] = 0
    elif family == "subnormal":
        k[:, :, ::3] *= 1e-40
        v[:, :, ::5] *= 1e-40
    elif family == "against":
        # What is likely to be dropped all points the other way.
        v = torch.where((q[:, :1] @ k.mT > 0).mT, 1.0, -1.0).expand_as(v).contiguous()
    elif family == "zero queries":
        q = torch.zeros_like(q)
    elif family == "sinks":
        k[:, :, 0], v[:, :, 0] = 2 * q[:, ::3, 0], 1e-3
    return q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()


FAMILIES = [
    "plain",
    "ties",
    "equal keys",
    "one loud key",
    "louder groups",
    "huge keys",
    "tiny keys",
    "large offset",
    "huge values",
    "tiny values",
    "one long value",
    "zero values",
    "subnormal",
    "against",
    "zero queries",
    "sinks",
]


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_caches_are_answered_within_their_certificates(family: str, dtype: torch.dtype) -> None:
    for tol in (0.3, 0.05, TOL[dtype]):
        q, k, v = hostile(family, dtype)
        cache = KeyValueCache(2, 16, dtype=dtype)
        cache.append(k, v)
        for method in ("sparse", "auto"):
            judged(cache, q, tol, method=method)


@pytest.mark.parametrize("siblings", range(1, 17))
def test_any_number_of_siblings_is_answered(siblings: int) -> None:
    cache = filled(900, dim=24, value_dim=10, batch=2)
    certificate = judged(cache, queries(cache.tokens[0], 2 * siblings, sharp=5.0), 0.05)
    assert "compiled" not in certificate.reason


@pytest.mark.parametrize("dim", [1, 2, 3, 17, 31, 33, 80, 129])
def test_any_dimension_is_answered(dim: int) -> None:
    cache = filled(700, dim=dim, value_dim=dim + 1)
    certificate = judged(cache, queries(cache.tokens[0], 6), 0.05, method="sparse")
    assert "compiled" not in certificate.reason


@pytest.mark.parametrize("count", [64, 65, 127, 2048, 2049, 2112, 4160])
def test_any_length_is_answered(count: int) -> None:
    cache = filled(count)
    certificate = judged(cache, queries(cache.tokens[0], 4, sharp=6.0), 0.05, method="sparse")
    assert "compiled" not in certificate.reason


@pytest.mark.parametrize("window", [64, 100, 191, 640])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    cache = KeyValueCache(2, 16, window=window)
    k, v = tokens(cache, 900)
    k[:, :, :250] *= 20  # loud, and not seen
    v[:, :, :250] *= 20
    for at in range(0, 900, 60):
        cache.append(k[:, :, at : at + 60], v[:, :, at : at + 60])
    for _ in range(3):
        q = queries(k[:, :, -window:], 4, sharp=6.0)
        out, certificate = cache.attend(q, 0.05, method="sparse")
        assert bool((errors(q, k, v, out, window) <= certificate.rows).all()) and certificate.bound <= 0.05
        assert "compiled" not in certificate.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_step_of_a_growing_cache_keeps_its_certificate(dtype: torch.dtype) -> None:
    cache, looked = filled(500, dtype=dtype), 0
    for _ in range(150):
        cache.append(*tokens(cache, 1))
        certificate = judged(cache, queries(cache.tokens[0], 6, sharp=4.0), 0.1)
        looked += certificate.method == "sparse" and share(certificate) < 0.5
    assert looked > 100


def test_a_negative_scale_is_answered() -> None:
    cache = filled()
    q = -queries(cache.tokens[0], 4)
    out, certificate = cache.attend(q, 0.05, scale=-0.25)
    assert certificate.method == "sparse"
    assert bool((errors(-q, *cache.tokens, out) <= certificate.rows).all())


def test_a_first_cut_that_leaves_too_much_is_followed_by_another() -> None:
    needed = set()
    for seed in range(60):
        torch.manual_seed(seed)
        cache = filled(640, heads=1, dim=4, loud=3.0)
        judged(cache, queries(cache.tokens[0], 4, sharp=1.0), 0.05)
        needed.add(attempts(cache))
    assert {0, 1} <= needed


def test_nothing_is_touched_that_was_not_chosen() -> None:
    cache = filled(1000)
    q = queries(cache.tokens[0], 4, sharp=6.0)
    cache.attend(q, 0.05)
    assert cache._bold is not None
    learnt = cache._bold.clone()

    def answer() -> tuple[Tensor, Certificate]:
        cache._bold = learnt.clone()  # what a step learns decides what the next reads
        return cache.attend(q, 0.05)

    plain, certificate = answer()
    read, kept = 0, [x.clone() for x in cache.tokens]
    for token in range(960):
        for x in cache.tokens:
            x[:, :, token] = math.nan
        if not torch.equal(answer()[0], plain):
            read += 1
            for x, whole in zip(cache.tokens, kept, strict=True):
                x[:, :, token] = whole[:, :, token]
    out, after = answer()
    assert torch.equal(out, plain) and torch.equal(after.rows, certificate.rows)
    assert 0 < read < 0.6 * 960


def test_what_is_not_finite_is_no_answer_of_its_own() -> None:
    for which in (0, 1):
        cache = filled(700)
        q = queries(cache.tokens[0], 4, sharp=6.0)
        cache.attend(q, 0.05)
        cache.tokens[which][:, :, 699] = math.nan  # always read
        assert cache._by_cpu_step(q, None, 0.05, "auto") == "sums are not finite"


def test_a_stage_that_was_cut_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4, sharp=6.0)
    cache.attend(q, 0.05)
    monkeypatch.setattr(cpu, "_run", lambda *_: None)
    with pytest.raises(MemoryError, match="not enough memory for a decoding step"):
        cache.attend(q, 0.05)


def test_answers_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, found = torch.get_num_threads(), []
    for count, openmp in ((1, True), (2, True), (3, False)):
        torch.manual_seed(0)
        cache = filled(9000)
        if not openmp:
            monkeypatch.setattr(cpu, "_openmp", lambda: None)
        torch.set_num_threads(count)
        found.append(cache.attend(queries(cache.tokens[0], 4, sharp=6.0), 0.05))
        torch.set_num_threads(threads)
    for out, certificate in found[1:]:
        assert torch.equal(out, found[0].out) and torch.equal(certificate.rows, found[0].certificate.rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_code_and_the_reference_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(1500, dtype=dtype)
    q, unit = queries(cache.tokens[0], 6), torch.linalg.vector_norm(cache.tokens[1].double(), dim=-1).amax(-1)
    mine, bound = cache.attend(q, 0.02, method="sparse")
    monkeypatch.setattr(key_value_cache, "cpu_unavailable", lambda: "it is not asked")
    theirs, other = cache.attend(q, 0.02, method="sparse")
    assert other.reason.endswith("; without compiled code: it is not asked") and "compiled" not in bound.reason
    apart = torch.linalg.vector_norm(mine.double() - theirs.double(), dim=-1)
    assert bool((apart <= (bound.rows + other.rows) * unit.repeat_interleave(3, 1).unsqueeze(-1)).all())
    assert share(bound) < 1.5 * share(other) + 0.1


def test_an_answer_that_is_written_into_leaves_its_certificate_as_it_was() -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4)
    (out, late), (_, early) = (copy.deepcopy(cache).attend(q, 0.05) for _ in range(2))
    rows = early.relative_rows
    out.zero_()
    q.zero_()
    cache.append(*tokens(cache, 100, loud=5.0))
    torch.testing.assert_close(late.relative_rows, rows)


def test_what_was_learnt_under_inference_mode_can_be_copied_outside() -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4, sharp=6.0)
    with torch.inference_mode():
        cache.attend(q, 0.05)
    assert judged(copy.deepcopy(cache), q, 0.05).method == judged(cache, q, 0.05).method == "sparse"


@pytest.mark.parametrize("sparse", [False, True], ids=["exact", "sparse"])
def test_a_cache_is_pickled_without_what_was_compiled_for_it(sparse: bool) -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4, sharp=6.0)
    own = judged(cache, q, 0.05, method="sparse") if sparse else cache.attend(q).certificate
    assert own.method == ("sparse" if sparse else "exact")
    stored, kept = io.BytesIO(), pickle.dumps(cache)
    torch.save(cache, stored)
    stored.seek(0)
    for other in (pickle.loads(kept), torch.load(stored, weights_only=False)):
        assert judged(other, q, 0.05, method="sparse").method == "sparse"
        other.append(*tokens(cache, 1))
        other.tokens[0].zero_()
        assert other.length == cache.length + 1 and not bool(other._buffers["keys"][:, :, : other.length].any())
    assert len(kept) < 1.2 * cache.nbytes + 5000, "no token is stored twice"


# Several queries, windows and sinks


@pytest.fixture(params=[8, 256], ids=["", "all look"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries read all tokens, or look at the sketch as few do."""
    monkeypatch.setattr(cpu, "LOOK_ROWS", request.param)


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sunk"])
@pytest.mark.parametrize("window", [None, 3, 64, 100, 700])
@pytest.mark.parametrize(("siblings", "n"), [(1, 2), (3, 1), (2, 5), (3, 8), (7, 9), (2, 32)])
def test_several_queries_in_windows_beside_sinks_are_answered(
    siblings: int, n: int, window: int | None, sunk: bool
) -> None:
    cache = KeyValueCache(2, 16, value_dim=10, batch=2, window=window)
    k, v = tokens(cache, 640 + n)
    v[:, :, -2:] *= 30  # rows that do not see them have another unit
    v[:, :, -100:-60] *= 10
    # The window begins and the rows end in whole groups, and in the open one.
    for count in (500, 640 + n - 500):
        cache.append(k[:, :, :count], v[:, :, :count])
        k, v = k[:, :, count:], v[:, :, count:]
        sinks = 5 * torch.randn(2 * siblings) if sunk else None
        for _ in range(2):  # after all checks, and without
            q = queries(cache.tokens[0][:, :, -60:], 2 * siblings, n, sharp=4.0)
            certificate = judged(cache, q, 0.05, sinks=sinks)
            assert certificate.rows.shape == q.shape[:3]
            assert "compiled" not in certificate.reason or (window or 64) < 64  # which may be in no whole group


def test_a_row_sees_nothing_behind_itself_and_before_its_window() -> None:
    for window, hidden in ((None, slice(-4, None)), (100, slice(-108, -105))):
        cache = KeyValueCache(1, 16, window=window)
        k, v = tokens(cache, 640)
        cache.append(k, v)
        q = queries(k, 2, 8, sharp=1.0)
        certificate = judged(cache, q, 0.05, method="sparse")
        # Answers that had seen those tokens would be caught.
        k[:, :, hidden], v[:, :, hidden] = 4 * q[:, :1, :1], 100.0
        seen = KeyValueCache(1, 16, window=window)
        seen.append(k, v)
        judged(seen, q, 0.05, method="sparse")
        assert bool((errors(q, k, v, cache.attend(q, 0.05).out, window) > certificate.rows).any())


def test_bounds_are_in_units_of_what_a_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyValueCache(1, 16)
    k, v = tokens(cache, 1280)
    v[:, :, -1] *= 1000
    cache.append(k, v)
    q = queries(k, 1, 2, sharp=3.0)
    out, certificate = cache.attend(q, 0.2, method="sparse")
    assert bool((errors(q, k, v, out) <= certificate.rows).all())
    own = KeyValueCache._longest_seen

    def longest_of_all(cache: KeyValueCache, n: int, first: int, end: int) -> np.ndarray:
        """As if every row saw the longest value."""
        found = own(cache, n, first, end)
        return np.repeat(found[:, -1:], n, 1)

    monkeypatch.setattr(KeyValueCache, "_longest_seen", longest_of_all)
    out, certificate = cache.attend(q, 0.2, method="sparse")
    assert bool((errors(q, k, v, out) > certificate.rows).any())


@pytest.mark.parametrize("window", [None, 1, 5, 70, 300, 1000])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_the_longest_value_that_each_row_sees_is_found(n: int, window: int | None) -> None:
    cache = KeyValueCache(2, 8, window=window)
    cache.append(*tokens(cache, 290))
    first, end = cache._first_seen(n), cache._position - cache._base
    norms = torch.linalg.vector_norm(cache.tokens[1].double(), dim=-1)[0]
    found = torch.from_numpy(cache._longest_seen(n, first, end))
    for i in range(n):
        stop = end - n + 1 + i
        own = norms[:, max(0, stop - (window or end)) : stop].amax(-1)
        torch.testing.assert_close(found[:, i], own, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("n", [1, 5])
def test_sinks_only_enlarge_the_sum_of_weights(n: int) -> None:
    cache = filled(1280)
    q = queries(cache.tokens[0], 6, n, sharp=2.0)
    for sinks in (8 + 3 * torch.randn(6), (8 + 3 * torch.randn(6)).bfloat16(), torch.full((6,), 300.0)):
        judged(cache, q, 0.05, sinks=sinks, method="sparse")
        moved = errors(q, *cache.tokens, cache.attend(q, 0.05, sinks=sinks).out, None, sinks.roll(1) - 2)
        assert bool((moved > 0.05).any()) or float(sinks.amin()) > 100  # whose answers are nearly 0
    # A head may be without one, and a sink takes so much that less has to be read.
    (plain, some), (same, _), (_, fewer) = (
        copy.deepcopy(cache).attend(q, 0.05, sinks=sinks, method="sparse")
        for sinks in (None, torch.full((6,), -math.inf), torch.full((6,), 15.0))
    )
    assert torch.equal(plain, same) and share(fewer) < share(some)


def test_sinks_that_are_no_numbers_are_refused_and_huge_ones_answered_otherwise() -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4)
    for bad in (math.nan, math.inf):
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=r"sinks=nan or \+inf must be finite, or -inf; use -inf for heads"):
                cache.attend(q, 0.05, sinks=torch.tensor([0.0, bad, 0.0, 0.0]))
    sinks = torch.tensor([0.0, 1e5, 0.0, -1e5])
    certificate = judged(cache, q, 0.05, sinks=sinks)
    assert certificate.reason == "sinks without compiled code: logits are too large for float32"
    with pytest.raises(ParameterError, match=r"method='sparse' has no sinks without compiled code \(logits are too"):
        cache.attend(q, 0.05, sinks=sinks, method="sparse")


def test_many_queries_read_all_tokens_and_need_no_sketch() -> None:
    cache = filled(1000)
    q = queries(cache.tokens[0], 12, 2, sharp=6.0)
    certificate = judged(cache, q, 0.05)
    text = "12 queries share a key head: reading all tokens is faster than choosing"
    assert certificate.method == "exact" and certificate.reason == text and cache._sketched == 0
    assert judged(cache, q, 0.05, method="sparse").method == "sparse" and cache._sketched == 15
    # Heads that were found to look everywhere are still known to when single queries come.
    flat = 0.01 * torch.randn(1, 4, 1, 16)
    judged(cache, flat, 1e-2)
    judged(cache, q, 0.05)
    assert judged(cache, flat, 1e-2).reason.startswith("most of the tokens would")


def test_more_rows_than_there_is_room_for_are_answered_otherwise() -> None:
    cache = filled()
    certificate = judged(cache, queries(cache.tokens[0], 32, 17), 0.05)
    assert certificate.method == "exact" and certificate.reason == "272 queries share a key head"


# What steps cost


def test_a_step_that_reads_a_part_costs_less_than_one_that_reads_all() -> None:
    cache = filled(6400)
    q = 6 * cache.tokens[0][:, :, 7:8].repeat_interleave(2, 1)
    part, whole = judged(cache, q, 1e-2), cache.attend(q).certificate
    assert part.method == "sparse" and whole.method == "exact"
    assert 2 * 4 * 6400 * 16 <= part.cost.flops < 0.6 * whole.cost.flops
    space = cache._cpu_steps._space
    assert space is not None and part.cost.peak_bytes == space.nbytes < 2**20


# Heads that look everywhere


def test_heads_that_look_everywhere_are_answered_exactly() -> None:
    cache = filled(1024)
    found = [judged(cache, 0.01 * torch.randn(1, 4, 1, 16), 1e-2) for _ in range(12)]
    assert {x.method for x in found} == {"exact"} and max(x.bound for x in found) < 1e-3
    looked = [i for i, x in enumerate(found) if x.reason == "most of the tokens would have to be read in full"]
    assert looked == [0, 2, 5, 10]
    assert found[3].reason == "sparse decoding did not pay; retrying in 1 step"
    # Soon after they look at few, that is noticed.
    assert judged(cache, 6 * cache.tokens[0][:, :, 7:8].repeat_interleave(2, 1), 1e-2).method == "exact"
    assert [judged(cache, queries(cache.tokens[0], 4, sharp=8.0), 1e-2).method for _ in range(9)][-1] == "sparse"


def test_a_head_that_looks_everywhere_leaves_the_others_alone() -> None:
    cache = filled(1024)
    q = queries(cache.tokens[0], 4, sharp=8.0)
    q[:, 2:] *= 1e-3
    for _ in range(3):
        certificate = judged(cache, q, 1e-2)
        sharp, flat = of_step(cache, "reports")[:, 0, 1]
        assert certificate.method == "sparse" and sharp < 400 and flat == 1024


# Where it does not serve


def test_nothing_is_compiled_before_a_step_needs_it() -> None:
    code = (
        "import sys, torch, avow\n"
        "cache = avow.nn.KeyValueCache(1, 16)\n"
        "cache.append(torch.randn(1, 1, 100, 16), torch.randn(1, 1, 100, 16))\n"
        "cache.attend(torch.randn(1, 1, 1, 16), 1e-2)\n"
        "assert not {'numba', 'llvmlite', 'avow.decode.cpu_stages'} & set(sys.modules)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_numba_the_certificate_says_so_until_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    q = queries(cache.tokens[0], 4, sharp=6.0)
    text = "numba is not installed (pip install 'avow[cpu]')"
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        for _ in range(2):
            certificate = judged(cache, q, 0.05)
            assert certificate.method == "exact" and certificate.reason == text
        certificate = judged(cache, q, 0.05, method="sparse")
        assert certificate.method == "sparse" and certificate.reason.endswith(f"; without compiled code: {text}")
    assert judged(cache, q, 0.05).method == "sparse", "in the same process"


@pytest.mark.parametrize("slow", [False, True])
def test_who_waits_for_the_compiler_is_told_once(
    slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "_PATIENCE", 0.01 if slow else 60.0)
    monkeypatch.setattr(cpu, "_stages", lambda: time.sleep(0.3))
    cpu._uncompiled.cache_clear()
    try:
        assert [cpu.unavailable() for _ in range(3)] == [""] * 3
    finally:
        cpu._uncompiled.cache_clear()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    text = "compiling CPU decoding steps, once per installation: about half a minute"
    assert told == ([("WARNING", text)] if slow else [])


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("no space left\nand more")

    monkeypatch.setattr(cpu, "_stages", none)
    cpu._uncompiled.cache_clear()
    try:
        assert cpu.unavailable() == "numba could not compile (RuntimeError: no space left)"
    finally:
        cpu._uncompiled.cache_clear()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "rounding in float32 would take more than a tenth of the tolerance"),
        ({"dtype": torch.float64}, "compiled code does not support torch.float64"),
        ({"bits": 8}, "the sketch does not have 3 or 4 bits"),
        ({"count": 63}, "nothing is sketched"),
    ],
)
def test_what_it_does_not_serve_is_answered_otherwise_with_the_reason(changes: dict[str, Any], text: str) -> None:
    cache = filled(**changes)
    q = queries(cache.tokens[0], 4)
    certificate = judged(cache, q, 2e-4)
    assert certificate.method == "exact" and certificate.reason == text
    certificate = judged(cache, q, 2e-4, method="sparse")
    assert certificate.method == "sparse" and certificate.reason.endswith(f"; without compiled code: {text}")


def test_logits_beyond_float32_are_answered_exactly() -> None:
    cache = filled(loud=1e4)
    assert judged(cache, queries(cache.tokens[0], 4), 1e-2).reason == "logits are too large for float32"


@pytest.mark.parametrize("long", [1e-20, 1e20])
def test_values_beyond_float32_are_left_to_the_reference(long: float) -> None:
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 640)
    cache.append(k, v * long)
    certificate = judged(cache, queries(k, 4), 1e-2, method="sparse")
    assert certificate.reason.endswith("values are too long or too short for float32")


def test_three_bits_are_served() -> None:
    cache = filled(bits=3)
    assert "compiled" not in judged(cache, queries(cache.tokens[0], 4), 0.05, method="sparse").reason


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_values_near_the_end_of_float16_keep_the_tolerance_or_are_refused(size: float) -> None:
    cache = KeyValueCache(1, 16, 8, dtype=torch.float16)
    cache.append(torch.randn(1, 1, 700, 16).half(), (size * torch.randn(1, 1, 700, 8)).half())
    for tol in (1e-3, 1e-2, 0.1):
        try:
            certificate = cache.attend(torch.randn(1, 3, 1, 16).half(), tol=tol).certificate
        except ToleranceUnreachable:
            assert size == 1e-6 or tol == 1e-3  # below what the type itself rounds
        else:
            assert certificate.bound <= tol
