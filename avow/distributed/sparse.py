r"""Sparse attention over shards of the keys: every process gets the answer, and each reads only what matters to all.

Shards first send each other what their sketches say: how heavy their heaviest tokens may be, and how much weight, at
most and at least, stands in bins below that. So all know where one cut through the tokens of all shards leaves no more
unread than the tolerance allows; each reads what is before it, and a shard with nothing there reads nothing. What was
read and what was left add up over shards to one proof (`sparse_budget`); a row whose proof falls short reads on, up to
a cut that is sure to do (`sparse_protocol`). Nothing depends on how tokens are spread over shards but which of them are
sketched together. With a confidence below 1, shards sample what is behind the heaviest tokens (`sparse_draws`).

*Gradients* are those of the part that was kept; which tokens count, and by what odds, is taken as given. With
:math:`\ell` the logarithm of the normaliser of what all shards kept, :math:`p_j = e^{l_j - \log odds_j - \ell}` and
:math:`D = \langle do, o \rangle`, each shard knows the gradients of its own tokens, :math:`dv_j = p_j\,do` and
:math:`dl_j = p_j (\langle do, v_j \rangle - D)`; tokens that were not kept have none. Those of the queries add up over
shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.attend import Attended
from avow.core import Sizes
from avow.core.certify import aimed_bound, proved_ratio
from avow.core.requirement import Requirement, checked_requirement
from avow.distributed.consensus import Context, check_one_loss
from avow.distributed.exact import with_gradients
from avow.distributed.protocols import (
    Protocol,
    Traffic,
    all_reduce,
    combine_message,
    gather_message,
    over_processes,
    traffic,
)
from avow.distributed.sparse_budget import BINS, FIRST_BINS, SHARES
from avow.distributed.sparse_draws import LADDER, PLAN_BINS
from avow.distributed.sparse_protocol import Reading, Task, sparse_protocol
from avow.methods.sparse import Sparse
from avow.numerics.sketch import Sketch


def attend_sparse(
    context: Context,
    method: Sparse,
    tol: float | None,
    confidence: float | None = None,
    generator: torch.Generator | None = None,
    sketch: Sketch | None = None,
) -> Attended:
    """Softmax attention of shared queries to the keys of all processes, read in part.

    Every query sees every key; shards may differ in length and may be empty. The certificate is the same in every
    process. With `tol`, no row's bound exceeds it, and together the processes read about as little as one would that
    had all keys; without, `method.drop` is what unread tokens may do. With a `confidence` below 1, or a chance of the
    method's, bounds hold for each row with that probability over the draws of all processes, which each makes from the
    generator it gives and its rank. A `sketch` of the first keys may be given. Gradients are those of one loss, which
    every process computes from the answer that all share.
    """
    p = context.problem
    method = sampling(method, confidence)
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (p.q, p.k, p.v))
    task = Task(tol, method, context.total, max(context.keys), context.ranks, followed)
    with torch.no_grad():
        draws = own_generator(method, context.rank, context.device, generator)
        attended, reading = over_processes(sparse_protocol(p.detached(), task, sketch, draws), context.group)
    if not followed:
        return attended
    gradients = functools.partial(_gradients, reading=reading, context=context)
    return attended._replace(out=with_gradients(p.q, p.k, p.v, (attended.out, reading.lse), gradients))


def attend_within(
    context: Context,
    method: Sparse,
    requirement: Requirement,
    generator: torch.Generator | None,
    sketch: Sketch | None = None,
) -> Attended:
    """Sparse attention aimed at the tolerances, and at `rtol` again once it is proved how long answers are.

    All processes do so alike. Its bound keeps `tol`; whether it keeps `rtol`, the certificate says.
    """
    confidence = requirement.confidence if requirement.confidence < 1 else None
    attended = attend_sparse(context, method, error_budget(requirement, context.total), confidence, generator, sketch)
    if requirement.rtol is None or attended.certificate.keeps(requirement.tol, requirement.rtol):
        return attended
    ratio = proved_ratio(attended.certificate)
    if ratio > 0:
        aim = error_budget(requirement, context.total, ratio)
        attended = attend_sparse(context, method, aim, confidence, generator, sketch)
    return attended


def error_budget(requirement: Requirement, keys: int, ratio: float | None = None) -> float | None:
    """The bound to aim at, relative to the longest value: `tol`, or what `rtol` needs of answers of this length.

    Before there is an answer, the length is that of a flat head, which every process knows alike.
    """
    if requirement.rtol is None:
        return requirement.tol
    aim = aimed_bound(1 / math.sqrt(max(keys, 1)) if ratio is None else ratio, requirement.rtol)
    return aim if requirement.tol is None else min(requirement.tol, aim)


def sampling(method: Sparse, confidence: float | None) -> Sparse:
    """The method with the chance that a confidence leaves, if one is asked for."""
    sure = checked_requirement(None, confidence).confidence
    return method if confidence is None else dataclasses.replace(method, chance=1 - sure)


def own_generator(
    method: Sparse, rank: int, device: torch.device, generator: torch.Generator | None
) -> torch.Generator | None:
    """Draws that no other rank makes, even if generators of all processes are alike."""
    if method.chance == 0:
        return None
    seed = int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))
    # A CPU's generator knows the last 32 bits of its seed, and these are unlike for all ranks.
    return torch.Generator(device).manual_seed(seed + rank)


def sparse_traffic(z: Sizes, ranks: int, reports: int = 1, rungs: int | None = None) -> Traffic:
    """What a rank sends; `reports` until all rows are proved, 1 to 3; `rungs` of samples some row tried, 0 to 4."""
    rows, heads = z.batch * z.heads * z.queries, z.batch * z.key_heads
    # Rows that sample share nothing with their siblings, and so need not weigh each other's needs.
    cuts = 1 if z.heads == z.key_heads or rungs is not None else 2
    wide = [2 * rows + 3 * heads, rows, rows * (1 + z.value_dim + 2)]
    wide += [rows, rows * (1 + z.value_dim + 2 + len(SHARES) + 1)] * reports
    narrow = [rows * (FIRST_BINS + 2), *[rows * BINS * (3 + len(SHARES))] * cuts]
    byte: list[int] = []
    if rungs is not None:
        narrow[0] += rows * FIRST_BINS
        narrow.append(rows * 3 * PLAN_BINS)
        wide += [rows * (1 + 3 * len(LADDER)), rows * 2 * len(LADDER), *[rows * (1 + z.value_dim + 2)] * rungs]
        byte = [rows] * rungs
    kinds = ((torch.float64, wide), (torch.float32, narrow), (torch.uint8, byte))
    sums = [combine_message(1, 1, count, 1, dtype=kind, ranks=ranks) for kind, counts in kinds for count in counts]
    # After each report but a third, a byte says whether to go on.
    going_on = [gather_message(dtype=torch.uint8, ranks=ranks) for _ in range(min(reports, 2))]
    return traffic([*sums, *going_on], ranks)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, reading: Reading, context: Context
) -> tuple[Tensor, Tensor, Tensor]:
    check_one_loss(grad, context)
    protocol = gradient_protocol(q, k, v, grad, reading, context.scale, context.ranks)
    for_queries, for_keys, for_values = over_processes(protocol, context.group)
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)


def gradient_protocol(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    grad: Float[Tensor, "b h n e"],
    reading: Reading,
    scale: float,
    ranks: int,
) -> Protocol[tuple[Float64[Tensor, "b h n d"], Float64[Tensor, "b g s d"], Float64[Tensor, "b g s e"]]]:
    """Those of all queries, and of this shard's keys and values, from that of the answer, the same in all shards."""
    groups, d, e = k.shape[1], k.shape[-1], v.shape[-1]
    for_queries, for_keys, for_values = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    flat_keys, flat_values = (x.flatten(0, 1) for x in (k, v))  # (bg, s, c)
    to_keys, to_values = (x.flatten(0, 1) for x in (for_keys, for_values))
    for kept in reading.kept:
        queries, above, out = (_rows(x, kept.rows, groups) for x in (q, grad, reading.out))  # (bg, r, c)
        lse = _rows(reading.lse.unsqueeze(-1), kept.rows, groups).squeeze(-1)  # (bg, r)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # where nothing is kept, nothing has a weight
        along = (above * out).sum(-1)
        to_queries = torch.zeros_like(queries)
        for head in kept.head.unique().tolist():
            these = kept.head == head
            place = kept.place[these]
            weights = (kept.logs[these] - lse[head]).exp()  # (m, r)
            keys, values = flat_keys[head, place].double(), flat_values[head, place].double()
            slope = weights * (values @ above[head].T - along[head]) * scale  # by the products q·k
            to_values[head, place] += weights @ above[head]
            to_keys[head, place] += slope @ queries[head]
            to_queries[head] = slope.T @ keys
        some = for_queries[:, :, kept.rows]
        some += to_queries.reshape(some.shape)
    for_queries = yield from all_reduce(for_queries, ranks)
    return for_queries, to_keys.reshape(*k.shape[:3], d), to_values.reshape(*v.shape[:3], e)


def _rows(x: Float[Tensor, "b h n c"], rows: slice, groups: int) -> Float64[Tensor, "bg r c"]:
    """Some rows of query heads, as rows of the key head they share."""
    part = x[:, :, rows].double()
    return part.reshape(part.shape[0] * groups, -1, part.shape[-1])
