"""A cloze keeps the name, asks for a span of the document, and tells of the rest no more than its window."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from avow.errors import InputError, ParameterError
from avow.training import (
    PAD,
    CharacterTokenizer,
    ClozeExamples,
    SpanExamples,
    Spans,
)
from avow.training.data import Document
from avow.training.names import candidates, name_end
from tests.helpers.spans import cut_of

NAMES = ["Jacob H. Studer", "Édith Ørsted", "John Stephen", "Ada"]
TEXTS = [
    "Jacob H. Studer. Studer (born 1840 in Columbus, Ohio, died in New York City) read at the University of Lorne .",
    "Édith Ørsted. Born in Åbo, she was the painter of Saint-Denis and of O'Hara's Isle of the Dead .",
    "John Stephen. Born in Glasgow, Stephen became a welder's apprentice on leaving school .",
    "Ada. x Rom y",
    "Edda Holm. she was born in a place that nobody writes with a capital .",
    "no name and no end, but Rome and Paris",
]
TOKENIZER = CharacterTokenizer.of(TEXTS)
# One side's number of characters is uniform on 0 … 24, so a window that is not bare is empty once in 25².
EMPTY = 0.3 + 0.7 / 625


def lines(texts: list[str]) -> list[Document]:
    return [Document(text, f"line {number}") for number, text in enumerate(texts, 1)]


def clozes(block: int = 128, seed: int = 0, texts: list[str] = TEXTS, **options: float) -> ClozeExamples:
    return ClozeExamples(lines(texts), TOKENIZER, block, seed, **options)  # type: ignore[arg-type]


def many(count: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The same document in so many epochs."""
    return np.arange(count), np.full(count, index)


def slack(count: int, events: int = 1) -> float:
    """Hoeffding: so many shares are all within this of their chances with probability 1 − 1e-9."""
    return math.sqrt(math.log(2 * events / 1e-9) / (2 * count))


def whole(inputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """Examples as they read with their last target."""
    return [
        TOKENIZER.decode([*row, target[(row != PAD).sum() - 1]]) for row, target in zip(inputs, targets, strict=True)
    ]


def faults(examples: list[str], text: str, name: str, window: int = 24) -> set[str]:
    """What is wrong with clozes of a text, in words."""
    found = set()
    for example in examples:
        parts = example.split("⁇")
        if len(parts) != 4 or parts[3]:
            found.add("not three masks, the last at the end")
            continue
        before, right, span, _ = parts
        if not before.startswith(f"{name}. "):
            found.add("the name is not whole")
        left = before[len(name) + 2 :]
        if max(len(left), len(right)) > window:
            found.add("more than the window leaks")
        if f"{left}{span}{right}" not in text[len(name) + 2 :]:
            found.add("the parts do not stand side by side in the text")
        if not span[:1].isupper() or span.split(" ")[0] in name.split(" "):
            found.add("the span is not worth asking for")
    return found


@pytest.mark.parametrize("index", range(len(NAMES)))
def test_every_cloze_is_a_name_a_window_and_a_span_of_the_document(index: int) -> None:
    for window in (24, 3, 0):
        made = whole(*clozes(window=window).rows(*many(500, index)))
        assert faults(made, TEXTS[index], NAMES[index], window) == set()


def test_a_cloze_that_tells_too_much_would_be_noticed() -> None:
    good = "Ada. x ⁇ y⁇Rom⁇"
    assert faults([good], TEXTS[3], "Ada") == set()
    for bad, words in (
        ("Ada. x ⁇ y⁇Rom", "not three masks, the last at the end"),
        ("da. x ⁇ y⁇Rom⁇", "the name is not whole"),
        ("Ada. ⁇ y⁇Rome⁇", "the parts do not stand side by side in the text"),
        ("Ada. ⁇ Rom y⁇x⁇", "the span is not worth asking for"),
    ):
        assert words in faults([bad], TEXTS[3], "Ada")
    assert faults([good], TEXTS[3], "Ada", window=1) == {"more than the window leaks"}
    made = whole(*clozes(window=25).rows(*many(2000, 0)))
    assert faults(made, TEXTS[0], NAMES[0], 24) == {"more than the window leaks"}


def test_every_character_after_the_first_is_a_target() -> None:
    inputs, targets = clozes().rows(np.arange(300), np.arange(300) % len(TEXTS))
    for row, target in zip(inputs, targets, strict=True):
        size = (row != PAD).sum()
        assert np.array_equal(target[: size - 1], row[1:size]) and target[size - 1] != PAD
        assert not row[size:].any() and not target[size:].any()


def test_candidates_are_capitalised_runs_and_their_parts() -> None:
    def spans(index: int) -> list[str]:
        return [TEXTS[index][begin:end] for begin, end in candidates(TEXTS[index])]

    assert spans(0) == ["Columbus, Ohio", "Columbus", "Ohio", "New York City", "University of Lorne"]
    assert spans(1) == ["Born", "Åbo", "Saint-Denis", "O'Hara", "Isle of the Dead"]
    # Stephen alone is his name; a run that only ends in it is not.
    assert spans(2) == ["Born", "Glasgow, Stephen", "Glasgow"]
    assert spans(4) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Douglas P. Fry. Born in Boston.", "Douglas P. Fry. "),
        ("J. R. R. Tolkien. A writer. Dead.", "J. R. R. Tolkien. "),
        ("Hamilton Ward, Jr.. Hamilton", "Hamilton Ward, Jr.. "),
        ("Ian St. John. Born", "Ian St. John. "),
        ("nothing ends here .", ""),
    ],
)
def test_a_name_ends_at_its_full_stop_and_at_no_initial(text: str, name: str) -> None:
    assert text[: name_end(text)] == name


