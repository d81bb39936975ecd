r"""Exact attention over shards of the keys: what a block of keys answers, its proof, and its part of the gradients.

A block answers with :math:`o = \sum_j e^{l_j - \ell} v_j` and :math:`\ell = \ln \sum_j e^{l_j}` over the keys that a
row sees, −inf where it sees none. Given the :math:`\ell` of all blocks, the weights of each are known again without the
others, and with :math:`D = \langle do, o \rangle` so are the gradients: :math:`dv = p^T do`,
:math:`dl = p (do\,v^T - D)`.

For a certificate the logarithm :math:`\ell` is taken in float64. With :math:`S_i = |scale| \|q_i\| \max_j \|k_j\|` and
u the unit of float64 it is within

.. math:: \lambda_i = (\gamma_{d+8} + 8u) S_i + \gamma_{s+8} + 8 \cdot 746\,u + 4u |\ell_i|

of the real one: each logit is off by the first term; the terms that matter lie within 746 of the top, so that their
exponentials are right to the third in their logarithms; their sum is by the second, what is stored by the last. The
logarithm that a float32 kernel keeps would be off by as much as its answer, and double the bound.

With shared queries (`attend_keys`) each process attends to its own keys, and all merge what all answered in the order
of ranks (`avow.core.compose`): every process computes the same bits. `avow.distributed.ring` is for sharded queries.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from avow.attend import Attended, attend
from avow.core import Certificate, Problem, Sizes
from avow.core.compose import Partial, merge
from avow.core.requirement import Requirement
from avow.distributed.consensus import Context, agree, attempt, check_one_loss
from avow.distributed.point_to_point import PAGE
from avow.distributed.protocols import Traffic, all_gather, all_reduce, gather_message, over_processes, traffic
from avow.errors import ToleranceUnreachable
from avow.methods.exact import Exact
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.masks import at_rows, row_tiles
from avow.numerics.norms import lengths, row_norms, slack

# Numbers beside its answer that a row of a partial answer is sent with, so that its certificate can be merged.
PARTIAL = 10
# Rows that look only back are taken so many at a time: few enough to leave out most of what they do not see.
_TALL = 256

Mask = Bool[Tensor, "#b #h #n s"] | None


class Block(NamedTuple):
    """Keys and values that rows see: row i those up to i + `shift`, or all, that the mask lets it see."""

    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    shift: int | None = None
    mask: Mask = None

    def to(self, dtype: torch.dtype) -> Block:
        return self._replace(k=self.k.to(dtype), v=self.v.to(dtype))


Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Those of q, k and v, from q, k, v, an answer, the logarithms of its normalisers, and the gradient above."""


def attend_keys(context: Context, requirement: Requirement, method: Exact) -> Attended:
    """Softmax attention of shared queries to the keys of all processes, in the first arithmetic that is precise enough.

    If causal, row i sees the first i + 1 of all keys, in order of ranks. Gradients are those of one loss, which
    every process computes from the answer that all share.
    """
    p = context.problem
    block = Block(p.k, p.v, -context.before if p.causal else None, p.allowed)
    for kind in arithmetics(method, p.q.dtype, requirement):
        with torch.no_grad():
            whole = _merged(p.q.to(kind), block.to(kind), context)
            out, certificate = whole.answer(p.q.dtype)
        if requirement.met_by(certificate):
            gradients = functools.partial(_gradients, block=block, context=context)
            return Attended(with_gradients(p.q, p.k, p.v, (out, whole.lse), gradients), certificate)
    raise unreachable(requirement, certificate.bound, certificate.relative)


def arithmetics(method: Exact, dtype: torch.dtype, requirement: Requirement) -> tuple[torch.dtype, ...]:
    """The types to compute in, one after the other until one is precise enough.

    A half-precision answer is rounded once, after the merge. What that cannot prove, float64 may, if it is allowed.
    """
    first = method.arithmetic(rounding.accumulator(dtype))
    last = torch.float64 if not requirement.exact and method.precision == "native" else first
    return tuple(dict.fromkeys((first, last)))


def keys_traffic(z: Sizes, ranks: int) -> Traffic:
    """What a rank sends in `attend_keys`."""
    size = 8 * z.batch * z.heads * z.queries * (PARTIAL + z.value_dim)
    return traffic([gather_message(size + PAGE, dtype=torch.uint8, ranks=ranks)], ranks)


def _merged(q: Tensor, block: Block, context: Context) -> Partial:
    own, error = attempt(lambda: partial_answer(q, block, context.problem.scale))
    mine = Partial.nothing((*q.shape[:-1], block.v.shape[-1]), q.device) if own is None else own
    messages = over_processes(all_gather(packed(mine, error is not None), context.ranks), context.group)
    whole, failed = merged(messages, mine.out.shape)
    if failed:
        agree({}, None, error, context.group)  # whose error it is, and what it says
    return whole


