"""Loops over all tokens that a compiler makes of torch code where one is at hand; plain torch otherwise.

Compiled code stays within the same rounding bounds as plain torch: they hold for sums in any order, with or without
fused multiply-adds, and for an exp that is right to 64 units in the last place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Multiply-adds in one step: fewer roundings, not more.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.enable_floating_point_contract_flag": "fast"}


class NotCompiled(Exception):
    """A loop could not be compiled here; the text says why."""


class Fused:
    """A function of tensors, compiled when it is first called: those that are `long` may have any length along an axis.

    Nothing is compiled before: importing costs nothing. Where compiling failed once it is not tried again.
    """

    failed: str = ""
    """Why compiling failed, for all functions: what a compiler lacks it lacks for each."""

    def __init__(self, function: Callable[..., Any], axis: int = 0) -> None:
        self.plain, self.axis = function, axis
        self._made: Callable[..., Any] | None = None
        self._known: set[tuple[tuple[torch.Size, torch.Size, torch.dtype], ...]] = set()

    def __call__(self, long: Sequence[Tensor], *others: Any) -> Any:
        """What the function gives; that axis of each of `long` may have another length next time.

        Raises `NotCompiled` where it cannot be compiled.
        """
        if Fused.failed:
            raise NotCompiled(Fused.failed)
        kind = tuple((x.shape[: self.axis], x.shape[self.axis + 1 :], x.dtype) for x in long)
        try:
            if self._made is not None and kind in self._known:
                return self._made(*long, *others)
            with warnings.catch_warnings():
                # A compiler warns of its own insides.
                warnings.simplefilter("ignore")
                for x in long:
                    torch._dynamo.maybe_mark_dynamic(x, self.axis)
                self._made = self._made or torch.compile(self.plain, options=_OPTIONS)
                found = self._made(*long, *others)
            self._known.add(kind)
            return found
        except Exception as problem:  # whatever a compiler, its installation or a full disk may come up with
            told = str(problem).strip().splitlines()
            Fused.failed = f"{type(problem).__name__}: {told[0]}" if told else type(problem).__name__
            raise NotCompiled(Fused.failed) from problem
