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

Every message has four parts: the name, the value it had, the rule it broke, the remedy. Tensors are shown by their
shape and type, never by their numbers.
"""

from __future__ import annotations

import reprlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What a message may hold as it is.
_PLAIN = str | bytes | bool | float | complex | Fraction | Path | torch.dtype | torch.device | None
# More characters or entries of a value than these say no more.
_LONGEST, _MOST_ENTRIES = 60, 12


class AvowError(Exception):
    """Anything avow raises on purpose."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        # An error that kept a tensor would also keep its memory.
        value = value if _is_plain(value) else value_text(value)
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
    """An optional package this needs is not installed, or too old."""

    def __str__(self) -> str:
        absent = self.value == "missing"
        return f"{self.name} is not installed; it {self.rule}; {self.remedy}" if absent else super().__str__()


class LostRank(AvowError):
    """A process that others wait for has ended, or is silent."""


class NotDifferentiable(AvowError):
    """The mathematics has no gradient here."""


class ToleranceUnreachable(AvowError):
    """No available arithmetic proves the tolerance; `best` is the smallest bound that can be proved."""

    def __init__(self, name: str, value: object, rule: str, remedy: str, best: float = float("inf")) -> None:
        super().__init__(name, value, rule, remedy)
        self.best = best


def value_text(value: object) -> str:
    """A value as messages show it: like `repr`, but short, and with tensors and arrays by their shape and type.

    Args:
        value: anything.

    Returns:
        Its text, in one line.
    """
    return _VALUES.repr(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return len(value) <= _MOST_ENTRIES and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


class _Values(reprlib.Repr):
    """`repr` of everything but tensors, of little at length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MOST_ENTRIES
        self.maxstring = _LONGEST

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            kind = str(x.dtype).removeprefix("torch.")
            article = "an" if kind.startswith("int") else "a"
            return f"a nested {kind} tensor" if x.is_nested else f"{article} {kind} tensor of shape {tuple(x.shape)}"
        if hasattr(x, "__array__") and hasattr(x, "shape") and x.shape:
            return f"a {getattr(x, 'dtype', '')} array of shape {tuple(x.shape)}"
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        # Python itself refuses to write more than 4300 digits.
        return repr(x) if abs(x) < 2**64 else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        """Objects by their type, unless their own words are few and hold neither an address nor a tensor."""
        try:
            text = repr(x)
        except Exception:  # whatever a caller's object raises
            text = ""
        strange = text.startswith("<") or any(part in text for part in ("tensor(", "array(", "\n"))
        fits = 0 < len(text) <= _LONGEST and not strange
        return text if fits else type(x).__name__


_VALUES = _Values()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that there is no memory left.

    Args:
        error: what was raised.

    Returns:
        Whether it does.
    """
    if error is None:
        return False
    # Torch has no exception of its own for a CPU that is out of memory.
    said = isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error))
    # The compiler keeps what stopped it in an attribute of its own.
    causes = (error.__cause__, getattr(error, "inner_exception", None))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or said or any(map(is_out_of_memory, causes))
