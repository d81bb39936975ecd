"""Every byte that leaves this process for another goes through here, and is counted.

All that processes tell each other is made of one thing: some of them send, some receive, each knows from whom. What
all have to know is sent by each to each, so that a silence always has a name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from avow.distributed.failure_detection import lost, timeout_of
from avow.errors import ParameterError

Group = dist.ProcessGroup | DeviceMesh | None
"""Processes that know each other: a group, a mesh of one axis, or all of them."""


# Bytes that a process says at a time: few words, so that what agreeing costs is known beforehand.
PAGE = 2048


@dataclass
class Traffic:
    """What this process sent, and in how many messages."""

    sent: int = 0
    messages: int = 0


class Transfer(NamedTuple):
    """A tensor on its way from one rank of a group to another: contiguous, of the same size at both ends."""

    source: int
    target: int
    tensor: Tensor


_COUNTING: list[Traffic] = []


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what this process sends to others inside the block.

    >>> with counted() as traffic:
    ...     pass
    >>> traffic.sent
    0
    """
    here = Traffic()
    _COUNTING.append(here)
    try:
        yield here
    finally:
        _COUNTING[:] = [one for one in _COUNTING if one is not here]


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group behind a group, a mesh, or nothing said."""
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or use avow.attend"
        raise ParameterError("group", group, "needs processes that know each other", remedy)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ParameterError(
                "group", group, "must have one axis", 'pass the axis of the sequence: mesh["sequence"]'
            )
        return group.get_group()
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise ParameterError(
            "group", found, "must be one that this process is in", "call it in members of the group only"
        )
    return found


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
        for one in mine:
            if one.source == self._here:
                for traffic in _COUNTING:
                    traffic.sent += one.tensor.numel() * one.tensor.element_size()
                    traffic.messages += 1
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
        plain = one.tensor.view(-1).view(torch.uint8)
        if one.source == self._here:
            return dist.P2POp(dist.isend, plain, group=self._group, group_peer=one.target)
        return dist.P2POp(dist.irecv, plain, group=self._group, group_peer=one.source)

    @contextlib.contextmanager
    def _naming(self, one: Transfer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if one.tensor.is_cuda:
                raise  # whom a batch waited for, NCCL does not say
            peer = one.target if one.source == self._here else one.source
            raise lost(peer, error, self._group, one.tensor.device) from error


def gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all processes, by rank; all have the same size and type."""
    here, count = dist.get_rank(group), dist.get_world_size(group)
    x = x.contiguous()
    found = [x if rank == here else torch.zeros_like(x) for rank in range(count)]
    journeys = [(source, target) for source in range(count) for target in range(count) if source != target]
    Pending([Transfer(source, target, found[source]) for source, target in journeys], group).wait()
    return found
