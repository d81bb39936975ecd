"""Attention over shards of a sequence by one call: whatever the method, the same arguments and one certificate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from avow.attend import Attended, check_automatic
from avow.core import Method, Problem
from avow.core.requirement import Requirement, check_generator, checked_requirement
from avow.core.sdpa_names import mask_and_causal
from avow.distributed.consensus import (
    Context,
    attempt,
    check_consistent,
    check_dense,
    digest,
    gather_numbers,
    outside_autocast,
    storage,
)
from avow.distributed.exact import attend_keys
from avow.distributed.low_rank import attend_linear
from avow.distributed.parallel_plan import Interconnect, usual_interconnect
from avow.distributed.planner import choose, own_rates
from avow.distributed.point_to_point import Group
from avow.distributed.ring import attend_ring
from avow.distributed.sparse import attend_within, error_budget
from avow.errors import (
    AvowError,
    DtypeError,
    ParameterError,
    ShapeError,
    ToleranceUnreachable,
    UnknownMethod,
    value_text,
)
from avow.methods import method_from
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse

# Methods of which each process brings its own rows; of sparse attention all bring the same, of exact either.
_OWN_ROWS = (Separable, RandomFeatures, LowRank)


class _Call(NamedTuple):
    """What all processes agreed on, what they will accept, what draws, and what rows may see."""

    context: Context
    requirement: Requirement
    generator: torch.Generator | None
    mask: Bool[Tensor, "#b #h #n s"] | None


def attend(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*keys s d"],
    v: Float[Tensor, "*keys s e"],
    *,
    group: Group = None,
    tol: float | None = None,
    rtol: float | None = None,
    method: str | Method = "auto",
    shared_queries: bool = True,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    confidence: float | None = None,
    generator: torch.Generator | None = None,
    link: Interconnect | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
    **parameters: Any,
) -> Attended:
    """Attention to the keys of all processes, of which `k` and `v` are this one's, and the certificate of its error.

    Everything that is not said here is as in `avow.attend`. The sequence is what ranks hold, in their order. Shards may
    differ in length and may be empty. Without `shared_queries`, causal rows of all methods but exact attention are
    those of the keys beside them. If processes disagree on what they ask, or one of them cannot attend, all of them
    raise an error that names the rank. Gradients flow to every shard, so that all processes go backward together: of
    one loss that each computes if queries are shared, else of the sum of all losses.

    Args:
        q: queries, (batch, heads, n, dim): the same in all processes, or each process's own.
        k: this process's keys, (batch, key heads, s, dim).
        v: this process's values, (batch, key heads, s, value dim).
        group: the processes; None is all of them.
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees.
        rtol: the same relative to the length of the row's true answer.
        method: "auto" runs the cheapest method that proves the tolerances for all rows; or a name, or a `Method`
            object. Over shards there are exact, sparse, separable, random_features and low_rank.
        shared_queries: True: all processes bring the same queries and get the same answer, by exact or sparse
            attention. False: each brings its own rows and gets theirs, by exact attention (blocks go round a ring), or
            by separable, random_features or low_rank attention (states are combined).
        mask: booleans, for exact attention: which keys this process's queries may see, of its own keys if queries are
            shared, else of all.
        causal: whether a row sees keys up to its own place in the whole sequence alone.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads.
        confidence: accept bounds that hold with this probability for each row.
        generator: what methods draw from; the same state in all processes. None: the first one's seed counts.
        link: what connects the processes, for prices as `avow plan-ranks` gives; None is usual for the device.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.
        dropout_p: must be 0: no certificate covers attention weights that are dropped at random.
        **parameters: parameters of a named method.

    Returns:
        This process's answer and its certificate.

    Raises:
        InputError: processes disagree, or one of them was given what does not fit.
        ToleranceUnreachable: the method cannot prove the tolerance.
        LostRank: a process has ended, or is silent.

    >>> import torch, torch.distributed as dist
    >>> import avow.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> avow.distributed.attend(q, k, v, tol=1e-2).certificate.keeps(1e-2)
    True
    >>> dist.destroy_process_group()
    """
    named, misnamed = attempt(lambda: mask_and_causal(mask, causal, attn_mask, is_causal, dropout_p))
    mask, causal = named or (mask, causal)
    request = Request(method, parameters, tol, confidence, shared_queries, mask, generator, rtol, misnamed)
    seed = int(torch.randint(2**62, (), device="cpu")) if generator is None and request.draws else 0
    context = check_consistent(
        *(q, k, v),
        group=group,
        causal=causal,
        mask=mask if shared_queries else None,
        scale=scale,
        enable_gqa=enable_gqa,
        shared_queries=shared_queries,
        options=request.options | {"link": link},
        measure=True,
        check=request.check,
        payload=lambda: [seed, own_rates(q.device.type) if request.tolerant else {}, _length(mask)],
    )
    _check_lengths(context)
    if generator is None and request.draws:
        generator = torch.Generator().manual_seed(context.payloads[0][0])
    requirement = checked_requirement(tol, confidence, rtol=rtol)
    call = _Call(context, requirement, generator, request.visible(context.problem))
    with outside_autocast():
        if method == "auto":
            attended = _automatic(call, usual_interconnect(context.problem.q.device.type) if link is None else link)
        else:
            attended = _within_tolerance(request.instance, call)
    shape = (*q.shape[:-1], v.shape[-1])
    certificate = attended.certificate
    rows, own = (x.reshape(shape[:-1]) for x in (certificate.rows, certificate.relative_rows))
    return Attended(attended.out.reshape(shape), dataclasses.replace(certificate, rows=rows, relative_rows=own))


def _length(mask: Tensor | None) -> int | None:
    return mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim else None


def _check_lengths(context: Context) -> None:
    """Raise, in every process alike, if a mask of one of them is for another number of keys than there are."""
    for rank, (*_, length) in enumerate(context.payloads):
        if not context.shared_queries and length not in (None, 1, context.total):
            name = dist.get_global_rank(context.group, rank)
            remedy = "say of the keys of all processes, in order of ranks, which this one's rows may see"
            raise ShapeError(f"rank {name}: mask.shape[-1]", length, f"must be {context.total}", remedy)


def _automatic(call: _Call, link: Interconnect) -> Attended:
    """Exact attention, unless something cheaper proves the tolerance."""
    context, requirement, z = call.context, call.requirement, call.context.sizes
    if requirement.exact or not z.queries * z.keys * z.value_dim:
        return _run(Exact(), call)
    # Causal states are those of the keys before a row of the same shard.
    apart = z.causal and not context.shared_queries and context.rows != context.keys
    methods: list[Method] = []
    if call.mask is not None or apart:
        what = "with a mask" if call.mask is not None else "if causal rows are not those of the process's own keys"
        reason = f"no other method has a form over shards {what}"
    else:
        aim = error_budget(requirement, context.total)
        assert aim is not None
        methods, reason = choose(context, aim, requirement.confidence, link, context.payloads[0][1])
    failures = []
    for method in methods:
        try:
            return _within_tolerance(method, call)
        except ToleranceUnreachable as error:
            # All processes raise it alike, or none does.
            failures.append(f"{method.name}: {error.rule}")
    out, certificate = _run(Exact(), call)
    return Attended(out, dataclasses.replace(certificate, reason="; ".join(failures) or reason))


def _within_tolerance(method: Method, call: _Call) -> Attended:
    """The answer, if all processes can prove the tolerances for theirs."""
    context, requirement = call.context, call.requirement
    method.check(context.sizes)
    attended = _run(method, call)
    if requirement.exact or method.is_exact or (method.selects_tokens and requirement.rtol is None):
        return attended
    certificate = attended.certificate
    own = (certificate.bound, certificate.relative) if certificate.kind != "none" else (math.inf, math.inf)
    bounds = gather_numbers(own, None, context).amax(0).tolist()
    for name, limit, bound in zip(("tol", "rtol"), (requirement.tol, requirement.rtol), bounds, strict=True):
        if limit is not None and not bound <= limit:
            rule, remedy = f"is below the {bound:.2e} it can prove", f'use method="auto" or a wider {name}'
            raise ToleranceUnreachable(f"{method.name}: {name}", limit, rule, remedy, bound)
    return attended


def _run(method: Method, call: _Call) -> Attended:
    """The answer; exact attention keeps what is required, sparse attention `tol`."""
    context, requirement, generator = call.context, call.requirement, call.generator
    if isinstance(method, Sparse):
        try:
            return attend_within(context, method, requirement, generator)
        except ToleranceUnreachable as error:
            if requirement.rtol is None:
                raise
            rule = f"needs a bound of {error.value:.2e} relative to the longest value, and {error.best:.2e} is the best"
            remedy = 'use method="auto" or a wider rtol'
            raise ToleranceUnreachable("sparse: rtol", requirement.rtol, rule, remedy, error.best) from error
    if isinstance(method, _OWN_ROWS):
        return attend_linear(context, method, requirement.stated, generator)
    assert isinstance(method, Exact)
    if context.shared_queries:
        return attend_keys(context, requirement, method)
    return attend_ring(context, requirement, method, call.mask)


class Request(NamedTuple):
    """What one process asks for, before others agree."""

    method: str | Method
    parameters: dict[str, Any]
    tol: float | None
    confidence: float | None
    shared_queries: bool
    mask: Tensor | None
    generator: torch.Generator | None
    rtol: float | None = None
    misnamed: AvowError | None = None
    """What is wrong with SDPA's names for the mask and for causality."""

    @property
    def options(self) -> dict[str, object]:
        """What all must ask alike."""
        same: dict[str, object] = {"tol": self.tol, "rtol": self.rtol, "confidence": self.confidence}
        # Whether there is a mask, and what is odd about how it holds its entries.
        odd = isinstance(self.mask, Tensor) and storage(self.mask) != "dense"
        same["mask"] = "none" if self.mask is None else storage(self.mask) if odd else "some"
        if isinstance(self.generator, torch.Generator):
            same["digest of generator"] = digest(self.generator.get_state())
        if isinstance(self.method, Method):
            return {"method": self.method.name, **self.method.parameters, **self.parameters, **same}
        return {"method": self.method, **self.parameters, **same}

    @property
    def tolerant(self) -> bool:
        """Whether a method is to be chosen for a tolerance."""
        return self.method == "auto" and not (self.tol is None and self.rtol is None)

    @property
    def draws(self) -> bool:
        """Whether something may be drawn at random."""
        name = self.options["method"]
        named = any(kind.random and kind.name == name for kind in _OWN_ROWS)
        return named or (self.tolerant and not self.shared_queries)

    @property
    def instance(self) -> Method:
        """The method with its parameters."""
        method, served = method_from(self.method, self.parameters), (Exact, Sparse, *_OWN_ROWS)
        if not isinstance(method, served):
            remedy = f"use one of {', '.join(one.name for one in served)}"
            raise UnknownMethod("method", value_text(method.name), "has no form over shards", remedy)
        return method

    def check(self, problem: Problem) -> None:
        """Raise if this process cannot ask so."""
        if self.misnamed is not None:
            raise self.misnamed
        checked_requirement(self.tol, self.confidence, rtol=self.rtol)
        check_generator(self.generator)
        self.visible(problem)
        if self.method == "auto":
            return check_automatic(self.parameters)
        method = self.instance
        if not method.is_exact and self.mask is not None:
            raise ParameterError(f"{method.name}: mask", "some", "has no form over shards", 'use method="exact"')
        if method.selects_tokens and not self.shared_queries:
            remedy = 'give all processes the same queries, or use method="exact"'
            raise ParameterError("sparse: shared_queries", False, "must all be known to every process", remedy)
        if method.selects_tokens and problem.causal:
            raise ParameterError("sparse: causal", True, "has no form over shards", 'use method="exact"')
        if isinstance(method, _OWN_ROWS):
            if self.shared_queries:
                remedy = "pass shared_queries=False and each process's own rows"
                raise ParameterError(f"{method.name}: shared_queries", True, "must not be the same rows", remedy)
            queries, keys = problem.q.shape[-2], problem.k.shape[-2]
            if problem.causal and queries != keys:
                rule = f"must equal k.shape[-2]={keys} if causal"
                raise ShapeError("q.shape[-2]", queries, rule, "give each process the queries of its own keys")
        if isinstance(method, Separable):
            method.checked(problem)  # a process without rows never comes to its promise, which would ask
        return None

    def visible(self, problem: Problem) -> Bool[Tensor, "#b #h #n s"] | None:
        """The mask with four axes: of this process's keys if queries are shared, else of all."""
        if self.mask is None:
            return None
        check_dense("mask", self.mask)
        if isinstance(self.mask, Tensor) and self.mask.dtype != torch.bool:
            raise DtypeError("mask.dtype", self.mask.dtype, "must be bool over shards", "use mask >= 0 for 0 and -inf")
        if self.shared_queries:
            return problem.allowed
        length = self.mask.shape[-1] if isinstance(self.mask, Tensor) and self.mask.ndim else 0
        k, v = (x.new_zeros(()).expand(*x.shape[:2], length, x.shape[-1]) for x in (problem.k, problem.v))
        return Problem.of(problem.q, k, v, mask=self.mask, enable_gqa=True).allowed
