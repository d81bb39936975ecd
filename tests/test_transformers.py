"""Models of Hugging Face's transformers answer through avow as they did before, and masks hide what they should."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import avow
from avow.core import Method
from avow.integrations.transformers import disable, enable, statement
from avow.integrations.transformers.call_view import simplified_call
from avow.integrations.transformers.enabling import softmax_methods
from avow.integrations.transformers.forward import register
from tests.helpers.layer_audit import Audited, audited
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture

EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
DECODERS = [x for x in ARCHITECTURES if x.kind == "decoder"]
LLAMA = ARCHITECTURES[0]
T5 = ARCHITECTURES[-1]
WINDOWED = [x for x in ARCHITECTURES if x.name in ("MistralForCausalLM", "Gemma3ForCausalLM")]


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of every place that is not padding."""
    with torch.no_grad():
        out: Tensor = model(**inputs).logits
    mask = inputs["attention_mask"].bool()
    return out[mask] if out.shape[:2] == mask.shape else out.flatten(0, 1)


@pytest.mark.parametrize("padding", ["", "left", "right"])
@EVERY
def test_exact_attention_gives_the_logits_of_sdpa(architecture: Architecture, padding: str) -> None:
    model, inputs = architecture.build(), architecture.inputs(padding)
    before = logits(model, inputs)
    enable(model)
    with avow.record() as certificates:
        after = logits(model, inputs)
    assert len(certificates.layers) == (6 if architecture.kind == "seq2seq" else 2)
    assert certificates.bound < 1e-3
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@EVERY
def test_every_layer_is_within_its_certificate_under_a_tolerance(architecture: Architecture) -> None:
    model = architecture.build()
    enable(model, tol=1e-2)
    with audited() as found:
        for padding in ("", "left"):
            logits(model, architecture.inputs(padding))
    assert found and all(audit.kept and audit.certificate.keeps(1e-2) for audit in found)


@pytest.mark.parametrize("kind", softmax_methods(), ids=lambda kind: kind.name)
def test_every_method_has_a_name_and_keeps_its_certificate(kind: type[Method]) -> None:
    name = f"avow|{kind.name}"
    model = LLAMA.build(attn_implementation=name)
    assert model.config._attn_implementation == name
    more = {"rank": 4} if kind.name == "low_rank" else {}
    with audited(name if not more else "avow") as found:
        if more:
            enable(model, method=kind.name, **more)
        logits(model, LLAMA.inputs("left"))
    expected = "exact" if kind.selects_tokens else kind.name
    assert [audit.certificate.method for audit in found] == [expected, expected]
    assert all(audit.kept for audit in found)


def test_an_audit_can_fail() -> None:
    certificate = avow.attend(*torch.randn(3, 1, 2, 5, 8)).certificate
    assert not Audited(certificate, torch.ones(1, 2, 5)).kept


def moved(model: Any, inputs: dict[str, Tensor], changed: slice, kept: slice) -> float:
    """How much the first sequence's logits at some places move when its tokens at others change."""
    other = dict(inputs)
    other["input_ids"] = inputs["input_ids"].clone()
    other["input_ids"][0, changed] = WORDS - 1 - other["input_ids"][0, changed]
    with torch.no_grad():
        here, there = (model(**x).logits[0, kept] for x in (inputs, other))
    return float((here - there).abs().amax())


@pytest.mark.parametrize("architecture", DECODERS, ids=lambda architecture: architecture.name)
def test_the_future_changes_nothing(architecture: Architecture) -> None:
    model = architecture.build()
    enable(model)
    assert moved(model, architecture.inputs("left"), slice(8, 12), slice(4, 8)) == 0
    assert moved(model, architecture.inputs(), slice(8, 12), slice(0, 8)) == 0
    assert moved(model, architecture.inputs(), slice(8, 12), slice(8, 12)) > 0.01


@EVERY
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_changes_nothing(architecture: Architecture, padding: str) -> None:
    model, inputs = architecture.build(), architecture.inputs(padding)
    enable(model)
    pads, text = (slice(0, 4), slice(4, 12)) if padding == "left" else (slice(8, 12), slice(0, 8))
    kept = slice(0, 9) if architecture.kind == "seq2seq" else text
    assert moved(model, inputs, pads, kept) == 0
    assert moved(model, inputs, text, kept) > 0.01


@pytest.mark.parametrize("architecture", WINDOWED, ids=lambda architecture: architecture.name)
def test_what_left_the_window_changes_nothing(architecture: Architecture) -> None:
    only = {"layer_types": ["sliding_attention"] * 2} if "layer_types" in architecture.sizes else {}
    model = architecture.build(**only)
    enable(model)
    # Two layers of five tokens each: the last token is reached from at most eight tokens before it.
    assert moved(model, architecture.inputs(), slice(0, 3), slice(11, 12)) == 0
    assert moved(model, architecture.inputs(), slice(3, 4), slice(11, 12)) > 0


