"""Shards that talk in rounds: a script says what one of them sends and receives; it runs over processes, or in one.

A script is a generator. It yields what its shard sends, is handed what it receives, and returns its answer. Every shard
runs the same script, so all send in the same order. Two things are ever sent: a piece for each shard, or something for
the next one; all else is made of those, each number by one shard, so that all have the same bits on any machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from avow.distributed.comm_cost import NOTHING, Traffic
from avow.distributed.exchange import exchanged
from avow.distributed.point_to_point import Pending, Transfer

_Answer = TypeVar("_Answer")


class AllToAll(NamedTuple):
    """A piece for each shard, in their order; what is received is a piece of each."""

    pieces: Shaped[Tensor, "ranks *piece"]


class RingShift(NamedTuple):
    """Something for the next shard, the first being next to the last; what is received is of the same size."""

    numbers: Tensor


Protocol = Generator[AllToAll | RingShift, Tensor, _Answer]


def all_gather(x: Shaped[Tensor, "*piece"], ranks: int) -> Protocol[Shaped[Tensor, "ranks *piece"]]:
    """What every shard says, in their order."""
    said = yield AllToAll(x.expand(ranks, *x.shape))
    return said


def all_reduce(x: Shaped[Tensor, "*shape"], ranks: int) -> Protocol[Shaped[Tensor, "*shape"]]:
    """The sum of what every shard has."""
    found = yield from _combined(x, ranks, torch.add)
    return found


def all_max(x: Shaped[Tensor, "*shape"], ranks: int) -> Protocol[Shaped[Tensor, "*shape"]]:
    """The largest of what every shard has."""
    found = yield from _combined(x, ranks, torch.maximum)
    return found


def _combined(x: Tensor, ranks: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Protocol[Tensor]:
    """Each shard combines its share of the numbers, one shard after the other, and tells it to all."""
    share = -(-x.numel() // ranks)
    pieces = yield AllToAll(pad(x.flatten(), (0, share * ranks - x.numel())).reshape(ranks, share))
    mine = functools.reduce(combine, pieces.unbind(0))
    shares = yield from all_gather(mine, ranks)
    return shares.flatten()[: x.numel()].reshape(x.shape)


def over_processes(script: Protocol[_Answer], group: dist.ProcessGroup) -> tuple[_Answer, Traffic]:
    """What the script of this process's shard returns, and what it sent; the other processes run theirs."""
    ranks, load = dist.get_world_size(group), NOTHING
    received: Tensor | None = None
    while True:
        try:
            sent = script.send(received)  # type: ignore[arg-type]  # a generator starts by being sent None
        except StopIteration as done:
            return done.value, load
        load += _load(sent, ranks)
        received = exchanged(sent.pieces, group) if isinstance(sent, AllToAll) else _passed(sent.numbers, group)


def side_by_side(scripts: Sequence[Protocol[_Answer]]) -> tuple[list[_Answer], list[Traffic]]:
    """What the scripts of all shards return, and what each sent, when they run in this process."""
    ranks = len(scripts)
    received: list[Tensor] | list[None] = [None] * ranks
    loads = [NOTHING] * ranks
    while True:
        sent: list[AllToAll | RingShift] = []
        answers: list[_Answer] = []
        for script, heard in zip(scripts, received, strict=True):
            try:
                sent.append(script.send(heard))  # type: ignore[arg-type]  # as above
            except StopIteration as done:
                answers.append(done.value)
        if not sent:
            return answers, loads
        loads = [load + _load(one, ranks) for load, one in zip(loads, sent, strict=True)]
        pieces = [one.pieces for one in sent if isinstance(one, AllToAll)]
        numbers = [one.numbers for one in sent if isinstance(one, RingShift)]
        # All are at the same place of the same script.
        assert ranks in (len(pieces), len(numbers))
        received = _dealt(pieces) if pieces else [numbers[rank - 1] for rank in range(ranks)]


def _dealt(pieces: list[Tensor]) -> list[Tensor]:
    """What each shard receives of the pieces that each has for it."""
    if all(one.stride(0) == 0 for one in pieces):
        # The same for all: then one copy does for all.
        return [torch.stack([one[0] for one in pieces])] * len(pieces)
    return list(torch.stack(pieces, 1).unbind(0))


def _load(sent: AllToAll | RingShift, ranks: int) -> Traffic:
    """What leaves a shard: its own piece stays."""
    if ranks == 1:
        return NOTHING
    if isinstance(sent, RingShift):
        return Traffic(sent.numbers.numel() * sent.numbers.element_size(), 1, 1)
    return Traffic(sent.pieces[1:].numel() * sent.pieces.element_size(), ranks - 1, 1)


def _passed(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    here, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return numbers
    numbers, received = numbers.contiguous(), torch.zeros_like(numbers, memory_format=torch.contiguous_format)
    there, back = Transfer(here, (here + 1) % ranks, numbers), Transfer((here - 1) % ranks, here, received)
    Pending([there, back], group).wait()
    return received
