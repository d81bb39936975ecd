"""One door to attention over shards of a sequence: whatever the method, the same words and one certificate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from avow.attend import Attended
from avow.core import Method
from avow.core.certify import aimed_bound, proved_ratio
from avow.core.requirement import Requirement, checked_requirement
from avow.distributed.comm_cost import Interconnect, usual_interconnect
from avow.distributed.consensus import Context, agree, check_consistent, outside_autocast, storage
from avow.distributed.exact import attend_keys
from avow.distributed.low_rank import attend_low_rank
from avow.distributed.planner import Choice, chosen, own_rates
from avow.distributed.point_to_point import Group
from avow.distributed.request import OWN, Asked
from avow.distributed.ring import attend_ring
from avow.distributed.sparse import attend_sparse
from avow.distributed.states import attend_states
from avow.errors import ShapeError, ToleranceUnreachable
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from avow.numerics import rounding


class _Call(NamedTuple):
    """What all processes agreed on, what they will accept, what draws, and what rows may see."""

    met: Context
    wish: Requirement
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
    method: str = "auto",
    shared_queries: bool = True,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    confidence: float | None = None,
    generator: torch.Generator | None = None,
    link: Interconnect | None = None,
    **parameters: Any,
) -> Attended:
    """Attention to the keys of all processes, of which `k` and `v` are this one's, and the certificate of its error.

    All else is as in `avow.attend`; the sequence is what ranks hold, in their order, and `causal` speaks of places in
    the whole of it. Shards may differ in length and may be empty. With `shared_queries` all processes bring the same
    queries and get the same answer (exact and sparse attention); without, each brings its own rows and gets theirs
    (exact attention, by blocks that go round a ring; separable, random_features and low_rank, by states). Then causal
    rows of all but exact attention are those of the keys beside them. A boolean `mask`, of exact attention, says which
    keys this process's queries may see: of its own where queries are shared, else of all.

    With `tol` or `rtol`, `method="auto"` runs the cheapest method that proves them for all rows; prices are those of
    `avow plan --ranks` for this `link`. Where processes disagree on what they ask, or one of them cannot attend, all
    of them raise an error that names the rank. Gradients flow to every shard, so that all processes go backward
    together: of one loss that each computes where queries are shared, else of the sum of all losses. Generators must
    be alike; without them, the first one's seed counts.
    """
    asked = Asked(method, parameters, tol, confidence, shared_queries, mask, generator, rtol)
    tolerant = method == "auto" and (tol is not None or rtol is not None)
    seed = int(torch.randint(2**62, (), device="cpu")) if generator is None and asked.draws else 0
    met = check_consistent(
        *_four(q, k, v),
        group=group,
        causal=causal,
        mask=mask if shared_queries else None,
        scale=scale,
        enable_gqa=enable_gqa,
        shared_queries=shared_queries,
        asked=asked.words | {"link": link},
        reading=True,
        check=asked.check,
        telling=lambda: [seed, own_rates(q.device.type) if tolerant else {}, _length(mask)],
    )
    _check_lengths(met)
    if generator is None and asked.draws:
        generator = torch.Generator().manual_seed(met.payloads[0][0])
    call = _Call(met, checked_requirement(tol, confidence, rtol=rtol), generator, asked.seen(met.problem))
    with outside_autocast():
        if method == "auto":
            attended = _automatic(call, usual_interconnect(met.device.type) if link is None else link)
        else:
            attended = _kept(asked.named, call)
    shape = (*q.shape[:-1], v.shape[-1])
    found = attended.certificate
    rows, own = (x.reshape(shape[:-1]) for x in (found.rows, found.relative_rows))
    return Attended(attended.out.reshape(shape), dataclasses.replace(found, rows=rows, relative_rows=own))


def _four(*tensors: Tensor) -> list[Tensor]:
    """The same tensors with four axes, where they are such as can be; if not, the processes tell each other of it."""
    dense = all(isinstance(x, Tensor) and storage(x) == "dense" and x.ndim >= 2 for x in tensors)
    if not dense or len({x.ndim for x in tensors}) > 1:
        return list(tensors)
    lead = (1,) * (4 - tensors[0].ndim)
    return [x.reshape(*lead, *x.shape).flatten(0, -4) for x in tensors]


def _length(mask: Tensor | None) -> int | None:
    return mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim else None


def _check_lengths(met: Context) -> None:
    """Raise, in every process alike, where a mask of one of them speaks of another number of keys than there are."""
    keys = sum(met.keys)
    for rank, (*_, length) in enumerate(met.payloads):
        if not met.shared_queries and length not in (None, 1, keys):
            name = dist.get_global_rank(met.group, rank)
            remedy = "say of the keys of all processes, in order of ranks, which this one's rows may see"
            raise ShapeError(f"rank {name}: mask.shape[-1]", length, f"must be {keys}", remedy)


def _automatic(call: _Call, link: Interconnect) -> Attended:
    """Exact attention, unless something cheaper proves the tolerance."""
    met, wish, z = call.met, call.wish, call.met.sizes
    if wish.exact or not z.queries * z.keys * z.value_dim:
        return _run(Exact(), call, wish.tol)
    # Causal states are those of the keys before a row of the same shard.
    apart = z.causal and not met.shared_queries and met.rows != met.keys
    if call.mask is not None or apart:
        what = "with a mask" if call.mask is not None else "where causal rows are not those of the keys beside them"
        choice = Choice([], f"no other method has a form over shards {what}")
    else:
        choice = chosen(met, _aim(call), wish.confidence, link, met.payloads[0][1])
    tried = []
    for method in choice.methods:
        try:
            return _kept(method, call)
        except ToleranceUnreachable as error:
            # All processes raise it alike, or none does.
            tried.append(f"{method.name}: {error.rule}")
    out, certificate = _run(Exact(), call, wish.tol)
    return Attended(out, dataclasses.replace(certificate, reason="; ".join(tried) or choice.reason))


def _kept(method: Method, call: _Call) -> Attended:
    """The answer, where all processes can prove the tolerances for theirs."""
    met, wish = call.met, call.wish
    method.check(met.sizes)
    exact = isinstance(method, Exact)
    attended = (
        _aimed(method, call) if wish.rtol is not None and isinstance(method, Sparse) else _run(method, call, wish.tol)
    )
    if wish.exact or exact or not (isinstance(method, OWN) or wish.rtol is not None):
        return attended
    certificate = attended.certificate
    own = (certificate.bound, certificate.relative) if certificate.kind != "none" else (math.inf, math.inf)
    found = zip(*agree({}, own, None, met.group), strict=True)
    for name, limit, bound in zip(("tol", "rtol"), (wish.tol, wish.rtol), map(max, found), strict=True):
        if limit is not None and not bound <= limit:
            rule, remedy = f"is below the {bound:.2e} it can prove", f'use method="auto" or a wider {name}'
            raise ToleranceUnreachable(f"{method.name}: {name}", limit, rule, remedy, bound)
    return attended


def _aimed(method: Sparse, call: _Call) -> Attended:
    """Sparse attention aimed at `rtol`, and again when it is proved how long answers are: in every process alike."""
    wish, aim = call.wish, _aim(call)
    try:
        attended = _run(method, call, aim)
        ratio = proved_ratio(attended.certificate)
        if not attended.certificate.keeps(wish.tol, wish.rtol) and ratio > 0:
            aim = _aim(call, ratio)
            attended = _run(method, call, aim)
    except ToleranceUnreachable as error:
        rule = f"needs a bound of {aim:.2e} relative to the longest value, and {error.best:.2e} is the best"
        remedy = 'use method="auto" or a wider rtol'
        raise ToleranceUnreachable("sparse: rtol", wish.rtol, rule, remedy, error.best) from error
    return attended


def _aim(call: _Call, ratio: float | None = None) -> float:
    """The bound to aim at, relative to the longest value: `tol`, or what `rtol` needs of answers of this length.

    Before there is one, it is that of a flat head, which every process knows alike.
    """
    wish = call.wish
    tol = math.inf if wish.tol is None else wish.tol
    if wish.rtol is None:
        return tol
    return min(tol, aimed_bound(1 / math.sqrt(max(call.met.sizes.keys, 1)) if ratio is None else ratio, wish.rtol))


def _run(method: Method, call: _Call, tol: float | None) -> Attended:
    """The answer; sparse attention is held to this `tol`, exact attention to all that is wished for."""
    met, wish = call.met, call.wish
    if isinstance(method, Sparse):
        p = met.problem
        sure = wish.confidence if wish.confidence < 1 else None
        return attend_sparse(
            *(p.q, p.k, p.v),
            method=method,
            group=met.group,
            tol=tol,
            confidence=sure,
            scale=met.scale,
            enable_gqa=True,
            generator=call.generator,
        )
    if isinstance(method, LowRank):
        return attend_low_rank(met, method, wish.stated, call.generator)
    if isinstance(method, Separable | RandomFeatures):
        return attend_states(met, method, wish.stated, call.generator)
    assert isinstance(method, Exact)
    # A half-precision answer is rounded once, after the merge. What that cannot prove, float64 may, unless told else.
    first = method.arithmetic(rounding.accumulator(met.problem.q.dtype))
    last = torch.float64 if not wish.exact and method.precision == "native" else first
    kinds = tuple(dict.fromkeys((first, last)))
    return attend_keys(met, wish, kinds) if met.shared_queries else attend_ring(met, wish, kinds, call.mask)
