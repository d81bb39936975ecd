"""Caches whose keys and values are in host memory: the same answers, whatever is kept on the device."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.decode import host_memory, token_buffers
from avow.decode.key_value_cache import KeyValueCache
from avow.errors import ParameterError
from avow.integrations.transformers import CertifiedCache, disable, enable
from avow.integrations.transformers.cache import CertifiedLayer
from avow.kernels import append_tokens, gather_attention, hot_rows, work_partition
from avow.kernels.append_tokens import TokenStore
from avow.kernels.choice import spans_of
from avow.kernels.hot_rows import HotRows, bytes_of_place
from avow.kernels.sparse_decode import decode
from tests import gpu_decode
from tests.helpers.decode_references import REFERENCES
from tests.helpers.decoding import step
from tests.helpers.kernel_caches import answer_by_kernels, errors

# A GPU does not warn of inf and nan.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOL = 5e-2


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by_kernels(monkeypatch)


def places(rows: int, heads: int = 2) -> int:
    """The bytes of so many places for rows of each head."""
    return rows * heads * bytes_of_place(32, 32, 2)


def cache_of(hot: int | None = None, tokens: int = 150, **options: Any) -> KeyValueCache:
    """An offloaded cache, or with `hot=-1` one on the device; places for rows are poisoned."""
    own = {} if hot == -1 else {"offload": True, "hot": hot}
    cache = KeyValueCache(2, 32, dtype=torch.bfloat16, **({"capacity": 256} | own | options))
    if cache._hot is not None:
        cache._hot.k.fill_(math.nan)
        cache._hot.v.fill_(math.nan)
    cache.append(*drawn(tokens, cache.batch))
    return cache


def drawn(tokens: int = 1, batch: int = 1) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, 2, tokens, 32).bfloat16()
    return k, v


def asked(queries: int = 1, heads: int = 4) -> Tensor:
    return (6 * torch.randn(1, heads, queries, 32)).bfloat16()


@pytest.mark.parametrize("confidence", [None, 0.999])
def test_answers_are_those_of_a_cache_on_the_device_bit_for_bit(confidence: float | None) -> None:
    torch.manual_seed(0)
    away = cache_of(places(40))
    torch.manual_seed(0)
    here = cache_of(-1)
    q, hits = asked(), 0
    for number in range(4):
        seeds = [None if confidence is None else torch.Generator().manual_seed(number) for _ in range(2)]
        out, certificate = away.attend(q, TOL, confidence, generator=seeds[0])
        other, theirs = here.attend(q, TOL, confidence, generator=seeds[1])
        assert torch.equal(out, other) and torch.equal(certificate.rows, theirs.rows)
        assert bool((errors(away, q, out) <= certificate.rows).all())
        assert certificate.cost is not None and theirs.cost is not None and theirs.cost.hits == theirs.cost.misses == 0
        # All rows that are listed are counted, here or there.
        assert certificate.cost.hits + certificate.cost.misses == int(away._hot.reads.sum())  # type: ignore[union-attr]
        hits = certificate.cost.hits
        token = drawn()
        away.append(*token)
        here.append(*token)
    assert hits > 20


def test_rows_that_were_read_stay_while_steps_read_them() -> None:
    cache, q = cache_of(places(256)), asked()
    first, second, third = (cache.attend(q, TOL).certificate.cost for _ in range(3))
    assert first is not None and second is not None and third is not None
    # There is a place for every token. What the first answer tells the second step may have it read a few others.
    assert first.hits == 0 < first.misses and second.hits > second.misses
    assert third.misses == 0 and third.hits == second.hits + second.misses


def test_a_place_is_not_taken_from_a_row_that_the_step_reads() -> None:
    """One place for all: the row that is there stays as long as every step reads it."""
    cache, q = cache_of(places(1)), asked()
    cache.attend(q, TOL)
    hot = cache._hot
    assert hot is not None
    before = hot.owner.clone()
    assert bool((before >= 0).all())
    for number in range(2, 4):
        cost = cache.attend(q, TOL).certificate.cost
        assert torch.equal(hot.owner, before) and hot.mark.flatten().tolist() == [number] * 2
        assert cost is not None and cost.hits == 2


def test_tokens_in_the_place_of_forgotten_ones_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def crop_and_go_on() -> tuple[Any, Tensor]:
        cache, q = cache_of(places(256)), asked()
        cache.attend(q, TOL, method="sparse")
        cache.crop(60)
        cache.append(*drawn(100))
        out, certificate = cache.attend(q, TOL, method="sparse")
        return certificate, errors(cache, q, out)

    certificate, off = crop_and_go_on()
    assert bool((off <= certificate.rows).all())
    # Without a word of them to the hot rows, stale ones are read, and the bound is broken.
    honest = append_tokens.append

    def blind(store: TokenStore, *more: Any, **named: Any) -> None:
        honest(store._replace(owner=None), *more, **named)

    monkeypatch.setattr("avow.kernels.operators.append", blind)
    certificate, off = crop_and_go_on()
    assert not bool((off <= certificate.rows).all())


def test_a_bound_rests_on_what_is_in_the_places() -> None:
    cache, q = cache_of(places(256)), asked()
    cache.attend(q, TOL)
    assert cache._hot is not None
    cache._hot.v.neg_()
    out, certificate = cache.attend(q, TOL)
    assert certificate.cost is not None and certificate.cost.hits > 0
    assert not bool((errors(cache, q, out) <= certificate.rows).all())


@pytest.mark.parametrize(("queries", "heads"), [(1, 4), (5, 4), (16, 8)])
def test_exact_answers_read_every_row_once(queries: int, heads: int) -> None:
    cache, q, sinks = cache_of(places(20)), asked(queries, heads), torch.randn(heads)
    for own in (None, sinks):
        out, certificate = cache.attend(q, sinks=own)
        assert certificate.method == "exact" and certificate.bound < 1e-2 and certificate.reason == ""
        assert bool((errors(cache, q, out, own) <= certificate.rows).all())
        assert certificate.cost is not None and certificate.cost.misses == 300 and certificate.cost.hits == 0
    out, certificate = cache.attend(q, tol=TOL, method="exact")
    assert certificate.reason == "exact attention was asked for" and certificate.keeps(TOL)


def test_many_queries_and_masks_are_answered_with_one_head_on_the_device_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, q, most = cache_of(places(20), batch=2), asked(40).expand(2, -1, -1, -1), 0
    honest = KeyValueCache._on_gpu

    def counted(self: KeyValueCache, *which: Any) -> Tensor:
        nonlocal most
        rows = honest(self, *which)
        most = max(most, rows.shape[0] * rows.shape[1])
        return rows

    monkeypatch.setattr(KeyValueCache, "_on_gpu", counted)
    out, certificate = cache.attend(q, sinks=torch.zeros(4))
    assert most == 1 and certificate.method == "exact" and certificate.rows.shape == q.shape[:3]
    assert bool((errors(cache, q, out, torch.zeros(4)) <= certificate.rows).all())
    out, certificate = cache.attend(q[:, :, :3], rtol=1e-2)
    assert certificate.relative <= 1e-2
    mask = torch.ones(2, 1, 40, 150, dtype=torch.bool).tril(110)
    masked, _ = cache.attend_masked(q, mask, None, None, None)
    plain, _ = cache.attend(q)
    torch.testing.assert_close(masked, plain)


def test_sequences_of_different_lengths_are_kept_in_host_memory_too() -> None:
    cache = cache_of(places(20, 4), tokens=0, batch=2)
    cache.append(*drawn(140, 2), lengths=[140, 90])
    q = torch.cat([asked(), asked()])
    for options in ({"tol": TOL}, {}, {"tol": TOL, "method": "exact"}):
        _, certificate = cache.attend(q, **options)
        assert certificate.bound <= TOL and certificate.rows.shape == (2, 4, 1)


def test_a_cache_that_grows_moves_to_more_room_and_forgets_what_was_on_the_device() -> None:
    cache, q = cache_of(places(200), tokens=100, capacity=None), asked()
    cache.attend(q, TOL)
    for tokens in (60, 100):
        cache.append(*drawn(tokens))
        out, certificate = cache.attend(q, TOL)
        assert bool((errors(cache, q, out) <= certificate.rows).all())
    assert cache.length == 260 and cache.host_nbytes == 2 * cache._buffers["keys"].nbytes


def test_a_copy_and_a_file_hold_the_same_tokens(tmp_path: Path) -> None:
    cache, q = cache_of(places(20)), asked()
    out, _ = cache.attend(q, TOL)
    cache.save(tmp_path / "cache")
    for other in (copy.deepcopy(cache), KeyValueCache.load(tmp_path / "cache", offload=True, hot=places(9))):
        assert other.offload and other._hot is not None and other.host_nbytes > 0
        found, certificate = other.attend(q, TOL)
        assert bool((errors(other, q, found) <= certificate.rows).all())
        torch.testing.assert_close(found, out, rtol=0, atol=2 * TOL)
        other.append(*drawn())
    assert cache.length == 150


def test_the_device_holds_a_sixth_of_a_long_cache_at_most() -> None:
    cache = KeyValueCache(1, 128, dtype=torch.bfloat16, capacity=2**14, offload=True)
    assert cache.host_nbytes == 2**14 * 512 and (cache.nbytes - cache.host_nbytes) * 6 <= cache.host_nbytes
    assert repr(cache).endswith("8,388,608 of them in host memory)")
    assert cache._hot is not None and cache._hot.owner.shape[1] == 2**14 * 512 // 100 // (512 + 12)


def test_errors_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ParameterError) as caught:
            KeyValueCache(2, 32, **({"dtype": torch.bfloat16} | options))
        return str(caught.value)

    assert refusal(hot=5) == (
        "hot=5 is what a GPU keeps of keys and values that are in host memory, and these are not; "
        "add offload=True, or leave hot out"
    )
    assert refusal(offload=True, hot=-1) == "hot=-1 must be a whole number of bytes; try hot=2**26"
    assert "needs kernels that read rows where they are: the sketch does not have 4 bits" in refusal(
        offload=True, bits=8
    )
    monkeypatch.setattr(token_buffers, "refused", host_memory.refused)
    told = "offload=True is for GPUs, and the cache is on cpu, whose memory is the host's; leave offload out"
    assert refusal(offload=True) == told


class Runtime:
    """What CUDA says when memory is to be locked."""

    def __init__(self, fault: int) -> None:
        self.fault, self.locked = fault, list[int]()

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        self.locked.append(count)
        return self.fault


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = Runtime(2), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *_, device: runtime.locked.append(-1))
    rule = (
        r"offload=True needs 5,000 bytes of the host's memory that the GPU can read, which it did not get "
        r"\(CUDA's error 2\); lower capacity=, give the machine more memory, or make the cache without offload"
    )
    with pytest.raises(ParameterError, match=rule):
        host_memory.room((50, 100), torch.uint8, device)
    # Whole pages; and then CUDA is asked for its fault, so that it tells nobody else.
    assert runtime.locked == [8192, -1]


def test_a_layer_of_a_model_moves_to_host_memory_and_to_more_room() -> None:
    layer = CertifiedLayer(capacity=70)
    k, v = torch.randn(2, 1, 2, 65, 16)
    keys, _ = layer.update(k, v)
    assert layer.cache is not None and not layer.cache.offload and layer.cache.capacity == 70
    layer.offload()
    layer.prefetch()
    assert layer.cache.offload and layer.cache.capacity == 70 and layer.length == 65
    torch.testing.assert_close(layer.keys, k)
    keys, values = layer.update(k, v)
    assert layer.cache.offload and layer.cache.capacity == 256 and layer.cache.length == 130
    torch.testing.assert_close(keys, torch.cat([k, k], 2))
    torch.testing.assert_close(values, torch.cat([v, v], 2))


def test_a_first_text_attends_to_what_it_brought_itself() -> None:
    layer = CertifiedLayer(offloaded=True)
    k, v = torch.randn(2, 1, 2, 65, 16)
    keys, values = layer.update(k, v)
    assert keys.data_ptr() == k.data_ptr() and values is v
    assert layer.keys is not None and layer.keys.data_ptr() != k.data_ptr()


@pytest.mark.parametrize("verify", [None, 2])
def test_generation_takes_the_switch_of_transformers(monkeypatch: pytest.MonkeyPatch, verify: int | None) -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, cache_utils

    # What transformers' own offloaded cache would copy with.
    monkeypatch.setattr(cache_utils.torch, "Stream", object)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).eval()
    ids, asked = torch.randint(3, 64, (1, 90)), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, **asked)
    enable(model, tol=TOL, method="sparse", verify=verify)
    out = model.generate(ids, cache_implementation="offloaded", return_dict_in_generate=True, **asked)
    cache = out.past_key_values
    assert torch.equal(out.sequences, wanted) and type(cache) is CertifiedCache
    assert all(layer.cache.offload and layer.cache.capacity >= 95 for layer in cache.layers)
    if verify is not None:
        told = cache.verification
        assert told.drafted > 0 and told.accepted + told.redrawn > 0 and told.bound <= TOL
    # A model without a tolerance has no sketch, and keeps what transformers prepares.
    disable(model)
    enable(model)
    named: dict[str, Any] = {}
    config = copy.copy(model.generation_config)
    config.cache_implementation, config.max_length = "offloaded", 95
    model._prepare_cache_for_generation(config, named, None, 1, 95)
    assert type(named["past_key_values"]) is DynamicCache


def hostile(rows: int, start: int) -> Counter[str]:
    """Steps over hostile tokens, some of which are replaced between them, with few places for rows, all poisoned.

    All but the kernels that touch such rows is left to their references, which are faster than interpreted kernels.
    """
    rng, counts = random.Random(start), Counter[str]()
    torch.manual_seed(start)
    stages = REFERENCES._replace(attended=gather_attention.attended)
    while counts["rows"] < rows:
        siblings, tokens, dim = rng.choice((8, 32, 64)), rng.randrange(130, 500), rng.choice((16, 32))
        kind, draws = rng.choice((torch.bfloat16, torch.float16, torch.float32)), rng.random() < 0.5
        k, v = gpu_decode.FAMILIES[rng.choice(list(gpu_decode.FAMILIES))](*torch.randn(2, 1, 2, tokens, dim), rng)
        k, v = (x.clamp(-1e4, 1e4).to(kind).contiguous() for x in (k, v))
        places = rng.choice((1, 7, 60, tokens))
        hot = HotRows.blank(k[0], v[0], places, spans_of(2, tokens)[0])
        hot.k.fill_(math.nan)
        hot.v.fill_(math.nan)
        for _ in range(6):
            some = torch.randint(tokens, (rng.randrange(1, 40),))
            k[:, :, some], v[:, :, some] = k[:, :, some.roll(1)], -v[:, :, some.roll(1)]
            hot.owner[:, some % places] = -1  # as an append has it
            given = step((4 * torch.randn(1, 2 * siblings, dim)).to(kind).float(), k, v, kind)
            drop = 10 ** rng.uniform(-2, -0.5)
            seed, confidence = rng.getrandbits(50), 0.999 if draws else 1.0
            more = (given.lengths, drop, given.scale, None, 2 * drop, confidence)
            inputs = given.q, given.k, given.v, given.sketch, *more
            plain, found = (
                decode(*inputs, torch.tensor([seed]) if draws else None, stages, hot=x) for x in (None, hot)
            )
            counts["other answers"] += int(not torch.equal(plain.out, found.out))
            wrong = int((~(given.errors(found.out) <= found.bound)).sum())
            counts.update({"rows": 2 * siblings, "missed" if draws else "broken": wrong})
            near, far = hot.reads.sum((0, 1)).tolist()
            counts.update({"hits": near, "misses": far, "useful": int((found.bound < 1).sum())})
    return counts


def test_hostile_tokens_keep_their_bounds_wherever_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_partition, "_WARPS", 6)
    counts = hostile(200, 0)
    assert counts["broken"] == counts["missed"] == counts["other answers"] == 0
    assert counts["hits"] > 100 and counts["misses"] > 100 and counts["useful"] > 100


def test_hostile_caches_in_host_memory_keep_their_bounds() -> None:
    shapes = (gpu_decode.Shape(1, 1, 4, 150, 16, torch.bfloat16),)
    counts, stories = gpu_decode.run_caches(3, "cpu", 1.0, shapes, offload=True)
    assert counts["broken"] == counts["missed"] == 0, stories
    assert counts["called"] + counts["called, drawn"] >= 90 and counts["misses"] > 100


def test_nothing_about_rows_on_the_device_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = cache_of(places(40)), asked()
    cache.attend(q, TOL)

    def refused(*_: object) -> None:
        raise AssertionError("a step read a number back")

    hot, honest = list[HotRows](), hot_rows.sought

    def watched(own: HotRows, *more: Any) -> Any:
        hot.append(own)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
                patch.setattr(Tensor, name, refused)
            return honest(own, *more)

    monkeypatch.setattr("avow.kernels.gather_attention.sought", watched)
    cache._steps.forget_addresses()
    cache.attend(q, TOL)
    assert len(hot) == 1 and hot[0].step.item() == 2
