"""The best that any low rank could do, for analysis: attention cut to its largest singular values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Problem
from avow.numerics.heads import per_query_head
from avow.numerics.softmax import softmax_weights


class SingularValues(NamedTuple):
    """The best any matrix of that rank could do, by Eckart and Young."""

    approximation: Float[Tensor, "b h n e"]
    spectral: Float[Tensor, "b h"]
    frobenius: Float[Tensor, "b h"]


def oracle(problem: Problem, rank: int) -> SingularValues:
    r"""Attention with its weights cut to `rank` singular values, and what that loses.

    :math:`\min_{rank(M) \le r} \|P - M\|_2 = \sigma_{r+1}` and :math:`\|P - M\|_F^2 = \sum_{i>r} \sigma_i^2`
    [claim svd-spectral]. For analysis: the decomposition costs more than attention itself.
    """
    p = problem
    weights = softmax_weights(p)
    u, sigma, w = torch.linalg.svd(weights, full_matrices=False)
    kept = min(rank, sigma.shape[-1])
    short = u[..., :kept] @ (sigma[..., :kept, None] * (w[..., :kept, :] @ per_query_head(p.v.double(), p.q.shape[1])))
    rest = sigma[..., kept:]
    spectral = rest[..., 0] if rest.shape[-1] else sigma.new_zeros(sigma.shape[:-1])
    return SingularValues(short, spectral, torch.linalg.vector_norm(rest, dim=-1))
