"""The attention layers of a model: which there are, which can be replaced, and what each was asked."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

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
    return found


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
    for owner in kind.__mro__:
        if owner in (nn.Module, PreTrainedModel):
            break
        for thing in vars(owner).values():
            code = getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False
