"""A cache is kept in files bit for bit, and survives bad input whole."""

from __future__ import annotations

import math
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from avow.decode import host_memory, key_value_cache, token_buffers
from avow.errors import (
    AvowError,
    DtypeError,
    FileError,
    NonFiniteError,
    ParameterError,
    ShapeError,
)
from avow.nn import KeyValueCache
from avow.numerics.sketch import Sketch, sketched
from tests.helpers.caches import errors, filled, queries, tokens


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too, and whatever takes less than everything pays."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


# Files


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


def test_a_device_is_the_one_where_tensors_land() -> None:
    assert KeyValueCache(1, 4, device="cpu").device == torch.zeros(1).device
    with pytest.raises(ParameterError, match=r"device='nowhere' cannot be used here \(.+\); try device=\"cpu\"$"):
        KeyValueCache(1, 4, device="nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match=r"device='cuda' cannot be used here \(.*CUDA.*\); try device"):
            KeyValueCache(1, 4, device="cuda")


def test_what_a_look_found_the_next_may_leave_unread_is_kept_too(tmp_path: Path) -> None:
    cache = filled()
    k, v = tokens(cache, 900)
    cache.append(k, v)
    q = queries(k, 4)
    first = cache.attend(q, 0.1, method="sparse")
    cache.save(tmp_path / "cache.safetensors")
    again = KeyValueCache.load(tmp_path / "cache.safetensors")
    mine, theirs = (one.attend(q, 0.1, method="sparse") for one in (cache, again))
    assert mine.certificate.reason != first.certificate.reason, "the second look is no bolder: it shows nothing"
    assert torch.equal(mine.out, theirs.out) and mine.certificate == theirs.certificate


def test_an_empty_cache_can_be_kept(tmp_path: Path) -> None:
    KeyValueCache(2, 16).save(tmp_path / "empty")
    assert KeyValueCache.load(tmp_path / "empty").length == 0


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    whole = path.read_bytes()
    for at in (len(whole) - 1, len(whole) // 2, whole.index(b"shortness")):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(
            FileError, match=r"is damaged: its digest is not that of what it holds; save the cache again$"
        ):
            KeyValueCache.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"is truncated or no safetensors file \(.*\); save the cache again$"):
        KeyValueCache.load(path)
    safetensors.torch.save_file({"keys": torch.zeros(2)}, path)
    text = "is not an 'avow key-value cache 3'; name a file that KeyValueCache.save wrote"
    with pytest.raises(FileError, match=re.escape(text)):
        KeyValueCache.load(path)
    with pytest.raises(FileError, match=r"does not exist; check the path$"):
        KeyValueCache.load(tmp_path / "nothing")


def test_a_loaded_cache_does_not_live_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = filled()
    cache.save(path)
    loaded = KeyValueCache.load(path)
    with path.open("r+b") as file:  # in place, as who copies another file over it does
        file.write(bytes(path.stat().st_size))
    for name in ("longest", "metric", "size", "spread"):
        assert torch.equal(getattr(loaded, f"_{name}"), getattr(cache, f"_{name}")), name


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


# Lengths of values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lengths_are_kept_in_float32_and_none_is_too_small(dtype: torch.dtype) -> None:
    cache = KeyValueCache(1, 8, value_dim=7, dtype=dtype)
    k, v = tokens(cache, 5000)
    cache.append(k, v)
    kept, real = cache._buffers["norms"][..., :5000], torch.linalg.vector_norm(v.double(), dim=-1)
    assert kept.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool((kept.double() >= real).all()) and bool((kept.double() <= real * (1 + 1e-5)).all())
    narrow = real.float().double()
    assert bool((narrow < real).any())  # rounding to nearest would not do


@pytest.mark.parametrize("size", [1e-36, 1e36])
def test_lengths_beyond_float32_are_kept_in_float64(size: float, tmp_path: Path) -> None:
    cache = KeyValueCache(1, 16)
    k, v = tokens(cache, 200)
    cache.append(k[:, :, :150], v[:, :, :150])
    before = cache._buffers["norms"].clone()
    v[:, :, 150:] *= size
    cache.append(k[:, :, 150:], v[:, :, 150:])
    kept = cache._buffers["norms"][..., :200]
    assert kept.dtype == torch.float64 and torch.equal(kept[..., :150], before[..., :150].double())
    assert bool((kept >= torch.linalg.vector_norm(v.double(), dim=-1)).all())
    cache.save(tmp_path / "cache")
    again = KeyValueCache.load(tmp_path / "cache")
    for aim in (3, 170):
        q = 5 * k[:, :, aim : aim + 1]
        out, certificate = cache.attend(q, 0.1)
        assert bool((errors(q, k, v, out) <= certificate.rows).all())
        assert torch.equal(again.attend(q, 0.1).out, out)
    again.append(k, v)
    assert again._buffers["norms"].dtype == torch.float64


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
    with pytest.raises(
        DtypeError,
        match=r"^k\.dtype=torch\.float64 must equal the cache's torch\.float32; convert it, or make the cache with "
        r"dtype=torch\.float64$",
    ):
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
    with pytest.raises(
        NonFiniteError, match=rf"^{where}\[0, 1, 70, 3\]={wrong} must be finite; remove NaN and inf from {where}$"
    ):
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
    make = KeyValueCache._allocate

    def scarce(self: KeyValueCache, count: int) -> dict[str, Tensor]:
        if count > 1000:
            raise torch.OutOfMemoryError("out of memory")
        return make(self, count)

    monkeypatch.setattr(KeyValueCache, "_allocate", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(k, v)
    monkeypatch.undo()
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)
    assert cache.length == 301
    after = cache.attend(q, 0.1)
    assert torch.equal(before.out, after.out) and before.certificate == after.certificate
    cache.append(k, v)
    assert cache.length == 5301


