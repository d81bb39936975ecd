"""Two processes, each with its own keys, give one answer, one certificate, and one error that names who is to blame."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import avow
from avow.distributed import attend
from avow.errors import AvowError, ParameterError

# What the second process holds of 96 keys.
SPLITS = {"uneven": slice(37, 96), "one key": slice(95, 96), "nothing": slice(96, 96), "everything": slice(0, 96)}
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same in every process: four query heads on two key heads, one of them with values of another size."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 33, 8), 2 * torch.randn(2, 2, 96, 8), torch.randn(2, 2, 96, 5)
    v[:, 1] *= 1e-3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def shard(x: Tensor, second: slice, rank: int) -> Tensor:
    return x[:, :, second] if rank else x[:, :, : second.start]


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except AvowError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def mistakes(rank: int) -> dict[str, str]:
    """What each process is told where the second one asks for something else."""
    q, k, v = inputs(torch.float32)
    ask: dict[str, Callable[[], object]] = {
        "tol": lambda: attend(q, k, v, tol=0.1 + rank, enable_gqa=True),
        "type": lambda: attend(q, k.double() if rank else k, v, enable_gqa=True),
        "heads": lambda: attend(q, k[:, :1] if rank else k, v[:, :1] if rank else v, enable_gqa=True),
        "queries": lambda: attend(q + rank, k, v, enable_gqa=True),
        "nan": lambda: attend(q, k * (math.nan if rank else 1.0), v, enable_gqa=True),
        "gradient": lambda: attend(q, k.clone().requires_grad_() if rank else k, v, enable_gqa=True),
        "axes": lambda: attend(q[0], k[0], v[0], enable_gqa=True),
        "tolerance": lambda: attend(q, k, v, tol=1e-9, enable_gqa=True),
    }
    return {name: message(call) for name, call in ask.items()}


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    found: dict[str, Any] = {}
    for dtype in TYPES:
        q, k, v = inputs(dtype)
        for name, second in SPLITS.items():
            out, certificate = attend(q, shard(k, second, rank), shard(v, second, rank), enable_gqa=True)
            found[f"{name} {dtype}"] = out, certificate.to_json()
    q, k, v = inputs(torch.float32)
    second = SPLITS["uneven"]
    out, certificate = attend(q, shard(k, second, rank), shard(v, second, rank), tol=5e-7, scale=-0.3, enable_gqa=True)
    found["tight"] = out, certificate.to_json()
    found["mistakes"] = mistakes(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    fresh = multiprocessing.get_context("spawn")
    pair = [fresh.Process(target=process, args=(rank, str(folder))) for rank in range(2)]
    for one in pair:
        one.start()
    for one in pair:
        one.join()
    assert [one.exitcode for one in pair] == [0, 0]
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))
    truth = torch.softmax(scale * (q.double() @ keys.mT), -1) @ values
    return (out.double() - truth).norm(dim=-1) / values.norm(dim=-1).amax(-1, keepdim=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SPLITS)
def test_two_processes_answer_as_one(said: list[dict[str, Any]], name: str, dtype: torch.dtype) -> None:
    (out, text), (other, other_text) = (one[f"{name} {dtype}"] for one in said)
    assert torch.equal(out, other) and text == other_text
    q, k, v = inputs(dtype)
    alone, promised = avow.attend(q, k, v, method="exact", enable_gqa=True)
    certificate = avow.Certificate.from_json(text)
    assert out.dtype == dtype and certificate.method == "exact"
    longest = v.double().norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
    apart = (out.double() - alone.double()).norm(dim=-1) / longest
    assert bool((apart <= certificate.rows + promised.rows).all())
    assert bool((errors(out, q, k, v, 8**-0.5) <= certificate.rows + 1e-14).all())
    assert certificate.bound <= 1.1 * promised.bound + 1e-12


def test_a_tolerance_that_float32_cannot_prove_is_kept_by_float64(said: list[dict[str, Any]]) -> None:
    out, certificate = said[0]["tight"][0], avow.Certificate.from_json(said[0]["tight"][1])
    q, k, v = inputs(torch.float32)
    assert certificate.keeps(5e-7) and out.dtype == torch.float32
    assert bool((errors(out, q, k, v, -0.3) <= certificate.rows).all())
    assert not avow.attend(q, k, v, method="exact", scale=-0.3, enable_gqa=True).certificate.keeps(5e-7)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tol", "InputError: tol at rank 1=1.1 must be as at rank 0, 0.1; give all processes the same"),
        ("type", "InputError: type of k at rank 1=torch.float64 must be as at rank 0, torch.float32; give"),
        ("heads", "InputError: shape of k without its length at rank 1=(2, 1, 8) must be as at rank 0, (2, 2, 8)"),
        ("queries", "InputError: digest of q at rank 1="),
        ("nan", "NonFiniteError: rank 1: k[0, 0, 0, 0]=nan must be finite; mend k first"),
        ("gradient", "InputError: gradients of q, k or v at rank 1=True must be as at rank 0, False; give all"),
        ("axes", "ShapeError: shapes of q, k, v=(4, 33, 8), (2, 96, 8), (2, 96, 5) must have four axes; add axes for"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
    ],
)
def test_both_processes_are_told_who_is_to_blame(said: list[dict[str, Any]], name: str, words: str) -> None:
    first, second = (one["mistakes"][name] for one in said)
    assert first == second
    assert words in first


def test_processes_that_never_met_are_told_so() -> None:
    q, k, v = inputs(torch.float32)
    with pytest.raises(ParameterError, match=r"call torch\.distributed\.init_process_group first, or use avow\.attend"):
        attend(q, k, v, enable_gqa=True)
