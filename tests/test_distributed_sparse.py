"""Processes that each read a part of their tokens give one answer and one certificate, as shards in one process do."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import avow
from avow.bench import shards
from avow.core import Problem, Sizes
from avow.distributed import attend
from avow.distributed.exact import Block, packed, partial_answer
from avow.distributed.parallel_plan import Strategy, strategies
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.protocols import (
    Protocol,
    Shard,
    all_gather,
    combine_message,
    over_processes,
    side_by_side,
    traffic,
)
from avow.distributed.sparse import own_generator, sparse_traffic
from avow.errors import ParameterError
from avow.methods.sparse import Sparse
from tests.fuzz_shards import Whole, over_shards
from tests.helpers.processes import message
from tests.test_sparse_shards import apart, errors

pytestmark = pytest.mark.processes

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEYS = 1000
# Where the keys of each process end.
ENDS = {2: (333, KEYS), 4: (150, 150, 151, KEYS)}


attend_sparse = partial(attend, method="sparse")


def sparse_bytes(sizes: Sizes, ranks: int, reports: int = 1, rungs: int | None = None) -> int:
    """What each process sends, with a page to agree."""
    return (ranks - 1) * PAGE + sparse_traffic(sizes, ranks, reports, rungs).sent


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same in every process: queries of six heads on two near some of the keys, most of which stand in the end."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, *shape, generator=generator) for shape in ((6, 3, 16), (2, KEYS, 16), (2, KEYS, 5)))
    q = q + 4 * k[:, :, [20, 700, 990]].repeat_interleave(3, 1)
    v[:, 1] *= 1e-3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def mistakes(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """What each process is told where the last one asks for something else."""
    q, k, v = inputs(torch.float32)
    odd = rank == dist.get_world_size(group) - 1

    def ask(*given: Tensor, **options: Any) -> str:
        return message(lambda: attend_sparse(*given, group=group, enable_gqa=True, **options))

    return {
        "tol": ask(q, k, v, tol=0.25 if odd else 0.5),
        "method": ask(q, k, v, bits=8 if odd else 4),
        "queries": ask(q + odd, k, v),
        "nan": ask(q, k * (math.nan if odd else 1.0), v),
        "confidence": ask(q, k, v, confidence=0.9 if odd else 0.99),
        "no confidence": ask(q, k, v, confidence=0.0),
        "axes": ask(q, k[0], v[0]),
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


def protocol_of(way: Strategy, shard: Shard) -> Protocol[Tensor]:
    """What a shard does in one way; of partial answers it is their exchange."""
    p = shard.problem
    if way.name == "exact (keys)":
        return all_gather(packed(partial_answer(p.q, Block(p.k, p.v), p.scale)), shard.ranks)
    return shards.protocol(way, shard)


def spread(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """What each way to spread attention answers in this process, and what it sends."""
    ranks = dist.get_world_size(group)
    found = {}
    for way in strategies(shards.problem(ranks, True).sizes):
        shard = Shard.split(shards.problem(ranks, not way.replicated), ranks, way.replicated)[rank]
        with counted() as sent:
            out = over_processes(protocol_of(way, shard), group)
        found[way.name] = out, (sent.sent, sent.messages)
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
        ("method", "InputError: bits at rank {last}=8 must be as at rank 0, 4; give all processes the same"),
        ("queries", "InputError: digest of q at rank {last}="),
        ("nan", "NonFiniteError: rank {last}: k[0, 0, 0, 0]=nan must be finite; remove NaN and inf from k"),
        ("confidence", "InputError: confidence at rank {last}=0.9 must be as at rank 0, 0.99; give all processes the"),
        ("no confidence", "ParameterError: confidence=0.0 must be above 0 and at most 1; try confidence=0.99"),
        ("axes", "ShapeError: k.ndim=3 must equal q.ndim=4; give all three the same axes"),
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
        queries = combine_message(1, 1, q.numel(), 1, ranks=ranks)
        back = (ranks - 1) * 16 + traffic([queries], ranks).sent
        for one in said:
            there, returned = one[f"followed {dtype} {confidence}"].sent
            assert there in known and returned == back > 0


@pytest.mark.parametrize("name", [way.name for way in strategies(shards.problem(2, True).sizes)])
def test_processes_send_what_the_planner_says_and_answer_as_shards_in_one(
    said: list[dict[str, Any]], name: str
) -> None:
    ranks = len(said)
    (way,) = (way for way in strategies(shards.problem(ranks, True).sizes) if way.name == name)
    p = shards.problem(ranks, not way.replicated)
    answers, _ = side_by_side([protocol_of(way, shard) for shard in Shard.split(p, ranks, way.replicated)])
    for one, answer in zip(said, answers, strict=True):
        out, sent = one["ways"][name]
        assert sent == way.traffic(p.sizes, ranks)[:2] and sent[0] > 0
        assert torch.equal(out, answer)
