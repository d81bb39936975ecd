"""A cache's file while others write it, and files made to deceive: read whole, or refused in words."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from avow import file_io
from avow.decode import cache_file, key_value_cache, token_buffers
from avow.errors import FileError, RangeError, ToleranceUnreachable
from avow.nn import KeyValueCache
from tests.helpers.caches import DTYPES, errors, filled, queries, tokens
from tests.helpers.processes import FRESH

Facts = dict[str, Any]
Change = Callable[[dict[str, Tensor], Facts], object]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too, and whatever takes less than everything pays."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


# While others write


def of_length(length: int) -> KeyValueCache:
    torch.manual_seed(length)
    cache = KeyValueCache(2, 16)
    cache.append(*tokens(cache, length))
    return cache


def save_in_turn(path: Path, lengths: tuple[int, ...], enough: Event) -> None:
    """Replace the file by caches of these lengths, again and again."""
    torch.set_num_threads(1)
    caches = [of_length(length) for length in lengths]
    while not enough.is_set():
        for cache in caches:
            cache.save(path)


def test_a_reader_sees_one_whole_file_whoever_replaces_it_meanwhile(tmp_path: Path) -> None:
    path, enough, lengths = tmp_path / "cache", FRESH.Event(), (70, 200, 900)
    known = {length: of_length(length).tokens[0] for length in lengths}
    of_length(70).save(path)
    savers = [FRESH.Process(target=save_in_turn, args=(path, turn, enough)) for turn in (lengths, lengths[::-1])]
    for saver in savers:
        saver.start()
    seen: Counter[int] = Counter()
    try:
        # Savers take seconds to start: reading goes on until it has seen them at work.
        while seen.total() < 300 or len(seen) < 3:
            again = KeyValueCache.load(path)
            seen[again.length] += 1
            assert torch.equal(again.tokens[0], known[again.length])
            assert all(saver.is_alive() for saver in savers)
    finally:
        enough.set()
        for saver in savers:
            saver.join()
    assert set(seen) == set(lengths) and [saver.exitcode for saver in savers] == [0, 0]


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, check_header = tmp_path / "cache", file_io.check_header
    of_length(70).save(path)

    def replaced(*given: Any) -> None:
        check_header(*given)
        of_length(900).save(path)

    monkeypatch.setattr(file_io, "check_header", replaced)
    assert KeyValueCache.load(path).length == 900


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "cache", safetensors.safe_open
    of_length(9000).save(path)

    def cut(*given: Any, **more: Any) -> Any:
        file = read(*given, **more)
        os.truncate(path, 20000)
        return file

    monkeypatch.setattr(safetensors, "safe_open", cut)
    with pytest.raises(FileError, match=r"is truncated or no safetensors file \(.*\); save the cache"):
        KeyValueCache.load(path)


def test_a_loaded_cache_is_bit_for_bit_the_one_that_was_saved(tmp_path: Path) -> None:
    """Whatever its tokens: lengths differ by what is measured together, and groups may be beyond a sketch."""
    path = tmp_path / "cache"
    for seed in range(40):
        rng, _ = random.Random(seed), torch.manual_seed(seed)
        kind, window = rng.choice(DTYPES), rng.choice((None, None, 1, 70, 200))
        cache = KeyValueCache(2, rng.choice((1, 3, 16)), 8, 2, kind, bits=rng.choice((None, 1, 4, 8)), window=window)
        large = 1e4 if kind == torch.float16 else 1e36
        for _ in range(rng.choice((1, 3, 9))):
            count, sizes = rng.choice((1, 63, 64, 130)), (1.0, 1.0, 0.0, 1e-4, large)
            cache.append(*((rng.choice(sizes) * torch.randn(2, 2, count, d)).to(kind) for d in (cache.dim, 8)))
        cache.save(path)
        again = KeyValueCache.load(path)
        held, groups = cache.position - cache._base, cache._groups
        for name, x in cache._buffers.items():
            end = groups if name in token_buffers.PARTS else held
            assert torch.equal(again._buffers[name][:, :, :end], x[:, :, :end]), (seed, name)
        for name in ("longest", "metric", "size", "spread", "position", "base", "wide"):
            mine, theirs = (getattr(one, f"_{name}") for one in (cache, again))
            assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs, (seed, name)


# Files that deceive


def forged(path: Path, change: Change) -> None:
    """Change what a cache's file says, and give it the digest of that."""
    with safe_open(path, "pt") as file:
        about, held = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    facts = json.loads(about["facts"])
    change(held, facts)
    words = json.dumps(facts, sort_keys=True)
    path.write_bytes(save(held, about | {"facts": words, "digest": cache_file._digest(held, words)}))


