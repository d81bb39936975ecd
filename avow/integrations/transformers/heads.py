"""A layer whose heads attend each in its own way: heads that are asked the same attend together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from avow.attend import Attended
from avow.core.compose import compose, select
from avow.errors import ParameterError, ToleranceUnreachable
from avow.integrations.transformers.cache import behind
from avow.integrations.transformers.masks import Seen
from avow.integrations.transformers.setting import Setting

Attend = Callable[[Setting, Tensor, Seen], Attended]


def by_heads(settings: tuple[Setting, ...], query: Tensor, view: Seen, attend: Attend) -> Attended:
    """The answers of all heads, each as its setting says, and the certificate of the whole."""
    if len(settings) != query.shape[1]:
        rule = f"must be the layer's {query.shape[1]} heads"
        raise ParameterError("heads of the plan", len(settings), rule, "profile this model again")
    groups = _alike(settings)
    if query.shape[-2] == 1 and view.mask is None and behind(view.key, view.value) is not None:
        return attend(_together(settings), query, view)
    if len(groups) == 1:
        return _kept(settings[0], query, view, attend)
    parts = [_part(settings[heads[0]], heads, query, view, attend) for heads in groups]
    order = torch.tensor([head for heads in groups for head in heads], device=query.device).argsort()
    certificate = select(compose([part.certificate for part in parts], dim=1), order, dim=1)
    return Attended(torch.cat([part.out for part in parts], 1)[:, order], certificate)


def _together(settings: tuple[Setting, ...]) -> Setting:
    """What all heads are asked when they go on from a cache, in one reading of it.

    A cache looks at its sketch for all heads at once. As soon as one head reads everything, another look and gathering
    tokens for the others costs more than they save; so do methods that are for whole texts. Whether the sketch is
    worth a look at this length, on this device, the cache decides.
    """
    first = settings[0]
    if not first.exact and first.method == "sparse" and all(setting == first for setting in settings):
        return Setting(first.tol, "auto", first.confidence, rtol=first.rtol)
    tol, rtol = (min((x for x in limits if x is not None), default=None) for limits in _limits(settings))
    return Setting(tol, "exact", rtol=rtol)


def _limits(settings: tuple[Setting, ...]) -> tuple[list[float | None], list[float | None]]:
    return [setting.tol for setting in settings], [setting.rtol for setting in settings]


def _part(setting: Setting, heads: list[int], query: Tensor, view: Seen, attend: Attend) -> Attended:
    """The answers of some heads."""
    own = [head // (query.shape[1] // view.key.shape[1]) for head in heads]
    mask = view.mask[:, heads] if view.mask is not None and view.mask.shape[1] > 1 else view.mask
    part = Seen(view.key[:, own], view.value[:, own], mask, view.causal)
    return _kept(setting, query[:, heads], part, attend)


def _alike(settings: tuple[Setting, ...]) -> list[list[int]]:
    """The heads that are asked the same, together."""
    groups: list[list[int]] = []
    for head, setting in enumerate(settings):
        for heads in groups:
            if settings[heads[0]] == setting:
                heads.append(head)
                break
        else:
            groups.append([head])
    return groups


def _kept(setting: Setting, query: Tensor, view: Seen, attend: Attend) -> Attended:
    """The answer as the setting says; as exactly as its tolerance needs where its method cannot prove that."""
    if setting.method == "sparse" and not setting.exact and 1 < query.shape[-2] == view.key.shape[-2]:
        # A text that is read at once: over all its rows the choice of tokens costs more than reading them all.
        setting = Setting(setting.tol, confidence=setting.confidence, rtol=setting.rtol)
    try:
        return attend(setting, query, view)
    except ToleranceUnreachable as error:
        if setting.method in ("auto", "exact"):
            raise
        out, certificate = attend(Setting(setting.tol, "exact", rtol=setting.rtol), query, view)
        reason = f"{setting.method} could prove only {error.best:.1e}"
        return Attended(out, dataclasses.replace(certificate, reason=reason))
