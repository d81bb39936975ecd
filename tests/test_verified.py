"""Verified generation: tokens of exact attention, whatever drafts say, by every rule that a loop may choose them by."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import avow
from avow.errors import ParameterError
from avow.integrations.transformers import CertifiedCache, Verification, disable, enable, forward, routing, verified
from avow.integrations.transformers.enabling import as_it_was, layers
from tests.helpers.layer_audit import ask_sketches
from tests.helpers.tiny_models import ARCHITECTURES, WORDS

LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3 = ARCHITECTURES[:5]
NEOX, BART = (next(x for x in ARCHITECTURES if x.name.startswith(name)) for name in ("GPTNeoX", "Bart"))
LONG = {"max_position_embeddings": 1024}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}
# Drafts within this are often wrong: a test where none is would say little.
ROUGH = 0.3


@pytest.fixture(autouse=True)
def drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches ask their sketch too."""
    ask_sketches(monkeypatch)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return LLAMA.build(**LONG)


@pytest.fixture
def model(llama: Any) -> Iterator[Any]:
    yield llama
    if "forward" in vars(llama):
        disable(llama)


def text(length: int = 200, rows: int = 1) -> Tensor:
    return torch.randint(3, WORDS, (rows, length))


def generated(model: Any, ids: Tensor, tokens: int = 48, **more: Any) -> Any:
    """What a model writes, from the same state of the generator every time."""
    torch.manual_seed(1)
    asked = {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True, "output_scores": True} | more
    return model.generate(ids, max_new_tokens=tokens, **asked)


def assert_alike(found: Any, wanted: Any) -> Verification:
    """The same tokens, for the same reasons; and what was drafted and verified for these."""
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=0, atol=1e-3)
    told: Verification = found.past_key_values.verification
    assert found.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    return told


@pytest.mark.parametrize(
    "rule",
    [
        GREEDY,
        SAMPLED,
        GREEDY | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        SAMPLED | {"repetition_penalty": 1.3, "min_p": 0.05},
        SAMPLED | {"typical_p": 0.9, "bad_words_ids": [[5], [6, 7]]},
        GREEDY | {"prefix_allowed_tokens_fn": lambda _, ids: [x for x in range(3, 90) if x % 3 != int(ids[-1]) % 3]},
    ],
    ids=["greedy", "sampled", "penalties", "sampled with penalties", "typical", "constrained"],
)
def test_every_token_is_that_of_exact_attention(model: Any, rule: dict[str, Any]) -> None:
    """With the same seed, also those that are drawn: drafts take the loop's random numbers and give them back."""
    ids = text()
    wanted = generated(model, ids, **rule)
    for tol in (1e-2, ROUGH):
        enable(model, tol=tol, method="sparse", verify=16)
        told = assert_alike(generated(model, ids, **rule), wanted)
        assert told.tokens == 47 and told.drafted >= told.accepted + told.redrawn > 20
        assert told.tokens == told.accepted + told.passes
        assert 0 < told.bound <= tol and 0 < told.read < 1
        assert told.redrawn > 0 if tol == ROUGH else told.acceptance > 0.9


