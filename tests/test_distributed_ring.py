"""Queries, keys and values in pieces, blocks of keys going round: answers and gradients are those of one piece."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from avow.distributed import ring_attention
from tests.processes import together


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence, and how much of it each process holds."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    causal: bool = False
    groups: int = 2
    scale: float | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(len(self.rows) + sum(self.rows))

        def some(heads: int, length: int, dim: int) -> Tensor:
            return torch.randn(2, heads, length, dim, generator=draw, dtype=torch.float64).to(self.dtype)

        n, s = sum(self.rows), sum(self.keys)
        return some(4, n, 8), 2 * some(self.groups, s, 8), some(self.groups, s, 5), some(4, n, 5)

    def piece(self, x: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
        return x.split(list(sizes), -2)[rank]


def cases(count: int) -> dict[str, Case]:
    """What processes are asked, so many of them."""
    even, odd = (16,) * count, tuple(3 + 11 * (rank % 3) + rank for rank in range(count))
    other = tuple(reversed(odd))
    found: dict[str, Case] = {}
    for causal in (False, True):
        word = "causal" if causal else "whole"
        found |= {
            f"even {word}": Case(even, even, causal=causal),
            f"uneven {word}": Case(odd, odd, causal=causal, scale=-0.7),
            f"crossed {word}": Case(odd, other, causal=causal, groups=4),
            f"float32 {word}": Case(odd, odd, torch.float32, causal, groups=1),
            f"bfloat16 {word}": Case(odd, odd, torch.bfloat16, causal),
        }
    found["a long row of keys, causal"] = Case((1,) * count, even, causal=True)
    found["few keys, causal"] = Case(even, (1,) * count, causal=True)
    return found


def ask() -> dict[str, tuple[Tensor, ...]]:
    """The answer and the gradients of this process's shard in every case."""
    rank, count = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, case in cases(count).items():
        q, k, v, weight = case.inputs()
        pieces = [
            case.piece(x, sizes, rank).requires_grad_() for x, sizes in ((q, case.rows), (k, case.keys), (v, case.keys))
        ]
        out = ring_attention(*pieces, causal=case.causal, scale=case.scale, enable_gqa=True)
        (out * case.piece(weight, case.rows, rank)).sum().backward()
        found[name] = (out.detach(), *(x.grad for x in pieces if x.grad is not None))
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {count: together(count, ask, tmp_path_factory.mktemp("ring")) for count in (2, 4)}


def alone(case: Case) -> tuple[Tensor, ...]:
    """The same in one piece, in float64."""
    q, k, v, weight = (x.double().requires_grad_() for x in case.inputs())
    keys, values = (x.repeat_interleave(4 // case.groups, 1) for x in (k, v))
    logits = (8**-0.5 if case.scale is None else case.scale) * (q @ keys.mT)
    if case.causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    out = torch.softmax(logits, -1) @ values
    (out * weight).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad  # type: ignore[return-value]


ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(cases(2)))
def test_answers_and_gradients_of_a_ring_are_those_of_one_process(
    said: dict[int, list[Any]], count: int, name: str
) -> None:
    case = cases(count)[name]
    for part, truth in enumerate(alone(case)):
        whole = torch.cat([one[name][part] for one in said[count]], -2)
        assert whole.dtype == case.dtype and whole.shape == truth.shape
        assert float((whole.double() - truth).abs().max()) <= ROUNDING[case.dtype] * float(truth.abs().max())
