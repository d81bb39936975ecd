"""What every construction is: weights in closed form, the bound they promise, and a proof on the numbers themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from avow.core.chart import Picture


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

    @property
    @abstractmethod
    def promise(self) -> str:
        """What is promised, as a sentence with its numbers."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """The error promised, rounding to the tensors' own type included."""

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
        """The construction as a module, where a module makes sense."""
        raise NotImplementedError(f"{type(self).__name__} is no map of inputs: it has no module")
