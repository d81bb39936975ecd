"""Turning avow on in a model, and off again so that nothing of it is left."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from avow.errors import ParameterError
from avow.integrations.transformers.cache import CertifiedCache
from avow.integrations.transformers.layers import Layer, layers, mark, pretrained, replaceable, unmark
from avow.integrations.transformers.names import NAME
from avow.integrations.transformers.setting import Setting
from avow.parameters import declared

_KEPT_AS = "_avow_before"
_PREPARES = "_prepare_cache_for_generation"


@dataclass(frozen=True)
class _Before:
    """The attention implementation that each configuration within a model named."""

    configs: tuple[tuple[Any, str | None], ...]

    def restore(self) -> None:
        for config, implementation in self.configs:
            config._attn_implementation_internal = implementation

    def followed_by(self, later: _Before) -> _Before:
        """What to go back to, where somebody set other implementations later: those, and else what was before."""
        first = {id(config): implementation for config, implementation in self.configs}
        return _Before(tuple((x, first.get(id(x), name) if name == NAME else name) for x, name in later.configs))


@declared()
def enable(
    model: Any,
    tol: float | None = None,
    method: str = "auto",
    confidence: float | None = None,
    rtol: float | None = None,
    **parameters: Any,
) -> None:
    """Have every attention layer of a model attend through avow, within `tol` and `rtol`; without either, exactly.

    `generate()` then keeps keys and values in a `CertifiedCache`. Where a layer cannot be replaced the error names it,
    and the model stays as it was. Enabling again changes what is asked, and takes the model back from another
    implementation that was set in between. A model inside a wrapper such as peft's is enabled there.
    """
    setting = Setting(tol, method, confidence, parameters, rtol)
    model = pretrained(model)
    found = replaceable(model)
    if not enabled(model) or any(_implementation(module) != NAME for module in found.values()):
        now = _before(model)
        before = vars(model)[_KEPT_AS].followed_by(now) if enabled(model) else now
        model.set_attn_implementation(NAME)
        missed = [name for name, module in found.items() if _implementation(module) != NAME]
        if missed:
            now.restore()
            rule = "does not let its attention implementation be set"
            raise ParameterError("model", missed[0], rule, "use a model that does")
        setattr(model, _KEPT_AS, before)
        if hasattr(model, _PREPARES):
            # A deep copy of the model, and one from a file, then prepare caches for themselves.
            setattr(model, _PREPARES, functools.partial(_prepare_cache, model))
    for name, module in found.items():
        mark(module, Layer(name, setting))


@declared()
def disable(model: Any) -> None:
    """The model as it was before `enable`."""
    model = pretrained(model)
    if not enabled(model):
        raise ParameterError("model", type(model).__name__, "does not have avow enabled", "call enable(model) first")
    vars(model).pop(_KEPT_AS).restore()
    vars(model).pop(_PREPARES, None)
    for module in model.modules():
        unmark(module)


def enabled(model: PreTrainedModel) -> bool:
    """Whether `enable` turned avow on in this model."""
    return _KEPT_AS in vars(model)


@contextlib.contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Whatever is switched inside the block, the model is as it was when it ends."""
    before = (replaceable(model), layers(model)) if enabled(model) else None
    try:
        yield
    finally:
        if before is not None:
            modules, asked = before
            if not enabled(model):
                enable(model)
            for layer in asked:
                mark(modules[layer.name], layer)
        elif enabled(model):
            disable(model)


@contextlib.contextmanager
def without(model: PreTrainedModel) -> Iterator[None]:
    """The model with the attention it had before `enable`, as long as the block runs."""
    now = _before(model)
    vars(model)[_KEPT_AS].restore()
    try:
        yield
    finally:
        now.restore()


def own_cache(model: PreTrainedModel) -> CertifiedCache:
    """The cache that `generate()` gets: with a sketch where a layer may answer with an error."""
    return CertifiedCache(model.config, bits=4 if any(layer.tolerant for layer in layers(model)) else None)


def _before(model: PreTrainedModel) -> _Before:
    """Every configuration within reach of a model, by identity: sub-models share some, and keep some to themselves."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return _Before(tuple((config, config._attn_implementation_internal) for config in found.values()))


def _implementation(module: Any) -> str | None:
    return module.config._attn_implementation


def _prepare_cache(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **named: Any) -> Any:
    """What the model prepares itself, with a growing cache of its own replaced by one that avow attends from."""
    given = model_kwargs.get("past_key_values")
    prepared = getattr(type(model), _PREPARES)(model, generation_config, model_kwargs, *more, **named)
    made: Any = model_kwargs.get("past_key_values")
    if made is given or generation_config.is_assistant or generation_config.cache_implementation == "offloaded":
        return prepared
    own = own_cache(model)
    if type(made) is DynamicCache:
        model_kwargs["past_key_values"] = own
    elif type(made) is EncoderDecoderCache and type(made.self_attention_cache) is DynamicCache:
        model_kwargs["past_key_values"] = EncoderDecoderCache(own, made.cross_attention_cache)
    return prepared
