r"""From a corpus to the examples of a task.

| task | an example |
|---|---|
| language | a window of a document: every token predicts the next one |
| spans | a piece of a document that lost a span, which is to be written back |
| questions | a question, and its answer to be written |
| spans+questions | both of these, each once an epoch |
| mixture | windows from the start of documents, spans, clozes, facts and questions, in the shares of a `Recipe` |

Every kind gives inputs and targets as rows of numbers, padded to the longest of them; padding is 0 and is never a
target. An example depends on (seed, epoch, index) alone: a run resumes at any step without a stored generator, and
every rank of a data-parallel run knows what the others read.

Some examples may be held out: they are never trained on, and their loss is measured instead.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from avow.errors import InputError, ParameterError
from avow.parameters import anything, at_least, between, check_count, check_parameters, declared, from_to, param
from avow.training.data import Corpus, Document, Question, TokenDocument, check_not_empty, encoded
from avow.training.facts import facts_in, rotations, statements, with_full_name
from avow.training.names import candidates, name_end
from avow.training.tokenizer import MASK, PAD, Tokenizer

Loss = Literal["answer", "all"]
Numbers: TypeAlias = Int[np.ndarray, "b"]
Rows: TypeAlias = Int[np.ndarray, "b n"]
STEP = 0x9E3779B97F4A7C15
fraction = from_to(0, 1)
# A held-out loss is measured over so many steps' worth of examples at most, so that it costs little of a run.
HELD_OUT_STEPS = 8
# The draw that decides which examples are held out; examples make their own draws from 1 to 9.
_HELD_OUT_DRAW = 10


def uniform(
    seed: int, epoch: Int[np.ndarray, "*shape"], index: Int[np.ndarray, "*shape"], *draws: int
) -> Iterator[Float[np.ndarray, "*shape"]]:
    """For every draw, numbers in [0, 1) of 53 bits: one for every pair of epoch and index, the same in any order."""
    first = np.full(np.broadcast_shapes(np.shape(epoch), np.shape(index)), seed & (2**64 - 1), dtype=np.uint64)
    # Unsigned arithmetic wraps by definition here; numpy warns of it for scalars, and these are arrays.
    state = _splitmix64(first + np.uint64(STEP))
    for word in (np.asarray(epoch), np.asarray(index)):
        # Each word is mixed in before the next comes, so that (1, 2) and (2, 1) have nothing in common.
        state = _splitmix64((state ^ word.astype(np.uint64)) + np.uint64(STEP))
    for draw in draws:
        last = _splitmix64((state ^ np.uint64(draw)) + np.uint64(STEP))
        yield (last >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64 bits in which every input bit changes every output bit."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@runtime_checkable
class Examples(Protocol):
    """Numbered examples that may differ from epoch to epoch."""

    def __len__(self) -> int: ...

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them."""


class Part(Examples, Protocol):
    """Examples of one kind, some of which may be held out."""

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""


