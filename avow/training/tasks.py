"""From the name of a corpus to the examples of a task."""

from __future__ import annotations

from avow.errors import InputError
from avow.parameters import declared
from avow.training.batches import Examples, Mixture
from avow.training.cloze import ClozeExamples
from avow.training.corpus import Corpus, Line, Question, read_corpus
from avow.training.invented import invent
from avow.training.language import LanguageExamples
from avow.training.names import SpansAfterName
from avow.training.questions import Loss, QuestionExamples
from avow.training.spans import SpanExamples, Spans
from avow.training.vocabulary import Vocabulary
from avow.training.weighted import Recipe, weighted


@declared()
def corpus_of(name: str) -> Corpus:
    """The embedded corpus of invented people, or that of a folder."""
    return invent() if name == "invented" else read_corpus(name)


@declared()
def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """The characters of all that may be trained on: documents and training questions, never the dev questions."""
    texts = [line.text for line in corpus.documents]
    return Vocabulary.of(texts + [text for asked in corpus.train for text in (asked.question, asked.answer)])


def examples_of(
    task: str,
    corpus: Corpus,
    vocabulary: Vocabulary,
    block: int,
    seed: int,
    spans: Spans,
    loss: Loss,
    recipe: Recipe,
) -> Examples:
    """Documents with a span to restore (pretrain), questions to answer (finetune), both (mixed), a recipe (cloze)."""
    if task == "cloze":
        return _cooked(recipe, corpus, vocabulary, block, seed, spans, loss)
    parts: list[Examples] = []
    if task != "finetune":
        parts.append(SpanExamples(_documents(task, corpus), vocabulary, block, seed, spans))
    if task != "pretrain":
        parts.append(QuestionExamples(_questions(task, corpus), vocabulary, block, loss))
    return parts[0] if len(parts) == 1 else Mixture(parts)


def _cooked(
    recipe: Recipe, corpus: Corpus, vocabulary: Vocabulary, block: int, seed: int, spans: Spans, loss: Loss
) -> Examples:
    """The kinds of a recipe that have a weight, in its shares."""
    parts: list[Examples] = []
    if recipe.lm or recipe.span or recipe.cloze:
        documents = _documents("cloze", corpus)
        if recipe.lm:
            parts.append(LanguageExamples(documents, vocabulary, block))
        if recipe.span:
            parts.append(SpansAfterName(documents, vocabulary, block, seed, spans, recipe.after_name))
        if recipe.cloze:
            parts.append(ClozeExamples(documents, vocabulary, block, seed, recipe.window, recipe.bare, spans))
    if recipe.questions:
        parts.append(QuestionExamples(_questions("cloze", corpus), vocabulary, block, loss))
    weights = (recipe.lm, recipe.span, recipe.cloze, recipe.questions)
    return weighted(parts, [weight for weight in weights if weight])


def _documents(task: str, corpus: Corpus) -> tuple[Line, ...]:
    if not corpus.documents:
        raise InputError("task", task, "needs documents, and the corpus has none", "add a wiki.txt")
    return corpus.documents


def _questions(task: str, corpus: Corpus) -> tuple[Question, ...]:
    if not corpus.train:
        raise InputError("task", task, "needs questions, and the corpus has none", "add a train.tsv")
    return corpus.train
