"""What a row sees, held to loops over rows and keys: the judge of every certificate asks the same functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from avow.core import Problem
from avow.numerics import masks
from avow.numerics.heads import longest_seen
from avow.numerics.masks import additive, row_tiles, seen_by, sees_any, visible, visible_pairs
from avow.numerics.softmax import softmax_average

B, G, R, D, E = 2, 2, 3, 3, 2
H = G * R

# Of (n, s): booleans hide keys, numbers are added to logits.
MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "none": lambda n, s: None,
    "keys": lambda n, s: torch.rand(B, 1, 1, s) < 0.5,
    "heads": lambda n, s: torch.rand(1, H, 1, s) < 0.5,
    "rows": lambda n, s: torch.rand(n, s) < 0.5,
    "all": lambda n, s: torch.rand(B, H, n, s) < 0.5,
    "nothing": lambda n, s: torch.zeros(B, 1, 1, s, dtype=torch.bool),
    "first row": lambda n, s: (torch.arange(n) > 0)[:, None] & (torch.rand(n, s) < 0.7),
    "numbers": lambda n, s: torch.randn(B, H, n, s, dtype=torch.float64),
    "numbers by key": lambda n, s: torch.randn(1, 1, 1, s, dtype=torch.float64),
    "numbers and holes": lambda n, s: torch.randn(n, s, dtype=torch.float64).masked_fill(
        torch.rand(n, s) < 0.4, -math.inf
    ),
}

SIZES = [(1, 1), (1, 5), (5, 1), (6, 6), (4, 9), (9, 4)]

every_mask = pytest.mark.parametrize("kind", MASKS)
either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
every_size = pytest.mark.parametrize(("n", "s"), SIZES)


def made(kind: str, causal: bool, n: int, s: int) -> tuple[Problem, Tensor, Tensor]:
    """A problem, which keys its rows see, and what is added to its logits, both written out: (b, h, n, s)."""
    q = torch.randn(B, H, n, D, dtype=torch.float64)
    k, v = torch.randn(B, G, s, D, dtype=torch.float64), torch.randn(B, G, s, E, dtype=torch.float64)
    mask = MASKS[kind](n, s)
    seen = torch.ones(B, H, n, s, dtype=torch.bool)
    added = torch.zeros(B, H, n, s, dtype=torch.float64)
    if mask is not None and mask.dtype == torch.bool:
        seen &= mask
    elif mask is not None:
        seen &= mask > -math.inf
        added += mask.masked_fill(mask == -math.inf, 0.0)
    for i, j in itertools.product(range(n), range(s)):
        if causal and j > i:
            seen[:, :, i, j] = False
    return Problem.of(q, k, v, mask=mask, causal=causal, enable_gqa=True), seen, added


@every_mask
@either_way
@every_size
def test_rows_see_what_mask_and_causality_leave(kind: str, causal: bool, n: int, s: int) -> None:
    p, seen, _ = made(kind, causal, n, s)
    for start, stop in itertools.combinations(range(n + 1), 2):
        some = seen_by(p, slice(start, stop))
        assert torch.equal(some.expand(B, H, stop - start, s), seen[:, :, start:stop])
        shown = visible(p, slice(start, stop))
        assert bool(seen.all()) if shown is None else torch.equal(shown, some)
    assert torch.equal(seen_by(p).expand_as(seen), seen)
    anything = sees_any(p)
    assert torch.equal(
        seen.any(-1), torch.ones(B, H, n, dtype=torch.bool) if anything is None else anything.expand(B, H, n)
    )
    assert visible_pairs(p) == int(seen.sum())


@every_mask
@either_way
@every_size
@pytest.mark.parametrize("tile", [1, 2 * H * B * 9, 2**24])
def test_the_longest_value_is_that_of_a_key_that_the_row_sees(
    kind: str, causal: bool, n: int, s: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_TILE", tile)
    p, seen, _ = made(kind, causal, n, s)
    lengths = (
        torch.rand(B, G, s, dtype=torch.float64)
        * torch.tensor([0.0, 1.0, 1e-300, 1e300]).double()[torch.randint(4, (s,))]
    )
    found = longest_seen(p, lengths).expand(B, H, n)
    for b, h, i in itertools.product(range(B), range(H), range(n)):
        own = [float(lengths[b, h // R, j]) for j in range(s) if seen[b, h, i, j]]
        assert float(found[b, h, i]) == max(own, default=0.0)


@every_mask
@either_way
@every_size
@pytest.mark.parametrize("tile", [1, 2 * H * B * 9, 2**24])
def test_softmax_by_definition_is_softmax(
    kind: str, causal: bool, n: int, s: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_TILE", tile)
    p, seen, added = made(kind, causal, n, s)
    found = softmax_average(p)
    keys, values = (x.repeat_interleave(R, 1) for x in (p.k, p.v))
    logits = (torch.einsum("bhnd,bhsd->bhns", p.q, keys) / math.sqrt(D) + added).masked_fill(~seen, -math.inf)
    weights = torch.where(seen.any(-1, keepdim=True), logits, 0.0).softmax(-1) * seen
    torch.testing.assert_close(found, weights @ values)


@every_mask
@either_way
@every_size
def test_the_mask_of_a_kernel_gives_rows_their_softmax(kind: str, causal: bool, n: int, s: int) -> None:
    p, seen, added = made(kind, causal, n, s)
    mask = additive(p, torch.float64)
    if mask is None:
        assert bool(seen.all()) and p.bias is None
        return
    shown = torch.zeros(B, H, n, s, dtype=torch.float64)
    shown = shown.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else shown + mask
    some = seen.any(-1, keepdim=True)
    wanted = added.masked_fill(~seen, -math.inf)
    torch.testing.assert_close(torch.where(some, shown, 0.0).softmax(-1), torch.where(some, wanted, 0.0).softmax(-1))
    # A row that sees nothing is shown everything: no kernel meets a row of −inf alone.
    assert bool((shown > -math.inf).any(-1).all())


def test_tiles_that_forgot_where_they_begin_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_TILE", 1)
    p, lengths = made("all", True, 6, 6)[0], torch.rand(B, G, 6, dtype=torch.float64)
    assert len(list(row_tiles(6, B * H * 6))) == 6
    right, sees = longest_seen(p, lengths), masks.seen_by
    monkeypatch.setattr(masks, "seen_by", lambda p, rows: sees(p, rows))
    assert torch.equal(longest_seen(p, lengths), right)
    monkeypatch.setattr(masks, "seen_by", lambda p, rows: sees(p, slice(0, rows.stop - rows.start)))
    assert not torch.equal(longest_seen(p, lengths), right)
