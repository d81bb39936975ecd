"""Decoding from avow's own cache: the same tokens, within certificates, whatever is done to the batch on the way."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

import avow
from avow.decode import cpu
from avow.errors import NotDifferentiable, ParameterError
from avow.integrations.transformers import CertifiedCache, Setting, disable, enable
from avow.integrations.transformers.cache import CertifiedLayer, cache_of
from avow.integrations.transformers.forward import attention_forward
from avow.nn import KeyValueCache
from tests.helpers.layer_audit import ask_sketches, audited
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture

GENERATORS = [x for x in ARCHITECTURES if x.kind != "encoder"]
LLAMA = ARCHITECTURES[0]
MISTRAL = ARCHITECTURES[1]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too."""
    ask_sketches(monkeypatch)


def generated(model: Any, inputs: dict[str, Tensor], tokens: int = 6, **more: Any) -> Any:
    prompt = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    return model.generate(**prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, **more)


@pytest.mark.parametrize("architecture", GENERATORS, ids=lambda architecture: architecture.name)
def test_generation_is_token_for_token_that_of_sdpa(architecture: Architecture) -> None:
    model = architecture.build()
    for padding, beams in (("", 1), ("left", 3)):
        inputs = architecture.inputs(padding)
        before = generated(model, inputs, num_beams=beams)
        enable(model)
        with avow.record() as certificates:
            after = generated(model, inputs, num_beams=beams)
        disable(model)
        assert torch.equal(after, before)
        assert len(certificates) >= 12


def test_sparse_steps_without_compiled_code_are_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "not_installed", lambda: "numba is not installed (pip install 'avow[cpu]')")
    model = LLAMA.build()
    enable(model, tol=1e-2, method="sparse")
    words = r"method='sparse' answers without compiled code, .* numba is not installed \(pip install 'avow\[cpu\]'\)"
    with pytest.warns(UserWarning, match=words):
        generated(model, LLAMA.inputs(""))


def test_generate_keeps_its_tokens_in_our_cache_and_attends_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attend = KeyValueCache.attend

    def counted(cache: KeyValueCache, *arguments: Any, **more: Any) -> Any:
        asked.append(cache.length)
        return attend(cache, *arguments, **more)

    monkeypatch.setattr(KeyValueCache, "attend", counted)
    for architecture, lengths in ((LLAMA, [13, 14, 15]), (MISTRAL, [5, 5, 5])):
        asked.clear()
        model = architecture.build()
        enable(model, tol=1e-2)
        out = generated(model, architecture.inputs(), 4, return_dict_in_generate=True)
        assert type(out.past_key_values) is CertifiedCache
        assert all(type(layer) is CertifiedLayer for layer in out.past_key_values.layers)
        assert asked == [length for length in lengths for _ in range(2)]
        disable(model)
        assert (
            type(generated(model, architecture.inputs(), 4, return_dict_in_generate=True).past_key_values)
            is DynamicCache
        )


@pytest.mark.parametrize("confidence", [None, 0.99])
@pytest.mark.parametrize("window", [None, 250])
def test_sparse_decoding_is_within_its_certificates_at_every_step(window: int | None, confidence: float | None) -> None:
    model = MISTRAL.build(sliding_window=window, max_position_embeddings=512, hidden_size=64, num_attention_heads=2)
    enable(model, tol=5e-2, confidence=confidence)
    with audited() as found:
        generated(model, {"input_ids": torch.randint(3, WORDS, (1, 300))}, 8)
    assert len(found) == 16
    assert all(audit.certificate.keeps(5e-2) for audit in found)
    assert all(audit.kept for audit in found if audit.certificate.kind == "deterministic")
    kept = torch.cat([(audit.errors <= audit.certificate.rows).flatten() for audit in found])
    assert float(kept.double().mean()) > 0.95
    assert "sparse" in {audit.certificate.method for audit in found[2:]}
    assert {audit.certificate.kind for audit in found} == {"deterministic"}  # compiled code leaves nothing to chance


def step(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, past_key_values=cache, attention_mask=mask).logits
    return found


@pytest.mark.parametrize("architecture", [LLAMA, MISTRAL], ids=lambda architecture: architecture.name)
def test_whatever_is_done_to_the_batch_the_cache_answers_as_transformers_own(architecture: Architecture) -> None:
    model = architecture.build()
    enable(model)
    ids = torch.randint(3, WORDS, (2, 30))
    caches = [CertifiedCache(model.config), DynamicCache(config=model.config)]

    def both(start: int, end: int, rows: slice | list[int] = slice(None)) -> None:
        mine, theirs = (step(model, ids[rows, start:end], cache) for cache in caches)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == end

    both(0, 3)
    both(3, 4)
    both(4, 9)  # several tokens after others
    both(9, 10)
    for cache in caches:
        cache.reorder_cache(torch.tensor([1, 0]))
    both(10, 11)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    both(11, 12, [0, 0, 1, 1])
    for cache in caches:
        cache.batch_select_indices(torch.tensor([3]))
    both(12, 15, slice(1))
    twin = copy.deepcopy(caches[0])
    assert torch.equal(step(model, ids[:1, 15:16], twin), step(model, ids[:1, 15:16], caches[0]))
    step(model, ids[:1, 15:16], caches[1])
    both(16, 17, slice(1))
    for cache in caches:
        cache.reset()
    both(0, 7)


