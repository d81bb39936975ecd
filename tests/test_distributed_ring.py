"""Queries, keys and values in pieces, blocks of keys going round: answers and gradients are those of one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import avow
from avow.core import Sizes
from avow.distributed import attend
from avow.distributed.exact import Block, block_answer, block_gradients, merged_answers
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.protocols import Post, Shard, side_by_side
from avow.distributed.ring import Route, gradient_protocol, ring_attention, ring_protocol, travel
from avow.numerics import rounding
from tests.helpers.processes import message, together
from tests.helpers.shards import HEADS, Case, apart, piece

pytestmark = pytest.mark.processes

ring_attend = partial(attend, method="exact", shared_queries=False)

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# What mistakes are made with.
PLAIN = Case((16, 16), (16, 16), torch.float32)


def cases(count: int) -> dict[str, Case]:
    """What processes are asked, so many of them."""
    even, odd = (16,) * count, tuple(3 + 11 * (rank % 3) + rank for rank in range(count))
    other = tuple(reversed(odd))
    hole = (0, *odd[1:])
    found: dict[str, Case] = {}
    for causal in (False, True):
        word = "causal" if causal else "whole"
        found |= {
            f"even {word}": Case(even, even, causal=causal),
            f"uneven {word}": Case(odd, odd, causal=causal, scale=-0.7),
            f"crossed {word}": Case(odd, other, causal=causal, groups=4),
            f"float32 {word}": Case(odd, odd, torch.float32, causal, groups=1),
            f"bfloat16 {word}": Case(odd, odd, torch.bfloat16, causal),
            f"tight {word}": Case(odd, odd, torch.float32, causal, tol=4e-7),
            f"masked {word}": Case(odd, other, causal=causal, masked=True),
            f"a process with nothing {word}": Case(hole, hole, causal=causal),
            f"a process without keys {word}": Case(odd, tuple(reversed(hole)), causal=causal),
        }
    found["more keys than rows, causal"] = Case((1,) * count, even, causal=True)
    found["more rows than keys, causal"] = Case(even, (1,) * count, causal=True)
    return found


def backward(out: Tensor, case: Case, pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """The answer and the gradients of this process's pieces, each of which sees its own part of the loss."""
    weight = piece(case.inputs()[3], case.rows, dist.get_rank())
    grads = torch.autograd.grad((out * weight).sum(), pieces)
    return out.detach(), *grads


