"""Shards that each read a part of their tokens give one answer, and one certificate that holds for all of them."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import avow
from avow.bench import shards
from avow.contract import Problem
from avow.distributed import simulated, sparse_budget, sparse_draws, sparse_script
from avow.distributed.bytes_sent import sparse_bytes
from avow.distributed.scripts import over_processes, side_by_side
from avow.distributed.sparse import attend_sparse, own_generator
from avow.distributed.sparse_gradients import gradient_script
from avow.distributed.traffic import counted
from avow.errors import AvowError, NonFiniteError, ParameterError, ToleranceUnreachable
from avow.links import sparse_rounds as sparse_rounds_load
from avow.methods.sparse import Sparse
from avow.scaling import ways
from tests import fuzz_shards
from tests.fuzz import CONFIDENCE
from tests.fuzz_shards import Whole, over_shards, parted
from tests.fuzz_sparse import Interval

pytestmark = pytest.mark.processes

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEYS = 1000
# Where the keys of each process end.
ENDS = {2: (333, KEYS), 4: (150, 150, 151, KEYS)}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same in every process: queries of six heads on two near some of the keys, most of which stand in the end."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, *shape, generator=generator) for shape in ((6, 3, 16), (2, KEYS, 16), (2, KEYS, 5)))
    q = q + 4 * k[:, :, [20, 700, 990]].repeat_interleave(3, 1)
    v[:, 1] *= 1e-3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except AvowError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def mistakes(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """What each process is told where the last one asks for something else."""
    q, k, v = inputs(torch.float32)
    odd = rank == dist.get_world_size(group) - 1

    def ask(*given: Tensor, **options: Any) -> str:
        return message(lambda: attend_sparse(*given, group=group, enable_gqa=True, **options))

    return {
        "tol": ask(q, k, v, tol=0.25 if odd else 0.5),
        "method": ask(q, k, v, method=Sparse(bits=8 if odd else 4)),
        "queries": ask(q + odd, k, v),
        "nan": ask(q, k * (math.nan if odd else 1.0), v),
        "confidence": ask(q, k, v, confidence=0.9 if odd else 0.99),
        "no confidence": ask(q, k, v, confidence=0.0),
        "axes": ask(q[0], k[0], v[0]),
        "tolerance": ask(q, k, v, tol=1e-9),
        "gradient": ask(q, k, v.clone().requires_grad_() if odd else v),
        "loss": message(lambda: part_of_the_loss(q, k, v, group, 1.0 + odd)),
    }


def part_of_the_loss(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, share: float) -> None:
    out, _ = attend_sparse(q.clone().requires_grad_(), k, v, group=group, enable_gqa=True)
    (out.sum() * share).backward()


class Followed(NamedTuple):
    """An answer, the gradients of its product with `loss`, and the bytes that this process sent there and back."""

    out: Tensor
    certificate: str
    grads: tuple[Tensor, ...]
    sent: tuple[int, int]


def loss(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 6, 3, 5, generator=torch.Generator().manual_seed(3)).to(dtype)


def followed(dtype: torch.dtype, part: slice, group: dist.ProcessGroup, confidence: float | None) -> Followed:
    q, k, v = inputs(dtype)
    given = [x.clone().requires_grad_() for x in (q, k[:, :, part], v[:, :, part])]
    draws = torch.Generator().manual_seed(11)
    with counted() as there:
        out, certificate = attend_sparse(
            *given, group=group, tol=0.3, confidence=confidence, enable_gqa=True, generator=draws
        )
    with counted() as back:
        grads = torch.autograd.grad((out * loss(dtype)).sum(), given)
    return Followed(out.detach(), certificate.to_json(), grads, (there.sent, back.sent))


def spread(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """What each way to spread attention answers in this process, and what it sends."""
    ranks = dist.get_world_size(group)
    found = {}
    for way in ways(shards.problem(ranks, True).sizes):
        p = shards.problem(ranks, not way.replicated)
        part = simulated.dealt(p, ranks, queries=not way.replicated)[rank]
        with counted() as traffic:
            out, load = over_processes(shards.script(way, part, ranks, p.k.shape[-2]), group)
        assert (traffic.sent, traffic.messages) == load[:2]
        found[way.name] = out, tuple(load)
    return found


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4, timeout=timedelta(seconds=180)
    )
    for world, ends in ENDS.items():
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        assert isinstance(group, dist.ProcessGroup)
        start, end = (0, *ends)[rank : rank + 2]
        found: dict[str, Any] = {}
        for dtype in TYPES:
            q, k, v = inputs(dtype)
            mine = k[:, :, start:end], v[:, :, start:end]
            for tol in (0.3, 0.03):
                with counted() as traffic:
                    out, certificate = attend_sparse(q, *mine, group=group, tol=tol, enable_gqa=True)
                found[f"{dtype} {tol}"] = out, certificate.to_json()
                found[f"sent {dtype} {tol}"] = traffic.sent
            for confidence in (None, 0.9):
                found[f"followed {dtype} {confidence}"] = followed(dtype, slice(start, end), group, confidence)
        found["mistakes"] = mistakes(rank, group)
        found["ways"] = spread(rank, group)
        torch.save(found, f"{folder}/{rank} of {world}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes said, the first two of them also by themselves."""
    made = tmp_path_factory.mktemp("shards")
    fresh = multiprocessing.get_context("spawn")
    everyone = [fresh.Process(target=process, args=(rank, str(made))) for rank in range(4)]
    for one in everyone:
        one.start()
    # Where one fails, the others would wait for it until their patience ends.
    while any(one.is_alive() for one in everyone) and not any(one.exitcode for one in everyone):
        everyone[0].join(0.1)
        time.sleep(0.05)
    for one in everyone:
        one.terminate()
        one.join()
    assert [one.exitcode for one in everyone] == [0] * 4
    return made


