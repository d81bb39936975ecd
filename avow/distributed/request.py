"""What one process asks of attention over shards, and what keeps it from asking so, before others hear of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from avow.attend import check_automatic
from avow.core import Method, Problem
from avow.core.requirement import check_generator, checked_requirement
from avow.distributed.consensus import check_dense, digest, storage
from avow.distributed.shards import paired
from avow.errors import DtypeError, ParameterError, UnknownMethod
from avow.methods import method_named
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from avow.parameters import check_parameters

# Methods of which each process brings its own rows; of sparse attention all bring the same, of exact either.
OWN = (Separable, RandomFeatures, LowRank)


class Asked(NamedTuple):
    """What one process asks for, before others agree."""

    method: str
    parameters: dict[str, Any]
    tol: float | None
    confidence: float | None
    shared_queries: bool
    mask: Tensor | None
    generator: torch.Generator | None
    rtol: float | None = None

    @property
    def words(self) -> dict[str, object]:
        """What all must ask alike."""
        same: dict[str, object] = {
            "tol": self.tol,
            "rtol": self.rtol,
            "confidence": self.confidence,
            "mask": self._mask_word,
        }
        if isinstance(self.generator, torch.Generator):
            same["digest of generator"] = digest(self.generator.get_state())
        return {"method": self.method, **self.parameters, **same}

    @property
    def _mask_word(self) -> str:
        """Whether there is a mask, and what is odd about how it holds its entries."""
        odd = isinstance(self.mask, Tensor) and storage(self.mask) != "dense"
        return "none" if self.mask is None else storage(self.mask) if odd else "some"

    @property
    def draws(self) -> bool:
        """Whether something may be drawn at random."""
        named = any(kind.random and kind.name == self.method for kind in OWN)
        tolerant = self.tol is not None or self.rtol is not None
        return named or (self.method == "auto" and tolerant and not self.shared_queries)

    @property
    def named(self) -> Method:
        """The method with its parameters."""
        kind, served = method_named(self.method), (Exact, Sparse, *OWN)
        if kind not in served:
            remedy = f"use one of {', '.join(one.name for one in served)}"
            raise UnknownMethod("method", repr(self.method), "has no form over shards", remedy)
        check_parameters(self.method, kind, self.parameters)
        return kind(**self.parameters)

    def check(self, problem: Problem) -> None:
        """Raise where this process cannot ask so."""
        checked_requirement(self.tol, self.confidence, rtol=self.rtol)
        check_generator(self.generator)
        self.seen(problem)
        if self.method == "auto":
            return check_automatic(self.parameters)
        method = self.named
        if not isinstance(method, Exact) and self.mask is not None:
            raise ParameterError(f"{method.name}: mask", "some", "has no form over shards", 'use method="exact"')
        if isinstance(method, Sparse) and not self.shared_queries:
            remedy = 'give all processes the same queries, or use method="exact"'
            raise ParameterError("sparse: shared_queries", False, "must all be known to every process", remedy)
        if isinstance(method, Sparse) and problem.causal:
            raise ParameterError("sparse: causal", True, "has no form over shards", 'use method="exact"')
        if isinstance(method, OWN):
            if self.shared_queries:
                remedy = "pass shared_queries=False and each process's own rows"
                raise ParameterError(f"{method.name}: shared_queries", True, "must not be the same rows", remedy)
            paired(problem)
        if isinstance(method, Separable):
            method.checked(problem)  # a process without rows never comes to its promise, which would ask
        return None

    def seen(self, problem: Problem) -> Bool[Tensor, "#b #h #n s"] | None:
        """The mask with four axes: of this process's keys where queries are shared, else of all."""
        if self.mask is None:
            return None
        check_dense("mask", self.mask)
        if isinstance(self.mask, Tensor) and self.mask.dtype != torch.bool:
            raise DtypeError("mask.dtype", self.mask.dtype, "must be bool over shards", "use mask >= 0 for 0 and -inf")
        if self.shared_queries:
            return problem.allowed
        length = self.mask.shape[-1] if isinstance(self.mask, Tensor) and self.mask.ndim else 0
        k, v = (x.new_zeros(()).expand(*x.shape[:2], length, x.shape[-1]) for x in (problem.k, problem.v))
        return Problem.of(problem.q, k, v, mask=self.mask, enable_gqa=True).allowed
