r"""From a corpus to the examples of a task: spans or facts to write back, plain text, questions; or a mixture of them.

Every kind gives inputs and targets as rows of numbers, padded to the longest of them; padding is 0 and is never a
target. An example depends on (seed, epoch, index) alone: a run resumes at any step without a stored generator, and
every rank of a data-parallel run knows what the others read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from avow.errors import InputError, ParameterError
from avow.nn.config import check_count
from avow.parameters import at_least, between, check_parameters, declared, from_to, param
from avow.training.data import MASK, PAD, Corpus, Line, Question, Vocabulary, check_not_empty

Loss = Literal["answer", "all"]
Numbers: TypeAlias = Int[np.ndarray, "b"]
Rows: TypeAlias = Int[np.ndarray, "b n"]
STEP = 0x9E3779B97F4A7C15
fraction = from_to(0, 1)


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


@dataclass(frozen=True)
class Spans:
    """How documents are cut and masked."""

    shortest: int = param(4, at_least(4), "characters a cut document keeps at least")
    longest: float = param(7 / 8, between(0, 1), "share of the block a cut document fills at most")
    masked: float = param(0.25, between(0, 0.5), "share of a cut document that is masked, on average")

    def __post_init__(self) -> None:
        check_parameters("spans", Spans, vars(self))

    def limit(self, block: int) -> int:
        """The longest cut: its two masks and the shift by one must still fit the block."""
        return min(int(self.longest * block), block - 1)


@dataclass(frozen=True)
class Recipe:
    """How many parts of each kind the task `cloze` reads, and how it cuts them."""

    lm: int = param(1, at_least(0), "parts of documents from their start")
    span: int = param(1, at_least(0), "parts of documents with a span to restore")
    cloze: int = param(2, at_least(0), "parts of names with a capitalised span to remember")
    questions: int = param(1, at_least(0), "parts of training questions")
    after_name: float = param(0.7, fraction, "share of spans that are kept off the name")
    window: int = param(24, at_least(0), "characters that a cloze keeps on each side at most")
    bare: float = param(0.3, fraction, "share of clozes that keep no characters beside")

    @property
    def weights(self) -> dict[str, int]:
        return {"lm": self.lm, "span": self.span, "cloze": self.cloze, "questions": self.questions}


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
    r"""Span corruption: a document loses one span, and the model writes it back.

    A document of D characters is cut to a random length L, one contiguous span of m characters is taken out, and the
    example reads `prefix M suffix M masked`. The law, exactly:

    .. math:: L \sim \mathcal{U}\{4, …, \min(D, \lfloor 7/8 · block \rfloor)\}, \quad E[m \mid L] = \max(1, L/4), \quad
              start \sim \mathcal{U}\{0, …, L − m\}

    Targets are the next characters, all of them. A share of the spans, `after_name`, falls after the document's name
    if the cut leaves room: a span on the name asks for what nothing tells, one after it for what is known of the named.
    A span longer than what is left after the name is shortened to that.
    """

    @declared()
    def __init__(
        self,
        documents: Sequence[Line],
        vocabulary: Vocabulary,
        block: int,
        seed: int,
        spans: Spans | None = None,
        after_name: float = 0.0,
    ) -> None:
        if not 0 <= after_name <= 1:
            raise ParameterError("after_name", after_name, "must be from 0 to 1", "0, the default, ignores names")
        self.spans, self.after_name = spans or Spans(), after_name
        if self.spans.limit(block) < 4:
            rule = f"leaves {self.spans.limit(block)} characters of a document, fewer than 4"
            raise ParameterError("block", block, rule, "use a larger block or a larger spans.longest")
        check_not_empty("documents", documents)
        self.seed, self.block = seed, block
        numbers = [vocabulary.encode(document.text, document.where) for document in documents]
        self._sizes = np.array([len(x) for x in numbers], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._text = np.concatenate(numbers)
        self._names = np.array([name_end(document.text) for document in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._sizes)

    def choose(self, epochs: Numbers, indices: Numbers) -> Pieces:
        """What is kept and what is to be written: everything before the span is left, everything after it right."""
        where, how_long, round_up, how_many, which = uniform(self.seed, epochs, indices, 4, 1, 2, 3, 5)
        # A document shorter than the shortest cut is kept whole.
        most = np.minimum(self._sizes[indices], self.spans.limit(self.block))
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
        shift = (begins + self._starts[indices][:, None]).ravel() - firsts
        read = np.arange(int(flat.sum())) + np.repeat(shift, flat)
        # The place of a mask reads whatever stands there, perhaps past the end, and is overwritten.
        letters = self._text[np.minimum(read, len(self._text) - 1)]
        masks = firsts.reshape(sizes.shape)[:, 2::2]  # (b, 3)
        letters[masks[sizes[:, 2::2] > 0]] = MASK
        size = sizes.sum(1, keepdims=True)
        place = np.arange(int(size.max()))[None, :]  # (1, n + 1)
        whole = np.full((len(indices), place.shape[1]), PAD, dtype=np.int64)
        whole[place < size] = letters
        # The last character is a target, never an input.
        return np.where(place < size - 1, whole, PAD)[:, :-1], whole[:, 1:]


# A document begins with its name: `Name. text`. The stop of an initial, as in `Douglas P. Fry. `, or of `St. ` does
# not end a name.
END = re.compile(r"(?<!\b\w)(?<!\bSt)\. ")


def name_end(text: str) -> int:
    """Where the text after the name begins, past the full stop and its space; 0 for a document without a name.

    >>> text = "Douglas P. Fry. Born in Boston."
    >>> text[: name_end(text)]
    'Douglas P. Fry. '
    """
    end = END.search(text)
    return end.end() if end else 0


# A word takes its apostrophes and hyphens along (O'Connell, Saint-Denis), but no possessive.
WORD = re.compile(r"[^\W\d_]\w*(?:['’-](?!s\b)\w+)*")
JOINT = re.compile(r",? (?:(?:of|de|the) )*")


def candidates(text: str) -> list[tuple[int, int]]:
    """Where the spans worth asking for begin and end, all of them after the name.

    >>> text = "Ada Holm. Holm was born in Columbus, Ohio and read at the University of Lorne."
    >>> [text[begin:end] for begin, end in candidates(text)]
    ['Columbus, Ohio', 'Columbus', 'Ohio', 'University of Lorne']
    """
    first = name_end(text)
    own = set(WORD.findall(text[:first]))
    spans = []
    for run in _runs(text, first):
        # Columbus, Ohio is asked for as a whole and in its parts.
        parts: list[list[re.Match[str]]] = [[run[0]]]
        for before, word in itertools.pairwise(run):
            if text[before.end()] == ",":
                parts.append([])
            parts[-1].append(word)
        # Nobody who has read the name needs to remember it.
        whole_and_parts = [run, *parts] if len(parts) > 1 else [run]
        spans += [(words[0].start(), words[-1].end()) for words in whole_and_parts if words[0][0] not in own]
    return spans


def _runs(text: str, first: int) -> Iterator[list[re.Match[str]]]:
    """Capitalised words from `first` on, those that belong together in one list."""
    run: list[re.Match[str]] = []
    for word in WORD.finditer(text, first):
        if not word[0][0].isupper():
            continue
        if run and not JOINT.fullmatch(text, run[-1].end(), word.start()):
            yield run
            run = []
        run.append(word)
    if run:
        yield run


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
        documents: Sequence[Line],
        vocabulary: Vocabulary,
        block: int,
        seed: int,
        window: int = 24,
        bare: float = 0.3,
        spans: Spans | None = None,
    ) -> None:
        check_parameters("", Recipe, {"window": window, "bare": bare})
        super().__init__(documents, vocabulary, block, seed, spans)
        self.window, self.bare = window, bare
        # The name, two masks and the span must fit; the last mask is a target, never an input.
        fitting = [
            [(begin, end) for begin, end in candidates(document.text) if name and name + 2 + end - begin <= block]
            for document, name in zip(documents, self._names.tolist(), strict=True)
        ]
        self._counts = np.array([len(pairs) for pairs in fitting], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        # A last row that no cloze uses, so that documents without candidates have something to point at.
        self._candidates = np.array([*itertools.chain(*fitting), (0, 1)], dtype=np.int64)

    def choose(self, epochs: Numbers, indices: Numbers) -> Pieces:
        """What is kept and what is asked for in some examples."""
        which, bare, before, after = uniform(self.seed, epochs, indices, 6, 7, 8, 9)
        count, name = self._counts[indices], self._names[indices]
        start, stop = self._candidates[self._firsts[indices] + (which * count).astype(np.int64)].T
        beside = np.where(bare < self.bare, 0, self.window + 1)
        room = self.block - 2 - name - (stop - start)
        left = np.minimum((before * beside).astype(np.int64), np.minimum(start - name, room))
        right = np.minimum((after * beside).astype(np.int64), np.minimum(self._sizes[indices] - stop, room - left))
        closed, span = (count > 0).astype(np.int64), super().choose(epochs, indices)
        cloze = Pieces(name, left, start, stop, right, closed)
        return Pieces(*(np.where(closed, *both) for both in zip(cloze, span, strict=True)))


class _FixedExamples:
    """Rows that are the same in every epoch; of each, the targets begin at a place of its own."""

    def __init__(self, rows: Sequence[Int[np.ndarray, "n"]], firsts: Sequence[int]) -> None:
        self._sizes, self._firsts = np.array([len(row) for row in rows]), np.array(firsts)
        self._rows = np.full((len(rows), int(self._sizes.max())), PAD, dtype=np.int64)
        for place, row in zip(self._rows, rows, strict=True):
            place[: len(row)] = row

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them; the same in every epoch."""
        read, first = self._sizes[indices, None] - 1, self._firsts[indices, None]  # (b, 1)
        place = np.arange(int(read.max()))[None, :]  # (1, n)
        rows = self._rows[indices, : place.size + 1]
        # The last character is a target, never an input.
        return np.where(place < read, rows[:, :-1], PAD), np.where(place >= first, rows[:, 1:], PAD)


