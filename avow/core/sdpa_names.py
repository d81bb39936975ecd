"""The names that `torch.nn.functional.scaled_dot_product_attention` has for its options, beside avow's own.

`attn_mask` is `mask`, `is_causal` is `causal`, and `dropout_p` must be 0: nothing can be promised of attention some of
whose weights are dropped at random.
"""

from __future__ import annotations

from torch import Tensor

from avow.errors import ParameterError, value_text
from avow.parameters import as_float


def mask_and_causal(
    mask: Tensor | None, causal: bool, attn_mask: Tensor | None, is_causal: bool | None, dropout_p: float = 0.0
) -> tuple[Tensor | None, bool]:
    """The mask and whether rows see only their past, under whichever names these were given."""
    if as_float(dropout_p) != 0:
        rule = "must be 0: dropped attention weights are random, and no certificate covers them"
        remedy = "leave it out; torch.nn.functional.dropout may be applied to the output"
        raise ParameterError("dropout_p", value_text(dropout_p), rule, remedy)
    if attn_mask is not None:
        if mask is not None and mask is not attn_mask:
            raise _contradiction("mask", mask, "attn_mask", attn_mask)
        mask = attn_mask
    if is_causal is not None:
        if not isinstance(is_causal, bool):
            rule, remedy = "must be True or False", "pass other masks with attn_mask="
            raise ParameterError("is_causal", value_text(is_causal), rule, remedy)
        # False is what `causal` is if nobody gave it.
        if causal and not is_causal:
            raise _contradiction("causal", causal, "is_causal", is_causal)
        causal = is_causal
    return mask, causal


def _contradiction(name: str, value: object, other: str, theirs: object) -> ParameterError:
    rule = f"and {other}={value_text(theirs)} are two names of one argument, and differ"
    return ParameterError(name, value_text(value), rule, f"pass one of them; {other} is PyTorch's name")
