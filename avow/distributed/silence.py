"""Who is missing, when somebody is: survivors tell each other whom they waited for, and name the same rank.

A process that waits in vain knows for whom. That one may only have given up itself, waiting for another: so each writes
down in the group's store whom it waited for, before it raises. Whoever wrote nothing is the one that is missing.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from avow.errors import LostRank

# Shares of a group's timeout: for a message, for the word of one that others wait for, and for leaving together; what
# is left is for the clocks. A long timeout is there for long work: words take no longer for it.
_PATIENCE, _GRACE, _LEAVING = 0.6, 0.25, 0.1
_LONGEST_GRACE = 10.0


def patience(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a process waits for one message: what the group's timeout leaves beside finding out who is missing."""
    return _PATIENCE * _timeout(group, device)


def lost(peer: int, problem: Exception, group: dist.ProcessGroup, device: torch.device) -> LostRank:
    """The error that names the rank that is missing, where waiting for `peer` ended with a problem.

    Returns when all others have found out, too, or had the time to.
    """
    limit = _timeout(group, device).total_seconds()
    grace, leaving = (min(share * limit, _LONGEST_GRACE) for share in (_GRACE, _LEAVING))
    here, how = dist.get_rank(group), "silent" if "imed out" in str(problem) else "gone"
    try:
        store = PrefixStore("avow/gave up", group.get_group_store())
        store.set(str(here), f"{peer} {how}")
        _hang_up(group, device)
        missing, how = _followed(store, here, peer, how, grace)
        others = [str(rank) for rank in range(dist.get_world_size(group)) if rank not in (here, missing)]
        until = time.monotonic() + leaving
        # The store may live in this process: it must not end while others read.
        while not all(store.check([rank]) for rank in others) and time.monotonic() < until:
            time.sleep(0.01)
    except (RuntimeError, OSError):
        # The store is gone, and with it the process that kept it; nobody can say more.
        missing, how = _keeper(group, peer), "gone"
    rule = "must take part until all have their answer"
    return LostRank(_name(missing, group), how, rule, "look at its log, and start the processes again")


def _hang_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let others notice now, who would else wait until their own patience ends, one after the other.

    gloo closes all connections of a process where one wait is too long, and so one that nobody will answer does it.
    """
    if device.type != "cpu":
        return
    here = dist.get_rank(group)
    for rank in range(dist.get_world_size(group)):
        if rank != here:
            with contextlib.suppress(RuntimeError):
                unanswered = dist.irecv(torch.zeros(1), group=group, group_src=rank, tag=1)
                assert unanswered is not None
                unanswered.wait(timedelta(milliseconds=1))


def _keeper(group: dist.ProcessGroup, otherwise: int) -> int:
    """The rank that kept the store: the first of all, where torchrun does not keep it and this group has that rank."""
    members = dist.get_process_group_ranks(group)
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return otherwise if theirs or 0 not in members else members.index(0)


def _name(rank: int, group: dist.ProcessGroup) -> str:
    """A rank of a group as its log knows it: by its number among all."""
    return f"rank {dist.get_global_rank(group, rank)}"


def _followed(store: Store, here: int, peer: int, how: str, grace: float) -> tuple[int, str]:
    """The end of the chain of who waited for whom: one that wrote nothing, or that others had given up before."""
    seen = {here}
    while peer not in seen:
        seen.add(peer)
        until = time.monotonic() + grace
        while not store.check([str(peer)]) and time.monotonic() < until:
            time.sleep(0.01)
        if not store.check([str(peer)]):
            break
        following, how = store.get(str(peer)).decode().split()
        peer = int(following)
    return peer, how


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
