"""What a new token costs: the model as it is, with avow enabled, and with a plan, measured beside one another."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from avow.errors import ParameterError
from avow.integrations.transformers.cache import CertifiedLayer
from avow.integrations.transformers.enabling import as_it_was, disable, enable, enabled, own_cache
from avow.integrations.transformers.layers import pretrained
from avow.integrations.transformers.model_plan import ModelPlan, apply
from avow.parameters import declared

# Ratios of times within this of 1 say nothing on a machine that does other things too.
_ALIKE = 0.03
_WARM = 2


@dataclass(frozen=True)
class Speed:
    """Milliseconds for a token behind so many, medians over rounds in which all three took turns.

    On a CPU they are of processor time, of all threads together, which other programs disturb least; on a GPU of the
    clock. Ratios are medians of each round's own.
    """

    tokens: int
    rounds: int
    as_it_is: float
    enabled: float
    planned: float
    enabled_ratio: float
    planned_ratio: float
    clock: str

    @property
    def verdict(self) -> str:
        """Whether the plan pays here."""
        if self.planned_ratio < 1 - _ALIKE:
            return f"the plan pays here: {self.planned_ratio:.2f} of the time"
        if self.enabled_ratio < 1 - _ALIKE:
            return f"enabling avow pays here ({self.enabled_ratio:.2f} of the time), a plan beside it does not"
        return "the plan does not pay here"


@declared()
@torch.no_grad()
def decoding_speed(model: Any, plan: ModelPlan, ids: Tensor, rounds: int = 12) -> Speed:
    """What one more token behind the tokens (1, n) costs without avow, with it enabled at the plan's tolerance, and
    under the plan, from the caches that `generate()` uses. The model is left as it was.
    """
    model = pretrained(model)
    if not model.can_generate() or model.config.is_encoder_decoder:
        rule = "does not write a text token by token"
        raise ParameterError("model", type(model).__name__, rule, "measure decoder-only language models")
    if rounds < 1:
        raise ParameterError("rounds", rounds, "must be at least 1", "try rounds=12")
    with as_it_was(model):
        _off(model)
        past = DynamicCache(config=model.config.get_text_config(decoder=True))
        model.base_model(ids, past_key_values=past, use_cache=True)
        return speed_behind(model, plan, past, ids[:, -1:], rounds)


@torch.no_grad()
def speed_behind(model: PreTrainedModel, plan: ModelPlan, past: DynamicCache, ids: Tensor, rounds: int) -> Speed:
    """What the tokens (1, 1) cost behind what a cache holds, which grows; avow must not be enabled in the model."""
    tokens = past.get_seq_length()
    turns: dict[str, Callable[[], None]] = {
        "as it is": lambda: None,
        "enabled": lambda: enable(model, plan.tol),
        "plan": lambda: apply(model, plan),
    }
    caches: dict[str, Any] = {}
    for name, turn in turns.items():
        turn()
        caches[name] = _filled(model, past) if enabled(model) else past
        _off(model)
    taken: dict[str, list[float]] = {name: [] for name in turns}
    on_cpu, names = ids.device.type == "cpu", list(turns)
    for i in range(rounds + _WARM):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            turns[name]()
            begun = _clock(on_cpu)
            model(ids, past_key_values=caches[name], use_cache=True)
            taken[name].append(1e3 * (_clock(on_cpu) - begun))
            _off(model)
    kept = [found[_WARM:] for found in taken.values()]
    ratios = [statistics.median(x / y for x, y in zip(found, kept[0], strict=True)) for found in kept[1:]]
    middle = [statistics.median(found) for found in kept]
    clock = "processor time" if on_cpu else "time"
    return Speed(tokens, rounds, middle[0], middle[1], middle[2], ratios[0], ratios[1], clock)


def _off(model: PreTrainedModel) -> None:
    if enabled(model):
        disable(model)


def _filled(model: PreTrainedModel, past: DynamicCache) -> Any:
    """The cache that `generate()` would have now, with what another one holds."""
    cache = own_cache(model)
    for i, other in enumerate(past.layers):
        if isinstance(cache.layers[i], CertifiedLayer):
            cache.layers[i].update(other.keys, other.values)
        else:
            cache.layers[i] = copy.deepcopy(other)
    return cache


def _clock(on_cpu: bool) -> float:
    if on_cpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
