"""What can go wrong, as a tree.

    AvowError
    ├── InputError (ValueError)          the caller can fix it
    │   ├── ShapeError                   sizes that do not fit together
    │   ├── DtypeError                   a type, or a device without that type
    │   ├── NonFiniteError               nan or inf where a number was promised
    │   ├── RangeError                   finite, but beyond what float64 can carry
    │   ├── ParameterError               a parameter outside its rule
    │   ├── UnknownMethod                no method of that name
    │   ├── InsideHull                   a key that is a mean of the others: no query singles it out
    │   ├── OutOfReach                   attention weights that no query gives over these keys
    │   └── FileError                    a file that is missing, truncated or incomplete
    ├── MissingPackage                   an optional package this needs is not installed
    ├── LostRank                         a process that others wait for has ended, or is silent
    ├── ToleranceUnreachable             no available arithmetic proves the tolerance
    └── NotDifferentiable                the mathematics has no gradient here

Every message has four parts: the name, the value it had, the rule it broke, the remedy.
"""

from __future__ import annotations

from fractions import Fraction

import torch


class AvowError(Exception):
    """Anything avow raises on purpose."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(name, value, rule, remedy)
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy

    def __str__(self) -> str:
        return f"{self.name}={self.value} {self.rule}; {self.remedy}"


class InputError(AvowError, ValueError):
    """The caller can fix it."""


class ShapeError(InputError):
    """Sizes that do not fit together."""


class DtypeError(InputError):
    """A type, or a device without that type."""


class NonFiniteError(InputError):
    """Nan or inf where a number was promised."""


class RangeError(InputError):
    """Finite, but beyond what float64 can carry."""


class ParameterError(InputError):
    """A parameter outside its rule."""


class UnknownMethod(InputError):
    """No method of that name."""


class InsideHull(InputError):
    """A key that is a mean of the others; `weights`, one for each key, are that mean, exactly: the proof."""

    def __init__(self, name: str, value: object, rule: str, remedy: str, weights: tuple[Fraction, ...] = ()) -> None:
        super().__init__(name, value, rule, remedy)
        self.weights = weights


class OutOfReach(InputError):
    r"""Attention weights that no query gives; `combination`, one number for each key, is the proof.

    It sums to 0, and so does :math:`\sum_i c_i k_i`, exactly: whatever the query, :math:`\sum_i c_i \ln \alpha_i = 0`.
    """

    def __init__(
        self, name: str, value: object, rule: str, remedy: str, combination: tuple[Fraction, ...] = ()
    ) -> None:
        super().__init__(name, value, rule, remedy)
        self.combination = combination


class FileError(InputError):
    """A file that is missing, truncated or incomplete."""


class MissingPackage(AvowError):
    """An optional package this needs is not installed."""


class LostRank(AvowError):
    """A process that others wait for has ended, or is silent."""


class NotDifferentiable(AvowError):
    """The mathematics has no gradient here."""


class ToleranceUnreachable(AvowError):
    """No available arithmetic proves the tolerance; `best` is the smallest bound that can be proved."""

    def __init__(self, name: str, value: object, rule: str, remedy: str, best: float = float("inf")) -> None:
        super().__init__(name, value, rule, remedy)
        self.best = best


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that there is no memory left."""
    if error is None:
        return False
    # Torch has no exception of its own for a CPU that is out of memory.
    said = isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error))
    # The compiler keeps what stopped it in an attribute of its own.
    causes = (error.__cause__, getattr(error, "inner_exception", None))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or said or any(map(is_out_of_memory, causes))
