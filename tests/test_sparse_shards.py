"""Shards that each read a part of their tokens prove one bound for all of them; here side by side in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Problem
from avow.distributed import sparse
from avow.distributed.protocols import side_by_side
from avow.distributed.sparse import gradient_protocol, own_generator, sparse_traffic
from avow.errors import NonFiniteError, ToleranceUnreachable
from avow.methods.sparse import Sparse
from avow.numerics import tail_samples
from avow.numerics.token_ranking import Budget
from tests import fuzz_shards
from tests.fuzz import CONFIDENCE
from tests.fuzz_shards import over_shards, parted
from tests.fuzz_sparse import Interval

# One process is enough for them; they take as long as several.
pytestmark = pytest.mark.processes


def errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    keys, values = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    truth = torch.softmax(scale * (q.double() @ keys.mT), -1) @ values
    return (out.double() - truth).norm(dim=-1) / values.norm(dim=-1).amax(-1, keepdim=True)


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def random_heads(loud: float, heads: int, keys: int = 2048) -> Problem:
    q, k, v = torch.randn(1, heads, 2, 32), torch.randn(1, 2, keys, 32), torch.randn(1, 2, keys, 32)
    return Problem.of(loud * q, k, v, enable_gqa=True)


@pytest.mark.parametrize("chance", [0.0, 0.1])
@pytest.mark.parametrize("heads", [2, 6])
def test_shards_in_one_process_send_what_the_formula_says(heads: int, chance: float) -> None:
    p = random_heads(1.0, heads, 500)
    for ends in ([500], [500, 500], [1, 200, 300, 300, 500]):
        (load, *others) = over_shards(p, ends, Sparse(chance=chance), 0.3).loads
        tried = range(1, 5) if chance else (None,)
        known = [sparse_traffic(p.sizes, len(ends), reports, rungs) for reports in (1, 2) for rungs in tried]
        assert load in known and all(other == load for other in others)


@pytest.mark.parametrize("ends", [(1024,), (500, 1024), (64, 64, 65, 1024)])
@pytest.mark.parametrize("tiles", [[slice(0, 2)], [slice(0, 1), slice(1, 2)]])
def test_gradients_are_those_of_one_process_where_it_keeps_the_same(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], tiles: list[slice]
) -> None:
    monkeypatch.setattr(sparse, "row_tiles", lambda *_: tiles)
    # Five tokens outweigh all others by far, and both keep those alone.
    q, k, v = torch.ones(1, 4, 2, 16), 0.01 * torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 5)
    k[:, :, [3, 64, 500, 501, 999]] += torch.tensor([9.0, 9.1, 8.9, 9.2, 9.0])[:, None]
    p, grad = Problem.of(q, k, v, enable_gqa=True), torch.randn(1, 4, 2, 5)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, alone = avow.attend(*given, method="sparse", tol=1e-3, enable_gqa=True)
    whole = over_shards(p, ends, Sparse(), 1e-3, followed=True)
    assert alone.reason == "read 0.5% of the tokens in full"
    assert whole.answer.certificate.reason == "read 0.5% of the tokens of all shards in full"
    protocols = [
        gradient_protocol(part.q, part.k, part.v, grad, reading, p.scale, len(ends))
        for part, reading in zip(parted(p, ends), whole.readings, strict=True)
    ]
    found, _ = side_by_side(protocols)
    expected = torch.autograd.grad((out * grad).sum(), given)
    parts = found[0][0], torch.cat([one[1] for one in found], 2), torch.cat([one[2] for one in found], 2)
    assert apart(whole.answer.out, out.detach().double()) <= 1e-7
    assert all(apart(one, other.double()) <= 1e-6 for one, other in zip(parts, expected, strict=True))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("loud", [2.0, 4.0])
def test_shards_read_little_more_than_one_that_had_all_keys(loud: float, heads: int) -> None:
    p = random_heads(loud, heads)
    alone = Sparse(**Sparse.tune({}, p.sizes, 0.03, 1.0)).compute(p).trace
    for count in (1, 2, 4, 16):
        whole = over_shards(p, [2048 * i // count for i in range(1, count + 1)], Sparse(), 0.03)
        read = sum(float(reading.here.sum()) for reading in whole.readings)
        assert read == float(whole.readings[0].everywhere.sum())
        assert read <= 1.15 * float(alone.read.sum())
        assert whole.answer.certificate.keeps(0.03)


def test_each_shard_for_itself_would_read_more() -> None:
    """What the shared budget is for: a shard that does not know the others keeps the tolerance for its own answer."""
    p = random_heads(4.0, 2)
    whole = over_shards(p, [512, 1024, 1536, 2048], Sparse(), 0.03)
    together = sum(float(reading.here.sum()) for reading in whole.readings)
    apart = 0.0
    for start in range(0, 2048, 512):
        own = Problem.of(p.q, p.k[:, :, start : start + 512], p.v[:, :, start : start + 512], enable_gqa=True)
        apart += float(Sparse(**Sparse.tune({}, own.sizes, 0.03, 1.0)).compute(own).trace.read.sum())
    assert together < 0.8 * apart


def test_a_shard_without_heavy_tokens_reads_nothing() -> None:
    k, v = 0.1 * torch.randn(1, 1, 1000, 16), torch.randn(1, 1, 1000, 16)
    q = torch.ones(1, 1, 1, 16)
    k[:, :, 170] = 8.0
    whole = over_shards(Problem.of(q, k, v), [150, 300, 1000], Sparse(), 1e-2)
    assert [float(reading.here.sum()) for reading in whole.readings] == [0, 1, 0]
    assert whole.answer.certificate.keeps(1e-2)
    assert whole.answer.certificate.reason == "read 0.1% of the tokens of all shards in full"


def test_tokens_may_be_dealt_to_shards_in_any_way() -> None:
    p = random_heads(3.0, 4, 640)
    deals = [[640], [64, 640], [0, 0, 640, 640], [1, 2, 3, 640], [63, 65, 129, 500, 640]]
    answers = [over_shards(p, ends, Sparse(), 0.05).answer for ends in deals]
    for one in answers:
        assert bool((errors(one.out, p.q, p.k, p.v, p.scale) <= one.certificate.rows).all())
        assert one.certificate.keeps(0.05)


HOSTILE: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "equal keys": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
    "no values": lambda q, k, v: (q, k, torch.zeros_like(v)),
    "tiny values": lambda q, k, v: (q, k, v * 1e-30),
    "one giant key": lambda q, k, v: (q, torch.cat([k[:, :, :1] * 1e4, k[:, :, 1:]], 2), v),
    "huge logits": lambda q, k, v: (q * 1e3, k * 1e3, v),
    "logits far apart": lambda q, k, v: (q, torch.cat([k[:, :, :200] - 900, k[:, :, 200:]], 2), v),
    "no queries": lambda q, k, v: (q[:, :, :0], k, v),
    "not contiguous": lambda q, k, v: (q, k.mT.contiguous().mT, v[..., ::2]),
    "zero queries": lambda q, k, v: (torch.zeros_like(q), k, v),
}


@pytest.mark.parametrize("chance", [0.0, 0.001])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_keep_their_bounds(name: str, chance: float) -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 330, 8), torch.randn(2, 2, 330, 6)
    q, k, v = HOSTILE[name](q.abs(), k, v)
    p = Problem.of(q, k, v, enable_gqa=True)
    out, certificate = over_shards(p, [200, 200, 201, 330], Sparse(chance=chance)).answer
    found = errors(out, q, k, v, 8**-0.5).nan_to_num(nan=0.0)
    assert bool((found <= certificate.rows).all())
    # Queries that see all keys alike have to read nearly all of them; nothing else may be so unsure.
    assert certificate.bound <= 5.1e-3 or name == "huge logits"


def test_no_keys_at_all_answer_nothing() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8)
    out, certificate = over_shards(Problem.of(q, k, k), [0, 0], Sparse(), 1e-3).answer
    assert not bool(out.any()) and certificate.bound == 0
    assert certificate.assumptions == ("there was nothing to attend to",)


def test_what_cannot_be_proved_is_refused_alike() -> None:
    p = random_heads(1.0, 2, 128)
    with pytest.raises(ToleranceUnreachable, match=r"tol=1e-09 is less than can be proved, 6\.\d+e-08; ask for less"):
        over_shards(p, [64, 128], Sparse(), 1e-9)
    with pytest.raises(NonFiniteError, match="remove NaN and inf from k"):
        over_shards(Problem.of(p.q, p.k * math.inf, p.v, enable_gqa=True), [64, 128], Sparse())


def test_bounds_hold_in_a_slice_of_the_fuzz() -> None:
    found = fuzz_shards.run(2_000, 5)
    assert found.sound and found.tally.rows >= 2_000, found.tally.stories


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_shards_that_own_up_to_too_little_are_caught(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    honest = Budget.most_moved

    def lying(*given: Any) -> Tensor:
        return honest(*given) * share

    monkeypatch.setattr(Budget, "most_moved", lying)
    found = fuzz_shards.run(1_200, 5)
    assert not found.sound and found.tally.broken > 0 and found.tally.stories


def flat_heads(rows: int) -> Problem:
    """Heads that look at all keys nearly alike: only samples can save anything."""
    q, k, v = torch.randn(1, 2, rows, 16), torch.randn(1, 1, 2048, 16), torch.randn(1, 1, 2048, 4)
    return Problem.of(0.5 * q, k, v, enable_gqa=True)


def test_samples_of_shards_are_about_those_of_one_that_had_all_keys() -> None:
    p = flat_heads(8)
    alone = Sparse(**Sparse.tune({}, p.sizes, 0.2, 0.999)).compute(p, torch.Generator().manual_seed(0)).trace
    sure = over_shards(p, [2048], Sparse(), 0.2)
    for count in (1, 4, 16):
        ends = [2048 * i // count for i in range(1, count + 1)]
        whole = over_shards(p, ends, Sparse(chance=0.001), 0.2)
        read = sum(float(reading.here.sum()) for reading in whole.readings)
        assert read == float(whole.readings[0].everywhere.sum())
        assert read <= 1.15 * float(alone.read.sum()) and read < 0.5 * float(sure.readings[0].everywhere.sum())
        certificate = whole.answer.certificate
        assert certificate.keeps(0.2) and certificate.kind == "statistical" and certificate.confidence == 0.999


def missed(p: Problem, method: Sparse, calls: int) -> tuple[int, int]:
    """How many rows are beyond their bounds, of how many, in calls of four shards that draw anew."""
    broken = rows = 0
    for seed in range(calls):
        out, certificate = over_shards(p, [100, 700, 700, 2048], method, 0.2, fuzz_shards.drawing(seed, 4)).answer
        found = errors(out, p.q, p.k, p.v, p.scale) > certificate.rows
        broken, rows = broken + int(found.sum()), rows + found.numel()
    return broken, rows


def test_rows_miss_no_more_often_than_promised() -> None:
    broken, rows = missed(flat_heads(32), Sparse(chance=1 - CONFIDENCE), 8)
    assert Interval.of(broken, rows).low <= 1 - CONFIDENCE
    assert broken == 0  # Bennett's inequality is far from sharp


def test_ranges_told_too_small_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = tail_samples._missed

    def lying(seen: Tensor, variances: Tensor, ends: Tensor, *given: Any) -> Tensor:
        return honest(seen, 1e-3 * variances, 1e-3 * ends, *given)

    monkeypatch.setattr(tail_samples, "_missed", lying)
    broken, rows = missed(flat_heads(32), Sparse(chance=1 - CONFIDENCE), 3)
    assert Interval.of(broken, rows).low > 1 - CONFIDENCE


def test_shards_draw_unlike_each_other_even_from_generators_that_are_alike() -> None:
    method = Sparse(chance=0.1)
    made = [own_generator(method, rank, torch.device("cpu"), torch.Generator().manual_seed(5)) for rank in (0, 1, 0)]
    first, second, again = (torch.rand(4, generator=one) for one in made)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert own_generator(Sparse(), 0, torch.device("cpu"), None) is None
