"""The attention function that transformers calls in every layer: masks, heads with different settings, watchers.

A decoding step: `CertifiedLayer.update` appends to the layer's `KeyValueCache` and marks the keys it returns.
`attention_forward` finds the layer's setting (`layer_of`), drops a mask that hides nothing (`simplified_call`), finds
the cache of these keys (`cache_of`), and asks that cache, or `avow.attend` if there is none. The certificate goes to
the active records.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import output_capturing

from avow.attend import Attended, attend
from avow.core import Certificate, Problem
from avow.core.compose import compose, select
from avow.core.record import note
from avow.errors import AvowError, DtypeError, ParameterError, ShapeError, ToleranceUnreachable
from avow.integrations.transformers.cache import cache_of
from avow.integrations.transformers.enabling import NAME, Setting, layer_of, softmax_methods

# Arguments by which a model asks for more than softmax attention under a mask: the rule and the remedy.
_REFUSED = {
    "softcap": ("bends the logits, which is not softmax attention", "keep attn_implementation='eager'"),
    "s_aux": ("adds sinks to the softmax, which is not softmax attention", "keep attn_implementation='eager'"),
    "indices": ("chooses keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "block_indices": ("chooses blocks of keys by an index of the model's own", "keep attn_implementation='sdpa'"),
    "cache": ("is a paged cache, which only transformers' own functions read", "use generate() without paging"),
}

# Called with a layer's name, its problem, its answer (b, h, n, e) and the certificate.
Watcher = Callable[[str, Problem, Tensor, Certificate], None]

_watchers: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar("avow_watchers", default=())


def register() -> None:
    """Register `attn_implementation="avow"`, which is exact, and `"avow|method"` for every method.

    A name without a mask function would get no mask at all: padding would be attended to and windows would be open.
    """
    named = {f"{NAME}|{kind.name}": Setting(method=kind.name) for kind in softmax_methods()}
    for name, setting in {NAME: Setting(), **named}.items():
        AttentionInterface.register(name, functools.partial(attention_forward, setting))
        # The masks of SDPA: boolean, and None if causality alone, or nothing, hides a key.
        AttentionMaskInterface.register(name, sdpa_mask)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every answer of every layer of models in which avow is enabled, as long as the block runs."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


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
        if torch.is_autocast_enabled(device := query.device.type):
            # As SDPA would take them: models then pass several types at once. Autocast leaves float64 as it is.
            narrow = torch.get_autocast_dtype(device)
            query, key, value = (x if x.dtype == torch.float64 else x.to(narrow) for x in (query, key, value))
        view = simplified_call(query, key, value, attention_mask, bool(causal), position_bias, scaling)
        if layer.heads:
            out, certificate = by_heads(layer.heads, query, view)
        else:
            out, certificate = _attended(layer.setting, query, view)
    except AvowError as error:
        error.add_note(f"in {layer.name}")
        raise
    note(layer.name, certificate)
    for watcher in _watchers.get():
        problem = Problem.of(query, view.key, view.value, **_options(query, view)).detached()
        watcher(layer.name, problem, out.detach(), certificate)
    return out.transpose(1, 2).contiguous(), None  # (b, n, h, e)


def _attended(setting: Setting, query: Tensor, view: CallView) -> Attended:
    cache = cache_of(view.key, view.value)
    learning = torch.is_grad_enabled() and query.requires_grad
    if cache is not None and query.shape[-2] == 1 and view.mask is None and setting.asks_cache and not learning:
        return cache.attend(query, setting.tol, setting.confidence, view.scale, None, setting.method, setting.rtol)
    limits: dict[str, Any] = {"tol": setting.tol, "rtol": setting.rtol, "confidence": setting.confidence}
    method = {"method": setting.method, **setting.parameters}
    return attend(query, view.key, view.value, **limits, **method, **_options(query, view))


def _options(query: Tensor, view: CallView) -> dict[str, Any]:
    grouped = query.shape[1] != view.key.shape[1]
    return {"mask": view.mask, "causal": view.causal, "scale": view.scale, "enable_gqa": grouped}


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


class CallView(NamedTuple):
    """The mask and the scale that `avow.attend` takes, and the keys and values that can be seen at all."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None = None


def simplified_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    causal: bool,
    position_bias: Tensor | None = None,
    scale: float | None = None,
) -> CallView:
    """The simplest mask that means the same as transformers' own, so that more methods, and caches, support it.

    Without a mask, `causal` rows see the keys up to their own place, counted from the first; a single row sees all.
    """
    n, s = query.shape[-2], key.shape[-2]
    checked = _checked(mask, query, key)
    causal = causal and checked is None and n > 1
    if causal and s > n:
        # Room that a static cache keeps for tokens to come.
        key, value = key[:, :, :n], value[:, :, :n]
        position_bias = None if position_bias is None else position_bias[..., :n]
    if checked is not None:
        checked = _hidden_as_infinite(checked)
        if checked.dtype == torch.bool:
            checked, causal = _simplified(checked, n, s)
    if position_bias is not None:
        bias = position_bias
        if checked is not None:
            boolean = checked.dtype == torch.bool
            bias = torch.where(checked, bias, float("-inf")) if boolean else bias + checked
        checked = _hidden_as_infinite(bias)
    return CallView(key, value, checked, causal, scale)


