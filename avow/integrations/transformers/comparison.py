"""What can be said of a whole model: the bound of every layer, and how much its outputs were seen to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avow.core.record import Record, record
from avow.errors import ParameterError
from avow.integrations.transformers.enabling import enabled, without
from avow.integrations.transformers.layers import pretrained
from avow.parameters import declared


@dataclass(frozen=True)
class Statement:
    """The certificates of one run, and its logits beside those of the model as it was before."""

    certificates: Record
    change: float
    """The largest difference in any logit that is not padding's."""
    agreement: float
    """The share of places whose largest logit is the same."""
    places: int

    def __str__(self) -> str:
        measured = f"measured: logits changed by at most {self.change:.1e}; the likeliest token is the same at "
        return f"{self.certificates}\n{measured}{self.agreement:.2%} of {self.places} places"


@declared()
@torch.no_grad()
def statement(model: Any, **inputs: Any) -> Statement:
    """What is proved of every layer for these inputs, and what is measured of the logits; runs the model twice."""
    model = pretrained(model)
    if not enabled(model):
        raise ParameterError("model", type(model).__name__, "does not have avow enabled", "call enable(model) first")
    with record() as certificates:
        here = _logits(model(**inputs))
    with without(model):
        there = _logits(model(**inputs))
    here, there = (_places(x, inputs.get("attention_mask")) for x in (here, there))
    if not here.numel():
        return Statement(certificates, 0.0, 1.0, 0)
    agreement = (here.argmax(-1) == there.argmax(-1)).double().mean()
    return Statement(certificates, float((here - there).abs().amax()), float(agreement), len(here))


def _logits(outputs: Any) -> Tensor:
    """The logits, or the first output of a model that has none."""
    return outputs["logits"] if "logits" in outputs else outputs[0]


def _places(logits: Tensor, mask: Tensor | None) -> Tensor:
    """One row for each place that is not padding."""
    if mask is None or mask.shape != logits.shape[:-1]:
        return logits.flatten(0, -2)
    return logits[mask.bool()]