class Layer(nn.Module):
    """Attention of two heads, whose weights every process holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mix = nn.Linear(8, 24, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (b, 2, n, 4) each
        if dist.is_initialized():
            return ring_attention(q, k, v, causal=True)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def tokens() -> Tensor:
    return torch.randn(2, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def trained() -> dict[str, Tensor]:
    """The gradient of weights that processes hold each, or in shares, with a part of the sequence in each process."""
    x = tokens().chunk(dist.get_world_size(), 1)[dist.get_rank()]
    whole = DistributedDataParallel(Layer())
    whole(x).square().sum().backward()
    shared = Layer()
    fully_shard(shared, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shared(x).square().sum().backward()
    grad = shared.mix.weight.grad
    assert isinstance(grad, DTensor) and whole.module.mix.weight.grad is not None
    return {"DDP": whole.module.mix.weight.grad, "FSDP2": grad.full_tensor()}


def mistakes() -> dict[str, str]:
    """What each process is told where the last one asks for something else."""
    wrong = dist.get_rank() == dist.get_world_size() - 1
    q, k, v = (x[..., :8, :] for x in PLAIN.inputs()[:3])
    k_bad = k.masked_fill(torch.arange(8)[:, None] == 3, math.inf)

    def huge() -> list[Tensor]:
        return [q.double(), k.double(), v.double() * (1e290 if wrong else 1.0)]

    ask: dict[str, Callable[[], object]] = {
        "causal": lambda: ring_attention(q, k, v, causal=wrong, enable_gqa=True),
        "scale": lambda: ring_attention(q, k, v, scale=2.0 if wrong else 1, enable_gqa=True),
        "first": lambda: ring_attention(q, k, v, scale=2.0 if dist.get_rank() == 0 else 1.0, enable_gqa=True),
        "method": lambda: (ring_attend if wrong else ring_attention)(q, k, v, enable_gqa=True),
        "type": lambda: ring_attention(*(x.double() if wrong else x for x in (q, k, v)), enable_gqa=True),
        "own type": lambda: ring_attention(q, k.double() if wrong else k, v, enable_gqa=True),
        "heads": lambda: ring_attention(q, *(x[:, :1] if wrong else x for x in (k, v)), enable_gqa=True),
        "gradients": lambda: ring_attention(q.clone().requires_grad_(wrong), k, v, enable_gqa=True),
        "lengths": lambda: ring_attention(q, k, v[:, :, 1:] if wrong else v, enable_gqa=True),
        "all alike": lambda: ring_attention(q, k, v[:, :, 1:], enable_gqa=True),
        "tol": lambda: ring_attend(q, k, v, tol=0.1 + wrong, enable_gqa=True),
        "nan": lambda: ring_attend(q, k_bad if wrong else k, v, enable_gqa=True),
        "tolerance": lambda: ring_attend(q, k, v, tol=1e-9, enable_gqa=True),
        "range": lambda: ring_attend(q * 1e20, k * 1e20, v, scale=1e270, enable_gqa=True),
        "sums": lambda: ring_attend(*huge(), causal=True, enable_gqa=True),
        "mask": lambda: ring_attend(q, k, v, mask=torch.ones(8, 8 + wrong) > 0, enable_gqa=True),
        "long": lambda: ring_attention(q, k, v, scale="very " * 1000 if wrong else None, enable_gqa=True),  # type: ignore[arg-type]
    }
    return {name: message(call) for name, call in ask.items()}


def ask() -> dict[str, Any]:
    """What this process gets in every case."""
    rank, count = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, case in cases(count).items():
        q, k, v, _ = case.inputs()
        held = ((q, case.rows), (k, case.keys), (v, case.keys))
        pieces = [piece(x, sizes, rank).requires_grad_() for x, sizes in held]
        with counted() as there:
            out = ring_attention(*pieces, **case.options)  # type: ignore[arg-type]
        with counted() as back:
            found[name] = backward(out, case, pieces)
        mask = None if (mask := case.mask()) is None else piece(mask, case.rows, rank)
        with counted() as proved:
            out, certificate = ring_attend(*pieces, tol=case.tol, mask=mask, **case.options)  # type: ignore[arg-type]
        found[f"{name}, promised"] = backward(out, case, pieces), certificate
        found[f"{name}, sent"] = there.sent, there.sent + back.sent, proved.sent
    with torch.autocast("cpu", torch.bfloat16):
        case = cases(count)["float32 causal"]
        found["autocast"] = ring_attention(*(piece(x, case.rows, rank) for x in case.inputs()[:3]), **case.options)  # type: ignore[arg-type]
    q, k, v, _ = cases(count)["even whole"].inputs()
    mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("data", "sequence"))
    half = mesh["sequence"].get_local_rank()
    found["mesh"] = ring_attention(*(x.chunk(2, -2)[half] for x in (q, k, v)), group=mesh["sequence"], enable_gqa=True)
    axis = mesh["sequence"]
    found["a wrong one on an axis"] = message(
        lambda: ring_attention(q, k, v, causal=rank == 3, group=axis, enable_gqa=True)
    )
    found["axes"] = message(lambda: ring_attention(q, k, v, group=mesh))
    found |= trained()
    found["mistakes"] = mistakes()
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {count: together(count, ask, tmp_path_factory.mktemp("ring")) for count in (2, 4)}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [name for name, case in cases(2).items() if not case.masked])
def test_answers_and_gradients_of_a_ring_are_those_of_one_process(
    said: dict[int, list[Any]], count: int, name: str
) -> None:
    case = cases(count)[name]
    for number, truth in enumerate(case.whole()):
        whole = torch.cat([one[name][number] for one in said[count]], -2)
        assert whole.dtype == case.dtype and whole.shape == truth.shape
        assert apart(whole, truth) <= ROUNDING[case.dtype]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(cases(2)))
def test_certificates_of_a_ring_hold_and_are_no_wider_than_those_of_one_process(
    said: dict[int, list[Any]], count: int, name: str
) -> None:
    case = cases(count)[name]
    parts = [one[f"{name}, promised"] for one in said[count]]
    for number, truth in enumerate(case.whole()):
        whole = torch.cat([answers[number] for answers, _ in parts], -2)
        assert whole.dtype == case.dtype and apart(whole, truth) <= ROUNDING[case.dtype]
    out = torch.cat([answers[0] for answers, _ in parts], -2)
    rows = torch.cat([certificate.rows for _, certificate in parts], -1)
    assert bool((case.errors(out) <= rows + 1e-15).all())
    q, k, v, _ = case.inputs()
    given = {"tol": case.tol, "mask": case.mask(), **case.options}
    promised = avow.attend(q, k, v, method="exact", **given).certificate  # type: ignore[arg-type]
    # Each merge takes logarithms of normalisers, which float64 knows to a thousand units.
    assert float(rows.max()) <= 1.1 * promised.bound + count * 1e-12
    for _, certificate in parts:
        assert case.tol is None or certificate.keeps(case.tol)
        assert certificate.method in ("exact", "nothing") and certificate.kind == "deterministic"


def test_a_tight_tolerance_was_out_of_float32s_reach() -> None:
    q, k, v, _ = cases(2)["tight causal"].inputs()
    assert not avow.attend(q, k, v, method="exact", causal=True, enable_gqa=True).certificate.keeps(4e-7)


def ring_bytes(
    sizes: Sizes, tokens: Sequence[int], rank: int, *, promised: bool = False, gradients: bool = False
) -> int:
    """What a process sends in a ring if ranks hold so many tokens each, rows and keys alike, none of them none.

    With n tokens and w bytes of key and value a token, a process sends each block but the one that ends its journey
    there; if rows only see what is before them, block c stops at the last process, and process r sends those up to
    its own. Gradients, wider, follow each block, and go home from the last process that adds to them. A page agrees on
    the call, and three numbers tell who failed and what is proved.
    """
    z, ranks = sizes, len(tokens)
    token = z.batch * z.key_heads * (z.dim + z.value_dim)
    through = sum(tokens[: rank + 1]) if z.causal else sum(tokens) - tokens[(rank + 1) % ranks]
    last = rank == ranks - 1
    if z.causal and last:
        through = 0
    sent = (ranks - 1) * (PAGE + (24 if promised else 0)) + through * token * z.item
    if gradients and ranks > 1:
        home = (sum(tokens[:-1]) if last else through) if z.causal else sum(tokens)
        sent += through * token * z.item + home * token * rounding.accumulator(z.dtype).itemsize
    return sent


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [name for name in cases(2) if name.split()[0] in ("even", "uneven", "bfloat16")])
def test_what_a_ring_sends_is_what_the_formula_says(said: dict[int, list[Any]], count: int, name: str) -> None:
    case = cases(count)[name]
    sizes = Sizes(2, HEADS, case.groups, 0, 0, 8, 5, case.dtype, causal=case.causal)
    for rank, one in enumerate(said[count]):
        there, both, proved = one[f"{name}, sent"]
        assert there == ring_bytes(sizes, case.rows, rank)
        assert both == ring_bytes(sizes, case.rows, rank, gradients=True)
        assert proved == ring_bytes(sizes, case.rows, rank, promised=True)


def test_looking_only_back_sends_less(said: dict[int, list[Any]]) -> None:
    back, whole = (sum(one[f"even {word}, sent"][0] for one in said[4]) for word in ("causal", "whole"))
    assert back < 0.7 * whole


def test_autocast_does_not_narrow_the_products(said: dict[int, list[Any]]) -> None:
    whole = torch.cat([one["autocast"] for one in said[4]], -2)
    assert apart(whole, cases(4)["float32 causal"].whole().out) <= ROUNDING[torch.float32]


def test_a_ring_runs_along_one_axis_of_a_mesh(said: dict[int, list[Any]]) -> None:
    truth = cases(4)["even whole"].whole().out
    for first in (0, 2):
        whole = torch.cat([one["mesh"] for one in said[4][first : first + 2]], -2)
        assert apart(whole, truth) <= ROUNDING[torch.float64]
    assert all('must have one axis; pass the axis of the sequence: mesh["sequence"]' in one["axes"] for one in said[4])


def test_a_rank_on_an_axis_of_a_mesh_is_named_as_among_all(said: dict[int, list[Any]]) -> None:
    told = [one["a wrong one on an axis"] for one in said[4]]
    assert told[:2] == ["no error"] * 2
    assert told[2] == told[3] and told[3].startswith("InputError: causal at rank 3=True must be as at rank 2, False;")


def test_the_one_that_differs_from_most_is_to_blame_be_it_the_first(said: dict[int, list[Any]]) -> None:
    words = "InputError: scale at rank 0=2.0 must be as at rank 1, 1.0; give all processes the same"
    assert {one["mistakes"]["first"] for one in said[4]} == {words}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("around", ["DDP", "FSDP2"])
def test_gradients_of_weights_around_a_ring_are_those_of_one_process(
    said: dict[int, list[Any]], count: int, around: str
) -> None:
    alone = Layer()
    alone(tokens()).square().sum().backward()
    assert alone.mix.weight.grad is not None
    for one in said[count]:
        # Both average over processes.
        assert apart(count * one[around], alone.mix.weight.grad) <= ROUNDING[torch.float64]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("causal", "InputError: causal at rank {last}=True must be as at rank 0, False; give all processes the same"),
        ("scale", "InputError: scale at rank {last}=2.0 must be as at rank 0, 1; give all processes the same"),
        ("method", "InputError: method at rank {last}=exact must be as at rank 0, exact, unpromised; give all"),
        ("type", "InputError: type of q at rank {last}=torch.float64 must be as at rank 0, torch.float32; give all"),
        ("own type", "InputError: type of k at rank {last}=torch.float64 must be as at rank 0, torch.float32; give"),
        ("heads", "InputError: shape of k without its length at rank {last}=(2, 1, 8) must be as at rank 0, (2, 2, 8)"),
        ("gradients", "InputError: gradient of q at rank {last}=True must be as at rank 0, False; give all processes"),
        ("lengths", "ShapeError: rank {last}: v.shape[-2]=7 must equal k.shape[-2]=8; each key needs one value"),
        ("all alike", "ShapeError: v.shape[-2]=7 must equal k.shape[-2]=8; each key needs one value"),
        ("tol", "InputError: tol at rank {last}=1.1 must be as at rank 0, 0.1; give all processes the same"),
        ("nan", "NonFiniteError: rank {last}: k[0, 0, 3, 0]=inf must be finite; remove NaN and inf from k"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("range", "RangeError: largest norm of scale*|q|*|k|="),
        (
            "sums",
            "ToleranceUnreachable: rank {last}: tol=inf is below inf, the best bound that can be proved in float64",
        ),
        ("mask", "ShapeError: rank 0: mask.shape[-1]=8 must be {keys}; say of the keys of all processes, in order of "),
        ("long", "InputError: scale at rank {last}=very very"),
    ],
)
def test_all_processes_are_told_who_is_to_blame(said: dict[int, list[Any]], count: int, name: str, words: str) -> None:
    told = {one["mistakes"][name] for one in said[count]}
    assert len(told) == 1
    assert words.format(last=count - 1, keys=8 * count) in told.pop()


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_gets_to_all_who_need_it_and_to_none_beyond(causal: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    for _ in range(200):
        count = int(torch.randint(1, 7, (), generator=draw))
        rows, keys = (tuple(torch.randint(0, 9, (count,), generator=draw).tolist()) for _ in range(2))
        routes = [Route(rank, rows, keys, causal) for rank in range(count)]
        seen = Case(rows, keys, causal=causal).seen()
        at = dict(enumerate(range(count)))  # where each block is
        served: set[tuple[int, int]] = set()
        for tick in range(routes[0].ticks):
            served |= {
                (rank, block)
                for rank, route in enumerate(routes)
                if (block := route.at(tick)) is not None and at[block] == rank
            }
            moves = [list(route.moves(tick)) for route in routes]
            for block, source, target in {move for some in moves for move in some}:
                # Both ends know of it, and nobody else.
                assert at[block] == source
                assert [rank for rank, some in enumerate(moves) if (block, source, target) in some] == sorted(
                    {source, target}
                )
                at[block] = target
        parts = [[bool(b.any()) for b in a.split(list(keys), 1)] for a in seen.split(list(rows), 0)]
        needed = {(rank, block) for rank in range(count) for block in range(count) if parts[rank][block]}
        assert served == needed
        assert all((at[block], block) in needed or at[block] == block for block in range(count))


@pytest.mark.parametrize(("n", "s", "shift"), [(600, 40, None), (520, 300, 0), (600, 90, -300), (300, 330, 40)])
def test_a_tall_block_is_worked_on_in_tiles(n: int, s: int, shift: int | None) -> None:
    draw = torch.Generator().manual_seed(5)
    q, k, v, above = (
        torch.randn(1, h, m, 3, generator=draw, dtype=torch.float64) for h, m in ((4, n), (2, s), (2, s), (4, n))
    )
    seen = torch.ones(n, s, dtype=torch.bool)
    seen = seen if shift is None else seen.tril(shift)
    for x in (q, k, v):
        x.requires_grad_()
    logits = (0.4 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~seen, -1e4)
    truth = (torch.softmax(logits, -1) * seen) @ v.repeat_interleave(2, 1)
    grads = torch.autograd.grad((truth * above).sum(), (q, k, v))
    with torch.no_grad():
        out, lse = block_answer(q, Block(k, v, shift), 0.4)
        found = block_gradients(q, Block(k, v, shift), lse, above, (above * out).sum(-1), 0.4)
    assert apart(out, truth.detach()) <= ROUNDING[torch.float64]
    assert torch.equal(lse > -math.inf, seen.any(-1).expand_as(lse))
    assert all(apart(mine, theirs) <= ROUNDING[torch.float64] for mine, theirs in zip(found, grads, strict=True))


def test_blocks_are_under_way_while_a_process_computes() -> None:
    events: list[str] = []
    k = torch.ones(1, 1, 2, 3)
    shard = Shard(avow.core.Problem.of(k, k, k), 1, (2, 2, 2), (2, 2, 2))
    names = torch.arange(3).unbind()  # in place of masks, which come with their blocks
    for sent in travel(shard, lambda block: events.append(f"block {block.mask}"), names):
        events.append(f"{len(sent.transfers)} under way" if isinstance(sent, Post) else "there")
    assert events == [
        *("2 under way", "block 1", "there"),
        *("2 under way", "block 0", "there"),
        *("0 under way", "block 2", "there"),
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_in_one_process_answers_and_differentiates_as_one_shard_does(causal: bool) -> None:
    case = Case((20,), (20,), torch.float64, causal)
    q, k, v, weight = case.inputs()
    p = avow.core.Problem.of(q, k, v, causal=causal, enable_gqa=True)
    shards = Shard.split(p, 5, shared_queries=False)
    answers, sent = side_by_side([ring_protocol(shard) for shard in shards])
    truth = case.whole()
    assert apart(torch.cat([out for out, _ in answers], 2), truth.out) <= ROUNDING[torch.float64]
    assert sum(one.sent for one in sent) > 0
    above = weight.split(4, -2)
    protocols = [
        gradient_protocol(shard, out, lse, grad) for shard, (out, lse), grad in zip(shards, answers, above, strict=True)
    ]
    gradients, _ = side_by_side(protocols)
    for number, whole in enumerate((truth.q, truth.k, truth.v)):
        assert apart(torch.cat([one[number] for one in gradients], 2), whole) <= ROUNDING[torch.float64]


def test_one_process_may_be_a_group(tmp_path: Path) -> None:
    case = Case((9,), (9,), torch.float32, causal=True)
    q, k, v, _ = case.inputs()
    q.requires_grad_()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with counted() as traffic:
            answers = [ring_attention(q, k, v, **case.options), ring_attend(q, k, v, **case.options).out]  # type: ignore[arg-type]
            answers.append(attend(q, k, v, **case.options).out)  # type: ignore[arg-type]
            grads = [torch.autograd.grad(out.square().sum(), q)[0] for out in answers]
    finally:
        dist.destroy_process_group()
    assert traffic.sent == 0
    assert all(apart(out, case.whole().out) <= ROUNDING[torch.float32] for out in answers)
    assert all(apart(grad, grads[0].double()) <= ROUNDING[torch.float32] for grad in grads)


def test_a_block_that_is_merged_twice_shows() -> None:
    case = Case((9,), (9,))
    q, k, v, _ = case.inputs()
    out, lse = block_answer(q, Block(k, v), 8**-0.5)
    truth = case.whole().out
    assert apart(out, truth) <= ROUNDING[torch.float64]
    half = block_answer(q, Block(k[..., :4, :], v[..., :4, :]), 8**-0.5)
    assert apart(merged_answers(out, lse, *half)[0], truth) > 1e-3
