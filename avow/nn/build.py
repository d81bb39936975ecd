"""From a config to its model."""

from __future__ import annotations

from torch import nn

from avow.nn.config import ModelConfig
from avow.nn.perceiver import PerceiverLM
from avow.nn.transformer import TransformerLM
from avow.parameters import declared


@declared()
def build(config: ModelConfig) -> nn.Module:
    """The model a config describes: a Perceiver for latent attention, a transformer for every other."""
    if config.attention == "latent":
        return PerceiverLM(config)
    return TransformerLM(config)
