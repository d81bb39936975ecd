"""What every construction is: weights in closed form, the bound they promise, and a proof on the numbers themselves.

And what may be asked of one: keys, matrices, eps, weights, indices, dtypes; refused with the rule broken.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeVar

from torch import Tensor, nn

from avow.core import DTYPES
from avow.core.chart import Picture
from avow.errors import DtypeError, NonFiniteError, ParameterError, ShapeError
from avow.extras import require
from avow.parameters import as_float


@dataclass(frozen=True)
class Proof:
    """What ball arithmetic or exact rationals found of the weights actually returned, their rounding included.

    `achieved` is never below the true error; the promise holds when it is at most `bound`.
    """

    promise: str
    bound: float
    achieved: float
    steps: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.achieved <= self.bound

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "BROKEN"
        lines = [f"{verdict}: {self.promise}", f"  proved {self.achieved:.6g}, promised {self.bound:.6g}"]
        return "\n".join([*lines, *(f"  - {step}" for step in self.steps)])


class Construction(ABC):
    """Weights that do what they say. Implementations are frozen dataclasses, each made by one public function."""

    eps: float

    @property
    @abstractmethod
    def promise(self) -> str:
        """What is promised, as a sentence with its numbers."""

    @property
    def bound(self) -> float:
        """The error promised, rounding to the tensors' own type included."""
        return self.eps

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, as they are saved."""

    @abstractmethod
    def verify(self) -> Proof:
        """The promise, proved or refuted on the numbers actually returned."""

    @abstractmethod
    def picture(self) -> Picture:
        """The point of the construction, drawn."""

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.promise}"

    def as_module(self) -> nn.Module:
        """The construction as a module, if it maps inputs to outputs."""
        raise NotImplementedError(f"{type(self).__name__} does not map inputs to outputs, so it has no module")


C = TypeVar("C", bound=Construction)


def first_proved(candidates: Iterable[C]) -> tuple[C | None, float]:
    """The first construction that keeps its promise, and the least error that was proved of it or of any before it."""
    best = math.inf
    for candidate in candidates:
        proof = candidate.verify()
        best = min(best, proof.achieved)
        if proof:
            return candidate, best
    return None, best


def scipy_optimize(purpose: str) -> Any:
    """SciPy's solvers; without them, an error that says what they are needed for."""
    require("scipy", purpose=purpose)
    from scipy import optimize

    return optimize


def checked_matrix(name: str, x: Tensor) -> Tensor:
    """A copy of a finite matrix of a floating type, with at least one row and one column."""
    if x.ndim != 2 or 0 in x.shape:
        rule = "must be a matrix of at least one row and one column"
        raise ShapeError(name, tuple(x.shape), rule, "give two dimensions, such as k[0, 0] of one head's keys")
    if x.dtype not in DTYPES:
        raise DtypeError(name, x.dtype, "must be of a floating type", "try .double()")
    finite = x.isfinite().all(-1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        rule = "holds a number that is nan or infinite"
        raise NonFiniteError(f"{name}[{row}]", x[row].tolist(), rule, "drop that row or replace it")
    return x.detach().clone()


def checked_eps(name: str, eps: SupportsFloat) -> float:
    """An eps that leaves something to promise."""
    number = as_float(eps)
    if not 0 < number < 1:
        raise ParameterError(f"{name}: eps", eps, "must lie in (0, 1)", "try eps=0.01")
    return number


def checked_index(name: str, index: int, n: int, within: Sequence[int] | None = None) -> int:
    """The index of a key; `within` is what it was given in, for the error to show."""
    if not 0 <= (index := operator.index(index)) < n:
        value = index if within is None else list(within)
        raise ParameterError(name, value, f"must lie in 0..{n - 1}, the rows of keys", "count keys from 0")
    return index
