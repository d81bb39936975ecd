"""What watching attention finds and costs: broken kernels and caches named, healthy ones not, and processor time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import avow
from avow.bench.results import Goal, Result, Row
from avow.core.timing import timed
from avow.integrations.attention_audit import resumed
from avow.integrations.transformers.model_files import load_unpacked
from benchmarks.model import FOLDER, manual
from benchmarks.options import Options

_BROKEN = 7  # the layer whose kernel is broken
_RATE = 1e-3


def off_by_one(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """SDPA of transformers, but for one layer, whose values belong to the keys before."""
    return sdpa_attention_forward(module, q, k, v.roll(1, -2) if module.layer_idx == _BROKEN else v, mask, **options)


class FourBits(DynamicLayer):
    """A layer of a cache that keeps four bits of each number, with a scale for each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **options: Any) -> Any:
        return super().update(self._rounded(key_states), self._rounded(value_states), *more, **options)

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        low = x.amin(-1, keepdim=True)
        step = ((x.amax(-1, keepdim=True) - low) / 15).clamp(min=1e-9)
        return torch.round((x - low) / step) * step + low


def run(options: Options) -> list[Result]:
    """Broken models named, healthy calls passed, and the cost of a token."""
    loaded = load_unpacked(str(FOLDER))
    model: Any = loaded.model
    prompt, more = (16, 12) if options.quick else (200, 100)
    ids = manual(loaded.tokenizer, prompt)
    AttentionInterface.register("off_by_one", off_by_one)
    AttentionMaskInterface.register("off_by_one", sdpa_mask)
    shown = [watched(model, ids, more, name) for name in ("as it is", "values off by one", "four-bit cache")]
    layers = model.config.num_hidden_layers
    named = [
        Goal(
            "a kernel that is off by one in one layer is named", shown[1]["named"], shown[1]["layers with alarms"] == 1
        ),
        Goal(
            "a cache of four bits is named in each layer", shown[2]["named"], shown[2]["layers with alarms"] == layers
        ),
        Goal("no alarm as it is", shown[0]["named"] or "none", not shown[0]["layers with alarms"]),
    ]
    model.set_attn_implementation("sdpa")
    steps = (4, 2, 4) if options.quick else (16, 16, 300)
    return [
        Result(f"auditing: SmolLM2 that reads {prompt} tokens and writes {more}", shown, named),
        healthy(500 if options.quick else 100_000),
        Result("auditing: the cost of a token", [cost(model, ids, "cpu", *steps)]),
    ]


@torch.no_grad()
def watched(model: Any, ids: Tensor, more: int, name: str) -> Row:
    """What a report says of a model that writes some tokens."""
    model.set_attn_implementation("off_by_one" if name == "values off by one" else "sdpa")
    cache = DynamicCache(config=model.config)
    if name == "four-bit cache":
        cache.layers = [FourBits() for _ in cache.layers]
    with avow.auditing(model, rate=_RATE, seed=0) as report:
        model.generate(ids, max_new_tokens=more, min_new_tokens=more, do_sample=False, past_key_values=cache)
    alarms = report.alarms
    return {
        "model": name,
        "named": ", ".join(layer.name for layer in alarms[:2]) + (", ..." if len(alarms) > 2 else ""),
        "layers with alarms": len(alarms),
        "first alarm": max((layer.first for layer in alarms), default=None),
        "rows recomputed": sum(layer.recomputed for layer in report.layers.values()),
        "unseen": len(report.unseen),
    }


def calls(count: int, chance: random.Random) -> Iterator[Callable[[], object]]:
    """Healthy calls of PyTorch's SDPA, of many types, sizes, masks and scales."""
    generator = torch.Generator().manual_seed(chance.randrange(2**62))
    for _ in range(count):
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
        n, s, d = chance.choice([1, 1, 1, 8]), chance.choice([8, 40, 130]), chance.choice([16, 64])
        groups = chance.choice([1, 2])
        size = chance.choice([0.1, 1.0, 3.0])
        q = (size * torch.randn(1, 2 * groups, n, d, generator=generator)).to(dtype)
        k, v = (torch.randn(1, 2, s, d, generator=generator).to(dtype) for _ in range(2))
        more: dict[str, Any] = {"enable_gqa": groups > 1}
        if chance.random() < 0.3:
            more["attn_mask"] = torch.rand(n, s, generator=generator) < 0.8
        elif n > 1:
            more["is_causal"] = chance.random() < 0.5
        yield lambda q=q, k=k, v=v, more=more: torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)


