"""Random robust heads, projectors and routers, for the promises that every construction is held to.

`DRAWS` makes one from a generator; `WEAKENED` breaks its promise: half the query, a moved projector, half the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from avow.errors import ParameterError, RangeError, ToleranceUnreachable
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.noise import AnyScale, DiscreteLaw, GaussianLaw, Law
from avow.theory.constructions.projections import ProjectOut, project_out
from avow.theory.constructions.robust import RobustHeads, robust_heads
from avow.theory.constructions.routers import Router, feature_map, router

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def integer(low: int, high: int, generator: torch.Generator) -> int:
    """One of low..high."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def chance(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dtype_of(generator: torch.Generator) -> torch.dtype:
    return DTYPES[integer(0, 3, generator)]


def law_of(generator: torch.Generator) -> Law:
    """Scales that may be close to zero, above one, spread out, or all but certain."""
    kind = integer(0, 2, generator)
    if kind == 0:
        values = {Fraction(integer(1, 400, generator), 200) for _ in range(integer(1, 5, generator))}
        odds = [integer(1, 9, generator) for _ in values]
        return DiscreteLaw(values, [Fraction(p, sum(odds)) for p in odds])
    if kind == 1:
        return GaussianLaw(0.5 + chance(generator), 10 ** (2 * chance(generator) - 2))
    least = 10 ** (2 * chance(generator) - 1.5)
    return AnyScale(least, least * 10 ** chance(generator))


def heads(generator: torch.Generator) -> RobustHeads:
    n, dtype = integer(2, 40, generator), dtype_of(generator)
    noisy, other = torch.randperm(n, generator=generator)[:2].tolist()
    keys = None
    if chance(generator) < 0.7:
        n = min(n, 16)
        noisy, other = torch.randperm(n, generator=generator)[:2].tolist()
        keys = torch.linalg.qr(normal(integer(n, 20, generator), n, generator=generator))[0].mT
    eps = 10 ** (-8 * chance(generator) - 0.01)
    away = chance(generator) < 0.3
    return robust_heads(n, eps, law_of(generator), keys=keys, noisy=noisy, other=other, dtype=dtype, away=away)


def projector(generator: torch.Generator) -> ProjectOut:
    """Spans that are orthonormal, oblique, nearly the same, or of very different lengths."""
    p, q, dtype = integer(1, 6, generator), integer(1, 6, generator), dtype_of(generator)
    columns = normal(integer(p + q, 16, generator), p + q, generator=generator)
    kind = integer(0, 4, generator)
    if kind == 1:
        columns = torch.linalg.qr(columns)[0]
    elif kind == 2:
        columns[:, -1] = columns[:, 0] + 10 ** (-12 * chance(generator)) * columns[:, -1]
    elif kind == 3:
        columns = columns * 10 ** (8 * torch.rand(p + q, generator=generator, dtype=torch.float64) - 4)
    elif kind == 4:
        columns = columns.round()
    columns = columns.to(dtype)
    return project_out(columns[:, :p], columns[:, p:])


def routed(generator: torch.Generator) -> Router:
    """Tokens that are independent, nearly dependent, or more than there are dimensions."""
    n, dtype = integer(2, 8, generator), dtype_of(generator)
    crowded = chance(generator) < 0.2
    d = integer(2, 4, generator) if crowded else integer(n, 10, generator)
    tokens = normal(n, d, generator=generator)
    if chance(generator) < 0.3:
        tokens[-1] = tokens[0] + 10 ** (-4 * chance(generator)) * tokens[-1]
    routes: dict[int, int | list[int]] = {}
    for i in torch.randperm(n, generator=generator)[: integer(1, 2 if crowded else n, generator)].tolist():
        many = 1 if crowded or chance(generator) < 0.7 else integer(1, n, generator)
        routes[i] = torch.randperm(n, generator=generator)[:many].tolist()
    carry = None
    if chance(generator) < 0.4:
        gains = [float(integer(-1, 1, generator)) for _ in range(integer(1, d, generator))]
        carry = feature_map(normal(len(gains), d, generator=generator), gains)
    eps = 10 ** (-6 * chance(generator) - 1.5)
    made = router(tokens.to(dtype), routes, eps, carry=carry)
    if made.scale == 0:
        raise ParameterError("draw", "scale 0", "promises what any head keeps", "draw again")
    return made


def drawn(make: Callable[[torch.Generator], Construction]) -> Callable[[torch.Generator], Construction]:
    """A draw that is repeated while its builder refuses it for a reason it documents."""

    def draw(generator: torch.Generator) -> Construction:
        while True:
            try:
                return make(generator)
            except (ParameterError, RangeError, ToleranceUnreachable):
                continue

    return draw


def halved_queries(construction: Construction) -> Construction:
    assert isinstance(construction, RobustHeads)
    return replace(construction, queries=construction.queries / 2)


def moved_projection(construction: Construction) -> Construction:
    """Each promise is at most 1/4, so a projector that keeps only half breaks it."""
    assert isinstance(construction, ProjectOut)
    assert math.isfinite(construction.bound)
    return replace(construction, projection=construction.projection / 2)


def halved_scale(construction: Construction) -> Construction:
    assert isinstance(construction, Router)
    return replace(construction, scale=construction.scale / 2)


DRAWS: dict[str, Callable[[torch.Generator], Construction]] = {
    "robust-heads": drawn(heads),
    "project-out": drawn(projector),
    "router": drawn(routed),
}
WEAKENED: dict[str, Callable[[Construction], Construction]] = {
    "robust-heads": halved_queries,
    "project-out": moved_projection,
    "router": halved_scale,
}