def test_a_cache_that_is_cropped_goes_on_from_there() -> None:
    # In float64: keys of twelve tokens at once are not rounded as those of eight are.
    model = LLAMA.build().double()
    enable(model)
    ids = torch.randint(3, WORDS, (1, 12))
    cache, whole = CertifiedCache(model.config), CertifiedCache(model.config)
    step(model, ids, cache)
    cache.crop(-4)
    step(model, ids[:, :8], whole)
    assert cache.get_seq_length() == 8
    short = copy.deepcopy(cache)
    short.crop(-1)
    again, wanted = (step(model, ids[:, 8:10], x) for x in (cache, whole))
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-12)
    assert float((step(model, ids[:, 8:10], short) - wanted).abs().amax()) > 1e-3
    cache.crop(-10)
    assert cache.get_seq_length() == 0


def test_cropping_beyond_the_window_is_refused() -> None:
    layer = CertifiedLayer(window=4)
    for _ in range(300):
        layer.update(*torch.randn(2, 1, 2, 1, 8))
    with pytest.raises(
        ParameterError, match=r"tokens_to_remove=-290 reaches back beyond the window of 4 tokens; start"
    ):
        layer.crop(-290)
    with pytest.raises(ParameterError, match=r"tokens_to_remove=3 must be at most 0; use crop\(-3\)"):
        layer.crop(3)
    assert layer.get_seq_length() == 300


