r"""Sparse attention over shards of the keys: every process gets the answer, and each reads only what matters to all.

Shards first tell each other what their sketches say: how heavy their heaviest tokens may be, and how much weight, at
most and at least, stands in bins below that. So all know where one cut through the tokens of all shards leaves no more
unread than the tolerance allows; each reads what is before it, and a shard with nothing there reads nothing. What was
read and what was left add up over shards to one proof (`avow.distributed.shares`); a row whose proof falls short reads
on, up to a cut that is sure to do. On how tokens are spread over shards nothing depends but which of them are sketched
together.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.contract import Problem
from avow.distributed.agreement import meet
from avow.distributed.rounds import over_processes
from avow.distributed.sparse_rounds import Wish, shard_script
from avow.distributed.traffic import Group
from avow.errors import NotDifferentiable, ParameterError
from avow.methods.sparse import Sparse


def attend_sparse(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    method: Sparse | None = None,
    group: Group = None,
    tol: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """Softmax attention of the same queries to the keys of all processes, read in part; `k` and `v` are this shard.

    Every query sees every key; shards may differ in length and may be empty. The certificate is deterministic and the
    same in every process. With `tol`, no row's bound exceeds it, and together the processes read about as little as
    one would that had all keys; without, `method.drop` is what unread tokens may do. Where processes disagree on what
    they ask, or one of them cannot attend, all of them raise an error that names the rank. No gradient flows.
    """
    chosen = Sparse() if method is None else method
    asked = {"call": "attend_sparse", "tol": tol, "method": chosen}
    met = meet(q, k, v, group=group, scale=scale, enable_gqa=enable_gqa, shared_queries=True, asked=asked, reading=True)
    if chosen.chance > 0:
        raise ParameterError("method: chance", chosen.chance, "has no proof over shards", "use chance=0")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotDifferentiable("requires_grad", True, "has no gradient over processes", "use torch.no_grad()")
    problem = Problem.of(q.detach(), k.detach(), v.detach(), scale=scale, enable_gqa=enable_gqa)
    wish = Wish(tol, chosen, sum(met.keys), max(met.keys), len(met.keys))
    # Under autocast products would be narrower than the bounds allow for.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        (attended, _), _ = over_processes(shard_script(problem, wish), met.group)
    return attended
