"""avow in a model of transformers: the setting of each layer, enabling it, and disabling it without a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from avow.attend import check_automatic
from avow.core import SOFTMAX, Method
from avow.core.requirement import checked_requirement
from avow.errors import ParameterError, value_text
from avow.integrations.transformers.cache import CertifiedCache
from avow.integrations.transformers.graphs import captures
from avow.integrations.transformers.verified import MOST, DecodingForward, chooses
from avow.methods import all_methods, checked_class, exact_method, method_named, named_form
from avow.parameters import check_count, declared

NAME = "avow"
"""The attention implementation that transformers knows."""
USUAL_TOL = 1e-2
"""The tolerance of a method that needs one and was given none."""

_LAYER, _BEFORE, _PREPARES = "_avow_layer", "_avow_before", "_prepare_cache_for_generation"
_PROCESSORS = "_get_logits_processor"
# Attributes of layers whose attention is not softmax attention under a mask.
_UNLIKE = {
    "attn_logit_softcapping": "bends its logits by soft-capping",
}
# What classes pass to their attention function, if it is not one of transformers' own, instead of a mask.
_CHOICES = {"indices", "block_indices"}


@dataclass(frozen=True)
class Setting:
    """How one layer attends: the arguments of `avow.attend` that do not depend on what it attends to.

    A method that selects tokens leaves tokens out as far as a tolerance allows: without one, `tol` is `USUAL_TOL`.

    Attributes:
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees; None sets no
            limit.
        method: "auto", or the name of a method whose target is softmax attention.
        confidence: accept bounds that hold with this probability for each row; None accepts certain ones alone.
        parameters: the method's, by name.
        rtol: the same relative to the length of the row's true answer.
    """

    tol: float | None = None
    method: str = "auto"
    confidence: float | None = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float | None = None

    def __post_init__(self) -> None:
        checked_requirement(self.tol, self.confidence, rtol=self.rtol)
        for name in ("tol", "rtol"):
            if getattr(self, name) == 0:
                raise ParameterError(name, 0, "must be above 0", f"try {name}=1e-2, or leave it out for exact")
        if not isinstance(self.parameters, Mapping):
            rule = "must map names of parameters to values"
            raise ParameterError("parameters", value_text(self.parameters), rule, 'try {"features": 256}')
        if self.method == "auto":
            return check_automatic(self.parameters)
        kind = checked_class(self.method, self.parameters)
        if kind.target != SOFTMAX:
            rule = f"computes {kind.target}, and models are trained with softmax attention"
            remedy = f"use {', '.join(method.name for method in softmax_methods())}; avow.nn trains models with it"
            raise ParameterError("method", self.method, rule, remedy)
        if not kind.selects_tokens:
            return
        for name, value in self.parameters.items():
            rule = "is set by the cache of a model"
            remedy = "leave it out; give tol= or confidence=, or past_key_values=CertifiedCache(model.config, bits=...)"
            raise ParameterError(f"{self.method}: {name}", value, rule, remedy)
        if self.exact:
            object.__setattr__(self, "tol", USUAL_TOL)

    def __str__(self) -> str:
        limits = [f"{name}={limit:g}" for name in ("tol", "rtol") if (limit := getattr(self, name)) is not None]
        return f"{self.method} ({', '.join(limits)})" if limits else self.method

    @property
    def kind(self) -> type[Method] | None:
        """The class of the method; None if that is to be chosen call by call."""
        return None if self.method == "auto" else method_named(self.method)

    @property
    def exact(self) -> bool:
        """Whether no error is allowed but that of rounding."""
        return self.tol is None and self.rtol is None

    @functools.cached_property
    def exactly(self) -> Setting:
        """Exact attention within the same tolerances."""
        return Setting(self.tol, exact_method().name, rtol=self.rtol)


def softmax_methods() -> list[type[Method]]:
    """The methods that compute what models are trained with; one with another target would change their outputs."""
    return [kind for kind in all_methods().values() if kind.target == SOFTMAX]


@dataclass(frozen=True)
class Layer:
    """One attention layer: its name in the model and how it attends."""

    name: str
    setting: Setting
    heads: tuple[Setting, ...] = ()
    """The setting of each head under a plan; these take precedence over `setting`."""
    drafts: Setting | None = None
    """How it attends in drafts of tokens, which are verified under `setting`."""

    @property
    def tolerant(self) -> bool:
        """Whether any of its heads may answer with an error, if only in a draft."""
        return any(not setting.exact for setting in self.heads or (self.drafts or self.setting,))


def layer_of(module: nn.Module, setting: Setting) -> Layer:
    """The layer that `enable` attached to a module; for any other module, a layer with this setting."""
    layer = getattr(module, _LAYER, None)
    return layer if isinstance(layer, Layer) else Layer(layer_name(module), setting)


def layer_name(module: nn.Module) -> str:
    """What a layer is called if nobody knows its name in the model."""
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if index is None else f" {index}")


def mark(module: nn.Module, layer: Layer) -> None:
    """Make the module attend as `layer` says."""
    setattr(module, _LAYER, layer)


def layers(model: nn.Module) -> list[Layer]:
    """The attention layers of a model in which avow is enabled."""
    return [layer for module in model.modules() if isinstance(layer := vars(module).get(_LAYER), Layer)]


def pretrained(model: Any) -> PreTrainedModel:
    """The model of transformers: itself, or the one inside a wrapper such as peft's."""
    unwrap = getattr(model, "get_base_model", None)
    inner = unwrap() if callable(unwrap) else model
    if not isinstance(inner, PreTrainedModel):
        rule, remedy = "must be a transformers.PreTrainedModel, or wrap one as peft does", "pass the model inside"
        raise ParameterError("model", type(model).__name__, rule, remedy)
    return inner