def test_drafts_that_are_taken_at_their_word_or_for_others_change_the_text(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotage: what the test above compares does differ if a pass answers as drafts do, or another token's row."""
    ids = text()
    wanted = generated(model, ids, **GREEDY)
    enable(model, tol=ROUGH, method="sparse", verify=16)
    with monkeypatch.context() as patch:
        patch.setattr(verified.DecodingForward, "_round", unverified(verified.DecodingForward._round))
        assert not torch.equal(generated(model, ids, **GREEDY).sequences, wanted.sequences)
    with monkeypatch.context() as patch:
        patch.setattr(verified._Ahead, "take", any_token)
        assert not torch.equal(generated(model, ids, **GREEDY).sequences, wanted.sequences)


def any_token(self: Any, step: Any) -> bool | None:
    """Sabotage: a draft is taken whatever was asked for."""
    self.used += 1
    self.length += 1
    verified._show(step.cache, self.length)
    return True


def unverified(honest: Any) -> Any:
    """Sabotage: a round whose pass is sparse, too, so that every draft is accepted."""

    def verify(self: Any, *arguments: Any) -> Any:
        with verified._drafts():
            return honest(self, *arguments)

    return verify


@pytest.mark.parametrize("architecture", [MIXTRAL, QWEN2, QWEN3, NEOX], ids=lambda x: x.name)
def test_other_architectures_are_verified_too(architecture: Any) -> None:
    model, ids = architecture.build(**LONG), text()
    wanted = generated(model, ids, 24)
    enable(model, tol=0.1, method="sparse", verify=8)
    assert assert_alike(generated(model, ids, 24), wanted).accepted > 5


def test_a_loop_of_ones_own_is_verified_as_well(model: Any) -> None:
    ids = text()
    enable(model, tol=ROUGH, method="sparse", verify=16)
    written = []
    cache = CertifiedCache(model.config)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        for i in range(40):
            written.append(logits.argmax(-1, keepdim=True))
            out = model(written[-1], past_key_values=cache)
            logits = out.logits[:, -1]
            assert out.past_key_values is cache and cache.get_seq_length() == ids.shape[1] + i + 1
            assert {layer.keys.shape[2] for layer in cache.layers} == {ids.shape[1] + i + 1}
    told = cache.verification
    disable(model)
    assert torch.equal(torch.cat([ids, *written], 1), generated(model, ids, 40, **GREEDY).sequences)
    assert told.accepted > 20 and told.redrawn > 0


def test_tokens_behind_a_draft_that_nobody_wanted_are_forgotten(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a caller goes on with, its logits and the cache are those without drafts."""
    monkeypatch.setattr(verified.Drafts, "learn", lambda *_: None)
    plain = copy.deepcopy(model)
    enable(model, tol=1e-2, method="sparse", verify=16)
    mine, theirs = CertifiedCache(model.config), DynamicCache(config=model.config)

    @torch.no_grad()
    def both(ids: Tensor) -> None:
        found, wanted = (one(ids, past_key_values=cache).logits for one, cache in ((model, mine), (plain, theirs)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        assert mine.get_seq_length() == theirs.get_seq_length()

    def drafted(place: int) -> Tensor:
        found: Tensor = mine.drafts.ahead.drafts[:, place : place + 1]
        return found

    both(text())
    for accepted in (0, 1, 2, 0, 3):
        both(text(1))
        for place in range(accepted):
            both(drafted(place))
    both(text(5))
    both(text(1))
    both(drafted(0))
    for cache in (mine, theirs):
        cache.crop(-3)
    both(text(1))
    both(drafted(0))
    both(text(40))
    assert mine.verification.accepted == 8 and mine.verification.redrawn == 4
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=1e-4)


LETTERS = 5


@pytest.fixture(scope="module")
def speller() -> Any:
    """A model of few words, whose sequences can be counted."""
    torch.manual_seed(5)
    return LLAMA.build(**LONG, vocab_size=LETTERS, eos_token_id=None, pad_token_id=None)


@torch.no_grad()
def truth(model: Any, ids: Tensor, temperature: float) -> Tensor:
    """The probability of each three letters behind a text, (letters, letters, letters), in float64."""
    triples = torch.cartesian_prod(*[torch.arange(LETTERS)] * 3)
    exact = copy.deepcopy(model).double()
    logits = exact(torch.cat([ids.expand(len(triples), -1), triples], 1)).logits[:, -4:-1] / temperature
    logs = logits.log_softmax(-1).gather(-1, triples[:, :, None])[..., 0].sum(-1)
    return logs.exp().view(LETTERS, LETTERS, LETTERS)


def deviation(model: Any, ids: Tensor, wanted: Tensor, temperature: float, rows: int = 4, rounds: int = 75) -> float:
    """How likely the letters of verified generation would be farther from the wanted frequencies: chi-squared."""
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        asked = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 4}
        made = model.generate(ids.expand(rows, -1), **asked)[:, ids.shape[1] :]
        counts.update(tuple(row[:3]) for row in made.tolist())
    total = rows * rounds
    expected = {cell: total * float(wanted[cell]) for cell in itertools.product(range(LETTERS), repeat=3)}
    large = [cell for cell, x in expected.items() if x >= 5]
    found, awaited = [counts[cell] for cell in large], [expected[cell] for cell in large]
    found, awaited = [*found, total - sum(found)], [*awaited, total - sum(awaited)]
    assert len(large) > 15
    return float(stats.chisquare(found, awaited).pvalue)


def test_verified_samples_have_the_models_own_distribution(speller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where drafts are bad: answers are turned around. Drafts that are taken at their word are caught."""
    torch.manual_seed(7)
    ids, temperature = torch.randint(LETTERS, (1, 140)), 2.0
    wanted = truth(speller, ids, temperature)
    honest = routing.attended

    def mixed(*arguments: Any) -> Any:
        out, certificate = honest(*arguments)
        return (out if verified.drafting() is None else -2 * out), certificate

    monkeypatch.setattr(forward, "attended", mixed)
    enable(speller, tol=1e-2, method="sparse", verify=4)
    try:
        assert deviation(speller, ids, wanted, temperature) > 1e-2
        with monkeypatch.context() as patch:
            patch.setattr(verified.DecodingForward, "_round", unverified(verified.DecodingForward._round))
            assert deviation(speller, ids, wanted, temperature) < 1e-6
    finally:
        disable(speller)


@torch.no_grad()
def test_a_draft_at_another_place_is_not_taken(model: Any) -> None:
    """Rows of a pass are for the places behind its token: a caller who skips one gets what it asks for."""
    plain = copy.deepcopy(model)
    enable(model, tol=1e-2, method="sparse", verify=8)
    mine, theirs = CertifiedCache(model.config), DynamicCache(config=model.config)
    found = []
    for one, cache in ((model, mine), (plain, theirs)):
        torch.manual_seed(3)
        one(text(), past_key_values=cache)
        token, logits = text(1), []
        for place in (200, 201, 220, 221, None):
            at = {} if place is None else {"position_ids": torch.tensor([[place]])}
            logits.append(one(token, past_key_values=cache, **at).logits[:, -1])
            token = logits[-1].argmax(-1, keepdim=True)
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert mine.verification.accepted == 2 and mine.verification.redrawn == 0


class Words(BaseStreamer):  # type: ignore[misc]  # its types are not read
    """Keeps what is streamed to it."""

    def __init__(self) -> None:
        self.put_so_far: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_so_far.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def test_tokens_are_streamed_one_by_one(model: Any) -> None:
    ids, streamer = text(), Words()
    enable(model, tol=ROUGH, method="sparse", verify=16)
    found = generated(model, ids, 30, streamer=streamer)
    assert streamer.ended and len(streamer.put_so_far) == 31
    assert torch.equal(torch.cat(streamer.put_so_far), found.sequences[0])
    assert found.past_key_values.verification.accepted > 5


def test_generation_in_a_thread_that_streams_is_recorded_with_its_drafts(model: Any) -> None:
    enable(model, tol=1e-2, method="sparse", verify=8)
    streamer = Words()
    with avow.record() as certificates:
        thread = threading.Thread(target=generated, args=(model, text(), 12), kwargs={"streamer": streamer})
        thread.start()
        thread.join()
    assert streamer.ended and certificates.keeps(1e-2)
    assert {"sparse", "exact"} == {x.method for _, x in certificates}


def test_generation_ends_with_a_stop_as_it_does_without_drafts(model: Any) -> None:
    ids = text()
    whole = generated(model, ids, 40).sequences[0, ids.shape[1] :]
    wanted = generated(model, ids, 40, eos_token_id=int(whole[17]), pad_token_id=0)

    class Third(StoppingCriteria):  # type: ignore[misc]  # its types are not read
        def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] == ids.shape[1] + 13)

    other = generated(model, ids, 40, stopping_criteria=StoppingCriteriaList([Third()]))
    assert wanted.sequences.shape[1] <= ids.shape[1] + 18 and other.sequences.shape[1] == ids.shape[1] + 13
    enable(model, tol=1e-2, method="sparse", verify=16)
    assert_alike(generated(model, ids, 40, eos_token_id=int(whole[17]), pad_token_id=0), wanted)
    # Stop strings come with a tokenizer, which transformers hands on to the model.
    more = {"stopping_criteria": StoppingCriteriaList([Third()]), "tokenizer": object()}
    told = assert_alike(generated(model, ids, 40, **more), other)
    assert told.accepted > 5