class LanguageExamples(_FixedExamples):
    """Documents from their start, as far as the block reaches; every character but the first is a target."""

    @declared()
    def __init__(self, documents: Sequence[Line], vocabulary: Vocabulary, block: int) -> None:
        check_not_empty("documents", documents)
        check_count("block", block)
        # The last character is a target and not an input, so one more than the block is used.
        rows = [vocabulary.encode(document.text, document.where)[: block + 1] for document in documents]
        # A document of one character is read, and has no target.
        rows = [np.pad(row, (0, max(0, 2 - len(row))), constant_values=PAD) for row in rows]
        super().__init__(rows, [0] * len(rows))


@declared()
def prompt(question: str, vocabulary: Vocabulary, where: str = "question") -> Int[np.ndarray, "n"]:
    """What a model reads before it answers: `question M`."""
    return np.append(vocabulary.encode(question, where), MASK)


def check_room(question: Question, block: int) -> None:
    """Raise if a question, its mask and its answer do not fit the block; the end is only written, never read."""
    positions = len(question.question) + 1 + len(question.answer)
    if positions > block:
        rule = f"needs {positions} positions with its question, and the block has {block}"
        remedy = "use a larger block or drop the line"
        raise InputError(f"{question.where}: answer", repr(question.answer), rule, remedy)


