"""How a query could fail to copy, be shorter than it may be, or copy what lies inside a hull."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flint import arb
from sympy import log

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.catalogue.queries import Hull, Lengths
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _separated(lengths: Lengths) -> Excess:
    stated, general = balled(lengths.stated, 2), balled(lengths.general, 3)

    def excess(case: Numbers) -> arb:
        eps, *turns = case
        # Unit keys from 20° to 180° away from key 1; the first formula speaks of distances of at least 1.
        cosines = [(arb.pi() * (1 + 8 * turn) / 9).cos() for turn in turns]
        keys, apart = arb(len(turns) + 1), (2 - 2 * most(cosines)).sqrt()

        def missing(length: arb) -> arb:
            return 1 / (1 + eps) - 1 / (1 + total((length * (cosine - 1)).exp() for cosine in cosines))

        return missing(general(keys, eps, apart)).max(missing(stated(keys, eps)).min(apart - 1))

    return excess


def _shorter(query: Any) -> Excess:
    first, others = (balled(lambda n, eps, i=i: query(n, eps, log)[i], 2) for i in (0, 1))

    def excess(case: Numbers) -> arb:
        eps, n = case
        # The shortest copies with equality, which no ball can show: it is asked for a thousandth more.
        asked = eps * 999 / 1000
        along, against = first(n, asked), others(n, asked)
        weight = 1 / (1 + (n - 1) * (against - along).exp())
        length = (along * along + (n - 1) * against * against).sqrt()
        return (weight - 1 / (1 + eps)).min((n / eps).log() - length)

    return excess


def _uncopied(hull: Hull) -> Excess:
    """Three keys on a line: what is missing to the weight wanted, with the best query that there is."""

    def excess(case: Numbers) -> arb:
        eps, target, one, two = case[:4]
        before, after = target - one.min(two), one.max(two) - target
        if not (before > 0 and after > 0):
            # Outside the others, or level with one: a longer query always gains.
            return before.min(after)
        # The weight 1/(1 + e^(after·y) + e^(−before·y)) is largest where its slope is zero.
        y = (before / after).log() / (before + after)
        return 1 / (1 + eps) - 1 / (1 + (after * y).exp() + (-before * y).exp())

    return excess


def _by_its_hull(hull: Hull) -> Excess:
    def excess(case: Numbers) -> arb:
        eps, target, one, two, share, query = case
        own = 1 / (1 + (query * (1 - hull.target)).exp() + (-query * (1 + hull.target)).exp())
        # Shares of a convex combination are not negative.
        part = abs(share) if hull.share.is_nonnegative else share
        inside = part * one + (1 - part) * two
        mixed = intervals.softmax([query * inside, query * one, query * two])[0]
        # Outside, the query from the nearest end to the key copies once it is long enough.
        away = 1 + abs(target)
        length = (2 / eps).log() / (away * away)
        copied = intervals.softmax([length * away * x for x in (one.max(two) + away, one, two)])[0]
        return most([own - arb(1) / 2, mixed - arb(1) / 2, 1 / (1 + eps) - copied])

    return excess


_EPS = {"ε": (0.01, 0.99)}

HUNTS: Mapping[str, Hunt] = {
    "copy-separated": Hunt(
        _EPS | numbered("turn₂ turn₃ turn₄ turn₅", 0, 1),
        _separated,
        reads="Key i lies 20° + 160°·turn away from key 1, all of them of length 1.",
    ),
    "copy-shortest": Hunt(
        _EPS | {"n": (2, 200)},
        _shorter,
        whole=frozenset("n"),
        reads="n orthonormal keys, and the shorter query made for 0.999·ε.",
    ),
    "copy-possible": Hunt(
        _EPS | numbered("k₁ k₂ k₃", -3, 3) | {"λ": (-1, 1), "q": (-9, 9)},
        _uncopied,
        _by_its_hull,
        reads="Keys on a line. As stated, the best of all queries; else q, and a target λ of k₂ and the rest of k₃.",
    ),
}