def test_what_is_written_goes_on_from_a_cache_that_was_returned(model: Any) -> None:
    ids = text()
    wanted = generated(model, ids, 40)
    enable(model, tol=1e-2, method="sparse", verify=16)
    half = generated(model, ids, 17)
    again = io.BytesIO()
    torch.save(half.past_key_values, again)
    again.seek(0)
    for cache in (copy.deepcopy(half.past_key_values), torch.load(again, weights_only=False), half.past_key_values):
        rest = generated(model, half.sequences, 23, past_key_values=cache)
        assert torch.equal(rest.sequences, wanted.sequences)


def test_a_cache_with_drafts_is_freed_with_its_last_reference(model: Any) -> None:
    enable(model, tol=1e-2, method="sparse", verify=8)
    cache = CertifiedCache(model.config)
    with torch.no_grad():
        model(text(), past_key_values=cache)
        model(text(1), past_key_values=cache)
    assert cache.drafts.ahead is not None
    watched = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert watched() is None
    finally:
        gc.enable()


def test_a_batch_is_drafted_together(model: Any) -> None:
    ids = text(rows=3)
    for rule in (GREEDY, SAMPLED):
        wanted = generated(model, ids, 32, **rule)
        end = int(wanted.sequences[1, ids.shape[1] + 8])
        stopped = generated(model, ids, 32, eos_token_id=end, pad_token_id=0, **rule)
        enable(model, tol=0.05, method="sparse", verify=16)
        assert assert_alike(generated(model, ids, 32, **rule), wanted).accepted > 10
        assert_alike(generated(model, ids, 32, eos_token_id=end, pad_token_id=0, **rule), stopped)
        disable(model)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_beams": 3}, "beams are compared after every token"),
        ({"num_beams": 2, "do_sample": True}, "beams are compared after every token"),
        ({"output_hidden_states": True}, "output_hidden_states was asked for"),
        ({"padding": True}, "a mask hides tokens"),
    ],
    ids=["beams", "sampled beams", "hidden states", "padding"],
)
def test_what_cannot_be_drafted_is_exact_and_says_why(model: Any, more: dict[str, Any], why: str) -> None:
    ids = text(rows=2)
    more = dict(more)
    if more.pop("padding", False):
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        more |= {"attention_mask": mask, "pad_token_id": 0}
    wanted = generated(model, ids, 8, **more)
    enable(model, tol=ROUGH, method="sparse", verify=16)
    with avow.record() as certificates:
        told = assert_alike(generated(model, ids, 8, **more), wanted)
    assert told.undrafted == {why: told.tokens} and told.drafted == 0 and told.tokens >= 7
    assert {x.method for _, x in certificates} == {"exact"}


