"""How far an answer is from the truth on some rows, recomputed in float64 by the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from avow.core import Certificate, Method, Problem
from avow.methods.exact import Exact
from avow.numerics.heads import longest_seen

_ROWS = 16


class Distance(NamedTuple):
    """Errors of some rows in the certificate's unit, and the distance of all of them in units of the truth's size."""

    rows: Int[Tensor, "r"]
    errors: Float[Tensor, "b h r"]
    relative: float


def distance(out: Tensor, problem: Problem, target: Method | None = None, count: int = _ROWS) -> Distance:
    """The error of evenly spread rows of an answer, against softmax attention or another method's target."""
    rows = torch.linspace(0, problem.q.shape[-2] - 1, count).long().unique()
    some = problem.rows(rows)
    truth = (target or Exact()).reference(some)
    off = out.reshape(*problem.q.shape[:-1], -1)[..., rows, :].double() - truth
    return Distance(rows, errors(off, some), float(off.norm() / truth.norm()))


def errors(off: Float[Tensor, "b h r e"], problem: Problem) -> Float[Tensor, "b h r"]:
    """Lengths of differences, each in units of the longest value its row sees."""
    p = problem
    return torch.linalg.vector_norm(off, dim=-1) / longest_seen(p, torch.linalg.vector_norm(p.v.double(), dim=-1))


def broken(out: Tensor, certificate: Certificate, problem: Problem, target: Method | None = None) -> str:
    """What is wrong with an answer and its certificate; nothing where every row looked at keeps its bound."""
    found = distance(out, problem, target)
    bounds = certificate.rows.reshape(problem.q.shape[:-1])[..., found.rows]
    count = int((~(found.errors <= bounds)).sum())
    return f"{count} of {bounds.numel()} rows break their bound" if count else ""


def too_far(out: Tensor, problem: Problem, limit: float) -> str:
    """What is wrong with an answer that has no certificate: nothing within `limit`, relative to the truth's size."""
    relative = distance(out, problem).relative
    return "" if relative <= limit else f"off by {relative:.2g} of the truth's size, more than {limit:g}"