def packed(part: Partial, failed: bool = False) -> UInt8[Tensor, " bytes"]:
    """A part as one message: the numbers of each row, and a page with the rest of its certificate."""
    one_each = (part.lse, part.longest, part.pairs, part.unsure, part.drift, *part.means)
    numbers = torch.cat([torch.stack(one_each, -1), part.out], -1)  # (b, h, n, PARTIAL + e)
    words = None if part.words is None else part.words.to_json(rows=False)
    page = json.dumps([words, part.slack, failed]).encode().ljust(PAGE)
    assert len(page) == PAGE
    tail = torch.frombuffer(bytearray(page), dtype=torch.uint8).to(numbers.device)
    return torch.cat([numbers.view(torch.uint8).flatten(), tail])


def merged(messages: UInt8[Tensor, "ranks bytes"], shape: torch.Size) -> tuple[Partial, bool]:
    """What the keys of all ranks answer, (b, h, n, e), from the messages of their parts; and whether one failed."""
    parts, any_failed = [], False
    for message in messages:
        words, slack, failed = json.loads(message[-PAGE:].cpu().numpy().tobytes())
        numbers = message[:-PAGE].view(torch.float64).reshape(*shape[:-1], PARTIAL + shape[-1])
        lse, longest, pairs, unsure, drift, *means = numbers[..., :PARTIAL].unbind(-1)
        certificate = None if words is None else Certificate.from_json(words)
        own = (numbers[..., PARTIAL:], lse, longest, torch.stack(means), pairs, unsure, drift)
        parts.append(Partial(*own, slack, certificate))
        any_failed = any_failed or failed
    return functools.reduce(merge, parts), any_failed


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, block: Block, context: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """Each process has the gradients of its keys; those of the queries add up over all."""
    kind = rounding.accumulator(q.dtype)
    check_one_loss(grad, context)
    along = (grad.to(kind) * out.to(kind)).sum(-1)
    for_queries, for_keys, for_values = (torch.zeros_like(x, dtype=kind) for x in (q, k, v))
    if q.numel() and k.shape[-2]:
        block = block._replace(k=k, v=v)
        for_queries, for_keys, for_values = block_gradients(q, block, lse, grad, along, context.problem.scale)
    for_queries = over_processes(all_reduce(for_queries, context.ranks), context.group)
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)


def partial_answer(q: Float[Tensor, "b h n d"], block: Block, scale: float) -> Partial:
    """What a block of keys answers to rows, and how far that may be off."""
    k, v, shift, seen = block
    if shift is not None and shift != 0:
        back = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(shift)
        seen = back if seen is None else seen & back
    p = Problem.of(q, k, v, mask=seen, causal=shift == 0, scale=scale, enable_gqa=True)
    out, certificate = attend(q, k, v, method="exact", mask=seen, causal=p.causal, scale=scale, enable_gqa=True)
    if p.empty:
        return Partial.nothing(out.shape, out.device)
    tiles = _logit_tiles(q.double(), block.to(torch.float64), scale)
    logs = torch.cat([_unfolded(torch.logsumexp(x, -1, keepdim=True), q.shape[1])[..., 0] for *_, x in tiles], -1)
    longest = longest_seen(p, lengths(v)).expand(out.shape[:-1])
    u, (d, s) = rounding.unit(torch.float64), (q.shape[-1], k.shape[-2])
    keys = per_query_head(row_norms(k, "k").amax(-1, keepdim=True), q.shape[1])
    queries = row_norms(q, "q")
    reach = abs(p.scale) * queries * keys
    off = (rounding.gamma(d + 8, u) + 8 * u) * reach + rounding.gamma(s + 8, u) + 8 * 746 * u + 4 * u * logs.abs()
    off = off + rounding.misread_logits(queries, keys, p.scale, d, q.dtype)
    off = off * rounding.SAFETY + 4 * d * rounding.tiny(torch.float64) * max(1.0, abs(p.scale))
    return Partial.of(out, logs, off, longest, certificate, slack(v.shape[-1], torch.float64))


def unreachable(requirement: Requirement, bound: float, relative: float) -> ToleranceUnreachable:
    """The error for a tolerance that no available arithmetic proves: at best it proves these."""
    own = requirement.tol is None or bound <= requirement.tol
    name, limit, best = ("rtol", requirement.rtol, relative) if own else ("tol", requirement.tol, bound)
    rule = f"is less than can be proved, {best:.3g}"
    return ToleranceUnreachable(name, limit, rule, "ask for less, or convert q, k and v to a wider type", best)


