"""Loops over all tokens that a compiler makes of torch code where one is at hand; plain torch otherwise.

Compiled code stays within the same rounding bounds as plain torch: they hold for sums in any order, with or without
fused multiply-adds, and for an exp that is right to 64 units in the last place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avow.errors import is_out_of_memory

# Multiply-adds in one step: fewer roundings, not more.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.enable_floating_point_contract_flag": "fast"}

# Calls to let pass after a first failure, and how many families of shapes a function may be compiled for.
_PAUSE, _FAMILIES = 256, 64

_Family = tuple[Any, ...]


class NotCompiled(Exception):
    """A loop could not be compiled here; the text says why."""


@dataclass
class _Failure:
    """Why a family of shapes could not be compiled, and how many calls of it to let pass before the next attempt."""

    reason: str
    pause: int = _PAUSE
    left: int = _PAUSE


class Fused:
    """A function of tensors, compiled when it is first called: those that are `long` may have any length along an axis.

    Nothing is compiled before: importing costs nothing. What fails is one family of shapes of one function: a full disk
    or a compiler's fault need not be there next time, so it is tried again, after twice as many calls each time.
    """

    def __init__(self, function: Callable[..., Any], axis: int = 0) -> None:
        self.plain, self.axis = function, axis
        self._compiled: Callable[..., Any] | None = None
        self._known: set[_Family] = set()
        self._failures: dict[_Family, _Failure] = {}

    def __call__(self, long: Sequence[Tensor], *others: Any) -> Any:
        """What the function gives; that axis of each of `long` may have another length next time.

        Raises `NotCompiled` where it cannot be compiled.
        """
        family = self._family(long, others)
        failure = self._failures.get(family)
        if failure is not None and failure.left > 0:
            failure.left -= 1
            raise NotCompiled(failure.reason)
        try:
            if self._compiled is not None and family in self._known:
                return self._compiled(*long, *others)
            with warnings.catch_warnings():
                # A compiler warns of its own insides.
                warnings.simplefilter("ignore")
                for x in long:
                    torch._dynamo.maybe_mark_dynamic(x, self.axis)
                self._compiled = self._compiled or torch.compile(self.plain, options=_OPTIONS, fullgraph=True)
                # Families are few and wanted: past its usual limit the compiler would give up on all further ones.
                with torch._dynamo.config.patch(recompile_limit=_FAMILIES):
                    result = self._compiled(*long, *others)
        except Exception as error:  # whatever a compiler, its installation or a full disk may come up with
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            pause = _PAUSE if failure is None else 2 * failure.pause
            self._failures[family] = _Failure(reason, pause, pause)
            raise NotCompiled(reason) from error
        self._known.add(family)
        self._failures.pop(family, None)
        return result

    def _family(self, long: Sequence[Tensor], others: Sequence[Any]) -> _Family:
        """What compiled code depends on: every size but those that may change, every type, every plain number."""
        sizes = [(x.shape[: self.axis], x.shape[self.axis + 1 :], x.dtype) for x in long]
        return (*sizes, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in others))
