"""The attention layers of a model: which there are, which can be replaced, and what each was asked."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from avow.errors import ParameterError
from avow.integrations.transformers.setting import Setting

_KEPT_AS = "_avow_layer"

# What layers keep of the kinds of attention that are no softmax attention under a mask.
_UNLIKE = {
    "attn_logit_softcapping": "bends its logits by soft-capping",
    "sinks": "adds sinks to its softmax",
}
# What classes pass to their attention function, if it is not one of transformers' own, instead of a mask.
_CHOICES = {"indices", "block_indices"}


@dataclass(frozen=True)
class Layer:
    """One attention layer: its name in the model and what is asked of it."""

    name: str
    setting: Setting
    heads: tuple[Setting, ...] = ()
    """What is asked of each head, where a plan says so; that goes before `setting`."""

    @property
    def tolerant(self) -> bool:
        """Whether any of its heads may answer with an error."""
        return any(not setting.exact for setting in self.heads or (self.setting,))


def layer_of(module: nn.Module, named: Setting) -> Layer:
    """What `enable` made of a module, or what the implementation's name asks of any."""
    found = getattr(module, _KEPT_AS, None)
    if isinstance(found, Layer):
        return found
    index = getattr(module, "layer_idx", None)
    return Layer(type(module).__name__ + ("" if index is None else f" {index}"), named)


def mark(module: nn.Module, layer: Layer) -> None:
    """Have the module attend as `layer` says."""
    setattr(module, _KEPT_AS, layer)


def unmark(module: nn.Module) -> None:
    """Forget what was asked of the module."""
    vars(module).pop(_KEPT_AS, None)


def layers(model: nn.Module) -> list[Layer]:
    """What is asked of each layer of a model in which avow is enabled."""
    return [found for module in model.modules() if isinstance(found := vars(module).get(_KEPT_AS), Layer)]


def replaceable(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers by name. Raises, and names the layer, where one cannot be replaced."""
    found = {name: module for name, module in model.named_modules() if _asks_interface(type(module))}
    for name, module in _others(model):
        rule = f"({type(module).__name__}) computes attention by itself, not through transformers' AttentionInterface"
        raise ParameterError("model", name, rule, "use a model whose attention does")
    if not found:
        rule = "has no attention layer that goes through transformers' AttentionInterface"
        raise ParameterError("model", type(model).__name__, rule, "use a model that has one")
    for name, module in found.items():
        for attribute, what in _UNLIKE.items():
            if getattr(module, attribute, None) is not None:
                rule = f"({type(module).__name__}) {what}, which is not softmax attention"
                raise ParameterError("model", name, rule, "keep attn_implementation='eager' for it")
        if any(_CHOICES.intersection(_constants(code)) for code in _methods(type(module))):
            rule = f"({type(module).__name__}) chooses keys by an indexer of its own, and does not say so in its mask"
            raise ParameterError("model", name, rule, "keep attn_implementation='sdpa' for it")
    return found


def pretrained(model: Any) -> PreTrainedModel:
    """The model of transformers: itself, or the one inside a wrapper such as peft's."""
    unwrap = getattr(model, "get_base_model", None)
    inner = unwrap() if callable(unwrap) else model
    if not isinstance(inner, PreTrainedModel):
        rule, remedy = "must be a transformers.PreTrainedModel, or wrap one as peft does", "pass the model inside"
        raise ParameterError("model", type(model).__name__, rule, remedy)
    return inner


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Attention that is no part of, and has no part in, a layer that asks the interface."""
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or not any(True for _ in module.parameters()):
            continue
        asks = any(_asks_interface(type(part)) for part in module.modules())
        inside = any(_asks_interface(type(model.get_submodule(whole))) for whole in _wholes(name))
        if not asks and not inside:
            yield name, module


def _wholes(name: str) -> Iterator[str]:
    """The names of the modules around one."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _asks_interface(kind: type) -> bool:
    """Whether a class looks its attention function up where transformers keeps them."""
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in _methods(kind))


def _methods(kind: type) -> Iterator[CodeType]:
    """The code of a class's own methods, those of torch's and transformers' base classes left out."""
    for owner in kind.__mro__:
        if owner in (nn.Module, PreTrainedModel):
            break
        for thing in vars(owner).values():
            code = getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None
            if code is not None:
                yield code


def _constants(code: CodeType) -> Iterator[str]:
    """The names of keyword arguments, and other text, in a function's calls."""
    for constant in code.co_consts:
        yield from (x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))