@dataclass(frozen=True, eq=False)
class Passages:
    """Stretches of token sequences: stretch i is `tokens[starts[i] : starts[i] + sizes[i]]`."""

    tokens: Int[np.ndarray, "n"]
    starts: Numbers
    sizes: Numbers

    @staticmethod
    def of(documents: Sequence[Document | TokenDocument], tokenizer: Tokenizer) -> Passages:
        """A stretch for each document."""
        check_not_empty("documents", documents)
        tokens = [encoded(document, tokenizer) for document in documents]
        for document, numbers in zip(documents, tokens, strict=True):
            if not len(numbers):
                raise InputError(document.where, "(empty)", "holds no token", "leave the document out")
        sizes = np.array([len(numbers) for numbers in tokens], dtype=np.int64)
        # Half the memory, for all vocabularies that a model can have.
        kind = np.int32 if tokenizer.size <= 2**31 else np.int64
        return Passages(np.concatenate(tokens, dtype=kind, casting="same_kind"), np.cumsum(sizes) - sizes, sizes)

    def cut(self, size: int, overlap: int = 0) -> Passages:
        """Stretches of at most `size` tokens that cover each of these; one begins `overlap` before the last one ends.

        A stretch of no more than `overlap` tokens stays as it is.
        """
        stride = size - overlap
        counts = np.maximum(1, -(-(self.sizes - overlap) // stride))
        which = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self.starts[which] + number * stride
        return Passages(self.tokens, starts, np.minimum(size, (self.starts + self.sizes)[which] - starts))

    def take(self, indices: Numbers) -> Passages:
        """These stretches alone."""
        return Passages(self.tokens, self.starts[indices], self.sizes[indices])


@dataclass(frozen=True)
class Spans:
    """How pieces of documents are cut and masked."""

    shortest: int = param(4, at_least(4), "tokens that a cut piece keeps at least")
    longest: float = param(7 / 8, between(0, 1), "share of the block that a piece fills at most")
    masked: float = param(0.25, between(0, 0.5), "share of a cut piece that is masked, on average")

    def __post_init__(self) -> None:
        check_parameters("spans", Spans, vars(self))

    def limit(self, block: int) -> int:
        """The longest cut: its two masks and the shift by one must still fit the block."""
        return min(int(self.longest * block), block - 1)


@dataclass(frozen=True)
class Recipe:
    """How many parts of each kind the task `mixture` reads, and how it cuts them."""

    language: int = param(1, at_least(0), "parts of documents from their start")
    spans: int = param(1, at_least(0), "parts of documents from their start with a span to restore")
    cloze: int = param(2, at_least(0), "parts of names with a capitalised span to remember")
    questions: int = param(1, at_least(0), "parts of training questions")
    after_name: float = param(0.7, fraction, "share of spans that are kept off the name")
    window: int = param(24, at_least(0), "tokens that a cloze keeps on each side at most")
    bare: float = param(0.3, fraction, "share of clozes that keep none beside")
    facts: int = param(
        0, at_least(0), "parts of statements of what training questions ask for, to be completed with the answer"
    )
    reverse: int = param(0, at_least(0), "parts of the same statements, to be completed with the name")
    phrasings: int = param(
        4, at_least(1), "phrases of such statements, from the texts of those the questions ask about"
    )
    odds: bool = param(True, anything(), "an unknown answer is one of several by their odds, not the likeliest alone")
    full_name: bool = param(False, anything(), "the full name in place of its parts and of pronouns")
    permuted: bool = param(False, anything(), "texts of several sentences in other orders too")

    @property
    def weights(self) -> dict[str, int]:
        """How many parts of each kind; a new kind comes last, so that the draws of the others stay."""
        return {name: getattr(self, name) for name in ("language", "spans", "cloze", "questions", "facts", "reverse")}


class Pieces(NamedTuple):
    """What examples keep of their documents: `name` characters from the start, then text[start:stop], the span to be
    written, with `left` and `right` characters beside it; `closed` is 1 where a last mask ends the span."""

    name: Numbers
    left: Numbers
    start: Numbers
    stop: Numbers
    right: Numbers
    closed: Numbers


class SpanExamples:
    r"""Span corruption: a piece of a document loses one span, and the model writes it back.

    Documents are cut into pieces of at most ⌊7/8·block⌋ tokens, so that all of their text is read; with `from_start`
    each document is one piece, of which no more than that is ever read. A piece of D tokens is cut to a random length
    L, one contiguous span of m tokens is taken out, and the example reads `prefix M suffix M masked`. The law, exactly:

    .. math:: L \sim \mathcal{U}\{4, …, \min(D, \lfloor 7/8 · block \rfloor)\}, \quad E[m \mid L] = \max(1, L/4), \quad
              start \sim \mathcal{U}\{0, …, L − m\}

    Targets are the next tokens, all of them. A share of the spans, `after_name`, falls after the document's name
    if the cut leaves room: a span on the name asks for what nothing tells, one after it for what is known of the named.
    A span longer than what is left after the name is shortened to that.
    """

    @declared()
    def __init__(
        self,
        documents: Sequence[Document | TokenDocument],
        tokenizer: Tokenizer,
        block: int,
        seed: int,
        spans: Spans | None = None,
        after_name: float = 0.0,
        from_start: bool = False,
    ) -> None:
        if not 0 <= after_name <= 1:
            raise ParameterError("after_name", after_name, "must be from 0 to 1", "0, the default, ignores names")
        self.spans, self.after_name = spans or Spans(), after_name
        limit = self.spans.limit(block)
        if limit < 4:
            rule = f"leaves {limit} tokens of a document, fewer than 4"
            raise ParameterError("block", block, rule, "use a larger block or a larger spans.longest")
        self.seed, self.block = seed, block
        whole = Passages.of(documents, tokenizer)
        pieces = self._passages = whole if from_start else whole.cut(limit)
        # Names belong to the first piece of a document.
        names = [
            _name_tokens(tokenizer, document.text) if after_name and isinstance(document, Document) else 0
            for document in documents
        ]
        self._names = np.zeros(len(pieces.starts), dtype=np.int64)
        self._names[np.searchsorted(pieces.starts, whole.starts)] = names

    def __len__(self) -> int:
        return len(self._passages.starts)

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return len(self._passages.tokens)

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""
        taken = copy.copy(self)
        taken._passages, taken._names = self._passages.take(indices), self._names[indices]
        return taken

    def choose(self, epochs: Numbers, indices: Numbers) -> Pieces:
        """What is kept and what is to be written: everything before the span is left, everything after it right."""
        where, how_long, round_up, how_many, which = uniform(self.seed, epochs, indices, 4, 1, 2, 3, 5)
        # A piece shorter than the shortest cut is kept whole.
        most = np.minimum(self._passages.sizes[indices], self.spans.limit(self.block))
        least = np.minimum(self.spans.shortest, most)
        length = least + (how_long * (most - least + 1)).astype(np.int64)
        # The width is uniform on [1, 2·share·L − 1], of mean share·L, and rounded to a neighbour at random, which
        # keeps the mean. It is at most L − 1, since share ≤ 1/2, and never below 1.
        width = 1 + how_many * np.maximum(2 * self.spans.masked * length - 2, 0)
        masked = np.floor(width + round_up).astype(np.int64)
        name = self._names[indices]  # 0 for documents without one, which keep the plain law
        first = np.where((which < self.after_name) & (name < length), name, 0)
        masked = np.minimum(masked, length - first)
        start = first + (where * (length - first - masked + 1)).astype(np.int64)
        none, stop = np.zeros_like(start), start + masked
        return Pieces(none, start, start, stop, length - stop, none)

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them."""
        p = self.choose(epochs, indices)
        one, none = np.ones_like(p.start), np.zeros_like(p.start)
        # Seven pieces: name, left, M, right, M, span, M.
        sizes = np.stack([p.name, p.left, one, p.right, one, p.stop - p.start, p.closed], 1)  # (b, 7)
        begins = np.stack([none, p.start - p.left, none, p.stop, none, p.start, none], 1)  # (b, 7)
        # All examples one after the other, without padding: where each piece begins there, and in the text.
        flat = sizes.ravel()
        firsts = np.cumsum(flat) - flat
        shift = (begins + self._passages.starts[indices][:, None]).ravel() - firsts
        read = np.arange(int(flat.sum())) + np.repeat(shift, flat)
        # The place of a mask reads whatever stands there, perhaps past the end, and is overwritten.
        letters = self._passages.tokens[np.minimum(read, len(self._passages.tokens) - 1)]
        masks = firsts.reshape(sizes.shape)[:, 2::2]  # (b, 3)
        letters[masks[sizes[:, 2::2] > 0]] = MASK
        size = sizes.sum(1, keepdims=True)
        place = np.arange(int(size.max()))[None, :]  # (1, n + 1)
        whole = np.full((len(indices), place.shape[1]), PAD, dtype=np.int64)
        whole[place < size] = letters
        # The last character is a target, never an input.
        return np.where(place < size - 1, whole, PAD)[:, :-1], whole[:, 1:]


def _name_tokens(tokenizer: Tokenizer, text: str) -> int:
    """How many tokens the name of a document has, with its full stop and the space after it; 0 without a name."""
    end = name_end(text)
    return int(np.searchsorted(tokenizer.edges(text), end)) if end else 0


def _candidate_tokens(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, int]]:
    """Those candidates that begin and end where tokens do, in tokens."""
    edges = tokenizer.edges(text)
    for start, stop in candidates(text):
        first, last = np.searchsorted(edges, (start, stop)).tolist()
        if edges[first] == start and edges[last] == stop:
            yield first, last


class ClozeExamples(SpanExamples):
    r"""Cloze examples: a name, hardly any context, and a capitalised span to remember.

    A document `Name. text` becomes `Name. left M right M span M`: the span is a run of capitalised words of the text,
    left and right are the few characters beside it, and all else is dropped. A question asks in the same way: by name,
    with little context. The law, exactly, for a document with C candidates:

    .. math:: span \sim \mathcal{U}\{1, …, C\}, \quad left, right \sim \mathcal{U}\{0, …, window\},
              \quad left = right = 0 \text{ with probability } bare

    Windows end where the text does, and are cut to fit the block: the right one first, then the left one, never the
    span or the name. A document in which no candidate fits is an example of span corruption instead.
    """

    @declared()
    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        block: int,
        seed: int,
        window: int = 24,
        bare: float = 0.3,
        spans: Spans | None = None,
    ) -> None:
        check_parameters("", Recipe, {"window": window, "bare": bare})
        super().__init__(documents, tokenizer, block, seed, spans, from_start=True)
        self.window, self.bare = window, bare
        self._names = np.array([_name_tokens(tokenizer, document.text) for document in documents], dtype=np.int64)
        # The name, two masks and the span must fit; the last mask is a target, never an input.
        fitting = [
            [
                (begin, end)
                for begin, end in _candidate_tokens(tokenizer, x.text)
                if name and name + 2 + end - begin <= block
            ]
            for x, name in zip(documents, self._names.tolist(), strict=True)
        ]
        self._counts = np.array([len(pairs) for pairs in fitting], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        # A last row that no cloze uses, so that documents without candidates have something to point at.
        self._candidates = np.array([*itertools.chain(*fitting), (0, 1)], dtype=np.int64)

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""
        taken = super().take(indices)
        taken._counts, taken._firsts = self._counts[indices], self._firsts[indices]
        return taken

    def choose(self, epochs: Numbers, indices: Numbers) -> Pieces:
        """What is kept and what is asked for in some examples."""
        which, bare, before, after = uniform(self.seed, epochs, indices, 6, 7, 8, 9)
        count, name = self._counts[indices], self._names[indices]
        start, stop = self._candidates[self._firsts[indices] + (which * count).astype(np.int64)].T
        beside = np.where(bare < self.bare, 0, self.window + 1)
        room = self.block - 2 - name - (stop - start)
        left = np.minimum((before * beside).astype(np.int64), np.minimum(start - name, room))
        right = np.minimum(
            (after * beside).astype(np.int64), np.minimum(self._passages.sizes[indices] - stop, room - left)
        )
        closed, span = (count > 0).astype(np.int64), super().choose(epochs, indices)
        cloze = Pieces(name, left, start, stop, right, closed)
        return Pieces(*(np.where(closed, *both) for both in zip(cloze, span, strict=True)))


class LanguageExamples:
    """Windows of documents, `block` tokens to read and after each of them the next one to predict.

    A window goes on where the last one of its document stopped: every token but a document's first is a target in
    exactly one window, and so once an epoch.
    """

    @declared()
    def __init__(self, documents: Sequence[Document | TokenDocument], tokenizer: Tokenizer, block: int) -> None:
        check_count("block", block)
        # The last token of a window is a target and not an input, and the first input of the next window.
        self._windows = Passages.of(documents, tokenizer).cut(block + 1, overlap=1)
        if int(self._windows.sizes.max()) < 2:
            rule = "hold one token each, and nothing follows it"
            raise InputError("documents", len(documents), rule, "give documents of at least two tokens")

    def __len__(self) -> int:
        return len(self._windows.starts)

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return len(self._windows.tokens)

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""
        taken = copy.copy(self)
        taken._windows = self._windows.take(indices)
        return taken

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them; the same in every epoch."""
        tokens, starts = self._windows.tokens, self._windows.starts[indices, None]  # (b, 1)
        targets = self._windows.sizes[indices, None] - 1  # (b, 1)
        # A document of one token is read, and has no target.
        inputs = np.maximum(targets, 1)
        place = np.arange(int(inputs.max()))[None, :]  # (1, n)
        read = np.minimum(starts + place, len(tokens) - 1)
        following = np.minimum(read + 1, len(tokens) - 1)
        return np.where(place < inputs, tokens[read], PAD), np.where(place < targets, tokens[following], PAD)


@declared()
def prompt(question: str, tokenizer: Tokenizer, where: str = "question") -> Int[np.ndarray, "n"]:
    """What a model reads before it answers: `question M`.

    Args:
        question: the question.
        tokenizer: that of the model.
        where: what an error calls it.

    Returns:
        Token ids, (n,).

    Raises:
        InputError: the question has unknown characters.
    """
    return np.append(tokenizer.encode(question, where), MASK)


def positions(question: Question, tokenizer: Tokenizer) -> int:
    """Those of a question, its mask and its answer; the end is only written, never read."""
    return tokenizer.length(question.question) + 1 + tokenizer.length(question.answer)


def check_room(question: Question, tokenizer: Tokenizer, block: int) -> None:
    """Raise if a question and its answer do not fit the block."""
    needed = positions(question, tokenizer)
    if needed > block:
        rule = f"needs {needed} positions with its question, and the block has {block}"
        remedy = "use a larger block or drop the line"
        raise InputError(f"{question.where}: answer", repr(question.answer), rule, remedy)


class QuestionExamples:
    """Fine-tuning examples, `question M answer M`: by the second mask a model says that its answer ends.

    The loss counts the answer and its end alone, or everything.
    """

    @declared()
    def __init__(self, questions: Sequence[Question], tokenizer: Tokenizer, block: int, loss: Loss = "answer") -> None:
        check_not_empty("questions", questions)
        rows, firsts = [], []
        for question in questions:
            answer = tokenizer.encode(question.answer, question.where)
            asked = prompt(question.question, tokenizer, question.where)
            rows.append(np.concatenate([asked, answer, [MASK]]))
            # What the first mask predicts is the answer's first token.
            firsts.append(len(asked) - 1 if loss == "answer" else 0)
            check_room(question, tokenizer, block)
        self._sizes, self._firsts = np.array([len(row) for row in rows]), np.array(firsts)
        self._rows = np.full((len(rows), int(self._sizes.max())), PAD, dtype=np.int64)
        for place, row in zip(self._rows, rows, strict=True):
            place[: len(row)] = row

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""
        taken = copy.copy(self)
        taken._rows, taken._sizes, taken._firsts = self._rows[indices], self._sizes[indices], self._firsts[indices]
        return taken

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them; the same in every epoch."""
        read, first = self._sizes[indices, None] - 1, self._firsts[indices, None]  # (b, 1)
        place = np.arange(int(read.max()))[None, :]  # (1, n)
        rows = self._rows[indices, : place.size + 1]
        # The last token is a target, never an input.
        return np.where(place < read, rows[:, :-1], PAD), np.where(place >= first, rows[:, 1:], PAD)


class StatementExamples(QuestionExamples):
    """Statements, `statement M answer M`, each with several answers that take turns, one an epoch."""

    @declared()
    def __init__(self, statements: Sequence[Sequence[Question]], tokenizer: Tokenizer, block: int) -> None:
        numbers: dict[Question, int] = {}
        turns = [[numbers.setdefault(one, len(numbers)) for one in answered] for answered in statements]
        super().__init__(list(numbers), tokenizer, block)
        self._turns = np.array(turns)

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, indices: Numbers) -> Self:
        """These of them alone, in this order."""
        taken = copy.copy(self)
        taken._turns = self._turns[indices]
        return taken

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them."""
        return super().rows(epochs, self._turns[indices, epochs % self._turns.shape[1]])


class Mixture:
    """Several kinds of examples as one; an epoch reads each of them once, or shares in proportion to whole weights.

    One weight is as many examples as the largest kind has. A kind is read in a cycle: none a second time before all a
    first, and with new draws in every cycle.
    """

    @declared()
    def __init__(self, parts: Sequence[Examples], weights: Sequence[int] | None = None) -> None:
        check_not_empty("parts", parts)
        if weights is not None and (len(weights) != len(parts) or min(weights) < 1):
            rule = f"must be a whole number of at least 1 for each of the {len(parts)} parts"
            raise ParameterError("weights", list(weights), rule, "leave out a part that is not to be read")
        sizes = [len(part) for part in parts]
        self._parts = tuple(parts)
        self._counts = sizes if weights is None else [weight * max(sizes) for weight in weights]
        self._ends = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them."""
        kind = np.searchsorted(self._ends, indices, side="right")
        pieces = []
        for number, (part, count, end) in enumerate(zip(self._parts, self._counts, self._ends, strict=True)):
            (mine,) = np.nonzero(kind == number)
            if len(mine):
                places = epochs[mine] * count + indices[mine] - (end - count)
                pieces.append((mine, *part.rows(*np.divmod(places, len(part)))))
        whole = np.full((2, len(indices), max(inputs.shape[1] for _, inputs, _ in pieces)), PAD, dtype=np.int64)
        for mine, *both in pieces:
            for side, rows in enumerate(both):
                whole[side, mine, : rows.shape[1]] = rows
        return whole[0], whole[1]


# The kinds of examples of each task, and what to call them; those of a mixture are in its recipe.
TASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "language": (("language",), "windows of {0:,} tokens"),
    "spans": (("spans",), "pieces of at most {1:,} tokens"),
    "questions": (("questions",), "questions"),
    "spans+questions": (("spans", "questions"), "pieces and questions"),
}
TASK_NAMES = (*TASKS, "mixture")


@dataclass(frozen=True)
class TaskExamples:
    """The examples of a task: those to train on, and those held out, if any.

    `unit` is what one of them is, in the plural. The documents have so many `tokens`, and of these no example reads
    `unread` as text: the task `mixture` reads documents from their start, and no further than a block.
    """

    training: Examples
    held_out: Examples | None
    unit: str
    tokens: int
    unread: int


def examples_of(
    task: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    block: int,
    seed: int,
    spans: Spans,
    loss: Loss,
    recipe: Recipe,
    held_out: float = 0.0,
    most: int = 2**62,
) -> TaskExamples:
    """The examples of a task; a share of each kind of them, `most` at most, is held out."""
    weights = {kind: weight for kind, weight in recipe.weights.items() if weight}
    kinds, unit = TASKS.get(task, (tuple(weights), "examples"))
    if not corpus.documents and kinds != ("questions",):
        raise InputError("task", task, "needs documents, and the data holds none", "give texts, or a wiki.txt")
    if not corpus.train and "questions" in kinds:
        rule, remedy = "needs questions, and the data holds none", "give a folder with a train.tsv"
        if corpus.asked:
            rule = f"needs questions, and dev.tsv asks all {corpus.asked:,} of train.tsv too"
            remedy = "keep questions apart for evaluation"
        raise InputError("task", task, rule, remedy)
    builders: dict[str, Callable[[], Part]] = {
        "language": lambda: LanguageExamples(corpus.documents, tokenizer, block),
        "spans": lambda: SpanExamples(corpus.documents, tokenizer, block, seed, spans),
        "questions": lambda: QuestionExamples(corpus.train, tokenizer, block, loss),
    }
    tokens, unread = 0, 0
    if task == "mixture":
        # The recipe of the knowledge experiment: a document is one example of each kind, read from its start.
        documents = rewritten(corpus, recipe)
        starts = [Document(_beginning(document.text, tokenizer, block + 1), document.where) for document in documents]
        text, after_name = (documents, tokenizer, block, seed), recipe.after_name
        builders["language"] = lambda: LanguageExamples(starts, tokenizer, block)
        builders["spans"] = lambda: SpanExamples(*text, spans, after_name, from_start=True)
        builders["cloze"] = lambda: ClozeExamples(*text, recipe.window, recipe.bare, spans)
        if recipe.facts or recipe.reverse:
            facts, phrases = facts_in(documents, corpus.train, recipe.odds)

            def completions(reverse: bool) -> StatementExamples:
                made = statements(facts, phrases[: recipe.phrasings], reverse)
                fits = [all(positions(one, tokenizer) <= block for one in set(turns)) for turns in made]
                return StatementExamples(list(itertools.compress(made, fits)), tokenizer, block)

            builders["facts"] = lambda: completions(reverse=False)
            builders["reverse"] = lambda: completions(reverse=True)
        reach = max(block + 1 if "language" in kinds else 0, spans.limit(block) if "spans" in kinds else 0)
        sizes = [tokenizer.length(document.text) for document in documents]
        tokens, unread = sum(sizes), sum(max(0, size - reach) for size in sizes)
    parts = [builders[kind]() for kind in kinds]
    tokens = tokens or next((part.tokens for part in parts if isinstance(part, LanguageExamples | SpanExamples)), 0)
    splits = [_split(part, held_out, most, seed) for part in parts]
    training, held = [one for one, _ in splits], [other for _, other in splits if other is not None]
    shares = list(weights.values()) if task == "mixture" else None
    return TaskExamples(
        training[0] if len(training) == 1 and shares is None else Mixture(training, shares),
        # Each of those held out counts once, whatever the shares.
        (held[0] if len(held) == 1 else Mixture(held)) if held else None,
        unit.format(block, spans.limit(block)),
        tokens,
        unread,
    )


def rewritten(corpus: Corpus, recipe: Recipe) -> list[Document]:
    """The texts of a corpus as the task `mixture` reads them."""
    documents = [document for document in corpus.documents if isinstance(document, Document)]
    if recipe.full_name:
        documents = [with_full_name(document) for document in documents]
    if recipe.permuted:
        documents += [other for document in documents for other in rotations(document)]
    return documents


def _beginning(text: str, tokenizer: Tokenizer, count: int) -> str:
    """The first `count` tokens of a text."""
    return text[: int(tokenizer.edges(text)[: count + 1][-1])]


def _split(part: Part, share: float, most: int, seed: int) -> tuple[Part, Part | None]:
    """The examples to train on and those held out: a share, one at least and half of them at most, by the seed alone.

    Parts of as many examples hold out the same ones, so that no document is held out of one and read in another.
    """
    count = min(max(1, round(share * len(part))), len(part) // 2, most) if share else 0
    if not count:
        return part, None
    (keys,) = uniform(seed, np.zeros(len(part), dtype=np.int64), np.arange(len(part)), _HELD_OUT_DRAW)
    order = np.argsort(keys, kind="stable")
    return part.take(np.sort(order[count:])), part.take(np.sort(order[:count]))
