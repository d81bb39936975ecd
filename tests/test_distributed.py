"""Processes with their own keys give one answer, one certificate, and one error that names who is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import avow
from avow.core import Sizes
from avow.distributed import attend
from avow.distributed.exact import keys_traffic
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.protocols import combine_message, traffic
from avow.errors import ParameterError
from avow.methods.exact import Exact
from avow.numerics import rounding
from tests.helpers.processes import message, together
from tests.helpers.shards import HEADS, Case, apart, piece

# How 96 keys are shared.
SPLITS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"uneven": (37, 59), "one key": (95, 1), "nothing": (96, 0), "everything": (0, 96)},
    4: {"uneven": (7, 30, 1, 58), "one key": (1, 1, 1, 93), "nothing": (48, 0, 48, 0), "everything": (0, 0, 96, 0)},
}
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
TIGHT = Case((33,), (37, 59), torch.float32, scale=-0.3)


def cases(count: int) -> dict[str, Case]:
    """What so many processes are asked: 33 rows, which all of them know, and keys in pieces."""
    found = {}
    for name, keys in SPLITS[count].items():
        for causal in (False, True):
            for dtype in TYPES:
                found[f"{name}, {dtype}, {'causal' if causal else 'whole'}"] = Case((33,), keys, dtype, causal)
            if name in ("uneven", "nothing"):
                masked = Case((33,), keys, torch.float32, causal, masked=True)
                found[f"{name}, masked, {'causal' if causal else 'whole'}"] = masked
    return found


def gradient_of_a_part(q: Tensor, k: Tensor, v: Tensor, share: float) -> None:
    """What comes of losses that differ from process to process."""
    out, _ = attend(q.clone().requires_grad_(), k, v, enable_gqa=True)
    (out.sum() * share).backward()


def mistakes(rank: int) -> dict[str, str]:
    """What each process is told where the second one asks for something else."""
    q, k, v, _ = Case((33,), (96,), torch.float32).inputs()
    ask: dict[str, Callable[[], object]] = {
        "tol": lambda: attend(q, k, v, tol=0.1 + rank, enable_gqa=True),
        "method": lambda: attend(q, k, v, method="sparse" if rank else "exact", enable_gqa=True),
        "no method": lambda: attend(q, k, v, method="sprase" if rank else "sparse", enable_gqa=True),
        "parameter": lambda: attend(q, k, v, method="sparse", bits=8 if rank else 4, enable_gqa=True),
        "no tol": lambda: attend(q, k, v, tol=-0.1 if rank else None, enable_gqa=True),
        "type": lambda: attend(q, k.double() if rank else k, v, enable_gqa=True),
        "heads": lambda: attend(q, k[:, :1] if rank else k, v[:, :1] if rank else v, enable_gqa=True),
        "queries": lambda: attend(q + rank, k, v, enable_gqa=True),
        "nan": lambda: attend(q, k * (math.nan if rank else 1.0), v, enable_gqa=True),
        "gradient": lambda: attend(q, k.clone().requires_grad_() if rank else k, v, enable_gqa=True),
        "loss": lambda: gradient_of_a_part(q, k, v, 1.0 + rank),
        "axes": lambda: attend(q, k[0], v[0], enable_gqa=True),
        "no tensor": lambda: attend(q, k, None if rank else v, enable_gqa=True),  # type: ignore[arg-type]
        "float mask": lambda: attend(q, k, v, mask=torch.zeros(96), enable_gqa=True),
        "wide mask": lambda: attend(q, k, v, mask=torch.ones(99 if rank else 96) > 0, enable_gqa=True),
        "one mask": lambda: attend(q, k, v, mask=torch.ones(96) > 0 if rank else None, enable_gqa=True),
        "masked sparse": lambda: attend(q, k, v, mask=torch.ones(96) > 0, method="sparse", enable_gqa=True),
        "tolerance": lambda: attend(q, k, v, tol=1e-9, enable_gqa=True),
        "object": lambda: attend(q, k, v, method=Exact(), precision="float64", enable_gqa=True),
    }
    return {name: message(call) for name, call in ask.items()}


def ask() -> dict[str, Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, case in cases(count).items():
        q, k, v, weight = case.inputs()
        pieces = [q.clone().requires_grad_(), *(piece(x, case.keys, rank).requires_grad_() for x in (k, v))]
        with counted() as there:
            mask = None if (mask := case.mask()) is None else piece(mask.mT, case.keys, rank).mT
            out, certificate = attend(*pieces, mask=mask, **case.options)  # type: ignore[arg-type]
        with counted() as back:
            grads = torch.autograd.grad((out * weight).sum(), pieces)
        found[name] = (out.detach(), *grads), certificate, there.sent, back.sent
    if count == 2:
        q, k, v, _ = TIGHT.inputs()
        held = (piece(x, TIGHT.keys, rank) for x in (k, v))
        found["tight"] = attend(q, *held, tol=5e-7, **TIGHT.options)  # type: ignore[arg-type]
        k, v = (piece(x, TIGHT.keys, rank) for x in (k, v))
        # 1 and 1.0 are the same wish.
        found["axes"] = {
            axes: attend(*given, tol=1e-4, method="exact", scale=1.0 if rank else 1, enable_gqa=True)
            for axes, given in {
                3: (q[0], k[0], v[0]),
                4: (q[:1], k[:1], v[:1]),
                5: (q[:1, None], k[:1, None], v[:1, None]),
            }.items()
        }
        found["object"] = attend(q, k, v, method=Exact("float64"), enable_gqa=True)
        found["name"] = attend(q, k, v, method="exact", precision="float64", enable_gqa=True)
        found["mistakes"] = mistakes(rank)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {count: together(count, ask, tmp_path_factory.mktemp("keys")) for count in (2, 4)}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(cases(2)))
def test_processes_answer_as_one(said: dict[int, list[Any]], count: int, name: str) -> None:
    case = cases(count)[name]
    (out, *_), certificate, *_ = said[count][0][name]
    for (other, *_), same, *_ in (one[name] for one in said[count]):
        assert torch.equal(out, other) and certificate.to_json() == same.to_json()
    assert out.dtype == case.dtype and certificate.method == "exact"
    assert bool((case.errors(out) <= certificate.rows + 1e-14).all())
    q, k, v, _ = case.inputs()
    promised = avow.attend(q, k, v, method="exact", mask=case.mask(), **case.options).certificate  # type: ignore[arg-type]
    assert certificate.bound <= 1.1 * promised.bound + count * 1e-12


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(cases(2)))
def test_gradients_of_processes_are_those_of_one(said: dict[int, list[Any]], count: int, name: str) -> None:
    case = cases(count)[name]
    answers = [one[name][0] for one in said[count]]
    truth = case.whole()
    for _, queries, _, _ in answers:
        assert queries.dtype == case.dtype and apart(queries, truth.q) <= ROUNDING[case.dtype]
    for number, whole in ((2, truth.k), (3, truth.v)):
        found = torch.cat([one[number] for one in answers], -2)
        assert found.dtype == case.dtype and apart(found, whole) <= ROUNDING[case.dtype]


@pytest.mark.parametrize("count", [2, 4])
def test_what_processes_send_is_what_the_formula_says(said: dict[int, list[Any]], count: int) -> None:
    for name, case in cases(count).items():
        sizes = Sizes(2, HEADS, case.groups, 33, 96, 8, 5, case.dtype, causal=case.causal)
        # A page agrees on the call; a number each tells of the loss, behind one that says whether a process failed.
        there = (count - 1) * PAGE + keys_traffic(sizes, count).sent
        kind, numbers = rounding.accumulator(case.dtype), 2 * HEADS * 33 * 8
        queries = combine_message(1, 1, numbers, 1, dtype=kind, ranks=count)
        back = (count - 1) * 16 + traffic([queries], count).sent
        assert all(one[name][2:] == (there, back) for one in said[count])


def test_a_tolerance_that_float32_cannot_prove_is_kept_by_float64(said: dict[int, list[Any]]) -> None:
    out, certificate = said[2][0]["tight"]
    assert certificate.keeps(5e-7) and out.dtype == torch.float32
    assert bool((TIGHT.errors(out) <= certificate.rows).all())
    q, k, v, _ = TIGHT.inputs()
    assert not avow.attend(q, k, v, method="exact", **TIGHT.options).certificate.keeps(5e-7)  # type: ignore[arg-type]


def test_a_method_may_be_an_object(said: dict[int, list[Any]]) -> None:
    for one in said[2]:
        (out, certificate), (same, other) = one["object"], one["name"]
        assert torch.equal(out, same) and certificate.to_json() == other.to_json()


def test_tensors_may_have_any_number_of_axes(said: dict[int, list[Any]]) -> None:
    for one in said[2]:
        out, certificate = one["axes"][4]
        assert out.shape == (1, 4, 33, 5) and certificate.rows.shape == (1, 4, 33)
        for axes, lead in ((3, (4,)), (5, (1, 1, 4))):
            other, same = one["axes"][axes]
            assert torch.equal(other, out.reshape(*lead, 33, 5))
            assert torch.equal(same.rows, certificate.rows.reshape(*lead, 33))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tol", "InputError: tol at rank 1=1.1 must be as at rank 0, 0.1; give all processes the same"),
        ("method", "InputError: method at rank 1=sparse must be as at rank 0, exact; give all processes the same"),
        ("no method", "InputError: method at rank 1=sprase must be as at rank 0, sparse; give all processes the same"),
        ("parameter", "InputError: bits at rank 1=8 must be as at rank 0, 4; give all processes the same"),
        ("no tol", "InputError: tol at rank 1=-0.1 must be as at rank 0, None; give all processes the same"),
        ("type", "InputError: type of k at rank 1=torch.float64 must be as at rank 0, torch.float32; give"),
        ("heads", "InputError: shape of k without its length at rank 1=(2, 1, 8) must be as at rank 0, (2, 2, 8)"),
        ("queries", "InputError: digest of q at rank 1="),
        ("nan", "NonFiniteError: rank 1: k[0, 0, 0, 0]=nan must be finite; remove NaN and inf from k"),
        ("gradient", "InputError: gradient of k at rank 1=True must be as at rank 0, False; give all processes"),
        ("loss", "compute the same loss in all processes, from the whole answer"),
        ("axes", "ShapeError: k.ndim=3 must equal q.ndim=4; give all three the same axes"),
        (
            "no tensor",
            "InputError: storage of v at rank 1=NoneType must be as at rank 0, dense on cpu; give all processes",
        ),
        ("float mask", "DtypeError: mask.dtype=torch.float32 must be bool over shards; use mask >= 0 for 0 and -inf"),
        ("wide mask", "ShapeError: rank 1: mask.shape=(99,) must broadcast to (2, 4, 33, 96); use (length, keys)"),
        ("one mask", "InputError: mask at rank 1=some must be as at rank 0, none; give all processes the same"),
        ("masked sparse", 'ParameterError: sparse: mask=some has no form over shards; use method="exact"'),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("object", "ParameterError: precision='float64' is given with a method object"),
    ],
)
def test_both_processes_are_told_who_is_to_blame(said: dict[int, list[Any]], name: str, words: str) -> None:
    first, second = (one["mistakes"][name] for one in said[2])
    assert first == second
    assert words in first


def test_a_key_that_two_processes_hold_shows() -> None:
    case = Case((5,), (9,))
    q, k, v, _ = case.inputs()
    twice = avow.attend(q, *(torch.cat([x, x[..., :1, :]], -2) for x in (k, v)), enable_gqa=True)
    assert bool((case.errors(twice.out) > twice.certificate.rows).any())


def test_processes_that_never_met_are_told_so() -> None:
    q, k, v, _ = Case((3,), (3,)).inputs()
    with pytest.raises(ParameterError, match=r"call torch\.distributed\.init_process_group first, or use avow\.attend"):
        attend(q, k, v, enable_gqa=True)
