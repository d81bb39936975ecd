"""Constructions of every kind, and of no possible kind: each keeps its promise, or is refused in four parts."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import sympy
import torch

from avow.errors import AvowError
from avow.theory import constructions as c
from avow.theory.constructions.construction import Construction
from tests.prove import DRAWS, WEAKENED
from tests.soak.calls import NUMBERS as ODD
from tests.soak.turns import Case, Found, Wrong, tried

x = sympy.Symbol("x")
SIZES: tuple[Any, ...] = (0, 1, -1, 2, 0.5, 1e-3, 1e-300, 1e300, 5e-324, Fraction(1, 3), Fraction(10**40, 7))
CURVES: tuple[Any, ...] = (x, x**2, sympy.exp(x), sympy.sin(x), 1 / x, sympy.log(x), sympy.Integer(3), sympy.sqrt(x))


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Constructions drawn from seeds alone."""
    yield lambda seed: _proved(seed) if seed % 4 == 0 else _hostile(seed)


def _proved(seed: int) -> Found:
    rng = random.Random(seed)
    kind = rng.choice(list(DRAWS))
    made = DRAWS[kind](torch.Generator().manual_seed(seed))
    proof = made.verify()
    if not proof.holds:
        raise Wrong(f"{kind}: {proof}")
    if rng.random() < 0.1 and WEAKENED[kind](made).verify().holds:
        raise Wrong(f"{kind}, weakened, was accepted")
    return Found(kind)


def _hostile(seed: int) -> Found:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(list(ASKED))
    found = tried(lambda: ASKED[name](rng))
    if isinstance(found, AvowError):
        return Found(f"{name} refused")
    if isinstance(found, Construction):
        proof = tried(found.verify)
        if not isinstance(proof, AvowError) and not proof.holds:
            raise Wrong(f"{name}: {proof}")
    return Found(f"{name} made")


def _number(rng: random.Random) -> Any:
    return rng.choice(ODD if rng.random() < 0.15 else SIZES)


def _eps(rng: random.Random) -> Any:
    return rng.choice((0.1, 0.01, 0.3, 0.9)) if rng.random() < 0.7 else _number(rng)


def _keys(rng: random.Random) -> Any:
    keys = torch.randn(rng.choice((0, 1, 2, 4)), rng.choice((0, 1, 3, 5))).double() * rng.choice(
        (1, 1, 1e-200, 1e200, 0)
    )
    odd = rng.random()
    if odd < 0.1 and keys.numel():
        keys.view(-1)[0] = rng.choice((math.nan, math.inf))
    if odd > 0.85:
        return rng.choice((keys.float(), keys.half(), keys.long(), keys.T, keys[0:0], keys.flatten()))
    return torch.cat([keys, keys[:1]]) if 0.2 < odd < 0.3 else keys


def _index(rng: random.Random) -> Any:
    return rng.choice((0, 1, 2, 3, -1, 7)) if rng.random() < 0.85 else rng.choice(ODD)


def _law(rng: random.Random) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return c.GaussianLaw(_number(rng), _number(rng))
    if kind == 1:
        many = rng.choice((0, 1, 2, 3))
        return c.DiscreteLaw([_number(rng) for _ in range(many)], [Fraction(1, max(many, 1))] * many)
    if kind == 2:
        return c.DiscreteLaw([Fraction(1, 2), 2], [_number(rng), _number(rng)])
    if kind == 3:
        return c.AnyScale(_number(rng), _number(rng))
    return rng.choice(ODD)


def _routes(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return rng.choice(ODD)
    return {
        _index(rng) if rng.random() < 0.2 else i: rng.choice((_index(rng), (0, 1)))
        for i in range(rng.choice((0, 1, 2)))
    }


def _dtype(rng: random.Random) -> Any:
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return rng.choice(known) if rng.random() < 0.85 else rng.choice((torch.int64, torch.complex64, torch.bool))


def _interval(rng: random.Random) -> Any:
    return (
        rng.choice(((0, 1), (-1, 1), (1, 3), (0.5, 0.5000001))) if rng.random() < 0.6 else (_number(rng), _number(rng))
    )


def _noise(rng: random.Random) -> Any:
    heads = (
        [{_index(rng): _number(rng)} for _ in range(rng.choice((0, 1, 2)))]
        if rng.random() < 0.5
        else [{0: 9.0, 1: 9.0}]
    )
    return c.noise_analysis(rng.choice((2, 3, 1, 10)), heads, _law(rng), _eps(rng), noisy=_index(rng))


ASKED: dict[str, Any] = {
    "copy_query": lambda r: c.copy_query(_keys(r), _index(r), _eps(r), r.random() < 0.3, _dtype(r)),
    "average_query": lambda r: c.average_query(
        _keys(r), r.choice(((0, 1), (0,), (), (0, 0), (_index(r),))), _eps(r), _dtype(r)
    ),
    "mixture_query": lambda r: c.mixture_query(
        _keys(r),
        r.choice(([0.5, 0.5], [1.0], [0.2, 0.8, 0.0], [_number(r), _number(r)])),
        _eps(r),
        _dtype(r),
    ),
    "relu_linear": lambda r: c.relu_linear(_number(r), _number(r), r.choice((None, _interval(r))), _dtype(r)),
    "relu_square": lambda r: c.relu_square(_eps(r), r.random() < 0.5, _dtype(r)),
    "relu_piecewise": lambda r: c.relu_piecewise(
        r.choice(CURVES) if r.random() < 0.9 else r.choice(ODD), _interval(r), r.choice((0.1, 0.3, _eps(r))), _dtype(r)
    ),
    "robust_heads": lambda r: c.robust_heads(
        r.choice((2, 3, 1, _index(r))),
        _eps(r),
        _law(r),
        least=r.choice((None, _number(r))),
        noisy=_index(r),
        dtype=_dtype(r),
    ),
    "router": lambda r: c.router(_keys(r), _routes(r), _eps(r)),
    "program": lambda r: c.program(_keys(r), [_routes(r) for _ in range(r.choice((0, 1, 2)))], _eps(r)),
    "feature_map": lambda r: c.feature_map(_keys(r), [_number(r) for _ in range(r.choice((0, 1, 2, 4)))]),
    "route_by_weights": lambda r: c.route_by_weights(_number(r)),
    "project_out": lambda r: c.project_out(_keys(r), _keys(r)),
    "noise_analysis": _noise,
}
