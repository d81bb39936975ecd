"""Rounds of communication as generators: each method is one, run over processes, in one process, or priced.

A protocol yields what its shard sends, is handed what it receives, and returns its result. Every shard runs the same
protocol, so all send in the same order. Each number that all shards need is computed by one of them, so that all have
the same bits on any machine. Three things can be done with a protocol:

    over_processes   each process of a group runs that of its shard
    side_by_side     this process runs those of all shards, hundreds of them if need be
    traffic          this process runs that of one shard on meta tensors, and counts what it would send

Between its rounds a method computes, and on meta tensors that would take torch seconds: it loads its compiler for them.
So a method's price is that of its rounds alone (`gather_message`, `combine_message`), which are held to what its whole
protocol sends, to the byte (`avow bench shards`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from avow.core import Problem
from avow.distributed.point_to_point import Pending, Transfer

_Result = TypeVar("_Result")


class AllToAll(NamedTuple):
    """A piece for each shard, by rank; the reply holds a piece of each."""

    pieces: Shaped[Tensor, "ranks *piece"]


class Post(NamedTuple):
    """Transfers that this rank takes part in begin; the tensors it receives are filled at the next `Wait`."""

    rank: int
    transfers: Sequence[Transfer]


class Wait(NamedTuple):
    """The transfers posted before have arrived."""


Round = AllToAll | Post | Wait
Protocol = Generator[Round, Any, _Result]


class Traffic(NamedTuple):
    """Bytes that one rank sends, in how many messages, and how often in turn it waits for one."""

    sent: int
    messages: int
    waits: int

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]  # tuples would be concatenated
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Traffic(0, 0, 0)


@dataclass(frozen=True)
class Shard:
    """The part of a problem that one rank holds, and how many rows and keys each rank has."""

    problem: Problem
    rank: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @property
    def total(self) -> int:
        """The number of keys of all shards."""
        return sum(self.keys)

    @property
    def before(self) -> int:
        """The number of keys in shards before this one."""
        return sum(self.keys[: self.rank])

    @staticmethod
    def split(p: Problem, ranks: int, shared_queries: bool) -> list[Shard]:
        """Shards of about equal length, each with its part of the queries or with all of them."""
        ends = [[i * x.shape[-2] // ranks for i in range(ranks + 1)] for x in (p.q, p.k)]
        rows, keys = (tuple(b - a for a, b in itertools.pairwise(one)) for one in ends)
        shards = []
        for rank in range(ranks):
            own, held = (slice(*one[rank : rank + 2]) for one in ends)
            q = p.q if shared_queries else p.q[:, :, own]
            part = dataclasses.replace(p, q=q, k=p.k[:, :, held], v=p.v[:, :, held])
            shards.append(Shard(part, rank, (p.q.shape[-2],) * ranks if shared_queries else rows, keys))
        return shards


def all_gather(x: Shaped[Tensor, "*piece"], ranks: int) -> Protocol[Shaped[Tensor, "ranks *piece"]]:
    """What every shard has, by rank."""
    gathered = yield AllToAll(x.expand(ranks, *x.shape))
    return gathered


def all_reduce(x: Shaped[Tensor, "*shape"], ranks: int) -> Protocol[Shaped[Tensor, "*shape"]]:
    """The sum of what every shard has."""
    return (yield from _reduce(x, ranks, torch.add))


def all_max(x: Shaped[Tensor, "*shape"], ranks: int) -> Protocol[Shaped[Tensor, "*shape"]]:
    """The largest of what every shard has."""
    return (yield from _reduce(x, ranks, torch.maximum))


def _reduce(x: Tensor, ranks: int, pair: Callable[[Tensor, Tensor], Tensor]) -> Protocol[Tensor]:
    def combine(pieces: Tensor) -> Tensor:
        return functools.reduce(pair, pieces.unbind(0)).expand_as(pieces)

    reduced = yield from combine_rows(x.reshape(1, 1, x.numel(), 1), combine, ranks)
    return reduced.reshape(x.shape)


def combine_rows(
    x: Shaped[Tensor, "b g m c"], combine: Callable[[Tensor], Tensor], ranks: int
) -> Protocol[Shaped[Tensor, "b g m w"]]:
    """What `combine` makes of the numbers of all shards, each of them computing its share of the rows m for all.

    `combine` gets (ranks, b, g, share, c), what each shard has, and gives (ranks, b, g, share, w), what to send to
    each. A shard sends about the size of x twice, however many there are.
    """
    rows = x.shape[-2]
    share = -(-rows // ranks)
    pieces = pad(x, (0, 0, 0, share * ranks - rows)).unflatten(-2, (ranks, share)).movedim(-3, 0)
    received = yield AllToAll(pieces)
    combined = yield AllToAll(combine(received))  # (ranks, b, g, share, w)
    return combined.movedim(0, -3).flatten(-3, -2)[..., :rows, :]


def over_processes(protocol: Protocol[_Result], group: dist.ProcessGroup) -> _Result:
    """The result of this process's shard; the other processes run the protocols of theirs."""
    reply: Tensor | None = None
    pending: Pending | None = None
    while True:
        try:
            sent = protocol.send(reply)
        except StopIteration as done:
            result: _Result = done.value
            return result
        reply = None
        if isinstance(sent, AllToAll):
            reply = exchange(sent.pieces, group)
        elif isinstance(sent, Post):
            pending = Pending(sent.transfers, group)
        elif pending is not None:
            pending.wait()


