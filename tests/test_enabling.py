"""Enabling does what is asked or says why not: after another implementation, in a file, in a wrapper, in odd models."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import avow
from avow.errors import ParameterError
from avow.integrations.transformers import CertifiedCache, disable, enable, statement
from avow.integrations.transformers.enabling import layers
from tests.helpers.model_folders import long_model
from tests.helpers.tiny_models import WORDS


def ids(length: int = 12) -> Tensor:
    return torch.randint(3, WORDS, (1, length))


@torch.no_grad()
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_enabling_takes_a_model_back_from_another_implementation(other: str) -> None:
    model = long_model()
    enable(model, tol=1e-2)
    model.set_attn_implementation(other)
    with avow.record() as nothing:
        model(ids())
    assert len(nothing) == 0 and not nothing.keeps(1e-2)
    enable(model, tol=1e-3)
    with avow.record() as found:
        model(ids())
    assert len(found) == 2 and found.keeps(1e-3)
    disable(model)
    assert model.config._attn_implementation == other, "what was set last, before avow"


@torch.no_grad()
def test_enabling_twice_goes_back_to_what_was_before_the_first() -> None:
    model = long_model()
    enable(model)
    enable(model, tol=1e-2)
    assert [layer.setting.tol for layer in layers(model)] == [1e-2, 1e-2]
    disable(model)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
@pytest.mark.parametrize("way", ["file", "copy"])
def test_an_enabled_model_comes_back_enabled(way: str) -> None:
    model, text = long_model(), ids()
    enable(model, tol=1e-2)
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(text, **asked)
    if way == "file":
        file = io.BytesIO()
        torch.save(model, file)
        again: Any = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        again = copy.deepcopy(model)
    with avow.record() as found:
        out = again.generate(text, **asked, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert isinstance(out.past_key_values, CertifiedCache)
    assert len(found) == 2 * 5 and found.keeps(1e-2)
    disable(again)
    assert again.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "avow", "the first one is another model"


@torch.no_grad()
@pytest.mark.parametrize(("method", "expected"), [("sparse", "sparse"), ("auto", "exact"), ("exact", "exact")])
def test_decoding_honours_the_method(method: str, expected: str) -> None:
    model = long_model()
    enable(model, tol=0.3, method=method)
    cache = CertifiedCache(model.config)
    model(ids(200), past_key_values=cache)
    with avow.record() as found:
        model(ids(1), past_key_values=cache)
    assert {x.method for _, x in found} == {expected} and found.keeps(0.3)


@torch.no_grad()
def test_sparse_attention_from_a_cache_without_a_sketch_is_refused() -> None:
    model = long_model()
    enable(model, tol=0.3, method="sparse")
    cache = CertifiedCache(model.config, bits=None)
    model(ids(20), past_key_values=cache)
    with pytest.raises(
        ParameterError, match=r"method='sparse' needs a sketch of the keys, and this cache keeps none; "
    ):
        model(ids(1), past_key_values=cache)


def test_a_model_with_an_indexer_of_its_own_is_refused_and_stays_as_it_was() -> None:
    config = DeepseekV32Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
    )
    model = DeepseekV32ForCausalLM(config).eval()
    rule = r"model=model.layers.0.self_attn \(DeepseekV32Attention\) chooses keys by an indexer of its own.*; keep attn"
    with pytest.raises(ParameterError, match=rule):
        enable(model)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert model(ids()).logits.isfinite().all()


class Wrapper(nn.Module):
    """As peft wraps models: the adapters are inside, and `generate` is the inner model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self) -> Any:
        return self.base_model.model

    def forward(self, *given: Any, **more: Any) -> Any:
        return self.get_base_model()(*given, **more)


@torch.no_grad()
def test_a_wrapped_model_is_enabled_inside() -> None:
    model = Wrapper(long_model())
    enable(model, tol=1e-2)
    with avow.record() as found:
        model(ids())
    assert len(found) == 2 and found.keeps(1e-2)
    assert statement(model, input_ids=ids()).certificates.keeps(1e-2)
    disable(model)
    assert model.get_base_model().config._attn_implementation == "sdpa"


def test_a_wrapper_of_something_else_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"model=Wrapper must be a transformers.PreTrainedModel, or wrap one as"):
        enable(Wrapper(nn.Linear(2, 2)))
