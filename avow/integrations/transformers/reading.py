r"""What every head of a model reads of a text, and what it provably need not.

The text is read exactly. Then one word asks: its row of every head is answered by sparse attention, each head by
itself, at a ladder of tolerances. At a tolerance t, tokens that a head left out move its answer by at most t of its
longest value, as its certificate proves; the error is measured against float64, too.

A token's *level* is the first rung of the ladder from which on it is left out: at rung i the head reads the tokens
whose level is above i. Next words are those of the model if every head leaves out what it may, layer after layer: each
layer then attends with what the layers before it gave, and certificates are about that.

A word that is crossed out stays where it is, and no later token may read it, in any layer: its next words are an
experiment, and nothing is proved about them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from avow.attend import attend
from avow.core import Certificate, Method, Problem
from avow.core.certify import certify
from avow.errors import AvowError, ParameterError
from avow.integrations.transformers import enabling
from avow.integrations.transformers.call_view import CallView
from avow.integrations.transformers.enabling import pretrained
from avow.integrations.transformers.head_kinds import HeadKind, head_kind
from avow.integrations.transformers.observers import answering, watching
from avow.methods import exact_method
from avow.methods.low_rank import LowRank
from avow.methods.polynomial import Polynomial
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.numerics.softmax import softmax_weights

STOPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Tolerances at which heads are asked what they need."""
NEXT = 8
"""Next words that are shown."""
LONGEST = 1024
"""Tokens that a text may have."""
METHODS = (exact_method()(), LowRank(rank=64), RandomFeatures(features=256), Polynomial())
"""What else could answer, in a setting that is usual for it."""
_CONFIDENCE = 0.99
# Texts that are read at a time, each without another word.
_BATCH = 8

