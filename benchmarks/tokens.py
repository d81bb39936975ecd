"""Decoding token by token against recomputing the whole text for each token."""

from __future__ import annotations

import statistics
import time

import torch

from avow.bench.results import Goal, Result, Row
from avow.nn import ModelConfig, TransformerLM
from benchmarks.options import Options

_AIM = 10.0
_NEAR = 1e-5
_ATTENTIONS = ("exact", "separable", "random_features")


def run(options: Options) -> Result:
    """One more token at the end of a text: seconds from the cache and by a pass over all of it, taken in turns."""
    length, rounds = (128, 2) if options.quick else (2048, 16)
    rows = [_point(attention, length, rounds) for attention in _ATTENTIONS]
    failures = [f"{row['attention']}: logits differ" for row in rows if float(row["difference"] or 0) > _NEAR]
    least = min(float(row["times faster"] or 0) for row in rows)
    goal = Goal(f"at least {_AIM:g} times faster at length {length}", f"{least:.3g} at least", least >= _AIM)
    title = f"tokens: one more token at length {length}, from the cache and anew (4 layers, 8 heads, width 256)"
    return Result(title, rows, [goal], failures=failures)


@torch.inference_mode()
def _point(attention: str, length: int, rounds: int) -> Row:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(256, block=length, attention=attention, positions="rotary")).eval()
    ids = torch.randint(256, (1, length))
    cache = model.start(1)
    model.step(ids[:, : length - rounds], cache)
    steps, passes, difference = [], [], 0.0
    for end in range(length - rounds + 1, length + 1):
        before = time.perf_counter()
        logits, cache = model.step(ids[:, end - 1 : end], cache)
        between = time.perf_counter()
        whole = model(ids[:, :end])
        steps.append(between - before)
        passes.append(time.perf_counter() - between)
        difference = max(difference, float((logits[:, -1] - whole[:, -1]).abs().max()))
    return {
        "attention": attention,
        "step ms": 1e3 * statistics.median(steps),
        "whole pass ms": 1e3 * statistics.median(passes),
        "times faster": statistics.median(b / a for a, b in zip(steps, passes, strict=True)),
        "difference": difference,
    }
