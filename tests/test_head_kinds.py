"""A head's kind follows from its weights: each kind from weights made for it, and lost to its neighbour beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from avow.integrations.transformers.head_kinds import KINDS, head_kind

N = 160
ROWS = torch.arange(N)


def names(seed: int = 0) -> Tensor:
    """A text in which ten names come again and again between words that come once, all behind a first token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(N) + 100
    places = torch.randperm(N - 1, generator=generator)[:60] + 1
    ids[places] = torch.randint(10, (60,), generator=generator)
    return ids


def reading(pick: Callable[[int], list[int]], part: float = 0.9) -> Tensor:
    """Weights that put `part` on the tokens that `pick` names for a row, evenly, and the rest on the first token.

    Rows for which there are none rest.
    """
    weights = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        picked = pick(i)
        weights[i, picked] += part / max(len(picked), 1)
        weights[i, 0] += 1 - weights[i].sum()
    return weights


def earlier(ids: Tensor, after: int) -> Callable[[int], list[int]]:
    """Earlier occurrences of a row's token, or (`after` = 1) what followed them."""
    return lambda i: [j + after for j in range(1, i) if ids[j] == ids[i]]


def near(reach: int) -> Callable[[int], list[int]]:
    return lambda i: list(range(max(i - reach + 1, 1), i + 1))


def test_every_kind_has_a_sentence() -> None:
    assert tuple(KINDS) == ("resting", "previous", "same", "induction", "local", "wide")
    assert all(words.endswith(".") and words[0].isupper() for words in KINDS.values())


def test_half_of_the_weight_on_the_first_token_is_rest_and_less_is_not() -> None:
    everything = near(N)
    assert head_kind(reading(everything, 0.45), ROWS, names()) == "resting"
    assert head_kind(reading(everything, 0.55), ROWS, names()) == "wide"
    assert head_kind(reading(lambda i: [i - 1] if i > 1 else [], 0.45), ROWS, names()) == "resting"


def test_the_token_before_is_previous_and_the_one_before_that_is_local() -> None:
    assert head_kind(reading(lambda i: [i - 1] if i > 1 else []), ROWS, names()) == "previous"
    assert head_kind(reading(lambda i: [i - 2] if i > 2 else []), ROWS, names()) == "local"
    assert head_kind(reading(lambda i: [i] if i > 0 else []), ROWS, names()) == "local", "the token itself"


def test_half_of_the_rows_are_not_enough_for_previous() -> None:
    assert head_kind(reading(lambda i: [i - 1 - (i % 2)] if i > 2 else []), ROWS, names()) == "local"


def test_what_followed_is_induction_and_the_occurrence_itself_is_same() -> None:
    ids = names()
    assert head_kind(reading(earlier(ids, 1)), ROWS, ids) == "induction"
    assert head_kind(reading(earlier(ids, 0)), ROWS, ids) == "same"
    assert head_kind(reading(lambda i: [j + 2 for j in earlier(ids, 0)(i) if j + 2 <= i]), ROWS, ids) == "resting"


def test_a_head_that_looks_for_tokens_may_rest_where_there_are_none() -> None:
    ids = names()
    weights = reading(earlier(ids, 1), 0.3)
    assert float(weights[2:, 0].mean()) > 0.8, "most of its weight is on the first token"
    assert head_kind(weights, ROWS, ids) == "induction"
    assert head_kind(reading(earlier(ids, 1), 0.01), ROWS, ids) == "resting", "it reads next to nothing"


def test_another_text_does_not_make_an_induction_head() -> None:
    weights = reading(earlier(names(), 1))
    assert head_kind(weights, ROWS, names(seed=1)) == "resting"
    assert head_kind(weights, ROWS, None) == "resting"


def test_a_head_that_reads_everything_is_no_induction_head_though_the_text_repeats() -> None:
    two = torch.arange(N) % 2
    assert head_kind(reading(near(N)), ROWS, two) == "wide", "half of all tokens followed the same one"


def test_tokens_that_come_again_too_seldom_say_nothing() -> None:
    ids = torch.arange(N)
    ids[-3:] = ids[40:43]
    weights = reading(earlier(ids, 0))
    assert head_kind(weights, ROWS, ids) == "resting"


def test_the_nearest_sixteen_are_local_until_they_have_less_than_half() -> None:
    assert head_kind(reading(near(30)), ROWS, names()) == "local"
    assert head_kind(reading(near(40)), ROWS, names()) == "wide"


def test_in_a_short_text_nothing_is_far_and_so_nothing_is_local() -> None:
    assert head_kind(reading(near(4))[:60, :60], ROWS[:60], names()[:60]) == "wide"


def test_rows_that_rest_have_no_say_in_what_is_read() -> None:
    def half(i: int) -> list[int]:
        return near(4)(i) if i % 2 else []

    weights = reading(half, 1.0)
    weights[::2] = 0.0
    weights[::2, 0] = 0.99
    weights[::2, 1] = 0.01  # far away, and all that these rows read
    weights[1::2, 0] = 0.0
    assert head_kind(weights, ROWS, None) == "local"


def test_some_rows_are_enough() -> None:
    ids, some = names(), torch.arange(3, N, 2)
    assert head_kind(reading(earlier(ids, 1))[some], some, ids) == "induction"
    assert head_kind(reading(lambda i: [i - 1] if i > 1 else [])[some], some, ids) == "previous"


def test_queries_from_another_sequence_rest_or_read_widely() -> None:
    assert head_kind(reading(near(3), 0.9), None, None) == "wide"
    assert head_kind(reading(near(3), 0.1), None, None) == "resting"


@pytest.mark.parametrize("n", [1, 2])
def test_a_text_of_a_word_says_nothing(n: int) -> None:
    assert head_kind(torch.eye(n), torch.arange(n), torch.arange(n)) == "wide"


def test_rows_that_see_nothing_are_not_read() -> None:
    assert head_kind(torch.zeros(N, N), ROWS, names()) == "wide"
