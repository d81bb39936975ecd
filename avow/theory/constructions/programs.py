"""Programs: several routers one after the other, so that what a token carries moves hop by hop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from avow.core import named
from avow.core.chart import Table
from avow.errors import ParameterError, ShapeError, ToleranceUnreachable
from avow.numerics import intervals
from avow.numerics.intervals import longest, rounded, spectral, stacked
from avow.parameters import declared
from avow.theory.constructions.construction import Construction, Proof
from avow.theory.constructions.projections import linear
from avow.theory.constructions.routers import Router, Routes, attended, attention_weights, router, routing_table
from avow.theory.constructions.validation import checked_eps, checked_matrix

if TYPE_CHECKING:
    from flint import arb, arb_mat

_BITS = 128


@dataclass(frozen=True)
class Program(Construction):
    """Several hops: after each, a token is what `residual` keeps of it plus what the hop delivers.

    `bound` composes the hops' promises; its unit is the longest token intended after the last hop.
    """

    routers: tuple[Router, ...]
    residual: Tensor
    eps: float

    @property
    def promise(self) -> str:
        hops = len(self.routers)
        return f"after {hops} hops every token is what was intended, within {self.eps:.3g} of the longest of them"

    @property
    def bound(self) -> float:
        return self.eps

    def tensors(self) -> dict[str, Tensor]:
        hops = {f"{i}.{name}": x for i, hop in enumerate(self.routers) for name, x in hop.tensors().items()}
        return hops | {"residual": self.residual}

    def intended(self) -> Tensor:
        """The tokens (n, d) after the last hop, were every hop perfect; rounded to float64."""
        with intervals.precision(_BITS):
            return rounded(_chain(self.routers, self.residual)[-1], torch.float64)

    def verify(self) -> Proof:
        """Every hop run in balls, one on the other's outcome, against the perfect run."""
        with intervals.precision(2 * _BITS):
            keep = intervals.grid(self.residual).transpose()
            actual = intervals.grid(self.routers[0].tokens)
            steps = []
            for l, (hop, wanted) in enumerate(zip(self.routers, _chain(self.routers, self.residual)[1:], strict=True)):
                received, _ = attended(hop, actual, range(len(hop.tokens)))
                actual = actual * keep + received
                off = intervals.upper(longest(actual - wanted) / longest(wanted))
                steps.append(f"after hop {l + 1}: every token within {off:.6g} of the longest")
        return Proof(self.promise, self.bound, off, tuple(steps))

    def picture(self) -> Table:
        """Each hop's routes and scale."""
        rows = [
            (l + 1, ", ".join(f"{i} ← {'+'.join(map(str, s))}" for i, s in hop.routes.items() if s != (i,)), hop.scale)
            for l, hop in enumerate(self.routers)
        ]
        return Table("A program of hops", ("hop", "routes", "scale"), rows)

    def as_module(self) -> nn.Module:
        """Tokens (…, n, d) to tokens (…, n, d)."""
        return _Hops(self)