def test_without_the_mask_function_padding_and_windows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage: transformers makes no mask at all for a name that has no mask function, and says nothing."""
    model, windowed = LLAMA.build(), WINDOWED[0].build()
    for each in (model, windowed):
        enable(each)
    assert moved(model, LLAMA.inputs("left"), slice(0, 4), slice(4, 12)) == 0
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "avow")
    assert moved(model, LLAMA.inputs("left"), slice(0, 4), slice(4, 12)) > 0.01
    assert moved(windowed, WINDOWED[0].inputs(), slice(0, 3), slice(11, 12)) > 0.01


def test_every_name_has_its_mask_function() -> None:
    register()
    names = {name for name in AttentionInterface._global_mapping if name.startswith("avow")}
    assert {"avow", "avow|exact", "avow|sparse", "avow|random_features", "avow|low_rank"} <= names
    assert names <= set(AttentionMaskInterface._global_mapping)
    assert not {"avow|separable", "avow|latent"} & names


def test_a_mask_of_numbers_hides_as_a_boolean_one_does() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs("left")
    enable(model)
    wanted = logits(model, inputs)
    past = torch.ones(12, 12, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None]
    for hidden in (-float("inf"), torch.finfo(torch.float32).min):
        given = torch.where(past, 0.0, hidden)
        with torch.no_grad():
            positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            found = model(inputs["input_ids"], attention_mask=given, position_ids=positions).logits
            wanted = model(inputs["input_ids"], attention_mask=past, position_ids=positions).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


PAST = torch.ones(6, 6, dtype=torch.bool).tril()
SHOWN = torch.tensor([[False, True, True, True, True, True], [True] * 6])[:, None, None]
EVERYTHING = torch.ones(2, 1, 6, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (EVERYTHING, (None, False)),
        (EVERYTHING & PAST, (None, True)),
        (EVERYTHING & SHOWN, ((2, 1, 1, 6), False)),
        (EVERYTHING & SHOWN & PAST, ((2, 1, 1, 6), True)),
        (EVERYTHING & PAST & ~PAST.tril(-3), ((2, 1, 6, 6), False)),
        (EVERYTHING & PAST.T, ((2, 1, 6, 6), False)),
        (EVERYTHING & PAST & (torch.arange(6) != 5), ((2, 1, 1, 6), True)),
        ((EVERYTHING & PAST)[..., 2:, :], ((2, 1, 4, 6), False)),
        ((EVERYTHING & PAST)[..., 5:, :], (None, False)),
        ((EVERYTHING & SHOWN)[..., 5:, :], ((2, 1, 1, 6), False)),
    ],
)
def test_a_mask_in_plain_words_says_the_same(given: Tensor, plain: tuple[tuple[int, ...] | None, bool]) -> None:
    query, key = torch.zeros(2, 4, given.shape[-2], 8), torch.zeros(2, 2, 6, 8)
    for mask in (given, torch.where(given, 0.0, -torch.inf), torch.where(given, 0.0, torch.finfo(torch.float32).min)):
        found = simplified_call(query, key, key, mask, causal=True)
        said = torch.ones_like(given) if found.mask is None else found.mask.expand_as(given)
        assert torch.equal(said & PAST if found.causal else said, given)
        assert (None if found.mask is None else tuple(found.mask.shape), found.causal) == plain


def test_room_for_tokens_to_come_is_not_read_for_one_query() -> None:
    query, key, mask = torch.zeros(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[..., 4:] = False
    found = simplified_call(query, key, key, mask, causal=True)
    assert found.mask is None and torch.equal(found.key, key[:, :, :4]) and torch.equal(found.value, key[:, :, :4])
    mask[0, ..., :2] = False
    found = simplified_call(query, key, key, mask, causal=True)
    assert found.key.shape[2] == 4 and found.mask is not None and torch.equal(found.mask, mask[..., :4])
    mask[:] = False
    assert simplified_call(query, key, key, mask, causal=True).key.shape[2] == 6, "a row that sees nothing"


def whole_state(model: Any) -> dict[str, Any]:
    """Everything that could differ between a model and itself later: attributes, configurations, weights."""
    found: dict[str, Any] = {f"weight {name}": x.numpy().tobytes() for name, x in model.state_dict().items()}
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_forward")}
        found[f"attributes {name}"] = {key: id(value) for key, value in plain.items()}
        if hasattr(module, "config"):
            found[f"config {name}"] = json.dumps(module.config.to_dict(), default=str)
            found[f"implementation {name}"] = module.config._attn_implementation
    found["generation"] = model.generation_config.to_json_string() if model.can_generate() else ""
    return found


@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [*((architecture, None) for architecture in ARCHITECTURES), (LLAMA, "eager"), (LLAMA, "avow")],
    ids=lambda x: getattr(x, "name", x),
)
def test_disabling_leaves_no_trace(architecture: Architecture, implementation: str | None) -> None:
    model = architecture.build(attn_implementation=implementation)
    before = whole_state(model)
    enable(model, tol=1e-2)
    enable(model, method="sparse")
    assert whole_state(model) != before
    disable(model)
    after = whole_state(model)
    assert [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)] == []


def test_a_copy_of_an_enabled_model_is_a_model_of_its_own() -> None:
    model = LLAMA.build()
    enable(model, tol=1e-2)
    twin = copy.deepcopy(model)
    disable(model)
    inputs = LLAMA.inputs()
    with avow.record() as certificates:
        twin.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert len(certificates) == 4
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert len(certificates) == 4
    disable(twin)
    assert twin.config._attn_implementation == "sdpa"


def test_a_model_is_saved_and_loaded_under_the_name(tmp_path: Any) -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs("right")
    enable(model, tol=1e-2)
    model.save_pretrained(tmp_path)
    disable(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="avow")
    torch.testing.assert_close(logits(loaded, inputs), logits(model, inputs), rtol=0, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_record_lists_layers_and_does_not_add_them_up() -> None:
    model = LLAMA.build()
    enable(model, tol=1e-2)
    with avow.record() as outer:
        logits(model, LLAMA.inputs())
        with avow.record() as inner:
            logits(model, LLAMA.inputs())
    logits(model, LLAMA.inputs())
    assert (len(outer), len(inner)) == (4, 2)
    assert list(outer.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert outer.keeps(1e-2) and not outer.keeps(outer.bound / 2)
    assert outer.bound == max(certificate.bound for _, certificate in outer)
    assert "do not compose through the network into a bound on logits" in str(outer)
    assert json.loads(outer.to_json())["model.layers.1.self_attn"][0]["kind"] == "deterministic"
    with avow.record() as nothing:
        pass
    assert str(nothing).startswith("no answer was recorded: inside the block, run avow.nn modules, ")


def test_a_statement_measures_what_is_not_proved() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs("left")
    enable(model)
    made = statement(model, **inputs)
    assert (made.change, made.agreement, made.places) == (0, 1, 20)
    enable(model, method="random_features", features=4)
    made = statement(model, **inputs)
    assert made.change > 1e-3
    assert model.config._attn_implementation == "avow"
    assert "measured: logits changed by at most" in str(made)
    assert {certificate.kind for _, certificate in made.certificates} <= {"statistical", "none"}


def test_sequences_packed_into_one_do_not_see_each_other() -> None:
    model, ids = LLAMA.build(), torch.randint(3, WORDS, (1, 12))
    enable(model)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        both = model(ids, position_ids=places, use_cache=False).logits[:, 5:]
        alone = model(ids[:, 5:], position_ids=places[:, 5:], use_cache=False).logits
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-5)


def test_autocast_computes_in_the_type_it_names() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs("left")
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model, inputs), model.generate(**inputs, max_new_tokens=4, do_sample=False)
        enable(model)
        with avow.record() as certificates:
            after = logits(model, inputs), model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert 1e-3 < certificates.bound < 0.1


def gradients(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The loss's gradients with respect to every weight, in one row."""
    model.zero_grad()
    model(**inputs, labels=inputs.get("decoder_input_ids", inputs["input_ids"])).loss.backward()
    return torch.cat([weight.grad.double().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("architecture", [LLAMA, T5], ids=lambda architecture: architecture.name)
def test_gradients_are_those_of_sdpa(architecture: Architecture) -> None:
    still = {"dropout_rate": 0.0} if architecture is T5 else {}
    model, inputs = architecture.build(**still).train(), architecture.inputs("left")
    wide = copy.deepcopy(model).double()
    before, truth = gradients(model, inputs), gradients(wide, inputs)
    for each in (model, wide):
        enable(each)
    assert float(truth.abs().amax()) > 0.01
    torch.testing.assert_close(gradients(wide, inputs), truth, rtol=0, atol=1e-12)
    # In float32 both round, each in its own order: avow strays no further from the truth than twice SDPA's way.
    assert (gradients(model, inputs) - truth).abs().amax() <= 2 * (before - truth).abs().amax()
