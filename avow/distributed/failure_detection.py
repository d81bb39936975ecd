"""Who is missing, when somebody is: survivors tell each other whom they waited for, and name the same rank.

A process waits for a message as long as the group's timeout says; then it knows for whom it waited in vain. That one
may only have given up itself, waiting for another: so each writes down in the group's store whom it waited for, before
it raises. Whoever wrote nothing is the one that is missing. One that was too late finds its own name there: it names
the first who gave it up, and says so, never itself.
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

# What finding out takes at most, after the timeout and as shares of it: for the word of one that others wait for, and
# for leaving together. A long timeout is there for long work: words take no longer for it.
_GRACE, _LEAVING = 0.25, 0.1
_LONGEST_GRACE = 10.0
# What one that came too late knows of whom it finds gone.
_LATE = "late"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the processes of a group wait for one message."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def lost(peer: int, problem: Exception, group: dist.ProcessGroup, device: torch.device) -> LostRank:
    """The error that names the rank that is missing, where waiting for `peer` ended with a problem.

    Returns when all others have found out, too, or had the time to.
    """
    limit = timeout_of(group, device).total_seconds()
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
        missing, how = _keeper(group, here, peer), "gone"
    if how == _LATE:
        rule = f"waited for this process, {_name(here, group)}, longer than the group's timeout of {limit:g} s"
        return LostRank(_name(missing, group), "gone", rule, "raise the timeout if work between two calls takes longer")
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
                unanswered = dist.irecv(torch.zeros(1, device="cpu"), group=group, group_src=rank, tag=1)
                assert unanswered is not None
                unanswered.wait(timedelta(milliseconds=1))


def _keeper(group: dist.ProcessGroup, here: int, otherwise: int) -> int:
    """The rank that kept the store: the first of all, where torchrun does not keep it and this group has that rank."""
    members = dist.get_process_group_ranks(group)
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return otherwise if theirs or 0 not in members or members[here] == 0 else members.index(0)


def _name(rank: int, group: dist.ProcessGroup) -> str:
    """A rank of a group as its log knows it: by its number among all."""
    return f"rank {dist.get_global_rank(group, rank)}"


def _followed(store: Store, here: int, peer: int, how: str, grace: float) -> tuple[int, str]:
    """The end of the chain of who waited for whom: one that wrote nothing, or that came too late, never this process.

    Where this process is the one that came too late, it is whoever gave it up first.
    """
    waits = {here: (peer, how)}
    while peer not in waits:
        until = time.monotonic() + grace
        while not store.check([str(peer)]) and time.monotonic() < until:
            time.sleep(0.01)
        if not store.check([str(peer)]):
            return peer, how
        following, how = store.get(str(peer)).decode().split()
        waits[peer] = int(following), how
        peer = int(following)
    # A circle: one of it came when those who had waited for it until the timeout were gone.
    for waiting, (late, how) in waits.items():
        if how == "silent" and waits[late][1] == "gone":
            return (waiting, _LATE) if late == here else (late, how)
    return waits[here]