@torch.no_grad()
def healthy(count: int) -> Result:
    """No alarm in so many healthy calls, some rows of each recomputed."""
    with avow.auditing(rate=0.25, seed=1) as report:
        for call in calls(count, random.Random(2)):
            call()
    found = report.layers.values()
    alarms = sum(layer.alarms for layer in found)
    row: Row = {
        "calls": sum(layer.calls for layer in found),
        "rows recomputed": sum(layer.recomputed for layer in found),
        "alarms": alarms,
    }
    goal = Goal("no alarm", f"{alarms} of {row['rows recomputed']} rows", alarms == 0)
    return Result("auditing: healthy calls", [row], [goal], failures=[goal.found] if alarms else [])


@torch.no_grad()
def cost(model: Any, ids: Tensor, device: str, tokens: int, rounds: int, settled: int) -> Row:
    """A token with watching beside one without, in alternation, after first calls have been looked at closely."""
    last, place = ids[:, -1:], torch.device(device)
    plain, seen = (DynamicCache(config=model.config) for _ in range(2))

    def write(past: DynamicCache, length: int = tokens) -> None:
        for _ in range(length):
            model(last, past_key_values=past)

    def seconds(past: DynamicCache) -> float:
        if device != "cpu":
            return timed(lambda: write(past), place)
        begun = time.process_time()
        write(past)
        return time.process_time() - begun

    def begin(past: DynamicCache) -> None:
        model(ids, past_key_values=past, logits_to_keep=1)
        write(past, settled)

    begin(plain)
    with avow.auditing(model, rate=_RATE) as report:
        begin(seen)
    ratios, shares = [], []
    for i in range(rounds):
        alone = seconds(plain) if i % 2 else 0.0
        spent, begun = report.seconds, time.perf_counter()
        with resumed(model, report):
            watched = seconds(seen)
        shares.append((report.seconds - spent) / (time.perf_counter() - begun))
        ratios.append(watched / (alone or seconds(plain)))
    return {
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "asked": "token by token",
        "tokens": tokens * rounds,
        "rate": _RATE,
        "watched ratio": statistics.median(ratios),
        "recomputing": statistics.median(shares),
    }


def cost_on_gpu(options: Options) -> Result:
    """What watching costs a model of Llama's shape on a GPU, whose weights are random."""
    layers, width = (2, 256) if options.quick else (32, 4096)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(32000, (1, 64 if options.quick else 4096))
    steps = (4, 2, 4) if options.quick else (32, 8, 64)
    found = [cost(model, ids, "cuda", *steps), prompt_cost(model, ids, 3 if options.quick else 11)]
    goals = []
    for row in found:
        ratio = float(row["watched ratio"] or 0)
        goals.append(
            Goal(f"{row['tokens']} tokens, {row['asked']}: at most 2% more", f"{ratio - 1:.1%}", ratio <= 1.02)
        )
    return Result("auditing: the cost of a token on a GPU", found, goals)


@torch.no_grad()
def prompt_cost(model: Any, ids: Tensor, rounds: int) -> Row:
    """A prompt that is read with watching beside one without, in alternation."""
    place = ids.device

    def read() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    read()
    with avow.auditing(model, rate=_RATE) as report:
        read()
    ratios, shares = [], []
    for _ in range(rounds):
        alone, spent = timed(read, place), report.seconds
        with resumed(model, report):
            watched = timed(read, place)
        shares.append((report.seconds - spent) / watched)
        ratios.append(watched / alone)
    return {
        "device": torch.cuda.get_device_name() if place.type == "cuda" else place.type,
        "asked": "a prompt at once",
        "tokens": ids.shape[1],
        "rate": _RATE,
        "watched ratio": statistics.median(ratios),
        "recomputing": statistics.median(shares),
    }
