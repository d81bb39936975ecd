"""One call of a layer as `avow.attend` takes it: transformers' masks and biases in their simplest form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.errors import DtypeError, ShapeError


class CallView(NamedTuple):
    """The mask and the scale that `avow.attend` takes, and the keys and values that can be seen at all.

    With `sinks`, logits of query heads that have no value, which caches take.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None = None
    sinks: Tensor | None = None

    def options(self, query: Tensor) -> dict[str, Any]:
        """What `avow.attend` is given beside queries, keys and values."""
        grouped = query.shape[1] != self.key.shape[1]
        return {"mask": self.mask, "causal": self.causal, "scale": self.scale, "enable_gqa": grouped}

    def of_rows(self, first: int, end: int, queries: int) -> CallView:
        """What some of these queries see, their sinks as one more key and value of zeros, beside a bias.

        Args:
            first: the first of the queries.
            end: the one behind the last of them.
            queries: how many queries there are in all.
        """
        assert self.sinks is not None
        key, value = (torch.cat([torch.zeros_like(x[:, :, :1]), x], 2) for x in (self.key, self.value))
        s, rows = self.key.shape[2], self.mask
        if rows is not None and rows.shape[2] == queries:
            rows = rows[:, :, first:end]
        batch = 1 if rows is None else rows.shape[0]
        bias = self.sinks.double().new_zeros(batch, len(self.sinks), end - first, s + 1)
        if self.causal:
            own, past = torch.arange(first, end, device=key.device), torch.arange(s, device=key.device)
            bias[..., 1:].masked_fill_(past > own[:, None], float("-inf"))
        if rows is not None:
            hidden = ~rows if rows.dtype == torch.bool else rows == float("-inf")
            bias[..., 1:] += 0.0 if rows.dtype == torch.bool else rows.masked_fill(hidden, 0.0)
            bias[..., 1:].masked_fill_(hidden, float("-inf"))
        bias[..., 0] = self.sinks.double()[:, None]
        return CallView(key, value, bias, False, self.scale)


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
        if n == 1 and checked is not None and checked.dtype == torch.bool and position_bias is None:
            # Room that a static cache keeps for tokens to come is not read.
            seen = checked.flatten(0, -2).any(0).nonzero()
            if len(seen) and (end := int(seen[-1]) + 1) < s:
                key, value, checked = key[:, :, :end], value[:, :, :end], checked[..., :end]
                checked = None if bool(checked.all()) else checked
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
