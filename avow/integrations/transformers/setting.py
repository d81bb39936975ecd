"""What is asked of a layer: a tolerance, a method, a confidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from avow.core import Method
from avow.core.requirement import checked_requirement
from avow.errors import ParameterError
from avow.methods import all_methods, method_named
from avow.parameters import check_parameters

# Models are trained with softmax attention: a method with another target would change what they compute.
_TARGET = "softmax attention"


@dataclass(frozen=True)
class Setting:
    """How one layer attends: the arguments of `avow.attend` that do not depend on what it attends to."""

    tol: float | None = None
    method: str = "auto"
    confidence: float | None = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float | None = None

    def __post_init__(self) -> None:
        checked_requirement(self.tol, self.confidence, rtol=self.rtol)
        if not isinstance(self.parameters, Mapping):
            rule = "must map names of parameters to values"
            raise ParameterError("parameters", repr(self.parameters), rule, 'try {"features": 256}')
        if self.method == "auto":
            if self.parameters:
                name, value = next(iter(self.parameters.items()))
                raise ParameterError(name, repr(value), "belongs to a named method", "name one with method=")
            return
        kind = method_named(self.method)
        if kind.target != _TARGET:
            rule = f"computes {kind.target}, and models are trained with softmax attention"
            remedy = f"use {', '.join(method.name for method in softmax_methods())}; avow.nn trains models with it"
            raise ParameterError("method", self.method, rule, remedy)
        check_parameters(self.method, kind, dict(self.parameters))

    @property
    def exact(self) -> bool:
        """Whether no error is allowed but that of rounding."""
        return self.tol is None and self.rtol is None

    @property
    def asks_cache(self) -> bool:
        """Whether a cache of keys and values keeps this promise itself: all of them, or those that may matter."""
        fits = self.method in ("auto", "exact") or (self.method == "sparse" and not self.exact)
        return fits and not self.parameters


def softmax_methods() -> list[type[Method]]:
    """The methods that compute what models are trained with."""
    return [kind for kind in all_methods().values() if kind.target == _TARGET]