def filled_with(name: str, number: float) -> Change:
    return lambda held, facts: held[name].fill_(number)


def told(section: str, name: str, value: Any) -> Change:
    return lambda held, facts: facts[section].update({name: value})


def changed_to(name: str, made: Callable[[Tensor], Tensor]) -> Change:
    return lambda held, facts: held.update({name: made(held[name]).contiguous()})


FORGERIES: dict[str, tuple[Change, str]] = {
    "no dim": (lambda held, facts: facts["made"].pop("dim"), "made must be key_heads, dim"),
    "more made": (told("made", "device", "cpu"), "made must be key_heads, dim"),
    "dim a word": (told("made", "dim", "16"), "dim=16 is not a whole number from 1"),
    "dim true": (told("made", "dim", True), "dim=True is not a whole number from 1"),
    "a huge dim": (told("made", "dim", 10**9), "keys is (1, 2, 301, 16) of torch.float32, not (1, 2, 301, 1000000000)"),
    "a vast dim": (told("made", "dim", 10**40), "is not a whole number from 1 to 9007199254740992"),
    "bits": (told("made", "bits", 9), "bits=9 is not a whole number from 1 to 8"),
    "no bits": (told("made", "bits", None), "metric is there, and no sketch"),
    "window": (told("made", "window", 0), "window=0 is not a whole number from 1"),
    "dtype": (lambda held, facts: facts.update(dtype="Tensor"), "dtype is not one of float64, "),
    "another dtype": (lambda held, facts: facts.update(dtype="bfloat16"), "of torch.float32, not (1, 2, 301, 16) of"),
    "position": (told("state", "position", 302), "keys is (1, 2, 301, 16) of torch.float32, not (1, 2, 302, 16)"),
    "negative": (told("state", "position", -1), "position=-1 is not a whole number from 0"),
    "half": (told("state", "position", 301.5), "position=301.5 is not a whole number"),
    "base": (told("state", "base", 64), "base=64 is not a whole number from 0 to 0"),
    "asked": (told("state", "asked", []), "asked is not a string"),
    "state a list": (lambda held, facts: facts.update(state=[]), "state must be position, base"),
    "no keys": (lambda held, facts: held.pop("keys"), "its tensors must be keys, values"),
    "more": (lambda held, facts: held.update(more=torch.ones(1)), "its tensors must be keys, values"),
    "fewer values": (changed_to("values", lambda x: x[:, :, 1:]), "values is (1, 2, 300, 8)"),
    "values double": (changed_to("values", Tensor.double), "values is (1, 2, 301, 8) of torch.float64"),
    "nan keys": (filled_with("keys", math.nan), "holds what no cache can hold (k"),
    "infinite values": (filled_with("values", math.inf), "holds what no cache can hold (v"),
    "norms too short": (changed_to("norms", lambda x: x * 0.999), "is not the length of its value"),
    "norms too long": (changed_to("norms", lambda x: x * 1.001), "is not the length of its value"),
    "norms nan": (filled_with("norms", math.nan), "norms holds numbers that are not finite and at least 0"),
    "norms double": (changed_to("norms", Tensor.double), "norms is (1, 2, 301) of torch.float64"),
    "longest nan": (filled_with("longest", math.nan), "longest holds numbers that are not from 0 to 1e+150"),
    "longest below 0": (filled_with("longest", -1), "longest holds numbers that are not from 0 to 1e+150"),
    "longest too long": (filled_with("longest", 1e9), "longest=1000000000.0 exceeds the longest key"),
    "metric 0": (filled_with("metric", 0), "metric holds numbers that are not from 0.015625 to 64"),
    "metric nan": (filled_with("metric", math.nan), "metric holds numbers that are not from 0.015625 to 64"),
    "size": (filled_with("size", 3), "size holds numbers that are not powers of two"),
    "size 0": (filled_with("size", 0), "size holds numbers that are not powers of two"),
    "spread nan": (filled_with("spread", math.nan), "spread holds numbers that are not above 0"),
    "spread too small": (
        changed_to("spread", lambda x: x / 8),
        "spread=",
    ),
    "metric scalar": (changed_to("metric", lambda x: x[0, 0, 0]), "metric is ()"),
    "no size": (lambda held, facts: held.pop("size"), "its tensors must be keys, values"),
    "bold": (lambda held, facts: held.update(bold=-torch.ones(1, 2, 1, dtype=torch.float64)), "bold holds numbers"),
    "bold flat": (lambda held, facts: held.update(bold=torch.ones(2, dtype=torch.float64)), "bold is (2,)"),
}


