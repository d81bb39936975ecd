"""Next tokens by CUDA graphs: the same logits, whatever becomes of the cache; layer by layer where a graph would err.

Graphs are a stand-in's, which repeats what a GPU would with the host's counts as they were (`graph_stand_in`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avow.kernels.interpreted import interpret

interpret()

import avow
from avow.errors import NonFiniteError
from avow.integrations.transformers import CertifiedCache, disable, enable, graphs, verified
from avow.integrations.transformers.observers import watching
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.kernel_caches import answer_by_kernels
from tests.helpers.tiny_models import ARCHITECTURES

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PROMPT, ROOM = 66, 128
FIRST = graphs.FIRST


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    answer_by_kernels(monkeypatch)
    return StandIn(monkeypatch)


def built(layers: int = 1, **more: Any) -> Any:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    return ARCHITECTURES[0].build(num_hidden_layers=layers, **sizes | more)


class Text:
    """A text that a model reads token by token by graphs, beside what the same model makes of all of it at once."""

    def __init__(self, model: Any, stand_in: StandIn, capacity: int | None = ROOM, rows: int = 1) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        if "forward" in vars(self.plain):
            disable(self.plain)
        self.cache = CertifiedCache(model.config, capacity=capacity)
        stand_in.caches.append(self.cache)
        self.ids = torch.randint(3, 99, (rows, PROMPT))
        with torch.no_grad():
            model(self.ids, past_key_values=self.cache)

    def read(self, times: int = 1, **more: Any) -> None:
        """Some more tokens, whose logits must be those of the whole text."""
        for _ in range(times):
            token = torch.randint(3, 99, (len(self.ids), 1))
            self.ids = torch.cat([self.ids, token], 1)
            with torch.no_grad():
                out = self.model(token, past_key_values=self.cache, **{name: x() for name, x in more.items()})
                wanted = self.plain(self.ids, use_cache=False).logits[:, -1:]
            assert out.past_key_values is self.cache and self.cache.get_seq_length() == self.ids.shape[1]
            torch.testing.assert_close(out.logits, wanted, rtol=0, atol=2e-4)

    @property
    def steps(self) -> graphs.Steps:
        steps = self.cache.steps
        assert isinstance(steps, graphs.Steps)
        return steps


def test_logits_by_graphs_are_those_of_the_whole_text(stand_in: StandIn) -> None:
    model = built(2)
    enable(model)
    text = Text(model, stand_in)
    mask = {"attention_mask": lambda: torch.ones_like(text.ids)}
    place = {"position_ids": lambda: torch.tensor([[text.ids.shape[1] - 1]])}
    text.read(3)
    for more in (mask, place, mask | place, {"use_cache": lambda: True, "logits_to_keep": lambda: 1}):
        text.read(**more)
    assert text.steps == graphs.Steps(5, 1, {FIRST: 2})
    assert stand_in.replayed == 5
    assert str(text.steps) == f"5 calls by 1 CUDA graph\n2 calls layer by layer: {FIRST}"
    layers = text.cache.layers
    assert [layer.cache.lengths for layer in layers] == [(PROMPT + 7,)] * 2
    assert all(layer.cache._store.used.tolist() == [PROMPT + 7] for layer in layers)


@pytest.mark.parametrize("forgotten", ["_count", "_fill"])
def test_a_count_that_is_not_advanced_is_seen(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Sabotage of the host's part of a replay."""
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    monkeypatch.setattr(graphs, forgotten, lambda *_: None)
    with pytest.raises(AssertionError):
        text.read(2)


def test_tokens_that_are_taken_back_are_taken_back_on_the_device(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    for many in (3, 1):
        text.cache.crop(-many)
        text.ids = text.ids[:, :-many]
        text.read(2)
    assert text.steps == graphs.Steps(5, 2, {FIRST: 2})
    monkeypatch.setattr(graphs.StepGraphs, "_settle", lambda *_: None)
    text.cache.crop(-1)
    text.ids = text.ids[:, :-1]
    with pytest.raises(AssertionError):
        text.read()


def test_a_cache_that_is_full_grows_and_is_captured_again(stand_in: StandIn) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in, PROMPT)  # which is room for two groups of 64
    text.read(ROOM - PROMPT - 1 - 58)
    text.cache.crop(0)
    for layer in text.cache.layers:
        layer.cache.crop(layer.length)
    fill = torch.randint(3, 99, (1, ROOM - text.ids.shape[1] - 1))
    with torch.no_grad():
        model(fill, past_key_values=text.cache)
    text.ids = torch.cat([text.ids, fill], 1)
    text.read(4)
    why = "the room of the cache was full, and it grew"
    assert text.steps.called == {FIRST: 4, why: 1} and text.cache.layers[0].cache.room == 2 * ROOM
    text.read()
    assert text.steps.captured == 2


