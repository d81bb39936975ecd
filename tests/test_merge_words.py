"""What is said of shards is said of the whole: kinds, confidences and assumptions unite, and no less would do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from avow.core.compose import Partial, merge
from avow.errors import AvowError
from tests.helpers.merge_cases import attention, broken, draw, fold, report, tied, words


def test_failures_of_statistical_shards_add_up_and_no_less_would_do() -> None:
    case = tied(draw(10_000))
    truth = attention(*case)
    parts = []
    for i in range(4):
        lse = torch.from_numpy(truth.lse[:, i].astype(np.float64))
        part = report(truth, i, torch.from_numpy(truth.out[:, i].astype(np.float64)), lse, confidence=0.9)
        # Every tenth row breaks its promise, and no row that breaks another's.
        parts.append(dataclasses.replace(part, out=part.out + 10.0 * (torch.arange(10_000) % 10 == i).unsqueeze(-1)))
    out, certificate = fold(parts).answer()
    assert certificate.kind == "statistical"
    assert certificate.confidence == pytest.approx(0.6)
    assert broken(out, certificate.rows, case) == 4000
    assert fold(parts * 3).answer()[1].confidence == 0.0


def test_the_words_of_certificates_unite_in_every_tree() -> None:
    rows = torch.zeros(1, dtype=torch.float64)
    chance = dataclasses.replace(words(rows, "statistical", 0.99), method="random_features", assumptions=("b", "a"))
    loose = dataclasses.replace(words(rows), parameters={"precision": "native"}, rounding=False, reason="it was asked")
    said = [words(rows), chance, loose, dataclasses.replace(chance, confidence=0.98, reason="it was cheap")]
    parts = [Partial.of(torch.zeros(1, 1), rows, 0.0, rows, one) for one in said] + [Partial.nothing((1, 1))]
    for _ in range(300):
        forest = list(parts)
        while len(forest) > 1:
            a, b = (forest.pop(int(torch.randint(len(forest), ()))) for _ in range(2))
            forest.append(merge(a, b))
        whole = forest[0].answer()[1]
        assert (whole.method, whole.kind, whole.rounding) == ("exact + random_features", "statistical", False)
        assert (whole.assumptions, whole.reason) == (("a", "b"), "it was asked; it was cheap")
        assert whole.parameters == {}
        assert 0.97 - 1e-12 < whole.confidence <= 0.97


def test_nothing_anywhere_is_zero_without_error() -> None:
    out, certificate = merge(Partial.nothing((2, 3, 4)), Partial.nothing((2, 3, 4))).answer(torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 3, 4) and not bool(out.any())
    assert (certificate.bound, certificate.confidence) == (0.0, 1.0)
    assert certificate.assumptions == ("there was nothing to attend to",)


def test_a_certificate_without_a_promise_leaves_none() -> None:
    rows = torch.full((1,), math.inf, dtype=torch.float64)
    blank = Partial.of(torch.ones(1, 1), torch.zeros(1), 0.0, torch.ones(1), words(rows, "none"))
    merged = merge(
        blank,
        Partial.of(torch.ones(1, 1), torch.zeros(1), 0.0, torch.ones(1), words(torch.ones(1, dtype=torch.float64))),
    )
    assert merged.answer()[1].kind == "none"
    assert not merged.answer()[1].keeps(10.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lse": torch.zeros(3)}, "shape of lse=(3,) must be (2,), one number for each row of out; report on"),
        (
            {"lse": torch.tensor([0.0, math.inf])},
            "lse=inf must be finite, or -inf for no key; remove NaN and +inf from q and k",
        ),
        ({"lse_error": -1.0}, "lse_error=-1.0 must be a number, zero or more; report bounds of what was computed"),
        ({"lse_error": math.nan}, "lse_error=nan must be a number, zero or more"),
        ({"longest": torch.tensor([1.0, math.nan])}, "longest=nan must be a number, zero or more"),
        (
            {"longest": torch.tensor([1.0, 1e301], dtype=torch.float64)},
            "largest longest=1e+301 must be at most 1e+300; scale v",
        ),
        (
            {"out": torch.full((2, 2), math.nan)},
            "out=nan or inf must be finite where a key is seen; remove NaN and inf from v",
        ),
        ({"slack": 1.0}, "slack=1.0 must be at least 0 and below 1; use the slack of the norms you took"),
        (
            {"certificate": dataclasses.replace(words(torch.zeros(2)), target="separable attention")},
            "target of certificate=separable attention is not a mixture of the shards' answers; merge shards of",
        ),
        (
            {"certificate": words(torch.zeros(2), "sampled")},
            "kind of certificate=sampled speaks of a share of the rows and not of any one; audit the merged answer",
        ),
    ],
)
def test_a_report_that_cannot_be_merged_says_what_is_wrong(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"out": torch.zeros(2, 2), "lse": torch.zeros(2), "lse_error": 0.0}
    good |= {"longest": torch.ones(2), "certificate": words(torch.zeros(2))}
    with pytest.raises(AvowError) as caught:
        Partial.of(**(good | changed))
    assert message in str(caught.value)


def test_parts_of_other_queries_do_not_merge() -> None:
    with pytest.raises(
        AvowError, match=r"\(2, 3\) and \(4, 3\) must be equal; let every shard answer the same queries"
    ):
        merge(Partial.nothing((2, 3)), Partial.nothing((4, 3)))
