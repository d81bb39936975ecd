"""What the bench tries methods on, and what came of it: one head, drawn or uploaded, beside its answer in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

import avow
from avow.bench.workloads import workload
from avow.core import Certificate, Method, Problem
from avow.core.audit import reference_error
from avow.core.certify import certify
from avow.core.method import SOFTMAX
from avow.errors import FileError, InputError
from avow.methods import method_named
from avow.methods.sparse import Sparse
from avow.report.formatting import listed

# Columns this much smaller than the values change no length: their squares are below the last digit.
_TAG = 2.0**-40
# Marks of a row: nothing was read, or how much of the answer it is, in steps of half a decade.
_MARKS = 9


@dataclass(frozen=True, eq=False)
class Head:
    """Queries, keys and values of one head, (1, 1, length, dim) each."""

    q: Float[Tensor, "1 1 n d"]
    k: Float[Tensor, "1 1 s d"]
    v: Float[Tensor, "1 1 s e"]

    def rows(self, count: int) -> Head:
        """The same head asked by fewer queries, evenly taken."""
        n = self.q.shape[-2]
        if count >= n:
            return self
        places = torch.arange(count) * n // count
        return Head(self.q[..., places, :], self.k, self.v)

    def scaled(self, times: float) -> Head:
        """The same directions, queries and keys so many times as long."""
        return Head(self.q * times, self.k * times, self.v)

    @functools.cached_property
    def problem(self) -> Problem:
        return Problem.of(self.q, self.k, self.v)

    @functools.cached_property
    def truth(self) -> Float[Tensor, "n e"]:
        """Softmax attention in float64, by its definition."""
        return method_named("exact")().reference(self.problem)[0, 0]

    @functools.cached_property
    def doubt(self) -> Float[Tensor, "n"]:
        """How far rounding may have moved `truth` itself."""
        return reference_error(self.problem)[0, 0]

    @functools.cached_property
    def unit(self) -> float:
        """The longest value: what errors and bounds are relative to."""
        return max(float(self.v.double().norm(dim=-1).amax()), 1e-300)

    @functools.cached_property
    def tagged_values(self) -> Float[Tensor, "1 1 s f"]:
        """Values in float64 with one more column for each token, too short to change any length and so any choice."""
        keys = self.k.shape[-2]
        tags = torch.eye(keys, dtype=torch.float64).expand(1, 1, keys, keys) * _TAG * self.unit
        return torch.cat([self.v.double(), tags], -1)  # (1, 1, s, e + s)


@functools.lru_cache(16)
def drawn_head(kind: str, length: int, dim: int, seed: int) -> Head:
    """One head of a known kind."""
    load = workload(kind, 1, length, dim, seed)
    return Head(load.q, load.k, load.v)


def uploaded_head(tensors: Mapping[str, Tensor], length: int, head: int) -> Head:
    """One head of a file: its first keys, and the queries that stand among them; a head that it lacks is counted on."""
    missing = [name for name in ("q", "k", "v") if name not in tensors]
    if missing:
        rule = f"lacks {listed(missing)} (it holds {', '.join(sorted(tensors))[:80]})"
        raise FileError("file", "as uploaded", rule, "save tensors named q, k and v")
    four = {}
    for name in ("q", "k", "v"):
        x = tensors[name]
        if not 2 <= x.ndim <= 4:
            rule = f"holds {name} of shape {tuple(x.shape)}, not (heads, length, dim)"
            raise FileError("file", "as uploaded", rule, "save (heads, length, dim)")
        four[name] = x[(None,) * (4 - x.ndim)]  # (b, h, n, d)
    # Whatever does not fit together is said of the whole file, before a part of it is taken.
    try:
        Problem.of(four["q"], four["k"], four["v"], enable_gqa=True)
    except InputError as error:
        rule = f"holds what does not fit together: {error.name}={error.value} {error.rule}"
        raise FileError("file", "as uploaded", rule, error.remedy) from error
    batch, heads = four["q"].shape[:2]
    b, h = head // heads % batch, head % heads
    group = h // (heads // four["k"].shape[1])
    # Copies, for a slice that is remembered would hold the whole file.
    q, k, v = (four[name][b : b + 1, i : i + 1, :length].clone() for name, i in (("q", h), ("k", group), ("v", group)))
    return Head(q, k, v)


@dataclass(frozen=True)
class Trial:
    """A method on a head: its certificate, and for every row what was promised and what it is.

    `read` is the share of the tokens that sparse attention read in full, nan for methods that choose none.
    """

    method: Method
    certificate: Certificate
    errors: Float[Tensor, "n"]
    bounds: Float[Tensor, "n"]
    broken: int
    operations: float
    read: float

    @property
    def label(self) -> str:
        return self.method.label

    @property
    def own_mechanism(self) -> bool:
        return self.method.target != SOFTMAX

    @property
    def error(self) -> float:
        return float(self.errors.amax())

    @property
    def bound(self) -> float:
        return self.certificate.bound


def run_trial(head: Head, method: Method) -> Trial:
    """Run a method as `attend` runs it, and measure every row against float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if isinstance(method, Sparse):
            return _measured(head, method, *_chosen(method, Problem.of(head.q, head.k, head.v), generator))
        return _measured(head, method, *avow.attend(head.q, head.k, head.v, method=method, generator=generator))


def run_sparse_trial(head: Head, method: Sparse) -> tuple[Trial, list[str]]:
    """Sparse attention in float64, and for every row a mark for each token: 0 where it was not read, else 1 to 9, the
    more the more it weighs.

    Values get one more column for each token, too short to change any length and so any choice; the answer has the
    weight of each token that counted there.
    """
    with torch.no_grad():
        out, certificate, read = _chosen(method, Problem.of(head.q.double(), head.k.double(), head.tagged_values))
    own, tags = out.split([head.v.shape[-1], head.k.shape[-2]], -1)
    weights = tags[0, 0] / (_TAG * head.unit)  # (n, s)
    steps = (_MARKS + 1 + 2 * weights.clamp(min=1e-300).log10()).floor().clamp(1, _MARKS)
    marks = (torch.where(weights > 0, steps, 0) + ord("0")).to(torch.uint8)
    return _measured(head, method, own, certificate, read), [bytes(row.tolist()).decode() for row in marks]


def _chosen(
    method: Sparse, problem: Problem, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "1 1 n e"], Certificate, float]:
    """Sparse attention as `attend` runs it, and what no certificate holds: the share of the tokens that were read."""
    computed = method.compute(problem.measured(), generator)
    pairs = problem.q.shape[-2] * problem.k.shape[-2]
    return computed.out, certify(method, problem, computed, 1.0), float(computed.trace.read.sum()) / pairs


def _measured(
    head: Head, method: Method, out: Float[Tensor, "1 1 n e"], certificate: Certificate, read: float = math.nan
) -> Trial:
    errors = (out[0, 0].double() - head.truth).norm(dim=-1) / head.unit
    bounds = certificate.rows[0, 0]
    broken = 0 if method.target != SOFTMAX else int((errors - head.doubt > bounds).sum())
    flops, exact_flops = (one.cost(head.problem.sizes).flops for one in (method, method_named("exact")()))
    return Trial(method, certificate, errors, bounds, broken, flops / max(exact_flops, 1), read)