@declared()
def enable(
    model: Any,
    tol: float | None = None,
    method: str | Method = "auto",
    confidence: float | None = None,
    rtol: float | None = None,
    verify: int | None = None,
    **parameters: Any,
) -> None:
    """Have every attention layer of a model attend through avow, within `tol` and `rtol`; without either, exactly.

    `generate()` then keeps keys and values in a `CertifiedCache`. On a GPU the next tokens are read by CUDA graphs,
    with room for `max_length` tokens (`CertifiedCache.steps` tells how many, and why not the others). With `verify` the
    model stays exact: tokens behind what such a cache holds are drafted within `tol`, and up to so many are verified by
    one pass of exact attention before the caller gets the logits of any (`CertifiedCache.verification` tells what came
    of that). If a layer cannot be replaced, the error names it, and the model stays as it was. Enabling again changes
    the setting, and takes the model back from another implementation that was set in between. A model inside a wrapper
    such as peft's is enabled there.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees; None sets no
            limit.
        method: "auto", or a method whose target is softmax attention, by name or as an object.
        confidence: accept bounds that hold with this probability for each row; None accepts certain ones alone.
        rtol: the same relative to the length of the row's true answer.
        verify: how many drafts are verified at once at most, 1 to 31; None drafts nothing.
        **parameters: parameters of a named method.

    Raises:
        ParameterError: this is not such a model, a layer cannot be replaced, or an option does not fit.
        UnknownMethod: there is no method of that name.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> import avow
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> avow_transformers.enable(model, tol=1e-2)
    >>> with avow.record() as certificates:
    ...     out = model(torch.arange(9)[None])
    >>> certificates.keeps(1e-2), len(certificates.layers)
    (True, 2)
    """
    if isinstance(method, Method):
        checked_class(method, parameters)
        method, parameters = named_form(method)
    setting = Setting(tol, method, confidence, parameters, rtol)
    model = pretrained(model)
    modules: dict[str, Any] = replaceable(model)
    if verify is not None:
        _check_drafts(model, verify, setting)

    def others() -> list[str]:
        """The layers that attend by another implementation."""
        return [name for name, module in modules.items() if module.config._attn_implementation != NAME]

    if not enabled(model) or others():
        before = now = _implementations(model)
        if enabled(model):
            # Go back to what somebody set since then, and else to what was before.
            first = {id(config): name for config, name in vars(model)[_BEFORE]}
            before = tuple((config, first.get(id(config), name) if name == NAME else name) for config, name in now)
        model.set_attn_implementation(NAME)
        if missed := others():
            _restore(now)
            rule = "does not let its attention implementation be set"
            raise ParameterError("model", missed[0], rule, "use a model that does")
        setattr(model, _BEFORE, before)
        if hasattr(model, _PREPARES):
            # A deep copy of the model, and one from a file, then prepare caches for themselves.
            setattr(model, _PREPARES, functools.partial(_prepare_cache, model))
    for name, module in modules.items():
        mark(module, Layer(name, setting) if verify is None else Layer(name, Setting(), drafts=setting))
    remove(model)
    if verify is not None or (captures(model.device) and _writes(model)):
        limits = setting.tol, setting.confidence, setting.rtol, setting.method
        _decode(model, DecodingForward(model, verify, limits))