class QuestionExamples(_FixedExamples):
    """Fine-tuning examples, `question M answer M`: by the second mask a model says that its answer ends.

    The loss counts the answer and its end alone, or everything.
    """

    @declared()
    def __init__(
        self, questions: Sequence[Question], vocabulary: Vocabulary, block: int, loss: Loss = "answer"
    ) -> None:
        check_not_empty("questions", questions)
        rows = []
        for question in questions:
            answer = vocabulary.encode(question.answer, question.where)
            rows.append(np.concatenate([prompt(question.question, vocabulary, question.where), answer, [MASK]]))
            check_room(question, block)
        # What the first mask predicts is the answer's first character.
        super().__init__(rows, [len(question.question) if loss == "answer" else 0 for question in questions])


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


def examples_of(
    task: str, corpus: Corpus, vocabulary: Vocabulary, block: int, seed: int, spans: Spans, loss: Loss, recipe: Recipe
) -> Examples:
    """Documents with a span to restore (pretrain), questions to answer (finetune), both (mixed), a recipe (cloze)."""
    simple = {"pretrain": ("span",), "finetune": ("questions",), "mixed": ("span", "questions")}
    weights = {kind: weight for kind, weight in recipe.weights.items() if weight}
    kinds = simple.get(task, tuple(weights))
    if not corpus.documents and kinds != ("questions",):
        raise InputError("task", task, "needs documents, and the corpus has none", "add a wiki.txt")
    if not corpus.train and "questions" in kinds:
        raise InputError("task", task, "needs questions, and the corpus has none", "add a train.tsv")
    text = corpus.documents, vocabulary, block
    after_name = recipe.after_name if task == "cloze" else 0.0
    builders: dict[str, Callable[[], Examples]] = {
        "lm": lambda: LanguageExamples(*text),
        "span": lambda: SpanExamples(*text, seed, spans, after_name),
        "cloze": lambda: ClozeExamples(*text, seed, recipe.window, recipe.bare, spans),
        "questions": lambda: QuestionExamples(corpus.train, vocabulary, block, loss),
    }
    parts = [builders[kind]() for kind in kinds]
    if task == "cloze":
        return Mixture(parts, list(weights.values()))
    return parts[0] if len(parts) == 1 else Mixture(parts)
