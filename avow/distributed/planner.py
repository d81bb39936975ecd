"""Which method keeps a tolerance over shards, and at the least price: decided once, for all processes.

Prices are those of `parallel_plan` at the rates of the first process, which it told when they met: every process
reckons the same. What a method can prove must be looked for among the numbers themselves. So where the price speaks for
one that cannot tell from norms, processes tell each other a sample of their rows; the first one judges by it, and the
others hear whom to try in what order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from avow import planner
from avow.calibration import Rate, Rates, rates
from avow.core import BoundEstimate, Kind, Method, Norms, Problem, Sizes
from avow.distributed.comm_cost import Interconnect
from avow.distributed.consensus import Context, agree, attempt
from avow.distributed.exchange import gathered
from avow.distributed.parallel_plan import Machine, Sharding, strategy
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.planner import Candidate, Plan

# Rows of a sample for each landmark, as low-rank attention takes them itself, and rows for all else.
_PER_LANDMARK, _ROWS = 4, 256


class Choice(NamedTuple):
    """Methods to try before exact attention, in order, and why there are no more of them."""

    methods: list[Method]
    reason: str


def own_rates(device: str) -> dict[str, list[float]]:
    """What a process tells of its machine: the rates of each method, where they were measured, to four digits."""
    known = rates(device, measure=False).measured
    return {name: [float(f"{x:.4g}") for x in dataclasses.astuple(rate)] for name, rate in known.items()}


def chosen(met: Context, tol: float, confidence: float, link: Interconnect, known: dict[str, list[float]]) -> Choice:
    """The methods that may prove a tolerance at a lower price than exact attention, the same in every process.

    `known` are rates as `own_rates` tells them.
    """
    machine = Rates({name: Rate(*rate) for name, rate in known.items()}, "rates of the first process")
    offers = candidates(met.sizes, len(met.keys), met.shared_queries, tol, confidence, link, machine)
    accepted: frozenset[Kind] = frozenset(("deterministic", "statistical") if confidence < 1 else ("deterministic",))
    judged = functools.partial(planner.judged, offers, tol, accepted, thrifty=True)
    hopes = Plan(tuple(planner.cheapest(judged(foresee=functools.partial(_hoped, confidence=confidence)))), tol, "")
    asked = [candidate.method for candidate in hopes.ranked if not candidate.lost]
    if len(asked) == 1:
        return Choice([], hopes.why_exact)
    sample = None if met.shared_queries else _sample(met, asked)

    def ordered() -> tuple[list[int], str]:
        foresee = functools.partial(_foreseen, met=met, sample=sample, confidence=confidence)
        made = Plan(tuple(planner.cheapest(judged(foresee=foresee))), tol, "")
        good = [candidate.method for candidate in made.ranked if not candidate.lost]
        return [asked.index(method) for method in good if method.name != "exact"], made.why_exact

    mine, problem = attempt(ordered) if met.here == 0 else (None, None)
    order, reason = agree({}, mine, problem, met.group)[0]
    return Choice([asked[index] for index in order], reason)


def candidates(
    sizes: Sizes, ranks: int, shared_queries: bool, tol: float, confidence: float, link: Interconnect, machine: Machine
) -> list[Candidate]:
    """The methods with a form over shards, priced for so many ranks, cheapest first."""
    methods: list[Method] = [Exact()]
    if not shared_queries:
        methods += [*LowRank.settings(sizes), *RandomFeatures.settings(sizes)]
    elif not sizes.causal:
        methods.append(Sparse(**Sparse.tune({}, sizes, tol, confidence)))
    found = []
    for method in methods:
        spread = strategy(method, shared_queries)
        seconds = spread.spent(sizes, Sharding(1, ranks), link, machine).whole
        found.append(Candidate(method, method.cost(spread.part(sizes, ranks)), seconds))
    return sorted(found, key=lambda candidate: candidate.seconds)


def _hoped(method: Method, confidence: float) -> BoundEstimate:
    """The best that a method may come to, whatever the numbers: by this one tells who is too expensive."""
    if method.name == "random_features":
        reason = "" if confidence < 1 else "promises only with a confidence below 1"
        return BoundEstimate(0.0 if confidence < 1 else float("inf"), "statistical", True, reason)
    return BoundEstimate(0.0, "deterministic", True)


def _foreseen(method: Method, met: Context, sample: Problem | None, confidence: float) -> BoundEstimate:
    if method.name == "exact":
        return _hoped(method, confidence)  # What it can prove shows when it has run: it is the last to be tried.
    with torch.no_grad():
        if sample is not None:
            return method.estimate_bound(sample, confidence)
        query, key, value = (torch.full((1, 1, 1), size, dtype=torch.float64, device="cpu") for size in met.most)
        return method.estimate_bound(met.problem.detached().with_norms(Norms(query, key, value, 0.0)), confidence)


def _sample(met: Context, asked: list[Method]) -> Problem:
    """Every so many rows and keys of the whole sequence, the same in every process."""
    size = max([_ROWS, *(_PER_LANDMARK * method.rank for method in asked if isinstance(method, LowRank))])
    p = met.problem.detached()
    with torch.no_grad():
        q = _taken(p.q, met.rows, size, met)
        k, v = (_taken(x, met.keys, size, met) for x in (p.k, p.v))
    return dataclasses.replace(p, q=q, k=k, v=v)


def _taken(x: Float[Tensor, "b h n d"], lengths: tuple[int, ...], size: int, met: Context) -> Float[Tensor, "b h m d"]:
    step = (
        max(1, sum(lengths) // size) | 1
    )  # odd, so that it does not fall in with the powers of two that data repeats by
    places = [range(-sum(lengths[:rank]) % step, length, step) for rank, length in enumerate(lengths)]
    mine = x[..., places[met.here].start :: step, :]
    most = max(map(len, places))
    told = gathered(pad(mine, (0, 0, 0, most - mine.shape[-2])), met.group)  # (ranks, b, h, most, d)
    return torch.cat([one[..., : len(some), :] for one, some in zip(told, places, strict=True)], -2)
