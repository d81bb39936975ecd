"""Which method keeps a tolerance over shards at the least price: decided once, for all processes.

Prices are those of `parallel_plan` at the rates of the first process, which all got when they agreed on the call. What
a method can prove depends on the numbers themselves. So if the price favours a method that norms say too little of,
processes send each other a sample of their rows; all judge by it, and try the methods that the first one chose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from avow import planner
from avow.calibration import Rate, Rates, rates
from avow.core import BoundEstimate, Kind, Method, Norms, Problem, Sizes
from avow.distributed.consensus import Context, attempt, gather_numbers
from avow.distributed.parallel_plan import Interconnect, Machine, Sharding, Strategy
from avow.distributed.protocols import all_gather, over_processes
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.planner import Candidate, Plan

# Rows of a sample for each landmark, as low-rank attention takes them itself, and rows for all else.
_PER_LANDMARK, _ROWS = 4, 256


def own_rates(device: str) -> dict[str, list[float]]:
    """What a process sends of its machine: the rates of each method, if they were measured, to four digits."""
    known = rates(device, measure=False).measured
    return {name: [float(f"{x:.4g}") for x in dataclasses.astuple(rate)] for name, rate in known.items()}


def choose(
    context: Context, tol: float, confidence: float, link: Interconnect, known: dict[str, list[float]]
) -> tuple[list[Method], str]:
    """The methods to try before exact attention, in order, and why there are no more of them.

    Methods are the same in every process. `known` are rates as `own_rates` gives them.
    """
    machine = Rates({name: Rate(*rate) for name, rate in known.items()}, "rates of the first process")
    offers = candidates(context.sizes, context.ranks, context.shared_queries, tol, confidence, link, machine)
    accepted: frozenset[Kind] = frozenset(("deterministic", "statistical") if confidence < 1 else ("deterministic",))

    def plan(estimate: Callable[[Method], BoundEstimate]) -> tuple[list[Method], str]:
        judged = planner.screened(offers, tol, accepted, estimator=estimate, thrifty=True)
        ranked = Plan(tuple(judged), tol, "")
        return [candidate.method for candidate in ranked.ranked if not candidate.lost], ranked.why_exact

    hopeful, reason = plan(functools.partial(_best_case, confidence=confidence))
    if len(hopeful) == 1:
        return [], reason
    sample = None if context.shared_queries else _sample(context, hopeful)

    def ordered() -> tuple[list[int], str]:
        good, reason = plan(functools.partial(_estimate, context=context, sample=sample, confidence=confidence))
        return [hopeful.index(method) for method in good if not method.is_exact], reason

    mine, error = attempt(ordered)
    order, reason = mine or ([], "")
    # All judge by the same numbers; where rounding decides, the first one's word counts.
    padded = [*order, *[-1] * (len(hopeful) - len(order))]
    agreed = gather_numbers(padded, error, context)[0].long().tolist()
    return [hopeful[index] for index in agreed if index >= 0], reason


def candidates(
    sizes: Sizes, ranks: int, shared_queries: bool, tol: float, confidence: float, link: Interconnect, machine: Machine
) -> list[Candidate]:
    """The methods with a form over shards, priced for so many ranks, cheapest first."""
    methods: list[Method] = [Exact()]
    if not shared_queries:
        methods += [*LowRank.grid(sizes), *RandomFeatures.grid(sizes)]
    elif not sizes.causal:
        methods.append(Sparse(**Sparse.tune({}, sizes, tol, confidence)))
    priced = []
    for method in methods:
        spread = Strategy(method, shared_queries)
        seconds = spread.time(sizes, Sharding(1, ranks), link, machine).whole
        priced.append(Candidate(method, method.cost(spread.part(sizes, ranks)), seconds))
    return sorted(priced, key=lambda candidate: candidate.seconds)


def _best_case(method: Method, confidence: float) -> BoundEstimate:
    """The best bound that a method may come to, whatever the numbers: it shows which methods are too expensive."""
    if isinstance(method, RandomFeatures):
        reason = "" if confidence < 1 else "promises only with a confidence below 1"
        return BoundEstimate(0.0 if confidence < 1 else float("inf"), "statistical", True, reason)
    return BoundEstimate(0.0, "deterministic", True)


def _estimate(method: Method, context: Context, sample: Problem | None, confidence: float) -> BoundEstimate:
    if method.is_exact:
        return _best_case(method, confidence)  # What it can prove shows when it has run: it is the last to be tried.
    with torch.no_grad():
        if sample is not None:
            return method.estimate_bound(sample, confidence)
        query, key, value = (torch.full((1, 1, 1), size, dtype=torch.float64, device="cpu") for size in context.most)
        known = context.problem.detached().with_norms(Norms(query, key, value, 0.0))
        return method.estimate_bound(known, confidence)


def _sample(context: Context, methods: list[Method]) -> Problem:
    """Every so many rows and keys of the whole sequence, the same in every process."""
    size = max([_ROWS, *(_PER_LANDMARK * method.rank for method in methods if isinstance(method, LowRank))])
    p = context.problem.detached()
    with torch.no_grad():
        q = _sampled(p.q, context.rows, size, context)
        k, v = (_sampled(x, context.keys, size, context) for x in (p.k, p.v))
    return dataclasses.replace(p, q=q, k=k, v=v)


def _sampled(
    x: Float[Tensor, "b h n d"], lengths: tuple[int, ...], size: int, context: Context
) -> Float[Tensor, "b h m d"]:
    step = max(1, sum(lengths) // size) | 1  # odd, so that it does not coincide with powers of two in the data
    places = [range(-sum(lengths[:rank]) % step, length, step) for rank, length in enumerate(lengths)]
    mine = x[..., places[context.rank].start :: step, :]
    padded = pad(mine, (0, 0, 0, max(map(len, places)) - mine.shape[-2]))
    gathered = over_processes(all_gather(padded, context.ranks), context.group)  # (ranks, b, h, most, d)
    return torch.cat([one[..., : len(some), :] for one, some in zip(gathered, places, strict=True)], -2)
