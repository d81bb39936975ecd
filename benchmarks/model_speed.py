"""What a new token of a trained model costs on a CPU: as it is, with avow enabled, and with a plan, in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from avow.bench.results import Goal, Result, Row
from avow.integrations.transformers import ModelPlan, Speed, profile
from avow.integrations.transformers.model_files import load_model
from avow.integrations.transformers.model_plan import fingerprint, speed_behind
from benchmarks.model import FOLDER, manual
from benchmarks.options import Options

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Beside the model as it is: up to 1,024 tokens bookkeeping shows, from 4,096 on appending in place makes up for it.
_SHORT, _LONG = 1.05, 1.0


@torch.no_grad()
def run(options: Options) -> Result:
    """Milliseconds of processor time for a token behind 1,024 to 8,192, in float32 and in bfloat16."""
    lengths, rounds, profiled = ((64, 128), 2, 48) if options.quick else ((1024, 4096, 8192), 24, 192)
    loaded = load_model(str(FOLDER))
    model: Any = loaded.model
    ids = manual(loaded.tokenizer, lengths[0])
    plan = profile(model, ids[:, :profiled], tol=1e-2, budget=0.5).plan
    past = DynamicCache(config=model.config)
    model.base_model(ids, past_key_values=past, use_cache=True)
    # What is read does not depend on what it says: longer texts are the first one again and again.
    many = -(-lengths[-1] // lengths[0])
    held = [(layer.keys.repeat(1, 1, many, 1), layer.values.repeat(1, 1, many, 1)) for layer in past.layers]
    rows = []
    for name, dtype in _DTYPES.items():
        model.to(dtype)
        own = dataclasses.replace(plan, fingerprint=fingerprint(model))
        rows += [_row(name, _speed(model, own, held, length, dtype, ids, rounds)) for length in lengths]
    limits = {lengths[0]: _SHORT} | dict.fromkeys(lengths[1:], _LONG)
    missed = [
        f"{r['dtype']} at {r['tokens']}" for r in rows if float(r["enabled ratio"] or 0) > limits[int(r["tokens"] or 0)]
    ]
    goal = Goal(
        f"enabled: at most {_SHORT:g} of the time at {lengths[0]:,} tokens, {_LONG:g} from {lengths[1]:,} on",
        f"missed: {', '.join(missed)}" if missed else "met",
        not missed,
    )
    return Result("model_speed: a new token of SmolLM2-135M, processor time", rows, [goal])


def _speed(
    model: Any,
    plan: ModelPlan,
    held: list[tuple[Tensor, Tensor]],
    length: int,
    dtype: torch.dtype,
    ids: Tensor,
    rounds: int,
) -> Speed:
    past = DynamicCache(config=model.config)
    for layer, (k, v) in enumerate(held):
        past.update(k[:, :, :length].to(dtype), v[:, :, :length].to(dtype), layer)
    return speed_behind(model, plan, past, ids[:, -1:], rounds)


def _row(dtype: str, speed: Speed) -> Row:
    return {
        "dtype": dtype,
        "tokens": speed.tokens,
        "as it is ms": speed.as_it_is,
        "enabled ms": speed.enabled,
        "plan ms": speed.planned,
        "enabled ratio": speed.enabled_ratio,
        "plan ratio": speed.planned_ratio,
        "rounds": speed.rounds,
    }