def test_a_sketch_that_cannot_be_made_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    before = {name: x.clone() for name, x in cache._buffers.items()}
    q = torch.randn(cache.batch, cache.key_heads, 1, cache.dim, dtype=cache.dtype)

    def failing(*_: object) -> Sketch:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(token_buffers, "sketched", failing)
    with pytest.raises(torch.OutOfMemoryError):
        cache.attend(q, 0.1, method="sparse")
    assert unchanged(cache, before, 301)
    monkeypatch.undo()
    assert cache.attend(q, 0.1, method="sparse").certificate.keeps(0.1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tol": 0.0}, "tol=0.0 must be a number above 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": -1.0}, "tol=-1.0 must be a number above 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": math.nan}, "tol=nan must be a number above 0; try tol=1e-2, or leave it out for exact"),
        ({"tol": 0.1, "confidence": 0.0}, "confidence=0.0 must be above 0 and at most 1; try confidence=0.99"),
        ({"tol": 0.1, "confidence": 1.1}, "confidence=1.1 must be above 0 and at most 1; try confidence=0.99"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
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
        ({"dim": 1.5}, "dim=1.5 must be a whole number; count in whole numbers"),
        ({"window": 0}, "window=0 must be a whole number of at least 1"),
        ({"bits": 9}, "bits=9 must be from 1 to 8; try bits=4"),
    ],
)
def test_caches_that_cannot_be_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(text)):
        KeyValueCache(**({"key_heads": 1, "dim": 4} | wrong))


def test_large_pages_are_asked_for_inside_of_large_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def madvise(self, address: Any, length: Any, advice: int) -> None:
            asked.append((address.value, length.value, advice))

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    large, small = torch.empty(2**20 + 1), torch.empty(2**18)
    for x in (large, small):
        host_memory.ask_for_large_pages(x)
    ((address, length, advice),) = asked
    assert address % 2**21 == length % 2**21 == 0 < length and advice == mmap.MADV_HUGEPAGE
    assert large.data_ptr() <= address and address + length <= large.data_ptr() + large.nbytes
    monkeypatch.setattr(sys, "platform", "darwin")
    host_memory.ask_for_large_pages(large)
    assert len(asked) == 1


def test_a_cache_has_one_length_if_its_sequences_have() -> None:
    cache = KeyValueCache(2, 8, batch=2, window=5)
    assert len(cache) == 0 and cache, "an empty cache is a cache"
    k = torch.randn(2, 2, 7, 8)
    cache.append(k, k)
    assert (len(cache), cache.length, cache.position) == (5, 5, 7)
    plain = KeyValueCache(2, 8, batch=2)
    plain.append(k, k, lengths=[3, 7])
    with pytest.raises(
        ShapeError, match=r"cache\.lengths=\[3, 7\] differ, and a cache has one length if they do not; crop"
    ):
        len(plain)


def test_pythons_own_errors_name_the_cache() -> None:
    with pytest.raises(TypeError, match=r"^KeyValueCache\.append\(\) missing 1 required positional argument: 'v'"):
        KeyValueCache(2, 8).append(torch.zeros(1, 2, 1, 8))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^KeyValueCache\(\) missing a required argument: 'dim'"):
        KeyValueCache(2)  # type: ignore[call-arg]
    with pytest.raises(ParameterError, match=r"^head_dim=8 is not an argument of KeyValueCache; did you mean dim\?"):
        KeyValueCache(2, head_dim=8)  # type: ignore[call-arg]


def test_first_keys_are_measured_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would be all at once, for which a cache in little memory has no room."""
    k, seen = torch.randn(2, 3, 200, 16), list[int]()
    whole = sketched(k[:, :, :192], 4)

    def noted(rows: Tensor, bits: int) -> Sketch:
        seen.append(rows.shape[1])
        return sketched(rows, bits)

    monkeypatch.setattr(token_buffers, "sketched", noted)
    metric, size = token_buffers._measured(k, 200)
    assert torch.equal(metric, whole.metric) and torch.equal(size, whole.size) and seen == [1, 1, 1]
