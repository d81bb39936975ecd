"""What must not be compiled: certificates, and draws from generators, are about numbers that a graph does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from avow.errors import ParameterError

_R = TypeVar("_R")


def run_eagerly(name: str, function: Callable[..., _R], *arguments: Any, **options: Any) -> _R:
    """What a function returns; while a model is compiled, its graph ends before the call and begins again after it.

    Raises if the model is exported, which has to be one graph; `name` says what cannot be in it.
    """
    if not torch.compiler.is_compiling():
        return function(*arguments, **options)
    return _outside_graphs(name, function, arguments, options)


def _outside_graphs(name: str, function: Callable[..., _R], arguments: tuple[Any, ...], options: dict[str, Any]) -> _R:
    if torch.compiler.is_exporting():
        rule = "cannot be exported: what it does depends on numbers that an exported program does not know"
        remedy = 'export avow.nn.Attention with method="exact", "separable", "random_features" or "latent"'
        raise ParameterError("call", name, rule, remedy)
    return torch.compiler.disable(function)(*arguments, **options)


# For the compiler, which does not look inside then, and says why to those who asked for a single graph.
vars(_outside_graphs).update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg="what it does depends on numbers, which no graph knows: leave fullgraph=True out",
)
