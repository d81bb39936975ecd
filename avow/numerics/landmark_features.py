"""Features by landmarks, of rows and of keys, a tile at a time, and what a bound must know of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avow.core import Problem
from avow.numerics import cholesky, scan
from avow.numerics.features import Frame, framed_keys, framed_queries
from avow.numerics.heads import grouped


class WeightedKeys(NamedTuple):
    """Keys in a frame, each with the log of its weight."""

    frame: Frame
    points: Float64[Tensor, "b g s d"]
    log: Float64[Tensor, "b g s 1"]
    seen: Bool[Tensor, "#b #g s 1"] | None

    @staticmethod
    def of(
        p: Problem,
        frame: Frame,
        seen: Bool[Tensor, "#b #g s 1"] | None = None,
        added: Float64[Tensor, "#b #g s 1"] | None = None,
    ) -> WeightedKeys:
        """The keys of a problem; what is `added` to a key's logits adds to its log."""
        points, _, shift = framed_keys(p, frame, slice(None), torch.float64)
        if seen is not None:
            # What no row may see must not stretch the space the landmarks live in.
            points, shift = torch.where(seen, points, 0.0), torch.where(seen, shift, 0.0)
        log = shift + points.square().sum(-1, keepdim=True)  # ‖k‖²/2 + the shift of the queries
        return WeightedKeys(frame, points, log if added is None else log + added, seen)


class Rows(NamedTuple):
    """What a bound must know of rows; features are relative to the nearest landmark of each."""

    residual: Float64[Tensor, "b h l"]
    """What landmarks miss of it."""
    norm: Float64[Tensor, "b h l"]
    """Of the features."""
    log: Float64[Tensor, "b h l"]
    """Of the nearest landmark."""
    radius: Float64[Tensor, "b h l"]
    """How long it is in the frame."""


class LandmarkFeatures:
    """Features of a problem's rows and keys by some landmarks, and notes on all that were asked for, in that order."""

    def __init__(self, p: Problem, keys: WeightedKeys, factor: cholesky.Factor) -> None:
        self.keys, self.factor, self._problem = keys, factor, p
        # Where there is no key, there still is something to join.
        self._residuals = [keys.points.new_zeros(*keys.points.shape[:2], 0)]
        self._rows: list[Rows] = []

    def of_keys(self, span: slice) -> scan.Keys:
        """Those of some keys, with their weights, as a scan takes them."""
        phi = cholesky.features(self.factor, self.keys.points[..., span, :])
        self._residuals.append(cholesky.residual(phi.detach(), self.factor.slack))
        seen = None if self.keys.seen is None else self.keys.seen[..., span, :]
        return scan.Keys(self.keys.log[..., span, :].clone(), phi, seen)

    def of_rows(self, rows: slice) -> Float64[Tensor, "b g r l m"]:
        """Those of some rows, relative to the nearest landmark of each."""
        queries = framed_queries(self._problem, self.keys.frame, rows, torch.float64)
        x = grouped(queries, self._problem.k.shape[1])  # (b, g, r, l, d)
        flat = x.flatten(2, 3)
        log = cholesky.log_gauss(flat, self.factor.landmarks)
        near = log.detach().amax(-1, keepdim=True)
        phi = torch.exp(log - near) @ self.factor.b.transpose(-1, -2)
        with torch.no_grad():
            left = cholesky.residual(phi * torch.exp(near), self.factor.slack)
            norm, radius = (torch.linalg.vector_norm(y, dim=-1) for y in (phi, flat))
            by_row = (y.unflatten(2, x.shape[2:4]).flatten(1, 2) for y in (left, norm, near[..., 0], radius))
            self._rows.append(Rows(*by_row))
        return phi.unflatten(2, x.shape[2:4])

    @property
    def key_residual(self) -> Float64[Tensor, "b g s"]:
        """What landmarks miss of each key."""
        return torch.cat(self._residuals, -1)

    @property
    def rows(self) -> Rows:
        """The notes on all of them."""
        return Rows(*(torch.cat(column, -1) for column in zip(*self._rows, strict=True)))
