"""Every token of a text but a document's first is a target exactly once an epoch; what would leave text out is seen."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from avow.errors import InputError, ParameterError
from avow.training import (
    PAD,
    Batches,
    ByteTokenizer,
    CharacterTokenizer,
    Document,
    LanguageExamples,
    TokenDocument,
    read_config,
    train,
)
from avow.training.distributed import Ranks
from avow.training.examples import Examples, Passages
from avow.training.loop import Trainer

ALONE = Ranks(0, 1, torch.device("cpu"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def numbered(sizes: list[int]) -> list[TokenDocument]:
    """Documents in which no token comes twice, so that every target can be recognised."""
    first, documents = 0, []
    for number, size in enumerate(sizes):
        documents.append(TokenDocument(np.arange(first, first + size), f"document {number}"))
        first += size
    return documents


class Ids(ByteTokenizer):
    """As many tokens as a test wants."""

    @property
    def count(self) -> int:
        return 10**6


def targets_of_an_epoch(examples: Examples, size: int = 7, epoch: int = 0) -> list[tuple[int, int]]:
    """Every pair of a token that is read and the one it must predict, over an epoch of batches."""
    batches = Batches(examples, size, 0, block=64, accumulate=2)
    places = range(epoch * len(examples), (epoch + 1) * len(examples))
    found = []
    for step in range(places.start // size, -(-places.stop // size)):
        epochs, indices = batches.read(step)
        mine = epochs == epoch
        inputs, targets = examples.rows(epochs[mine], indices[mine])
        found += [(int(x) - 2, int(y) - 2) for x, y in zip(inputs.ravel(), targets.ravel(), strict=True) if y != PAD]
    return found


def expected(sizes: list[int]) -> list[tuple[int, int]]:
    """The pairs of all neighbours within documents."""
    documents = numbered(sizes)
    return [(int(i), int(i) + 1) for document in documents for i in document.ids[:-1]]


@pytest.mark.parametrize("sizes", [[200], [64, 65, 66, 1, 2], [129, 3, 128, 1, 1], [5]])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_an_epoch_predicts_every_token_but_a_documents_first_exactly_once(sizes: list[int], block: int) -> None:
    examples = LanguageExamples(numbered(sizes), Ids(), block)
    for epoch in (0, 3):
        assert sorted(targets_of_an_epoch(examples, epoch=epoch)) == expected(sizes)


class FromTheStart(LanguageExamples):
    """The sabotage, as it was once: of each document the first ⌊7/8·block⌋ characters, and nothing else."""

    def __init__(self, documents: list[TokenDocument], tokenizer: Ids, block: int) -> None:
        self._windows = Passages.of([TokenDocument(d.ids[: 7 * block // 8], d.where) for d in documents], tokenizer)


class Disjoint(LanguageExamples):
    """Another one: windows that share no token, so that the first of each is never a target."""

    def __init__(self, documents: list[TokenDocument], tokenizer: Ids, block: int) -> None:
        self._windows = Passages.of(documents, tokenizer).cut(block)


@pytest.mark.parametrize(("wrong", "share"), [(FromTheStart, 55 / 1999), (Disjoint, 1968 / 1999)])
def test_text_that_is_left_out_is_noticed(wrong: type[LanguageExamples], share: float) -> None:
    found = targets_of_an_epoch(wrong(numbered([2000]), Ids(), 64))
    assert sorted(found) != expected([2000]) and len(found) / 1999 == pytest.approx(share)
    assert sorted(targets_of_an_epoch(LanguageExamples(numbered([2000]), Ids(), 64))) == expected([2000])


def test_a_text_of_a_megabyte_is_read_to_its_last_character() -> None:
    size = 10**6
    read = targets_of_an_epoch(LanguageExamples(numbered([size]), Ids(), 64), 128)
    assert len(read) == size - 1 and set(read) == set(expected([size]))
    # As it once was: 56 characters of a million.
    assert len(targets_of_an_epoch(FromTheStart(numbered([size]), Ids(), 64), 128)) == 55


def test_a_window_is_a_part_of_its_document_and_of_no_other() -> None:
    texts = ["abcdefgh", "xyz"]
    tokenizer = CharacterTokenizer(LETTERS)
    examples = LanguageExamples([Document(text, "") for text in texts], tokenizer, 3)
    inputs, targets = examples.rows(np.zeros(4, dtype=np.int64), np.arange(4))
    assert [tokenizer.decode(row) for row in inputs] == ["abc", "def", "g", "xy"]
    assert [tokenizer.decode(row) for row in targets] == ["bcd", "efg", "h", "yz"]


def test_a_document_of_one_token_is_read_and_predicts_nothing() -> None:
    examples = LanguageExamples(numbered([1, 3]), Ids(), 8)
    inputs, targets = examples.rows(np.zeros(2, dtype=np.int64), np.arange(2))
    assert inputs.tolist() == [[2, 0], [3, 4]] and targets.tolist() == [[0, 0], [4, 5]]
    # A step of such documents alone has the loss 0, and not 0/0.
    assert Batches(examples.take(np.array([0])), 1, 0, block=8)[0].targets == 1
    with pytest.raises(InputError, match="documents=2 hold one token each, and nothing follows it; give documents of"):
        LanguageExamples(numbered([1, 1]), Ids(), 8)


def test_documents_that_hold_nothing_are_named() -> None:
    with pytest.raises(InputError, match=re.escape("a.txt=(empty) holds no token; leave the document out")):
        LanguageExamples([Document("ab", "b.txt"), Document("", "a.txt")], CharacterTokenizer("ab"), 8)
    with pytest.raises(ParameterError, match=re.escape("documents=[] must hold something to read")):
        LanguageExamples([], CharacterTokenizer("ab"), 8)


def book(folder: Path, *flags: str) -> Trainer:
    """A run over a book in one line, and a short document."""
    folder.mkdir(exist_ok=True)
    (folder / "book.txt").write_text((LETTERS + " ") * 400)
    (folder / "note.txt").write_text("a short note")
    sizes = ["model.layers=1", "model.heads=1", "model.width=8", "model.block=32", "data.batch=16", "run.device=cpu"]
    config = read_config(None, [*sizes, f'data.sources=["{folder}/*.txt"]', "schedule.epochs=2", *flags])
    return Trainer(config, folder / "run", ALONE)


def test_a_run_reads_all_of_a_book_in_one_line(tmp_path: Path) -> None:
    trainer = book(tmp_path, "data.held_out=0")
    positions = sum(trainer.batches[step].targets for step in range(trainer.batches.steps_in(1) - 1))
    windows = -(-(27 * 400 - 1) // 32) + 1
    assert len(trainer.batches.examples) == windows == trainer.reading.examples
    # All steps of the first epoch but its last, which the second epoch begins in.
    read = (trainer.batches.steps_in(1) - 1) * 16
    assert positions > 0.95 * read * 32
    assert str(trainer.reading) == (
        f"read 10,812 characters in 2 documents: {windows} windows of 32 tokens, none held out; "
        f"{trainer.steps} steps of 16 are 2.0 epochs"
    )


def test_less_than_an_epoch_is_said_with_its_share_and_what_reads_all(tmp_path: Path) -> None:
    words = str(book(tmp_path, "schedule.steps=5", "schedule.epochs=0").reading)
    assert words.endswith("5 steps of 16 are 0.25 epochs: only 24.8% of it is trained on; schedule.steps=21 reads all")
    assert "339 windows of 32 tokens, 17 of them held out" in words


def test_the_line_counts_tokens_that_are_not_characters_and_empty_documents(tmp_path: Path) -> None:
    trainer = book(tmp_path, "data.tokenizer=bytes")
    assert "read 10,812 characters in 2 documents" in str(trainer.reading)
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": "größer und größer"}\n')
    flags = [f"data.sources={tmp_path / 'rows.jsonl'}", "data.tokenizer=bytes", "model.block=8"]
    words = str(book(tmp_path, *flags).reading)
    assert words.startswith("read 17 characters (21 tokens) in 1 document (and 1 empty): 3 windows of 8 tokens, 1 of")
    np.save(tmp_path / "ids.npy", np.arange(100) % 7)
    words = str(book(tmp_path, f"data.sources={tmp_path / 'ids.npy'}", "data.tokenizer=ids").reading)
    assert words.startswith("read 100 tokens in 1 document: 4 windows of 32 tokens, 1 of them held out")


def test_a_mixture_says_what_of_long_documents_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text("Ada Holm. Ada Holm was born in Arden.\n" + "Bo. " + "x" * 96 + "\n")
    (tmp_path / "train.tsv").write_text("Where was Ada born?\tArden\n")
    words = str(book(tmp_path / "run", f"data.sources={tmp_path}", "data.task=mixture").reading)
    # 37 + 100 characters, of which 33 of each document are read as text.
    assert "51.8% of the text is too far from the start of its document to be read" in words
    spans = str(book(tmp_path / "run", f"data.sources={tmp_path}", "data.task=spans").reading)
    assert "read 137 characters in 2 documents: 6 pieces of at most 28 tokens" in spans and "too far" not in spans


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_a_run_on_any_tokenizer_trains_and_its_model_reads_with_it(tmp_path: Path, tokenizer: str) -> None:
    config = book(tmp_path, f"data.tokenizer={tokenizer}", "schedule.steps=3", "schedule.epochs=0").config
    done = train(config, tmp_path / "done")
    assert done.tokenizer.kind == tokenizer and done.last is not None
    assert done.last.held_out_loss is not None and done.last.bits_per_character is not None
