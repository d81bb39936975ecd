"""Where queries and keys of all shards are centred: the frame of the whole sequence, the same bits in each process."""

from __future__ import annotations

import torch
from torch import Tensor

from avow.distributed.exchange import combined
from avow.distributed.shards import Shards
from avow.numerics import features
from avow.numerics.features import Frame
from avow.numerics.heads import grouped


def centred_frame(shards: Shards, dtype: torch.dtype) -> Frame:
    """The frame that one process with all queries and keys would take, up to rounding."""
    p = shards.problem
    rows, keys = grouped(p.q, p.k.shape[1]), p.k.unsqueeze(2)  # (b, g, r, n, d), (b, g, 1, s, d)
    parts = [_sampled(rows, shards.queries, shards.rank), _sampled(keys, shards.keys, shards.rank)]
    shares = [_shares(rows.shape[2], shards.queries, rows), _shares(1, shards.keys, rows)]

    def combine(said: Tensor) -> Tensor:
        moments = (_joined(said[..., 2 * i], said[..., 2 * i + 1], shares[i].to(said.dtype)) for i in range(2))
        (mean_q, spread_q), (mean_k, spread_k) = moments
        frame = features.balanced(mean_q, spread_q, mean_k, spread_k)
        return torch.stack(frame, -1).expand(shards.ranks, *mean_q.shape, 3)

    mine = torch.stack([moment for x in parts for moment in _moments(x.to(dtype))], -1)  # (b, g, d, 4)
    found = combined(mine, combine, shards.group)
    return Frame(*found.transpose(-1, -2).split(1, -2))  # (b, g, 1, d) each


def _taken(repeats: int, lengths: tuple[int, ...], rank: int) -> list[range]:
    """Which rows of a shard belong to the sample of all, for each query head of a key head.

    Rows are counted as if one process held them, head after head.
    """
    total, before = sum(lengths), sum(lengths[:rank])
    step = features.sample_step(repeats * total)
    return [range(-(head * total + before) % step, lengths[rank], step) for head in range(repeats)]


def _sampled(x: Tensor, lengths: tuple[int, ...], rank: int) -> Tensor:
    pieces = [x[:, :, head, some.start :: some.step] for head, some in enumerate(_taken(x.shape[2], lengths, rank))]
    return torch.cat(pieces, 2)


def _shares(repeats: int, lengths: tuple[int, ...], like: Tensor) -> Tensor:
    """What part of the sample lies in each shard."""
    counts = [sum(map(len, _taken(repeats, lengths, rank))) for rank in range(len(lengths))]
    whole = max(sum(counts), 1)
    return torch.tensor([count / whole for count in counts], dtype=torch.float64, device=like.device)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square about it of each feature; zero where there is no row."""
    count = max(x.shape[-2], 1)
    mean = x.sum(-2) / count
    return mean, (x - mean.unsqueeze(-2)).square().sum(-2) / count


def _joined(means: Tensor, spreads: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of all shards from those of each."""
    share = shares[:, None, None, None]
    mean = (share * means).sum(0)
    return mean, (share * (spreads + (means - mean).square())).sum(0)
