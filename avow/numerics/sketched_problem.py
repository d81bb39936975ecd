"""What is known of a problem before its tokens are read: a sketch of its keys and the lengths of its values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avow.core import Problem
from avow.numerics import rounding
from avow.numerics.gather import Tokens
from avow.numerics.masks import at_rows, visible
from avow.numerics.norms import row_norms, slack
from avow.numerics.sketch import Sketch
from avow.numerics.token_ranking import ALONE, SketchedRows


@dataclass(frozen=True)
class Known:
    """A problem, bounds on the lengths of its values, and the sketch of its keys."""

    problem: Problem
    lengths: Float64[Tensor, "b g 1 s"]
    size: Float64[Tensor, "b g 1 1"]
    sketch: Sketch
    gathers: bool
    """Whether only chosen tokens may be touched."""

    @staticmethod
    def of(p: Problem, sketch: Sketch, gathers: bool) -> Known:
        lengths = _lengths(p.v.detach()) if p.known_norms is None else p.known_norms.v  # (b, g, s)
        return Known(p, lengths.unsqueeze(-2), _size(lengths), sketch, gathers)

    def tokens(self, rows: slice) -> Tokens:
        """Some rows of queries and all tokens; what must not be touched is only passed on."""
        p = self.problem
        q = self._rows(p.q[:, :, rows]).double() * p.scale
        return Tokens(q, p.k, p.v, self._bias(rows), self.size)

    def view(self, rows: slice, siblings: int, bias: Float64[Tensor, "b g r s"] | None) -> SketchedRows:
        """What the sketch says of some rows, of which so many share an order of tokens."""
        q = self._rows(self.problem.q[:, :, rows].detach())
        bias = None if bias is None else bias.detach()
        return SketchedRows.of(
            q, self.sketch, self.lengths[:, :, 0], self.problem.scale, siblings, ALONE, self._seen(rows), bias
        )

    def longest(self, rows: slice) -> Float64[Tensor, "b g r 1"]:
        """A lower bound on the longest value that each row sees: zero only where all of them are."""
        p, seen = self.problem, self._seen(rows)
        longest = (self.lengths if seen is None else torch.where(seen, self.lengths, 0.0)).amax(-1, keepdim=True)
        b, h, n = p.q[:, :, rows].shape[:3]
        groups = p.k.shape[1]
        return (longest * (1 - 2 * slack(p.v.shape[-1], p.v.dtype))).expand(b, groups, h // max(groups, 1) * n, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """Rows of query heads, (b, h, n, c), as rows of the key head they share: (b, g, r, c)."""
        b, h, n, c = x.shape
        groups = self.problem.k.shape[1]
        return x.reshape(b, groups, h // max(groups, 1) * n, c)

    def _seen(self, rows: slice) -> Bool[Tensor, "b g r s"] | None:
        """Which tokens each row sees; None where it sees them all."""
        p = self.problem
        b, h, n = p.q[:, :, rows].shape[:3]
        seen = visible(p, rows)
        return None if seen is None else self._rows(seen.expand(b, h, n, -1))

    def _bias(self, rows: slice) -> Float64[Tensor, "b g r s"] | None:
        """Biases below the highest that a row sees: what all keys share cancels, and may be huge."""
        p = self.problem
        if p.bias is None:
            return None
        b, h, n = p.q[:, :, rows].shape[:3]
        bias = self._rows(at_rows(p.bias, rows).double().expand(b, h, n, p.k.shape[-2]))
        seen = self._seen(rows)
        top = (bias if seen is None else torch.where(seen, bias, -math.inf)).detach().amax(-1, keepdim=True)
        return bias - top.masked_fill(top == -math.inf, 0.0)


def _size(lengths: Float64[Tensor, "b g s"]) -> Float64[Tensor, "b g 1 1"]:
    """The power of two that brings a head's values near one."""
    largest = lengths.amax(-1).clamp(min=4 * torch.finfo(torch.float64).tiny)
    return torch.exp2(torch.floor(torch.log2(largest)))[..., None, None]


def _lengths(v: Tensor) -> Float64[Tensor, "b g s"]:
    """Upper bounds on the lengths of values; compiled, without a look at how large they are."""
    if torch.compiler.is_compiling():
        norms = torch.linalg.vector_norm(v.to(rounding.accumulator(v.dtype)), dim=-1)
        return norms.double() * (1 + slack(v.shape[-1], v.dtype) / 2)
    return row_norms(v, "v", faithful=True)