@pytest.mark.parametrize(("change", "words"), FORGERIES.values(), ids=list(FORGERIES))
def test_a_file_that_lies_is_refused_by_the_field_though_its_digest_is_right(
    tmp_path: Path, change: Change, words: str
) -> None:
    path = tmp_path / "cache"
    filled().save(path)
    forged(path, change)
    with pytest.raises(FileError) as refused:
        KeyValueCache.load(path)
    assert words in str(refused.value) and str(path) in str(refused.value)


def test_what_appending_finds_again_is_not_checked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyValueCache(2, 16)
    cache.append(*tokens(cache, 1000))
    cache.save(tmp_path / "cache")

    def measured(x: Tensor) -> Tensor:
        assert not x.numel(), "values are measured a second time"
        return x.new_zeros(x.shape[:-1], dtype=torch.float64)

    monkeypatch.setattr(token_buffers, "lengths", measured)
    monkeypatch.setattr(token_buffers, "spread_holds", lambda *given: pytest.fail("keys are read a second time"))
    assert KeyValueCache.load(tmp_path / "cache").length == 1000


def test_a_forgery_of_nothing_is_the_file_itself(tmp_path: Path) -> None:
    path, cache = tmp_path / "cache", filled()
    cache.save(path)
    forged(path, lambda held, facts: None)
    q = queries(cache.tokens[0], 4)
    assert torch.equal(KeyValueCache.load(path).attend(q, 0.1).out, cache.attend(q, 0.1).out)


def test_an_empty_cache_does_not_take_the_memory_that_its_file_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    KeyValueCache(2, 16).save(path)

    def wide(held: dict[str, Tensor], facts: Facts) -> None:
        facts["made"]["dim"] = 10**12
        held["keys"] = torch.empty(1, 2, 0, 10**12)

    forged(path, wide)
    with pytest.raises(FileError, match=r"an empty cache is wider than 65536 dimensions\); save the cache again$"):
        KeyValueCache.load(path)


def bent(rng: random.Random, held: dict[str, Tensor], facts: Facts) -> None:
    """One accident to one field: a number in a tensor, its shape or type, or a fact."""
    name = rng.choice(sorted(held))
    x, act = held[name], rng.randrange(6)
    wild = rng.choice((0.0, -1.0, 1e-300, 1e-20, 0.25, 2.0**40, 1e30, 1e38, 1e300, math.inf, -math.inf, math.nan))
    if act < 2 and x.numel():
        place = rng.randrange(x.numel())
        numbers = x.reshape(-1).double()
        numbers[place if act else slice(None)] = wild if rng.random() < 0.5 else float(numbers[place]) * wild
        held[name] = numbers.reshape(x.shape).to(x.dtype)
    elif act == 2:
        held[name] = x.to(rng.choice((torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8)))
    elif act == 3:
        held[name] = x.narrow(rng.randrange(x.ndim), 0, 1).contiguous() if x.numel() else x.double()
    else:
        section = facts[rng.choice(("made", "state"))]
        value = rng.choice((None, True, -1, 0, 1, 63, 64, 65, 128, 301, 2**40, 2**63, 10**30, 0.5, "x", "", [], {}))
        section[rng.choice(sorted(section))] = value


@pytest.mark.parametrize("options", [{}, {"window": 130}, {"bits": None}, {"dtype": torch.bfloat16}], ids=str)
def test_whatever_a_file_says_it_is_refused_or_its_answers_are_within_their_bounds(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path, window = tmp_path / "cache", options.get("window")
    outcomes: Counter[bool] = Counter()
    for seed in range(40):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        cache = filled(**options)
        cache.save(path)
        forged(path, lambda held, facts: bent(rng, held, facts))  # noqa: B023
        try:
            again = KeyValueCache.load(path)
        except FileError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        k, v = again.tokens
        try:
            method = "auto" if again.bits is None else "sparse"
            out, certificate = again.attend(q := queries(k, 4), 0.1, method=method)
        except (ToleranceUnreachable, RangeError):  # tokens that are a cache's, and beyond any arithmetic
            continue
        if not bool(v.any()):  # whose unit of error is 0
            assert not bool(out.any())
            continue
        wrong = errors(q, k, v, out, min(again.window or window or k.shape[2], k.shape[2]))
        assert bool((wrong <= certificate.rows).all()) and certificate.bound <= 0.1, seed
    assert min(outcomes[True], outcomes[False]) > 5, "it shows nothing"


def test_a_file_is_loaded_whatever_the_default_device_is(tmp_path: Path) -> None:
    cache = filled()
    cache.save(tmp_path / "cache")
    with torch.device("meta"):
        loaded = KeyValueCache.load(tmp_path / "cache")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded.tokens, cache.tokens, strict=True))
