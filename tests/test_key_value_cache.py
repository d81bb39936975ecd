"""A cache answers within its certificates, reads a fraction where that is enough, and survives bad input whole."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import avow
from avow.certificates import certify, measure_norms
from avow.contract import Certificate, Computed, Problem
from avow.errors import (
    AvowError,
    DtypeError,
    FileError,
    NonFiniteError,
    ParameterError,
    ShapeError,
    ToleranceUnreachable,
)
from avow.maths.heads import per_query_head
from avow.maths.sketch import Sketch, sketched
from avow.methods.sparse import NothingToSave, Sparse
from avow.nn import KeyValueCache, key_value_cache, token_buffers

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too."""
    monkeypatch.setattr(key_value_cache, "_SHORT", {"cpu": 1, "cuda": 1})


def tokens(cache: KeyValueCache, count: int, loud: float = 1.0) -> tuple[Tensor, Tensor]:
    lead = cache.batch, cache.key_heads, count
    return (
        (loud * torch.randn(*lead, cache.dim)).to(cache.dtype),
        torch.randn(*lead, cache.value_dim).to(cache.dtype),
    )


def queries(k: Tensor, heads: int, n: int = 1, sharp: float = 3.0) -> Tensor:
    """Queries near some of the keys: heads that look at few tokens, as trained ones do."""
    aims = k[:, :, torch.randint(k.shape[2], (n,))].repeat_interleave(heads // k.shape[1], 1)
    return (sharp * aims.double() + torch.randn(aims.shape)).to(k.dtype)


def errors(q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int | None = None) -> Tensor:
    """How far each row of the last n is from the truth in float64, in units of the longest value that it sees."""
    n, s, heads = q.shape[2], k.shape[2], q.shape[1]
    own, at = torch.arange(s - n, s)[:, None], torch.arange(s)
    seen = (at <= own) & (at > own - (s if window is None else window))
    wide = [per_query_head(x.double(), heads) for x in (k, v)]
    logits = (q.double() @ wide[0].transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    truth = torch.softmax(logits, -1) @ wide[1]
    lengths = torch.linalg.vector_norm(wide[1], dim=-1).unsqueeze(-2)
    unit = torch.where(seen, lengths, 0.0).amax(-1)
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / unit


def share(certificate: Certificate) -> float:
    """The part of the tokens that a certificate says were read."""
    found = re.fullmatch(r"read (\d+\.\d)% of the tokens in full", certificate.reason)
    assert found, certificate.reason
    return float(found[1]) / 100


# Gathering


def problem(n: int = 3, s: int = 700, d: int = 24, heads: int = 6, groups: int = 2, batch: int = 1) -> Problem:
    k, v = torch.randn(2, batch, groups, s, d).unbind()
    return Problem.of(queries(k, heads, n), k, v, enable_gqa=True)


@pytest.mark.parametrize("chance", [0.0, 1e-2], ids=["deterministic", "statistical"])
@pytest.mark.parametrize("drop", [1e-1, 1e-3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_gathering_reads_the_same_tokens_and_proves_the_same(
    chance: float, drop: float, causal: bool, batch: int
) -> None:
    p = dataclasses.replace(problem(n=20 if causal else 3, s=400, batch=batch), causal=causal)
    method, norms = Sparse(drop, chance=chance), measure_norms(p)
    masked, gathered = (
        method.compute(p, torch.Generator().manual_seed(0), sketch=sketch) for sketch in (None, sketched(p.k))
    )
    assert torch.equal(masked.trace.read, gathered.trace.read)
    torch.testing.assert_close(gathered.trace.tails, masked.trace.tails, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(gathered.out, masked.out)
    rows = [certify(method, p, norms, computed, 0.99).rows for computed in (masked, gathered)]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-10, atol=1e-15)
    # Another sketch chooses other tokens, so the equality above says something.
    other = method.compute(p, torch.Generator().manual_seed(0), sketch=sketched(p.k, 2))
    assert causal or not torch.equal(other.trace.read, masked.trace.read)


def spied(method: Sparse, p: Problem, sketch: Sketch) -> tuple[Computed, Tensor]:
    """What the method gives, and which tokens it touched."""
    touched: list[Tensor] = []
    choose = Sparse._chosen

    def spying(self: Sparse, *given: object) -> object:
        choice = choose(self, *given)  # type: ignore[arg-type]
        touched.append(choice.touched)
        return choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sparse, "_chosen", spying)
        computed = method.compute(p, torch.Generator().manual_seed(0), sketch)
    (only,) = touched
    return computed, only


@pytest.mark.parametrize("chance", [0.0, 1e-2], ids=["deterministic", "statistical"])
def test_gathering_touches_no_token_that_it_did_not_choose(chance: float) -> None:
    p = problem(n=1, s=4096)
    norms = measure_norms(p)
    p, sketch, method = dataclasses.replace(p, norms=norms), sketched(p.k), Sparse(0.05, chance=chance)
    plain, chosen = spied(method, p, sketch)
    unread = ~chosen.any(2)  # (b, g, s)
    assert float(unread.double().mean()) > 0.5
    poisoned = [x.masked_fill(unread.unsqueeze(-1), math.nan) for x in (p.k, p.v)]
    after = method.compute(
        dataclasses.replace(p, k=poisoned[0], v=poisoned[1]), torch.Generator().manual_seed(0), sketch
    )
    assert torch.equal(after.out, plain.out) and torch.equal(after.trace.tails, plain.trace.tails)
    # One chosen token that is poisoned shows.
    chosen_one = tuple(chosen.any(2).nonzero()[0])
    poisoned[1][chosen_one] = math.nan
    worse = dataclasses.replace(p, k=poisoned[0], v=poisoned[1])
    assert bool(method.compute(worse, torch.Generator().manual_seed(0), sketch).out.isnan().any())


def test_what_does_not_pay_is_known_before_anything_is_read() -> None:
    p = problem(s=2048, n=1)
    flat = dataclasses.replace(p, q=0.01 * p.q, norms=measure_norms(p))
    nothing = dataclasses.replace(flat, k=flat.k * math.nan, v=flat.v * math.nan)
    # Samples are planned after a small part was read.
    for chance, given in ((0.0, nothing), (1e-3, flat)):
        with pytest.raises(NothingToSave, match=r"^\d+\.\d% of the tokens would have to be read in full$") as caught:
            Sparse(1e-4, chance=chance).compute(given, None, sketched(p.k), worthwhile=0.3)
        assert caught.value.share > 0.3


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
        out, certificate = cache.attend(q, 0.1, confidence, generator=generator)
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
    k = ((sketch.restored() + nearer) * sketch.size[..., None, None]).float()
    v = torch.ones(1, 1, 640, 16)
    fractions = []
    for part in (1.0, 0.5):
        claimed = dataclasses.replace(sketch, radius=sketch.radius * part)
        method = Sparse(0.2)
        for _ in range(2):
            p = Problem.of(q, k, v)
            computed, chosen = spied(method, p, claimed)
            v = torch.where(chosen.any(2), 1.0, -1.0).unsqueeze(-1).expand(1, 1, 640, 16)
        rows = certify(method, p, measure_norms(p), computed, 1.0).rows
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


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
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
    assert torch.equal(mine.out, theirs.out) and mine.certificate == theirs.certificate
    _, certificate = cache.attend(q, 0.05)
    _, other = avow.attend(q, k, v, enable_gqa=True, method="sparse", tol=0.05)
    assert certificate.parameters == other.parameters and certificate.kind == other.kind
    assert certificate.cost == other.cost and share(certificate) == share(other)
    torch.testing.assert_close(certificate.rows, other.rows)


def test_a_tolerance_below_rounding_is_exact_in_wider_arithmetic_or_unreachable() -> None:
    cache = KeyValueCache(1, 8, dtype=torch.bfloat16)
    cache.append(*tokens(cache, 200))
    q = torch.randn(1, 1, 1, 8).bfloat16()
    _, certificate = cache.attend(q, 4.0e-3)
    assert certificate.method == "exact" and certificate.bound <= 4.0e-3
    text = (
        r"^tol=0\.001 is below 3\.9.e-03, the best bound that can be proved in bfloat16; convert q, k and v to float32$"
    )
    with pytest.raises(ToleranceUnreachable, match=text):
        cache.attend(q, 1e-3)


# When the sketch saves nothing


def test_flat_heads_fall_back_to_exact_and_are_asked_again() -> None:
    cache = KeyValueCache(1, 16)
    k, v = tokens(cache, 1024)
    cache.append(k, v)
    reasons = [cache.attend(0.01 * torch.randn(1, 1, 1, 16), 1e-2).certificate for _ in range(12)]
    assert {certificate.method for certificate in reasons} == {"exact"}
    asked = [i for i, x in enumerate(reasons) if x.reason.endswith("would have to be read in full")]
    assert asked == [0, 2, 5, 10]
    assert reasons[1].reason == "the sketch saved nothing lately; it is asked again after 0 more"
    # The head becomes peaked, and soon that is noticed.
    methods = [cache.attend(6 * k[:, :, 7:8], 1e-2).certificate.method for _ in range(12)]
    assert methods[-1] == "sparse" and methods[0] == "exact"


def test_another_tolerance_asks_at_once() -> None:
    cache = KeyValueCache(1, 16)
    cache.append(*tokens(cache, 1024))
    flat = 0.01 * torch.randn(1, 1, 1, 16)
    assert [cache.attend(flat, 1e-2).certificate.method for _ in range(2)] == ["exact", "exact"]
    assert cache.attend(flat, 0.9).certificate.method == "sparse"


def test_short_caches_and_those_without_a_sketch_say_why_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = KeyValueCache(1, 16, bits=None)
    bare.append(*tokens(bare, 100))
    assert bare.attend(torch.randn(1, 1, 1, 16), 0.1).certificate.reason == "the cache keeps no sketch"
    monkeypatch.setattr(key_value_cache, "_SHORT", {"cpu": 101, "cuda": 101})
    short = KeyValueCache(1, 16)
    short.append(*tokens(short, 100))
    certificate = short.attend(torch.randn(1, 1, 1, 16), 0.1).certificate
    assert certificate.method == "exact" and certificate.reason == "100 tokens are read sooner than chosen among"


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


# Files


def filled(**options: object) -> KeyValueCache:
    cache = KeyValueCache(2, 16, value_dim=8, **options)  # type: ignore[arg-type]
    for count in (100, 1, 200):
        cache.append(*tokens(cache, count))
    return cache


@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_loaded_cache_answers_bit_for_bit_and_goes_on(
    tmp_path: Path, window: int | None, dtype: torch.dtype, bits: int | None
) -> None:
    cache = filled(window=window, dtype=dtype, bits=bits)
    flat = torch.zeros(1, 2, 1, 16, dtype=dtype)
    cache.attend(flat, 2e-2)  # what it learnt of its heads is kept, too
    cache.save(tmp_path / "cache.safetensors")
    again = KeyValueCache.load(tmp_path / "cache.safetensors")
    k, v = tokens(cache, 90)
    for _ in range(2):
        q = queries(k, 4)
        for tol in (2e-2, 0.1, None):
            mine, theirs = cache.attend(q, tol), again.attend(q, tol)
            assert torch.equal(mine.out, theirs.out) and mine.certificate == theirs.certificate
        for one in (cache, again):
            one.append(k, v)
    assert again.length == cache.length
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


def test_an_empty_cache_can_be_kept(tmp_path: Path) -> None:
    KeyValueCache(2, 16).save(tmp_path / "empty")
    assert KeyValueCache.load(tmp_path / "empty").length == 0


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    whole = path.read_bytes()
    for at in (len(whole) - 1, len(whole) // 2, whole.index(b"pause")):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(
            FileError, match=r"is damaged: its digest is not that of what it holds; save the cache again$"
        ):
            KeyValueCache.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"is truncated or no safetensors file \(.*\); save the cache again$"):
        KeyValueCache.load(path)
    safetensors.torch.save_file({"keys": torch.zeros(2)}, path)
    text = "is no 'avow key-value cache 2'; name a file that KeyValueCache.save wrote"
    with pytest.raises(FileError, match=re.escape(text)):
        KeyValueCache.load(path)
    with pytest.raises(FileError, match=r"does not exist; check the path$"):
        KeyValueCache.load(tmp_path / "nothing")


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\); name another place$"):
        filled().save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# Bad input


def unchanged(cache: KeyValueCache, before: dict[str, Tensor], length: int) -> bool:
    held = cache._position - cache._base
    same = all(
        torch.equal(cache._buffers[name][:, :, :held], x[:, :, :held]) for name, x in before.items() if name == "keys"
    )
    return same and cache.length == length


@pytest.mark.parametrize(
    ("k", "v", "error", "text"),
    [
        ((1, 3, 5, 16), (1, 3, 5, 8), ShapeError, "k.shape=(1, 3, 5, 16) must be (1, 2, length, 16), as the cache was"),
        ((1, 2, 5, 8), (1, 2, 5, 8), ShapeError, "k.shape=(1, 2, 5, 8) must be (1, 2, length, 16), as the cache was"),
        ((2, 2, 5, 16), (2, 2, 5, 8), ShapeError, "k.shape=(2, 2, 5, 16) must be (1, 2, length, 16), as the cache was"),
        ((1, 2, 5, 16), (1, 2, 5, 9), ShapeError, "v.shape=(1, 2, 5, 9) must be (1, 2, length, 8), as the cache was"),
        ((1, 2, 5, 16), (1, 2, 4, 8), ShapeError, "v.shape[-2]=4 must equal k.shape[-2]=5; each key needs one value"),
        ((2, 5, 16), (2, 5, 8), ShapeError, "k.shape=(2, 5, 16) must be (1, 2, length, 16), as the cache was"),
    ],
)
def test_tokens_of_another_kind_are_refused(
    k: tuple[int, ...], v: tuple[int, ...], error: type[AvowError], text: str
) -> None:
    cache = filled()
    before = {name: x.clone() for name, x in cache._buffers.items()}
    with pytest.raises(error, match=re.escape(text)):
        cache.append(torch.randn(k), torch.randn(v))
    assert unchanged(cache, before, 301)


def test_another_type_is_refused() -> None:
    cache = filled()
    k, v = tokens(cache, 3)
    with pytest.raises(DtypeError, match=r"^k\.dtype=torch\.float64 must equal the cache's torch\.float32; convert"):
        cache.append(k.double(), v)
    with pytest.raises(DtypeError, match=r"^q\.dtype=torch\.float64 must equal the cache's torch\.float32; use q\.to"):
        cache.attend(torch.randn(1, 2, 1, 16).double())
    with pytest.raises(DtypeError, match=r"^dtype=torch\.int64 must be one of float64, float32, bfloat16, float16"):
        KeyValueCache(2, 16, dtype=torch.int64)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_numbers_that_are_none_are_refused_and_the_cache_stays_as_it_was(wrong: float, where: str) -> None:
    cache = filled()
    before = {name: x.clone() for name, x in cache._buffers.items()}
    k, v = tokens(cache, 100)
    (k if where == "k" else v)[0, 1, 70, 3] = wrong
    with pytest.raises(NonFiniteError, match=rf"^{where}\[0, 1, 70, 3\]={wrong} must be finite; mend {where} first$"):
        cache.append(k, v)
    assert unchanged(cache, before, 301)
    q = queries(k, 2)
    assert bool(cache.attend(q, 0.1).out.isfinite().all())


def test_no_memory_to_grow_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    q = 6 * cache._buffers["keys"][:, :, 7:8]
    before = cache.attend(q, 0.1)
    assert before.certificate.method == "sparse"
    k, v = tokens(cache, 5000)
    make = KeyValueCache._room

    def scarce(self: KeyValueCache, count: int) -> dict[str, Tensor]:
        if count > 1000:
            raise torch.OutOfMemoryError("out of memory")
        return make(self, count)

    monkeypatch.setattr(KeyValueCache, "_room", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(k, v)
    monkeypatch.undo()
    monkeypatch.setattr(key_value_cache, "_SHORT", {"cpu": 1, "cuda": 1})
    assert cache.length == 301
    after = cache.attend(q, 0.1)
    assert torch.equal(before.out, after.out) and before.certificate == after.certificate
    cache.append(k, v)
    assert cache.length == 5301


def test_a_sketch_that_cannot_be_made_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    before = {name: x.clone() for name, x in cache._buffers.items()}

    def failing(*_: object) -> Sketch:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(token_buffers, "sketched", failing)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(*tokens(cache, 64))
    assert unchanged(cache, before, 301)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tol": 0.0}, "tol=0.0 must be above 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": -1.0}, "tol=-1.0 must be above 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": math.nan}, "tol=nan must be a number of at least 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": 0.1, "confidence": 0.0}, "confidence=0.0 must be above 0 and at most 1; try confidence=0.99"),
        ({"tol": 0.1, "confidence": 1.1}, "confidence=1.1 must be above 0 and at most 1; try confidence=0.99"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        filled().attend(torch.randn(1, 2, 1, 16), **options)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 16), "q.shape=(2, 16) must be (batch, heads, length, dim); give q its four axes"),
        ((2, 2, 1, 16), "q.shape[0]=2 must equal batch=1; attend with the whole batch"),
        ((1, 3, 1, 16), "k heads=2 must divide q's 3 heads; regroup the heads"),
        ((1, 2, 1, 8), "k.shape[-1]=16 must equal q.shape[-1]=8 and be at least 1"),
        ((1, 2, 302, 16), "q.shape[-2]=302 exceeds the 301 tokens held; attend right after appending their keys"),
    ],
)
def test_queries_that_do_not_fit_are_refused(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(text)):
        filled().attend(torch.randn(shape), 0.1)


def test_an_empty_cache_cannot_be_attended_to() -> None:
    text = "cache.length=0 must be at least 1; append keys and values first"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        KeyValueCache(2, 16).attend(torch.randn(1, 2, 1, 16), 0.1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"key_heads": 0}, "key_heads=0 must be a whole number of at least 1"),
        ({"dim": 1.5}, "dim=1.5 must be a whole number of at least 1"),
        ({"window": 0}, "window=0 must be a whole number of at least 1"),
        ({"bits": 9}, "bits=9 must be from 1 to 8; try bits=4"),
    ],
)
def test_caches_that_cannot_be_are_refused(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(text)):
        KeyValueCache(**({"key_heads": 1, "dim": 4} | wrong))
