"""The attention function that transformers calls in every layer.

A decoding step: `CertifiedLayer.update` appends to the layer's `KeyValueCache` and marks the keys it returns.
`attention_forward` finds the layer's setting (`layer_of`) and drops a mask that hides nothing (`simplified_call`);
`routing` finds the cache of these keys (`cache_of`), and asks that cache, or `avow.attend` if there is none. The
certificate goes to the active records.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import output_capturing

from avow.attend import as_autocast
from avow.core import Problem
from avow.core.record import note
from avow.errors import AvowError, ParameterError
from avow.integrations.transformers.call_view import CallView, simplified_call
from avow.integrations.transformers.enabling import NAME, Setting, layer_of, softmax_methods
from avow.integrations.transformers.graphs import sees_up_to_itself
from avow.integrations.transformers.observers import answerer, watchers
from avow.integrations.transformers.routing import attended, by_heads
from avow.integrations.transformers.verified import drafting

# Arguments by which a model asks for more than softmax attention under a mask: the rule and the remedy.
_REFUSED = {
    "softcap": ("bends the logits, which is not softmax attention", "keep attn_implementation='eager'"),
    "indices": ("chooses keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "block_indices": ("chooses blocks of keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "cache": ("is a paged cache, which only transformers' own functions read", "use generate() without paging"),
}


def register() -> None:
    """Register `attn_implementation="avow"`, which is exact, and `"avow|method"` for every method.

    A name without a mask function would get no mask at all: padding would be attended to and windows would be open.
    """
    named = {f"{NAME}|{kind.name}": Setting(method=kind.name) for kind in softmax_methods()}
    for name, setting in {NAME: Setting(), **named}.items():
        AttentionInterface.register(name, functools.partial(attention_forward, setting))
        # The masks of SDPA: boolean, and None if causality alone, or nothing, hides a key.
        AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    default: Setting,
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g s d"],
    value: Float[Tensor, "b g s e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Float[Tensor, "b n h e"], None]:
    """The layer's answer, with no attention weights; its certificate goes to the active records.

    `default` is the setting of the implementation's name; a setting that `enable` gave this layer takes precedence.
    """
    layer = layer_of(module, default)
    try:
        _refuse(dropout, more)
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        query, key, value = as_autocast(query, key, value)  # under autocast models pass several types at once
        if sees_up_to_itself(attention_mask) and position_bias is None:
            view = CallView(key, value, attention_mask if query.shape[2] > 1 else None, False, scaling)
        else:
            view = simplified_call(query, key, value, attention_mask, bool(causal), position_bias, scaling)
        view = view._replace(sinks=_sinks(more.get("s_aux"), query))
        if (instead := answerer.get()) is not None:
            out, certificate = instead(query, view)
        elif (drafts := drafting()) is not None and layer.drafts is not None:
            out, certificate = attended(layer.drafts, query, view)
            drafts.append(certificate)
        elif layer.heads:
            out, certificate = by_heads(layer.heads, query, view)
        else:
            out, certificate = attended(layer.setting, query, view)
    except AvowError as error:
        error.add_note(f"in {layer.name}")
        raise
    note(layer.name, certificate)
    for watcher in watchers.get():
        problem = Problem.of(query, view.key, view.value, **view.options(query)).detached()
        watcher(layer.name, problem, out.detach(), certificate)
    return out.transpose(1, 2).contiguous(), None  # (b, n, h, e)


def _sinks(given: Tensor | None, query: Tensor) -> Tensor | None:
    """Logits of the query heads that have no value, (h,), if a model adds such to its softmax."""
    if given is None:
        return None
    heads, rule, remedy = query.shape[1], "", "keep attn_implementation='eager'"
    if given.numel() != heads:
        rule = f"must be one sink for each of the {heads} heads"
    elif watchers.get() or answerer.get() is not None:
        rule = "adds sinks to the softmax, and answers beside sinks are not looked at"
    elif given.requires_grad and torch.is_grad_enabled():
        rule, remedy = "would get no gradient", "run the model under torch.no_grad()"
    if rule:
        raise ParameterError("s_aux", tuple(given.shape), rule, remedy)
    return given.detach().flatten()


def _refuse(dropout: float, more: dict[str, Any]) -> None:
    """Raise if the model asks for more than softmax attention under a mask."""
    if dropout > 0:
        rule = "would drop attention weights at random, and no certificate covers that"
        raise ParameterError("dropout", dropout, rule, "set the model's attention dropout to 0, or call model.eval()")
    # Most models ask for weights here, some leave it to transformers' hooks. The hooks pass over a layer that has
    # none, so that without an error the caller would get an empty tuple.
    collected = output_capturing._active_collector.get() or ()
    if more.get("output_attentions") or any(name.endswith("attentions") for name in collected):
        rule = "needs every attention weight, and avow does not form them"
        raise ParameterError("output_attentions", True, rule, "use attn_implementation='eager'")
    for name, (rule, remedy) in _REFUSED.items():
        value = more.get(name)
        if value is not None:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ParameterError(name, shown, rule, remedy)