@pytest.fixture(params=list(ENDS))
def said(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank} of {request.param}.pt", weights_only=False) for rank in range(request.param)]


def errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    keys, values = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    truth = torch.softmax(scale * (q.double() @ keys.mT), -1) @ values
    return (out.double() - truth).norm(dim=-1) / values.norm(dim=-1).amax(-1, keepdim=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tol", [0.3, 0.03])
def test_processes_give_one_answer_within_one_bound(said: list[dict[str, Any]], dtype: torch.dtype, tol: float) -> None:
    (out, text), *others = (one[f"{dtype} {tol}"] for one in said)
    assert all(torch.equal(out, other) and text == their_text for other, their_text in others)
    certificate = avow.Certificate.from_json(text)
    q, k, v = inputs(dtype)
    assert out.dtype == dtype and certificate.method == "sparse" and certificate.kind == "deterministic"
    assert certificate.keeps(tol)
    assert bool((errors(out, q, k, v, 0.25) <= certificate.rows).all())
    sizes = Problem.of(q, k, v, enable_gqa=True).sizes
    known = [sparse_bytes(sizes, len(said), reports=reports) for reports in (1, 2)]
    assert all(one[f"sent {dtype} {tol}"] in known for one in said)
    share = float(certificate.reason.removeprefix("read ").partition("%")[0])
    assert 0 < share < 60


def test_processes_answer_as_the_same_shards_in_one(said: list[dict[str, Any]]) -> None:
    q, k, v = inputs(torch.float32)
    p = Problem.of(q, k, v, enable_gqa=True)
    whole = over_shards(p, ENDS[len(said)], Sparse(), 0.03).answer
    out, text = said[0][f"{torch.float32} 0.03"]
    assert torch.equal(out, whole.out) and text == whole.certificate.to_json()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tol", "InputError: tol at rank {last}=0.25 must be as at rank 0, 0.5; give all processes the same"),
        ("method", "InputError: method at rank {last}=Sparse(drop=0.005, bits=8, chance=0.0) must be as at rank 0, Sp"),
        ("queries", "InputError: digest of q at rank {last}="),
        ("nan", "NonFiniteError: rank {last}: k[0, 0, 0, 0]=nan must be finite; mend k first"),
        ("confidence", "InputError: confidence at rank {last}=0.9 must be as at rank 0, 0.99; give all processes the"),
        ("no confidence", "ParameterError: confidence=0.0 must be above 0 and at most 1; try confidence=0.99"),
        ("axes", "ShapeError: shapes of q, k, v=(6, 3, 16), (2, 1000, 16), (2, 1000, 5) must have four axes; add"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("gradient", " at rank {last}=True must be as at rank 0, False; give all processes the same"),
        ("loss", "InputError: norm of the gradient at rank {last}="),
    ],
)
def test_all_processes_are_told_who_is_to_blame(said: list[dict[str, Any]], name: str, words: str) -> None:
    first, *others = (one["mistakes"][name] for one in said)
    assert all(other == first for other in others)
    assert words.format(last=len(said) - 1) in first


def test_processes_that_never_met_are_told_so() -> None:
    q, k, v = inputs(torch.float32)
    with pytest.raises(ParameterError, match=r"call torch\.distributed\.init_process_group first, or use avow\.attend"):
        attend_sparse(q, k, v, enable_gqa=True)


