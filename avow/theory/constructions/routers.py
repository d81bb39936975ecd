r"""Routers: one attention head compiled from a table of who should read whom.

Token i scores token j by :math:`\tau\, x_i^\top W_Q^\top W_K x_j` and receives
:math:`c_i = \sum_j \alpha_{ij} W_V x_j`. For linearly independent tokens with dual basis
:math:`D` (:math:`D_i \cdot x_j = [i = j]`),

.. math:: W_Q = \sum_{i \to j} D_j D_i^\top, \qquad W_K = I, \qquad W_V = carry

(or W_Q/s and I/s, where the tokens' size s is far from 1) scores exactly 1 on each source of i and 0 elsewhere, so that
with k sources among n tokens the error

.. math:: c_i - \mathrm{intended}_i = \frac{n-k}{k e^\tau + n - k}\,(\bar v_{others} - \bar v_{sources})

falls with the scale τ, and there is a smallest one that keeps a given error [claims route-by-weights,
self-attend-copies-self]. Dependent tokens may still be routed: a linear program looks for the scores.

A program is several routers one after the other, so that what a token carries moves hop by hop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from avow.core import dtype_name
from avow.core.chart import Table
from avow.errors import ParameterError, RangeError, ShapeError, ToleranceUnreachable, value_text
from avow.numerics import intervals
from avow.numerics.intervals import longest, rounded, stacked
from avow.parameters import as_float, declared
from avow.theory.constructions.construction import (
    Construction,
    Proof,
    checked_eps,
    checked_matrix,
    first_proved,
    scipy_optimize,
)
from avow.theory.constructions.projections import dual_basis, linear

Routes = Mapping[int, int | Sequence[int]]

_BITS = 128
# The scale returned is the smallest that keeps the promise, up to this share of itself.
_GRAIN = 1e-6


@dataclass(frozen=True)
class Router(Construction):
    """One attention head that delivers to each routed token what its sources carry.

    `scale` multiplies the scores, as in PyTorch's attention (an inverse temperature). What is promised is real
    arithmetic on the weights as they are, on these tokens; tokens that `routes` does not name are promised nothing.
    """

    tokens: Tensor
    routes: Mapping[int, tuple[int, ...]]
    carry: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    scale: float
    eps: float

    @property
    def promise(self) -> str:
        table = ", ".join(f"{i} ← {'+'.join(map(str, sources))}" for i, sources in self.routes.items())
        return f"each routed token receives what its sources carry, within {self.eps:.3g} max‖v‖ ({table})"

    def tensors(self) -> dict[str, Tensor]:
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return {"W_Q": self.W_Q, "W_K": self.W_K, "W_V": self.W_V, "scale": scale}

    def verify(self) -> Proof:
        """Attention computed in balls on the actual numbers, against what was intended."""
        errors = {i: intervals.upper(error) for i, error in self._errors().items()}
        steps = tuple(f"token {i}: ‖c − intended‖ ≤ {error:.6g} max‖v‖" for i, error in errors.items())
        return Proof(self.promise, self.bound, max(errors.values()), steps)

    def is_smallest(self) -> bool:
        """Whether a scale smaller by one part in a million is proved to break the promise (or the scale is 0)."""
        if self.scale == 0:
            return True
        smaller = replace(self, scale=self.scale * (1 - _GRAIN))
        return any(intervals.lower(error) > self.eps for error in smaller._errors().values())

    def _errors(self) -> dict[int, intervals.arb]:
        """‖c_i − intended_i‖ / max ‖v_j‖ of every routed token."""
        with intervals.precision(_BITS):
            tokens = intervals.grid(self.tokens)
            received, values = attention_output(self, tokens, list(self.routes))
            intended = _averages(self.routes.values(), len(self.tokens)) * (
                tokens * intervals.grid(self.carry).transpose()
            )
            off, unit = (received - intended).tolist(), longest(values)
            return {i: intervals.norm(row) / unit for i, row in zip(self.routes, off, strict=True)}

    def scores(self) -> Tensor:
        """What each token scores each (n, n) before the scale, in float64."""
        wide = self.tokens.double()
        return (wide @ self.W_Q.double().mT) @ (wide @ self.W_K.double().mT).mT

    def picture(self) -> Table:
        """The attention weights of every token."""
        weights = torch.softmax(self.scores() * self.scale, -1).tolist()
        rows = [(i, *row, "+".join(map(str, self.routes.get(i, ()))) or "free") for i, row in enumerate(weights)]
        return Table("Who reads whom", ("token", *map(str, range(len(weights))), "routed to"), rows)

    def as_module(self) -> nn.Module:
        """Tokens (…, n, d) to what they receive (…, n, e)."""
        return _Head(self)


class _Head(nn.Module):
    def __init__(self, router: Router) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(router.W_Q), linear(router.W_K), linear(router.W_V)
        self.scale = router.scale

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.query(tokens) @ self.key(tokens).mT * self.scale
        return torch.softmax(scores, -1) @ self.value(tokens)


@declared("router")
def router(tokens: Tensor, routes: Routes, eps: float, *, carry: Tensor | None = None) -> Router:
    """The head with the smallest scale that routes these tokens to within `eps` max‖v‖.

    Dependent tokens are routed where some bilinear score puts every source above the rest, and refused where none does.
    Tokens equal to a source are sources.

    Args:
        tokens: the tokens, (n, d).
        routes: for each token which token it reads, or which ones it averages; tokens it does not name are left free
            (where the tokens are independent they read all evenly).
        eps: ε, between 0 and 1.
        carry: the linear map of the source that is delivered, (e, d), see `feature_map`; None is all of it.

    Returns:
        The weights, with their bound and a proof.

    Raises:
        ParameterError: a route does not fit, or no head routes so.
        ToleranceUnreachable: rounding is coarser than eps.

    >>> import torch
    >>> from avow.theory.constructions import router
    >>> head = router(torch.eye(3), {0: 1, 1: (0, 2)}, 0.01)
    >>> round(head.scale, 3), bool(head.verify()), head.is_smallest()
    (5.493, True, True)
    """
    tokens, eps = checked_matrix("router: tokens", tokens), checked_eps("router", eps)
    n, d = tokens.shape
    table = routing_table(routes, n)
    carry = torch.eye(d, dtype=tokens.dtype) if carry is None else checked_matrix("router: carry", carry)
    if carry.shape[1] != d:
        raise ShapeError("router: carry", tuple(carry.shape), f"must be (e, {d}), as wide as a token", "transpose it?")
    W_V = carry.to(tokens.dtype)
    if not bool(((tokens.double() @ W_V.double().mT) != 0).any()):
        rule = "must carry something of some token"
        raise ParameterError("router: carry", "this map", rule, "leave it out to carry all")
    # W_Q goes with the inverse square of the tokens' size: far from 1, W_K takes its half, and both stay in the type.
    exponent = int(torch.frexp(tokens.double().abs().amax()).exponent)
    size = 1.0 if abs(exponent) <= 4 else math.ldexp(1.0, exponent)
    W_Q = (_queries(tokens.double() / size, table) / size).to(tokens.dtype)
    W_K = (torch.eye(d, dtype=torch.float64) / size).to(tokens.dtype)
    if not bool(W_Q.isfinite().all() and W_K.isfinite().all()):
        rule = f"so small, or so near dependent, carry the weights out of {dtype_name(tokens.dtype)}"
        remedy = "scale them towards 1, or use a wider type"
        raise RangeError("router: tokens", f"of size {math.ldexp(1.0, exponent):.3g}", rule, remedy)
    return _with_smallest_scale(Router(tokens, table, carry, W_Q, W_K, W_V, 0.0, eps))


@declared("feature_map")
def feature_map(features: Tensor, gains: Sequence[float]) -> Tensor:
    """The matrix (d, d) that multiplies each feature by its gain, and by 0 what is orthogonal to all of them.

    Args:
        features: the features, linearly independent rows, (m, d).
        gains: a number for each.

    Returns:
        The matrix.

    Raises:
        ParameterError: features are dependent, or gains do not fit.

    >>> import torch
    >>> from avow.theory.constructions import feature_map
    >>> feature_map(torch.eye(3)[:2], (1.0, -1.0)).diagonal().tolist()
    [1.0, -1.0, 0.0]
    """
    features = checked_matrix("feature_map: features", features)
    if len(gains) != len(features) or not all(math.isfinite(as_float(gain)) for gain in gains):
        rule = f"must be a finite number for each of the {len(features)} features"
        raise ParameterError("feature_map: gains", tuple(gains), rule, "0 drops a feature")
    basis = dual_basis(features.mT)
    if basis is None:
        shape = tuple(features.shape)
        raise ParameterError("feature_map: features", shape, "are not proved linearly independent", "drop one of them")
    with intervals.precision(_BITS):
        gain = intervals.grid(torch.diag(torch.tensor([float(x) for x in gains], dtype=torch.float64)))
        return rounded(intervals.grid(features.mT) * gain * basis, features.dtype)


@declared("route_by_weights")
def route_by_weights(beta: float) -> Router:
    r"""The worked example: orthogonal features of length β; tokens d+b, a, c+b; c_1 ≈ u_b − u_c and c_2 ≈ u_b.

    V = β⁻²(u_b u_bᵀ − u_c u_cᵀ), K = I, Q = β⁻²(u_c u_dᵀ + u_d u_aᵀ). Each routed token scores β² on its source and 0
    on the other two, so with :math:`w = 1/(e^{\beta^2} + 2)` the errors are exactly
    :math:`\|c_1 - (u_b - u_c)\| = \sqrt5\,\beta w` and :math:`\|c_2 - u_b\| = \sqrt2\,\beta w`; the bound is the
    larger, in units of max‖v‖ = √2 β.

    Args:
        beta: β, the length of the features, above 0.

    Returns:
        The head, with its bound and a proof.

    Raises:
        ParameterError: beta is not above 0, or not finite.

    >>> from avow.theory.constructions import route_by_weights
    >>> bool(route_by_weights(3.0).verify())
    True
    """
    if not 0 < as_float(beta) < math.inf:
        raise ParameterError("route_by_weights: beta", beta, "must be above 0 and finite", "try beta=3")
    beta = float(beta)
    a, b, c, d = torch.eye(4, dtype=torch.float64)
    tokens = beta * torch.stack((d + b, a, c + b))
    # β⁻² u uᵀ is the projector on a unit vector: β cancels, and every entry is exact.
    carry = torch.outer(b, b) - torch.outer(c, c)
    W_Q = torch.outer(c, d) + torch.outer(d, a)
    with intervals.precision(_BITS):
        size = intervals.ball(beta)
        error = (intervals.ball(5) / 2).sqrt() / ((size * size).exp() + 2)
        bound = intervals.upper(error * (1 + intervals.ball(2) ** -40))
    return Router(tokens, {0: (2,), 1: (0,)}, carry, W_Q, torch.eye(4, dtype=torch.float64), carry, 1.0, bound)


def attention_output(
    hop: Router, tokens: intervals.arb_mat, rows: Sequence[int]
) -> tuple[intervals.arb_mat, intervals.arb_mat]:
    """What some tokens receive, and the values of all, in balls."""
    queries, keys, values = (tokens * intervals.grid(weight).transpose() for weight in (hop.W_Q, hop.W_K, hop.W_V))
    scores, scale = (queries * keys.transpose()).tolist(), intervals.ball(hop.scale)
    weights = [intervals.softmax([scale * score for score in scores[i]]) for i in rows]
    return stacked(weights) * values, values


def routing_table(routes: Routes, n: int) -> dict[int, tuple[int, ...]]:
    """Routes as destination to sources, checked."""
    if not routes:
        raise ParameterError("router: routes", value_text(routes), "must route a token", "try {0: 1}")
    table = {}
    for i, given in routes.items():
        sources = tuple(given) if isinstance(given, Iterable) else (given,)
        if not sources or len(set(sources)) != len(sources) or not all(0 <= j < n for j in (i, *sources)):
            rule = f"must name tokens 0..{n - 1}, each source once and at least one"
            raise ParameterError("router: routes", f"{i}: {given}", rule, "count tokens from 0")
        table[i] = sources
    return table


def _queries(tokens: Tensor, table: Mapping[int, tuple[int, ...]]) -> Tensor:
    """W_Q for W_K = I: by the dual basis, or by a linear program where the tokens are dependent."""
    n = len(tokens)
    basis = dual_basis(tokens.mT)
    if basis is None:
        return _separating_scores(tokens, table)
    pattern = torch.zeros(n, n, dtype=torch.float64)
    for i, sources in table.items():
        pattern[i, list(sources)] = 1.0
    with intervals.precision(_BITS):
        return rounded(basis.transpose() * intervals.grid(pattern.mT) * basis, torch.float64)


def _separating_scores(tokens: Tensor, table: Mapping[int, tuple[int, ...]]) -> Tensor:
    """The W_Q with the widest margin of every source over the rest, entries in [−1, 1], by linear programming."""
    optimize = scipy_optimize("to route tokens that are linearly dependent")
    unit = tokens / tokens.norm(dim=1).amax()
    above, level, owners = [], [], []
    for i, sources in table.items():
        first = sources[0]
        for j in range(len(tokens)):
            ahead = torch.outer(unit[first] - unit[j], unit[i]).flatten()  # x_srcᵀ W_Q x_i − x_jᵀ W_Q x_i
            if j in sources[1:]:
                level.append(ahead)
            elif not any(torch.equal(tokens[j], tokens[source]) for source in sources):
                above.append(ahead)
                owners.append(i)
    width = unit.shape[1]
    if not above:
        return unit.new_zeros(width, width)
    ties = torch.stack(level) if level else unit.new_zeros(0, width**2)
    solution = optimize.linprog(
        [0.0] * width**2 + [-1.0],
        A_ub=nn.functional.pad(-torch.stack(above), (0, 1), value=1.0).numpy(),
        b_ub=[0.0] * len(above),
        A_eq=nn.functional.pad(ties, (0, 1)).numpy(),
        b_eq=[0.0] * len(ties),
        bounds=[(-1.0, 1.0)] * width**2 + [(0.0, None)],
        method="highs",
    )
    margin = 0.0 if solution.x is None else max(0.0, float(solution.x[-1]))
    if margin < 1e-6:
        held = solution.ineqlin.marginals if solution.x is not None else []
        tight = sorted({owner for owner, marginal in zip(owners, held, strict=False) if marginal < -1e-9})
        rule = (
            "are linearly dependent, and no bilinear score puts every source above the rest "
            f"(the widest margin is {margin:.1g}; the routes of tokens {tight} stand against it)"
        )
        remedy = "give each token an address feature of its own, or drop a route"
        rank = int(torch.linalg.matrix_rank(unit))
        raise ParameterError("router: tokens", f"{len(tokens)} of rank {rank}", rule, remedy)
    entries = torch.tensor(solution.x[:-1], dtype=torch.float64) / margin
    if level:
        # The program keeps its ties to 1e-7; the nearest point that keeps them all keeps them to rounding.
        entries = entries - torch.linalg.lstsq(ties.mT, entries[:, None], driver="gelsd").solution.mT @ ties
    return entries.reshape(width, width)


def _with_smallest_scale(head: Router) -> Router:
    """The router with the smallest scale whose worst row is proved to keep eps."""
    wide, scores = head.tokens.double(), head.scores()
    values = wide @ head.W_V.double().mT
    carried = wide @ head.carry.double().mT
    rows = list(head.routes)
    intended = torch.stack([carried[list(sources)].mean(0) for sources in head.routes.values()])
    most = values.abs().amax()
    unit, values, intended = (values / most).norm(dim=1).amax(), values / most, intended / most
    ahead = scores[rows] - scores[rows].amax(-1, keepdim=True)

    def error(scale: Tensor) -> Tensor:
        weights = (scale[:, None, None] * ahead).exp()
        received = weights @ values / weights.sum(-1, keepdim=True)
        return ((received - intended).norm(dim=-1) / unit).amax(-1)

    if float(error(torch.zeros(1, dtype=torch.float64))) <= head.eps and head.verify():
        return head
    spread = scores[rows].abs().amax().clamp(min=1e-300)
    ladder = torch.logspace(-3, 5, 200, dtype=torch.float64) / spread
    tried = torch.cat([error(part) for part in ladder.split(25)])
    enough = (tried <= head.eps * (1 - 1e-12)).nonzero().flatten()
    if len(enough):
        first = int(enough[0])
        low, high = (float(ladder[first - 1]) if first else 0.0), float(ladder[first])
        for _ in range(60):
            middle = (low + high) / 2
            keeps = float(error(torch.tensor([middle], dtype=torch.float64))) <= head.eps
            low, high = (low, middle) if keeps else (middle, high)
        margins = (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-7, 3e-7)
        proved, _ = first_proved(replace(head, scale=high * (1 + margin)) for margin in margins)
        if proved is not None:
            return proved
    rule = f"cannot be kept with weights rounded to {dtype_name(head.tokens.dtype)}"
    remedy = "use a wider type, or tokens further from dependent"
    raise ToleranceUnreachable("router: eps", head.eps, rule, remedy, float(tried.amin()))


@dataclass(frozen=True)
class Program(Construction):
    """Several hops: after each, a token is what `residual` keeps of it plus what the hop delivers.

    The unit of `bound` is the longest token intended after the last hop.
    """

    routers: tuple[Router, ...]
    residual: Tensor
    eps: float

    @property
    def promise(self) -> str:
        hops = len(self.routers)
        return f"after {hops} hops every token is what was intended, within {self.eps:.3g} of the longest of them"

    def tensors(self) -> dict[str, Tensor]:
        hops = {f"{i}.{name}": x for i, hop in enumerate(self.routers) for name, x in hop.tensors().items()}
        return hops | {"residual": self.residual}

    def intended(self) -> Tensor:
        """The tokens (n, d) after the last hop, were every hop perfect; rounded to float64."""
        with intervals.precision(_BITS):
            tokens = intervals.grid(self.routers[0].tokens)
            for hop in self.routers:
                tokens = _after_hop(tokens, hop, self.residual)
            return rounded(tokens, torch.float64)

    def verify(self) -> Proof:
        """Every hop run in balls, one on the other's outcome, against the perfect run."""
        steps = []
        with intervals.precision(2 * _BITS):
            keep = intervals.grid(self.residual).transpose()
            actual = wanted = intervals.grid(self.routers[0].tokens)
            for l, hop in enumerate(self.routers):
                wanted = _after_hop(wanted, hop, self.residual)
                received, _ = attention_output(hop, actual, range(len(hop.tokens)))
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
    tokens: Tensor, hops: Sequence[Routes], eps: float, *, carry: Tensor | None = None, residual: Tensor | bool = True
) -> Program:
    """Hops that move what tokens carry, one after the other, to within `eps` of the longest token intended at the end.

    After a hop a token is residual·x + carry·(its sources' average). With `residual` on the addresses and `carry` on
    the contents, a hop overwrites contents.

    Args:
        tokens: the tokens, (n, d).
        hops: the routes of each hop, as `router` takes them. Tokens a hop does not name read themselves.
        eps: the largest error at the end.
        carry: the linear map of a source that is delivered, (e, d); None is all of it.
        residual: True adds to the token, False overwrites it, a matrix (d, d) keeps what it maps.

    Returns:
        The heads, one for each hop, with their bound and a proof.

    Raises:
        ParameterError: a route does not fit, or no head routes so.
        ToleranceUnreachable: rounding is coarser than eps.

    >>> import torch
    >>> from avow.theory.constructions import program
    >>> bool(program(torch.eye(3), [{0: 1}, {1: 0}], 0.01).verify())
    True
    """
    tokens, eps = checked_matrix("program: tokens", tokens), checked_eps("program", eps)
    if not len(hops):
        raise ParameterError("program: hops", "[]", "must hold a hop", "give a mapping of destination to source")
    n, d = tokens.shape
    whole = torch.eye(d, dtype=tokens.dtype)
    residual = checked_matrix("program: residual", whole * residual if isinstance(residual, bool) else residual)
    carry = whole if carry is None else checked_matrix("program: carry", carry)
    for name, x in (("residual", residual), ("carry", carry)):
        if tuple(x.shape) != (d, d):
            raise ShapeError(f"program: {name}", tuple(x.shape), f"must be ({d}, {d})", "a hop maps tokens to tokens")
    tables = [routing_table({i: i for i in range(n)} | dict(hop), n) for hop in hops]
    each, best = eps / (2 * len(hops)), math.inf
    for _ in range(12):
        routers, before = [], tokens
        try:
            for table in tables:
                # Each router is compiled on the tokens intended before its hop.
                routers.append(router(before, table, each, carry=carry))
                with intervals.precision(_BITS):
                    before = rounded(_after_hop(intervals.grid(before), routers[-1], residual), tokens.dtype)
        except ToleranceUnreachable:
            break
        chain = Program(tuple(routers), residual, eps)
        proof = chain.verify()
        if proof:
            return chain
        best = min(best, proof.achieved)
        each *= max(1e-3, min(0.5, eps / proof.achieved))
    rule = f"is below what {len(hops)} hops in {dtype_name(tokens.dtype)} can promise"
    raise ToleranceUnreachable("program: eps", eps, rule, "use float64 or fewer hops", best)


def _after_hop(tokens: intervals.arb_mat, hop: Router, residual: Tensor) -> intervals.arb_mat:
    """residual·x + carry·(sources' average), perfectly."""
    carried = tokens * intervals.grid(hop.carry).transpose()
    sources = [hop.routes[i] for i in range(len(hop.tokens))]
    return tokens * intervals.grid(residual).transpose() + _averages(sources, len(sources)) * carried


def _averages(routes: Iterable[Sequence[int]], n: int) -> intervals.arb_mat:
    """The matrix that averages sources among n tokens, a row for each destination."""
    return stacked([[intervals.ball(int(j in sources)) / len(sources) for j in range(n)] for sources in routes])
