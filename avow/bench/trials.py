"""One method on one head: the error of every row against float64, and which tokens were read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

import avow
from avow.bench.workloads import Workload
from avow.core import SOFTMAX, Certificate, Method
from avow.core.audit import reference_error
from avow.core.certify import certify
from avow.methods import exact_method

# Columns this much smaller than the values change no length: their squares are below the last digit.
_TAG = 2.0**-40
# Marks of a token: it was not read, or how much of the answer it is, in steps of half a decade.
_BRIGHTEST = 9


@dataclass(frozen=True)
class Trial:
    """A method on a head: its certificate, the error of every row, and how many rows are further off than promised.

    `operations` are relative to exact attention's. `read` is the share of the tokens that were read in full, nan for
    methods that choose none.
    """

    method: Method
    certificate: Certificate
    errors: Float[Tensor, "n"]
    broken: int
    operations: float
    read: float

    @property
    def error(self) -> float:
        return float(self.errors.amax())

    @property
    def bound(self) -> float:
        return self.certificate.bound

    @property
    def own_mechanism(self) -> bool:
        return self.method.target != SOFTMAX


def run_trial(head: Workload, method: Method) -> Trial:
    """Run a method as `attend` runs it, and measure every row against float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if method.selects_tokens:
            return _measured(head, method, *_selected(head, method, generator))
        return _measured(head, method, *avow.attend(head.q, head.k, head.v, method=method, generator=generator))


def run_marked(head: Workload, method: Method) -> tuple[Trial, list[str]]:
    """A method that selects tokens, run in float64, and for every row a mark for each token: 0 where it was not read,
    else 1 to 9, the more the more it weighs.

    Values get one more column for each token, too short to change any length and so any choice; the answer has the
    weight of each token that counted there.
    """
    width, tag = head.v.shape[-1], _TAG * _unit(head)
    tags = tag * torch.eye(head.k.shape[-2], dtype=torch.float64)[None, None]
    tagged = torch.cat([head.v.double(), tags], -1)  # (1, 1, s, e + s)
    with torch.no_grad():
        wide = dataclasses.replace(head, q=head.q.double(), k=head.k.double(), v=tagged)
        out, certificate, read = _selected(wide, method)
    weights = out[0, 0, :, width:] / tag  # (n, s)
    steps = (_BRIGHTEST + 1 + 2 * weights.clamp(min=1e-300).log10()).floor().clamp(1, _BRIGHTEST)
    marks = (torch.where(weights > 0, steps, 0) + ord("0")).to(torch.uint8)
    trial = _measured(head, method, out[..., :width], certificate, read)
    return trial, [bytes(row.tolist()).decode() for row in marks]


def _selected(
    head: Workload, method: Method, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "1 1 n e"], Certificate, float]:
    """What `attend` gives, and what no certificate holds: the share of the tokens that were read."""
    problem = head.problem
    computed = method.compute(problem.measure_norms(), generator)
    pairs = problem.q.shape[-2] * problem.k.shape[-2]
    return computed.out, certify(method, problem, computed, 1.0), float(computed.trace.read.sum()) / pairs


def _measured(
    head: Workload, method: Method, out: Float[Tensor, "1 1 n e"], certificate: Certificate, read: float = math.nan
) -> Trial:
    exact, problem = exact_method()(), head.problem
    errors = (out.double() - exact.reference(problem))[0, 0].norm(dim=-1) / _unit(head)
    # Rounding may have moved the reference, too. What is promised about another mechanism is not about this distance.
    broken = int((errors - reference_error(problem)[0, 0] > certificate.rows[0, 0]).sum())
    flops, exact_flops = (one.cost(problem.sizes).flops for one in (method, exact))
    broken = broken if method.target == SOFTMAX else 0
    return Trial(method, certificate, errors, broken, flops / max(exact_flops, 1), read)


def _unit(head: Workload) -> float:
    """The longest value: what errors and bounds are relative to."""
    return max(float(head.v.double().norm(dim=-1).amax()), 1e-300)
