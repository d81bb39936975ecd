"""What rows collect in a pass over keys, tile after tile."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Sums(NamedTuple):
    """What rows collect: weighted sums of values, divided by their normalisers where those were asked for.

    Normalisers are relative to exp(`unit_log`), noted for features that share one logarithm.
    """

    out: Float[Tensor, "b g r n e"]
    normaliser: Float[Tensor, "b g r n 1"] | None
    unit_log: Float[Tensor, "b g r n 1"] | None


class Collector:
    """Rows as they are finished: written in place, or kept for one concatenation where autograd watches."""

    def __init__(self, queries: int) -> None:
        self.queries = queries
        self.parts: list[Sums] = []
        self.whole: Sums | None = None
        self.done = 0

    def add(self, numerator: Tensor, normaliser: Tensor | None, reference: Tensor) -> None:
        divisor, unit = None, None
        if normaliser is not None:
            # A visible key contributes one; what is smaller belongs to a row that sees nothing, or to one of which
            # landmarks know nothing. A gradient divides by it, and meets keys that weigh up to e^rise: where that might
            # be more than floats hold, none flows.
            least = math.sqrt(torch.finfo(normaliser.dtype).tiny)
            divisor = torch.where(normaliser.abs() < least, 1.0, normaliser)
            if reference.shape[-1] == 1:
                unit = reference.unsqueeze(2).expand_as(normaliser)
        length = numerator.shape[-2]
        if length == self.queries or numerator.requires_grad or torch.compiler.is_compiling():
            self.parts.append(Sums(numerator if divisor is None else numerator / divisor, normaliser, unit))
            return
        if self.whole is None:
            others = (None if x is None else self._room(x) for x in (normaliser, unit))
            self.whole = Sums(self._room(numerator), *others)
        span = slice(self.done, self.done + length)
        rows = self.whole.out[..., span, :]
        if divisor is None:
            rows.copy_(numerator)
        else:
            torch.div(numerator, divisor, out=rows)
        for target, source in ((self.whole.normaliser, normaliser), (self.whole.unit_log, unit)):
            if target is not None and source is not None:
                target[..., span, :] = source
        if unit is None:
            self.whole = self.whole._replace(unit_log=None)
        self.done += length

    def joined(self) -> Sums:
        if self.whole is not None:
            return self.whole
        if len(self.parts) == 1:
            return self.parts[0]
        out, normalisers, units = zip(*self.parts, strict=True)
        # Features may share one logarithm in some tiles and not in others: then there is no unit of them all.
        return Sums(torch.cat(out, -2), _joined(normalisers), _joined(units))

    def _room(self, part: Tensor) -> Tensor:
        """Room for what all rows collect, as for those of a part."""
        return part.new_empty(*part.shape[:-2], self.queries, part.shape[-1])


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """All parts, or None where one is missing."""
    held = [x for x in parts if x is not None]
    return torch.cat(held, -2) if len(held) == len(parts) else None