def asks(module: nn.Module) -> None:
    """Have a part of a model read a number of the device."""
    plain = module.forward
    module.__class__ = type("Asking", (type(module),), {"forward": lambda self, x: plain(x) * float(x.sum() * 0 + 1)})


def hides(text: Text) -> dict[str, Callable[[], Any]]:
    mask = torch.ones_like(text.ids)
    mask[:, 0] = 0
    return {"attention_mask": lambda: mask}


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (lambda model: avow.record(), "a record collects the certificate of every answer"),
        (lambda model: watching(lambda *_: None), "a function sees or gives every answer"),
        (lambda model: torch.autocast("cpu", dtype=torch.bfloat16, enabled=True), "autocast is on"),
        (lambda model: torch.enable_grad(), "gradients are enabled"),
    ],
    ids=["record", "watcher", "autocast", "gradients"],
)
def test_calls_that_somebody_looks_at_run_layer_by_layer(
    stand_in: StandIn, block: Callable[[Any], contextlib.AbstractContextManager[Any]], why: str
) -> None:
    model = built().requires_grad_(False)
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    replayed = stand_in.replayed
    token = torch.tensor([[5]])
    with torch.no_grad(), block(model) as found:
        model(token, past_key_values=text.cache)
    assert text.steps.called[why] == 1 and stand_in.replayed == replayed
    assert not isinstance(found, avow.core.record.Record) or len(found) == 1
    text.ids = torch.cat([text.ids, token], 1)
    if why != "autocast is on":  # its keys are rounded
        text.read()
        assert stand_in.replayed == replayed + 1


def test_models_that_a_graph_would_not_follow_say_so(stand_in: StandIn) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in)
    asks(model.model.norm)
    text.read(3)
    assert next(why for why in text.steps.called if "asks for numbers" in why) and stand_in.captured == 0
    text = Text(built(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), stand_in)
    enable(text.model)
    text.read(2)
    assert text.steps.called == {FIRST: 1, "rotary embeddings change with the length of the text": 1}


def test_what_becomes_of_a_model_between_two_calls_is_noticed(stand_in: StandIn) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    for one in (model, text.plain):
        one.lm_head.weight = nn.Parameter(one.lm_head.weight.detach().roll(1, 0))
    text.read(4)
    assert text.steps == graphs.Steps(3, 2, {FIRST: 4})
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    text.read(3)
    assert text.steps.called["model.norm has hooks"] == 2
    handle.remove()
    text.read(3)
    assert text.steps.captured == 3
    model.train()
    text.read()
    assert text.steps.called["the model is in training mode"] == 1


def test_a_mask_that_hides_tokens_is_followed(stand_in: StandIn) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    mask = torch.ones(1, PROMPT + 4, dtype=torch.long)
    mask[:, :9] = 0
    with torch.no_grad():
        found = model(torch.tensor([[7]]), past_key_values=text.cache, attention_mask=mask).logits
    assert text.steps.called["a mask hides tokens"] == 1 and stand_in.replayed == 1
    with pytest.raises(AssertionError):
        text.ids = torch.cat([text.ids, torch.tensor([[7]])], 1)
        torch.testing.assert_close(found, text.plain(text.ids).logits[:, -1:], rtol=0, atol=2e-4)


def test_tokens_without_a_bound_are_an_error_of_a_later_call(stand_in: StandIn) -> None:
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(3)
    with torch.no_grad():
        held = model.model.embed_tokens.weight[7].clone()
        model.model.embed_tokens.weight[7] = float("nan")
        model(torch.tensor([[7]]), past_key_values=text.cache)
        model.model.embed_tokens.weight[7] = held
        with pytest.raises(NonFiniteError, match="nan or inf was appended"):
            for _ in range(4):
                model(torch.tensor([[8]]), past_key_values=text.cache)