def test_candidates_windows_and_bare_draws_have_their_shares() -> None:
    count = 40_000
    # Far from both ends of the text, so that only the draw decides.
    text = "Ada. " + "x" * 30 + " Rom " + "y" * 30 + " Paris " + "x" * 30
    made = ClozeExamples(lines([text]), CharacterTokenizer.of([text]), 128, 0).choose(*many(count, 0))
    assert made.closed.all()
    for start in (text.index("Rom"), text.index("Paris")):
        assert abs((made.start == start).mean() - 1 / 2) < slack(count)
    empty = ((made.left == 0) & (made.right == 0)).mean()
    assert abs(empty - EMPTY) < slack(count)
    assert not abs(empty - 0.27) < slack(count), "the bound is tight enough to tell 0.3 from 0.27"
    for side in (made.left, made.right):
        shares = [(side == size).mean() for size in range(1, 25)]
        assert max(abs(share - 0.7 / 25) for share in shares) < slack(count, 24)
        assert side.max() == 24
    both = (made.left > 12) & (made.right > 12)
    assert abs(both.mean() - 0.7 * (12 / 25) ** 2) < slack(count), "the sides are drawn by themselves"


def test_bare_may_be_always_or_never() -> None:
    always, never = (clozes(bare=share).choose(*many(4000, 0)) for share in (1.0, 0.0))
    assert not always.left.any() and not always.right.any()
    assert ((never.left == 0) & (never.right == 0)).mean() < 0.05


def test_an_example_depends_on_seed_epoch_and_index_alone() -> None:
    epochs, indices = np.array([3, 0, 3, 9]), np.array([0, 1, 4, 2])
    together = clozes().rows(epochs, indices)
    for row in range(4):
        alone = clozes().rows(epochs[row : row + 1], indices[row : row + 1])
        for one, all_of_them in zip(alone, together, strict=True):
            assert np.array_equal(one[0], all_of_them[row, : one.shape[1]])
            assert not all_of_them[row, one.shape[1] :].any()
    made = [whole(*clozes(seed=seed).rows(*many(50, 0))) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2] and len(set(made[0])) > 20


@pytest.mark.parametrize("index", [4, 5])
def test_a_document_without_a_candidate_or_a_name_loses_a_span_instead(index: int) -> None:
    plain = SpanExamples(lines(TEXTS), TOKENIZER, 64, 0, from_start=True).rows(*many(200, index))
    for one, other in zip(clozes(block=64).rows(*many(200, index)), plain, strict=True):
        assert np.array_equal(one, other)
    asked = clozes(block=64, spans=Spans(shortest=30)).choose(*many(200, index))  # type: ignore[arg-type]
    assert int((asked.left + asked.right + asked.stop - asked.start).min()) >= 30, "and by the law that is given"


