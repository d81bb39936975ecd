"""Logs of random features, of rows and of keys, a tile at a time."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Problem
from avow.numerics.features import Frame, framed_keys, framed_queries
from avow.numerics.heads import grouped


class FeatureLogs:
    """Logs of the features of a problem along some directions, and notes on how long rows and keys are in the frame."""

    def __init__(self, p: Problem, directions: Float[Tensor, "m d"], frame: Frame, wide: torch.dtype) -> None:
        self.problem, self.directions, self.frame, self.wide = p, directions, frame, wide
        # (b, g, d, m): one product per head
        self._across = directions.to(wide).T.expand(*p.k.shape[:2], -1, -1).contiguous()
        # Where there is neither row nor key, there still is something to join.
        self.query_radii: list[Float[Tensor, "b h l"]] = [p.q.new_zeros(*p.q.shape[:2], 0, dtype=wide)]
        self.key_radii: list[Float[Tensor, "b g 1"]] = [p.k.new_zeros(*p.k.shape[:2], 1, dtype=wide)]

    def of_rows(self, span: slice) -> Float[Tensor, "b g r l m"]:
        """Those of some rows, as many in each of the r query heads that share a key head."""
        rows = framed_queries(self.problem, self.frame, span, self.wide)
        self.query_radii.append(torch.linalg.vector_norm(rows.detach(), dim=-1))
        return grouped(rows, self.problem.k.shape[1]) @ self._across.unsqueeze(2)

    def of_keys(self, span: slice) -> tuple[Float[Tensor, "b g l m"], Float[Tensor, "b g l 1"]]:
        """Those of some keys, and what each key adds to all of its own."""
        keys, length, shift = framed_keys(self.problem, self.frame, span, self.wide)
        self.key_radii.append(length.detach()[..., 0].amax(-1, keepdim=True))
        return keys @ self._across, shift

    @property
    def query_radius(self) -> Float[Tensor, "b h l"]:
        """The length in the frame of every row that was asked for, in that order."""
        return torch.cat(self.query_radii, -1)

    @property
    def key_radius(self) -> Float[Tensor, "b g 1"]:
        """The length in the frame of the longest key that was asked for."""
        return torch.cat(self.key_radii, -1).amax(-1, keepdim=True)
