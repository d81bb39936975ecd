r"""Logits of chosen tokens and averages of their values: of all tokens under a mask, or reading the chosen ones alone.

Both ways say the same in float64. The first has fixed shapes and gradients, and compiles; the second touches no key and
no value that was not chosen, which is what makes a long cache cheap.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

# Rows that are widened to float64 at once: few enough that they never leave a core's own cache.
_STRIP = 2048


@dataclass(frozen=True)
class Tokens:
    """Queries, and the tokens that they may read: r rows of queries share the keys of a head."""

    q: Float64[Tensor, "b g r d"]
    """Multiplied by the scale already."""
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    bias: Float64[Tensor, "b g r s"] | None
    size: Float64[Tensor, "b g 1 1"]
    """The power of two that values are divided by."""


@dataclass(frozen=True)
class Read(ABC):
    """What was read of some tokens. Numbers per token, `x`, have a shape of the reader's own; unread ones are 0."""

    logits: Tensor
    """−inf where a row did not read a token."""
    top: Float64[Tensor, "b g r 1"]
    """The largest logit that a row read; 0 where it read none."""
    weights: Tensor
    """The exponentials of the logits, relative to that of `top`."""
    total: Float64[Tensor, "b g r 1"]
    """What the weights add up to."""

    @abstractmethod
    def joined(self, which: Bool[Tensor, "b g r s"]) -> Read:
        """With these tokens read, and for each row these alone."""

    @abstractmethod
    def at(self, dense: Tensor) -> Tensor:
        """What something that has a number for every token has for those that were read."""

    @abstractmethod
    def sum(self, x: Tensor) -> Float64[Tensor, "b g r 1"]:
        """What the tokens' numbers add up to."""

    @abstractmethod
    def average(self, x: Tensor) -> Float64[Tensor, "b g r e"]:
        """The sum of the values, each x-fold."""

    @abstractmethod
    def squares(self, center: Float64[Tensor, "b g r e"]) -> Tensor:
        """Squares of the distances of the tokens' values from each row's center."""


@dataclass(frozen=True)
class Masked(Read):
    """All logits, computed at once, and a mask: shapes do not depend on what is read."""

    whole: Float64[Tensor, "b g r s"]
    values: Float64[Tensor, "b g s e"]

    @staticmethod
    def of(tokens: Tokens) -> Masked:
        """Nothing read yet."""
        whole = tokens.q @ tokens.k.double().transpose(-1, -2)
        whole = whole if tokens.bias is None else whole + tokens.bias
        zero = whole.new_zeros(*whole.shape[:-1], 1)
        nothing = zero.expand(whole.shape)
        return Masked(nothing - math.inf, zero, nothing, zero, whole, tokens.v.double() / tokens.size)

    def detached(self) -> Masked:
        """The same numbers, outside autograd."""
        return dataclasses.replace(self, whole=self.whole.detach(), values=self.values.detach())

    def joined(self, which: Bool[Tensor, "b g r s"]) -> Masked:
        logits = torch.where(which, self.whole, -math.inf)
        top = logits.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (logits - top).exp()
        return dataclasses.replace(self, logits=logits, top=top, weights=weights, total=weights.sum(-1, keepdim=True))

    def at(self, dense: Tensor) -> Tensor:
        return dense

    def sum(self, x: Tensor) -> Float64[Tensor, "b g r 1"]:
        return x.sum(-1, keepdim=True)

    def average(self, x: Tensor) -> Float64[Tensor, "b g r e"]:
        return x @ self.values

    def squares(self, center: Float64[Tensor, "b g r e"]) -> Tensor:
        own = self.values.square().sum(-1).unsqueeze(-2)  # (b, g, 1, s)
        across = center @ self.values.transpose(-1, -2)
        return (own - 2 * across + center.square().sum(-1, keepdim=True)).clamp(min=0)