def _checked(mask: object, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        rule = "is not a tensor, and no other kind of mask is understood"
        raise DtypeError("attention_mask", type(mask).__name__, rule, "pass a mask of two or four axes to the model")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        rule = "must be bool or a float type"
        raise DtypeError("attention_mask.dtype", mask.dtype, rule, "use mask.bool(): True means visible")
    full = (*query.shape[:-1], key.shape[-2])
    if mask.ndim != 4 or any(have not in (1, want) for have, want in zip(mask.shape, full, strict=True)):
        rule = f"must broadcast to (batch, heads, queries, keys) = {full}"
        raise ShapeError("attention_mask.shape", tuple(mask.shape), rule, "pass the model a mask of (batch, keys)")
    return mask


def _hidden_as_infinite(mask: Tensor) -> Tensor:
    """A mask of numbers with −inf where a key is hidden; one that only hides becomes boolean.

    Many models write the smallest number of the type where they mean −inf, and add a bias to it. A row that sees
    nothing answers zero, as SDPA has it.
    """
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not mask.requires_grad and bool((hidden | (mask == 0)).all()):
        return ~hidden
    return mask.masked_fill(hidden, float("-inf"))


def _simplified(mask: Tensor, n: int, s: int) -> tuple[Tensor | None, bool]:
    """The same mask without what causality says, None if nothing is hidden otherwise; and whether it is causal."""
    if n == 1:
        return (None, False) if bool(mask.all()) else (mask, False)
    keys = mask[..., -1:, :]  # (b, 1, 1, s)
    all_keys = bool(keys.all())
    if bool((mask == keys).all()):
        return (None if all_keys else keys), False
    if n == s and mask.shape[-2] == n:
        past = torch.ones(n, s, dtype=torch.bool, device=mask.device).tril()
        if bool((mask == (keys & past)).all()):
            return (None if all_keys else keys), True
    return mask, False


def by_heads(settings: tuple[Setting, ...], query: Tensor, view: CallView) -> Attended:
    """The answers of all heads, each under its setting, and the certificate of the whole.

    Heads with the same setting attend together.
    """
    if len(settings) != query.shape[1]:
        rule = f"must be the layer's {query.shape[1]} heads"
        raise ParameterError("heads of the plan", len(settings), rule, "profile this model again")
    if query.shape[-2] == 1 and view.mask is None and cache_of(view.key, view.value) is not None:
        return _attended(_together(settings), query, view)
    groups: dict[str, list[int]] = {}  # a setting cannot be hashed: its parameters are a dictionary
    for head, setting in enumerate(settings):
        groups.setdefault(repr(setting), []).append(head)
    if len(groups) == 1:
        return _within_tolerance(settings[0], query, view)
    parts = [_part(settings[heads[0]], heads, query, view) for heads in groups.values()]
    order = torch.tensor([head for heads in groups.values() for head in heads], device=query.device).argsort()
    certificate = select(compose([part.certificate for part in parts], dim=1), order, dim=1)
    return Attended(torch.cat([part.out for part in parts], 1)[:, order], certificate)


def _together(settings: tuple[Setting, ...]) -> Setting:
    """One setting for all heads when they continue from a cache, which is then read once.

    A cache uses its sketch for all heads at once. As soon as one head reads everything, using the sketch and gathering
    tokens for the others costs more than it saves; so do methods that are for whole texts. Whether the sketch is worth
    using at this length, on this device, the cache decides.
    """
    first = settings[0]
    if not first.exact and first.method == "sparse" and all(setting == first for setting in settings):
        return Setting(first.tol, "auto", first.confidence, rtol=first.rtol)
    tol = min((x.tol for x in settings if x.tol is not None), default=None)
    rtol = min((x.rtol for x in settings if x.rtol is not None), default=None)
    return Setting(tol, "exact", rtol=rtol)


def _part(setting: Setting, heads: list[int], query: Tensor, view: CallView) -> Attended:
    """The answers of some heads."""
    key_heads = [head // (query.shape[1] // view.key.shape[1]) for head in heads]
    mask = view.mask[:, heads] if view.mask is not None and view.mask.shape[1] > 1 else view.mask
    part = view._replace(key=view.key[:, key_heads], value=view.value[:, key_heads], mask=mask)
    return _within_tolerance(setting, query[:, heads], part)


def _within_tolerance(setting: Setting, query: Tensor, view: CallView) -> Attended:
    """The answer under a setting; by exact attention if its method cannot prove its tolerance."""
    if setting.method == "sparse" and not setting.exact and 1 < query.shape[-2] == view.key.shape[-2]:
        # A text that is read at once: over all its rows selecting tokens costs more than reading them all.
        setting = Setting(setting.tol, confidence=setting.confidence, rtol=setting.rtol)
    try:
        return _attended(setting, query, view)
    except ToleranceUnreachable as error:
        if setting.method in ("auto", "exact"):
            raise
        out, certificate = _attended(Setting(setting.tol, "exact", rtol=setting.rtol), query, view)
        reason = f"{setting.method} could prove only {error.best:.1e}"
        return Attended(out, dataclasses.replace(certificate, reason=reason))
