"""One door to attention over shards of a sequence: whatever the method, the same words and one certificate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import USUAL_CONFIDENCE, Attended, as_given, check_automatic, checked_wishes
from avow.contract import Method, Problem
from avow.distributed.agreement import Meeting, agree, digest, meet
from avow.distributed.choosing import chosen, own_rates
from avow.distributed.exact import attend_keys
from avow.distributed.low_rank import attend_low_rank
from avow.distributed.ring import attend_ring
from avow.distributed.shards import paired
from avow.distributed.sparse import attend_sparse
from avow.distributed.states import attend_states
from avow.distributed.traffic import Group
from avow.errors import NotDifferentiable, ParameterError, ToleranceUnreachable, UnknownMethod
from avow.links import Link, usual
from avow.maths import rounding
from avow.methods import method_named
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from avow.params import check_parameters

# Methods of which each process brings its own rows; of sparse attention all bring the same, of exact either.
_OWN = (Separable, RandomFeatures, LowRank)


class _Asked(NamedTuple):
    """What one process asks for, before others agree."""

    method: str
    parameters: dict[str, Any]
    tol: float | None
    confidence: float | None
    shared_queries: bool

    @property
    def words(self) -> dict[str, object]:
        """What all must ask alike."""
        return {"method": self.method, **self.parameters, "tol": self.tol, "confidence": self.confidence}

    @property
    def draws(self) -> bool:
        """Whether something may be drawn at random."""
        named = any(kind.random and kind.name == self.method for kind in _OWN)
        return named or (self.method == "auto" and self.tol is not None and not self.shared_queries)

    @property
    def named(self) -> Method:
        """The method with its parameters."""
        kind, served = method_named(self.method), (Exact, Sparse, *_OWN)
        if kind not in served:
            remedy = f"use one of {', '.join(one.name for one in served)}"
            raise UnknownMethod("method", repr(self.method), "has no form over shards", remedy)
        check_parameters(self.method, kind, self.parameters)
        return kind(**self.parameters)

    def check(self, problem: Problem) -> None:
        """Raise where this process cannot ask so."""
        checked_wishes(self.tol, self.confidence)
        if self.method == "auto":
            return check_automatic(self.parameters)
        method = self.named
        if isinstance(method, Sparse) and not self.shared_queries:
            remedy = 'give all processes the same queries, or use method="exact"'
            raise ParameterError("sparse: shared_queries", False, "must all be known to every process", remedy)
        if isinstance(method, Sparse) and problem.causal:
            raise ParameterError("sparse: causal", True, "has no form over shards", 'use method="exact"')
        if isinstance(method, _OWN):
            if self.shared_queries:
                remedy = "pass shared_queries=False and each process's own rows"
                raise ParameterError(f"{method.name}: shared_queries", True, "must not be the same rows", remedy)
            paired(problem)
        return None


class _Wish(NamedTuple):
    """What the caller will accept, and what chance has to do with it."""

    tol: float | None
    confidence: float
    generator: torch.Generator | None

    @property
    def stated(self) -> float:
        return self.confidence if self.confidence < 1 else USUAL_CONFIDENCE


@as_given
def attend(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*keys s d"],
    v: Float[Tensor, "*keys s e"],
    *,
    group: Group = None,
    tol: float | None = None,
    method: str = "auto",
    shared_queries: bool = True,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    confidence: float | None = None,
    generator: torch.Generator | None = None,
    link: Link | None = None,
    **parameters: Any,
) -> Attended:
    """Attention to the keys of all processes, of which `k` and `v` are this one's, and the certificate of its error.

    All else is as in `avow.attend`; the sequence is what ranks hold, in their order, and `causal` speaks of places in
    the whole of it. Shards may differ in length and may be empty. With `shared_queries` all processes bring the same
    queries and get the same answer (exact and sparse attention); without, each brings its own rows and gets theirs
    (exact attention, by blocks that go round a ring; separable, random_features and low_rank, by states). Then causal
    rows of all but exact attention are those of the keys beside them.

    With `tol`, `method="auto"` runs the cheapest method that proves it for all rows; prices are those of
    `avow plan --ranks` for this `link`. Where processes disagree on what they ask, or one of them cannot attend, all
    of them raise an error that names the rank. Gradients flow to every shard, so that all processes go backward
    together: of one loss that each computes where queries are shared, else of the sum of all losses. Generators must
    be alike; without them, the first one's seed counts.
    """
    asked = _Asked(method, parameters, tol, confidence, shared_queries)
    words = asked.words | {"link": link}
    if generator is not None:
        words["digest of generator"] = digest(generator.get_state())
    seed = int(torch.randint(2**62, ())) if generator is None and asked.draws else 0
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    met = meet(
        *_four(q, k, v),
        group=group,
        causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
        shared_queries=shared_queries,
        asked=words,
        reading=True,
        check=asked.check,
        telling=[seed, own_rates(device) if method == "auto" and tol is not None else {}],
    )
    if generator is None and asked.draws:
        generator = torch.Generator().manual_seed(met.told[0][0])
    wish = _Wish(*checked_wishes(tol, confidence), generator)
    if method == "auto":
        attended = _automatic(met, wish, usual(device) if link is None else link)
    else:
        attended = _kept(asked.named, met, wish)
    shape = (*q.shape[:-1], v.shape[-1])
    rows = attended.certificate.rows.reshape(shape[:-1])
    return Attended(attended.out.reshape(shape), dataclasses.replace(attended.certificate, rows=rows))


def _four(*tensors: Tensor) -> list[Tensor]:
    """The same tensors with four axes, where they are such as can be; if not, the processes tell each other of it."""
    if not all(isinstance(x, Tensor) and x.ndim >= 2 for x in tensors) or len({x.ndim for x in tensors}) > 1:
        return list(tensors)
    lead = (1,) * (4 - tensors[0].ndim)
    return [x.reshape(*lead, *x.shape).flatten(0, -4) for x in tensors]


def _automatic(met: Meeting, wish: _Wish, link: Link) -> Attended:
    """Exact attention, unless something cheaper proves the tolerance."""
    z = met.sizes
    if wish.tol is None or not z.queries * z.keys * z.value_dim:
        return _run(Exact(), met, wish)
    choice = chosen(met, wish.tol, wish.confidence, link, met.told[0][1])
    tried = []
    for method in choice.methods:
        try:
            return _kept(method, met, wish)
        except (ToleranceUnreachable, NotDifferentiable) as problem:
            # All processes raise it alike, or none does.
            tried.append(f"{method.name}: {problem.rule}")
    out, certificate = _run(Exact(), met, wish)
    return Attended(out, dataclasses.replace(certificate, reason="; ".join(tried) or choice.reason))


def _kept(method: Method, met: Meeting, wish: _Wish) -> Attended:
    """The answer, where all processes can prove the tolerance for theirs."""
    method.check(met.sizes)
    attended = _run(method, met, wish)
    if wish.tol is None or not isinstance(method, _OWN):
        return attended
    bound = attended.certificate.bound if attended.certificate.kind != "none" else math.inf
    bound = max(agree({}, bound, None, met.group, met.device))
    if not bound <= wish.tol:
        rule, remedy = f"is below the {bound:.2e} it can prove", 'use method="auto" or a wider tol'
        raise ToleranceUnreachable(f"{method.name}: tol", wish.tol, rule, remedy, bound)
    return attended


def _run(method: Method, met: Meeting, wish: _Wish) -> Attended:
    if isinstance(method, Sparse):
        p = met.problem
        return attend_sparse(
            p.q, p.k, p.v, method=method, group=met.group, tol=wish.tol, scale=met.scale, enable_gqa=True
        )
    if isinstance(method, LowRank):
        return attend_low_rank(met, method, wish.stated, wish.generator)
    if isinstance(method, Separable | RandomFeatures):
        return attend_states(met, method, wish.stated, wish.generator)
    assert isinstance(method, Exact)
    # A half-precision answer is rounded once, after the merge. What that cannot prove, float64 may, unless told else.
    first = method.arithmetic(rounding.accumulator(met.problem.q.dtype))
    last = torch.float64 if wish.tol is not None and method.precision == "native" else first
    serve = attend_keys if met.shared_queries else attend_ring
    return serve(met, wish.tol, tuple(dict.fromkeys((first, last))))
