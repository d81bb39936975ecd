r"""Sparse attention over shards of the keys: every process gets the answer, and each reads only what matters to all.

Shards first tell each other what their sketches say: how heavy their heaviest tokens may be, and how much weight, at
most and at least, stands in bins below that. So all know where one cut through the tokens of all shards leaves no more
unread than the tolerance allows; each reads what is before it, and a shard with nothing there reads nothing. What was
read and what was left add up over shards to one proof (`sparse_budget`); a row whose proof falls short reads on, up to
a cut that is sure to do. On how tokens are spread over shards nothing depends but which of them are sketched together.
With a confidence below 1, shards sample what is behind the heaviest tokens (`sparse_draws`).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.core import Problem
from avow.core.requirement import checked_requirement
from avow.distributed.autograd import linked
from avow.distributed.consensus import Context, check_consistent, one_loss
from avow.distributed.point_to_point import Group
from avow.distributed.protocols import over_processes
from avow.distributed.sparse_gradients import gradient_script
from avow.distributed.sparse_reports import Reading
from avow.distributed.sparse_script import Task, shard_script
from avow.methods.sparse import Sparse


def attend_sparse(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    method: Sparse | None = None,
    group: Group = None,
    tol: float | None = None,
    confidence: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: torch.Generator | None = None,
) -> Attended:
    """Softmax attention of the same queries to the keys of all processes, read in part; `k` and `v` are this shard.

    Every query sees every key; shards may differ in length and may be empty. The certificate is the same in every
    process. With `tol`, no row's bound exceeds it, and together the processes read about as little as one would that
    had all keys; without, `method.drop` is what unread tokens may do. With a `confidence` below 1, or a chance of the
    method's, bounds hold for each row with that probability over the draws of all processes, which each makes from the
    generator it gives and its rank. Where processes disagree on what they ask, or one of them cannot attend, all of
    them raise an error that names the rank. Gradients are those of the part that was kept, and of one loss, which every
    process computes from the answer that all share.
    """
    chosen = Sparse() if method is None else method
    asked = {"call": "attend_sparse", "tol": tol, "confidence": confidence, "method": chosen}
    met = check_consistent(
        q, k, v, group=group, scale=scale, enable_gqa=enable_gqa, shared_queries=True, asked=asked, reading=True
    )
    chosen = sampling(chosen, confidence)
    problem = Problem.of(q.detach(), k.detach(), v.detach(), scale=scale, enable_gqa=enable_gqa)
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    task = Task(tol, chosen, sum(met.keys), max(met.keys), len(met.keys), followed)
    # Under autocast products would be narrower than the bounds allow for.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        script = shard_script(problem, task, generator=own_generator(chosen, met.here, q.device, generator))
        (attended, reading), _ = over_processes(script, met.group)
    if not followed:
        return attended
    gradients = functools.partial(_gradients, reading=reading, met=met)
    return attended._replace(out=linked(q, k, v, (attended.out, reading.lse), gradients))


def sampling(method: Sparse, confidence: float | None) -> Sparse:
    """The method with the chance that a confidence leaves, where one is asked for."""
    sure = checked_requirement(None, confidence).confidence
    return method if confidence is None else dataclasses.replace(method, chance=1 - sure)


def own_generator(
    method: Sparse, rank: int, device: torch.device, generator: torch.Generator | None
) -> torch.Generator | None:
    """Draws that no other rank makes, even where generators of all processes are alike."""
    if method.chance == 0:
        return None
    seed = int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))
    # A CPU's generator knows the last 32 bits of its seed, and these are unlike for all ranks.
    return torch.Generator(device).manual_seed(seed + rank)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, reading: Reading, met: Context
) -> tuple[Tensor, Tensor, Tensor]:
    one_loss(grad, met)
    script = gradient_script(q, k, v, grad, reading, met.scale, len(met.keys))
    found, _ = over_processes(script, met.group)
    return found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype)
