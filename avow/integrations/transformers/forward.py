"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.utils import output_capturing

from avow.attend import Attended, attend
from avow.core.record import note
from avow.errors import AvowError, ParameterError
from avow.integrations.transformers.cache import behind
from avow.integrations.transformers.heads import by_heads
from avow.integrations.transformers.hooks import show
from avow.integrations.transformers.layers import Layer, layer_of
from avow.integrations.transformers.masks import Seen, seen
from avow.integrations.transformers.setting import Setting

# What a model may ask of an attention function beside softmax attention under a mask, and why it is refused.
_REFUSED = {
    "softcap": ("bends the logits, which is not softmax attention", "keep attn_implementation='eager'"),
    "s_aux": ("adds sinks to the softmax, which is not softmax attention", "keep attn_implementation='eager'"),
    "indices": ("chooses keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "block_indices": ("chooses blocks of keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "cache": ("is a paged cache, which only transformers' own functions read", "use generate() without paging"),
}


def attention_forward(
    named: Setting,
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
    """The layer's answer, with no attention weights; its certificate goes to the records that are being made.

    `named` is what the implementation's name asks for; what `enable` asked of this layer goes before it.
    """
    layer = layer_of(module, named)
    try:
        _refuse(dropout, more)
        own = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        query, key, value = _cast(query, key, value)
        view = seen(query, key, value, attention_mask, bool(own), position_bias)
        out, certificate = _answered(layer, query, view, scaling)
    except AvowError as error:
        error.add_note(f"in {layer.name}")
        raise
    note(layer.name, certificate)
    show(layer.name, query, view, scaling, out, certificate)
    return out.transpose(1, 2).contiguous(), None  # (b, n, h, e)


def _cast(*given: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the tensors as SDPA would take them: models then pass several types at once."""
    device = given[0].device.type
    if not torch.is_autocast_enabled(device):
        return given
    narrow = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(narrow) for x in given)  # autocast leaves float64 as it is


def _answered(layer: Layer, query: Tensor, view: Seen, scaling: float | None) -> Attended:
    if not layer.heads:
        return _attended(layer.setting, query, view, scaling)
    return by_heads(layer.heads, query, view, lambda setting, q, seen: _attended(setting, q, seen, scaling))


def _attended(setting: Setting, query: Tensor, view: Seen, scaling: float | None) -> Attended:
    cache = behind(view.key, view.value)
    learning = torch.is_grad_enabled() and query.requires_grad
    if cache is not None and query.shape[-2] == 1 and view.mask is None and setting.asks_cache and not learning:
        return cache.attend(query, setting.tol, setting.confidence, scaling, method=setting.method, rtol=setting.rtol)
    return attend(
        query,
        view.key,
        view.value,
        tol=setting.tol,
        rtol=setting.rtol,
        method=setting.method,
        mask=view.mask,
        causal=view.causal,
        scale=scaling,
        enable_gqa=query.shape[1] != view.key.shape[1],
        confidence=setting.confidence,
        **setting.parameters,
    )


def _refuse(dropout: float, more: dict[str, Any]) -> None:
    """Raise where more is asked than softmax attention under a mask."""
    if dropout > 0:
        rule = "would drop attention weights at random, and no certificate covers that"
        raise ParameterError("dropout", dropout, rule, "set the model's attention dropout to 0, or call model.eval()")
    if _weights_wanted(more):
        rule = "needs every attention weight, and avow does not form them"
        raise ParameterError("output_attentions", True, rule, "use attn_implementation='eager'")
    for name, (rule, remedy) in _REFUSED.items():
        value = more.get(name)
        if value is not None:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ParameterError(name, shown, rule, remedy)


def _weights_wanted(more: dict[str, Any]) -> bool:
    """Whether the model was asked for attention weights: most say so here, some leave it to transformers' hooks.

    The hooks pass over a layer that has none, so that without a word the caller would get an empty tuple.
    """
    collected = output_capturing._active_collector.get()
    return bool(more.get("output_attentions")) or any(name.endswith("attentions") for name in collected or ())
