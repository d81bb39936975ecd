r"""Sparse attention over shards of the keys: every process gets the answer, and each reads only what matters to all.

Shards first send each other what their sketches say: how heavy their heaviest tokens may be, and how much weight, at
most and at least, stands in bins below that. So all know where one cut through the tokens of all shards leaves no more
unread than the tolerance allows; each reads what is before it, and a shard with nothing there reads nothing. What was
read and what was left add up over shards to one proof; a row whose proof falls short reads on, up to a cut that is sure
to do (`avow.numerics.sparse_reading`, the same steps as in one process). Nothing depends on how tokens are spread over
shards but which of them are sketched together. With a confidence below 1, shards sample what is behind the heaviest
tokens (`avow.numerics.tail_samples`).

*Bounds.* With :math:`\hat l` the logits as float64 computes them, off by at most δ in all that matters, the answer errs
by :math:`tails \cdot e^{2δ} + 2\tanh(δ/2)`, the tails being those of what was computed: the weights of read tokens are
right up to :math:`e^{\pm δ}`, once in the answer [claim softmax-perturbation], and once in what unread ones are
compared with.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from avow.attend import Attended
from avow.core import Certificate, Problem, Sizes
from avow.core.certify import absolute_errors, aimed_bound, proved_ratio, relative_errors
from avow.core.requirement import Requirement, checked_requirement
from avow.distributed.consensus import Context, check_one_loss
from avow.distributed.exact import with_gradients
from avow.distributed.protocols import (
    Protocol,
    Traffic,
    all_gather,
    all_max,
    all_reduce,
    combine_message,
    gather_message,
    over_processes,
    traffic,
)
from avow.errors import ToleranceUnreachable
from avow.methods.sparse import Sparse
from avow.numerics import rounding
from avow.numerics.gather import Gathered, Tokens
from avow.numerics.masks import row_tiles
from avow.numerics.norms import length_floors
from avow.numerics.shard_steps import AnyTrue, Done, Max, Steps, Sum
from avow.numerics.sketch import GROUP, Sketch, sketched
from avow.numerics.sparse_reading import Answer, SparseReading
from avow.numerics.tail_samples import LADDER
from avow.numerics.token_ranking import SHARDED, SHARES, SUMS, Extent, SketchedRows

# Values shorter than this are measured too coarsely for a proof.
_FAINT = 1e-290
# Groups that reach further, in the unit of a sketch of others, are beyond it.
_BEYOND = 1e30


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
        draws = own_generator(method, context.rank, context.problem.q.device, generator)
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


class Kept(NamedTuple):
    """Tokens of one shard that some rows count, and by how much."""

    rows: slice
    head: Int[Tensor, " m"]
    place: Int[Tensor, " m"]
    logs: Float64[Tensor, "m r"]
    """Logits, less the logarithms of odds; −inf where a row does not count a token."""


class Reading(NamedTuple):
    """How many tokens each row read in full: in all shards, and in this one; and the answer before it was rounded, the
    logarithm of its normaliser, and what this shard has in both.
    """

    everywhere: Float64[Tensor, "b h n"]
    here: Float64[Tensor, "b h n"]
    out: Float64[Tensor, "b h n e"]
    lse: Float64[Tensor, "b h n"]
    kept: tuple[Kept, ...]
    """Empty if no gradient will be asked for."""


class Task(NamedTuple):
    """What is asked of all shards; how many keys they have, how many the largest, and how many shards there are."""

    tol: float | None
    method: Sparse
    keys: int
    widest: int
    ranks: int
    followed: bool = False
    """Whether gradients will be asked for."""


def sparse_protocol(
    problem: Problem, task: Task, sketch: Sketch | None = None, generator: torch.Generator | None = None
) -> Protocol[tuple[Attended, Reading]]:
    """The answer of all shards, and what this one read.

    A `sketch` of the first keys may be given. The `generator` must be unlike that of every other shard.
    """
    p, method = problem, task.method
    b, h, n, d = p.q.shape
    groups, e = p.v.shape[1], p.v.shape[-1]
    out = p.q.new_zeros(b, h, n, e, dtype=torch.float64)
    bound, everywhere, here, lse, longest = out.new_zeros(5, b, h, n).unbind(0)
    kept: list[Kept] = []
    if task.keys and out.numel():
        norms = p.norms
        sketch = whole_sketch(p.k, method.bits, sketch)
        # Samples are each row's own; else query heads of a key head read what any of them does.
        siblings = 1 if method.chance > 0 else h // groups
        for rows in row_tiles(n, 16 * b * h * task.widest):
            q = p.q[:, :, rows].reshape(b, groups, -1, d)  # (b, g, r, d)
            view = SketchedRows.of(q, sketch, norms.v, p.scale, siblings, SHARDED)
            rounded = yield from _agreed_rounding(p, view, norms.q[:, :, rows].reshape(b, groups, -1, 1), task)
            whole = rounded.whole
            nothing = Gathered.of(Tokens(q.double() * p.scale, p.k, p.v, None, whole.size))
            most, grown = rounded.unit / whole.size, rounded.delta.clamp(max=rounding.NEGLIGIBLE_NATS).exp()
            reading = SparseReading(
                view, nothing, whole, most, rounded.drop, task.keys, method.chance, generator, grown
            )
            answer = yield from _over_shards(reading.steps(), task.ranks)
            state = answer.state
            log = state.top + state.total.log()
            parts = (
                (out, state.out * whole.size),
                (bound, rounded.bounds(answer.tails)),
                (everywhere, answer.everywhere),
                (here, answer.touched.sum(-1, keepdim=True).double()),
                (lse, log),
                (longest, whole.longest.expand(log.shape)),
            )
            for x, part in parts:
                x[:, :, rows] = part.reshape(x[:, :, rows].shape)
            if task.followed:
                read = answer.read
                assert isinstance(read, Gathered)
                logs = read.logits if answer.odds is None else read.logits - read.at(answer.odds).log()
                kept.append(Kept(rows, read.head, read.place, logs))
    rounded_out = rounding.saturating_cast(out, p.q.dtype)
    own = relative_errors(absolute_errors(bound, longest), length_floors(rounded_out))
    certificate = _certificate(bound, own, everywhere, task)
    return Attended(rounded_out, certificate), Reading(everywhere, here, out, lse, tuple(kept))


def whole_sketch(k: Float[Tensor, "b g s d"], bits: int, known: Sketch | None) -> Sketch:
    """The sketch of all keys, from one of the first of them if that is `known`.

    A last group that is not full is filled up with its last key.
    """
    s, done = k.shape[-2], 0 if known is None else known.rows
    if known is not None and done and bool((known.reach <= _BEYOND).all()):
        more = sketched(_filled(k[:, :, done:]), bits, known.metric, known.size)
        if bool((more.reach <= _BEYOND).all()):
            return known.followed_by(more) if done < s else known
    # Numbers this far from the first ones': a new scale is chosen for all of them.
    return sketched(_filled(k), bits)


def _filled(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g filled d"]:
    missing = -k.shape[-2] % GROUP
    return torch.cat([k, k[:, :, -1:].expand(-1, -1, missing, -1)], 2) if missing else k


def _over_shards(steps: Steps, ranks: int) -> Protocol[Answer]:
    """The result of steps that all shards take."""
    stack: list[Steps] = [steps]
    reply: Any = None
    while stack:
        request = stack[-1].send(reply)
        if isinstance(request, Done):
            stack.pop()
            reply = request.result
        elif isinstance(request, Sum):
            reply = yield from all_reduce(request.x, ranks)
        elif isinstance(request, Max):
            reply = yield from all_max(request.x, ranks)
        elif isinstance(request, AnyTrue):
            reply = yield from all_gather(request.x.any().to(torch.uint8), ranks)
        else:
            stack.append(request)
            reply = None
    answer: Answer = reply
    return answer


def _certificate(
    bound: Float64[Tensor, "b h n"], own: Float64[Tensor, "b h n"], everywhere: Float64[Tensor, "b h n"], task: Task
) -> Certificate:
    largest = float(bound.amax()) if bound.numel() else 0.0
    if task.tol is not None and not largest <= task.tol:
        remedy = "ask for less, or convert q, k and v to a wider type"
        rule = f"is less than can be proved, {largest:.3g}"
        raise ToleranceUnreachable("tol", task.tol, rule, remedy, largest)
    drop = {} if task.tol is None else {"drop": task.tol}
    share = float(everywhere.sum()) / max(bound.numel() * task.keys, 1)
    assumed = "sums and exp of float64 are right to 1e-9" if task.keys else "there was nothing to attend to"
    return Certificate(
        task.method.name,
        {**task.method.parameters, **drop},
        task.method.target,
        "statistical" if task.method.chance else "deterministic",
        largest,
        bound,
        1 - task.method.chance,
        assumptions=(assumed,),
        reason=f"read {share:.1%} of the tokens of all shards in full",
        relative=float(own.amax()) if own.numel() else 0.0,
        relative_rows=own,
    )


@dataclass(frozen=True)
class _Rounding:
    """What float64 and the type of the answer round in some rows over the tokens of all shards."""

    whole: Extent
    unit: Float64[Tensor, "b g 1 1"]
    """A lower bound on the length of the longest value."""
    delta: Float64[Tensor, "b g r 1"]
    """δ: of logits, and of differences from a shard's top and of that from the row's, up to 4S + ln s + 100."""
    lost: Float64[Tensor, "b g 1 1"]
    """What sums and the answer may lose to underflow, relative to the longest value."""
    sums: float
    """What float64 rounds in sums over all tokens, and in exp."""
    final: float
    task: Task

    def bounds(self, tails: Float64[Tensor, "b g r 1"]) -> Float64[Tensor, "b g r 1"]:
        """Bounds on whole rows: what was not read, and the rounding of what was."""
        rows = tails * self._growth + 2 * torch.tanh(self.delta / 2) + self.sums
        rows = rows.clamp(max=2 + self.sums)  # Answer and target are both averages of values.
        rows = (rows * (1 + self.final) + self.final) * rounding.SAFETY + self.lost
        # Where all values are zero, so is the answer; lengths near the end of float64 are no longer sharp.
        return torch.where(self.unit == 0, 0.0, torch.where(self.unit < _FAINT, math.inf, rows))

    @property
    def drop(self) -> Float64[Tensor, "b g r 1"]:
        """What unread tokens may move each row: all of the tolerance that rounding does not need."""
        if self.task.tol is None:
            return torch.full_like(self.delta, self.task.method.drop)
        room = (self.task.tol / rounding.SAFETY - self.lost - self.final) / (1 + self.final)
        room = (room - 2 * torch.tanh(self.delta / 2) - self.sums) / self._growth
        return (room * (1 - 1e-6)).nan_to_num(nan=0.0).clamp(min=0.0)

    @property
    def _growth(self) -> Float64[Tensor, "b g r 1"]:
        """What tails of computed weights may be too small by: a factor."""
        return torch.exp(2 * self.delta.clamp(max=rounding.NEGLIGIBLE_NATS)) * (1 + self.sums)


def _agreed_rounding(
    p: Problem, view: SketchedRows, queries: Float64[Tensor, "b g r 1"], task: Task
) -> Protocol[_Rounding]:
    """What is rounded, once shards know how large numbers are in all of them; `queries` are at least their lengths."""
    key = p.norms.k
    longest = key.amax(-1) if key.shape[-1] else key.new_zeros(key.shape[:2])
    own = (*view.extent, longest[..., None, None])
    numbers = yield from all_max(torch.cat([x.flatten() for x in own]), task.ranks)
    parts = numbers.split([x.numel() for x in own])
    *extent, key = (part.reshape(x.shape) for part, x in zip(parts, own, strict=True))
    whole = Extent(*extent)
    unit = whole.longest * (1 - 2 * p.norms.slack)
    u, d, dtype = rounding.unit(torch.float64), p.q.shape[-1], p.q.dtype
    shifted = 16 * u * (math.log(max(task.keys, 1)) + rounding.NEGLIGIBLE_NATS)
    misread = rounding.misread_logits(queries, key, p.scale, d, dtype)
    delta = abs(p.scale) * queries * key * (rounding.gamma(d + 8, u) + 64 * u) + shifted + misread
    lost = (task.keys + 8) * rounding.tiny(torch.float64) * whole.size
    lost = lost + rounding.tiny(dtype) + rounding.flush_threshold(dtype)
    lost = math.sqrt(p.v.shape[-1]) * lost / unit.clamp(min=2.0**-1022)
    final = 0.0 if dtype == torch.float64 else rounding.unit(dtype)
    return _Rounding(whole, unit, delta, lost, SUMS * max(1.0, task.keys / 2**22), final, task)


def sparse_traffic(z: Sizes, ranks: int, reports: int = 1, rungs: int | None = None) -> Traffic:
    """What a rank sends; `reports` until all rows are proved, 1 to 3; `rungs` of samples some row tried, 0 to 4."""
    rows, heads = z.batch * z.heads * z.queries, z.batch * z.key_heads
    # Rows that sample share nothing with their siblings, and so need not weigh each other's needs.
    cuts = 1 if z.heads == z.key_heads or rungs is not None else 2
    wide = [2 * rows + 3 * heads, rows, rows * (1 + z.value_dim + 2)]
    wide += [rows, rows * (1 + z.value_dim + 2 + len(SHARES) + 1)] * reports
    narrow = [rows * (SHARDED.first + 2), *[rows * SHARDED.cut * (3 + len(SHARES))] * cuts]
    byte: list[int] = []
    if rungs is not None:
        narrow[0] += rows * SHARDED.first
        narrow.append(rows * 3 * SHARDED.plan)
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
    protocol = gradient_protocol(q, k, v, grad, reading, context.problem.scale, context.ranks)
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
