"""The spectral norm of a matrix, bounded from above by a proof that trusts no decomposition."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from avow.numerics.rounding import SAFETY, gamma, tiny, unit


def norm_bound(x: Float[Tensor, "m n"]) -> float:
    r"""At least :math:`\|x\|_2` in real arithmetic, and seldom more than a billionth above it.

    Whatever matrices U, S, V are handed back by the singular value decomposition, with :math:`R = x - USV^\top`,

    .. math:: \|x\|_2 \le \|U\|_2\,\|V\|_2\,s_{\max} + \|R\|_F, \qquad \|U\|_2^2 \le 1 + \|U^\top U - I\|_F,

    and the two Frobenius norms are bounded from their float64 products by :math:`\gamma_n` [claim rounding-gamma].
    """
    x = x.detach().cpu().double()
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0.0:
        return 0.0
    # A power of two scales exactly and leaves no square to overflow; what it flushes to zero is counted below.
    exponent = math.frexp(largest)[1]
    half = -exponent // 2
    scaled = x * 2.0**half * 2.0 ** (-exponent - half)
    left, values, right = torch.linalg.svd(scaled, full_matrices=False)
    right = right.mT
    longest = float(values.abs().max())
    product = (left * values) @ right.mT
    # |fl(U·S·Vᵀ) − U·S·Vᵀ| ≤ γ_{k+1}|U|S|V|ᵀ by entries, and ‖|A||B|‖_F ≤ ‖A‖_F‖B‖_F.
    drift = gamma(len(values) + 2, unit(torch.float64)) * longest * frobenius_bound(left) * frobenius_bound(right)
    residual = frobenius_bound(scaled - product) + drift + 2 * x.numel() * len(values) * tiny(torch.float64)
    bound = math.sqrt(_stretch(left) * _stretch(right)) * longest + residual
    try:
        return max(math.ldexp(bound * SAFETY, exponent), tiny(torch.float64))
    except OverflowError:
        return math.inf


def _stretch(basis: Float[Tensor, "m k"]) -> float:
    """At least the squared spectral norm of nearly orthonormal columns."""
    rows, columns = basis.shape
    apart = basis.mT @ basis - torch.eye(columns, dtype=basis.dtype)
    slip = gamma(rows, unit(torch.float64)) * frobenius_bound(basis) ** 2 + rows * columns**2 * tiny(torch.float64)
    return 1 + frobenius_bound(apart) + slip


def frobenius_bound(x: Float[Tensor, "m n"]) -> float:
    """At least the Frobenius norm of a float64 matrix; inf where its squares overflow."""
    # Squares may vanish: together they hide at most √(mn·tiny).
    hidden = math.sqrt(x.numel() * tiny(torch.float64))
    return (float(torch.linalg.matrix_norm(x)) + hidden) * (1 + gamma(x.numel() + 2, unit(torch.float64))) * SAFETY
