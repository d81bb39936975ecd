"""Decoding token by token gives the logits of the whole pass, however the tokens are cut into steps."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avow.core import Problem
from avow.errors import ParameterError, ShapeError
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.nn import Attention, Cache, ModelConfig, TransformerLM
from avow.nn.memory import KeysAndValues, RandomDraw, RunningState, memory_of

LENGTH = 140
BASE = ModelConfig(vocabulary=20, block=LENGTH, layers=2, heads=4, width=24, dropout=0.1, positions="rotary")
DECODERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "separable": {"temperature": 0.5},
    "random_features": {"features": 40},
}
decoders = pytest.mark.parametrize("attention", list(DECODERS))
SPLITS = {
    "one by one": [1] * LENGTH,
    "at once": [LENGTH],
    "odd": [1, 2, 65, 1, 64, 7],
    "a prompt, then one by one": [127] + [1] * 13,
    "one, then the rest": [1, 139],
}


def model(attention: str, **changes: Any) -> TransformerLM:
    """A model in evaluation whose weights are loud enough for attention to matter."""
    config = dataclasses.replace(BASE, attention=attention, settings=DECODERS[attention], **changes)
    made = TransformerLM(config).eval()
    for name, parameter in made.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=1.0 if "tokens" in name else 0.3)
    return made


def decoded(made: TransformerLM, ids: Tensor, split: list[int]) -> Tensor:
    """Logits of all ids, read in steps of these lengths."""
    cache, found = made.start(ids.shape[0]), []
    for part in ids.split(split, 1):
        logits, cache = made.step(part, cache)
        found.append(logits)
    assert cache.length == ids.shape[1]
    return torch.cat(found, 1)


@decoders
@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
@torch.no_grad()
def test_steps_give_the_logits_of_the_whole_pass(attention: str, split: list[int]) -> None:
    made = model(attention)
    ids = torch.randint(20, (2, LENGTH))
    whole = made(ids)
    torch.testing.assert_close(decoded(made, ids, split), whole, rtol=1e-5, atol=1e-5)
    assert float(whole.std()) > 0.5
    assert not torch.allclose(decoded(made, ids.flip(1), split), whole.flip(1), atol=1e-2)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@torch.no_grad()
def test_other_positions_go_on_where_the_last_step_ended(positions: str) -> None:
    made = model("exact", positions=positions)
    ids = torch.randint(20, (2, 50))
    torch.testing.assert_close(decoded(made, ids, [20, 1, 29]), made(ids), rtol=1e-5, atol=1e-5)


@decoders
@torch.no_grad()
def test_grouped_heads_decode_too(attention: str) -> None:
    made = model(attention, key_heads=2)
    ids = torch.randint(20, (3, 70))
    torch.testing.assert_close(decoded(made, ids, [3, 1, 66]), made(ids), rtol=1e-5, atol=1e-5)


@decoders
@torch.no_grad()
def test_a_forgotten_token_would_be_noticed(attention: str) -> None:
    made = model(attention)
    ids = torch.randint(20, (1, 30))
    cache = made.start(1)
    made.step(ids[:, :9], cache)
    logits, _ = made.step(ids[:, 10:], cache)
    assert not torch.allclose(logits[:, -1], made(ids)[:, -1], atol=1e-4)


@decoders
@torch.no_grad()
def test_keys_of_any_size_decode_without_overflow(attention: str) -> None:
    module = Attention(8, 2, attention, causal=True, **DECODERS[attention])
    x = torch.randn(1, 60, 8) * torch.linspace(1, 60, 60)[:, None]
    memory = module.start(60)
    steps = torch.cat([module.step(part, memory) for part in x.split([1, 1, 20, 5, 33], 1)], 1)
    whole = module(x)
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@decoders
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_tokens_too_large_for_single_precision_are_read_between_others(attention: str, causal: bool) -> None:
    module = Attention(8, 2, attention, causal=causal, **DECODERS[attention])
    x = torch.randn(1, 30, 8)
    x[:, 10:12] *= 1e15
    whole = module(x)
    assert bool(whole.isfinite().all())
    if causal:
        memory = module.start(30)
        steps = torch.cat([module.step(part, memory) for part in x.split([1, 9, 1, 1, 1, 17], 1)], 1)
        torch.testing.assert_close(
            steps[:, :10], whole[:, :10], rtol=1e-4, atol=1e-4 * float(whole[:, :10].abs().max())
        )
        assert bool(steps.isfinite().all())


def held(cache: Cache) -> int:
    """Numbers a cache holds for what it has read, the draw not counted."""
    total = 0
    for memory in cache.layers:
        match memory:
            case KeysAndValues():
                assert memory.keys is not None and memory.values is not None
                total += memory.keys.numel() + memory.values.numel()
            case RunningState():
                assert memory.state is not None
                total += sum(x.numel() for x in memory.state.sums[:3])
    return total


@torch.no_grad()
def test_linear_attentions_hold_no_more_at_the_end_than_after_one_token() -> None:
    ids = torch.randint(20, (1, LENGTH))
    for attention in ("separable", "random_features"):
        made = model(attention)
        cache = made.start(1)
        made.step(ids[:, :1], cache)
        after_one = held(cache)
        made.step(ids[:, 1:], cache)
        d, m = 6, {"separable": 6, "random_features": 40}[attention]
        assert held(cache) <= 2 * 4 * m * (d + 2)
        assert held(cache) - after_one <= 2 * 4 * m  # random features may come to need a reference for each feature
    made = model("exact")
    cache = made.start(1)
    made.step(ids[:, :1], cache)
    assert held(cache) == 2 * 2 * LENGTH * 24  # room for the block, made once
    rooms = [memory.keys.data_ptr() for memory in cache.layers]  # type: ignore[attr-defined]
    made.step(ids[:, 1:], cache)
    assert [memory.keys.data_ptr() for memory in cache.layers] == rooms  # type: ignore[attr-defined]


@decoders
@torch.no_grad()
def test_a_copy_of_a_cache_is_a_branch_of_its_own(attention: str) -> None:
    made = model(attention)
    ids, other = torch.randint(20, (2, 1, 30))
    cache = made.start(1)
    made.step(ids[:, :20], cache)
    branch = copy.deepcopy(cache)
    made.step(other[:, 20:], branch)
    logits, _ = made.step(ids[:, 20:], cache)
    torch.testing.assert_close(logits, made(ids)[:, 20:], rtol=1e-5, atol=1e-5)


@decoders
@torch.no_grad()
def test_steps_under_autocast_are_those_of_the_whole_pass_there(attention: str) -> None:
    made = model(attention)
    ids = torch.randint(20, (1, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps, whole = decoded(made, ids, [7, 1, 32]), made(ids)
    assert float((steps - whole).abs().mean()) < 0.02 * float(whole.std())


def test_a_step_keeps_no_graph() -> None:
    made = model("exact")
    logits, cache = made.step(torch.zeros(1, 3).long(), made.start(1))
    assert not logits.requires_grad and isinstance(cache.layers[0], KeysAndValues)


def test_what_cannot_decode_says_so() -> None:
    config = dataclasses.replace(BASE, attention="low_rank", settings={"rank": 4})
    words = "method=low_rank cannot decode token by token: its landmarks are chosen among all keys; decode with exact"
    with pytest.raises(ParameterError, match=re.escape(words)):
        TransformerLM(config).start(1)
    with pytest.raises(ParameterError, match="attention=cross cannot decode token by token; use causal=True"):
        Attention(8, 2, cross=True).start(9)
    with pytest.raises(ParameterError, match="attention=not causal cannot decode"):
        Attention(8, 2).start(9)


@decoders
def test_a_full_cache_and_another_batch_are_refused(attention: str) -> None:
    made = model(attention)
    cache = made.start(2)
    made.step(torch.zeros(2, LENGTH).long(), cache)
    with pytest.raises(ShapeError, match=f"length=141 exceeds block={LENGTH}; shorten the text"):
        made.step(torch.zeros(2, 1).long(), cache)
    with pytest.raises(ShapeError, match=re.escape("ids.shape[0]=3 must be 2, the batch this cache was started for")):
        made.step(torch.zeros(3, 1).long(), made.start(2))
    module = Attention(8, 2, attention, causal=True, **DECODERS[attention])
    memory = module.start(4)
    module.step(torch.zeros(1, 4, 8), memory)
    with pytest.raises(ShapeError, match="length=5 exceeds block=4; start again"):
        module.step(torch.zeros(1, 1, 8), memory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6, 0.5, 1.0, 1e6, 1e300])
@pytest.mark.parametrize("size", ["tiny", "usual", "huge"])
@torch.no_grad()
def test_steps_of_separable_attention_are_its_whole_pass_at_any_temperature(
    dtype: torch.dtype, temperature: float, size: str
) -> None:
    method, limits = Separable(temperature), torch.finfo(dtype)
    factor = {"tiny": 4 * limits.smallest_normal, "usual": 1.0, "huge": limits.max / 64}[size]
    q, k, v = (torch.randn(2, heads, 30, 8).to(dtype) for heads in (4, 2, 2))
    q[:, :, 3], k[:, :, 5] = 0, 0
    q, k, v = (x * factor for x in (q, k, v))
    whole = method.compute(Problem.of(q, k, v, causal=True, enable_gqa=True)).out
    memory = memory_of(method, None, 30)
    parts = zip(*(x.split([1, 1, 20, 1, 7], 2) for x in (q, k, v)), strict=True)
    steps = torch.cat([memory.read(*part) for part in parts], 2)
    assert bool(whole.isfinite().all()) and float(whole.abs().amax()) > 0
    # The answer is a mean of values: what one step or all of them round is relative to those.
    torch.testing.assert_close(steps / factor, whole / factor, rtol=4 * limits.eps, atol=32 * limits.eps)


@torch.no_grad()
def test_steps_of_random_features_lose_no_value_near_underflow() -> None:
    method, draw = RandomFeatures(16), RandomDraw(RandomFeatures(16), 4)
    q, k = torch.randn(2, 1, 2, 12, 4).unbind()
    v = torch.randint(1, 9, (1, 2, 12, 4)).float()
    whole = memory_of(method, draw, 12).read(q, k, v)
    memory, unit = memory_of(method, draw, 12), 2.0**-148
    parts = zip(*(x.split(3, 2) for x in (q, k, unit * v)), strict=True)
    steps = torch.cat([memory.read(*part) for part in parts], 2)
    # Half the distance of the smallest numbers, half of the unit: only the answer itself is rounded.
    torch.testing.assert_close(steps / unit, whole, rtol=0, atol=1 / 4 + 1e-4)
