"""A reading says of every head what it reads, and what it leaves out provably moves its answer no further than told."""

from __future__ import annotations

import base64
import re
import zlib
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import avow
from avow import Certificate
from avow.errors import ParameterError
from avow.integrations.transformers import enabling
from avow.integrations.transformers.observers import watching
from avow.integrations.transformers.reading import METHODS, NEXT, STOPS, Reading, next_without, reading_of, whole_words
from avow.lab.reading_data import WEIGHTS, code_number, codes_up, plain_reading, weight_codes
from avow.lab.stories import script_of, story_from, story_names, story_script, story_texts
from avow.nn import KeyValueCache
from avow.numerics.sketch import GROUP
from benchmarks.stories import HEADS, HEADS_OF

TEXT = (
    "the key is in the blue teapot on the shelf, and nobody knows of it but the boy who put the key there; the boy sat"
)


class Letters:
    """A tokenizer of single characters whose texts begin with a neutral token."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + ord(letter) % 90 for letter in text])

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(90 + (i - 3) % 90) if (i - 3) % 90 < 33 else chr((i - 3) % 90) for i in ids)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    built = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, **sizes)).eval()
    with torch.no_grad():
        # A model that was not trained looks everywhere: longer queries choose.
        for name, weights in built.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weights.mul_(12)
    return built


@pytest.fixture(scope="module")
def reading(model: LlamaForCausalLM) -> Reading:
    return reading_of(model, Letters(), TEXT, [40], write=2)


@pytest.fixture(scope="module")
def heads(model: LlamaForCausalLM, reading: Reading) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every head over the whole text, as the model passes them to its attention."""
    ids = [1, *Letters()(TEXT).input_ids]
    for _ in range(len(reading.words) - len(ids)):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(name: str, problem: Any, *_: object) -> None:
        for i in range(problem.q.shape[1]):
            found.append((problem.q[:, i : i + 1], *(x[:, i // 2 : i // 2 + 1] for x in (problem.k, problem.v))))

    with torch.no_grad(), enabling.as_it_was(model), watching(keep):
        enabling.enable(model)
        model(torch.tensor([ids]), use_cache=False)
    return found


def seen(head: tuple[Tensor, Tensor, Tensor], position: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = head
    return q[:, :, position : position + 1], k[:, :, : position + 1], v[:, :, : position + 1]


def average(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None = None) -> Tensor:
    """Softmax attention in float64, written out here, over all tokens or over some."""
    logits = (q.double() @ k.double().mT)[0, 0, 0] / q.shape[-1] ** 0.5
    logits = logits if kept is None else logits.masked_fill(~kept, float("-inf"))
    return logits.softmax(-1) @ v.double()[0, 0]


def test_bounds_and_counts_are_those_of_attend(reading: Reading, heads: list[Any]) -> None:
    left_out = 0
    for row in reading.rows:
        for i, head in enumerate(heads):
            q, k, v = seen(head, row.position)
            for j, stop in enumerate(STOPS):
                certificate = avow.attend(q, k, v, method="sparse", tol=stop).certificate
                assert float(row.bounds[i, j]) == pytest.approx(certificate.bound, rel=1e-9) and certificate.keeps(stop)
                read = int((row.levels[i] > j).sum())
                assert f"read {read / k.shape[-2]:.1%} of the tokens" in certificate.reason
                left_out += k.shape[-2] - read
    assert left_out > 100, "these heads have something to leave out"


def test_a_cache_of_the_same_tokens_reads_the_same_and_promises_the_same(
    reading: Reading, heads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled steps choose among tokens by themselves; without them a cache does what `attend` does.
    monkeypatch.setattr(KeyValueCache, "_by_cpu_steps", lambda *_: "there is no compiled code")
    row, sparse = reading.rows[0], 0
    for i, head in enumerate(heads):
        q, k, v = seen(head, row.position)
        cache = KeyValueCache(1, k.shape[-1])
        cache.append(k, v)
        for j, stop in enumerate(STOPS):
            certificate = cache.attend(q, stop, method="sparse").certificate
            read = int((row.levels[i] > j).sum())
            if certificate.method == "sparse":
                assert float(row.bounds[i, j]) == pytest.approx(certificate.bound, rel=1e-5)
                assert f"read {read / k.shape[-2]:.1%} of the tokens" in certificate.reason
                sparse += 1
            else:
                assert certificate.keeps(stop)
    assert sparse > len(heads) * len(STOPS) / 2


def heads_of_story(name: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A story, and for its last word the levels and the bounds of every head, as its bytes hold them."""
    plain = story_from(story_script(name))
    block, heads, stops = zlib.decompress(base64.b64decode(plain["data"])), plain["layers"] * plain["heads"], len(STOPS)
    start = 0
    for position in plain["rows"]:
        n = position + 1
        if position == plain["prompt"] - 1:
            levels = torch.tensor(list(block[start + heads * n : start + 2 * heads * n])).view(heads, n)
            bounds = block[start + 2 * heads * n : start + 2 * heads * n + heads * stops]
            return plain, levels, torch.tensor([code_number(code) for code in bounds]).view(heads, stops)
        start += 2 * heads * (n + stops)
    raise AssertionError("the last word asks")


def test_what_the_stored_story_says_of_a_head_is_what_attend_says_of_its_tensors() -> None:
    """SmolLM2's own heads, as the wheel has them in half precision: counts differ by what that rounds."""
    plain, levels, bounds = heads_of_story(HEADS_OF)
    stored, same = load_file(str(resources.files("avow.lab.stories") / "heads.safetensors")), 0
    for kind, (layer, head) in HEADS.items():
        own = layer * plain["heads"] + head
        assert plain["kinds"][own] == kind
        q, k, v = (stored[f"{kind}.{name}"].float()[None, None] for name in "qkv")
        for j, stop in enumerate(STOPS):
            certificate = avow.attend(q[:, :, -1:], k, v, method="sparse", tol=stop).certificate
            read, told = round(certificate_share(certificate) * k.shape[-2]), int((levels[own] > j).sum())
            assert abs(read - told) <= 2, (kind, stop)
            if read == told:
                same += 1
                assert 0.9 * certificate.bound <= float(bounds[own, j]) <= min(stop * 1.075, 1.2 * certificate.bound)
    assert same > len(HEADS) * len(STOPS) / 2
    with pytest.raises(AssertionError):  # another head has other numbers
        assert (levels[own + 1] > 0).sum() == (levels[own] > 0).sum()


def certificate_share(certificate: Certificate) -> float:
    """The share of the tokens that was read."""
    found = re.search(r"read ([\d.]+)% of the tokens", certificate.reason)
    assert found is not None
    return float(found[1]) / 100


def test_what_is_left_out_moves_no_answer_further_than_told(reading: Reading, heads: list[Any]) -> None:
    for row in reading.rows:
        for i, head in enumerate(heads):
            q, k, v = seen(head, row.position)
            exact, unit = average(q, k, v), v.double().norm(dim=-1).amax()
            for j in range(len(STOPS)):
                moved = float((average(q, k, v, row.levels[i] > j) - exact).norm() / unit)
                assert moved <= float(row.bounds[i, j]) <= STOPS[j]
                assert float(row.errors[i, j]) == pytest.approx(moved, abs=1e-6)


def test_leaving_out_one_heavy_token_more_breaks_a_bound(reading: Reading, heads: list[Any]) -> None:
    row = reading.rows[-1]
    for i, head in enumerate(heads):
        q, k, v = seen(head, row.position)
        kept = row.levels[i] > 0
        kept[int(row.weights[i].argmax())] = False
        moved = (average(q, k, v, kept) - average(q, k, v)).norm() / v.double().norm(dim=-1).amax()
        assert float(moved) > float(row.bounds[i, 0])


def test_weights_are_softmax_weights_and_next_words_the_models_own(
    model: LlamaForCausalLM, reading: Reading, heads: list[Any]
) -> None:
    row = reading.rows[0]
    q, k, _ = seen(heads[5], row.position)
    expected = ((q.double() @ k.double().mT)[0, 0, 0] / q.shape[-1] ** 0.5).softmax(-1)
    torch.testing.assert_close(row.weights[5], expected, rtol=1e-5, atol=1e-7)
    ids = [1, *Letters()(TEXT).input_ids][: row.position + 1]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).sort(descending=True).values[:NEXT]
    torch.testing.assert_close(torch.tensor([p for _, p in row.exact]).double(), logits, rtol=1e-4, atol=1e-6)


def test_at_a_small_tolerance_next_words_hardly_change_and_at_a_large_one_less_is_read(reading: Reading) -> None:
    for row in reading.rows:
        exact, near = dict(row.exact), dict(row.approximate[0])
        assert all(abs(near.get(word, 0.0) - p) < 0.02 for word, p in list(exact.items())[:3])
        assert list(row.read) == sorted(row.read, reverse=True)
        # A sketch is made of whole groups of 64 tokens: before, everything is read.
        assert row.read[-1] < row.read[0] <= 1 if row.position > 64 else set(row.read) == {1.0}


def test_the_words_that_ask_are_those_named_the_last_given_and_those_written(reading: Reading) -> None:
    given = 1 + len(TEXT)
    assert (reading.prompt, len(reading.words)) == (given, given + 2)
    assert [row.position for row in reading.rows] == [40, given - 1, given, given + 1]
    assert (reading.layers, reading.heads, len(reading.kinds)) == (2, 4, 8)
    assert reading.promises.shape == (8, len(METHODS)) and bool((reading.promises[:, 0] < 1e-3).all())


def test_a_word_asks_by_its_last_token(model: LlamaForCausalLM) -> None:
    words = "".join(reading_of(model, Letters(), TEXT).words)
    word = words[20:25]
    asked = reading_of(model, Letters(), TEXT, [word]).rows[0].position
    assert words[asked - len(word) : asked] == word  # the neutral token has no text


@pytest.mark.parametrize(
    ("text", "asking", "told"),
    [
        ("", [], "text='' has 0 tokens; it must have between 1 and 1023; write something"),
        ("x" * 1024, [], "has 1024 tokens; it must have between 1 and 1023; write a shorter text"),
        (
            "a boy",
            [9],
            "asking=9 is not the position of a word; the text has them from 1 to 5; name a word of the text",
        ),
        ("a boy", ["girl"], "asking='girl' is not in the text; name a word of it, or give a position"),
    ],
)
def test_mistakes_are_told(model: LlamaForCausalLM, text: str, asking: list[Any], told: str) -> None:
    with pytest.raises(ParameterError) as caught:
        reading_of(model, Letters(), text, asking)
    assert told in str(caught.value)


def test_the_model_is_left_as_it_was(model: LlamaForCausalLM, reading: Reading) -> None:
    assert model.config._attn_implementation == "sdpa" and not enabling.enabled(model)


def test_what_is_crossed_out_is_read_by_no_later_token(model: LlamaForCausalLM, reading: Reading) -> None:
    ids, start = [1, *Letters()(TEXT).input_ids], 1 + TEXT.index("blue")
    blue = range(start, start + 4)
    positions = [blue.start - 1, len(ids) - 1]
    (before, after), nothing = next_without(model, Letters(), ids, [blue, range(9, 9)], positions)
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen[blue.stop :, blue.start : blue.stop] = False
    for mask, found in ((seen, [before, after]), (seen.new_ones(seen.shape).tril(), nothing)):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, positions].double()
        for expected, one in zip(logits.softmax(-1), found, strict=True):
            chances = torch.tensor([p for _, p in one]).double()
            torch.testing.assert_close(chances, expected.topk(NEXT).values, rtol=1e-4, atol=1e-6)
    assert before == nothing[0], "what stands before it is as it was"
    assert dict(after)[nothing[1][0][0]] != pytest.approx(nothing[1][0][1], rel=1e-3), "it mattered to what follows"


def test_pieces_of_a_word_are_one_word() -> None:
    words = ["", "A", " blue", " te", "apot", ",", " x", "2", "(", "é", "t", "é", " ", "\n"]
    assert ["".join(words[t] for t in word) for word in whole_words(words)] == [
        *("A", " blue", " teapot", ",", " x2", "(", "été", " ", "\n")
    ]


def test_each_row_that_was_given_is_tried_without_every_word_before_it(model: LlamaForCausalLM) -> None:
    found = reading_of(model, Letters(), TEXT, [40], write=1, cross_out=True)
    spans = whole_words(found.words[: found.prompt])
    assert [len(row.without) for row in found.rows] == [sum(s.stop <= 40 for s in spans), len(spans) - 1, 0]
    ((expected,),) = next_without(model, Letters(), [1, *Letters()(TEXT).input_ids], spans[1:2], [found.prompt - 1])
    tried = found.rows[1].without[1]
    assert dict(tried) == pytest.approx(dict(expected), rel=1e-4)
    plain = plain_reading(found)
    assert plain["starts"] == [s.start for s in whole_words(found.words)]
    assert plain["without"][1][1] == [[word, pytest.approx(p, rel=1e-3)] for word, p in tried[:5]]


def test_codes_of_bounds_never_promise_more_and_lose_little() -> None:
    bounds = torch.logspace(-7.9, 0, 999, dtype=torch.float64)
    told = torch.tensor([code_number(code) for code in codes_up(bounds)], dtype=torch.float64)
    assert bool((told >= bounds).all()) and bool((told <= bounds * 10 ** (1 / 32) * (1 + 1e-12)).all())
    assert list(codes_up(torch.tensor([float("inf"), 1.5, 1e-12]))) == [0, 0, 0]


def test_codes_of_weights_are_within_half_a_percent_where_they_show() -> None:
    weights = torch.linspace(0.05, 1, 777, dtype=torch.float64)
    told = torch.tensor([WEIGHTS[code] for code in weight_codes(weights)], dtype=torch.float64)
    assert float((told - weights).abs().amax()) <= 0.005 + 1e-9


def test_what_the_browser_gets_holds_what_was_found(reading: Reading) -> None:
    plain = story_from(script_of("own", plain_reading(reading, title="Own", about="a test")))
    assert (plain["title"], plain["prompt"], plain["rows"][0]) == ("Own", reading.prompt, 40)
    block = zlib.decompress(base64.b64decode(plain["data"]))
    heads, start = plain["layers"] * plain["heads"], 0
    for row in reading.rows:
        n = row.position + 1
        weights, levels = block[start : start + heads * n], block[start + heads * n : start + 2 * heads * n]
        assert list(levels) == row.levels.flatten().tolist() and weights == weight_codes(row.weights)
        start += 2 * heads * (n + len(STOPS))
    assert len(block) - start == heads * len(METHODS)


@pytest.mark.parametrize("name", story_names())
def test_words_after_the_last_full_group_are_read_by_every_head_at_every_error(name: str) -> None:
    plain = story_from(story_script(name))
    block, heads, start = zlib.decompress(base64.b64decode(plain["data"])), plain["layers"] * plain["heads"], 0
    script = (resources.files("avow.lab") / "static" / "reading_data.js").read_text()
    assert f"const GROUP = {GROUP};" in script, "the page counts the same groups"
    for n in (position + 1 for position in plain["rows"]):
        levels = torch.tensor(list(block[start + heads * n : start + 2 * heads * n])).reshape(heads, n)
        read, full = (levels == len(STOPS)).all(0), n // GROUP * GROUP
        assert read[full:].all() and (full == 0 or not read[:full].all())
        start += 2 * heads * (n + len(STOPS))


@pytest.mark.parametrize("name", story_names())
def test_a_story_holds_its_text_and_changes_with_the_tolerance(name: str) -> None:
    plain, text = story_from(story_script(name)), story_texts()[name]["text"]
    given = "".join(plain["words"][: plain["prompt"]])
    assert given == text and plain["words"][0] == "" and plain["stops"] == list(STOPS)
    assert len(plain["rows"]) == 8 and plain["prompt"] - 1 in plain["rows"]
    last = plain["rows"].index(plain["prompt"] - 1)
    assert plain["read"][last][-1] < 0.5 < plain["read"][last][0]
    assert plain["next"][last]["exact"][0][0] == plain["words"][plain["prompt"]]


def test_all_stories_together_take_at_most_a_megabyte_and_a_half_of_the_wheel() -> None:
    assert sum(len(zlib.compress(story_script(name).encode(), 9)) for name in story_names()) <= 1.5 * 2**20
