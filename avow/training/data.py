"""From the name of a corpus to the examples of a task."""

from __future__ import annotations

from avow.errors import InputError
from avow.training.batches import Examples, Mixture
from avow.training.corpus import Corpus, read_corpus
from avow.training.invented import invent
from avow.training.questions import Loss, QuestionExamples
from avow.training.spans import SpanExamples, Spans
from avow.training.vocabulary import Vocabulary


def corpus_of(name: str) -> Corpus:
    """The embedded corpus of invented people, or that of a folder."""
    return invent() if name == "invented" else read_corpus(name)


def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """The characters of all that may be trained on: documents and training questions, never the dev questions."""
    texts = [line.text for line in corpus.documents]
    return Vocabulary.of(texts + [text for asked in corpus.train for text in (asked.question, asked.answer)])


def examples_of(
    task: str, corpus: Corpus, vocabulary: Vocabulary, block: int, seed: int, spans: Spans, loss: Loss
) -> Examples:
    """Documents with a span to restore (pretrain), questions to answer (finetune), or both (mixed)."""
    parts: list[Examples] = []
    if task != "finetune":
        if not corpus.documents:
            raise InputError("task", task, "needs documents, and the corpus has none", "add a wiki.txt")
        parts.append(SpanExamples(corpus.documents, vocabulary, block, seed, spans))
    if task != "pretrain":
        if not corpus.train:
            raise InputError("task", task, "needs questions, and the corpus has none", "add a train.tsv")
        parts.append(QuestionExamples(corpus.train, vocabulary, block, loss))
    return parts[0] if len(parts) == 1 else Mixture(parts)
