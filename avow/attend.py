"""The one verb: attend, and get an answer with its certificate.

The path of a call: `attend` makes a `Problem` of the tensors and a `Requirement` of the tolerances. `_attend_cheapest`
makes a plan and runs its candidates, the cheapest first, or `_attend_by` runs the method that was named; if none
proves enough, `attend_exact` does. Whatever runs goes through `run_certified`: compute, promise, certificate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from avow import planner
from avow.calibration import Rates, rates
from avow.core import (
    BoundEstimate,
    Certificate,
    Computed,
    Method,
    Problem,
    Sizes,
    check_numbers,
    check_tensor,
    dtype_name,
)
from avow.core.audit import Audit, audit_rows
from avow.core.certify import aimed_bound, certify, shortest_ratio
from avow.core.requirement import USUAL_CONFIDENCE, Requirement, check_generator, checked_requirement, random_stream
from avow.errors import ParameterError, RangeError, ShapeError, ToleranceUnreachable
from avow.methods import checked_class, exact_method, method_from, random_features
from avow.methods.random_features import FeatureCount
from avow.numerics.rounding import unit
from avow.planner import Plan

_P = ParamSpec("_P")
_R = TypeVar("_R")

# rtol is aimed by the lengths of a few answers: at most this many rows, and at most one of so many, which is cheap.
_SAMPLED_ROWS, _ROWS_PER_SAMPLE = 8, 64


class Attended(NamedTuple):
    """An answer and what is promised of it."""

    out: Tensor
    certificate: Certificate


def no_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function outside autocast: a bound for the arithmetic asked for must not meet a narrower one."""

    @functools.wraps(function)
    def outside(*arguments: _P.args, **options: _P.kwargs) -> _R:
        given = (*arguments, *options.values())
        kinds = {x.device.type for x in given if isinstance(x, Tensor)} or {"cpu"}
        with contextlib.ExitStack() as stack:
            for kind in filter(torch.amp.is_autocast_available, kinds):
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*arguments, **options)

    return outside


@no_autocast
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    method: str | Method = "auto",
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    confidence: float | None = None,
    coverage: float | None = None,
    generator: torch.Generator | None = None,
    **parameters: Any,
) -> Attended:
    """Attention, and the certificate of the error it made.

    `tol` bounds every row's error, in units of the largest value norm the row sees, and `rtol` in units of the true
    answer's own length; the cheapest method that can prove what was asked runs, and exact attention if none can.
    Without either, the answer is exact. `confidence < 1` also accepts promises that hold with that probability,
    `coverage < 1` promises about that share of the rows. `method` is a name, whose parameters may follow and are
    otherwise chosen for the tolerance, or a `Method` object, which runs as it is. Shapes, masks and scale are those of
    PyTorch's SDPA.

    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> out, certificate = attend(q, k, v, tol=1e-2)
    >>> certificate.bound <= 1e-2
    True
    """
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    )
    requirement = checked_requirement(tol, confidence, coverage, rtol)
    check_generator(generator)
    problem.measure_norms()
    if method == "auto":
        check_automatic(parameters)
        return _attend_cheapest(problem, requirement, generator)
    return _attend_by(method, parameters, problem, requirement, generator)


@no_autocast
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    confidence: float | None = None,
    coverage: float | None = None,
    keys: int | None = None,
) -> Plan:
    """What `attend` would weigh for these tensors, what it would cost, and why each loser lost.

    `keys` prices the plan for another number of keys. Queries grow with them if there are as many, as in
    self-attention; otherwise they stay as they are, so that one query is priced as a step of decoding. Whether `rtol`
    is kept shows in the answer alone: before, methods are weighed by how long a few answers are.
    """
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    )
    requirement = checked_requirement(tol, confidence, coverage, rtol)
    sizes = problem.sizes if keys is None else problem.sizes.with_keys(keys)
    return _make_plan(problem.measure_norms(), requirement, rates(sizes.device), sizes, thrifty=False)


@no_autocast
def audit(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coverage: float = 0.99,
    confidence: float = 0.99,
    method: str | Method = "exact",
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
) -> Audit:
    """Errors of sampled rows of any answer against the target of `method`, and a `sampled` certificate."""
    p = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    ).detached()
    check_generator(generator)
    check_tensor("out", out)
    check_numbers("out", out)
    if tuple(out.shape) != (*p.leading, p.q.shape[-2], p.v.shape[-1]):
        rule = f"must be {(*p.leading, p.q.shape[-2], p.v.shape[-1])}"
        raise ShapeError("out.shape", tuple(out.shape), rule, "pass the answer of this very problem")
    return audit_rows(out.detach(), p.measure_norms(), method_from(method, {}), coverage, confidence, generator)


