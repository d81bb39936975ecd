"""Which method answers a call of a layer; if it is not the one that was asked for, the certificate says why.

The same rules hold for `enable(model, method=...)`, for `"avow|method"` and for each head of a plan. They ask for
properties of the method:

| method          | few queries, after what is in a `CertifiedCache` | other calls                                 |
|-----------------|--------------------------------------------------|---------------------------------------------|
| `auto`          | the cache chooses                                | the planner chooses; exact, if queries are few |
| exact           | exact                                            | exact                                       |
| selects tokens  | the method                                       | exact: there is nothing to save             |
| any other       | exact if it is one query, else the method        | likewise; exact, if the method cannot answer |

A cache answers the last tokens that were appended to it if each of them sees all tokens up to itself. Exact attention
keeps the tolerance, too.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

from avow.attend import Attended, attend
from avow.core import with_reason
from avow.core.compose import compose, select
from avow.decode import cpu
from avow.errors import ParameterError, ToleranceUnreachable
from avow.integrations.transformers.cache import cache_of
from avow.integrations.transformers.call_view import CallView
from avow.integrations.transformers.enabling import Setting
from avow.integrations.transformers.graphs import note_uncached, sees_up_to_itself
from avow.methods import exact_method
from avow.nn import KeyValueCache

# With s keys m features or landmarks cost s·m, and exact attention costs n·s with n queries. So with fewer queries
# than m no such method pays, and weighing all methods takes longer than the answer. Selecting tokens pays for as long
# as queries share most of those that they select.
_FEW = 32

# Logits beside which sinks are written at a time.
_BIASES = 2**26

_SEE_RECORD = "avow.record() shows the method and the reason of every answer"


def attended(setting: Setting, query: Tensor, view: CallView) -> Attended:
    """The answer to one call of a layer, or of some of its heads, under a setting."""
    cache, uncached = _cache(query, view)
    if cache is None:
        note_uncached(uncached)
    kind, (chosen, reason) = setting.kind, _applicable(setting, query.shape[-2], uncached)
    continues = query.shape[-2] <= _FEW and query.shape[-2] < view.key.shape[-2]
    if reason and continues and kind is not None and kind.selects_tokens:
        _warn(
            f"method={setting.method!r} answers queries that see all tokens of a CertifiedCache. Exact attention "
            "answered others: with padding, from transformers' own caches, in cross-attention. "
            f"After enable(model, ...) generate() keeps a CertifiedCache; {_SEE_RECORD}"
        )
    selects = chosen is setting and continues and kind is not None and kind.selects_tokens
    if selects and query.device.type == "cpu" and (missing := cpu.not_installed()):
        _warn(f"method={setting.method!r} answers without compiled code, much slower than exact attention: {missing}")
    try:
        out, certificate = _answered(chosen, query, view, cache)
    except (ToleranceUnreachable, ParameterError) as error:
        # Settings are checked when they are made: what is wrong now depends on the inputs and on their sizes.
        if cache is not None or kind is None or kind.is_exact or chosen is not setting:
            raise
        reason = f"{error.name}={error.value} {error.rule}"
        _warn(f"method={setting.method!r} could not answer every call; exact attention answered others; {_SEE_RECORD}")
        out, certificate = _answered(setting.exactly, query, view, cache)
    return Attended(out, with_reason(certificate, reason) if reason else certificate)


def _applicable(setting: Setting, queries: int, uncached: str) -> tuple[Setting, str]:
    """The setting for so many queries, and why it is not the given one; `uncached` says why no cache answers."""
    kind, why = setting.kind, ""
    many = "one query" if queries == 1 else f"{queries:,} queries"
    if kind is None:
        if setting.exact:
            return setting.exactly, ""
        if uncached and queries <= _FEW:
            why = f"{many}, and {uncached}"
    elif kind.selects_tokens:
        if queries > _FEW:
            why = f"{setting} is for few queries, and these are {queries:,}"
        elif uncached:
            why = f"{setting} is for caches, and {uncached}"
    elif queries == 1 and not kind.is_exact:
        why = f"{setting} is for several queries at once, and this is one"
    return (setting.exactly, why) if why else (setting, "")


def _cache(query: Tensor, view: CallView) -> tuple[KeyValueCache | None, str]:
    """The cache that answers these queries, or None and why it does not."""
    queries, keys = query.shape[-2], view.key.shape[-2]
    if 1 < queries == keys:
        return None, "they are a whole text"
    cache = cache_of(view.key, view.value)
    if cache is None:
        return None, "the keys are not in a CertifiedCache"
    if not (view.mask is None if queries == 1 else queries <= _FEW and _sees_up_to_itself(queries, view.mask, cache)):
        return None, "a mask hides some tokens"
    if torch.is_grad_enabled() and query.requires_grad:
        return None, "answers from a cache have no gradient"
    return cache, ""


def _sees_up_to_itself(queries: int, mask: Tensor | None, cache: KeyValueCache) -> bool:
    """Whether each of the last tokens sees all tokens of the cache, up to itself."""
    if sees_up_to_itself(mask):
        return True
    if mask is None or mask.dtype != torch.bool or cache.window is not None:
        return False
    past = torch.ones(queries, cache.length, dtype=torch.bool, device=mask.device).tril(cache.length - queries)
    return bool((mask == past).all())


def _answered(setting: Setting, query: Tensor, view: CallView, cache: KeyValueCache | None) -> Attended:
    tol, rtol, confidence = setting.tol, setting.rtol, setting.confidence
    if cache is not None and not setting.parameters:
        try:
            return cache.attend(query, tol, confidence, view.scale, None, setting.method, rtol, view.sinks)
        except ParameterError as error:
            if view.sinks is None or error.name != "method":
                raise
            # Short caches select no tokens beside sinks.
            out, certificate = cache.attend(query, tol, None, view.scale, None, "exact", rtol, view.sinks)
            return Attended(out, with_reason(certificate, f"{setting.method} {error.rule}"))
    if view.sinks is not None:
        return _beside_sinks(setting, query, view)
    exact, own = setting.kind is not None and setting.kind.is_exact, cache_of(view.key, view.value)
    if own is not None and view.mask is not None and not view.causal and not query.requires_grad:
        if exact:
            return own.attend_masked(query, view.mask, tol, rtol, view.scale)
        if own.offload:
            out, certificate = own.attend_masked(query, view.mask, tol, rtol, view.scale)
            return Attended(out, with_reason(certificate, "keys and values are in host memory"))
    limits: dict[str, Any] = {"tol": tol, "rtol": rtol, "confidence": confidence}
    method = {"method": setting.method, **setting.parameters}
    return attend(query, view.key, view.value, **limits, **method, **view.options(query))


def _beside_sinks(setting: Setting, query: Tensor, view: CallView) -> Attended:
    """The exact answer beside sinks, to as many queries at a time as memory has biases for."""
    n, heads = query.shape[2], query.shape[1]
    many = max(1, _BIASES // (heads * (view.key.shape[2] + 1)))
    parts = []
    for first in range(0, n, many):
        rows, own = query[:, :, first : first + many], view.of_rows(first, min(first + many, n), n)
        limits: dict[str, Any] = {"tol": setting.tol, "rtol": setting.rtol, "method": exact_method().name}
        parts.append(attend(rows, own.key, own.value, **limits, **own.options(rows)))
    certificate = compose([part.certificate for part in parts], dim=2)
    why = "" if setting.kind is not None and setting.kind.is_exact else "other methods than caches have no sinks"
    out = torch.cat([part.out for part in parts], 2)
    return Attended(out, with_reason(certificate, why) if why else certificate)


def by_heads(settings: tuple[Setting, ...], query: Tensor, view: CallView) -> Attended:
    """The answers of all heads, each under its setting, and the certificate of the whole.

    Heads with the same setting attend together. If they differ, a cache is read once for all heads, exactly; so are
    keys that are in none, if each head's answer would be exact.
    """
    if len(settings) != query.shape[1]:
        rule = f"must be the layer's {query.shape[1]} heads"
        raise ParameterError("heads of the plan", len(settings), rule, "profile this model again")
    groups: dict[str, list[int]] = {}  # a setting cannot be hashed: its parameters are a dictionary
    for head, setting in enumerate(settings):
        groups.setdefault(repr(setting), []).append(head)
    if len(groups) == 1:
        return attended(settings[0], query, view)
    cache, uncached = _cache(query, view)
    chosen, whys = zip(*(_applicable(x, query.shape[-2], uncached) for x in settings), strict=True)
    if cache is not None or all(x.kind is not None and x.kind.is_exact for x in chosen):
        tol = min((x.tol for x in settings if x.tol is not None), default=None)
        rtol = min((x.rtol for x in settings if x.rtol is not None), default=None)
        out, certificate = attended(Setting(tol, rtol=rtol).exactly, query, view)
        shared = "heads with different settings share one cache"
        reason = shared if cache is not None else "; ".join(dict.fromkeys(filter(None, whys)))
        return Attended(out, with_reason(certificate, reason) if reason else certificate)
    parts = [_part(settings[heads[0]], heads, query, view) for heads in groups.values()]
    order = torch.tensor([head for heads in groups.values() for head in heads], device=query.device).argsort()
    certificate = select(compose([part.certificate for part in parts], dim=1), order, dim=1)
    reasons = dict.fromkeys(part.certificate.reason for part in parts if part.certificate.reason)
    certificate = dataclasses.replace(certificate, reason="; ".join(reasons))
    return Attended(torch.cat([part.out for part in parts], 1)[:, order], certificate)


def _part(setting: Setting, heads: list[int], query: Tensor, view: CallView) -> Attended:
    """The answers of some heads, in ascending order."""
    siblings = query.shape[1] // view.key.shape[1]
    key_heads = [head // siblings for head in heads]
    if len(set(key_heads)) * siblings == len(heads):
        key_heads = sorted(set(key_heads))  # all siblings of each: keys are shared as they were
    mine, keys = _place(heads), _place(key_heads)
    mask = view.mask[:, mine] if view.mask is not None and view.mask.shape[1] > 1 else view.mask
    sinks = None if view.sinks is None else view.sinks[mine]
    part = view._replace(key=view.key[:, keys], value=view.value[:, keys], mask=mask, sinks=sinks)
    return attended(setting, query[:, mine], part)


def _place(heads: list[int]) -> list[int] | slice:
    """What picks these heads: a slice if they are side by side, which copies nothing."""
    span = range(heads[0], heads[-1] + 1)
    return slice(span.start, span.stop) if heads == list(span) else heads


def _warn(message: str) -> None:
    """Say it once: Python shows a warning again only if its text or its place differs."""
    warnings.warn(message, UserWarning, stacklevel=1)