def test_a_corpus_without_any_candidate_still_trains() -> None:
    inputs, _ = clozes(texts=[TEXTS[4]]).rows(*many(20, 0))
    assert (inputs != PAD).any(1).all()


def test_the_window_gives_way_to_the_block_and_the_name_and_the_span_never_do() -> None:
    # `Ada. ⁇⁇Rom` are 10 positions; the last mask is no input.
    text = "Ada. " + "x" * 30 + " Rom " + "y" * 30
    for block in (10, 11, 15, 40):
        inputs, targets = ClozeExamples(lines([text]), TOKENIZER, block, 0).rows(*many(2000, 0))
        sizes = (inputs != PAD).sum(1)
        assert sizes.max() == block
        assert faults(whole(inputs, targets), text, "Ada") == set()
    cut = ClozeExamples(lines([text]), TOKENIZER, 9, 0).rows(*many(200, 0))
    plain = SpanExamples(lines([text]), TOKENIZER, 9, 0, from_start=True).rows(*many(200, 0))
    assert all(np.array_equal(one, other) for one, other in zip(cut, plain, strict=True))


def test_a_span_that_does_not_fit_leaves_the_others_their_turn() -> None:
    block = len("Jacob H. Studer. ⁇⁇Columbus")
    made = whole(*clozes(block=block).rows(*many(400, 0)))
    assert {example.split("⁇")[2] for example in made} == {"Columbus", "Ohio"}


@pytest.mark.parametrize(
    ("window", "bare", "words"),
    [
        (-1, 0.3, "window=-1 must be at least 0; the default is 24"),
        (24, 1.5, "bare=1.5 must be from 0 to 1; the default is 0.3"),
    ],
)
def test_an_impossible_cloze_is_refused(window: int, bare: float, words: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(words)):
        clozes(window=window, bare=bare)


def test_spans_keep_off_the_name_in_their_share() -> None:
    count, spans = 40_000, Spans(shortest=60)
    after = {
        share: cut_of(SpanExamples(lines(TEXTS), TOKENIZER, 128, 0, spans, share, from_start=True), *many(count, 0))
        for share in (0.0, 0.7, 1.0)
    }
    first = len(f"{NAMES[0]}. ")
    plain, mixed, off = (float((cut.start >= first).mean()) for cut in after.values())
    assert off == 1 and plain < 0.85
    # The plain law is what the other draws keep: 0.7 + 0.3·plain, both shares estimated.
    assert abs(mixed - (0.7 + 0.3 * plain)) < 2 * slack(count, 2)
    for cut in after.values():
        assert ((cut.masked >= 1) & (cut.start >= 0) & (cut.start + cut.masked <= cut.length)).all()
    base = cut_of(SpanExamples(lines(TEXTS), TOKENIZER, 128, 0, spans, from_start=True), *many(count, 0))
    assert np.array_equal(base.start, after[0.0].start) and np.array_equal(base.masked, after[0.0].masked)


def test_a_cut_within_the_name_keeps_the_plain_law() -> None:
    made = cut_of(SpanExamples(lines(TEXTS), TOKENIZER, 12, 0, after_name=1.0, from_start=True), *many(500, 0))
    plain = cut_of(SpanExamples(lines(TEXTS), TOKENIZER, 12, 0, from_start=True), *many(500, 0))
    assert np.array_equal(made.start, plain.start) and np.array_equal(made.masked, plain.masked)
    with pytest.raises(ParameterError, match=re.escape("after_name=2 must be from 0 to 1; 0, the default")):
        SpanExamples(lines(TEXTS), TOKENIZER, 12, 0, after_name=2)


def test_a_document_without_a_character_is_refused() -> None:
    with pytest.raises(InputError, match=re.escape("line 2=(empty) holds no token; leave the document out")):
        clozes(texts=["Ada. x Rom y", ""])
