"""Norms as proved upper bounds: of rows, whose reading alone looks for nan and inf in q, k and v, and of matrices.

The bound on a matrix's spectral norm trusts no decomposition.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from avow.errors import NonFiniteError, RangeError
from avow.numerics.rounding import SAFETY, accumulator, flush_threshold, gamma, tiny, unit

LONGEST_KEY = 1e150
"""Beyond this, squared norms leave float64."""
# Squares of numbers outside this range overflow or underflow in the type.
_COMFORT = {torch.float32: (1e-12, 1e18), torch.float64: (1e-140, 1e150)}

# From so many numbers on a conversion to float64 takes longer than a look at their range.
_MANY = 2**14


def slack(dim: int, dtype: torch.dtype) -> float:
    """The relative error of `row_norms`, in both directions."""
    return 4 * (dim + 4) * unit(accumulator(dtype))


def row_norms(x: Float[Tensor, "*lead d"], name: str, faithful: bool = False) -> Float[Tensor, "*lead"]:
    """Upper bounds, in float64, on the Euclidean norm of every row; raises where a number is nan or inf.

    A `faithful` bound is also no larger than `norm_floor` says, however small the row, and zero where the row is.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-1], dtype=torch.float64)
    kind = accumulator(x.dtype)
    # A conversion first, then the norm: faster than one norm with a wider accumulator.
    norms = torch.linalg.vector_norm(x.to(kind), dim=-1)
    low, high = _COMFORT[kind]
    least, largest = (float(end) for end in torch.aminmax(norms))  # nan if any row holds nan
    # Entries below the square root of the smallest normal number vanish when squared.
    vanishing = {torch.float16: 0.0, torch.float64: 2.0**-500}.get(x.dtype, 2.0**-60)
    if low <= largest <= high and (least >= low or not faithful):
        wide = norms.double()
    else:
        if not math.isfinite(largest) and bool((bad := ~torch.isfinite(x)).any()):
            where = tuple(bad.nonzero()[0].tolist())
            place, remedy = f"{name}[{', '.join(map(str, where))}]", f"remove NaN and inf from {name}"
            raise NonFiniteError(place, float(x[where]), "must be finite", remedy)
        if faithful and kind == torch.float64:
            return lengths(x)
        exponent = 0  # float64 has room for the squares of every other type
        if kind == torch.float64 and (size := float(x.abs().amax())) > 0:
            exponent = max(-1000, min(1000, math.frexp(size)[1]))
        wide = torch.linalg.vector_norm(widened(x) * 2.0**-exponent, dim=-1) * 2.0**exponent
        vanishing = 2.0 ** (exponent - 500) + 2 * flush_threshold(kind) if kind == torch.float64 else 0.0
    d = x.shape[-1]
    return wide.mul_(1 + slack(d, x.dtype) / 2).add_(vanishing * math.sqrt(d))


def lengths(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """Upper bounds, in float64, on the Euclidean norm of finite rows, however far apart their sizes; zero for zeros.

    Each row is measured by its own largest entry, so `norm_floor` tells how far the bound may exceed the norm.
    """
    d = x.shape[-1]
    if d == 0:
        return x.new_zeros(x.shape[:-1], dtype=torch.float64)
    wide = widened(x)
    top = wide.abs().amax(-1)
    inner = torch.linalg.vector_norm(wide / torch.where(top > 0, top, 1.0).unsqueeze(-1), dim=-1)
    some = ((wide.view(torch.int64) << 1) != 0).any(-1)  # subnormal numbers may be read as zero, their bits are not
    rounded = top * inner * (1 + slack(d, torch.float64) / 2) + 2 * math.sqrt(d) * tiny(torch.float64)
    return torch.where(some, rounded, 0.0)


def row_lengths(*tensors: Float[Tensor, "..."]) -> Float[Tensor, "rows"]:
    """The `lengths` of all rows of some tensors, one after the other; not finite where a row is not. Waits for nothing.

    They exceed the true lengths by no more than `slack` of float64 says: see `norm_floor`.
    """
    return torch.cat([lengths(x.detach()).flatten() for x in tensors])


def norm_floor(norms: Tensor, slack: float, dim: int) -> Tensor:
    """What the norms of rows are at least, by faithful bounds with that slack; zero where float64 cannot tell."""
    return (norms * (1 - slack) - 8 * math.sqrt(dim) * tiny(torch.float64)).clamp(min=0.0)


def widened(x: Tensor) -> Tensor:
    """The same numbers in float64, also where subnormal ones are read as zero; those of float64 itself as they are."""
    if x.dtype in (torch.float64, torch.float16) or torch.compiler.is_compiling():
        return x.double()
    bits = x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.int16).to(torch.int32) << 16
    size = bits & 0x7FFFFFFF
    small = size.double() * 2.0**-149
    return torch.where(size < 0x800000, torch.where(bits < 0, -small, small), x.double())


def length_floors(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """Lower bounds, in float64, on the Euclidean norm of every row, below it by no more than twice `slack`.

    A row that holds nan or inf has no norm, and the bound says so by not being finite.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-1], dtype=torch.float64)
    kind, d = accumulator(x.dtype), x.shape[-1]
    if x.device.type == "cpu" and x.numel() > _MANY:
        # Where numbers are usual the narrow sum is the fastest; to ask would be to wait on other devices.
        norms = torch.linalg.vector_norm(x.to(kind), dim=-1)
        least, largest = (float(end) for end in torch.aminmax(norms))
        low, high = _COMFORT[kind]
        if low <= least and largest <= high:
            return norms.double() * (1 - slack(d, x.dtype))
    wide, most = x.double(), 4 * (d + 4) * unit(torch.float64)
    if kind != torch.float64:  # whose squares float64 has room for
        return torch.linalg.vector_norm(wide, dim=-1) * (1 - most)
    top = wide.abs().amax(-1)
    inner = torch.linalg.vector_norm(wide / torch.where(top > 0, top, 1.0).unsqueeze(-1), dim=-1)
    return (top * inner * (1 - most) - tiny(torch.float64)).clamp(min=0.0)


def check_range(q_norm: float, k_norm: float, v_norm: float, scale: float) -> None:
    """Raise where logits, squared norms or sums of values would leave float64."""
    for name, size, limit in (
        ("q", q_norm, 1e150),
        ("k", k_norm, LONGEST_KEY),
        ("v", v_norm, 1e300),
        ("scale*|q|*|k|", abs(scale) * q_norm * k_norm, 1e290),
    ):
        if not size <= limit:
            raise RangeError(f"largest norm of {name}", f"{size:.3g}", f"must be at most {limit:g}", "scale it down")


def spectral_bound(x: Float[Tensor, "m n"]) -> float:
    r"""An upper bound on :math:`\|x\|_2` in real arithmetic, and seldom more than a billionth above it.

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
    """An upper bound on the squared spectral norm of nearly orthonormal columns."""
    rows, columns = basis.shape
    apart = basis.mT @ basis - torch.eye(columns, dtype=basis.dtype)
    slip = gamma(rows, unit(torch.float64)) * frobenius_bound(basis) ** 2 + rows * columns**2 * tiny(torch.float64)
    return 1 + frobenius_bound(apart) + slip


def frobenius_bound(x: Float[Tensor, "m n"]) -> float:
    """An upper bound on the Frobenius norm of a float64 matrix; inf where its squares overflow."""
    # Squares may vanish: together they hide at most √(mn·tiny).
    hidden = math.sqrt(x.numel() * tiny(torch.float64))
    return (float(torch.linalg.matrix_norm(x)) + hidden) * (1 + gamma(x.numel() + 2, unit(torch.float64))) * SAFETY
