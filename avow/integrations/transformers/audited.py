"""What shows the attention of transformers to `avow.auditing`: its attention functions and its caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from avow.attend import as_autocast
from avow.integrations import attention_audit as audit
from avow.integrations.attention_audit import Call
from avow.integrations.transformers.enabling import asks_interface, layer_name

# Arguments by which a model asks for more than a softmax over the keys that are passed.
_BEYOND = {"indices", "block_indices", "cache"}
_REARRANGE = ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


def asking(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of these modules that look their attention function up in transformers' table."""
    return {name: module for name, module in modules.items() if asks_interface(type(module))}


@contextlib.contextmanager
def hooks() -> Iterator[None]:
    """Attention functions and caches of transformers shown to everybody who watches, as long as the block runs."""
    look_up, update = AttentionInterface.get_interface, Cache.update

    @functools.wraps(look_up)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        function = look_up(self, attn_implementation, default)
        return functools.partial(_attention, str(attn_implementation), function) if audit.watching() else function

    @functools.wraps(update)
    def updated(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **options: Any) -> Any:
        if not audit.watching():
            return update(self, key_states, value_states, layer_idx, *more, **options)
        versions = audit.versions_of(key_states, value_states)
        keys, values = update(self, key_states, value_states, layer_idx, *more, **options)
        audit.saw_cache(self, layer_idx, key_states, value_states, versions, keys)
        return keys, values

    def rearranged(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(change)
        def changed(self: Any, *arguments: Any, **options: Any) -> Any:
            if audit.watching():
                audit.saw_rearranged(self, name)
            return change(self, *arguments, **options)

        return changed

    others = {name: vars(Cache)[name] for name in _REARRANGE if name in vars(Cache)}
    AttentionInterface.get_interface, Cache.update = get_interface, updated
    for name, change in others.items():
        setattr(Cache, name, rearranged(name, change))
    try:
        yield
    finally:
        AttentionInterface.get_interface, Cache.update = look_up, update
        for name, change in others.items():
            setattr(Cache, name, change)


def _attention(
    implementation: str,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *more: Any,
    **options: Any,
) -> Any:
    """What an attention function of transformers gives, shown to everybody who watches."""
    if not audit.watching():
        return function(module, query, key, value, attention_mask, *more, **options)
    result = audit.computed(function, module, query, key, value, attention_mask, *more, **options)
    name = next((known for one in audit.watchers() if (known := one.names.get(id(module)))), "") or layer_name(module)
    asked = [word for word in sorted(options.keys() & _BEYOND) if options[word] is not None]
    asked += ["dropout"] * bool(options.get("dropout"))
    if asked or more:
        audit.missed(f"{name}: calls with {', '.join(asked) or 'arguments without names'}")
        return result
    out = result[0]
    if tuple(out.shape[:3]) != (query.shape[0], query.shape[2], query.shape[1]):
        audit.missed(f"{name}: answers of an unknown shape by {implementation}")
        return result
    call = functools.partial(_call, implementation, module, query, key, value, attention_mask, options)
    kernel = implementation if implementation != "None" else "eager"
    audit.saw(name, kernel, call, query, key, out.transpose(1, 2))
    return result


def _call(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    options: Mapping[str, Any],
) -> Call:
    """The call as transformers means it: masks of SDPA, of FlexAttention, or of FlashAttention."""
    q, k, v = as_autocast(query, key, value)
    n, s, scale = q.shape[-2], k.shape[-2], options.get("scaling")
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    visible: audit.Visible | None = None
    if "flash" in implementation:
        padding, window = mask, options.get("sliding_window")

        def visible(batch: Tensor, head: Tensor, row: Tensor, other: Tensor) -> Tensor:
            seen = torch.ones_like(row + other, dtype=torch.bool)
            if causal:  # the last row is beside the last key
                seen = seen & (other <= row + s - n)
            if window is not None:
                seen = seen & (other > row + s - n - window)
            return seen if padding is None else seen & padding[batch, :s].bool()

        mask = None
    elif mask is not None and not isinstance(mask, Tensor):
        visible, mask = audit.over_pairs(mask.mask_mod), None
    elif mask is None and causal and n > 1:
        visible = audit.past
    bias, softcap = options.get("position_bias"), options.get("softcap")

    def score(logit: Tensor, batch: Tensor, head: Tensor, row: Tensor, other: Tensor) -> Tensor:
        if softcap is not None:
            logit = softcap * torch.tanh(logit / softcap)
        if bias is None:
            return logit
        own = bias.detach().expand(q.shape[0], q.shape[1], n, bias.shape[-1])[batch, head[:, 0], row[:, 0], :s]
        return logit + own.double()

    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    changed = None if bias is None and softcap is None else score
    # Only transformers' plain formula holds logits in the inputs' type.
    return Call(q, k, v, scale, mask, visible, changed, options.get("s_aux"), implementation in ("eager", "None"))
