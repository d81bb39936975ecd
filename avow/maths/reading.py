r"""Logits of chosen tokens and averages of their values: of all tokens under a mask, or reading the chosen ones alone.

Both ways say the same in float64. The first has fixed shapes and gradients, and compiles; the second touches no key and
no value that was not chosen, which is what makes a long cache cheap.
"""

from __future__ import annotations

import dataclasses
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


class Read(ABC):
    """What was read of some tokens. Numbers per token, `x`, have a shape of the reader's own; unread ones are 0."""

    logits: Tensor
    """−inf where a row did not read a token."""

    @abstractmethod
    def joined(self, which: Bool[Tensor, "b g r s"]) -> Read:
        """With these tokens read, and for each row these alone."""

    @abstractmethod
    def at(self, dense: Tensor) -> Tensor:
        """What something that has a number for every token has for those that were read."""

    @abstractmethod
    def top(self) -> Float64[Tensor, "b g r 1"]:
        """The largest logit that a row read; 0 where it read none."""

    @abstractmethod
    def sum(self, x: Tensor) -> Float64[Tensor, "b g r 1"]:
        """What the tokens' numbers add up to."""

    @abstractmethod
    def average(self, x: Tensor) -> Float64[Tensor, "b g r e"]:
        """The sum of the values, each x-fold."""

    @abstractmethod
    def squares(self, center: Float64[Tensor, "b g r e"]) -> Tensor:
        """Squares of the distances of the tokens' values from each row's center."""

    def weights(self, top: Float64[Tensor, "b g r 1"]) -> Tensor:
        """The exponentials of the logits, relative to that of `top`."""
        return (self.logits - self.at(top)).exp()


@dataclass(frozen=True)
class Masked(Read):
    """All logits, computed at once, and a mask: shapes do not depend on what is read."""

    whole: Float64[Tensor, "b g r s"]
    values: Float64[Tensor, "b g s e"]
    logits: Float64[Tensor, "b g r s"]

    @staticmethod
    def of(tokens: Tokens) -> Masked:
        whole = tokens.q @ tokens.k.double().transpose(-1, -2)
        whole = whole if tokens.bias is None else whole + tokens.bias
        return Masked(whole, tokens.v.double() / tokens.size, whole)

    def detached(self) -> Masked:
        """The same numbers, outside autograd."""
        return Masked(self.whole.detach(), self.values.detach(), self.logits.detach())

    def joined(self, which: Bool[Tensor, "b g r s"]) -> Masked:
        return dataclasses.replace(self, logits=torch.where(which, self.whole, -math.inf))

    def at(self, dense: Tensor) -> Tensor:
        return dense

    def top(self) -> Float64[Tensor, "b g r 1"]:
        top = self.logits.amax(-1, keepdim=True)
        return top.masked_fill(top == -math.inf, 0.0)

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
    found: Float64[Tensor, "m r"]
    """Logits of all rows, of those too that did not choose the token."""
    logits: Float64[Tensor, "m r"]

    @staticmethod
    def of(tokens: Tokens) -> Gathered:
        nothing = tokens.k.new_zeros(0, dtype=torch.int64)
        none = tokens.q.new_zeros(0, tokens.q.shape[2])
        return Gathered(tokens, nothing, nothing, none, none)

    def joined(self, which: Bool[Tensor, "b g r s"]) -> Gathered:
        wanted = which.any(2).flatten(0, 1)  # (bg, s)
        wanted[self.head, self.place] = False
        head, place = wanted.nonzero().unbind(-1)
        more = dataclasses.replace(self, head=head, place=place)
        bias = 0.0 if self.tokens.bias is None else more.at(self.tokens.bias)
        q = self.tokens.q.flatten(0, 1)  # (bg, r, d)
        parts = [rows @ q[i].T for i, _, rows in more._strips(self.tokens.k)]
        found = torch.cat(parts) if parts else q.new_zeros(0, q.shape[1])
        head, place = torch.cat([self.head, head]), torch.cat([self.place, place])
        grown = dataclasses.replace(self, head=head, place=place, found=torch.cat([self.found, found + bias]))
        return dataclasses.replace(grown, logits=torch.where(grown.at(which), grown.found, -math.inf))

    def _strips(self, rows: Float[Tensor, "b g s c"]) -> Iterator[tuple[int, slice, Float64[Tensor, "l c"]]]:
        """The tokens' rows in float64, a few at a time: their head, where they stand among the tokens, themselves."""
        groups = rows.shape[1]
        ends = (self.head.diff() != 0).nonzero().flatten() + 1
        bounds = [0, *ends.tolist(), self.head.numel()]
        for start, end in itertools.pairwise(bounds):
            if start == end:
                continue
            head = int(self.head[start])
            for first in range(start, end, _STRIP):
                span = slice(first, min(first + _STRIP, end))
                own = rows[head // groups, head % groups]
                yield head, span, own.index_select(0, self.place[span]).double()

    def at(self, dense: Tensor) -> Tensor:
        b, g, r, s = self.tokens.k.shape[0], self.tokens.k.shape[1], self.tokens.q.shape[2], dense.shape[-1]
        dense = dense.expand(b, g, r, s).reshape(b * g, r, s)
        return dense[self.head, :, self.place if s > 1 else torch.zeros_like(self.place)]  # (m, r)

    def top(self) -> Float64[Tensor, "b g r 1"]:
        b, g, r, _ = self.tokens.q.shape
        top = self.found.new_full((b * g, r), -math.inf)
        top = top.scatter_reduce(0, self.head.unsqueeze(-1).expand_as(self.logits), self.logits, "amax")
        return top.masked_fill(top == -math.inf, 0.0).reshape(b, g, r, 1)

    def sum(self, x: Tensor) -> Float64[Tensor, "b g r 1"]:
        b, g, r, _ = self.tokens.q.shape
        return x.new_zeros(b * g, r).index_add_(0, self.head, x).reshape(b, g, r, 1)

    def average(self, x: Tensor) -> Float64[Tensor, "b g r e"]:
        b, g, r, _ = self.tokens.q.shape
        out, size = x.new_zeros(b * g, r, self.tokens.v.shape[-1]), self.tokens.size.flatten()
        for i, span, rows in self._strips(self.tokens.v):
            out[i] += x[span].T @ (rows / size[i])
        return out.reshape(b, g, r, -1)

    def squares(self, center: Float64[Tensor, "b g r e"]) -> Tensor:
        flat, size = center.flatten(0, 1), self.tokens.size.flatten()
        out = torch.zeros_like(self.found)
        for i, span, rows in self._strips(self.tokens.v):
            rows = rows / size[i]
            across = rows @ flat[i].T
            out[span] = rows.square().sum(-1, keepdim=True) - 2 * across + flat[i].square().sum(-1)
        return out.clamp(min=0)
