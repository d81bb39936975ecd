"""One method on one head: the error of every row against float64, what it read, and which tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import avow
from avow.bench.workloads import Workload
from avow.core import SOFTMAX, Certificate, Method
from avow.core.audit import reference_error
from avow.core.certify import certify
from avow.methods import exact_method
from avow.methods.sparse import Sparse
from avow.nn import KeyValueCache

# Marks of a token: it was not read, or how much of the answer it is, in steps of half a decade.
_BRIGHTEST = 9


@dataclass(frozen=True)
class Trial:
    """A method on a head: its certificate, the error of every row, and how many rows are further off than promised.

    `operations` are relative to exact attention's. `read` is the share of the tokens a row sees that were read in full,
    and `traffic` the bytes that a step of decoding reads relative to exact attention's; `selected` says which tokens
    those are. Methods that choose no tokens have nan, nan and None.
    """

    method: Method
    certificate: Certificate
    errors: Float[Tensor, "n"]
    broken: int
    operations: float
    read: float = math.nan
    traffic: float = math.nan
    selected: Bool[Tensor, "n s"] | None = None

    @property
    def error(self) -> float:
        return float(self.errors.amax())

    @property
    def bound(self) -> float:
        return self.certificate.bound

    @property
    def own_mechanism(self) -> bool:
        return self.method.target != SOFTMAX

    @property
    def cost(self) -> float:
        """What the method is to save, relative to exact attention: operations, or bytes if it selects tokens."""
        return self.traffic if self.method.selects_tokens else self.operations


def run_trial(head: Workload, method: Method, rows: Workload | None = None) -> Trial:
    """Run a method on a head as `attend` runs it, or on some of its `rows`, and measure every row against float64.

    Operations are those of the whole head: what is done once for all keys is not spread over some rows only.
    """
    rows = head if rows is None else rows
    generator, problem = torch.Generator().manual_seed(0), rows.problem
    with torch.no_grad():
        if isinstance(method, Sparse):
            computed = method.compute(problem.measure_norms(), generator, selection=True)
            read = float(computed.trace.read.sum()) / int(_seen(rows).sum())
            cache = KeyValueCache(1, rows.k.shape[-1], rows.v.shape[-1], dtype=rows.k.dtype, bits=method.bits)
            certificate = certify(method, problem, computed, 1.0)
            more = {"read": read, "traffic": read + cache.overhead, "selected": computed.trace.selected[0, 0]}
            out = computed.out
        else:
            out, certificate = avow.attend(rows.q, rows.k, rows.v, method=method, generator=generator, **rows.call)
            more = {}
        exact = exact_method()()
        errors = (out.double() - exact.reference(problem))[0, 0].norm(dim=-1) / _longest_seen(rows)
        # Rounding may have moved the reference too. What is promised of another mechanism is not about this distance.
        broken = int((errors - reference_error(problem)[0, 0] > certificate.rows[0, 0]).sum())
    flops, exact_flops = (one.cost(head.sizes).flops for one in (method, exact))
    broken = broken if method.target == SOFTMAX else 0
    return Trial(method, certificate, errors, broken, flops / max(exact_flops, 1), **more)


def token_marks(rows: Workload, trial: Trial) -> list[str]:
    """For every row a mark for each token: 0 where it was not read, else 1 to 9, the more the more it weighs."""
    assert trial.selected is not None
    problem = rows.problem
    scores = problem.scale * rows.q[0, 0].double() @ rows.k[0, 0].double().mT  # (n, s)
    unseen = torch.arange(scores.shape[-1]) >= _seen(rows)[:, None]
    weights = torch.softmax(scores.masked_fill(unseen, -math.inf), -1)
    steps = (_BRIGHTEST + 1 + 2 * weights.clamp(min=1e-300).log10()).floor().clamp(1, _BRIGHTEST)
    marks = (torch.where(trial.selected, steps, 0) + ord("0")).to(torch.uint8)
    return [bytes(row.tolist()).decode() for row in marks]


def _seen(rows: Workload) -> Tensor:
    """How many tokens each row sees: all, or those up to its own."""
    n, s = rows.q.shape[-2], rows.k.shape[-2]
    if not rows.causal:
        return torch.full((n,), s)
    return 1 + (torch.arange(n) if rows.positions is None else rows.positions)


def _longest_seen(rows: Workload) -> Float[Tensor, "n"]:
    """The longest value that each row sees: what its error and its bound are relative to."""
    longest = rows.v[0, 0].double().norm(dim=-1).cummax(0).values
    return longest[_seen(rows) - 1].clamp(min=1e-300)
