"""Which keys a layer's rows may see, from the mask that transformers made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from avow.errors import DtypeError, ShapeError


class Seen(NamedTuple):
    """What `avow.attend` takes as its mask, and the keys and values that can be seen at all."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool


def seen(
    query: Tensor, key: Tensor, value: Tensor, mask: object, causal: bool, position_bias: Tensor | None = None
) -> Seen:
    """The mask in the plainest words that say the same, so that more methods, and caches, understand it.

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
            checked, causal = _plain(checked, n, s)
    if position_bias is not None:
        checked = _hidden_as_infinite(_biased(position_bias, checked))
    return Seen(key, value, checked, causal)


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


def _plain(mask: Tensor, n: int, s: int) -> tuple[Tensor | None, bool]:
    """The same as nothing, as causality, as hidden keys, or as both, where it is."""
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


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The position bias where a key may be seen, added to what the mask adds."""
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask
