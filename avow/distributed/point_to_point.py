"""Every byte that leaves this process for another goes through here, and is counted; a rank that is missing is named.

All that processes send each other is made of one thing: some of them send, some receive, each knows from whom. What
all have to know is sent by each to each, so that a silence always has a name.

A process waits for a message as long as the group's timeout says; then it knows for whom it waited in vain. That one
may only have given up itself, waiting for another: so each writes down in the group's store whom it waited for, before
it raises. Whoever wrote nothing is the one that is missing. One that was too late finds its own name there: it names
the first who gave it up, and says so, never itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from avow.errors import LostRank, ParameterError

Group = dist.ProcessGroup | DeviceMesh | None
"""Processes that know each other: a group, a mesh of one axis, or all of them."""


# Bytes of a message by which processes agree: one size, so that its cost is known beforehand.
PAGE = 2048
# What finding out takes at most, after the timeout and as shares of it: for the word of one that others wait for, and
# for leaving together. A long timeout is there for long work: words take no longer for it.
_GRACE, _LEAVING = 0.25, 0.1
_LONGEST_GRACE = 10.0
# What one that came too late knows of whom it finds gone.
_LATE = "late"


@dataclass(eq=False)
class Counter:
    """Bytes that this process sent, and in how many messages."""

    sent: int = 0
    messages: int = 0


class Transfer(NamedTuple):
    """A tensor on its way from one rank of a group to another: contiguous, of the same size at both ends."""

    source: int
    target: int
    tensor: Tensor


_COUNTING: list[Counter] = []


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts what this process sends to others inside the block.

    >>> with counted() as traffic:
    ...     pass
    >>> traffic.sent
    0
    """
    here = Counter()
    _COUNTING.append(here)
    try:
        yield here
    finally:
        _COUNTING.remove(here)


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group behind a group, a mesh, or None."""
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or use avow.attend"
        raise ParameterError("group", group, "needs processes that know each other", remedy)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            remedy = 'pass the axis of the sequence: mesh["sequence"]'
            raise ParameterError("group", group, "must have one axis", remedy)
        return group.get_group()
    processes = dist.group.WORLD if group is None else group
    if not isinstance(processes, dist.ProcessGroup) or dist.get_rank(processes) < 0:
        rule = "must be one that this process is in"
        raise ParameterError("group", processes, rule, "call it in members of the group only")
    return processes


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where processes of a group tell each other words: a CPU where it joins those, else the GPU of each."""
    kinds = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])


class Pending:
    """Transfers under way; `wait` ends when those that this process takes part in are through.

    Where another process is gone, or silent for too long, `LostRank` names it.
    """

    def __init__(self, transfers: Sequence[Transfer], group: dist.ProcessGroup) -> None:
        self._group, self._here = group, dist.get_rank(group)
        # Empty tensors need no journey: both ends know their sizes.
        mine = [one for one in transfers if self._here in (one.source, one.target) and one.tensor.numel()]
        self._works: list[tuple[Transfer, dist.Work]] = []
        leaving = [one.tensor.nbytes for one in mine if one.source == self._here]
        for counter in _COUNTING:
            counter.sent += sum(leaving)
            counter.messages += len(leaving)
        # GPUs must hear of all transfers at once; elsewhere each has its own peer to name where it fails.
        at_once = [mine] if mine and mine[0].tensor.is_cuda else [[one] for one in mine]
        for some in at_once:
            with self._naming(some[0]):
                works = dist.batch_isend_irecv([self._operation(one) for one in some])
            self._works += [(some[0], work) for work in works]

    def wait(self) -> None:
        start = time.monotonic()
        for one, work in self._works:
            with self._naming(one):
                if one.tensor.is_cuda:
                    work.wait()  # the stream waits; what goes wrong there, NCCL tells
                else:
                    left = timeout_of(self._group, one.tensor.device) - timedelta(seconds=time.monotonic() - start)
                    work.wait(max(left, timedelta(milliseconds=1)))

    def _operation(self, one: Transfer) -> dist.P2POp:
        operation, peer = (dist.isend, one.target) if one.source == self._here else (dist.irecv, one.source)
        return dist.P2POp(operation, one.tensor.view(-1).view(torch.uint8), group=self._group, group_peer=peer)

    @contextlib.contextmanager
    def _naming(self, one: Transfer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if one.tensor.is_cuda:
                raise  # whom a batch waited for, NCCL does not say
            peer = one.target if one.source == self._here else one.source
            raise lost(peer, error, self._group, one.tensor.device) from error


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the processes of a group wait for one message."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def lost(peer: int, error: Exception, group: dist.ProcessGroup, device: torch.device) -> LostRank:
    """The error that names the rank that is missing, after waiting for `peer` ended with an error.

    Returns when all others have found out, too, or had the time to.
    """
    limit = timeout_of(group, device).total_seconds()
    grace, leaving = (min(share * limit, _LONGEST_GRACE) for share in (_GRACE, _LEAVING))
    here, how = dist.get_rank(group), "silent" if "imed out" in str(error) else "gone"
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
