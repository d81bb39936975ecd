"""What cannot be done is refused by name and with the reason, and the model stays as it was."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import transformers

import avow
from avow.errors import (
    AvowError,
    DtypeError,
    MissingPackage,
    ParameterError,
    ShapeError,
    ToleranceUnreachable,
    UnknownMethod,
)
from avow.integrations.transformers import Setting, disable, enable, statement
from avow.integrations.transformers.forward import attention_forward
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture

LLAMA = ARCHITECTURES[0]
GEMMA = next(x for x in ARCHITECTURES if x.name == "Gemma2ForCausalLM")
OTHERS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "MambaForCausalLM": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2},
    "LongformerModel": LLAMA.sizes | {"attention_window": 4},
    "GptOssForCausalLM": GEMMA.sizes | {"num_local_experts": 2},
    "Gemma2ForCausalLM": GEMMA.sizes | {"attn_logit_softcapping": 50.0},
}
ITSELF = "computes attention by itself, not through transformers' AttentionInterface; use a model whose attention does"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BloomForCausalLM", f"model=transformer.h.0.self_attention (BloomAttention) {ITSELF}"),
        ("LongformerModel", f"model=encoder.layer.0.attention (LongformerAttention) {ITSELF}"),
        (
            "MambaForCausalLM",
            "model=MambaForCausalLM has no attention layer that goes through transformers' AttentionInterface; "
            "use a model that has one",
        ),
        (
            "Gemma2ForCausalLM",
            "model=model.layers.0.self_attn (Gemma2Attention) bends its logits by soft-capping, which is not softmax "
            "attention; keep attn_implementation='eager' for it",
        ),
    ],
)
def test_a_model_whose_attention_cannot_be_replaced_is_named_and_left_alone(name: str, words: str) -> None:
    model = Architecture(name, OTHERS[name]).build()
    before = [(module.config._attn_implementation, sorted(vars(module))) for module in models(model)]
    with pytest.raises(ParameterError) as caught:
        enable(model)
    assert str(caught.value) == words
    assert before == [(module.config._attn_implementation, sorted(vars(module))) for module in models(model)]


def models(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "config")]


def test_a_model_that_does_not_let_its_attention_be_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda kind: False))
    with pytest.raises(
        ParameterError, match=r"model=model.layers.0.self_attn does not let its attention impl.* be set"
    ):
        enable(model)
    assert model.config._attn_implementation == "sdpa"
    assert not [name for module in model.modules() for name in vars(module) if "avow" in name]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"tol": -1}, ParameterError, "tol=-1 must be a number above 0; "),
        ({"tol": 0}, ParameterError, "tol=0 must be a number above 0; try tol=1e-2, or leave it out for exact"),
        ({"rtol": 0.0}, ParameterError, "rtol=0.0 must be a number above 0; try rtol=1e-2, or leave it out for exact"),
        ({"confidence": 2}, ParameterError, "confidence=2 must be above 0 and at most 1; "),
        ({"method": "no_such"}, UnknownMethod, "method='no_such' is not a method; known methods: exact"),
        ({"rank": 4}, ParameterError, "rank=4 belongs to a named method; add method='low_rank'"),
        ({"method": "low_rank", "rank": 0}, ParameterError, "low_rank: rank=0 must be from 1 to 65536; "),
        (
            {"method": "separable"},
            ParameterError,
            "method=separable computes separable attention, and models are trained with softmax attention; use exact",
        ),
    ],
)
def test_a_wrong_argument_changes_nothing(arguments: dict[str, Any], kind: type[AvowError], words: str) -> None:
    model = LLAMA.build()
    with pytest.raises(kind) as caught:
        enable(model, **arguments)
    assert str(caught.value).startswith(words)
    assert model.config._attn_implementation == "sdpa"
    enable(model, tol=1e-2)
    with pytest.raises(kind):
        enable(model, **arguments)
    with avow.record() as certificates:
        model(**LLAMA.inputs())
    assert certificates.keeps(1e-2)


def test_what_is_no_model_and_what_is_not_enabled_is_refused() -> None:
    with pytest.raises(
        ParameterError, match=r"model=Linear must be a transformers.PreTrainedModel, or wrap one as peft does"
    ):
        enable(torch.nn.Linear(2, 2))
    model = LLAMA.build()
    for act in (disable, statement):
        with pytest.raises(
            ParameterError, match=r"model=LlamaForCausalLM does not have avow enabled; call enable\(mod"
        ):
            act(model)


def test_dropout_in_training_is_refused_in_the_layers_name() -> None:
    model = LLAMA.build(attention_dropout=0.1)
    enable(model)
    model(**LLAMA.inputs())
    model.train()
    with pytest.raises(ParameterError, match=r"dropout=0.1 would drop attention weights at random") as caught:
        model(**LLAMA.inputs())
    assert caught.value.__notes__ == ["in model.layers.0.self_attn"]


def test_a_tolerance_below_the_rounding_of_the_type_is_refused_in_the_layers_name() -> None:
    model = LLAMA.build().to(torch.bfloat16)
    enable(model, tol=1e-5)
    with pytest.raises(ToleranceUnreachable, match=r"the best bound that can be proved in bfloat16; convert") as caught:
        model(**LLAMA.inputs())
    assert caught.value.__notes__ == ["in model.layers.0.self_attn"]


def called(mask: Any = None, **more: Any) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    attention_forward(Setting(), torch.nn.Identity(), q, k, v, mask, **more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"softcap": 50.0}, "softcap=50.0 bends the logits, which is not softmax attention; keep attn_impl"),
        ({"s_aux": torch.zeros(3)}, "s_aux=(3,) must be one sink for each of the 4 heads; keep attn_impl"),
        ({"s_aux": torch.zeros(4, requires_grad=True)}, "s_aux=(4,) would get no gradient; run the model under"),
        ({"indices": torch.zeros(2, 3)}, "indices=(2, 3) chooses keys by an index of the model's own; keep"),
        (
            {"block_indices": torch.zeros(2)},
            "block_indices=(2,) chooses blocks of keys by an index of the model's own;",
        ),
        ({"cache": "pages"}, "cache=pages is a paged cache, which only transformers' own functions read; use generate"),
        ({"output_attentions": True}, "output_attentions=True needs every attention weight, and avow does not form"),
    ],
)
def test_more_than_softmax_attention_is_refused_when_it_is_asked(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        called(**more)
    assert str(caught.value).startswith(words)
    called(**{name: None for name in more})


@pytest.mark.parametrize(
    ("mask", "kind", "words"),
    [
        (
            torch.ones(2, 6, dtype=torch.bool),
            ShapeError,
            "attention_mask.shape=(2, 6) must broadcast to (batch, heads,",
        ),
        (torch.ones(2, 1, 6, 7, dtype=torch.bool), ShapeError, "attention_mask.shape=(2, 1, 6, 7) must broadcast to"),
        ("all", DtypeError, "attention_mask=str is not a tensor, and no other kind of mask is understood; pass"),
        (
            torch.ones(2, 1, 6, 6, dtype=torch.int32),
            DtypeError,
            "attention_mask.dtype=torch.int32 must be bool or a float type;",
        ),
    ],
)
def test_a_mask_that_is_not_understood_is_refused(mask: object, kind: type[AvowError], words: str) -> None:
    with pytest.raises(kind) as caught:
        called(mask)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_weights_are_not_given_out_where_they_are_asked_for(architecture: Architecture) -> None:
    model, inputs = architecture.build(), architecture.inputs()
    enable(model)
    with pytest.raises(ParameterError, match=r"output_attentions=True needs every attention weight"):
        model(**inputs, output_attentions=True)
    model(**inputs, output_hidden_states=True)


def test_a_missing_transformers_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "avow.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = r"transformers is not installed; it is needed to put avow into its models; pip install 'avow\[hf\]'"
    with pytest.raises(MissingPackage, match=words):
        importlib.import_module("avow.integrations.transformers")


def test_the_models_refused_here_are_in_the_transformers_at_hand() -> None:
    assert all(hasattr(transformers, name) for name in OTHERS)
