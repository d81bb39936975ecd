"""The names under which transformers finds avow: attention functions and, just as needed, their masks."""

from __future__ import annotations

import functools

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from avow.integrations.transformers.forward import attention_forward
from avow.integrations.transformers.setting import Setting, softmax_methods

NAME = "avow"


def register() -> None:
    """Have transformers know `attn_implementation="avow"`, which is exact, and `"avow|method"` for every method.

    A name without a mask function would get no mask at all: padding would be attended to and windows would be open.
    """
    for name, setting in _settings().items():
        AttentionInterface.register(name, functools.partial(attention_forward, setting))
        # The masks of SDPA: boolean, and None where causality alone, or nothing, hides a key.
        AttentionMaskInterface.register(name, sdpa_mask)


def _settings() -> dict[str, Setting]:
    named = {f"{NAME}|{kind.name}": Setting(method=kind.name) for kind in softmax_methods()}
    return {NAME: Setting()} | named