def _decode(model: PreTrainedModel, forward: DecodingForward) -> None:
    """Have the model read next tokens by graphs, or draft them; `generate()` tells how it chooses those."""
    model.forward = forward
    if forward.most is not None:
        setattr(model, _PROCESSORS, functools.partial(_processors, model))


def _writes(model: PreTrainedModel) -> bool:
    """Whether a model writes a text token by token from one cache."""
    return model.can_generate() and not model.config.is_encoder_decoder


def _check_drafts(model: PreTrainedModel, verify: int, setting: Setting) -> None:
    """Raise if a model does not draft tokens under this setting, or not so many."""
    check_count("verify", verify, 16)
    if verify > MOST:
        raise ParameterError("verify", verify, f"must be at most {MOST}", "try verify=16")
    if setting.exact:
        raise ParameterError("verify", verify, "verifies drafts, which need a tolerance", "give tol=, such as 1e-2")
    if setting.kind is not None and not (setting.kind.selects_tokens or setting.kind.is_exact):
        remedy = 'use method="auto" or method="sparse"'
        raise ParameterError("method", setting.method, "does not draft single tokens from a cache", remedy)
    if not _writes(model):
        rule = "does not write a text token by token from one cache"
        raise ParameterError("model", type(model).__name__, rule, "use a decoder-only language model, or no verify")


def remove(model: PreTrainedModel) -> None:
    """Have the model read next tokens as it did."""
    forward = vars(model).get("forward")
    if isinstance(forward, DecodingForward):
        vars(model).pop(_PROCESSORS, None)
        del model.forward
        if forward.before is not None:
            model.forward = forward.before


@declared()
def disable(model: Any) -> None:
    """The model as it was before `enable`.

    Args:
        model: one in which avow is enabled, or not.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> avow_transformers.enable(model, tol=1e-2)
    >>> avow_transformers.disable(model)
    >>> model.config._attn_implementation
    'sdpa'
    """
    model = pretrained(model)
    check_enabled(model)
    _restore(vars(model).pop(_BEFORE))
    remove(model)
    vars(model).pop(_PREPARES, None)
    for module in model.modules():
        vars(module).pop(_LAYER, None)


def enabled(model: PreTrainedModel) -> bool:
    """Whether `enable` turned avow on in this model."""
    return _BEFORE in vars(model)


def check_enabled(model: PreTrainedModel) -> None:
    """Raise unless avow is enabled in this model."""
    if not enabled(model):
        raise ParameterError("model", type(model).__name__, "does not have avow enabled", "call enable(model) first")