def kept_gradients(p: Problem, ends: Sequence[int], whole: Whole, grad: Tensor) -> list[Tensor]:
    """What autograd says in float64 of the tokens that shards kept, each by its odds."""
    b, h, n, s = *p.q.shape[:3], p.k.shape[-2]
    counted_as = torch.full((b, h, n, s), -math.inf, dtype=torch.float64)
    for start, end, reading in zip([0, *ends[:-1]], ends, whole.readings, strict=True):
        for kept in reading.kept:
            rows = range(n)[kept.rows]
            some = torch.full((b * p.k.shape[1], kept.logs.shape[1], end - start), -math.inf, dtype=torch.float64)
            some[kept.head, :, kept.place] = kept.logs
            counted_as[:, :, kept.rows, start:end] = some.reshape(b, h, len(rows), end - start)
    q, k, v = (x.double().clone().requires_grad_() for x in (p.q, p.k, p.v))
    keys, values = (x.repeat_interleave(h // k.shape[1], 1) for x in (k, v))
    logits = p.scale * (q @ keys.mT)
    odds = (logits.detach() - counted_as).nan_to_num(posinf=math.inf)
    out = torch.softmax(logits - odds, -1) @ values
    return list(torch.autograd.grad((out * grad.double()).sum(), [q, k, v]))


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_gradients_of_processes_are_those_of_what_they_kept(
    said: list[dict[str, Any]], dtype: torch.dtype, confidence: float | None
) -> None:
    (out, text, *_), *others = answers = [one[f"followed {dtype} {confidence}"] for one in said]
    assert all(torch.equal(out, other.out) and text == other.certificate for other in others)
    q, k, v = inputs(dtype)
    p, ends = Problem.of(q, k, v, enable_gqa=True), ENDS[len(said)]
    method = Sparse() if confidence is None else Sparse(chance=1 - confidence)
    own = [own_generator(method, rank, q.device, torch.Generator().manual_seed(11)) for rank in range(len(said))]
    whole = over_shards(p, ends, method, 0.3, own, followed=True)
    assert torch.equal(out, whole.answer.out) and text == whole.answer.certificate.to_json()
    truth = kept_gradients(p, ends, whole, loss(dtype))
    allowed = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 8e-3)
    for one in answers:
        assert torch.equal(one.grads[0], answers[0].grads[0]) and apart(one.grads[0], truth[0]) <= allowed
    for number in (1, 2):
        found = torch.cat([one.grads[number] for one in answers], 2)
        assert found.dtype == dtype and apart(found, truth[number]) <= allowed
    # Unkept tokens have no gradient, and kept ones do.
    assert 0 < int((truth[2] != 0).any(-1).sum()) < k.shape[2] * k.shape[1]


@pytest.mark.parametrize("confidence", [None, 0.9])
def test_what_processes_send_there_and_back_is_what_the_formula_says(
    said: list[dict[str, Any]], confidence: float | None
) -> None:
    for dtype in TYPES:
        q, k, v = inputs(dtype)
        sizes, ranks = Problem.of(q, k, v, enable_gqa=True).sizes, len(said)
        tried = (None,) if confidence is None else range(5)
        known = {sparse_bytes(sizes, ranks, reports=reports, rungs=rungs) for reports in (1, 2) for rungs in tried}
        back = sparse_bytes(sizes, ranks, gradients=True) - sparse_bytes(sizes, ranks)
        for one in said:
            there, returned = one[f"followed {dtype} {confidence}"].sent
            assert there in known and returned == back > 0


@pytest.mark.parametrize("chance", [0.0, 0.1])
@pytest.mark.parametrize("heads", [2, 6])
def test_shards_in_one_process_send_what_the_formula_says(heads: int, chance: float) -> None:
    p = random_heads(1.0, heads, 500)
    for ends in ([500], [500, 500], [1, 200, 300, 300, 500]):
        (load, *others) = over_shards(p, ends, Sparse(chance=chance), 0.3).loads
        tried = range(1, 5) if chance else (None,)
        known = [sparse_rounds_load(p.sizes, len(ends), reports, rungs) for reports in (1, 2) for rungs in tried]
        assert load in known and all(other == load for other in others)


@pytest.mark.parametrize("ends", [(1024,), (500, 1024), (64, 64, 65, 1024)])
@pytest.mark.parametrize("tiles", [[slice(0, 2)], [slice(0, 1), slice(1, 2)]])
def test_gradients_are_those_of_one_process_where_it_keeps_the_same(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], tiles: list[slice]
) -> None:
    monkeypatch.setattr(sparse_script, "row_tiles", lambda *_: tiles)
    # Five tokens outweigh all others by far, and both keep those alone.
    q, k, v = torch.ones(1, 4, 2, 16), 0.01 * torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 5)
    k[:, :, [3, 64, 500, 501, 999]] += torch.tensor([9.0, 9.1, 8.9, 9.2, 9.0])[:, None]
    p, grad = Problem.of(q, k, v, enable_gqa=True), torch.randn(1, 4, 2, 5)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, alone = avow.attend(*given, method="sparse", tol=1e-3, enable_gqa=True)
    whole = over_shards(p, ends, Sparse(), 1e-3, followed=True)
    assert alone.reason == "read 0.5% of the tokens in full"
    assert whole.answer.certificate.reason == "read 0.5% of the tokens of all shards in full"
    scripts = [
        gradient_script(part.q, part.k, part.v, grad, reading, p.scale, len(ends))
        for part, reading in zip(parted(p, ends), whole.readings, strict=True)
    ]
    found, _ = side_by_side(scripts)
    expected = torch.autograd.grad((out * grad).sum(), given)
    parts = found[0].q, torch.cat([one.k for one in found], 2), torch.cat([one.v for one in found], 2)
    assert apart(whole.answer.out, out.detach().double()) <= 1e-7
    assert all(apart(one, other.double()) <= 1e-6 for one, other in zip(parts, expected, strict=True))


