r"""How far apart the sinusoidal encodings of two positions are, in real numbers and in the types that store them.

.. math:: e(p) = \bigl(\sin(p\,\omega_j), \cos(p\,\omega_j)\bigr)_{j < d/2}, \quad \omega_j = 10000^{-2j/d}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from sympy import Symbol
from torch import Tensor

from avow.core import dtype_name
from avow.core.chart import Table
from avow.numerics.intervals import lower, most, norm, precision
from avow.theory.claims.claim import Falsifier, claims_on
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.stored import rounded
from avow.theory.claims.toolbox import counterexample, enclosed, identity, symbols

claim = claims_on("heads")
LAST = 4096
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (2, 4, 8, 64)


class Encoding(NamedTuple):
    """The first frequency, for proofs and as a ball, and two positions to be told apart by its pair in bfloat16."""

    frequency: Any
    ball: Callable[[], arb]
    twins: tuple[int, int]


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


def _later(position: int, turns: int, wave: arb) -> int:
    """The position that so many turns of the first wave lead to, or all but: the others are far apart anyway."""
    return position + round(float(2 * arb.pi() * turns / wave))


def _stored(encoding: Encoding, first: int, turns: int) -> arb:
    """p′ is p and so many turns of the first wave, rounded to a whole position."""
    # Of width 2 in bfloat16, the coarsest that the statement speaks of.
    angles = [p * encoding.ball() for p in (first, _later(first, turns, encoding.ball()))]
    pairs = [[stored(part, torch.bfloat16) for part in (angle.sin, angle.cos)] for angle in angles]
    return -most([abs(a - b) for a, b in zip(*pairs, strict=True)])


def _real(encoding: Encoding, first: int, turns: int) -> arb:
    # Stored, no entry of an encoding of width 64 moves by more than eps/2.
    moved = 8 * max(torch.finfo(dtype).eps for dtype in TYPES)
    step = _later(first, turns, encoding.ball()) - first
    apart = [2 * (step * wave / 2).sin() for wave in (encoding.ball(), *frequencies(64)[1:])]
    return (arb("6.028e-5") - abs(apart[0])).max(arb("1.4") - norm(apart) + moved)


# A turn of the first wave is 44/7 positions, or all but: so many turns lead no further than LAST.
_POSITIONS = {"p": range(LAST + 1), "turns to p′": range(1, LAST * 7 // 44 + 1)}


@claim(
    "sinusoid-distinct",
    expected="corrected",
    statement=r"p \ne p' \;\Rightarrow\; e(p) \ne e(p') \text{ as stored, for every width and type}",
    plain="Sinusoidal encodings of different integer positions differ.",
    amended=r"\|e(p+\Delta)-e(p)\|^2 = \textstyle\sum_j 4\sin^2(\Delta\omega_j/2) > 0 \text{ in real"
    r" arithmetic, by the first pair"
    r" alone}; \text{ stored with width 64, positions } 0..4096 \text{ are over } 1.4 \text{ apart in every type}",
    amended_plain="In real arithmetic they differ, by the first sine and cosine alone, since 2π is irrational; how far"
    " depends on the distance of the positions only. That pair comes within 6.03e-5 at 710 positions, which bfloat16"
    " and float16 cannot hold; a full encoding of width 64 stays over 1.4 apart up to 4096 in every type.",
    assumptions=(
        "π is irrational (Lambert)",
        "entries are computed exactly and rounded once, to nearest",
        "positions themselves are exact: bfloat16 has no 257",
    ),
    subject=Encoding(sympy.Integer(1), lambda: arb(1), (1, 711)),
    sabotage={
        "a first wave of a hundred positions": Encoding(sympy.pi / 50, lambda: arb.pi() / 50, (1, 101)),
        "neighbours taken for twins": Encoding(sympy.Integer(1), lambda: arb(1), (1, 2)),
    },
    picture=_picture,
    falsifier=Falsifier(_POSITIONS, _stored, _real, strict=True),
)
def sinusoid_distinct(encoding: Encoding) -> Iterator[Evidence]:
    yield _equal_once_stored(encoding)
    held = torch.tensor([256, 257]).to(torch.bfloat16)
    says = (
        "any width: positions 256 and 257 are one number in bfloat16, so encodings computed there from"
        " positions are equal"
    )
    yield counterexample(bool(held[0] == held[1]), says, "bfloat16 itself", held=held.tolist())
    p, step, wave = symbols(real="p Delta omega")
    turn = (sympy.sin((p + step) * wave) - sympy.sin(p * wave)) ** 2
    turn += (sympy.cos((p + step) * wave) - sympy.cos(p * wave)) ** 2
    says = "a pair is 2|sin(Δω/2)| apart, wherever p is: it depends on Δ alone"
    yield identity(turn, 4 * sympy.sin(step * wave / 2) ** 2, says, True)
    zeros = 2 * sympy.pi * Symbol("k", integer=True, nonzero=True) / encoding.frequency
    if zeros.is_irrational is not True:
        raise Unproved("the first wave may come round after a whole number of positions")
    says = "sin(Δω_0/2) = 0 only at Δ = 2πk/ω_0, which is irrational for k ≠ 0: no whole Δ but 0"
    yield Evidence("symbolic", says, {"zeros": sympy.latex(zeros)}, True)
    yield _first_pair(encoding.ball)
    for d in WIDTHS:
        real = distances(d)
        closest = min(range(LAST), key=lambda i: float(real[i]))
        smallest = all(other > real[closest] or i == closest for i, other in enumerate(real))
        says = f"width {d}, positions 0 to {LAST}: the smallest distance in real numbers, and as each type holds it"
        by_type = {dtype_name(dtype): nearest(d, dtype) for dtype in TYPES}
        yield enclosed(smallest, says, True, step=closest + 1, distance=real[closest].str(12), **by_type)
    for dtype in TYPES:
        # Entries are at most 1: each moves by at most eps/2.
        least = min(distances(64), key=float) - 2 * arb(64).sqrt() * torch.finfo(dtype).eps / 2
        says = f"width 64 in {dtype_name(dtype)}: no entry moves by over eps/2, so no two encodings are within 1.4"
        yield enclosed(least > 1.4, says, True, at_least=lower(least))


def _equal_once_stored(encoding: Encoding) -> Evidence:
    def pair(p: int) -> list[Fraction | float]:
        angles = [lambda: (p * encoding.ball()).sin(), lambda: (p * encoding.ball()).cos()]
        return [rounded(angle, torch.bfloat16) for angle in angles]

    one, two = encoding.twins
    stored_pair, apart = pair(one), 2 * abs((arb(two - one) * encoding.ball() / 2).sin())
    says = f"width 2: positions {one} and {two} have one and the same encoding in bfloat16"
    facts = {"stored": [str(entry) for entry in stored_pair], "apart in real numbers": apart.str(8)}
    return counterexample(stored_pair == pair(two), says, "balls", **facts)


def _first_pair(wave: Callable[[], arb]) -> Evidence:
    last = 100_000
    with precision(80):
        half = wave() / 2
        apart = {step: 2 * abs((step * half).sin()) for step in range(1, last + 1)}
    closest = min(apart, key=lambda step: float(apart[step]))
    least = apart.pop(closest)
    near = closest == 710 and abs(least - arb("6.03e-5")) < arb("5e-8")
    says = f"no two positions up to {last} apart are nearer in the first pair than these, 6.03e-5"
    return enclosed(
        near and all(other >= least for other in apart.values()), says, True, step=closest, distance=least.str(12)
    )