@contextlib.contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model at the end of the block, whatever was enabled or disabled inside."""
    before = (replaceable(model), layers(model), vars(model).get("forward")) if enabled(model) else None
    try:
        yield
    finally:
        if before is not None:
            modules, previous, forward = before
            if not enabled(model):
                enable(model)
            remove(model)
            if isinstance(forward, DecodingForward):
                _decode(model, forward)
            for layer in previous:
                mark(modules[layer.name], layer)
        elif enabled(model):
            disable(model)


@contextlib.contextmanager
def without(model: PreTrainedModel) -> Iterator[None]:
    """The model with the attention it had before `enable`, as long as the block runs."""
    now = _implementations(model)
    _restore(vars(model)[_BEFORE])
    try:
        yield
    finally:
        _restore(now)


def own_cache(model: PreTrainedModel, capacity: int | None = None, offloading: bool = False) -> CertifiedCache:
    """The cache that `generate()` gets: with a sketch if a layer may answer with an error, and room for so many tokens.

    On a GPU a sketch is kept anyway: kernels read no cache without one.
    """
    sketched = captures(model.device) or any(layer.tolerant for layer in layers(model))
    return CertifiedCache(model.config, bits=4 if sketched else None, capacity=capacity, offloading=offloading)


def _prepare_cache(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **named: Any) -> Any:
    """What the model prepares itself, with a growing cache of its own replaced by one that avow attends from."""
    given = model_kwargs.get("past_key_values")
    prepared = getattr(type(model), _PREPARES)(model, generation_config, model_kwargs, *more, **named)
    cache: Any = model_kwargs.get("past_key_values")
    offloading = generation_config.cache_implementation == "offloaded"
    if cache is given or generation_config.is_assistant:
        return prepared
    # Tokens that do not move are read by CUDA graphs; those of beams move whenever beams are chosen. Host memory is
    # locked, which takes a while: for all tokens to come at once, drafts among them.
    stays = captures(model.device) and generation_config.num_beams == 1
    room = generation_config.max_length if stays else None
    own = own_cache(model, generation_config.max_length + MOST if offloading else room, offloading)
    if offloading and own.layers and own.layers[0].bits is None:
        # Rows are read where they are by kernels, which need a sketch; without a tolerance there is none.
        return prepared
    if type(cache) is DynamicCache:
        model_kwargs["past_key_values"] = own
    elif type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache:
        model_kwargs["past_key_values"] = EncoderDecoderCache(own, cache.cross_attention_cache)
    return prepared


def _processors(model: Any, *given: Any, **named: Any) -> Any:
    """The logits processors that the model prepares, which tell a cache of avow's what they choose."""
    prepared = getattr(type(model), _PROCESSORS)(model, *given, **named)
    cache = (named.get("model_kwargs") or {}).get("past_key_values")
    if not isinstance(cache, CertifiedCache):
        return prepared
    return chooses(cache, prepared, named["generation_config"])


# Each configuration within a model, and the attention implementation that it names.
_Implementations = tuple[tuple[Any, str | None], ...]


def _implementations(model: PreTrainedModel) -> _Implementations:
    """Every configuration within reach of a model, by identity: sub-models share some, and keep some to themselves."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return tuple((config, config._attn_implementation_internal) for config in configs.values())


def _restore(implementations: _Implementations) -> None:
    for config, implementation in implementations:
        config._attn_implementation_internal = implementation


def replaceable(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers by name. Raises, and names the layer, if one cannot be replaced."""
    modules = {name: module for name, module in model.named_modules() if asks_interface(type(module))}
    for name, module in _others(model):
        rule = f"({type(module).__name__}) computes attention by itself, not through transformers' AttentionInterface"
        raise ParameterError("model", name, rule, "use a model whose attention does")
    if not modules:
        rule = "has no attention layer that goes through transformers' AttentionInterface"
        raise ParameterError("model", type(model).__name__, rule, "use a model that has one")
    for name, module in modules.items():
        for attribute, what in _UNLIKE.items():
            if getattr(module, attribute, None) is not None:
                rule = f"({type(module).__name__}) {what}, which is not softmax attention"
                raise ParameterError("model", name, rule, "keep attn_implementation='eager' for it")
        if any(_CHOICES.intersection(_texts(code)) for code in _methods(type(module))):
            rule = f"({type(module).__name__}) chooses keys by an indexer of its own, and does not say so in its mask"
            raise ParameterError("model", name, rule, "keep attn_implementation='sdpa' for it")
    return modules


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Attention modules with parameters that neither contain, nor are part of, a layer that asks the interface."""
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or not any(True for _ in module.parameters()):
            continue
        path = name.split(".")
        around = (model.get_submodule(".".join(path[:depth])) for depth in range(1, len(path)))
        if not any(asks_interface(type(part)) for part in (*module.modules(), *around)):
            yield name, module


def asks_interface(kind: type) -> bool:
    """Whether a class looks its attention function up in transformers' table of them."""
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in _methods(kind))


def _methods(kind: type) -> Iterator[CodeType]:
    """The code of a class's own methods, without those of torch's and transformers' base classes."""
    for owner in itertools.takewhile(lambda owner: owner not in (nn.Module, PreTrainedModel), kind.__mro__):
        functions = (inspect.unwrap(thing) for thing in vars(owner).values() if callable(thing))
        yield from (function.__code__ for function in functions if hasattr(function, "__code__"))


def _texts(code: CodeType) -> Iterator[str]:
    """The strings of a function, names of keyword arguments in its calls among them."""
    for constant in code.co_consts:
        yield from (x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))