def test_windows_and_other_caches_are_exact_and_say_why() -> None:
    model, ids = MISTRAL.build(**LONG), text()
    wanted = generated(model, ids, 8)
    enable(model, tol=ROUGH, method="sparse", verify=16)
    told = assert_alike(generated(model, ids, 8), wanted)
    assert told.undrafted == {"layer 0 has a sliding window, whose tokens move and cannot be taken back": 7}
    own = generated(model, ids, 8, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(own.sequences, wanted.sequences)


def test_nothing_is_drafted_where_a_draft_would_read_everything(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    enable(model, tol=1e-2, verify=16)
    told = generated(model, text(), 8).past_key_values.verification
    assert told.drafted == 0 and told.passes == told.tokens == 7
    assert list(told.undrafted) == [
        "drafts would not be sparse: cache too short for sparse decoding (200 tokens)"
    ] or all(why.startswith("drafts would not be sparse: cache too short") for why in told.undrafted)


class Counting(LogitsProcessor):  # type: ignore[misc]  # its types are not read
    """A processor that remembers what it was called with, and shifts the scores by how often that was."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores.roll(len(self.lengths) % 3, -1)


def test_a_processor_with_a_memory_is_called_once_for_every_token(model: Any) -> None:
    ids = text()
    wanted = generated(model, ids, 24, logits_processor=LogitsProcessorList([Counting()]))
    enable(model, tol=1e-2, method="sparse", verify=16)
    mine = Counting()
    found = generated(model, ids, 24, logits_processor=LogitsProcessorList([mine]))
    assert torch.equal(found.sequences, wanted.sequences)
    assert mine.lengths == list(range(200, 224))
    assert found.past_key_values.verification.redrawn > 0


def test_fewer_tokens_are_drafted_where_drafts_are_wrong() -> None:
    drafts = verified.Drafts(Verification())
    drafts.learn(4, 4, 16)
    drafts.learn(8, 8, 16)
    drafts.learn(16, 16, 16)
    assert drafts.many == 16 and drafts.wait == 0
    drafts.learn(10, 16, 16)
    assert drafts.many == 10 and drafts.wait == 0
    drafts.learn(1, 10, 16)
    assert drafts.many == 4 and drafts.wait == 8
    drafts.learn(0, 4, 16)
    assert drafts.wait == 16
    drafts.learn(4, 4, 16)
    drafts.wait = 0
    drafts.learn(0, 8, 16)
    assert drafts.wait == 8


def test_a_draft_that_fails_leaves_the_cache_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enable(model, tol=1e-2, method="sparse", verify=8)
    cache, ids = CertifiedCache(model.config), text()
    calls = itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return chosen(*arguments)

    with torch.no_grad():
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            chosen = verified._chosen
            patch.setattr(verified, "_chosen", failing)
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 200
        found = model(ids[:, :1], past_key_values=cache).logits
        wanted = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_disabling_leaves_no_trace_and_copies_draft_for_themselves(model: Any) -> None:
    before = set(vars(model))
    enable(model, tol=1e-2, method="sparse", verify=8)
    twin = copy.deepcopy(model)
    with as_it_was(model):
        disable(model)
    assert model.forward.most == 8 and {str(x.drafts) for x in layers(model)} == {"sparse (tol=0.01)"}
    enable(model, tol=1e-2)
    assert "forward" not in vars(model)
    disable(model)
    assert set(vars(model)) == before
    assert twin.forward.model is twin
    assert generated(twin, text(), 12).past_key_values.verification.accepted > 0
    disable(twin)
    assert set(vars(twin)) == before


def test_a_forward_that_others_put_there_is_still_called(model: Any) -> None:
    called = []

    def theirs(*given: Any, **named: Any) -> Any:
        called.append(named)
        return type(model).forward(model, *given, **named)

    model.forward = theirs
    enable(model, tol=1e-2, method="sparse", verify=8)
    assert generated(model, text(), 12).past_key_values.verification.accepted > 0 and called
    disable(model)
    assert model.forward is theirs
    del model.forward


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"verify": 0}, "verify=0 must be a whole number of at least 1"),
        ({"verify": 32}, "verify=32 must be at most 31; try verify=16"),
        ({"verify": 2.5}, "verify=2.5"),
        ({"tol": None}, "verify=16 verifies drafts, which need a tolerance; give tol=, such as 1e-2"),
        ({"method": "random_features", "features": 16}, "method=random_features does not draft single tokens"),
    ],
)
def test_what_cannot_draft_is_refused(model: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        enable(model, **{"tol": 1e-2, "verify": 16} | more)
    assert "forward" not in vars(model)


def test_a_model_with_an_encoder_is_refused() -> None:
    with pytest.raises(ParameterError, match="does not write a text token by token from one cache; use a decoder-only"):
        enable(BART.build(), tol=1e-2, verify=16)


def test_the_statement_is_printed_in_the_readers_words() -> None:
    told = Verification(1e-2, 100, 10, 96, 90, 2, {"the last tokens": 2}, 9.5e-3, 240, 0.27)
    assert str(told).splitlines() == [
        "100 tokens by exact attention, in 10 passes",
        "96 drafted: 90 accepted and 2 redrawn (97.8% accepted), 4 not compared",
        "drafts read 27.0% of the tokens, within 9.5e-03 of exact attention in each layer (240 answers looked at; "
        "all keep 0.01)",
        "2 tokens without drafts: the last tokens",
    ]
