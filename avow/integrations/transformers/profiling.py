"""What each head of a model does with a text, what each method could do for it, and the plan that follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from avow.calibration import Rates, rates
from avow.core import Certificate, Problem
from avow.errors import ParameterError
from avow.integrations.transformers.candidates import CONFIDENCE, Offer, layer_offers
from avow.integrations.transformers.enabling import as_it_was, enable
from avow.integrations.transformers.head_figures import HeadFigures, head_figures, sampled_rows, tokens_for
from avow.integrations.transformers.hooks import watching
from avow.integrations.transformers.layers import pretrained, replaceable
from avow.integrations.transformers.model_plan import ModelPlan, fingerprint
from avow.integrations.transformers.setting import Setting
from avow.integrations.transformers.speed import Speed
from avow.parameters import as_float, declared

ROWS = 128
"""Rows of each head whose weights are looked at, evenly spaced over the text."""
CERTIFIED = 16
"""Rows of each head for which every method is run and certified, evenly spaced over the text's second half."""


@dataclass(frozen=True)
class Head:
    """What one head does, and what each setting of each method offers it."""

    figures: HeadFigures
    exact_bound: float
    offers: tuple[Offer, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(offer.method for offer in self.offers))

    def within_budget(self, method: str, budget: float) -> Offer | None:
        """The setting with the smallest bound that costs no more than `budget` of exact attention."""
        able = [x for x in self.offers if x.method == method and x.bound is not None and x.share <= budget]
        return min(able, key=lambda offer: offer.bound or 0.0, default=None)

    def within_tolerance(self, method: str, tol: float) -> Offer | None:
        """The cheapest setting that proves `tol`."""
        able = [x for x in self.offers if x.method == method and x.keeps(tol)]
        return min(able, key=lambda offer: offer.share, default=None)

    def chosen(self, tol: float, budget: float) -> Offer | None:
        """The cheapest of all that proves `tol` within the budget; None means exact attention."""
        found = [offer for method in self.methods if (offer := self.within_tolerance(method, tol)) is not None]
        return min((x for x in found if x.share <= budget), key=lambda offer: offer.share, default=None)


@dataclass(frozen=True)
class Profile:
    """Every head of every attention layer of a model over one text."""

    model: str
    fingerprint: str
    tokens: int
    tol: float
    budget: float
    layers: dict[str, tuple[Head, ...]]
    seconds: float
    speed: Speed | None = None
    """What a new token costs with the plan, where that was measured (`decoding_speed`)."""

    @property
    def heads(self) -> list[Head]:
        return [head for heads in self.layers.values() for head in heads]

    @property
    def share(self) -> float:
        """The part of keys and values that the plan reads to go on from the text, where caches look at their sketches.

        A layer with a head that is exact reads everything.
        """
        found = []
        for heads in self.layers.values():
            offers = [head.chosen(self.tol, self.budget) for head in heads]
            found += [1.0 if offer is None or None in offers else offer.share for offer in offers]
        return sum(found) / max(len(found), 1)

    @property
    def plan(self) -> ModelPlan:
        """The cheapest that proves the tolerance for each head, where it is within the budget; else exact."""
        made = {name: tuple(self._setting(head) for head in heads) for name, heads in self.layers.items()}
        return ModelPlan(self.model, self.fingerprint, self.tol, made)

    def _setting(self, head: Head) -> Setting:
        offer = head.chosen(self.tol, self.budget)
        if offer is None:
            return Setting(method="exact")
        confidence = None if offer.kind == "deterministic" else CONFIDENCE
        # What a method aims at the tolerance by itself is not written down.
        parameters = {} if offer.method == "sparse" else offer.parameters
        return Setting(self.tol, offer.method, confidence, parameters)


@declared()
@torch.no_grad()
def profile(
    model: Any,
    ids: Tensor,
    tol: float = 1e-2,
    budget: float = 0.5,
    name: str = "",
    tell: Callable[[str], None] = lambda step: None,
) -> Profile:
    """What each head needs, from one run over the tokens (1, n). Layers are measured as they run, and forgotten.

    `tol` is what a plan must prove of every row of every head, `budget` the share of exact attention's cost it may
    take. The model is left as it was.
    """
    if not 0 < as_float(tol) < math.inf:
        raise ParameterError("tol", tol, "must be above 0 and finite", "try tol=1e-2")
    if not 0 < budget <= 1:
        raise ParameterError("budget", budget, "must be above 0 and at most 1", "try budget=0.5")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ParameterError("ids.shape", tuple(ids.shape), "must be (1, length of at least 2)", "pass one text")
    started, model = time.perf_counter(), pretrained(model)
    found: dict[str, tuple[Head, ...]] = {}
    known = rates(ids.device.type, measure=False)

    def measure(layer: str, problem: Problem, out: Tensor, certificate: Certificate) -> None:
        # A layer that several blocks share is measured where it is asked first.
        if layer not in found:
            tell(layer)
            found[layer] = _heads(problem, certificate, tol, known)

    with as_it_was(model), watching(measure):
        enable(model)
        inputs: dict[str, Any] = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        # What stands around the base model only makes logits, which no one reads here.
        model.base_model(**inputs, **({} if not _caches(model) else {"use_cache": False}))
    ordered = {layer: found[layer] for layer in replaceable(model) if layer in found}
    return Profile(
        name or type(model).__name__,
        fingerprint(model),
        ids.shape[1],
        tol,
        budget,
        ordered,
        time.perf_counter() - started,
    )


def _caches(model: PreTrainedModel) -> bool:
    return hasattr(model.config.get_text_config(decoder=True), "use_cache")


def _heads(problem: Problem, certificate: Certificate, tol: float, known: Rates) -> tuple[Head, ...]:
    n = problem.q.shape[-2]
    figures = head_figures(problem, ROWS)
    index = sampled_rows(n, CERTIFIED, n // 2)
    # Tokens with a mass of m in all move a row by at most 2m of its unit when they are left out.
    needed = tokens_for(problem.rows(index.to(problem.q.device)), 1 - tol / 2)
    offers = layer_offers(problem, index, tol, known, needed)
    bounds = certificate.rows.reshape(problem.q.shape[:-1])[0].amax(-1).tolist()
    return tuple(Head(*parts[:2], tuple(parts[2])) for parts in zip(figures, bounds, offers, strict=True))
