"""Numbers exchanged between processes, and the gradient of that: an exchange the other way.

Everything here is one act: each process hands one piece to each. What is made of the pieces in between is
ordinary arithmetic that autograd knows. So the gradient of a sum over processes is a sum over processes, and that of a
scan over ranks a scan in the reverse order, without being written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from avow.distributed.point_to_point import Pending, Transfer


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        here, pieces = dist.get_rank(group), pieces.contiguous()
        received = pieces.clone()
        away = [rank for rank in range(len(pieces)) if rank != here]
        leaving = [Transfer(here, rank, pieces[rank]) for rank in away]
        Pending(leaving + [Transfer(rank, here, received[rank]) for rank in away], group).wait()
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return exchanged(gradients[0], ctx.group), None


def exchanged(pieces: Shaped[Tensor, "ranks *piece"], group: dist.ProcessGroup) -> Shaped[Tensor, "ranks *piece"]:
    """What each process, by rank, has for this one; `pieces` is what this one has for each."""
    return _Exchange.apply(pieces, group)  # type: ignore[no-untyped-call]  # torch gives it no types


def gathered(x: Shaped[Tensor, "*piece"], group: dist.ProcessGroup) -> Shaped[Tensor, "ranks *piece"]:
    """What every process says, by rank."""
    return exchanged(x.expand(dist.get_world_size(group), *x.shape), group)


def combined(
    x: Shaped[Tensor, "b g m c"], combine: Callable[[Tensor], Tensor], group: dist.ProcessGroup
) -> Shaped[Tensor, "b g m w"]:
    """What is made of the numbers of all processes, each of them doing its share of the rows m for all.

    `combine` gets (ranks, b, g, share, c), what each process has, and gives (ranks, b, g, share, w), what to tell each.
    Every number is thus computed once, so that all processes hold the same bits whatever machine they run on, and
    a process sends about the size of x twice, however many there are.
    """
    ranks, rows = dist.get_world_size(group), x.shape[-2]
    share = -(-rows // ranks)
    pieces = pad(x, (0, 0, 0, share * ranks - rows)).unflatten(-2, (ranks, share)).movedim(-3, 0)
    told = exchanged(combine(exchanged(pieces, group)), group)  # (ranks, b, g, share, w)
    return told.movedim(0, -3).flatten(-3, -2)[..., :rows, :]


def tied(out: Tensor, *exchanges: Tensor) -> Tensor:
    """The same answer, for autograd a function of all these: a process without rows must answer others' gradients."""
    followed = [x for x in exchanges if x.requires_grad]
    return out + sum((0 * x).sum().to(out.dtype) for x in followed) if followed else out
