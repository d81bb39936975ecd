"""What each method can do for each head of a layer: certified on sampled rows, priced beside exact attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avow.calibration import Rates, least_seconds
from avow.core import Computed, Kind, Method, Norms, Problem
from avow.core.certify import certify
from avow.errors import AvowError
from avow.integrations.transformers.head_figures import keys_seen
from avow.integrations.transformers.setting import softmax_methods
from avow.methods.exact import Exact
from avow.methods.sparse import Sparse
from avow.numerics.sketch import sketched

CONFIDENCE = 0.99
"""At which methods that draw at random state their promise."""
# A bound of 2 says nothing: answer and target are both averages of values.
_VAIN = 2.0


@dataclass(frozen=True)
class Offer:
    """One setting of a method for one head.

    `predicted` and `measured` are shares of exact attention's cost. For `sparse` that is bytes read to go on from the
    text, sketch included: predicted from the tokens that have all but tol/2 of the mass, which would do if someone told
    them beforehand; measured as what had to be read for the proof. For the others, and where a layer sees all of a text
    at once and never goes on, it is time over the whole text: predicted by the planner, measured only where the bound
    is within the tolerance.
    """

    method: str
    parameters: dict[str, Any]
    bound: float | None
    """None where nothing is promised."""
    kind: Kind
    predicted: float
    measured: float | None = None
    together: float | None = None
    """What is read for all query heads that share this one's keys: some of it serves several, all of it is read."""

    @property
    def share(self) -> float:
        """The cost that a plan reckons with: measured where it was, predicted where not."""
        found = (x for x in (self.together, self.measured) if x is not None)
        return next(found, self.predicted)

    def keeps(self, tol: float) -> bool:
        return self.bound is not None and self.bound <= tol


def layer_offers(problem: Problem, index: Tensor, tol: float, known: Rates, needed: list[float]) -> list[list[Offer]]:
    """The offers for each head of a layer; `index` names the rows that are certified.

    `needed` are the shares of tokens, head by head, that have all but tol/2 of the mass.
    """
    norms = problem.norms
    own = Norms(norms.q[..., index], norms.k, norms.v, norms.slack)
    rows = problem.rows(index.to(problem.q.device)).with_norms(own)
    found: list[list[Offer]] = [[] for _ in range(problem.q.shape[1])]
    for method in _settings(problem, tol):
        if isinstance(method, Sparse) and _goes_on(problem):
            offers = _sparse(method, rows, needed)
        else:
            offers = _linear(method, problem, rows, known, tol)
        for head, offer in enumerate(offers):
            found[head].append(offer)
    return found


def _goes_on(p: Problem) -> bool:
    """Whether rows see what is before them, so that a text can be gone on with: the first does not see the last key."""
    if p.causal or p.q.shape[-2] != p.k.shape[-2]:
        return True
    return p.allowed is not None and p.allowed.shape[-2] > 1 and not bool(p.allowed[..., 0, -1].any())


def _settings(p: Problem, tol: float) -> Iterator[Method]:
    """Every method's settings worth trying, and the one that it would aim at the tolerance."""
    for kind in softmax_methods():
        if kind.name == "exact":
            continue
        yield from kind.settings(p.sizes)
        if aimed := kind.tune({}, p.sizes, tol, 1.0):
            yield kind(**aimed)


def _sparse(method: Sparse, rows: Problem, needed: list[float]) -> Iterator[Offer]:
    trace = (computed := method.compute(rows)).trace
    certificate = certify(method, rows, computed, 1.0)
    seen, shared = keys_seen(rows), rows.q.shape[1] // rows.k.shape[1]
    sketch = sketched(rows.k, method.bits)
    beside = sketch.bytes_per_row / ((rows.k.shape[-1] + rows.v.shape[-1]) * rows.k.element_size())
    for head in range(rows.q.shape[1]):
        most = seen[0, head if seen.shape[1] > 1 else 0].sum().clamp(min=1)
        read, union = (float(x.sum() / most) for x in (trace.read[0, head], trace.distinct[0, head // shared]))
        bound = float(certificate.rows[0, head].amax())
        yield Offer(
            method.name,
            method.parameters,
            bound if bound < _VAIN else None,
            certificate.kind,
            min(needed[head] + beside, 1 + beside),
            read + beside,
            min(union, 1.0) + beside,
        )


def _linear(method: Method, whole: Problem, rows: Problem, known: Rates, tol: float) -> Iterator[Offer]:
    """Offers of a method whose cost is that of whole texts; each head by itself, since one hopeless head is no reason
    to leave the others.
    """
    shared = whole.q.shape[1] // whole.k.shape[1]
    exact = next(iter(Exact.settings(whole.sizes)))
    for head in range(whole.q.shape[1]):
        one = _own(whole, head, shared)
        predicted = known.seconds(method, one.sizes) / known.seconds(exact, one.sizes)
        bound, kind = _proved(method, one, _own(rows, head, shared))
        measured = None
        if bound is not None and bound <= tol and predicted < 1:
            measured = _seconds(method, one.with_norms(None)) / _seconds(exact, one.with_norms(None))
        yield Offer(method.name, method.parameters, bound, kind, predicted, measured)


def _proved(method: Method, whole: Problem, rows: Problem) -> tuple[float | None, Kind]:
    """The largest bound of the sampled rows. A method that foresees none is not run: from norms, or from every so many
    tokens, of which as many landmarks leave less over than of all.
    """
    try:
        method.check(rows.sizes)
        foreseen = method.estimate_bound(whole, CONFIDENCE)
        if foreseen.bound >= _VAIN:
            return None, "none"
        computed: Computed = method.compute(rows, torch.Generator().manual_seed(0))
    except AvowError:
        return None, "none"
    certificate = certify(method, rows, computed, CONFIDENCE)
    useful = certificate.kind != "none" and math.isfinite(certificate.bound) and certificate.bound < _VAIN
    return (certificate.bound if useful else None), certificate.kind


def _seconds(method: Method, problem: Problem) -> float:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return least_seconds(lambda: method.compute(problem, generator), problem.q.device, 1)


def _own(p: Problem, head: int, shared: int) -> Problem:
    """The problem of one head, with its norms."""
    norms, key = p.norms, head // shared
    own = Norms(norms.q[:, head : head + 1], norms.k[:, key : key + 1], norms.v[:, key : key + 1], norms.slack)
    return p.head(0, head, key).with_norms(own)