class _Hops(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.heads = nn.ModuleList(hop.as_module() for hop in program.routers)
        self.residual = linear(program.residual)

    def forward(self, tokens: Tensor) -> Tensor:
        for head in self.heads:
            tokens = self.residual(tokens) + head(tokens)
        return tokens


@declared("program")
def program(
    tokens: Tensor,
    hops: Sequence[Routes],
    eps: float,
    *,
    carry: Tensor | None = None,
    residual: Tensor | bool = True,
) -> Program:
    """Hops that move what tokens carry, one after the other, to within `eps` of the longest token intended at the end.

    After a hop a token is residual·x + carry·(its sources' average). `residual=True` adds to the token, `False`
    overwrites it, a matrix (d, d) keeps what it maps: with `residual` on the addresses and `carry` on the contents,
    a hop overwrites contents. Tokens a hop does not name read themselves.
    """
    checked_matrix("program: tokens", tokens)
    eps = checked_eps("program", eps)
    if not len(hops):
        raise ParameterError("program: hops", "[]", "must hold a hop", "give a mapping of destination to source")
    n, d = tokens.shape
    if isinstance(residual, bool):
        residual = torch.eye(d, dtype=tokens.dtype) if residual else torch.zeros(d, d, dtype=tokens.dtype)
    checked_matrix("program: residual", residual)
    carry = torch.eye(d, dtype=tokens.dtype) if carry is None else carry
    for name, x in (("residual", residual), ("carry", carry)):
        if tuple(x.shape) != (d, d):
            raise ShapeError(f"program: {name}", tuple(x.shape), f"must be ({d}, {d})", "a hop maps tokens to tokens")
    tokens, carry, residual = tokens.detach(), carry.detach(), residual.detach()
    tables = [routing_table({i: i for i in range(n)} | dict(hop), n) for hop in hops]
    each = min(eps / (2 * len(hops)), 0.5)
    best = math.inf
    for _ in range(12):
        try:
            made = _compiled(tokens, tables, each, carry, residual)
        except ToleranceUnreachable:
            break
        reached = _composed(made, residual)
        best = min(best, reached)
        if reached <= eps:
            return Program(made, residual, reached)
        each = each / 2 if reached < 2 * eps else max(each * eps / reached, each / 1e3)
    raise ToleranceUnreachable(
        "program: eps",
        eps,
        f"is below what {len(hops)} hops in {named(tokens.dtype)} can promise",
        "use float64 or fewer hops",
        best,
    )


def _compiled(
    tokens: Tensor, tables: Sequence[Mapping[int, tuple[int, ...]]], eps: float, carry: Tensor, residual: Tensor
) -> tuple[Router, ...]:
    """A router for each hop, each on the tokens intended before it."""
    made: list[Router] = []
    before = tokens
    for table in tables:
        hop = router(before, table, eps, carry=carry)
        made.append(hop)
        with intervals.precision(_BITS):
            before = rounded(_delivered(intervals.grid(before), hop, residual), tokens.dtype)
    return tuple(made)


def _delivered(tokens: arb_mat, hop: Router, residual: Tensor) -> arb_mat:
    """residual·x + carry·(sources' average), perfectly."""
    carried = tokens * intervals.grid(hop.carry).transpose()
    mean = torch.zeros(len(hop.tokens), len(hop.tokens), dtype=torch.float64)
    counts = [intervals.ball(1) / len(hop.routes[i]) for i in range(len(mean))]
    for i, sources in hop.routes.items():
        mean[i, list(sources)] = 1.0
    picked = (intervals.grid(mean) * carried).tolist()
    return tokens * intervals.grid(residual).transpose() + stacked(
        [[x * share for x in row] for row, share in zip(picked, counts, strict=True)]
    )


def _chain(routers: Sequence[Router], residual: Tensor) -> list[arb_mat]:
    """Tokens before the first hop and after each, were every hop perfect."""
    tokens = [intervals.grid(routers[0].tokens)]
    for hop in routers:
        tokens.append(_delivered(tokens[-1], hop, residual))
    return tokens


def _composed(routers: Sequence[Router], residual: Tensor) -> float:
    r"""A bound on the last token's error from the hops' own, in units of the longest intended token.

    Let every token be off by at most e before a hop that was compiled for tokens X. Its scores move by at most
    :math:`\Delta = \tau(e\max\|M x_j\| + e\max\|M^\top x_i\| + e^2\|M\|)`, its values by :math:`e\|W_V\|`, and so

    .. math:: e' = e\,(\|R\| + \|W_V\|) + a \max\|v\| + \text{rounding of the next } X,

    where a is what the weights may do: :math:`\varepsilon + 2\tanh(\Delta/2)`, as scores move weights by no more in the
    1-norm [claim softmax-perturbation], or, for a single source that loses a share l of the weight on X,
    :math:`2 l e^{2\Delta}`, as moved scores multiply that share by at most :math:`e^{2\Delta}`.
    """
    with intervals.precision(_BITS):
        off = intervals.ball(0)
        kept = spectral(intervals.grid(residual))
        for l, hop in enumerate(routers):
            tokens = intervals.grid(hop.tokens)
            middle = intervals.grid(hop.W_Q).transpose() * intervals.grid(hop.W_K)
            reach = longest(tokens * middle.transpose()) + longest(tokens * middle)
            moved = intervals.ball(hop.scale) * (off * reach + off * off * spectral(middle))
            values = longest(tokens * intervals.grid(hop.W_V).transpose())
            shares = [intervals.ball(hop.eps) + 2 * (moved / 2).tanh()]
            if all(len(sources) == 1 for sources in hop.routes.values()):
                shares.append(2 * _lost(hop, tokens) * (2 * moved).exp() + _unlike(hop) / values)
            off = (
                off * (kept + spectral(intervals.grid(hop.W_V)))
                + min(intervals.upper(share) for share in shares) * values
            )
            perfect = _delivered(tokens, hop, residual)
            if l + 1 < len(routers):
                off += longest(intervals.grid(routers[l + 1].tokens) - perfect)
        # The perfect run is not the one the routers were compiled on, whose tokens are rounded after every hop.
        wanted = _chain(routers, residual)[-1]
        off += longest(wanted - perfect)
        return intervals.upper(off / longest(wanted))


def _lost(hop: Router, tokens: arb_mat) -> arb:
    """The largest share of a token's weight that misses its single source and that source's equals."""
    lost = intervals.ball(0)
    for row, (source,) in zip(attention_weights(hop, tokens, list(hop.routes)), hop.routes.values(), strict=True):
        missed = [w for j, w in enumerate(row) if not torch.equal(hop.tokens[j], hop.tokens[source])]
        lost = lost.max(intervals.total(missed))
    return lost


def _unlike(hop: Router) -> arb:
    """How far rounding the carried map to W_V moves a value."""
    tokens = intervals.grid(hop.tokens)
    return longest(tokens * (intervals.grid(hop.W_V) - intervals.grid(hop.carry)).transpose())
