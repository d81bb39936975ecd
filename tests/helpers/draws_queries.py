"""Random queries over keys of many kinds, for the promises that every construction is held to.

`DRAWS` makes one from a generator; `WEAKENED` halves its query, which must break its promise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from avow.core import DTYPES
from avow.errors import InsideHull, OutOfReach, RangeError, ToleranceUnreachable
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.queries import Query, average_query, copy_query, mixture_query

# What a builder may answer instead of a query, each with its proof or its reason.
REFUSALS = (InsideHull, OutOfReach, RangeError, ToleranceUnreachable)


def integer(low: int, high: int, generator: torch.Generator) -> int:
    """One of low..high."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def chance(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def keys_of(n: int, d: int, generator: torch.Generator) -> Tensor:
    """Keys that are easy, or nearly no keys at all: unit, orthonormal, almost equal, almost in a hull, tiny, huge."""
    keys = torch.randn(n, d, generator=generator, dtype=torch.float64)
    kind = integer(0, 7, generator)
    small = 10 ** -(1 + 9 * chance(generator))
    if kind == 1:
        keys = torch.nn.functional.normalize(keys, dim=-1)
    elif kind == 2 and n <= d:
        keys = torch.linalg.qr(keys.T)[0].T
    elif kind == 3:
        keys[1] = keys[0] + small * keys[1]
    elif kind == 4 and n > 2:
        mean = torch.rand(n - 1, generator=generator, dtype=torch.float64)
        keys[0] = mean / mean.sum() @ keys[1:] + small * keys[0]
    elif kind == 5:
        keys = keys * 10 ** (400 * chance(generator) - 200)
    elif kind == 6:
        keys = keys * 10 ** (4 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 2)
    elif kind == 7:
        keys = keys.round()
    kept = (torch.float64, torch.float64, torch.float32, torch.bfloat16)[integer(0, 3, generator)]
    narrow = keys.to(kept)
    return narrow if bool(narrow.isfinite().all()) else keys


def eps_of(most: float, generator: torch.Generator) -> float:
    """From 1e-6 to `most`, evenly in its logarithm."""
    return 10 ** (-6 + chance(generator) * (6 + math.log10(most)))


def kept_of(n: int, generator: torch.Generator) -> list[int]:
    """Some keys, but not all."""
    return torch.randperm(n, generator=generator)[: integer(1, n - 1, generator)].tolist()


def sizes(generator: torch.Generator) -> tuple[int, int, torch.dtype]:
    return integer(2, 12, generator), integer(1, 16, generator), DTYPES[integer(0, 3, generator)]


def copy(generator: torch.Generator, shortest: bool = False) -> Query:
    n, d, dtype = sizes(generator)
    # Half a query leaves the others (eps/(n − 1))^½ or more, which is above eps for eps < 1/(n − 1).
    eps = eps_of(0.5 / (n - 1), generator)
    return copy_query(keys_of(n, d, generator), integer(0, 1, generator), eps, shortest, dtype)


def average(generator: torch.Generator) -> Query | None:
    n, d, dtype = sizes(generator)
    keys, kept, eps = keys_of(n, d, generator), kept_of(n, generator), eps_of(0.5 / n**2, generator)
    made = average_query(keys, kept, eps, dtype)
    # Where rounding makes the query much longer, half of it may still do.
    return made if made.norm <= 1.25 * average_query(keys, kept, eps).norm else None


def mixture(generator: torch.Generator) -> Query | None:
    n, d, dtype = sizes(generator)
    weights = torch.zeros(n, dtype=torch.float64)
    kept = kept_of(n, generator)
    # Weights up to 20 powers of e apart.
    weights[kept] = torch.softmax(20 * torch.rand(len(kept), generator=generator, dtype=torch.float64), -1)
    # Half a query takes the root of every ratio: the largest weight then falls short by this much.
    short = float(weights.sqrt().sum() * weights.max().sqrt() - 1) if len(kept) > 1 else 1.0
    most = min(0.5 / n, short / 4)
    if most < 1e-6:
        return None
    return mixture_query(keys_of(n, d, generator), weights, eps_of(most, generator), dtype)


def drawn(make: Callable[[torch.Generator], Query | None]) -> Callable[[torch.Generator], Construction]:
    """A draw that is repeated while there is none, or its builder refuses it."""

    def draw(generator: torch.Generator) -> Construction:
        while True:
            with contextlib.suppress(*REFUSALS):
                made = make(generator)
                if made is not None:
                    return made

    return draw


def halved(construction: Construction) -> Construction:
    """The same promise for half the query."""
    assert isinstance(construction, Query)
    return replace(construction, query=construction.query / 2)


DRAWS: dict[str, Callable[[torch.Generator], Construction]] = {
    "copy": drawn(copy),
    "copy-shortest": drawn(lambda generator: copy(generator, shortest=True)),
    "average": drawn(average),
    "mixture": drawn(mixture),
}
WEAKENED: dict[str, Callable[[Construction], Construction]] = dict.fromkeys(DRAWS, halved)
