"""What stands on the explorer's stage: keys, values and queries, each made by the construction that is shown."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from avow.errors import OutOfReach
from avow.theory.constructions import (
    AverageQuery,
    CopyQuery,
    DiscreteLaw,
    GaussianLaw,
    NoiseAnalysis,
    RobustHeads,
    Router,
    average_query,
    copy_query,
    noise_analysis,
    robust_heads,
    router,
)
from avow.theory.constructions.construction import Construction

# The success of heads under noise: weights within this of the average, in the sum of their distances.
ETA = 0.1
# The noisy key's picture: as many orthonormal keys as a sphere has room for.
_AXES = 3


@dataclass(frozen=True)
class Scene:
    """Tensors in float32, as a model would hold them; `made` is what promises something of them."""

    keys: Float[Tensor, "n d"]
    values: Float[Tensor, "n d"]
    queries: Float[Tensor, "h d"]
    made: Construction | None
    # The keys that are meant to be read.
    wanted: tuple[int, ...]
    # What the reader can take hold of: where it is, and how it moves.
    handle: dict[str, Any]
    shown: dict[str, float] = field(default_factory=dict)
    refusal: OutOfReach | None = None


def plane(n: int) -> Float[Tensor, "n 2"]:
    """n points around a circle."""
    turns = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack((turns.cos(), turns.sin()), 1).float()


def sphere(n: int) -> Float[Tensor, "n 3"]:
    """n points spread over a sphere, along a spiral of golden angles; turned so that the second faces the reader."""
    places = torch.arange(n, dtype=torch.float64) + 0.5
    height, turns = 1 - 2 * places / n, (places - 1.5) * math.pi * (3 - math.sqrt(5)) + 0.6
    reach = (1 - height * height).sqrt()
    return torch.stack((reach * turns.cos(), reach * turns.sin(), height), 1).float()


def pointed(dims: int, angle: float, rise: float, length: float) -> Float[Tensor, " d"]:
    """The vector of a length that looks there; angles in degrees, `rise` above the equator."""
    turn, up = math.radians(angle), math.radians(rise if dims == 3 else 0.0)
    ends = [math.cos(up) * math.cos(turn), math.cos(up) * math.sin(turn), math.sin(up)]
    return (torch.tensor(ends[:dims], dtype=torch.float64) * length).float()


def bearings(x: Float[Tensor, " d"]) -> dict[str, float]:
    """Where a vector looks, and its length: `pointed` the other way round."""
    first, second, third = (*x.double().tolist(), 0.0)[:3]
    flat = math.hypot(first, second)
    return {
        "angle": math.degrees(math.atan2(second, first)),
        "rise": math.degrees(math.atan2(third, flat)),
        "length": math.hypot(flat, third),
    }


@functools.lru_cache(256)
def _copied(space: str, n: int, target: int, eps: float) -> CopyQuery:
    return copy_query(plane(n) if space == "plane" else sphere(n), target, eps, dtype=torch.float32)


@functools.lru_cache(256)
def _averaged(space: str, n: int, pair: tuple[int, int], eps: float) -> AverageQuery | OutOfReach:
    try:
        return average_query(plane(n) if space == "plane" else sphere(n), pair, eps, dtype=torch.float32)
    except OutOfReach as refusal:
        return refusal


@functools.lru_cache(256)
def _routed(n: int, ahead: int, eps: float) -> Router:
    return router(plane(n), {i: (i + ahead) % n for i in range(n)}, eps)


def looking(
    space: str,
    n: int,
    wanted: tuple[int, ...],
    eps: float,
    angle: float | None,
    rise: float | None,
    length: float | None,
) -> Scene:
    """One query that copies a key or averages two; the reader may have turned it or changed its length."""
    keys = plane(n) if space == "plane" else sphere(n)
    refusal = None
    if len(wanted) == 1:
        start = _copied(space, n, wanted[0], eps).query
    else:
        found = _averaged(space, n, (wanted[0], wanted[1]), eps)
        refusal = found if isinstance(found, OutOfReach) else None
        # No query does it; halfway between the two is where one would look for it.
        start = keys[list(wanted)].mean(0) * 10 if isinstance(found, OutOfReach) else found.query
    own = bearings(start)
    asked = {"angle": angle, "rise": rise, "length": length}
    query = start
    if any(value is not None for value in asked.values()):
        query = pointed(keys.shape[1], **{name: own[name] if value is None else value for name, value in asked.items()})
    made = CopyQuery(query, keys, eps, wanted[0]) if len(wanted) == 1 else AverageQuery(query, keys, eps, wanted)
    handle = {"kind": space, "name": "query", "at": query}
    return Scene(keys, keys, query[None], made, wanted, handle, bearings(query), refusal)


def noisy(eps: float, law: DiscreteLaw | GaussianLaw, heads: str, scale: float) -> Scene:
    """Orthonormal keys, the first of them scaled by X; one head that looks at two keys, or a head for each."""
    axes = torch.eye(_AXES)
    keys = axes.clone()
    keys[0] *= scale
    made = heads_of(eps, law)[heads]
    queries = made.queries if isinstance(made, RobustHeads) else made.query[None]
    handle = {"kind": "ray", "name": "noisy key", "at": keys[0], "along": axes[0]}
    return Scene(keys, axes, queries.float(), made if isinstance(made, RobustHeads) else None, (0, 1), handle)


@functools.lru_cache(256)
def heads_of(eps: float, law: DiscreteLaw | GaussianLaw) -> dict[str, AverageQuery | RobustHeads]:
    """One head and two heads for the average of keys 0 and 1."""
    one = average_query(torch.eye(_AXES), (0, 1), eps, dtype=torch.float32)
    least = float(min(law.values)) if isinstance(law, DiscreteLaw) else law.mean / 2
    return {"one": one, "two": robust_heads(_AXES, eps, law, least=least, dtype=torch.float32)}


def law_of(kind: str, c: float, variance: float) -> DiscreteLaw | GaussianLaw:
    """How the noisy key is scaled: by 1 − c or 1 + c, or by a Gaussian around 1."""
    if kind == "Gaussian":
        return GaussianLaw(1.0, variance)
    step, half = Fraction(c).limit_denominator(1000), Fraction(1, 2)
    return DiscreteLaw((1 - step, 1 + step), (half, half))


@functools.lru_cache(64)
def odds(eps: float, law: DiscreteLaw | GaussianLaw) -> dict[str, NoiseAnalysis]:
    """What the noise does to one head and to two: the exact law of their weights."""
    found = {}
    for name, made in heads_of(eps, law).items():
        rows = made.queries if isinstance(made, RobustHeads) else made.query[None]
        found[name] = noise_analysis(_AXES, [dict(enumerate(row)) for row in rows.double().tolist()], law, ETA)
    return found


def routing(n: int, ahead: int, eps: float, angle: float | None) -> Scene:
    """One head in which each token reads the one so many steps ahead; the reader moves a token around."""
    made = _routed(n, ahead, eps)
    token = pointed(2, 0.0 if angle is None else angle, 0.0, 1.0)
    query = (made.scale * (made.W_Q.double() @ token.double())).float()
    keys, values = made.tokens @ made.W_K.mT, made.tokens @ made.W_V.mT
    handle = {"kind": "ring", "name": "token", "at": token}
    nearest = int((made.tokens @ token).argmax())
    return Scene(
        keys, values, query[None], made, (made.routes[nearest][0],), handle, {"angle": bearings(token)["angle"]}
    )