def block_answer(
    q: Float[Tensor, "b h n d"], block: Block, scale: float
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]]:
    """The answer of a block and the logarithm of its normaliser."""
    values = _wide(block.v)
    outs, logs = [], []
    for _, upto, logits in _logit_tiles(q, block, scale):
        lse = torch.logsumexp(logits, -1, keepdim=True)
        weights = logits.sub_(torch.where(lse > -math.inf, lse, 0.0)).exp_()
        outs.append(_unfolded(weights @ values[..., :upto, :], q.shape[1]))
        logs.append(_unfolded(lse, q.shape[1])[..., 0])
    return torch.cat(outs, -2), torch.cat(logs, -1)


def merged_answers(
    out: Float[Tensor, "b h n e"],
    lse: Float[Tensor, "b h n"],
    other: Float[Tensor, "b h n e"],
    other_lse: Float[Tensor, "b h n"],
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]]:
    """The answer to the keys of both, and the logarithm of its normaliser."""
    both = torch.logaddexp(lse, other_lse)
    floor = torch.where(both > -math.inf, both, 0.0)
    mine, theirs = (torch.exp(x - floor).unsqueeze(-1) for x in (lse, other_lse))
    return mine * out + theirs * other, both


def block_gradients(
    q: Float[Tensor, "b h n d"],
    block: Block,
    lse: Float[Tensor, "b h n"],
    grad: Float[Tensor, "b h n e"],
    along: Float[Tensor, "b h n"],
    scale: float,
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
    """The gradients that flow through a block, from the logarithms of whole normalisers and `along`, D above."""
    keys, values = _wide(block.k), _wide(block.v)
    for_keys, for_values, for_queries = torch.zeros_like(keys), torch.zeros_like(values), []
    floor = torch.where(lse > -math.inf, lse, 0.0).to(keys.dtype)
    for rows, upto, weights in _logit_tiles(q, block, scale):
        near, worth = keys[..., :upto, :], values[..., :upto, :]
        weights = weights.sub_(_folded(floor[..., rows, None], keys.shape[1])).exp_()
        above = _folded(_wide(grad[..., rows, :]), keys.shape[1])  # (b, g, r·n, e)
        for_values[..., :upto, :] += weights.mT @ above
        slope = (above @ worth.mT).sub_(_folded(along[..., rows, None].to(keys.dtype), keys.shape[1]))
        slope = slope.mul_(weights).mul_(scale)  # by the products q·k
        for_queries.append(_unfolded(slope @ near, q.shape[1]))
        for_keys[..., :upto, :] += slope.mT @ _folded(_wide(q[..., rows, :]), keys.shape[1])
    return torch.cat(for_queries, -2), for_keys, for_values


def _logit_tiles(
    q: Float[Tensor, "b h n d"], block: Block, scale: float
) -> Iterator[tuple[slice, int, Float[Tensor, "b g rm upto"]]]:
    """Rows to work on at once, the first key that none of them sees, and their logits for the keys before it."""
    k, _, shift, mask = block
    groups, (n, s) = k.shape[1], (q.shape[-2], k.shape[-2])
    keys = _wide(k).mT
    tall = n if shift is None else _TALL
    tiles = row_tiles(n, q.shape[0] * q.shape[1] * s)
    for start, end in ((start, tile.stop) for tile in tiles for start in range(tile.start, tile.stop, tall)):
        rows = slice(start, min(start + tall, end))
        upto = s if shift is None else min(max(rows.stop + shift, 0), s)
        logits = (_folded(_wide(q[..., rows, :]), groups) @ keys[..., :upto]).mul_(scale)
        if shift is not None:
            last = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + shift
            seen = torch.arange(upto, device=q.device) <= last  # (m, upto)
            apart = logits.view(*k.shape[:2], q.shape[1] // groups, *seen.shape)  # (b, g, r, m, upto)
            apart.masked_fill_(~seen, -math.inf)
        if mask is not None:
            allowed = at_rows(mask, rows)[..., :upto].expand(*q.shape[:2], rows.stop - rows.start, upto)
            logits = logits.masked_fill_(~_folded(allowed, groups), -math.inf)
        yield rows, upto, logits


def _wide(x: Tensor) -> Tensor:
    return x.to(rounding.accumulator(x.dtype))


def _folded(x: Float[Tensor, "b h m c"], groups: int) -> Float[Tensor, "b g rm c"]:
    """Rows of the query heads that share a key head, one under the other."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def _unfolded(x: Float[Tensor, "b g rm c"], heads: int) -> Float[Tensor, "b h m c"]:
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads, x.shape[3])


def with_gradients(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    answer: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]],
    gradients: Gradients,
) -> Float[Tensor, "b h n e"]:
    """An answer that came with the logarithms of its normalisers, for autograd a function of q, k and v."""
    out: Tensor = _Answer.apply(q, k, v, answer, gradients)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, answer: tuple[Tensor, Tensor], gradients: Gradients
    ) -> Tensor:
        out, lse = answer
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gradients = gradients
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        with torch.autocast(grad.device.type, enabled=False):
            gradients = ctx.gradients(*ctx.saved_tensors, grad)
        return *gradients, None, None
