"""Parts make a whole that is as strong as its weakest part and no stronger."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import avow
from avow.core import Certificate, Cost, Kind
from avow.core.compose import compose, select
from avow.errors import InputError


def part(bound: float, kind: Kind = "deterministic", rows: int = 4, **more: object) -> Certificate:
    values = torch.linspace(0, bound, rows, dtype=torch.float64)[None]
    return Certificate("exact", {"precision": "native"}, "softmax attention", kind, bound, values, **more)  # type: ignore[arg-type]


STRONG = part(0.3, cost=Cost(10, 1, 1, 100))
CHANCE = dataclasses.replace(part(0.1, "statistical", confidence=0.9), method="random_features")
SAMPLE = part(0.2, "sampled", rows=12, confidence=0.95, coverage=0.9)
NOTHING = part(math.inf, "none", reason="it does not say")


@pytest.mark.parametrize("other", [CHANCE, SAMPLE], ids=["statistical", "sampled"])
def test_the_order_of_parts_does_not_matter(other: Certificate) -> None:
    first = compose([STRONG, other, other], -1)
    for parts in itertools.permutations([STRONG, other, other]):
        whole = compose(parts, -1)
        assert (whole.bound, whole.kind) == (max(STRONG.bound, other.bound), other.kind)
        assert (whole.coverage, whole.confidence) == pytest.approx((first.coverage, first.confidence))
        assert sorted(whole.rows.flatten().tolist()) == sorted(first.rows.flatten().tolist())


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([STRONG, STRONG], "deterministic"),
        ([STRONG, CHANCE], "statistical"),
        ([STRONG, SAMPLE], "sampled"),
        ([STRONG, SAMPLE, NOTHING], "none"),
    ],
)
def test_the_weakest_kind_wins(parts: list[Certificate], kind: str) -> None:
    assert compose(parts, -1).kind == kind
    assert compose(parts, -1).keeps(0.5) == (kind != "none")
    assert compose(parts[::-1], -1).kind == kind


def test_the_smallest_confidence_holds_for_statistical_rows() -> None:
    surer = dataclasses.replace(CHANCE, confidence=0.99)
    assert compose([CHANCE, surer, STRONG], -1).confidence == 0.9


def test_failures_of_sampled_parts_add_up() -> None:
    assert compose([SAMPLE, SAMPLE, SAMPLE], -1).confidence == pytest.approx(0.85)
    assert compose([SAMPLE] * 30, -1).confidence == 0.0


def test_promises_about_single_rows_and_about_shares_of_rows_are_not_mixed() -> None:
    # A thousand rows that each miss with probability 0.1 miss some hundred together: no share of them is promised.
    with pytest.raises(InputError, match="statistical and sampled speak of single rows and of shares of rows"):
        compose([CHANCE, SAMPLE], -1)


def test_coverage_is_weighted_by_rows() -> None:
    few = part(0.2, "sampled", rows=3, confidence=0.95, coverage=0.5)
    assert compose([SAMPLE, few], -1).coverage == pytest.approx((12 * 0.9 + 3 * 0.5) / 15)


def test_rows_are_concatenated_and_costs_added() -> None:
    other = part(0.5, rows=2, cost=Cost(5, 2, 3, 700))
    whole = compose([STRONG, other], -1)
    assert torch.equal(whole.rows, torch.cat([STRONG.rows, other.rows], -1))
    assert whole.cost == Cost(15, 3, 4, 700)
    assert compose([STRONG, SAMPLE], -1).cost is None


def test_parameters_are_kept_only_where_all_parts_share_a_method() -> None:
    assert compose([STRONG, STRONG], -1).parameters == {"precision": "native"}
    assert compose([STRONG, CHANCE], -1).parameters == {}


def test_assumptions_are_said_once() -> None:
    first = part(0.1, assumptions=("a", "b"))
    second = part(0.1, assumptions=("b", "c"))
    assert compose([first, second], -1).assumptions == ("a", "b", "c")


def test_rounding_is_included_only_where_every_part_includes_it() -> None:
    assert compose([STRONG, STRONG], -1).rounding
    assert not compose([STRONG, dataclasses.replace(STRONG, rounding=False)], -1).rounding


def test_different_targets_are_refused() -> None:
    other = dataclasses.replace(STRONG, target="separable attention")
    text = (
        "parts=separable attention, softmax attention must approximate one target; "
        "compose certificates of one mechanism"
    )
    with pytest.raises(InputError, match=f"^{text}$"):
        compose([STRONG, other], -1)


def test_no_parts_are_refused() -> None:
    with pytest.raises(InputError, match="must hold at least one certificate; pass the certificates of the parts"):
        compose([], 0)


def test_heads_attended_apart_compose_to_all_heads_at_once() -> None:
    q, k, v = torch.randn(3, 1, 4, 9, 4, dtype=torch.float64).unbind()
    whole = avow.attend(q, k, v, method="low_rank", rank=9).certificate
    parts = []
    for h in range(4):
        one = slice(h, h + 1)
        parts.append(avow.attend(q[:, one], k[:, one], v[:, one], method="low_rank", rank=9).certificate)
    joined = compose(parts, 1)
    assert joined.rows.shape == whole.rows.shape
    assert joined.bound == max(p.bound for p in parts) == float(joined.rows.max())
    assert (joined.kind, joined.method, joined.target) == (whole.kind, whole.method, whole.target)


def test_rows_are_selected_in_both_units() -> None:
    own = torch.tensor([[0.5, 1.0, math.inf, 0.25]], dtype=torch.float64)
    whole = dataclasses.replace(STRONG, relative=math.inf, relative_rows=own)
    some = select(whole, [3, 0], -1)
    assert torch.equal(some.rows, whole.rows[:, [3, 0]]) and some.bound == float(some.rows.amax())
    assert some.relative_rows.tolist() == [[0.25, 0.5]] and some.relative == 0.5
    assert select(whole, [], -1).bound == 0.0
    parts = [select(whole, [i], -1) for i in range(4)]
    again = compose(parts, -1)
    assert torch.equal(again.rows, whole.rows) and torch.equal(again.relative_rows, own)


def test_a_share_of_all_rows_says_nothing_of_some() -> None:
    assert select(SAMPLE, list(range(11, -1, -1)), -1).coverage == 0.9
    with pytest.raises(InputError, match="sampled speaks of a share of the rows and not of any one"):
        select(SAMPLE, [0, 1], -1)
