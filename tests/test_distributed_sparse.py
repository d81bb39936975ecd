"""Shards that each read a part of their tokens give one answer, and one certificate that holds for all of them."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import avow
from avow.bench import shards
from avow.contract import Problem
from avow.distributed import attend_sparse, shares, simulated, sparse_rounds
from avow.distributed.rounds import over_processes, side_by_side
from avow.distributed.traffic import PAGE, counted
from avow.errors import AvowError, NonFiniteError, ParameterError, ToleranceUnreachable
from avow.links import sparse_rounds as sparse_rounds_load
from avow.methods.sparse import Sparse
from avow.scaling import ways
from tests import fuzz_shards
from tests.fuzz_shards import over_shards

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
        "chance": ask(q, k, v, method=Sparse(chance=0.1)),
        "axes": ask(q[0], k[0], v[0]),
        "tolerance": ask(q, k, v, tol=1e-9),
        "gradient": ask(q, k, v.requires_grad_()),
    }


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
    return [torch.load(folder / f"{rank} of {request.param}.pt") for rank in range(request.param)]


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
    # What the rounds send, and a page to each for agreeing.
    ranks, sizes = len(said), Problem.of(q, k, v, enable_gqa=True).sizes
    known = [sparse_rounds_load(sizes, ranks, reports).sent + (ranks - 1) * PAGE for reports in (1, 2)]
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
        ("chance", "ParameterError: method: chance=0.1 has no proof over shards; use chance=0"),
        ("axes", "ShapeError: shapes of q, k, v=(6, 3, 16), (2, 1000, 16), (2, 1000, 5) must have four axes; add"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("gradient", "NotDifferentiable: requires_grad=True has no gradient over processes; use torch.no_grad()"),
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


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_keep_their_bounds(name: str) -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 330, 8), torch.randn(2, 2, 330, 6)
    q, k, v = HOSTILE[name](q.abs(), k, v)
    p = Problem.of(q, k, v, enable_gqa=True)
    out, certificate = over_shards(p, [200, 200, 201, 330], Sparse()).answer
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
    assert found.sound and found.rows >= 2_000, found.stories


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_shards_that_own_up_to_too_little_are_caught(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    honest = shares.left

    def lying(*given: Any) -> Tensor:
        return honest(*given) * share

    monkeypatch.setattr(sparse_rounds, "left", lying)
    found = fuzz_shards.run(1_200, 5)
    assert not found.sound and found.broken > 0 and found.stories
