"""A model is profiled in one run, layer by layer, and is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Certificate, Problem
from avow.errors import ParameterError
from avow.integrations.transformers import Profile, disable, enable, profile, profiling
from avow.integrations.transformers.enabling import layers, replaceable, softmax_methods
from avow.integrations.transformers.observers import watching
from avow.integrations.transformers.profiling import Head, Offer, ProfileInterrupted
from tests.helpers.model_folders import LLAMA, long_model
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture


@pytest.fixture(autouse=True)
def built_in_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AVOW_CALIBRATION", "off")


def ids(length: int = 200) -> Tensor:
    return torch.randint(3, WORDS, (1, length))


CHOSEN = {"LlamaForCausalLM", "MistralForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"}
CHOSEN |= {"BartForConditionalGeneration"}


@pytest.mark.parametrize("architecture", [x for x in ARCHITECTURES if x.name in CHOSEN], ids=lambda x: x.name)
def test_every_head_of_every_layer_is_measured_and_nothing_is_left_behind(architecture: Architecture) -> None:
    model = architecture.build()
    found = profile(model, ids(60), tol=1e-2)
    assert list(found.layers) == list(replaceable(model))
    assert all(len(heads) == 4 for heads in found.layers.values())
    for head in found.heads:
        assert head.methods == tuple(kind.name for kind in softmax_methods() if not kind.is_exact)
        assert all(offer.bound is None or 0 < offer.bound < 2 for offer in head.offers)
        offer = head.within_tolerance("sparse", 1e-2)
        assert offer is not None and offer.bound is not None and offer.bound <= 1e-2
    assert model.config._attn_implementation == "sdpa"
    assert not [name for module in model.modules() for name in vars(module) if "avow" in name]


def test_a_model_in_which_avow_is_enabled_keeps_what_it_was_asked() -> None:
    model = long_model()
    enable(model, tol=1e-3)
    before = layers(model)
    profile(model, ids(40))
    assert layers(model) == before
    disable(model)


class Keepers:
    """A watcher that notes whether any layer it was shown before is still in memory."""

    def __init__(self, holds: bool) -> None:
        self.holds, self.seen, self.alive = holds, 0, 0
        self.held: list[Any] = []
        self.references: list[Any] = []

    def __call__(self, layer: str, problem: Problem, out: Tensor, certificate: Certificate) -> None:
        self.alive = max(self.alive, sum(reference() is not None for reference in self.references))
        self.references += [weakref.ref(x.untyped_storage()) for x in (problem.k, problem.v)]
        self.seen += 1
        if self.holds:
            self.held += [problem.k.untyped_storage(), problem.v.untyped_storage()]


@pytest.mark.parametrize("holds", [False, True])
def test_no_layer_is_held_while_the_next_one_is_measured(holds: bool) -> None:
    keepers = Keepers(holds)
    with watching(keepers):
        profile(long_model(num_hidden_layers=4), ids(50))
    assert keepers.seen == 4
    assert (keepers.alive > 0) == holds, "the check itself sees layers that someone holds"


def test_an_interrupted_profile_is_of_the_layers_measured_so_far() -> None:
    model = long_model(num_hidden_layers=4)

    def stop(at: int) -> Callable[[str], None]:
        def tell(layer: str) -> None:
            if layer == f"model.layers.{at}.self_attn":
                raise KeyboardInterrupt

        return tell

    with pytest.warns(ProfileInterrupted, match="interrupted after 2 of 4 layers"):
        found = profile(model, ids(40), tell=stop(2))
    assert list(found.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert found.unmeasured == ("model.layers.2.self_attn", "model.layers.3.self_attn")
    assert model.config._attn_implementation == "sdpa", "the model is as it was"
    assert list(found.plan.layers) == list(replaceable(model))
    assert {setting.method for name in found.unmeasured for setting in found.plan.layers[name]} == {"exact"}
    assert profile(model, ids(40)).unmeasured == ()
    with pytest.raises(KeyboardInterrupt):
        profile(model, ids(40), tell=stop(0))  # there is nothing to keep


@pytest.mark.parametrize("stops", [False, True])
def test_threads_are_as_they_were_afterwards(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)

    def kind(*given: Any) -> str:
        seen.append(torch.get_num_threads())
        if stops:
            raise KeyboardInterrupt
        return "wide"

    monkeypatch.setattr(profiling, "head_kind", kind)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            profile(long_model(num_hidden_layers=1), ids(40))
        assert set(seen) == {1}, "small operations are measured in one thread"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def offer(method: str, bound: float | None, predicted: float, measured: float | None = None) -> Offer:
    return Offer(method, {}, bound, "deterministic", predicted, measured)


def test_the_cheapest_within_the_tolerance_and_the_best_within_the_budget_are_found() -> None:
    figures = profile(long_model(num_hidden_layers=1), ids(20)).heads[0].figures
    settings = (
        offer("sparse", 0.1, 0.5, 0.2),
        offer("sparse", 0.01, 0.5, 0.45),
        offer("sparse", 0.001, 0.5, 0.8),
        offer("low_rank", 0.005, 0.4),
        offer("random_features", None, 0.1),
    )
    head = Head(figures, 1e-6, settings)
    assert head.within_tolerance("sparse", 0.01) is settings[1]
    assert head.within_budget("sparse", 0.5) is settings[1]
    assert head.within_budget("sparse", 1.0) is settings[2]
    assert head.within_tolerance("random_features", 1.0) is None and head.within_budget("random_features", 1.0) is None
    assert head.chosen(0.01, 0.5) is settings[3]
    assert head.chosen(0.01, 0.3) is None
    assert head.chosen(0.2, 0.3) is settings[0]


def test_the_plan_follows_the_profile() -> None:
    found = profile(long_model(), ids(), tol=0.05)
    shares = sorted(offer.share for head in found.heads if (offer := head.within_tolerance("sparse", 0.05)) is not None)
    budget = sum(shares[3:5]) / 2
    found = dataclasses.replace(found, budget=budget)
    plan = found.plan
    for name, heads in found.layers.items():
        for head, setting in zip(heads, plan.layers[name], strict=True):
            chosen = head.chosen(0.05, budget)
            # Whether leaving tokens out pays at some length is the cache's choice.
            assert setting.method == ("exact" if chosen is None else "auto")
            assert chosen is None or chosen.method == "sparse"
            assert setting.tol == (None if chosen is None else 0.05)
    assert (plan.changed, plan.heads) == (4, 8)
    assert found.share == pytest.approx(read(found))
    everything = dataclasses.replace(found, budget=1.0)
    assert read(everything) == everything.share < 1, "every head of every layer is planned"


def read(found: Profile) -> float:
    """What a plan reads: a layer that has an exact head is read whole, once for all."""
    shares = []
    for heads in found.layers.values():
        chosen = [head.chosen(found.tol, found.budget) for head in heads]
        whole = any(offer is None for offer in chosen)
        shares += [1.0 if whole or offer is None else offer.share for offer in chosen]
    return sum(shares) / len(shares)


def named(name: str) -> Any:
    return next(x for x in ARCHITECTURES if x.name == name).build()


def test_reading_is_counted_once_for_heads_that_share_keys() -> None:
    for heads in profile(long_model(), ids(), tol=0.05).layers.values():
        offers = [head.within_tolerance("sparse", 0.05) for head in heads]
        read = [(x.measured or 0, x.together or 0, x.share) for x in offers if x is not None]
        assert len(read) == 4
        for pair in (read[:2], read[2:]):
            assert pair[0][1] == pair[1][1] == pair[0][2]
            assert max(x[0] for x in pair) <= pair[0][1] <= sum(x[0] for x in pair)


def test_a_layer_that_never_goes_on_from_a_text_is_not_promised_a_cheaper_going_on() -> None:
    encoder = profile(named("BertForMaskedLM"), ids(60), tol=0.5, budget=1.0)
    assert all(offer.together is None for head in encoder.heads for offer in head.offers)
    assert all(head.chosen(0.5, 1.0) is None for head in encoder.heads)
    windowed = profile(named("MistralForCausalLM"), ids(60))
    assert all(any(offer.together is not None for offer in head.offers) for head in windowed.heads)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tol": 0}, "tol=0 must be above 0 and finite; try tol=1e-2"),
        ({"tol": float("nan")}, "tol=nan must be above 0 and finite; try tol=1e-2"),
        ({"budget": 0}, "budget=0 must be above 0 and at most 1; try budget=0.5"),
        (
            {"ids": torch.ones(2, 9, dtype=torch.long)},
            "ids.shape=(2, 9) must be (1, length of at least 2); pass one text",
        ),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(arguments: dict[str, Any], words: str) -> None:
    model = long_model()
    with pytest.raises(ParameterError) as caught:
        profile(model, **({"ids": ids(9)} | arguments))
    assert str(caught.value).startswith(words)
    assert model.config._attn_implementation == "sdpa"


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(model, ids(20), tell=broken)
    assert model.config._attn_implementation == "sdpa"
    with avow.record() as certificates:
        model(ids(20))
    assert not certificates