@pytest.mark.parametrize("name", [way.name for way in ways(shards.problem(2, True).sizes)])
def test_processes_send_what_the_planner_says_and_answer_as_shards_in_one(
    said: list[dict[str, Any]], name: str
) -> None:
    ranks = len(said)
    (way,) = (way for way in ways(shards.problem(ranks, True).sizes) if way.name == name)
    p = shards.problem(ranks, not way.replicated)
    parts = simulated.dealt(p, ranks, queries=not way.replicated)
    answers, _ = side_by_side([shards.script(way, part, ranks, p.k.shape[-2]) for part in parts])
    for one, answer in zip(said, answers, strict=True):
        out, load = one["ways"][name]
        assert load == tuple(way.load(p.sizes, ranks)) and load[0] > 0
        assert torch.equal(out, answer)


def random_heads(loud: float, heads: int, keys: int = 2048) -> Problem:
    q, k, v = torch.randn(1, heads, 2, 32), torch.randn(1, 2, keys, 32), torch.randn(1, 2, keys, 32)
    return Problem.of(loud * q, k, v, enable_gqa=True)


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("loud", [2.0, 4.0])
def test_shards_read_little_more_than_one_that_had_all_keys(loud: float, heads: int) -> None:
    p = random_heads(loud, heads)
    alone = Sparse(**Sparse.aimed({}, p.sizes, 0.03, 1.0)).compute(p).trace
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
        apart += float(Sparse(**Sparse.aimed({}, own.sizes, 0.03, 1.0)).compute(own).trace.read.sum())
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
    with pytest.raises(NonFiniteError, match="mend k first"):
        over_shards(Problem.of(p.q, p.k * math.inf, p.v, enable_gqa=True), [64, 128], Sparse())


def test_bounds_hold_in_a_slice_of_the_fuzz() -> None:
    found = fuzz_shards.run(2_000, 5)
    assert found.sound and found.tally.rows >= 2_000, found.tally.stories


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_shards_that_own_up_to_too_little_are_caught(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    honest = sparse_budget.left

    def lying(*given: Any) -> Tensor:
        return honest(*given) * share

    monkeypatch.setattr(sparse_script, "left", lying)
    found = fuzz_shards.run(1_200, 5)
    assert not found.sound and found.tally.broken > 0 and found.tally.stories


def flat_heads(rows: int) -> Problem:
    """Heads that look at all keys nearly alike: only samples can save anything."""
    q, k, v = torch.randn(1, 2, rows, 16), torch.randn(1, 1, 2048, 16), torch.randn(1, 1, 2048, 4)
    return Problem.of(0.5 * q, k, v, enable_gqa=True)


def test_samples_of_shards_are_about_those_of_one_that_had_all_keys() -> None:
    p = flat_heads(8)
    alone = Sparse(**Sparse.aimed({}, p.sizes, 0.2, 0.999)).compute(p, torch.Generator().manual_seed(0)).trace
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
    honest = sparse_draws._missed

    def lying(seen: Tensor, variances: Tensor, ends: Tensor, *given: Any) -> Tensor:
        return honest(seen, 1e-3 * variances, 1e-3 * ends, *given)

    monkeypatch.setattr(sparse_draws, "_missed", lying)
    broken, rows = missed(flat_heads(32), Sparse(chance=1 - CONFIDENCE), 3)
    assert Interval.of(broken, rows).low > 1 - CONFIDENCE


def test_shards_draw_unlike_each_other_even_from_generators_that_are_alike() -> None:
    method = Sparse(chance=0.1)
    made = [own_generator(method, rank, torch.device("cpu"), torch.Generator().manual_seed(5)) for rank in (0, 1, 0)]
    first, second, again = (torch.rand(4, generator=one) for one in made)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert own_generator(Sparse(), 0, torch.device("cpu"), None) is None
