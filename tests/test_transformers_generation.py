"""Generating text with avow in a model, in every way that transformers' own tests of generation try.

Those tests (`GenerationTesterMixin`) are in no distribution that can be fetched, so what they ask is asked here in our
words; every test names those it repeats. `tests/test_transformers_cache.py` repeats `test_greedy_generate` and
`test_beam_search_generate` on every architecture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import avow
from avow.integrations.transformers import CertifiedCache, enable
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture


def named(*names: str) -> pytest.MarkDecorator:
    """These architectures, one test each."""
    found = [x for x in ARCHITECTURES if x.name.startswith(names)]
    return pytest.mark.parametrize("architecture", found, ids=lambda architecture: architecture.name)


DECODERS = named("Llama", "Mistral", "GPT2")
GENERATORS = named("Llama", "Mistral", "GPT2", "Bart", "T5")


def prompt(architecture: Architecture, padding: str = "", rows: int = 2) -> dict[str, Tensor]:
    return {name: x[:rows] for name, x in architecture.inputs(padding).items() if name != "decoder_input_ids"}


def generated(model: Any, inputs: dict[str, Any], tokens: int = 6, **more: Any) -> Any:
    """What a model writes, from the same state of the generator every time, with all that can be told about it."""
    torch.manual_seed(1)
    asked = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True} | more
    return model.generate(**inputs, max_new_tokens=tokens, **asked)


def assert_alike(one: Any, other: Any) -> None:
    """The same tokens, for the same reasons."""
    assert torch.equal(one.sequences, other.sequences)
    assert len(one.logits) == len(other.logits)
    torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-4)


@GENERATORS
def test_tokens_are_those_of_eager_attention(architecture: Architecture) -> None:
    """theirs: test_eager_matches_sdpa_generate"""
    model, inputs = architecture.build(), prompt(architecture, "left")
    model.set_attn_implementation("eager")
    wanted = generated(model, inputs, 12)
    enable(model)
    with avow.record() as certificates:
        assert_alike(generated(model, inputs, 12), wanted)
    assert len(certificates) >= 24


@pytest.mark.parametrize("beams", [1, 2])
@GENERATORS
def test_samples_are_those_of_sdpa(architecture: Architecture, beams: int) -> None:
    """theirs: test_sample_generate, test_sample_generate_dict_output, test_beam_sample_generate and its dict_output"""
    model, inputs = architecture.build(), prompt(architecture)
    asked: dict[str, Any] = {
        "do_sample": True,
        "num_beams": beams,
        "num_return_sequences": 2,
        "top_k": 10,
        "temperature": 0.7,
    }
    wanted = generated(model, inputs, **asked)
    enable(model)
    found = generated(model, inputs, **asked)
    assert_alike(found, wanted)
    assert len(found.sequences.unique(dim=0)) > 2


@pytest.mark.parametrize(("beams", "cached"), [(1, False), (1, True), (3, True)])
@named("Mistral", "T5")
def test_all_that_is_told_beside_the_tokens_is_that_of_sdpa(
    architecture: Architecture, beams: int, cached: bool
) -> None:
    """theirs: test_greedy_generate_dict_outputs, test_beam_search_generate_dict_output, and both with use_cache"""
    model, inputs = architecture.build(), prompt(architecture, "left")
    asked: dict[str, Any] = {
        "num_beams": beams,
        "use_cache": cached,
        "output_hidden_states": True,
        "output_scores": True,
    }
    wanted = generated(model, inputs, 4, **asked)
    enable(model)
    found = generated(model, inputs, 4, **asked)
    assert_alike(found, wanted)
    told = [name for name in wanted if name not in ("sequences", "past_key_values")]
    assert found.keys() == wanted.keys() and len(told) >= 3
    for name in told:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("helper", ["same", "random", "prompt"])
@named("Llama", "Mistral", "T5", "Bart")
def test_guessing_ahead_changes_no_token(architecture: Architecture, helper: str) -> None:
    """theirs: test_assisted_decoding_matches_greedy_search, test_prompt_lookup_decoding_matches_greedy_search"""
    model = architecture.build()
    inputs = prompt(architecture, rows=1)
    inputs["input_ids"][:, 6:] = inputs["input_ids"][:, :6]  # something to look up
    enable(model)
    wanted = generated(model, inputs, 8)
    assistant = model if helper == "same" else architecture.build()
    ways = {"prompt_lookup_num_tokens": 2} if helper == "prompt" else {"assistant_model": assistant}
    assert_alike(generated(model, inputs, 8, **ways), wanted)


@DECODERS
def test_guessing_ahead_can_be_sampled(architecture: Architecture) -> None:
    """theirs: test_assisted_decoding_sample"""
    model, inputs = architecture.build(), prompt(architecture, rows=1)
    ways = {"do_sample": True, "assistant_model": model}
    wanted = generated(model, inputs, 8, **ways)
    enable(model)
    assert_alike(generated(model, inputs, 8, **ways), wanted)


@DECODERS
def test_much_padding_on_the_left_changes_nothing(architecture: Architecture) -> None:
    """theirs: test_left_padding_compatibility"""
    model, ids = architecture.build(), torch.randint(3, WORDS, (2, 12))
    enable(model)
    mask = torch.ones_like(ids)
    padded, masked = (torch.cat([torch.zeros(2, 32, dtype=torch.long), x], 1) for x in (ids, mask))
    places = (masked.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        found = model(padded, attention_mask=masked, position_ids=places).logits
    torch.testing.assert_close(found[:, 32:], wanted, rtol=1e-5, atol=1e-5)
    alone = generated(model, {"input_ids": ids})
    beside = generated(model, {"input_ids": padded, "attention_mask": masked})
    assert torch.equal(alone.sequences, beside.sequences[:, 32:])


@GENERATORS
def test_the_past_is_kept_as_transformers_keeps_it(architecture: Architecture) -> None:
    """theirs: test_past_key_values_format"""
    model, inputs = architecture.build(), prompt(architecture)

    def past() -> Any:
        kept = generated(model, inputs).past_key_values
        return getattr(kept, "self_attention_cache", kept)

    theirs = past()
    enable(model)
    ours = past()
    assert type(theirs) is DynamicCache and type(ours) is CertifiedCache
    assert len(ours) == len(theirs) == 2 and ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        length = other.keys.shape[-2]
        torch.testing.assert_close(mine.keys[:, :, -length:], other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.values[:, :, -length:], other.values, rtol=0, atol=1e-5)


@DECODERS
def test_three_tokens_and_one_more_are_four(architecture: Architecture) -> None:
    """theirs: test_generate_continue_from_past_key_values"""
    model, inputs = architecture.build(), prompt(architecture)
    enable(model)
    whole, part = generated(model, inputs, 4), generated(model, inputs, 3)
    further = {"input_ids": part.sequences, "attention_mask": torch.ones_like(part.sequences)}
    rest = generated(model, further, 1, past_key_values=part.past_key_values)
    assert torch.equal(rest.sequences, whole.sequences)
    torch.testing.assert_close(rest.logits[-1], whole.logits[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}])
@DECODERS
def test_embeddings_are_read_as_their_tokens_are(architecture: Architecture, more: dict[str, Any]) -> None:
    """theirs: test_generate_from_inputs_embeds, test_generate_from_inputs_embeds_with_static_cache"""
    model, inputs = architecture.build(), prompt(architecture)
    enable(model)
    wanted = generated(model, inputs, **more)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    found = generated(model, embedded | {"attention_mask": inputs["attention_mask"]}, **more)
    assert torch.equal(found.sequences, wanted.sequences[:, inputs["input_ids"].shape[1] :])
    other = generated(model, {"inputs_embeds": torch.rand_like(embedded["inputs_embeds"])}, **more)
    assert not torch.allclose(other.logits[0], wanted.logits[0])


@pytest.mark.parametrize("type_", [torch.float32, torch.float16])
@DECODERS
def test_a_static_cache_gives_the_tokens_of_ours(architecture: Architecture, type_: torch.dtype) -> None:
    """theirs: test_generate_with_static_cache"""
    model, inputs = architecture.build().to(type_), prompt(architecture, "left")
    enable(model)
    wanted = generated(model, inputs, 10)
    found = generated(model, inputs, 10, cache_implementation="static", disable_compile=True)
    assert isinstance(found.past_key_values, StaticCache)
    if type_ == torch.float32:
        assert_alike(found, wanted)
    for mine, other in zip(found.logits, wanted.logits, strict=True):
        # Rounding may choose between two tokens that are as likely: from there on the texts are different ones.
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=3e-2)
        if not torch.equal(mine.argmax(-1), other.argmax(-1)):
            break


@DECODERS
def test_nothing_to_start_from_is_a_start(architecture: Architecture) -> None:
    """theirs: test_generate_without_input_ids"""
    model = architecture.build()
    wanted = generated(model, {})
    enable(model)
    assert_alike(generated(model, {}), wanted)


@pytest.mark.parametrize("assisted", [False, True])
@DECODERS
def test_keeping_every_logit_changes_no_token(architecture: Architecture, assisted: bool) -> None:
    """theirs: test_generate_methods_with_logits_to_keep, test_assisted_decoding_with_logits_to_keep"""
    model, inputs = architecture.build(), prompt(architecture, rows=1)
    enable(model)
    more = {"assistant_model": model} if assisted else {}
    assert_alike(generated(model, inputs, logits_to_keep=0, **more), generated(model, inputs, **more))


def test_a_past_that_is_lost_is_noticed() -> None:
    """The sabotage: with its keys gone, the past is continued otherwise."""
    model, inputs = ARCHITECTURES[0].build(), prompt(ARCHITECTURES[0])
    enable(model)
    whole, part = generated(model, inputs, 4), generated(model, inputs, 3)
    part.past_key_values.layers[0].cache._buffers["keys"].zero_()
    further = {"input_ids": part.sequences, "attention_mask": torch.ones_like(part.sequences)}
    rest = generated(model, further, 1, past_key_values=part.past_key_values)
    assert not torch.allclose(rest.logits[-1], whole.logits[-1], atol=1e-2)