def mixed() -> CertifiedCache:
    """A cache of a full layer, one with a sliding window and another full one, with 450 tokens of two sequences."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen3Config(num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=30)
    cache = CertifiedCache(config)
    for _ in range(45):
        for layer in range(3):
            cache.update(*torch.randn(2, 2, 2, 10, 8), layer)
    assert [layer.window for layer in cache.layers] == [None, 30, None]
    return cache


def held(cache: CertifiedCache) -> list[tuple[int, Tensor, Tensor]]:
    return [(layer.get_seq_length(), layer.keys.clone(), layer.cache.tokens[1].clone()) for layer in cache.layers]


def same(cache: CertifiedCache, before: list[tuple[int, Tensor, Tensor]]) -> bool:
    after = held(cache)
    return all(
        n == m and torch.equal(k, j) and torch.equal(v, w) for (n, k, v), (m, j, w) in zip(after, before, strict=True)
    )


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    cache = mixed()
    before = held(cache)
    with pytest.raises(ParameterError, match=r"tokens_to_remove=-420 reaches back beyond the window of 30 tokens"):
        cache.crop(-420)
    assert same(cache, before), [layer.get_seq_length() for layer in cache.layers]
    cache.crop(-5)
    assert [layer.get_seq_length() for layer in cache.layers] == [445] * 3 and not same(cache, before)


@pytest.mark.parametrize(
    "operation",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ],
    ids=["reorder_cache", "batch_repeat_interleave", "batch_select_indices"],
)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_fails_in_one_layer_changes_none(
    operation: Callable[[CertifiedCache], None], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = mixed()
    before, append, count = held(cache), KeyValueCache.append, iter(range(9))

    def full(self: KeyValueCache, k: Tensor, v: Tensor) -> None:
        if next(count) == failing:
            raise MemoryError
        append(self, k, v)

    monkeypatch.setattr(KeyValueCache, "append", full)
    with pytest.raises(MemoryError):
        operation(cache)
    assert same(cache, before)
    monkeypatch.undo()
    operation(cache)
    assert not same(cache, before)


def test_a_crop_that_fails_in_one_layer_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = mixed()
    before = held(cache)

    def full(self: KeyValueCache, k: Tensor, v: Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(KeyValueCache, "append", full)  # which only the layer with a window does
    with pytest.raises(MemoryError):
        cache.crop(-5)
    assert same(cache, before)
    monkeypatch.undo()
    cache.crop(-5)
    assert not same(cache, before)


def test_a_crop_copies_nothing_and_what_was_forgotten_is_never_seen_again() -> None:
    layer = CertifiedLayer()
    layer.update(*torch.randn(2, 1, 2, 200, 8))
    kept, place = layer.cache, layer.keys.data_ptr()
    layer.crop(-50)
    assert layer.get_seq_length() == layer.keys.shape[2] == layer.values.shape[2] == 150
    keys, values = torch.randn(2, 1, 2, 3, 8)
    shown = layer.update(keys, values)
    assert layer.cache is kept and layer.keys.data_ptr() == place, "the same buffers"
    assert shown[0].shape[2] == layer.get_seq_length() == kept.length == 153
    assert torch.equal(shown[0][:, :, 150:], keys) and torch.equal(shown[1][:, :, 150:], values)
    layer.crop(-100)
    layer.batch_repeat_interleave(2)
    assert layer.cache.length == layer.keys.shape[2] == 53 and layer.keys.shape[0] == 2
    assert torch.equal(layer.keys[1], shown[0][0, :, :53])


def test_beams_that_stay_in_their_order_are_not_copied() -> None:
    layer = CertifiedLayer()
    layer.update(*torch.randn(2, 3, 2, 20, 8))
    kept, keys = layer.cache, layer.keys.clone()
    layer.reorder_cache(torch.arange(3))
    assert layer.cache is kept
    layer.reorder_cache(torch.tensor([0, 1]))
    assert layer.cache is not kept and torch.equal(layer.keys, keys[:2])
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys, keys[[1, 0]])


def test_only_keys_and_values_as_they_were_shown_are_answered_for_by_a_cache() -> None:
    layer = CertifiedLayer()
    k, v = layer.update(*torch.randn(2, 1, 2, 5, 8))
    assert cache_of(k, v) is layer.cache is not None
    assert cache_of(k, v * 2) is None
    assert cache_of(k.clone(), v) is None
    assert cache_of(k, torch.randn(1, 2, 5, 8)) is None
    other = CertifiedLayer()
    assert cache_of(k, other.update(*torch.randn(2, 1, 2, 5, 8))[1]) is None
    layer.update(*torch.randn(2, 1, 2, 1, 8))
    assert cache_of(k, v) is None


def test_a_cache_does_not_drop_gradients_in_silence() -> None:
    model = LLAMA.build()
    enable(model)
    rule = r"past_key_values=CertifiedLayer keeps keys and values without their gradients; decode under torch.no_grad"
    with pytest.raises(NotDifferentiable, match=rule):
        model(torch.randint(3, WORDS, (1, 4)), past_key_values=CertifiedCache(model.config))
    layer = CertifiedLayer()
    k, v = layer.update(*torch.randn(2, 1, 4, 5, 8))
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    out, _ = attention_forward(Setting(), torch.nn.Identity(), q, k, v, None)
    out.sum().backward()
    assert q.grad is not None and float(q.grad.abs().amax()) > 0


def test_a_cache_on_a_cpu_has_nowhere_to_move() -> None:
    layer = CertifiedLayer()
    k, v = torch.randn(2, 1, 2, 70, 16)
    layer.update(k, v)
    with pytest.raises(ParameterError, match=r"offload=True is for GPUs, and the cache is on cpu, whose memory is"):
        layer.offload()
    assert not layer.offloaded and layer.update(k, v)[0].shape[2] == 140
    with pytest.raises(ParameterError, match=r"window=8 forgets tokens, and what it keeps is small; leave layers"):
        CertifiedLayer(window=8).offload()
    with pytest.raises(ParameterError, match=r"hot=9 is what a GPU keeps .*; add offloading=True, or leave hot out"):
        CertifiedCache(LLAMA.build().config, hot=9)


@pytest.mark.parametrize("architecture", [LLAMA, MISTRAL], ids=lambda architecture: architecture.name)
def test_other_ways_to_decode_give_the_tokens_of_sdpa(architecture: Architecture) -> None:
    model, helper = architecture.build(), architecture.build(num_hidden_layers=1)
    inputs = {"input_ids": torch.randint(3, WORDS, (1, 12))}

    def ways() -> list[Tensor]:
        first = generated(model, inputs, return_dict_in_generate=True)
        further = torch.cat([first.sequences, torch.full((1, 3), 7)], 1)
        return [
            generated(model, inputs, 12, assistant_model=helper),  # forgets what its helper guessed wrong
            generated(model, inputs, prefill_chunk_size=5),
            generated(model, {"input_ids": further}, past_key_values=first.past_key_values),
        ]

    wanted = ways()
    enable(model)
    assert all(torch.equal(*pair) for pair in zip(ways(), wanted, strict=True))


def test_transformers_own_caches_still_do() -> None:
    model = LLAMA.build()
    inputs = LLAMA.inputs("left")
    wanted = generated(model, inputs)
    enable(model)
    for more in ({"past_key_values": DynamicCache(config=model.config)}, {"use_cache": False}):
        assert torch.equal(generated(model, inputs, **more), wanted)
    static = generated(model, inputs, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, wanted)


@torch.no_grad()
@pytest.mark.parametrize("way", ["copy", "file"])
def test_a_copy_of_a_cache_in_use_goes_on_by_itself(way: str) -> None:
    model = LLAMA.build()
    enable(model, tol=1e-2)
    cache, text = CertifiedCache(model.config), torch.randint(3, WORDS, (1, 20))
    model(text[:, :12], past_key_values=cache)
    model(text[:, 12:13], past_key_values=cache)
    if way == "copy":
        again: Any = copy.deepcopy(cache)
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    expected = [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(13, 20)]
    assert again.get_seq_length() == 13
    with avow.record() as found:
        for i in range(13, 20):
            assert torch.equal(model(text[:, i : i + 1], past_key_values=again).logits, expected[i - 13])
    assert found.keeps(1e-2) and len(found) == 2 * 7
    assert cache.layers[0].cache.position == again.layers[0].cache.position == 20
