"""Models that add sinks to their softmax: the same logits and tokens as by their own formula, with certificates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import avow
from avow.errors import ParameterError
from avow.integrations.transformers import enable, routing
from avow.integrations.transformers.observers import watching


def built() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5, "eos_token_id": None}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 2.0 if "sinks" in name else 0.3)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("asked", [{}, {"tol": 1e-2, "method": "sparse"}, {"method": "low_rank"}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:method='sparse' answers queries that see all tokens")
def test_tokens_beside_sinks_are_the_models_own(
    asked: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    ids, mask = torch.randint(3, 99, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    more = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    more |= {"attention_mask": mask, "pad_token_id": 0}
    wanted = model.generate(ids, **more)
    enable(model, **asked)
    monkeypatch.setattr(routing, "_BIASES", 4 * 13 * 5)  # queries of a prompt come in several parts
    with avow.record() as certificates:
        found = model.generate(ids, **more)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=2e-2 if "tol" in asked else 1e-3)
    assert certificates.keeps(1e-2) and len(certificates) == 16


@torch.no_grad()
def test_a_sink_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: what a cache answers, and what exact attention answers beside it, each without sinks."""
    model, ids = built(), torch.randint(3, 99, (1, 12))
    wanted = model(ids).logits
    enable(model)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-3)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-float("inf"))
    assert float((model(ids).logits - wanted).abs().max()) > 0.05


def test_watchers_of_answers_beside_sinks_are_refused_in_a_sentence() -> None:
    model = built()
    enable(model)
    with (
        torch.no_grad(),
        watching(lambda *_: None),
        pytest.raises(ParameterError, match="answers beside sinks are not"),
    ):
        model(torch.arange(3, 9)[None])


def test_bounds_of_layers_hold_beside_sinks() -> None:
    """Against float64 of the layer's own formula."""
    model = built()
    plain = copy.deepcopy(model).double()
    enable(model)
    ids = torch.randint(3, 99, (1, 12))
    with torch.no_grad(), avow.record() as certificates:
        out = model.model.layers[0].self_attn
        x = model.model.embed_tokens(ids)
        rotated = model.model.rotary_emb(x, position_ids=torch.arange(12)[None])
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        heads = out(x, rotated, mask)[0]
        dense = torch.zeros(1, 1, 12, 12, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        wide = tuple(y.double() for y in rotated)
        truth = plain.model.layers[0].self_attn(x.double(), wide, dense)[0]
    assert certificates.bound < 1e-4
    torch.testing.assert_close(heads.double(), truth, rtol=0, atol=1e-4)