@no_autocast
def features_needed(
    q: Tensor,
    k: Tensor,
    *,
    tol: float,
    confidence: float = USUAL_CONFIDENCE,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> FeatureCount:
    """How many random features would certify `tol`, from q and k alone; infinite when no feasible number does."""
    problem = Problem.of(q, k, k, causal=causal, scale=scale, enable_gqa=enable_gqa).detached()
    requirement = checked_requirement(tol, confidence)
    if not requirement.tol or requirement.confidence == 1:
        remedy = "try tol=1e-2, confidence=0.99"
        raise ParameterError("tol, confidence", (tol, confidence), "must allow some error", remedy)
    return random_features.features_needed(problem, requirement.tol, requirement.confidence)


def check_automatic(parameters: Mapping[str, object]) -> None:
    """Raise if a method's parameters were given and none was named."""
    for name, value in parameters.items():
        raise ParameterError(name, repr(value), "belongs to a named method", "name one with method=")


def _attend_cheapest(problem: Problem, requirement: Requirement, generator: torch.Generator | None) -> Attended:
    """The answer of the cheapest method that proves what was asked; of exact attention if none does."""
    if requirement.exact or problem.empty:
        return attend_exact(problem, requirement)
    plan = _make_plan(problem, requirement, rates(problem.q.device.type, measure=False), problem.sizes, thrifty=True)
    offers = [candidate for candidate in plan.ranked if not candidate.lost and not candidate.method.is_exact]
    # Audits of several answers, of which the first that passes is kept, share one chance of being wrong.
    shared = requirement
    if requirement.coverage is not None:
        shared = requirement._replace(confidence=1 - (1 - requirement.stated) / max(len(offers), 1))
    failures: list[str] = []
    needed = math.inf
    for candidate in offers:
        if candidate.estimate is not None and candidate.estimate.bound > needed:
            continue  # the answers that were seen are shorter than was thought
        attended = run_certified(candidate.method, problem, shared, generator)
        certificate = attended.certificate
        if requirement.met_by(certificate):
            return attended
        proved = f"{certificate.bound:.1e}" + (f" ({certificate.relative:.1e} relative)" if requirement.rtol else "")
        failures.append(f"{candidate.method.label} could prove only {proved}")
        if requirement.rtol is not None:
            needed = _error_budget(problem, requirement, attended) or 0.0
    return attend_exact(problem, requirement, "; ".join(failures) or plan.why_exact)


def _attend_by(
    method: str | Method,
    parameters: Mapping[str, Any],
    problem: Problem,
    requirement: Requirement,
    generator: torch.Generator | None,
) -> Attended:
    """The answer of one method; raises if that does not prove what was asked."""
    kind = checked_class(method, parameters)
    if kind.is_exact and not parameters and not isinstance(method, Method):
        return attend_exact(problem, requirement)

    def tuned(budget: float | None) -> Method:
        if isinstance(method, Method):
            return method
        return kind(**kind.tune(parameters, problem.sizes, budget, requirement.confidence))

    chosen = tuned(_error_budget(problem, requirement))
    chosen.check(problem.sizes)
    if chosen.is_exact and not problem.empty:
        estimate = chosen.estimate_bound(problem.detached(), 1.0)
        if estimate.kind == "none":
            name, value = (", ".join(map(str, x)) for x in (chosen.parameters, chosen.parameters.values()))
            raise RangeError(f"{chosen.name}: {name}", value, estimate.reason, 'use precision="float64"')
    attended = run_certified(chosen, problem, requirement, generator)
    if requirement.rtol is not None and not requirement.met_by(attended.certificate):
        # How long the answers are is known now, so that what is left to the method may be aimed again.
        again = tuned(_error_budget(problem, requirement, attended))
        attended = attended if again == chosen else run_certified(again, problem, requirement, generator)
    certificate = attended.certificate
    proved = {"tol": (certificate.bound, ""), "rtol": (certificate.relative, " relative to the answer")}
    for name, (bound, scope) in proved.items():
        limit = getattr(requirement, name)
        if limit is not None and not certificate.keeps(**{name: limit}):
            rule, remedy = f"is below the {bound:.2e} it can prove{scope}", f'use method="auto" or a wider {name}'
            raise ToleranceUnreachable(f"{chosen.name}: {name}", limit, rule, remedy, bound)
    return attended


def attend_exact(problem: Problem, requirement: Requirement, reason: str = "") -> Attended:
    """Exact attention in the narrowest arithmetic that cannot overflow and keeps the tolerances; `reason` says why."""
    best, own, detached = math.inf, math.inf, problem.detached()
    for method in exact_method().grid(problem.sizes):
        estimate = BoundEstimate(0.0, "deterministic", True) if problem.empty else method.estimate_bound(detached, 1.0)
        # Without a tolerance any answer will do that does not overflow: the widest arithmetic comes last.
        if estimate.kind == "none" if requirement.tol is None else estimate.bound > requirement.tol:
            best = min(best, estimate.bound)
            continue
        # How an answer's error compares with its own length is known when it is there.
        attended = run_certified(method, problem, requirement, None, reason)
        if requirement.exact or attended.certificate.keeps(requirement.tol, requirement.rtol):
            return attended
        best, own = min(best, attended.certificate.bound), min(own, attended.certificate.relative)
    raise _unreachable(problem, requirement, best, own)


def run_certified(
    method: Method, problem: Problem, requirement: Requirement, generator: torch.Generator | None, reason: str = ""
) -> Attended:
    """A method's answer with its certificate: what the method promises, or what an audit of sampled rows finds."""
    if problem.empty:
        nothing = sum(x.sum() for x in (problem.q, problem.k, problem.v)) * 0
        computed = Computed(problem.v.new_zeros(*problem.q.shape[:-1], problem.v.shape[-1]) + nothing)
    else:
        stream = random_stream(generator, problem.q.device) if method.statistical else generator
        computed = method.compute(problem.measure_norms(), stream)
    certificate = certify(method, problem, computed, requirement.stated)  # before reshaping: rows are canonical
    if requirement.coverage is not None and certificate.kind != "deterministic" and not problem.empty:
        out, share, confidence = computed.out.detach(), requirement.coverage, requirement.stated
        audited = audit_rows(out, problem.detached(), method, share, confidence, generator).certificate
        certificate = dataclasses.replace(audited, parameters=certificate.parameters, cost=certificate.cost)
    out = computed.out.reshape(*problem.leading, *computed.out.shape[-2:])
    return Attended(out, dataclasses.replace(certificate, reason=reason or certificate.reason))


def _make_plan(problem: Problem, requirement: Requirement, known: Rates, sizes: Sizes, thrifty: bool) -> Plan:
    """What each candidate costs at these sizes, and what it may promise of this problem."""
    detached = problem.detached()

    def estimate_bound(method: Method) -> BoundEstimate:
        if problem.empty:
            return BoundEstimate(0.0, "deterministic", True, "there is nothing to attend to")
        with torch.no_grad():
            return method.estimate_bound(detached, requirement.confidence)

    offers = planner.candidates(sizes, known)
    exact = min(offer.seconds for offer in offers if offer.method.is_exact)
    aim = None if requirement.rtol is None else _error_budget(problem, requirement)
    ranked = planner.screened(offers, requirement.tol, requirement.kinds, estimate_bound, thrifty, aim)
    return Plan(tuple(ranked), requirement.tol, known.source, exact, requirement.rtol, aim)


def _error_budget(problem: Problem, requirement: Requirement, attended: Attended | None = None) -> float | None:
    """The bound to aim at, relative to the longest value: `tol`, or what `rtol` needs of answers as long as these.

    Without an answer its length is that of a few rows; if even those cost too much, that of a flat head.
    """
    if requirement.rtol is None:
        return requirement.tol
    if problem.empty:
        ratio = 1.0
    elif attended is not None:
        shape = (*problem.q.shape[:-1], problem.v.shape[-1])
        ratio = shortest_ratio(problem, attended.out.reshape(shape), attended.certificate.rows.reshape(shape[:-1]))
    elif count := min(_SAMPLED_ROWS, problem.q.shape[-2] // _ROWS_PER_SAMPLE):
        index = torch.linspace(0, problem.q.shape[-2] - 1, count, device=problem.q.device).long()
        rows = problem.detached().rows(index)
        with torch.no_grad():
            out = exact_method()().compute(rows).out
        ratio = shortest_ratio(rows.with_norms(problem.norms), out, out.new_zeros(out.shape[:-1], dtype=torch.float64))
    else:
        ratio = 1 / math.sqrt(problem.k.shape[-2])
    return min(math.inf if requirement.tol is None else requirement.tol, aimed_bound(ratio, requirement.rtol))


def _unreachable(problem: Problem, requirement: Requirement, best: float, own: float) -> ToleranceUnreachable:
    """The error for exact attention that proves `best` relative to the longest value, and `own` to the answer."""
    dtype = problem.q.dtype
    name = dtype_name(dtype)
    wider = f"convert q, k and v to {'float64' if dtype == torch.float32 else 'float32'}"
    tol = math.inf if requirement.tol is None else requirement.tol
    if requirement.rtol is not None and best <= tol:
        rule = f"is below {own:.2e}, the best bound relative to the answer that can be proved in {name}"
        hint = "an answer near zero has no relative bound; ask for tol= instead"
        remedy = hint if dtype == torch.float64 else f"{wider}, or ask for tol="
        return ToleranceUnreachable("rtol", requirement.rtol, rule, remedy, own)
    remedy = wider
    if dtype == torch.float64 or best > 4 * unit(dtype):
        remedy = f"shrink the logits: scale·|q|·|k| is too large for tol={tol:g}"
    rule = f"is below {best:.2e}, the best bound that can be proved in {name}"
    return ToleranceUnreachable("tol", tol, rule, remedy, best)