Next = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Row:
    """One word that asks.

    Attributes:
        position: its place in the text; it sees the tokens up to itself, n of them.
        weights: of each head on each token, in float64.
        levels: the first stop from which on a head leaves a token out; as many as there are stops if it never does.
        bounds: of each head at each stop, relative to its longest value.
        errors: measured against float64, in the same unit.
        exact: the likeliest next words, with their probabilities.
        approximate: the same at each stop, if every head leaves out what it may.
        read: the share of keys that was read for that, over all heads, at each stop.
        without: the likeliest next words without each whole word that ends before this one, in the order of the text;
            empty if that was not tried.
    """

    position: int
    weights: Float[Tensor, "h n"]
    levels: Int[Tensor, "h n"]
    bounds: Float[Tensor, "h s"]
    errors: Float[Tensor, "h s"]
    exact: Next
    approximate: tuple[Next, ...]
    read: tuple[float, ...]
    without: tuple[Next, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A text, and what every head of a model reads of it for some of its words.

    Attributes:
        model: its name.
        words: the text's tokens; the first is the neutral one that texts begin with.
        prompt: so many of them were given, and the model wrote the others.
        layers: how many layers of attention the model has.
        heads: how many heads a layer has; heads are counted through, layer by layer.
        kinds: what each head does.
        rows: the words that ask.
        promises: what each of `METHODS` promises each head for all words that were given; infinite if nothing.
    """

    model: str
    words: tuple[str, ...]
    prompt: int
    layers: int
    heads: int
    kinds: tuple[HeadKind, ...]
    rows: tuple[Row, ...]
    promises: Float[Tensor, "h m"]


class _Layer(NamedTuple):
    """Queries, keys and values of a layer, those of each head for themselves."""

    q: Float[Tensor, "1 h n d"]
    k: Float[Tensor, "1 h n d"]
    v: Float[Tensor, "1 h n e"]
    scale: float

    def row(self, position: int) -> Problem:
        """One word that asks all the tokens before it, and itself."""
        n = position + 1
        return Problem.of(self.q[:, :, position:n], self.k[:, :, :n], self.v[:, :, :n], scale=self.scale)

    def whole(self, n: int) -> Problem:
        """The first words, each of which asks those before it."""
        q, k, v = (x[:, :, :n] for x in (self.q, self.k, self.v))
        return Problem.of(q, k, v, scale=self.scale, causal=True)


def start_ids(tokenizer: Any) -> list[int]:
    """The neutral token that a text begins with: heads that need nothing rest on the first one."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [] if first is None else [first]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [*start_ids(tokenizer), *tokenizer(text, add_special_tokens=False).input_ids]


@torch.no_grad()
def reading_of(
    model: Any,
    tokenizer: Any,
    text: str,
    asking: Sequence[str | int] | None = None,
    write: int = 0,
    name: str = "",
    cross_out: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> Reading:
    """What every head reads of a text.

    Args:
        model: a model of transformers that continues texts.
        tokenizer: its tokenizer.
        text: what it reads.
        asking: words that ask besides the last one, which always does, by position or by their text: then the last
            occurrence asks, by its last token.
        write: so many words the model writes on, its likeliest ones; each of them asks.
        name: of the model; empty for its own.
        cross_out: try the given words that ask without each whole word before them: a pass of the model for each.
        tell: called with a line about each step.

    Returns:
        The reading.

    Raises:
        ParameterError: the text is empty or too long, or a word that asks is not in it.
    """
    model = pretrained(model)
    ids = _ids(tokenizer, text)
    prompt = len(ids)
    if not 2 <= prompt <= LONGEST - write:
        rule = f"has {prompt - 1} tokens; it must have between 1 and {LONGEST - write - 1}"
        raise ParameterError("text", f"{text[:40]!r}", rule, "write a shorter text" if text else "write something")
    tell("the model reads the text")
    with enabling.as_it_was(model):
        enabling.enable(model)
        ids, layers, logits = _read_exactly(model, ids, write)
        words = tuple(tokenizer.decode([one]) for one in ids)
        places = {_place(word, words[:prompt]) for word in asking or ()}
        rows = []
        for position in sorted({*places, *range(prompt - 1, len(ids))}):
            tell(f"{words[position].strip() or 'a space'} asks {len(layers)} layers")
            rows.append(_row(model, tokenizer, torch.tensor([ids]), layers, position, logits[position]))
    if cross_out:
        tell("the model reads the text without each of its words")
        spans, given = whole_words(words[:prompt]), [row.position for row in rows if row.position < prompt]
        without = next_without(model, tokenizer, ids[:prompt], spans, given)
        for i, tried in enumerate(zip(*without, strict=True)):
            before = tuple(next_ for next_, span in zip(tried, spans, strict=True) if span.stop <= rows[i].position)
            rows[i] = dataclasses.replace(rows[i], without=before)
    tell("kinds of heads, and what other methods promise")
    kinds = tuple(itertools.chain.from_iterable(_kinds(layer, torch.tensor(ids)) for layer in layers))
    promises = torch.cat([_promises(layer.whole(prompt)) for layer in layers])
    heads = layers[0].q.shape[1]
    known = name or type(model).__name__
    return Reading(known, ("", *words[1:]), prompt, len(layers), heads, kinds, tuple(rows), promises)


def _read_exactly(model: Any, ids: list[int], write: int) -> tuple[list[int], list[_Layer], Tensor]:
    """The ids with those that the model writes on, the layers' queries, keys and values, and the logits."""
    ids = list(ids)
    for left in range(write, -1, -1):
        layers: list[_Layer] = []

        def keep(
            name: str, problem: Problem, out: Tensor, certificate: Certificate, layers: list[_Layer] = layers
        ) -> None:
            siblings = problem.q.shape[1] // problem.k.shape[1]
            k, v = (x.repeat_interleave(siblings, 1) for x in (problem.k, problem.v))
            layers.append(_Layer(problem.q, k, v, problem.scale))

        with contextlib.nullcontext() if left else watching(keep):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        if left:
            ids.append(int(logits[-1].argmax()))
    return ids, layers, logits


def _place(word: str | int, words: Sequence[str]) -> int:
    """The position of a word that asks."""
    if isinstance(word, int):
        if not 0 < word < len(words):
            rule = f"is not the position of a word; the text has them from 1 to {len(words) - 1}"
            raise ParameterError("asking", word, rule, "name a word of the text")
        return word
    ends = list(itertools.accumulate(len(one) for one in words[1:]))
    start = "".join(words[1:]).rfind(word)
    if start < 0 or not word.strip():
        raise ParameterError("asking", repr(word), "is not in the text", "name a word of it, or give a position")
    return 1 + bisect.bisect_left(ends, start + len(word))


def _row(model: Any, tokenizer: Any, ids: Tensor, layers: Sequence[_Layer], position: int, logits: Tensor) -> Row:
    """What one word that asks reads: each head by itself, and all of them together in the model."""
    by_layer = [_heads(layer.row(position)) for layer in layers]
    weights, levels, bounds, errors = (torch.cat(parts) for parts in zip(*by_layer, strict=True))
    approximate, read = _approximate(model, ids, layers, position)
    return Row(
        position,
        weights,
        levels,
        bounds,
        errors,
        _next(tokenizer, logits),
        tuple(_next(tokenizer, one) for one in approximate),
        tuple(read.tolist()),
    )


def _heads(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, levels, bounds and errors of the heads of a layer for one row."""
    problem, reference = problem.measure_norms(), exact_method()().reference(problem)
    unit = problem.v.double().norm(dim=-1).amax(-1).clamp(min=1e-300)  # (1, h)
    levels = torch.zeros(problem.k.shape[1:3], dtype=torch.long)
    bounds, errors = [], []
    for i, stop in enumerate(STOPS):
        out, certificate, selected = _sparse(problem, stop)
        levels = torch.where(selected, i + 1, levels)
        bounds.append(certificate.rows[0, :, 0])
        errors.append(((out.double() - reference)[:, :, 0].norm(dim=-1) / unit)[0])
    return softmax_weights(problem)[0, :, 0], levels, torch.stack(bounds, 1), torch.stack(errors, 1)


def _sparse(problem: Problem, stop: float) -> tuple[Tensor, Certificate, Tensor]:
    """Sparse attention of one row within a tolerance: its answer, its certificate, and which tokens it read."""
    method = Sparse(**Sparse.tune({}, problem.sizes, stop, 1.0))
    computed = method.compute(problem, selection=True)
    return computed.out, certify(method, problem, computed, 1.0), computed.trace.selected[0, :, 0]


def _approximate(model: Any, ids: Tensor, layers: Sequence[_Layer], position: int) -> tuple[Tensor, Tensor]:
    """The logits after a word whose heads leave out what they may, at each stop; and the share of keys they read.

    The stops are a batch: each continues the same text, and attends at its own tolerance.
    """
    many = len(STOPS)
    cache = DynamicCache(config=model.config)
    groups = [len(STOPS), model.config.get_text_config().num_key_value_heads, position]
    for i, layer in enumerate(layers):
        siblings = layer.k.shape[1] // groups[1]
        k, v = (x[:, ::siblings, :position].expand(*groups, -1) for x in (layer.k, layer.v))
        cache.update(k, v, i)
    read = torch.zeros(many, dtype=torch.float64)

    def answer(query: Tensor, view: CallView) -> tuple[Tensor, Certificate]:
        siblings = query.shape[1] // view.key.shape[1]
        k, v = (x.repeat_interleave(siblings, 1) for x in (view.key, view.value))
        outs = []
        for i, stop in enumerate(STOPS):
            problem = Problem.of(query[i : i + 1], k[i : i + 1], v[i : i + 1], scale=view.scale).measure_norms()
            out, certificate, selected = _sparse(problem, stop)
            outs.append(out)
            read[i] += selected.double().mean() / len(layers)
        return torch.cat(outs), certificate

    with answering(answer):
        token = ids[:, position : position + 1].expand(many, 1)
        logits = model(token, past_key_values=cache, position_ids=torch.full((many, 1), position)).logits
    return logits[:, -1], read


def whole_words(words: Sequence[str]) -> list[range]:
    """The tokens of each whole word, in the order of the text: models write in pieces of words."""
    begins = [t for t in range(1, len(words)) if t == 1 or not (words[t - 1][-1:] + words[t][:1]).isalnum()]
    return [range(start, end) for start, end in itertools.pairwise([*begins, len(words)])]


def next_without_word(model: Any, tokenizer: Any, text: str, position: int, crossed: int) -> Next:
    """The likeliest next words after a word of a text, if the whole word at another position is crossed out.

    Raises:
        ParameterError: there is no such word, or it does not stand before the one that asks.
    """
    ids = _ids(tokenizer, text)
    words = [tokenizer.decode([one]) for one in ids]
    ids = ids[: _place(position, words) + 1]
    span = next(span for span in whole_words(words) if _place(crossed, words) in span)
    if span.stop > position:
        rule = f"is not before the word that asks, which is at {position}"
        raise ParameterError("crossed", crossed, rule, "cross out a word before it")
    return next_without(model, tokenizer, ids, [span], [position])[0][0]


@torch.no_grad()
def next_without(
    model: Any, tokenizer: Any, ids: Sequence[int], crossed: Sequence[range], positions: Sequence[int]
) -> list[list[Next]]:
    """The likeliest next words after each position, for each range of tokens that no token after it may read."""
    model, found = pretrained(model), []
    text, places = torch.tensor([ids]), torch.arange(len(ids))
    with enabling.as_it_was(model):
        enabling.enable(model)
        whole = model(text, past_key_values=DynamicCache(), use_cache=True)
        for i in range(0, len(crossed), _BATCH):
            batch = crossed[i : i + _BATCH]
            # What stands before all of them is as it was, and is not read again.
            same = min(one.start for one in batch)
            cache = DynamicCache()
            for layer, held in enumerate(whole.past_key_values.layers):
                cache.update(*(x[:, :, :same].expand(len(batch), -1, -1, -1) for x in (held.keys, held.values)), layer)
            hidden = torch.stack([_later_reads(one, places) for one in batch])[:, None, same:]  # (b, 1, n - same, n)
            with answering(functools.partial(_attend_but, hidden)):
                later = model(text[:, same:].expand(len(batch), -1), past_key_values=cache).logits
            logits = ([whole.logits[0, p] if p < same else one[p - same] for p in positions] for one in later)
            found += [[_next(tokenizer, one) for one in row] for row in logits]
    return found


def _later_reads(crossed: range, places: Int[Tensor, "n"]) -> Bool[Tensor, "n n"]:
    """What tokens after a range would read of it."""
    return (places[:, None] >= crossed.stop) & (places >= crossed.start) & (places < crossed.stop)


def _attend_but(hidden: Bool[Tensor, "b 1 n n"], query: Tensor, view: CallView) -> tuple[Tensor, Certificate]:
    """The exact answer to a call without what is hidden."""
    mask = ~hidden
    if view.mask is not None:
        mask = torch.where(hidden, False if view.mask.dtype == torch.bool else -math.inf, view.mask)
    return attend(query, view.key, view.value, method="exact", **view._replace(mask=mask).options(query))


def _next(tokenizer: Any, logits: Tensor) -> Next:
    """The likeliest next words."""
    best = logits.double().softmax(-1).topk(min(NEXT, logits.shape[-1]))
    return tuple((tokenizer.decode([i]), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _kinds(layer: _Layer, ids: Tensor) -> list[HeadKind]:
    """What each head of a layer does over the whole text."""
    rows = torch.arange(len(ids))
    return [head_kind(weights, rows, ids) for weights in softmax_weights(layer.whole(len(ids)))[0]]


def _promises(problem: Problem) -> Float[Tensor, "h m"]:
    """What each method promises each head of a layer."""
    return torch.stack([_promise(method, problem.measure_norms()) for method in METHODS], 1)


def _promise(method: Method, problem: Problem) -> Float[Tensor, "h"]:
    """What a method promises each head; infinite if that is nothing."""
    nothing = torch.full(problem.q.shape[1:2], math.inf, dtype=torch.float64)
    try:
        method.check(problem.sizes)
        computed = method.compute(problem, torch.Generator().manual_seed(0))
    except AvowError:
        return nothing
    certificate = certify(method, problem, computed, _CONFIDENCE)
    return nothing if certificate.kind == "none" else certificate.rows[0].amax(-1).double()
