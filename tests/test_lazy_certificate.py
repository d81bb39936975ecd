"""Decoding on a CPU in few steps: certificates are worked out when somebody looks, and are of the answer given."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Certificate, LazyCertificate, with_reason
from avow.decode import split_k_exact, token_buffers
from avow.nn import KeyValueCache
from tests.helpers.caches import errors, queries

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def grown(
    tokens: int = 200, dtype: torch.dtype = torch.float32, dim: int = 16, heads: int = 3, **options: Any
) -> tuple[KeyValueCache, Tensor, Tensor]:
    """A cache to which half of its tokens came one by one, and what it holds."""
    k, v = (torch.randn(1, heads, tokens, dim).to(dtype) for _ in range(2))
    cache = KeyValueCache(heads, dim, dtype=dtype, **options)
    cache.append(k[:, :, : tokens // 2], v[:, :, : tokens // 2])
    for i in range(tokens // 2, tokens):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    return cache, k, v


def quick(cache: KeyValueCache, q: Tensor, tol: float | None = 1e-2) -> tuple[Tensor, Certificate]:
    """The second of two answers to the same: after the first everything is settled."""
    cache.attend(q, tol)
    out, certificate = cache.attend(q, tol)
    assert isinstance(certificate, LazyCertificate) and "_later" in vars(certificate)
    return out, certificate


@each_type
@pytest.mark.parametrize("tol", [None, 1e-2])
@pytest.mark.parametrize("sharp", [0.0, 1.0, 12.0])
def test_a_late_certificate_holds_and_says_all_that_an_early_one_does(
    dtype: torch.dtype, tol: float | None, sharp: float
) -> None:
    cache, k, v = grown(dtype=dtype)
    q = queries(k, 9, sharp=sharp)
    early = cache.attend(q, tol).certificate
    out, late = quick(cache, q, tol)
    assert bool((errors(q, k, v, out) <= late.rows).all())
    assert late.bound == float(late.rows.amax()) <= (tol or 0.1)
    # Constants are of up to an eighth more tokens.
    assert early.bound * 0.9 <= late.bound <= early.bound * 1.5
    for field in dataclasses.fields(Certificate):
        if field.name not in ("bound", "rows", "relative", "relative_rows"):
            assert getattr(late, field.name) == getattr(early, field.name), field.name


@each_type
def test_what_is_overwritten_later_changes_no_certificate(dtype: torch.dtype) -> None:
    cache, k, v = grown(dtype=dtype)
    q = queries(k, 9)
    looked = quick(cache, q)[1].rows
    out, certificate = quick(cache, q)
    # The model writes into its tensors, the cache grows, and the next answer is longer by far.
    out.mul_(1e3)
    q.mul_(1e3)
    cache.append(1e3 * k[:, :, :1], 1e3 * v[:, :, :1])
    cache.attend(torch.randn_like(q), 1e-2)
    assert torch.equal(certificate.rows, looked)


def test_a_certificate_that_kept_the_tensors_instead_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.linalg.vector_norm

    class Kept:
        """The rows themselves in the place of their norms."""

        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

        def flatten(self) -> Tensor:
            return norm(self.rows, dim=-1, dtype=torch.float32).flatten()

        def double(self) -> Tensor:
            return norm(self.rows, dim=-1, dtype=torch.float64)

    cache, k, _ = grown(dtype=torch.bfloat16)
    q = queries(k, 9)
    looked = quick(cache, q)[1].rows
    own = token_buffers.row_lengths(q)
    monkeypatch.setattr(split_k_exact, "row_lengths", lambda rows: own)
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda rows, **more: Kept(rows))
    out, certificate = cache.attend(q, 1e-2)
    out.mul_(1e3)
    assert not torch.equal(certificate.rows, looked)


@each_type
def test_tokens_that_were_only_written_down_are_measured_when_it_matters(dtype: torch.dtype) -> None:
    cache, k, v = grown(dtype=dtype)
    assert cache._unmeasured > 0
    other = KeyValueCache(3, 16, dtype=dtype)
    other.append(k, v)
    for mine, theirs in zip(cache.holding[:4], other.holding[:4], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert cache._unmeasured == 0
    out, certificate = cache.attend(q := queries(k, 6), 0.1, method="sparse")
    assert certificate.method == "sparse" and bool((errors(q, k, v, out) <= certificate.rows).all())


def test_a_longer_key_or_value_counts_at_once_though_it_was_only_written_down() -> None:
    cache, k, v = grown()
    q = queries(k, 9)
    before = quick(cache, q)[1].bound
    k1, v1 = 30 * k[:, :, :1], 100 * v[:, :, :1]
    cache.append(k1, v1)
    assert cache._unmeasured > 0
    out, certificate = cache.attend(q, 1e-2)
    assert certificate.bound > 2 * before
    assert bool((errors(q, torch.cat([k, k1], 2), torch.cat([v, v1], 2), out) <= certificate.rows).all())


def test_bounds_that_forget_the_last_token_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, k, v = grown()
    q = queries(k, 9)
    quick(cache, q)
    known = cache._length_bounds
    # One key that is 3,000 times as long: its rounding alone exceeds what the others' lengths allow.
    k1, v1 = 3e3 * k[:, :, :1], v[:, :, :1]
    cache.append(k1, v1)
    honest = cache.attend(q, 1e-1).certificate.bound
    cache._known_bounds = known
    assert honest > 10 * cache.attend(q, 1e-1).certificate.bound


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["k", "v", "q"])
def test_numbers_that_are_none_are_refused_as_ever(which: str, bad: float) -> None:
    cache, k, v = grown()
    q = queries(k, 9)
    quick(cache, q)
    before = cache.position
    given = {"k": k[:, :, :1].clone(), "v": v[:, :, :1].clone(), "q": q.clone()}
    given[which][0, 1, 0, 3] = bad
    with pytest.raises(ValueError, match=rf"{which}\[0, 1, 0, 3\]={bad} must be finite"):
        cache.append(given["k"], given["v"])
        cache.attend(given["q"], 1e-2)
    assert cache.position == before + (which == "q")


@each_type
def test_a_switch_that_is_thrown_between_tokens_is_heeded(dtype: torch.dtype) -> None:
    cache, k, v = grown(dtype=dtype)
    q = queries(k, 9)
    quick(cache, q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out, certificate = cache.attend(q, 1e-2)
    assert not isinstance(certificate, LazyCertificate) and bool((errors(q, k, v, out) <= certificate.rows).all())
    torch.set_float32_matmul_precision("medium")
    try:
        certificate = cache.attend(q, 0.5).certificate
        assert isinstance(cache.attend(q, 0.5).certificate, LazyCertificate) == (dtype != torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_no_sketch_is_made_on_a_cpu_until_it_is_asked_for() -> None:
    cache, k, v = grown(400)
    quick(cache, queries(k, 6))
    assert cache._sketched == 0
    q = queries(k, 6)
    out, certificate = cache.attend(q, 0.1, method="sparse")
    assert cache._sketched == 400 // 64 and certificate.method == "sparse"
    assert bool((errors(q, k, v, out) <= certificate.rows).all())
    # And then of the groups that came since.
    more = torch.randn(1, 3, 100, 16)
    cache.append(more, more)
    cache.attend(q, 0.1, method="sparse")
    assert cache._sketched == 500 // 64


def test_a_sketch_is_the_same_whether_it_is_made_at_once_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = torch.randn(1, 2, 320, 16), torch.randn(1, 2, 320, 16)
    late = KeyValueCache(2, 16)
    monkeypatch.setattr(token_buffers, "_EAGER", ("cpu",))
    early = KeyValueCache(2, 16)
    early.append(k, v)
    assert early._sketched == 5
    monkeypatch.undo()
    late.append(k, v)
    assert late._sketched == 0
    for part in token_buffers.PARTS:
        assert torch.equal(getattr(early._sketch(0), part), getattr(late._sketch(0), part))


def test_a_late_certificate_travels_complete() -> None:
    cache, k, _ = grown()
    q = queries(k, 9)
    whole = quick(cache, q)[1]
    for again in (
        copy.deepcopy(quick(cache, q)[1]),
        pickle.loads(pickle.dumps(quick(cache, q)[1])),
        Certificate.from_json(quick(cache, q)[1].to_json()),
        dataclasses.replace(quick(cache, q)[1]),
    ):
        assert again == whole and again.bound == whole.bound
    assert str(quick(cache, q)[1]) == str(whole)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-7), (torch.bfloat16, 5e-3)], ids=str)
def test_a_tolerance_that_may_be_missed_goes_the_general_way(dtype: torch.dtype, tol: float) -> None:
    cache, k, v = grown(dtype=dtype)
    q = queries(k, 9)
    for _ in range(2):
        out, certificate = cache.attend(q, tol)
        assert not isinstance(certificate, LazyCertificate) and certificate.keeps(tol)
        assert bool((errors(q, k, v, out) <= certificate.rows).all())


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_cache_goes_on_outside_of_inference_mode(made_inside: bool) -> None:
    k, v = torch.randn(2, 1, 3, 80, 16)
    q = queries(k, 9)
    with torch.inference_mode(made_inside):
        cache = KeyValueCache(3, 16)
    with torch.inference_mode():
        cache.append(k[:, :, :70], v[:, :, :70])
        quick(cache, q)
    for i in range(70, 80):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    out, certificate = quick(cache, q)
    assert bool((errors(q, k, v, out) <= certificate.rows).all())


def test_two_threads_may_look_at_once() -> None:
    cache, k, _ = grown()
    expected = quick(cache, queries(k, 9))[1].reason
    looks, started = 0, threading.Barrier(4)

    def later() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        started.wait()  # all of them are in here before any of them is done
        return {
            "method": "exact",
            "parameters": {},
            "target": "t",
            "kind": "none",
            "bound": 0.0,
            "rows": torch.zeros(1),
            "reason": expected,
        }

    certificate = LazyCertificate.of(later)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(certificate.method + certificate.reason)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["exact" + expected] * 4 and looks == 4


def test_a_reason_stands_before_the_certificates_own_and_nothing_else_changes() -> None:
    cache, k, _ = grown()
    _, certificate = quick(cache, queries(k, 9))
    explained = with_reason(certificate, "a step of decoding")
    assert "_later" in vars(explained) and "_later" in vars(certificate), "nobody looked yet"
    assert explained.reason == f"a step of decoding; {certificate.reason}" and certificate.reason
    assert dataclasses.replace(explained, reason=certificate.reason) == certificate
    assert with_reason(explained, "").reason == explained.reason
    assert with_reason(dataclasses.replace(certificate, reason=""), "alone").reason == "alone"


def test_what_follows_a_graph_still_does_with_a_reason() -> None:
    cache, k, _ = grown()
    fields, bounds = vars(copy.copy(quick(cache, queries(k, 9))[1])), iter((1e-3, 2e-3))
    follows = LazyCertificate.of(lambda: fields | {"bound": next(bounds)}, follows=True)
    explained = with_reason(follows, "replayed")
    assert (explained.bound, explained.bound) == (1e-3, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_bounds_relative_to_the_answer_are_those_of_the_call_however_late_the_look(
    dtype: torch.dtype, masked: bool
) -> None:
    q, k, v = torch.randn(3, 2, 4, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    options: dict[str, Any] = {"mask": torch.ones(40, 40, dtype=torch.bool).tril()} if masked else {"causal": True}
    asked = avow.attend(q, k, v, rtol=1e6, **options).certificate
    out, late = avow.attend(q, k, v, **options)
    assert "relative" not in vars(late) and vars(late)["bound"] == asked.bound
    # Nothing that others may write into is looked at later.
    for written in (q, k, v, out, late.rows, *options.values()):
        if isinstance(written, Tensor):
            written.zero_()
    assert late.relative == asked.relative > 0 and torch.equal(late.relative_rows, asked.relative_rows)
    assert torch.equal(late.rows, asked.rows), "what was written into them does not stay"
