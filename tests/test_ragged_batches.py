"""Sequences of different lengths in one cache: each row is answered from its own sequence and nothing beside it."""

from __future__ import annotations

import copy
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from avow.decode import key_value_cache, token_buffers
from avow.errors import AvowError, NonFiniteError, ParameterError, ShapeError
from avow.nn import KeyValueCache
from tests.helpers.caches import errors, queries, tokens
from tests.helpers.ragged import Ragged


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


@pytest.mark.parametrize("tol", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("eager")
def test_each_row_is_what_a_cache_of_its_sequence_alone_gives(
    tol: float | None, dtype: torch.dtype, window: int | None
) -> None:
    cache = KeyValueCache(2, 16, value_dim=8, batch=3, dtype=dtype, window=window)
    alone = [KeyValueCache(2, 16, value_dim=8, dtype=dtype, window=window) for _ in range(3)]
    for lengths in ([100, 3, 64], [1, 1, 1], [0, 70, 1], None):
        k, v = tokens(cache, 70 if lengths is None else max(lengths))
        cache.append(k, v, lengths=lengths)
        for i, one in enumerate(alone):
            count = k.shape[2] if lengths is None else lengths[i]
            one.append(k[i : i + 1, :, :count], v[i : i + 1, :, :count])
        assert cache.lengths == tuple(one.length for one in alone) and cache.length == max(cache.lengths)
        for n in (1, 2):
            q = torch.randn(3, 4, n, 16).to(dtype)
            out, certificate = cache.attend(q, tol)
            theirs = [one.attend(q[i : i + 1], tol) for i, one in enumerate(alone)]
            assert torch.equal(out, torch.cat([x.out for x in theirs]))
            assert torch.equal(certificate.rows, torch.cat([x.certificate.rows for x in theirs]))
            assert certificate.bound == max(x.certificate.bound for x in theirs)
            assert certificate.rows.shape == (3, 4, n) and certificate.keeps(tol or 1.0)


def test_a_batch_that_never_differed_is_one_cache_also_if_its_lengths_were_named() -> None:
    cache, other = (KeyValueCache(2, 16, batch=2) for _ in range(2))
    k, v = tokens(cache, 90)
    cache.append(k, v, lengths=[80, 80])
    cache.append(k[:, :, 80:], v[:, :, 80:], lengths=torch.tensor([10, 10]))
    cache.crop([85, 85])
    other.append(k[:, :, :85], v[:, :, :85])
    assert not cache._ragged and cache.lengths == (85, 85)
    q = torch.randn(2, 4, 1, 16)
    assert torch.equal(cache.attend(q).out, other.attend(q).out)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_stands_behind_a_sequences_tokens_is_never_read(poison: float) -> None:
    cache, other = (KeyValueCache(2, 16, batch=3) for _ in range(2))
    k, v = tokens(cache, 80)
    counts, q = [80, 5, 0], torch.randn(3, 4, 1, 16)
    spoilt = [x.clone() for x in (k, v)]
    for i, count in enumerate(counts):
        for x in spoilt:
            x[i, :, count:] = poison
    cache.append(*spoilt, lengths=counts)
    other.append(k, v, lengths=counts)
    for one in (cache, other):
        one.append(k[:, :, :1], v[:, :, :1])
    mine, theirs = cache.attend(q), other.attend(q)
    assert torch.equal(mine.out, theirs.out) and torch.equal(mine.certificate.rows, theirs.certificate.rows)


def test_a_row_that_saw_its_neighbours_tokens_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage: sequences are read with the lengths of their neighbours, so some rows see too much."""
    held = Ragged(KeyValueCache(2, 16, batch=2))
    held.append([60, 20])
    held.check(torch.randn(2, 4, 1, 16), None)
    held.cache._sequences.reverse()
    with pytest.raises(AssertionError, match="row is beyond its bound"):
        held.check(torch.randn(2, 4, 1, 16), None)


def test_sequences_are_cropped_and_begin_again_each_by_itself() -> None:
    held = Ragged(KeyValueCache(2, 16, batch=3))
    held.append([300, 300, 300])
    held.crop([100, 0, 57])
    with pytest.raises(ShapeError, match=r"^length of sequence 1=0 must be at least 1; append keys and values first$"):
        held.cache.attend(torch.randn(3, 4, 1, 16))
    held.append([1, 130, 64])
    for tol in (None, 0.1):
        held.check(torch.randn(3, 4, 2, 16), tol)
    held.crop([50, 60, 60])
    held.check(torch.randn(3, 4, 1, 16), None)
    held.crop([0, 0, 0])
    assert not held.cache._ragged and held.cache.length == 0
    held.append([70, 70, 70])
    held.check(torch.randn(3, 4, 1, 16), 0.1)


@pytest.mark.usefixtures("eager")
def test_bounds_are_relative_to_the_longest_value_that_is_left() -> None:
    """A value a thousand times longer is forgotten: it must not make bounds look smaller than they are."""
    for batch in (1, 2):
        cache = KeyValueCache(2, 16, batch=batch)
        k, v = tokens(cache, 400)
        v[:, :, 300] *= 1e3
        cache.append(k, v)
        cache.attend(torch.randn(batch, 4, 1, 16), 0.1)
        cache.crop(290 if batch == 1 else [290, 280])
        for tol in (None, 1e-3, 0.1):
            q = queries(k[:, :, :280], 4)
            out, certificate = cache.attend(q, tol)
            for i, length in enumerate(cache.lengths):
                row = slice(i, i + 1)
                found = errors(q[row], k[row, :, :length], v[row, :, :length], out[row])
                assert bool((found <= certificate.rows[row]).all())
            # One that was never there to begin with is bounded alike, up to what a longer key may add.
            assert certificate.bound <= (tol or 1e-4)


def test_a_cropped_cache_is_saved_and_goes_on(tmp_path: Path) -> None:
    cache = KeyValueCache(2, 16)
    k, v = tokens(cache, 300)
    k[:, :, 250] *= 100
    cache.append(k, v)
    cache.attend(torch.randn(1, 4, 1, 16), 0.1, method="sparse")
    for length in (200, 40, 0):
        cache.crop(length)
        cache.save(tmp_path / "cache")
        again = KeyValueCache.load(tmp_path / "cache")
        assert again.length == length
        if length:
            q = torch.randn(1, 4, 1, 16)
            assert torch.equal(again.attend(q).out, cache.attend(q).out)


def test_the_last_queries_of_each_sequence_need_as_many_tokens() -> None:
    cache = KeyValueCache(1, 8, batch=2)
    cache.append(*tokens(cache, 5), lengths=[5, 2])
    text = "q.shape[-2]=3 exceeds the 2 tokens held of sequence 1; attend right after appending their keys"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        cache.attend(torch.randn(2, 1, 3, 8))


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([3], "lengths=[3] must be 2 numbers, one for each sequence; name each, or leave lengths out"),
        ([1, 6], "lengths[1]=6 must be a whole number from 0 to 5; count the tokens of each sequence"),
        ([-1, 2], "lengths[0]=-1 must be a whole number from 0 to 5; count"),
        ([True, 2], "lengths[0]=True must be a whole number"),
        ([1.0, 2], "lengths[0]=1.0 must be a whole number"),
        (4, "lengths=4 must be 2 numbers"),
        (torch.tensor([1.0, 2.0]), "lengths=torch.float32 of shape (2,) must be torch.int32 or torch.int64"),
        (torch.tensor([[1, 2]]), "lengths=torch.int64 of shape (1, 2) must be"),
        (torch.tensor([1, 9]), "lengths[1]=9 must be a whole number from 0 to 5"),
    ],
)
def test_lengths_that_are_none_are_refused_and_nothing_is_written(lengths: Any, text: str) -> None:
    for before in (None, [4, 2]):
        cache = KeyValueCache(1, 8, batch=2)
        cache.append(*tokens(cache, 4), lengths=before)
        held = cache.lengths
        with pytest.raises(AvowError, match=f"^{re.escape(text)}"):
            cache.append(*tokens(cache, 5), lengths=lengths)
        assert cache.lengths == held


def test_a_bad_token_names_its_sequence_and_leaves_all_as_they_were() -> None:
    for before in ([4, 4], [4, 2]):
        held = Ragged(KeyValueCache(1, 16, batch=2))
        held.append(before)
        k, v = tokens(held.cache, 3)
        v[1, 0, 1, 5] = math.nan
        with pytest.raises(NonFiniteError, match=r"^v\[1, 0, 1, 5\]=nan must be finite"):
            held.cache.append(k, v, lengths=[3, 2])
        held.check(torch.randn(2, 2, 1, 16), None)
        q = torch.randn(2, 2, 1, 16)
        q[1] = math.nan
        with pytest.raises(NonFiniteError, match=r"^q\[1, 0, 0, 0\]=nan must be finite"):
            held.cache.attend(q)


def test_without_memory_for_one_sequence_none_takes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Ragged(KeyValueCache(1, 16, batch=3))
    held.append([64, 63, 64])
    grown, calls = token_buffers.TokenBuffers._grown, []

    def failing(self: Any, base: int, after: int) -> Any:
        calls.append(after)
        if len(calls) == 3:
            raise MemoryError
        return grown(self, base, after)

    with monkeypatch.context() as patch:
        patch.setattr(token_buffers.TokenBuffers, "_grown", failing)
        with pytest.raises(MemoryError):
            held.cache.append(*tokens(held.cache, 70))
    assert held.cache.lengths == (64, 63, 64)
    held.check(torch.randn(3, 2, 1, 16), None)
    held.append([1, 2, 3])
    held.check(torch.randn(3, 2, 1, 16), 0.1)


def test_a_capacity_holds_for_each_sequence() -> None:
    held = Ragged(KeyValueCache(1, 16, batch=2, capacity=100))
    held.append([100, 60])
    with pytest.raises(ShapeError, match="tokens=129 exceeds the capacity of 100"):
        held.cache.append(*tokens(held.cache, 29))
    held.append([0, 60])
    held.crop([0, 20])
    held.append([90, 1])
    held.check(torch.randn(2, 2, 1, 16), None)
    held.crop([0, 0])
    held.append([100, 100])
    held.check(torch.randn(2, 2, 1, 16), None)


def test_crops_that_are_none_are_refused() -> None:
    cache = KeyValueCache(1, 8, batch=2)
    cache.append(*tokens(cache, 5), lengths=[5, 2])
    for lengths in ([5, 3], 3, [-1, 0], [2]):
        with pytest.raises(AvowError, match=r"^lengths.* must be"):
            cache.crop(lengths)
    assert cache.lengths == (5, 2)
    narrow = KeyValueCache(1, 8, batch=2, window=4)
    narrow.append(*tokens(narrow, 9))
    with pytest.raises(ParameterError, match=r"^window=4 forgets tokens that a shorter sequence would see; crop to 0"):
        narrow.crop([9, 8])
    narrow.crop([9, 0])
    narrow.append(*tokens(narrow, 2), lengths=[0, 2])
    assert narrow.lengths == (4, 2) and narrow.attend(torch.randn(2, 1, 1, 8)).out.shape == (2, 1, 1, 8)


def test_what_is_one_tensor_is_refused_and_copies_are_apart() -> None:
    held = Ragged(KeyValueCache(1, 16, batch=2))
    held.append([5, 2])
    text = "cache.lengths=[5, 2] differ, and tokens are one tensor; crop the sequences to one length"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        _ = held.cache.tokens
    with pytest.raises(ShapeError, match=r"^cache.lengths=\[5, 2\] must never have differed"):
        _ = held.cache.holding
    other = copy.deepcopy(held)
    other.append([3, 0])
    assert held.cache.lengths == (5, 2) and other.cache.lengths == (8, 2)
    for one in (held, other):
        one.check(torch.randn(2, 2, 1, 16), None)
    held.crop([2, 2])
    assert torch.equal(held.cache.tokens[0], torch.stack([k for k, _ in held.sequences]))
    assert held.cache.nbytes > 0


def test_sequences_of_many_tokens_are_read_in_part_by_compiled_code() -> None:
    held = Ragged(KeyValueCache(1, 32, batch=2))
    held.append([20_000, 17_000])
    held.append([1, 0])
    q = 6 * torch.randn(2, 2, 1, 32)
    for _ in range(2):
        certificate = held.check(q, 0.05)
        assert certificate.method == "sparse"
    held.crop([16_500, 300])
    assert held.check(q, 0.05).method == "sparse + exact"


@pytest.mark.parametrize("seed", range(12))
def test_rows_stay_within_their_bounds_whatever_comes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 2:
        monkeypatch.setattr(key_value_cache, "SHORTEST", 0)
    batch, dtype = chance.randint(1, 4), chance.choice([torch.float32, torch.bfloat16, torch.float64])
    capacity = chance.choice([None, 1024])
    Ragged(KeyValueCache(2, 16, batch=batch, dtype=dtype, capacity=capacity)).play(chance, 40)


def test_a_batch_made_in_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        held = Ragged(KeyValueCache(1, 16, batch=2, capacity=200))
        held.append([70, 70])
        held.append([1, 3])
        held.crop([70, 3])
        held.check(torch.randn(2, 2, 1, 16), None)
    for counts in ([1, 1], [70, 2]):
        held.append(counts)
        held.check(torch.randn(2, 2, 1, 16), 0.1)


def test_a_file_of_sequences_of_different_lengths_is_refused(tmp_path: Path) -> None:
    held = Ragged(KeyValueCache(1, 16, batch=2))
    held.append([5, 2])
    with pytest.raises(ShapeError, match=r"^cache.lengths=\[5, 2\] differ, and a file holds sequences of one length"):
        held.cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())