def side_by_side(protocols: Sequence[Protocol[_Result]]) -> tuple[list[_Result], list[Traffic]]:
    """The results of all shards, and what each sent, when their protocols run in this process."""
    ranks = len(protocols)
    replies: list[Any] = [None] * ranks
    sent_by = [NOTHING] * ranks
    while True:
        rounds: list[Round] = []
        results: list[_Result] = []
        for protocol, reply in zip(protocols, replies, strict=True):
            try:
                rounds.append(protocol.send(reply))
            except StopIteration as done:
                results.append(done.value)
        if not rounds:
            return results, sent_by
        # All are at the same place of the same protocol.
        assert len(rounds) == ranks and len({type(one) for one in rounds}) == 1
        sent_by = [total + _sent(one, ranks) for total, one in zip(sent_by, rounds, strict=True)]
        replies = _replies(rounds)


def traffic(protocols: Iterable[Protocol[Any]], ranks: int) -> Traffic:
    """What one of so many shards sends that runs these protocols on meta tensors, one after the other."""
    total = NOTHING
    for protocol in protocols:
        reply = None
        try:
            while True:
                sent = protocol.send(reply)
                total += _sent(sent, ranks)
                reply = sent.pieces.new_empty(sent.pieces.shape) if isinstance(sent, AllToAll) else None
        except StopIteration:
            continue
    return total


def gather_message(*shape: int, dtype: torch.dtype = torch.float64, ranks: int) -> Protocol[Tensor]:
    """`all_gather` of numbers of this shape, without the numbers."""
    return all_gather(torch.empty(shape, dtype=dtype, device="meta"), ranks)


def combine_message(
    *shape: int, width: int | None = None, dtype: torch.dtype = torch.float64, ranks: int
) -> Protocol[Tensor]:
    """`combine_rows` of numbers of shape (b, g, m, c), without the numbers; the result is `width` wide, or c."""

    def combine(pieces: Tensor) -> Tensor:
        return pieces.new_empty(*pieces.shape[:-1], pieces.shape[-1] if width is None else width)

    return combine_rows(torch.empty(shape, dtype=dtype, device="meta"), combine, ranks)


def _sent(sent: Round, ranks: int) -> Traffic:
    """What leaves a shard in a round: its own piece stays, and nothing empty is sent."""
    if isinstance(sent, AllToAll):
        size = sent.pieces[1:].nbytes
        return Traffic(size, ranks - 1, 1) if size else NOTHING
    if isinstance(sent, Post):
        moving = [one for one in sent.transfers if one.tensor.numel()]
        leaving = [one.tensor.nbytes for one in moving if one.source == sent.rank]
        return Traffic(sum(leaving), len(leaving), int(bool(moving)))
    return NOTHING


def _replies(rounds: list[Round]) -> list[Any]:
    pieces = [one.pieces for one in rounds if isinstance(one, AllToAll)]
    if pieces and all(one.stride(0) == 0 for one in pieces):
        # The same for all: then one copy does for all.
        return [torch.stack([one[0] for one in pieces])] * len(pieces)
    if pieces:
        return list(torch.stack(pieces, 1).unbind(0))
    posts = [one for one in rounds if isinstance(one, Post)]
    leaving: dict[tuple[int, int], list[Tensor]] = {}
    for post in posts:
        for one in post.transfers:
            if one.source == post.rank:
                leaving.setdefault((one.source, one.target), []).append(one.tensor)
    for post in posts:
        for one in post.transfers:
            if one.target == post.rank:
                one.tensor.copy_(leaving[one.source, one.target].pop(0))
    return [None] * len(rounds)


class _Exchange(torch.autograd.Function):
    """A piece from each process to each; its gradient is an exchange the other way.

    What is made of the pieces is ordinary arithmetic that autograd knows: so the gradient of a sum over processes is a
    sum over processes, and that of a scan over ranks a scan in the reverse order.
    """

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        here, ranks, same = dist.get_rank(group), len(pieces), pieces.stride(0) == 0
        mine = pieces[here].contiguous()
        received = torch.empty(pieces.shape, dtype=pieces.dtype, device=pieces.device)
        received[here] = mine
        transfers = []
        for rank in range(ranks):
            if rank != here:
                transfers.append(Transfer(here, rank, mine if same else pieces[rank].contiguous()))
                transfers.append(Transfer(rank, here, received[rank]))
        Pending(transfers, group).wait()
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return exchange(gradients[0], ctx.group), None


def exchange(pieces: Shaped[Tensor, "ranks *piece"], group: dist.ProcessGroup) -> Shaped[Tensor, "ranks *piece"]:
    """What each process, by rank, has for this one; `pieces` is what this one has for each."""
    return _Exchange.apply(pieces, group)  # type: ignore[no-untyped-call]  # torch gives it no types


def depend_on(out: Tensor, *exchanged: Tensor) -> Tensor:
    """The same numbers, for autograd a function of all these: a process without rows must answer others' gradients."""
    followed = [x for x in exchanged if x.requires_grad]
    return out + sum((0 * x).sum().to(out.dtype) for x in followed) if followed else out
