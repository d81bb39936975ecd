r"""How far apart the sinusoidal encodings of two positions are, in real numbers and in the types that store them.

.. math:: e(p) = \bigl(\sin(p\,\omega_j), \cos(p\,\omega_j)\bigr)_{j < d/2}, \quad \omega_j = 10000^{-2j/d}
"""

from __future__ import annotations

from functools import cache
from typing import Any

import sympy
import torch
from flint import arb
from sympy import And, Eq, Implies, Ne, Or, Rational, cos, sin
from torch import Tensor

from avow.core import dtype_name
from avow.core.chart import Table
from avow.numerics.intervals import lower, norm, precision
from avow.theory.claims.claim import claims_on
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Spans, Statement, each, whole
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.stored import bfloat16, float64
from avow.theory.claims.toolbox import enclosed

claim = claims_on("heads")
LAST = 4096
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (2, 4, 8, 64)


def frequencies(d: int) -> list[arb]:
    return [(arb(10000).log() * (-2 * j) / d).exp() for j in range(d // 2)]


@cache
def distances(d: int) -> list[arb]:
    """In real arithmetic, the distance of two encodings Δ = 1, …, LAST apart, in balls."""
    with precision(80):
        waves = frequencies(d)
        halves = (arb(step) / 2 for step in range(1, LAST + 1))
        return [2 * norm([(half * wave).sin() for wave in waves]) for half in halves]


@cache
def encodings(d: int) -> Tensor:
    """All encodings of positions 0, …, LAST, each entry the float64 within one rounding of the real number."""
    with precision(80):
        waves = frequencies(d)
        rows = [[float(part) for wave in waves for part in (p * wave).sin_cos()] for p in range(LAST + 1)]
    return torch.tensor(rows, dtype=torch.float64)


def stored_encoding(d: int, dtype: torch.dtype) -> Tensor:
    """The encodings rounded once to a type; refused where an entry is too near a tie to know which way it goes."""
    exact = encodings(d)
    if dtype == torch.float64:
        return exact
    low, high = (_rounded(exact * (1 + sign * 2**-50), dtype) for sign in (-1, 1))
    if not torch.equal(low, high):
        raise Unproved(f"an entry of width {d} lies too near a tie of {dtype_name(dtype)}")
    return low


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of a narrower type, in float64: PyTorch goes by way of float32, and rounds twice."""
    form = torch.finfo(dtype)
    spacing = torch.ldexp(torch.full_like(x, form.eps / 2), torch.frexp(x)[1]).clamp(min=form.eps * form.tiny)
    return torch.round(x / spacing) * spacing


@cache
def nearest(d: int, dtype: torch.dtype) -> dict[str, Any]:
    """The nearest two of all encodings as stored, searched where rounding leaves a chance.

    Their distance, the smaller position, and how far the positions are apart.
    """
    rows = stored_encoding(d, dtype)
    real = [float(distance) for distance in distances(d)]
    # Entries are at most 1, so each moves by at most eps/2 and two encodings by 2·√d·eps/2 to each other.
    chance = min(real) + 2 * d**0.5 * torch.finfo(dtype).eps
    pairs = []
    for step in (i + 1 for i, distance in enumerate(real) if distance <= chance):
        least, place = torch.linalg.vector_norm(rows[step:] - rows[:-step], dim=-1).min(0)
        pairs.append({"distance": float(least), "position": int(place), "step": step})
    return min(pairs, key=lambda pair: pair["distance"])


def _picture() -> Table:
    nearest_pairs = {d: [nearest(d, dtype) for dtype in TYPES] for d in WIDTHS}
    rows = [(d, *("{distance:.6g} (Δ = {step})".format(**x) for x in pairs)) for d, pairs in nearest_pairs.items()]
    return Table(
        f"The smallest distance of two encodings, positions 0 to {LAST}", ("width", *map(dtype_name, TYPES)), rows
    )


p, other, i = whole("p p' i")
AT = 710


def _squared(wave: Any) -> Any:
    """The squared distance of two positions' first sine and cosine."""
    return sum((part(p * wave) - part(other * wave)) ** 2 for part in (sin, cos))


def _apart(wave: Any) -> Statement:
    distance = _squared(wave)
    near = And(p - other >= 1, p - other <= LAST)
    return Statement(
        variables={p: "a position", other: "another"},
        then={
            "distance": Eq(distance, 4 * sin((p - other) * wave / 2) ** 2),
            "distinct": Implies(Ne(p, other), distance > 0),
            "least": Implies(near, distance >= 4 * sin(AT * wave / 2) ** 2),
        },
        terms={
            "distance": 4 * sin((p - other) * wave / 2) ** 2,
            "all": p - other <= LAST,
            "least": 4 * sin(AT * wave / 2) ** 2,
        },
        notes=["real arithmetic", "the first sine and cosine of an encoding"],
        spans=Spans({"p": range(LAST), "turns": range(LAST * 7 // 44)}, _turned),
    )


def _turned(first: int, turns: int) -> dict[Any, Any]:
    """Two positions so many turns of the first wave apart, or all but: others are far apart anyway."""
    return {p: first + round(44 * turns / 7), other: first}


@claim(
    "sinusoid-distinct",
    expected="proved",
    formal=_apart,
    plain="Sinusoidal encodings of different integer positions differ, by their first sine and cosine alone: the"
    " squared distance is {distance}, as only the distance of the positions counts. For {all} it is at least {least},"
    " which positions that far apart reach.",
    subject=sympy.Integer(1),
    sabotage={
        "a first wave of a hundred positions": sympy.pi / 50,
        "a wave twice as long": Rational(1, 2),
    },
    picture=_picture,
)
def sinusoid_distinct(proof: Proof, wave: Any) -> None:
    distance, half = _squared(wave), (p - other) * wave / 2
    pair = proof.equal(distance, 4 * sin(half) ** 2, says="it depends on the distance of the positions alone")
    proof.conclude("distance", pair)
    proof.conclude("distinct", pair, proof.sine_of_rational(half))
    closest = 4 * sin(AT * wave / 2) ** 2
    uses = [proof.same_value(lambda step: 4 * sin(step * wave / 2) ** 2, p - other, sympy.Integer(AT))]
    for low, high in ((1, AT - 1), (AT + 1, LAST)):
        farther = each(i, low, high, 4 * sin(i * wave / 2) ** 2 >= closest)
        shown = proof.computed(farther, says=f"from {low} to {high} positions apart, none are nearer than at {AT}")
        uses += [shown, proof.member(farther, p - other)]
    step = sympy.Integer(AT)
    uses += [proof.next_whole(p - other, step), proof.next_whole(step, p - other)]
    proof.conclude("least", pair, *uses)
    with precision(80):
        nearest_pair = 2 * abs(arb(AT // 2).sin())
    says = f"the first pair comes within 6.03e-5 at {AT} positions"
    proof.shows(enclosed(abs(nearest_pair - arb("6.03e-5")) < arb("5e-8"), says, distance=nearest_pair.str(12)))
    for d in WIDTHS:
        real_ = distances(d)
        least = min(range(LAST), key=lambda i: float(real_[i]))
        smallest = all(another > real_[least] or i == least for i, another in enumerate(real_))
        says = f"width {d}, positions 0 to {LAST}: the smallest distance in real numbers, and as each type holds it"
        by_type: dict[str, Any] = {dtype_name(dtype): nearest(d, dtype) for dtype in TYPES}
        proof.shows(enclosed(smallest, says, step=least + 1, distance=real_[least].str(12), **by_type))
    for dtype in TYPES:
        # Entries are at most 1: each moves by at most eps/2.
        widest = min(distances(64), key=float) - 2 * arb(64).sqrt() * torch.finfo(dtype).eps / 2
        says = f"width 64 in {dtype_name(dtype)}: no entry moves by over eps/2, so no two encodings are within 1.4"
        proof.shows(enclosed(widest > 1.4, says, at_least=lower(widest)))


def _stored(stored: Any) -> Statement:
    differ = Or(*(Ne(stored(part(p)), stored(part(other))) for part in (sin, cos)))
    return Statement(
        variables={p: "a position", other: "another"},
        given=[p >= 0, other >= 0, Ne(p, other)],
        then={"entries": differ, "positions": Ne(stored(p), stored(other))},
        terms={"entry": stored(sin(p)), "position": stored(p)},
        notes=["width two: one sine and one cosine, each computed exactly and rounded once, to nearest"],
        spans=Spans({"p": range(LAST), "turns": range(1, LAST * 7 // 44)}, _turned),
    )


@claim(
    "sinusoid-stored",
    expected="refuted",
    formal=_stored,
    plain="Encodings of different positions differ as stored, too, in every type: their entries {entry} do, and so do"
    " the positions {position} that they are computed from.",
    subject=bfloat16,
    sabotage={"double precision": float64},
    picture=_picture,
)
def sinusoid_stored(against: Refutation, _: Any) -> None:
    against.case({p: 711, other: 1}, "width 2: positions 1 and 711 have one and the same encoding", "entries")
    against.case({p: 513, other: 512}, "any width: positions 512 and 513 are one number in bfloat16", "positions")