def test_a_bound_above_the_tolerance_leaves_kernels_out_once(stand_in: StandIn) -> None:
    model = built()
    enable(model, tol=1e-2, method="exact")
    text = Text(model, stand_in)
    text.read(3)
    text.model.forward.limits = (1e-9, None, None, "exact")
    text.read(3)
    why = "the kernels proved less than the tolerance in an earlier call"
    assert text.steps.called[why] >= 1 and stand_in.replayed >= 2


def test_drafts_and_passes_are_graphs_and_the_text_is_exact_attentions(stand_in: StandIn) -> None:
    model = built()
    plain = copy.deepcopy(model)
    enable(model, tol=1e-2, method="sparse", verify=8)
    cache = CertifiedCache(model.config, capacity=ROOM)
    stand_in.caches.append(cache)
    ids = torch.randint(3, 99, (1, PROMPT))
    asked = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 25}
    wanted = plain.generate(ids, **asked)
    assert torch.equal(model.generate(ids, past_key_values=cache, **asked), wanted)
    made = cache.verification
    assert made.accepted > 10 and made.looked == made.passes - sum(made.undrafted.values()) and 0 < made.bound <= 1e-2
    assert 0 < made.read < 1 and cache.steps.replayed > 8 and cache.steps.captured >= 2
    twin = copy.deepcopy(cache)
    assert twin.steps == graphs.Steps() and cache.steps != graphs.Steps()


def test_what_is_said_of_drafts_is_what_drafts_reported(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the pass of exact attention did that was captured after them, which has rows for all its tokens."""
    model = built()
    enable(model, tol=1e-2, method="sparse", verify=8)
    cache = CertifiedCache(model.config, capacity=ROOM)
    stand_in.caches.append(cache)
    look, shapes = verified.Drafts.look, list[torch.Size]()

    def noted(drafts: Any, reports: list[Tensor], certificates: Any) -> None:
        shapes.extend(report.shape for report in reports)
        look(drafts, reports, certificates)

    monkeypatch.setattr(verified.Drafts, "look", noted)
    ids = torch.randint(3, 99, (1, PROMPT))
    model.generate(ids, past_key_values=cache, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=25)
    assert cache.steps.replayed > 8 and set(shapes) == {torch.Size((5, 1, 2))}


def test_a_cache_is_freed_with_its_graphs_at_once(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that waited for the garbage collector would end a capture that it is freed in."""
    monkeypatch.setattr(graphs, "capture", lambda call, *_: (lambda: None, call()))
    model = built()
    enable(model)
    text = Text(model, stand_in)
    text.read(2)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=text.cache)
    assert text.steps.captured == 1
    watched = weakref.ref(text.cache), weakref.ref(text.cache.graphs)
    stand_in.caches.clear()
    gc.collect()
    gc.disable()
    try:
        del text
        assert [x() for x in watched] == [None, None]
    finally:
        gc.enable()


def test_enabling_on_a_cpu_leaves_the_forward_alone() -> None:
    model = built()
    enable(model, tol=1e-2)
    assert "forward" not in vars(model) and CertifiedCache(model.config).steps is None


def test_disabling_takes_graphs_away(stand_in: StandIn) -> None:
    model = built()
    before = set(vars(model))
    enable(model, tol=1e-2)
    assert isinstance(model.forward, verified.DecodingForward) and model.forward.most is None
    disable(model)
    assert set(vars(model)) == before


def test_passes_are_of_few_sizes_that_kernels_answer_at_once() -> None:
    model = built(num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    assert [graphs.passes(model, drafts) for drafts in (0, 1, 2, 3, 6, 8, 16, 31)] == [0, 1, 1, 3, 3, 7, 15, 15]
    model = built()
    assert [graphs.passes(model, drafts) for drafts in (16, 31)] == [15, 31]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: float(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).all()),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.to("meta"),
    ],
)
def test_what_asks_anything_of_the_device_is_no_call_for_a_graph(call: Callable[[Tensor], object]) -> None:
    x = torch.randn(3)
    with graphs._Watch():
        x * 2 + x[torch.tensor([0, 1, 1])]
    with pytest.raises(graphs.Unrepeatable, match="asks for numbers"), graphs._Watch():
        call(x)