@dataclass(frozen=True)
class Gathered(Read):
    """Only what was chosen: the m tokens that any row of their head wants, each with a number for each of r rows."""

    tokens: Tokens
    head: Int[Tensor, " m"]
    place: Int[Tensor, " m"]
    all_logits: Float64[Tensor, "m r"]
    """Logits of all rows, of those too that did not choose the token."""

    @staticmethod
    def of(tokens: Tokens) -> Gathered:
        """Nothing read yet."""
        nothing = tokens.k.new_zeros(0, dtype=torch.int64)
        none = tokens.q.new_zeros(0, tokens.q.shape[2])
        zero = tokens.q.new_zeros(*tokens.q.shape[:-1], 1)
        return Gathered(none, zero, none, zero, tokens, nothing, nothing, none)

    def joined(self, which: Bool[Tensor, "b g r s"]) -> Gathered:
        # Rows one after the other: reducing over an axis of a few bytes is slower.
        wanted = functools.reduce(torch.bitwise_or, which.unbind(2)).flatten(0, 1).clone()  # (bg, s)
        wanted[self.head, self.place] = False
        head, place = wanted.nonzero().unbind(-1)
        q = self.tokens.q.flatten(0, 1)  # (bg, r, d)
        parts = [rows @ q[i].T for i, _, rows in _strips(self.tokens.k, head, place)]
        all_logits = torch.cat(parts) if parts else q.new_zeros(0, q.shape[1])
        if self.tokens.bias is not None:
            all_logits = all_logits + _at(self.tokens.bias, head, place)
        head, place = torch.cat([self.head, head]), torch.cat([self.place, place])
        all_logits = torch.cat([self.all_logits, all_logits])
        logits = torch.where(_at(which, head, place), all_logits, -math.inf)
        top = q.new_full(q.shape[:2], -math.inf)  # (bg, r)
        top = top.scatter_reduce(0, head.unsqueeze(-1).expand_as(logits), logits, "amax")
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (logits - top[head]).exp()
        total = torch.zeros_like(top).index_add_(0, head, weights)
        top, total = (x.reshape(self.top.shape) for x in (top, total))
        return Gathered(logits, top, weights, total, self.tokens, head, place, all_logits)

    def at(self, dense: Tensor) -> Tensor:
        return _at(dense, self.head, self.place)

    def sum(self, x: Tensor) -> Float64[Tensor, "b g r 1"]:
        b, g, r, _ = self.tokens.q.shape
        return x.new_zeros(b * g, r).index_add_(0, self.head, x).reshape(b, g, r, 1)

    def average(self, x: Tensor) -> Float64[Tensor, "b g r e"]:
        b, g, r, _ = self.tokens.q.shape
        out, small = x.new_zeros(b * g, r, self.tokens.v.shape[-1]), self.tokens.size.flatten().reciprocal()
        for i, span, rows in _strips(self.tokens.v, self.head, self.place):
            out[i] += x[span].T @ rows.mul_(small[i])
        return out.reshape(b, g, r, -1)

    def squares(self, center: Float64[Tensor, "b g r e"]) -> Tensor:
        flat, small = center.flatten(0, 1), self.tokens.size.flatten().reciprocal()
        out = torch.zeros_like(self.all_logits)
        for i, span, rows in _strips(self.tokens.v, self.head, self.place):
            rows.mul_(small[i])
            across = rows @ flat[i].T
            out[span] = rows.square().sum(-1, keepdim=True) - 2 * across + flat[i].square().sum(-1)
        return out.clamp(min=0)


def _at(dense: Tensor, head: Int[Tensor, " m"], place: Int[Tensor, " m"]) -> Tensor:
    """Of something that has a number for every row and token, (b, g, r, s), those of some tokens: (m, r)."""
    return dense.flatten(0, 1)[head, :, place]


def _strips(
    rows: Float[Tensor, "b g s c"], head: Int[Tensor, " m"], place: Int[Tensor, " m"]
) -> Iterator[tuple[int, slice, Float64[Tensor, "l c"]]]:
    """The tokens' rows in float64, a few at a time, until the next: their head, where they stand, themselves."""
    groups, c = rows.shape[1], rows.shape[-1]
    # Room made once: fresh pages would cost more than what is written to them.
    narrow, wide = rows.new_empty(_STRIP, c), rows.new_empty(_STRIP, c, dtype=torch.float64)
    ends = (head.diff() != 0).nonzero().flatten() + 1
    for start, end in itertools.pairwise([0, *ends.tolist(), head.numel()]):
        for first in range(start, end, _STRIP):
            span = slice(first, min(first + _STRIP, end))
            i, count = int(head[start]), span.stop - first
            torch.index_select(rows[i // groups, i % groups], 0, place[span], out=narrow[:count])
            yield i, span, wide[:count].copy_(narrow[:count])
