"""A cache answers within its certificates, and reads a fraction where that is enough."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

import avow
from avow.core import Problem
from avow.core.certify import certify
from avow.decode import key_value_cache
from avow.errors import ParameterError, ShapeError, ToleranceUnreachable
from avow.methods.sparse import Sparse
from avow.nn import KeyValueCache
from tests.helpers.caches import DTYPES, errors, queries, share, tokens
from tests.helpers.sketches import restored
from tests.test_gathering import spied


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too, and whatever takes less than everything pays."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


# Decoding


@pytest.mark.parametrize("confidence", [None, 0.99], ids=["deterministic", "statistical"])
def test_every_step_of_a_long_decode_is_within_its_certificate(confidence: float | None) -> None:
    cache = KeyValueCache(2, 16, batch=2)
    k, v = tokens(cache, 600)
    cache.append(k[:, :, :400], v[:, :, :400])
    generator = torch.Generator().manual_seed(0)
    shares = []
    for at in range(400, 600):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        q = queries(k[:, :, : at + 1], 4, sharp=6.0)
        # Samples are drawn if they are asked for: compiled code answers sooner, and without chance.
        method = "auto" if confidence is None else "sparse"
        out, certificate = cache.attend(q, 0.1, confidence, generator=generator, method=method)
        found = errors(q, k[:, :, : at + 1], v[:, :, : at + 1], out)
        assert bool((found <= certificate.rows).all()) and certificate.bound <= 0.1
        assert certificate.rows.shape == q.shape[:-1]
        if certificate.method == "sparse":
            shares.append(share(certificate))
            assert certificate.kind == ("deterministic" if confidence is None else "statistical")
    assert len(shares) > 150 and sum(shares) / len(shares) < 0.4
    assert cache.length == 600


def test_a_bound_that_were_smaller_would_be_broken() -> None:
    cache = KeyValueCache(2, 16)
    cache.append(*tokens(cache, 640))
    k, v = (cache._buffers[name] for name in ("keys", "values"))
    broken = 0
    for _ in range(20):
        q = queries(k[:, :, :640], 4, sharp=4.0)
        out, certificate = cache.attend(q, 0.3)
        assert certificate.method == "sparse"
        broken += int((errors(q, k[:, :, :640], v[:, :, :640], out) > certificate.rows / 50).sum())
    assert broken > 0


def test_a_sketch_with_half_its_radius_is_caught() -> None:
    cache = KeyValueCache(1, 16)
    cache.append(*tokens(cache, 640))
    sketch, q = cache._sketch(0), 4 * torch.randn(1, 1, 1, 16)
    # Every key as near to the query as the sketch allows, and all that is not read opposed to all that is.
    weighted = sketch.metric.unsqueeze(-2) * q
    nearer = weighted / (weighted * q).sum().sqrt() * sketch.radius.flatten(2).unsqueeze(-1) * 0.999
    k = ((restored(sketch) + nearer) * sketch.size[..., None, None]).float()
    v = torch.ones(1, 1, 640, 16)
    fractions = []
    for part in (1.0, 0.5):
        claimed = dataclasses.replace(sketch, radius=sketch.radius * part, spread=None)
        method = Sparse(0.2)
        for _ in range(2):
            p = Problem.of(q, k, v)
            computed, chosen = spied(method, p, claimed)
            v = torch.where(chosen.any(2), 1.0, -1.0).unsqueeze(-1).expand(1, 1, 640, 16)
        rows = certify(method, p, computed, 1.0).rows
        fractions.append(float((errors(q, k, p.v, computed.out) / rows).max()))
    assert 0.5 < fractions[0] <= 1 < fractions[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 191, 257])
def test_lengths_around_groups_and_every_type(dtype: torch.dtype, length: int) -> None:
    cache = KeyValueCache(2, 8, value_dim=5, dtype=dtype)
    k, v = tokens(cache, length)
    for part in (slice(0, length // 3), slice(length // 3, length)):
        cache.append(k[:, :, part], v[:, :, part])
    q = queries(k, 6)
    for tol in (None, 0.2):
        out, certificate = cache.attend(q, tol)
        assert out.dtype == dtype and out.shape == (1, 6, 1, 5)
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
        assert tol is None or certificate.bound <= tol
    assert cache.length == length


@pytest.mark.parametrize("n", [1, 2, 40, 64, 70])
@pytest.mark.parametrize("window", [None, 1, 50, 64, 200])
def test_the_last_queries_see_what_came_before_them_within_the_window(n: int, window: int | None) -> None:
    cache = KeyValueCache(2, 8, window=window)
    k, v = tokens(cache, 400 + n)
    for first in range(0, 400, 40):
        cache.append(k[:, :, first : first + 40], v[:, :, first : first + 40])
    cache.append(k[:, :, 400:], v[:, :, 400:])
    q = queries(k, 4, n)
    for tol in (0.1, None):
        out, certificate = cache.attend(q, tol)
        assert bool((errors(q, k, v, out, window) <= certificate.rows).all())
    assert cache.length == (400 + n if window is None else min(window, 400 + n))
    if window is not None:
        assert bool((errors(q, k, v, out, window + 1) > certificate.rows).any())


def test_a_window_keeps_its_memory_and_its_certificates() -> None:
    cache = KeyValueCache(1, 8, window=200)
    k, v = tokens(cache, 3000)
    sizes = set()
    for at in range(3000):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        sizes.add(cache._buffers["keys"].shape[2])
        if at % 50 == 49:
            q = queries(k[:, :, : at + 1], 2)
            out, certificate = cache.attend(q, 0.1)
            past = k[:, :, : at + 1], v[:, :, : at + 1]
            assert bool((errors(q, *past, out, 200) <= certificate.rows).all())
    assert max(sizes) <= 2 * (200 + 128)
    assert cache.nbytes < 3000 * 8 * 4


def test_memory_is_that_of_the_tokens_and_the_sketch_and_doubles() -> None:
    cache = KeyValueCache(2, 64, dtype=torch.bfloat16)
    sizes = []
    for _ in range(200):
        cache.append(*tokens(cache, 5))
        cache.attend(torch.randn(1, 2, 1, 64).bfloat16(), 0.1)
        sizes.append(cache.nbytes)
    plain = cache.length * 2 * 2 * 64 * 2
    assert plain < cache.nbytes <= 2.1 * 1.3 * plain
    assert len(set(sizes)) <= 6  # made a few times, each twice as large


@pytest.mark.parametrize("dim", [16, 24, 32, 64, 80, 128, 256])
def test_the_sketch_adds_less_than_three_tenths_to_a_bfloat16_cache(dim: int) -> None:
    none, usual, wide = (KeyValueCache(4, dim, dtype=torch.bfloat16, bits=bits) for bits in (None, 4, 8))
    assert 0 < none.overhead < usual.overhead < 0.3
    assert wide.overhead - usual.overhead == pytest.approx(0.125)  # four more bits of 32
    usual.append(*tokens(usual, 256))
    assert usual.nbytes == pytest.approx((1 + usual.overhead) * 256 * 4 * 2 * dim * 2)


def test_it_answers_as_attend_does() -> None:
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 300)
    cache.append(k, v)
    q = queries(k, 4)
    mine, theirs = cache.attend(q), avow.attend(q, k, v, enable_gqa=True)
    assert torch.equal(mine.out, theirs.out)
    # Lengths were rounded up differently, and the cache's bound is written without its tanh.
    assert mine.certificate.bound == pytest.approx(theirs.certificate.bound, rel=1e-2)
    assert mine.certificate.assumptions == theirs.certificate.assumptions
    assert (mine.certificate.method, mine.certificate.cost) == (theirs.certificate.method, theirs.certificate.cost)
    _, certificate = cache.attend(q, 0.05)
    _, other = avow.attend(q, k, v, enable_gqa=True, method="sparse", tol=0.05)
    assert certificate.parameters == other.parameters and certificate.kind == other.kind
    # The cache guesses where to stop, and siblings read together.
    assert share(certificate) < 2 * share(other)
    # The reference reads everything, in float64; compiled steps look at the sketch and read what they list.
    assert certificate.cost.flops <= other.cost.flops and certificate.cost.weight <= other.cost.weight
    assert max(certificate.bound, other.bound) <= 0.05


def test_a_tolerance_below_rounding_is_exact_in_wider_arithmetic_or_unreachable() -> None:
    cache = KeyValueCache(1, 8, dtype=torch.bfloat16)
    cache.append(*tokens(cache, 200))
    q = torch.randn(1, 1, 1, 8).bfloat16()
    _, certificate = cache.attend(q, 4.0e-3)
    assert certificate.method == "exact" and certificate.bound <= 4.0e-3
    text = r"^tol=1e-05 is below .*, the best bound that can be proved in bfloat16; convert q, k and v to float32$"
    with pytest.raises(ToleranceUnreachable, match=text):
        cache.attend(q, 1e-5)


# Tokens that do not fit


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((2, 7, 16), "use k[None]"),
        ((1, 7, 2, 16), "use k.transpose(1, 2)"),
        ((3, 2, 7, 16), "make the cache with batch=3"),
        ((1, 2, 7, 32), "make the cache with dim=32"),
        ((1, 1, 7, 16), "make the cache with key_heads=1"),
        ((1, 8, 7, 16), "make the cache with key_heads=8, or append them before they are repeated for query heads"),
        ((3, 16), "add the missing axes"),
    ],
)
def test_tokens_of_another_shape_are_refused_with_what_to_do(shape: tuple[int, ...], remedy: str) -> None:
    cache = KeyValueCache(2, 16)
    text = f"k.shape={shape} must be (1, 2, length, 16), as the cache was made; {remedy}"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        cache.append(torch.zeros(shape), torch.zeros(1, 2, 7, 16))


def test_an_argument_that_was_given_is_not_suggested() -> None:
    with pytest.raises(
        ParameterError, match=r"^heads=2 is not an argument of KeyValueCache; did you mean key_heads\?$"
    ):
        KeyValueCache(heads=2, dim=16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        KeyValueCache(heads=8, key_heads=2, dim=16)  # type: ignore[call-arg]


def test_the_name_of_a_type_is_refused_with_the_type() -> None:
    with pytest.raises(ParameterError, match=r"^dtype='bfloat16' must be a torch.dtype; use torch.bfloat16$"):
        KeyValueCache(2, 16, dtype="bfloat16")  # type: ignore[arg-type]  # as people do
    with pytest.raises(ParameterError, match=r"; the default is torch.float32$"):
        KeyValueCache(2, 16, dtype="Tensor")  # type: ignore[arg-type]


# When the sketch saves nothing


def test_flat_heads_fall_back_to_exact_and_are_asked_again() -> None:
    cache = KeyValueCache(1, 16)
    k, v = tokens(cache, 1024)
    cache.append(k, v)
    reasons = [cache.attend(0.01 * torch.randn(1, 1, 1, 16), 1e-2).certificate for _ in range(12)]
    assert {certificate.method for certificate in reasons} == {"exact"}
    asked = [i for i, x in enumerate(reasons) if x.reason.endswith("would have to be read in full")]
    assert asked == [0, 2, 5, 10]
    assert reasons[1].reason == "sparse decoding did not pay; retrying in the next step"
    # The head becomes peaked, and soon that is noticed.
    methods = [cache.attend(6 * k[:, :, 7:8], 1e-2).certificate.method for _ in range(12)]
    assert methods[-1] == "sparse" and methods[0] == "exact"


def test_another_tolerance_asks_at_once() -> None:
    cache = KeyValueCache(1, 16)
    cache.append(*tokens(cache, 1024))
    flat = 0.5 * torch.randn(1, 1, 1, 16)
    assert [cache.attend(flat, 1e-2).certificate.method for _ in range(2)] == ["exact", "exact"]
    assert cache.attend(flat, 0.9).certificate.method == "sparse"


def test_short_caches_and_those_without_a_sketch_say_why_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = KeyValueCache(1, 16, bits=None)
    bare.append(*tokens(bare, 100))
    assert bare.attend(torch.randn(1, 1, 1, 16), 0.1).certificate.reason == "the cache keeps no sketch"
    monkeypatch.setattr(key_value_cache, "SHORTEST", 101)
    short = KeyValueCache(1, 16)
    short.append(*tokens(short, 100))
    certificate = short.attend(torch.randn(1, 1, 1, 16), 0.1).certificate
    assert certificate.method == "exact" and certificate.reason == "cache too short for sparse decoding (100 tokens)"


# Hard numbers


@pytest.mark.parametrize("loud", [1e-30, 1e-3, 1e3, 1e15, 1e35])
def test_keys_that_grow_or_shrink_after_the_first_groups_stay_within_the_bound(loud: float) -> None:
    cache = KeyValueCache(1, 8)
    k, v = tokens(cache, 512)
    k[:, :, 128:] *= loud
    cache.append(k[:, :, :128], v[:, :, :128])
    cache.append(k[:, :, 128:], v[:, :, 128:])
    for aim in (5, 300):
        q = k[:, :, aim : aim + 1] / k[:, :, aim : aim + 1].abs().amax() / max(1.0, loud)
        out, certificate = cache.attend(q, 0.1, scale=1 / math.sqrt(8))
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
        assert certificate.bound <= 0.1


def test_a_cache_that_begins_with_zeros_still_saves() -> None:
    cache = KeyValueCache(1, 16)
    k, v = tokens(cache, 1024)
    k[:, :, :128] = 0
    cache.append(k[:, :, :64], v[:, :, :64])
    cache.append(k[:, :, 64:], v[:, :, 64:])
    q = 6 * k[:, :, 500:501]
    out, certificate = cache.attend(q, 0.05)
    assert share(certificate) < 0.3 and bool((errors(q, k, v, out) <= certificate.rows).all())


def test_what_the_sketch_asks_for_can_be_read_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_cache, "SHORTEST", 600)
    cache = KeyValueCache(2, 64)
    k, v = torch.randn(2, 1, 2, 512, 64).unbind()
    cache.append(k, v)
    q = 6 * torch.randn(1, 4, 1, 64)
    usual, asked = cache.attend(q, tol=0.05).certificate, cache.attend(q, tol=0.05, method="sparse").certificate
    assert usual.method == "exact" and "cache too short for sparse decoding (512 tokens)" in usual.reason
    assert asked.method == "sparse" and asked.bound <= 0.05 and "of the tokens in full" in asked.reason
    flat = cache.attend(0 * q, tol=0.05, method="sparse").certificate
    assert flat.method == "sparse" and flat.bound <= 0.05, "a flat head reads nearly all, and says so"
    with pytest.raises(ParameterError, match=r"method='dense' must be 'auto', 'exact' or 'sparse'; use another"):
        cache.attend(q, tol=0.05, method="dense")


@pytest.mark.parametrize("tol", [None, 0.1])
def test_chance_comes_from_a_generator_or_is_refused_whatever_is_asked(tol: float | None) -> None:
    cache = KeyValueCache(2, 16)
    cache.append(*tokens(cache, 100))
    text = "generator=7 must be a torch.Generator; pass torch.Generator().manual_seed(0)"
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        cache.attend(torch.randn(1, 4, 1, 16), tol, generator=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-300])
def test_keys_far_beyond_their_sketch_are_read_whatever_they_are_multiplied_by(scale: float) -> None:
    """The first keys set the sketch's size, for which the others are too long: 0 · inf is nan."""
    k, v = torch.randn(2, 1, 2, 256, 16, dtype=torch.float64)
    k[:, :, :128] *= 1e-290
    cache = KeyValueCache(2, 16, dtype=torch.float64)
    for half in (slice(0, 128), slice(128, 256)):
        cache.append(k[:, :, half], v[:, :, half])
        out, certificate = cache.attend(
            torch.randn(1, 4, 1, 16, dtype=torch.float64), 0.1, scale=scale, method="sparse"
        )
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1)
    error = torch.linalg.vector_norm(out - mean, dim=-1) / torch.linalg.vector_norm(v, dim=-1).amax()
    assert bool((error <= certificate.rows).all()) and certificate.bound <= 0.1
