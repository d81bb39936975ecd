"""One pass over keys with any logs whatever, against sums written out at full length."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from avow.core import Sizes
from avow.numerics import scan
from avow.numerics.scan import BLOCK, TILE, Keys, State, Tile

B, G, R = 1, 2, 2
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, TILE - 1, TILE, TILE + 1)


class Sequence(NamedTuple):
    """Logs of key features, what rows weigh them by (as logs too), and values."""

    log: Tensor
    row: Tensor
    values: Tensor
    seen: Tensor | None = None


def sequence(n: int, s: int, m: int = 3, reach: float = 1.0, seen: Tensor | None = None) -> Sequence:
    log = reach * (2 * torch.rand(B, G, s, m, dtype=torch.float64) - 1)
    if seen is not None:
        log = torch.where(seen[:, None], log, -math.inf)
    row = torch.randn(B, G, R, n, m, dtype=torch.float64)
    return Sequence(log, row, torch.randn(B, G, s, 2, dtype=torch.float64), seen)


def naive(x: Sequence, causal: bool) -> Tensor:
    """Σ_f Σ_j exp(row_if + log_jf) v_j over the same without v, every pair by itself."""
    n, s = x.row.shape[-2], x.log.shape[-2]
    pairs = torch.logsumexp(x.row.unsqueeze(-2) + x.log[:, :, None, None], -1)  # (b, g, r, n, s)
    if causal:
        pairs = pairs.masked_fill(~torch.ones(n, s, dtype=torch.bool).tril(), -math.inf)
    blind = (pairs == -math.inf).all(-1, keepdim=True)
    return torch.softmax(pairs.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ x.values.unsqueeze(2)


def keys_of(x: Sequence):  # type: ignore[no-untyped-def]
    seen = None if x.seen is None else x.seen[None, None, :, None]
    return lambda span: Keys(
        x.log[..., span, :].clone(), None, None if seen is None else seen[..., span, :].expand(B, G, -1, 1)
    )


def weigh(x: Sequence, rows: slice, reference: Tensor) -> Tensor:
    log = x.row[..., rows, :] + reference.unsqueeze(2)
    return torch.exp(log - log.amax(-1, keepdim=True))


def causal(x: Sequence, state: State | None = None) -> tuple[Tensor, State]:
    start = scan.nothing(x.values, x.log.shape[-1], x.log.shape[-1]) if state is None else state

    def rows_of(tile: Tile) -> Tensor:
        return weigh(x, tile.rows, tile.reference)

    sums, end = scan.causal(keys_of(x), rows_of, x.values, G * R, x.row.shape[-2], start, normalise=True)
    return sums.out, end


def whole(x: Sequence) -> Tensor:
    state = scan.settle(scan.absorb(keys_of(x), x.values, x.log.shape[-1]))
    rows = x.row.shape[-2]
    return scan.collect(lambda span: weigh(x, span, state.top), G * R, rows, state, normalise=True).out


@pytest.mark.parametrize("reach", [1.0, 50.0, 1e4])
@pytest.mark.parametrize("length", [1, 65, 130])
def test_logs_across_any_range_sum_as_they_should(length: int, reach: float) -> None:
    x = sequence(length, length, reach=reach)
    torch.testing.assert_close(whole(x), naive(x, causal=False))
    torch.testing.assert_close(causal(x)[0], naive(x, causal=True))
    if length > 1:
        assert not torch.allclose(causal(x)[0], naive(x, causal=False))


@pytest.mark.parametrize("length", EDGES)
def test_lengths_at_the_edges_of_blocks_and_tiles(length: int) -> None:
    x = sequence(length, length, m=2)
    torch.testing.assert_close(causal(x)[0], naive(x, causal=True))
    torch.testing.assert_close(whole(x), naive(x, causal=False))


@pytest.mark.parametrize(
    ("n", "s"), [(200, 70), (70, 200), (1, 130), (130, 1), (TILE + 70, TILE), (TILE, TILE + 70)], ids=str
)
def test_more_queries_than_keys_and_more_keys_than_queries(n: int, s: int) -> None:
    x = sequence(n, s, m=2, reach=5.0)
    out, end = causal(x)
    torch.testing.assert_close(out, naive(x, causal=True))
    everything = scan.absorb(keys_of(x), x.values, 2)
    torch.testing.assert_close(end.top, everything.top)
    torch.testing.assert_close(end.sums, everything.sums)
    torch.testing.assert_close(end.total, everything.total)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_running_sums_are_cumulative(length: int) -> None:
    x, total = torch.rand(B, G, length, 3, dtype=torch.float64), torch.rand(B, G, 3, 1, dtype=torch.float64)
    wanted = x.cumsum(-2) + total.transpose(-1, -2)
    torch.testing.assert_close(scan.running(x, total), wanted)
    assert not torch.allclose(scan.running(x, 2 * total), wanted)


def counted(x: Sequence) -> int:
    """How many pieces a causal pass was cut into."""
    pieces = []

    def rows_of(tile: Tile) -> Tensor:
        pieces.append(tile.rows)
        return weigh(x, tile.rows, tile.reference)

    start = scan.nothing(x.values, x.log.shape[-1], x.log.shape[-1])
    scan.causal(keys_of(x), rows_of, x.values, G * R, x.row.shape[-2], start, normalise=True)
    return len(pieces)


@pytest.mark.parametrize("places", [(1,), (37,), (63, 64, 65), (5, 6, 7, 8, 90)], ids=str)
@pytest.mark.parametrize("jump", [301.0, 2e3, 1e4])
def test_jumps_halve_a_tile_until_it_is_flat(places: tuple[int, ...], jump: float) -> None:
    x = sequence(100, 100)
    calm = counted(x)
    for step, place in enumerate(places, 1):
        x.log[..., place:, :] += jump * (1 if step % 2 else -2)
    torch.testing.assert_close(causal(x)[0], naive(x, causal=True))
    assert calm == 1 < counted(x)


def test_one_feature_may_jump_while_others_fall() -> None:
    x = sequence(100, 100)
    slope = torch.linspace(0, 1e4, 100, dtype=torch.float64)
    x.log[..., 0] += slope
    x.log[..., 1] -= slope
    torch.testing.assert_close(causal(x)[0], naive(x, causal=True))


def test_float32_halves_sooner_and_keeps_its_precision() -> None:
    x = sequence(100, 100)
    x.log[..., 50:, :] += 60.0
    narrow = Sequence(x.log.float(), x.row.float(), x.values.float())
    assert counted(narrow) > 1 == counted(x)
    torch.testing.assert_close(causal(narrow)[0].double(), naive(x, causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "hidden",
    [slice(0, 1), slice(0, 64), slice(0, 70), slice(60, 70), slice(0, 129), slice(0, 130)],
    ids=lambda part: f"{part.start}-{part.stop}",
)
@pytest.mark.parametrize("reach", [1.0, 1e4])
def test_hidden_keys_may_come_first(hidden: slice, reach: float) -> None:
    seen = torch.ones(130, dtype=torch.bool)
    seen[hidden] = False
    x = sequence(130, 130, reach=reach, seen=seen)
    out, _ = causal(x)
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, naive(x, causal=True))
    if seen.any():
        torch.testing.assert_close(whole(x), naive(x, causal=False))


def test_hidden_keys_at_the_start_of_a_later_tile() -> None:
    seen = torch.ones(TILE + 80, dtype=torch.bool)
    seen[TILE - 3 : TILE + 70] = False
    x = sequence(TILE + 80, TILE + 80, m=2, reach=400.0, seen=seen)
    torch.testing.assert_close(causal(x)[0], naive(x, causal=True))


@pytest.mark.parametrize("at", [1, 64, 100])
@pytest.mark.parametrize("reach", [1.0, 1e4])
def test_a_state_carries_all_that_came_before(at: int, reach: float) -> None:
    x = sequence(130, 130, reach=reach)
    first, second = (
        Sequence(x.log[..., part, :], x.row[..., part, :], x.values[..., part, :])
        for part in (slice(0, at), slice(at, 130))
    )
    start, state = causal(first)
    end, last = causal(second, state)
    torch.testing.assert_close(torch.cat([start, end], -2), causal(x)[0])
    torch.testing.assert_close(last.sums, causal(x)[1].sums)


def test_factors_multiply_and_may_be_negative() -> None:
    x = sequence(100, 100)
    factor = torch.randn(B, G, 100, 3, dtype=torch.float64)
    row = torch.randn(B, G, R, 100, 3, dtype=torch.float64)
    one = x.log[..., :1]

    def keys(span: slice) -> Keys:
        return Keys(one[..., span, :].clone(), factor[..., span, :], None)

    start = scan.nothing(x.values, 3, 1)
    sums, _ = scan.causal(keys, lambda tile: row[..., tile.rows, :], x.values, G * R, 100, start, normalise=True)
    weights = (row @ (factor * torch.exp(one)).unsqueeze(2).transpose(-1, -2)).tril()
    torch.testing.assert_close(sums.out, (weights @ x.values.unsqueeze(2)) / weights.sum(-1, keepdim=True))
    assert sums.normaliser is not None and sums.unit_log is not None
    torch.testing.assert_close(sums.normaliser * sums.unit_log.exp(), weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("shape", [(1, 1), (65, 65), (70, 200), (200, 70), (TILE + 5, TILE + 5)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
def test_flops_are_those_that_are_counted(shape: tuple[int, int], is_causal: bool) -> None:
    n, s = shape
    x = sequence(n, s, m=3)
    with FlopCounterMode(display=False) as counter:
        if is_causal:
            causal(x)
        else:
            whole(x)
    sizes = Sizes(B, G * R, G, n, s, 4, 2, torch.float64, causal=is_causal)
    assert scan.pass_flops(sizes, 3, normalise=True) == counter.get_total_flops() > 0
    assert scan.pass_flops(sizes, 4, normalise=True) != counter.get_total_flops()


@pytest.mark.parametrize("per_position", [1, 100, 2**10, 2**14, 2**30])
def test_tiles_cover_a_sequence_once_and_hold_whole_blocks(per_position: int) -> None:
    step = scan.tile_length(per_position)
    assert BLOCK <= step <= TILE and step % BLOCK == 0
    for length in (1, 63, 64, 1024, 3000):
        found = [i for span in scan.tiles(length, per_position) for i in range(span.start, span.stop)]
        assert found == list(range(length))


def test_depth_counts_at_least_the_longest_chain() -> None:
    for steps in (1, 7, 5000):
        depths = [scan.depth(n, steps) for n in range(1, 5000)]
        assert depths == sorted(depths)
        assert all(depth >= min(n, TILE) + 3 * steps for n, depth in enumerate(depths, 1))


def test_every_tile_that_is_added_up_is_counted() -> None:
    _, calm = causal(sequence(2 * TILE, 2 * TILE, reach=1.0))
    _, steep = causal(sequence(200, 200, reach=1e4))
    _, again = causal(sequence(200, 200, reach=1.0), calm)
    assert calm.steps == 2
    # Logs that jump at nearly every key leave tiles of a key or two: far more sums than 200/TILE.
    assert steep.steps > 20
    assert again.steps == calm.steps + 1


def test_gradients_pass_through_tiles_that_were_halved() -> None:
    x = sequence(100, 100)
    x.log[..., 40:, :] += 400.0
    x.log[..., 70:, :] += 400.0
    assert counted(x) > 2
    leaves = [t.clone().requires_grad_() for t in (x.log, x.row, x.values)]
    watched = Sequence(*leaves)
    slope = torch.randn(B, G, R, 100, 2, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad((causal(watched)[0] * slope).sum(), leaves),
        torch.autograd.grad((naive(watched, causal=True) * slope).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
        assert float(expected.abs().max()) > 0
