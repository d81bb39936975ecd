"""Matrices of balls: flint's own, and what proofs about tensors ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from avow.numerics import intervals

if TYPE_CHECKING:
    from flint import arb, arb_mat


def stacked(rows: Sequence[Sequence[arb]]) -> arb_mat:
    """A matrix from its rows."""
    from flint import arb_mat

    return arb_mat([list(row) for row in rows])


def rounded(x: arb_mat, dtype: torch.dtype) -> Tensor:
    """The middles of the balls, rounded to a type."""
    flat = [float(entry.mid()) for entry in x.entries()]
    return torch.tensor(flat, dtype=torch.float64).reshape(x.nrows(), x.ncols()).to(dtype)


def frobenius(x: arb_mat) -> arb:
    """The Frobenius norm."""
    return intervals.norm(x.entries())


def longest(x: arb_mat) -> arb:
    """The largest norm of a row."""
    return intervals.most(intervals.norm(row) for row in x.tolist())


def spectral(x: arb_mat) -> arb:
    """At least the spectral norm, and at most d^(1/64) times it: the Frobenius norm of (xᵀx)³², brought back."""
    power = x.transpose() * x
    for _ in range(5):
        power = power * power
    size = frobenius(power)
    return size.root(64) if size > 0 else frobenius(x)
