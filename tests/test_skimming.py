"""Skimming stays within its bounds, compiled or not, touches only what it chose, and knows when it does not pay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.nn import KeyValueCache, key_value_cache
from avow.numerics import selection
from avow.numerics.brackets import ends
from avow.numerics.fast_decode import Skim
from avow.numerics.fused import Fused
from avow.numerics.selection import Unfit
from avow.numerics.sketch import Sketch, sketched
from tests.helpers.caches import DTYPES, errors, queries, share, tokens
from tests.helpers.sketches import restored


def heads(s: int = 640, r: int = 3, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, 1, 2, s, d).unbind()
    q = 4 * k[:, :, torch.randint(s, (r,))] + torch.randn(1, 2, r, d)
    return q, k, v


def skimmed(q: Tensor, k: Tensor, v: Tensor, sketch: Sketch, drop: float = 0.05, **options: Any) -> Skim:
    lengths = torch.linalg.vector_norm(v.double(), dim=-1)
    longest = torch.linalg.vector_norm(k.double(), dim=-1).amax(-1)
    most = lengths[..., options.get("hidden", 0) :].amax(-1)
    return Skim.over(q, k, v, sketch, 0.25, longest, lengths, most, lengths.amax(-1), drop, **options)


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(0.25 * q.double() @ k.double().transpose(-1, -2), -1) @ v.double()


def moved(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    unit = torch.linalg.vector_norm(v.double(), dim=-1).amax(-1)
    return torch.linalg.vector_norm(out - truth(q, k, v), dim=-1) / unit.unsqueeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drop", [0.3, 1e-2, 1e-4])
def test_averages_are_within_what_is_proved(dtype: torch.dtype, drop: float) -> None:
    q, k, v = (x.to(dtype) for x in heads())
    skim = skimmed(q, k, v, sketched(k), drop)
    found = skim.read()
    assert bool((moved(q, k, v, found.out) <= found.moved).all()) and float(found.moved.max()) <= drop
    # Float32 where it is precise enough, and not where it is not.
    assert skim.kind == (torch.float64 if dtype == torch.float64 or drop == 1e-4 else torch.float32)
    assert drop < 0.3 or skim.share < 0.7


def along(q: Tensor, sketch: Sketch) -> Tensor:
    """Keys for which the sketch loses as much as its radii allow, all of it along the query."""
    weighted = sketch.metric.unsqueeze(-2) * q
    sizes = (weighted * q).sum(-1, keepdim=True).sqrt()
    nearer = weighted / sizes * sketch.radius.float().flatten(2).unsqueeze(-1) * 0.999
    return (restored(sketch) + nearer) * sketch.size[..., None, None].float()


def against(wanted: Tensor, e: int = 16) -> Tensor:
    """Values for which leaving the others out does the most damage."""
    return torch.where(wanted, 1.0, -1.0)[..., None].expand(*wanted.shape, e)


def test_a_sketch_that_claims_too_small_a_radius_is_caught() -> None:
    q, k, _ = heads(r=1)
    sketch = dataclasses.replace(sketched(k), spread=None)
    k = along(q, sketch)
    fractions = []
    for part in (1.0, 0.4):
        claimed = dataclasses.replace(sketch, radius=sketch.radius * part)
        wanted = skimmed(q, k, torch.ones(1, 2, 640, 16), claimed, 0.2).view.wanted
        v = against(wanted)
        found = skimmed(q, k, v, claimed, 0.2).read()
        fractions.append(float((moved(q, k, v, found.out) / found.moved).max()))
    assert 0.4 < fractions[0] <= 1 < fractions[1]


def test_many_together_are_known_to_weigh_less_than_each_at_its_worst() -> None:
    q, k, v = heads(s=8192, r=2)
    q, sketch = 0.2 * q, sketched(k)
    together, singly = (skimmed(q, k, v, x, 0.4) for x in (sketch, dataclasses.replace(sketch, spread=None)))
    assert torch.equal(together.view.wanted, singly.view.wanted) and 0 < together.share < 0.9
    length = q.new_full((1, 2, 2), 0.5, dtype=torch.float64)
    left, worst = (x.view.behind(length) for x in (together, singly))
    weights = torch.exp(0.25 * q.double() @ k.double().transpose(-1, -2) - together.view.ends.origin.unsqueeze(-1))
    true = weights * (torch.linalg.vector_norm(v.double(), dim=-1).unsqueeze(2) + 0.5)  # (b, g, r, s)
    true = true.masked_fill(together.view.wanted.unsqueeze(2), 0.0).sum(-1)
    assert bool((true <= left).all()) and float((left / worst).max()) < 0.98


@pytest.mark.parametrize("size", [1e-14, 1.0, 1e14])
def test_what_many_strayed_together_is_not_lost_where_squares_are_small(size: float) -> None:
    # Keys along single channels: a group's middle lies along all of them, and every weight is tiny beside its origin.
    k = 8 * torch.eye(16)[torch.randint(16, (1, 2, 4096))] + torch.rand(1, 2, 4096, 16)
    q, v = torch.full((1, 2, 1, 16), 4.0), size * torch.randn(1, 2, 4096, 16)
    view = skimmed(q, k, v, sketched(k), 0.4).view
    assert view.crowded is not None and view.together is not None
    terms = view.ends.weights.double() * (view.near.double() + 0.5 * view.longest.unsqueeze(-1)).unsqueeze(2)
    left = terms.masked_fill(view.wanted.unflatten(-1, (-1, 64)).unsqueeze(2), 0.0) * view.crowded.shrunk.unsqueeze(-1)
    assert float(view.ends.weights.max()) < 2.0**-64 and bool((left > 0).any())
    straight = left.square().sum((-1, -2)).sqrt()
    bent = view.crowded.whole * view.crowded.bent * torch.exp(view.cut / -selection._FINE) * view.largest
    assert bool((view.together.stray >= (1 - 2.0**-12) * view.crowded.whole * (straight + bent)).all())


def test_a_sketch_that_claims_to_have_lost_less_of_all_keys_together_is_caught() -> None:
    q, k, _ = heads(s=4096, r=1)
    q = 0.4 * q
    sketch = sketched(k, bits=2)
    k = along(q, sketch)
    assert sketch.spread is not None
    lost = (k / sketch.size[..., None, None] - restored(sketch)).double().square().sum(-2)  # (b, g, d)
    true = (lost * k.shape[-1]).float()  # Σ (q·e)² ≤ Σ d·q²·e², summed over rows
    fractions = []
    for spread in (true, sketch.spread * 1e-3):
        claimed = dataclasses.replace(sketch, spread=spread)
        wanted = skimmed(q, k, torch.ones(1, 2, 4096, 16), claimed, 0.2).view.wanted
        v = against(wanted)
        found = skimmed(q, k, v, claimed, 0.2).read()
        fractions.append(float((moved(q, k, v, found.out) / found.moved).max()))
    assert 0.3 < fractions[0] <= 1 < fractions[1]


def test_nothing_is_touched_that_was_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.numerics.fast_decode._AIMS", (0.3, 0.3))  # enough at once
    q, k, v = heads(s=1000)
    sketch = sketched(k)
    skim = skimmed(q, k, v, sketch)
    plain = skim.read()
    chosen = torch.ones(2, 1000, dtype=torch.bool)
    chosen[:, : sketch.rows] = skim.view.wanted[0]
    assert torch.equal(plain.read[0], chosen.sum(-1)) and float(chosen.double().mean()) < 0.6
    poisoned = [x.masked_fill(~chosen[None, ..., None], math.nan) for x in (k, v)]
    after = dataclasses.replace(skim, k=poisoned[0], v=poisoned[1]).read()
    assert torch.equal(after.out, plain.out) and torch.equal(after.moved, plain.moved)
    poisoned[0][0, 0, int(chosen[0].nonzero()[0])] = math.nan
    with pytest.raises(Unfit):
        dataclasses.replace(skim, k=poisoned[0], v=poisoned[1]).read()


def test_a_guess_that_was_too_bold_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads()
    careful = skimmed(q, k, v, sketched(k)).read()
    monkeypatch.setattr("avow.numerics.fast_decode._AIMS", (30.0, 0.85, 0.7, 0.5))
    bold = skimmed(q, k, v, sketched(k))
    first = bold.share
    found = bold.read()
    assert bool((moved(q, k, v, found.out) <= found.moved).all()) and float(found.moved.max()) <= 0.05
    assert int(found.read.sum()) > first * 2 * 640  # more was read than at first
    assert int(found.read.sum()) < 1.5 * int(careful.read.sum())


@pytest.mark.parametrize("drop", [0.05, 1e-20])  # of the second, all others are read
@pytest.mark.parametrize("hidden", [0, 1, 63])
def test_hidden_tokens_do_not_count(hidden: int, drop: float) -> None:
    q, k, v = heads()
    k[:, :, :hidden] = 5 * q[:, :, :1].mean(1, keepdim=True)
    lengths = torch.linalg.vector_norm(v.double(), dim=-1)
    skim = skimmed(q, k, v, sketched(k), drop, hidden=hidden)
    found = skim.read()
    far = torch.linalg.vector_norm(found.out - truth(q, k[:, :, hidden:], v[:, :, hidden:]), dim=-1)
    assert bool((far / lengths[..., hidden:].amax(-1).unsqueeze(-1) <= found.moved * 1.2 + 1e-12).all())
    assert not bool(skim.view.wanted[..., :hidden].any())


@pytest.mark.parametrize(("loud", "long"), [(1e20, 1.0), (1.0, 1e20), (1.0, 1e-20), (1.0, 0.0)])
def test_numbers_beyond_float32_are_left_to_others(loud: float, long: float) -> None:
    q, k, v = heads()
    with pytest.raises(Unfit):
        skimmed(q, k * loud, v * long, sketched(k * loud))
    with pytest.raises(Unfit, match="nothing is sketched"):
        skimmed(q, k, v, sketched(k[:, :, :63]))


@pytest.mark.parametrize("size", [1e-14, 1e-16, 1e-25])
def test_small_values_below_small_weights_are_left_to_others(size: float) -> None:
    k = 12 * torch.eye(16)[torch.randint(16, (1, 1, 2048))] + torch.rand(1, 1, 2048, 16)
    v, q = size * torch.randn(1, 1, 2048, 8), torch.full((1, 1, 1, 16), 5.0)
    cache = KeyValueCache(1, 16, 8)
    cache.append(k, v)
    out, certificate = cache.attend(q, 0.1, method="sparse")
    assert float(errors(q, k, v, out, None).max()) <= certificate.bound <= 0.1


# Compiled


def logs(found: selection.Uppers) -> Tensor:
    """Logarithms of upper ends."""
    return (found.weights.double().log() + found.origin[..., None, None]).flatten(3)


@pytest.mark.parametrize("aside", [False, True])
def test_compiled_ends_are_those_of_plain_torch_and_above_the_truth(aside: bool) -> None:
    for s in (640, 704):  # another length needs no other code
        q, k, _ = heads(s=s, d=15)
        sketch = sketched(k)
        if aside:  # as a cache keeps them
            beside = sketch.codes.transpose(-1, -2).contiguous().transpose(-1, -2)
            sketch = dataclasses.replace(sketch, codes=beside)
        told = ends(q, sketch, 0.3)
        plain, compiled = (selection.uppers(told, sketch, way) for way in (False, True))
        exact = 0.3 * q.double() @ k.double().transpose(-1, -2)
        for found in (plain, compiled):
            assert bool((exact <= logs(found) + 2.0**-16).all())
            torch.testing.assert_close(found.tops, found.weights.amax(-1))
            torch.testing.assert_close(found.sums, found.weights.sum(-1))
        torch.testing.assert_close(logs(plain), logs(compiled), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain.radii, compiled.radii, rtol=1e-4, atol=1e-5)
        # Without what was lost they would not be.
        blind = dataclasses.replace(sketch, radius=torch.zeros_like(sketch.radius))
        assert bool((exact > logs(selection.uppers(told, blind, False)) + 2.0**-16).any())


def long_cache(monkeypatch: pytest.MonkeyPatch) -> tuple[KeyValueCache, Tensor, Tensor]:
    """A cache that counts as long."""
    monkeypatch.setattr(key_value_cache, "_SHORT", {"cpu": 1})
    monkeypatch.setattr(key_value_cache, "_COMPILED", 1)
    monkeypatch.setattr(key_value_cache, "_COSTS", {torch.float32: (0.0, 0.0, 2.0)})
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 1024)
    cache.append(k, v)
    return cache, k, v


def test_a_long_cache_compiles_and_answers_within_its_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, k, v = long_cache(monkeypatch)
    read = 0
    for _ in range(4):
        q = queries(k, 4, sharp=6.0)
        out, certificate = cache.attend(q, 0.1)
        assert bool((errors(q, k, v, out) <= certificate.rows).all()) and certificate.bound <= 0.1
        read += certificate.method == "sparse" and share(certificate) < 0.4
        more = tokens(cache, 70)
        cache.append(*more)
        k, v = (torch.cat(x, 2) for x in zip((k, v), more, strict=True))
    assert read and not selection._all_heads._failures


def test_without_a_compiler_it_is_exact_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, k, _ = long_cache(monkeypatch)

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("no g++\nand more")

    monkeypatch.setattr("torch.compile", none)
    monkeypatch.setattr(selection, "_all_heads", Fused(selection._of_all_heads, axis=2))
    certificate = cache.attend(queries(k, 4), 0.1).certificate
    text = "the look at the sketch could not be compiled (RuntimeError: no g++), and plain torch takes longer"
    assert certificate.method == "exact" and certificate.reason == text


def test_what_would_take_longer_than_everything_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, k, _ = long_cache(monkeypatch)
    monkeypatch.setattr(key_value_cache, "_COMPILED", 10**9)
    q = queries(k, 4, sharp=6.0)
    found = []
    # What does not shrink, what does with more tokens than 65,536, and what is gathered.
    for costs in ((0.5, 0.0, 0.1), (0.5, 0.0, 9.0), (1.1, 0.0, 0.0), (0.5, 0.01, 0.0)):
        monkeypatch.setattr(key_value_cache, "_COSTS", {torch.float32: costs})
        cache._left, cache._bold = 0, None
        found.append(cache.attend(q, 0.1).certificate.method)
    assert found == ["sparse", "exact", "exact", "exact"]


def test_a_look_after_another_leaves_more_unread_and_still_keeps_its_word() -> None:
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 4000)
    cache.append(k, v)
    q = queries(k, 4, sharp=0.7)
    first, second = (cache.attend(q, 0.05, method="sparse") for _ in range(2))
    assert share(second.certificate) < 0.95 * share(first.certificate)
    for out, certificate in (first, second):
        assert certificate.bound <= 0.05
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
    # What was learnt for one tolerance is not used for another.
    assert cache.attend(q, 0.02, method="sparse").certificate.bound <= 0.02
