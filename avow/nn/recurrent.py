r"""Recurrent cells in both activation orders, and how far back a gradient reaches through one.

.. math:: h_t = W\sigma(h_{t-1}) + Ux_t + b \qquad\text{and}\qquad g_t = \sigma(Wg_{t-1} + Ux_t + b)

are one network read at two places: :math:`g_t = \sigma(h_t)` where :math:`g_0 = \sigma(h_0)` [claim rnn-two-forms].
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.errors import DtypeError, NonFiniteError, RangeError, ShapeError
from avow.numerics.norms import frobenius_bound, spectral_bound
from avow.numerics.rounding import EXP_ULPS, SAFETY, gamma, tiny, unit
from avow.parameters import check_count, declared

Activation = Literal["tanh", "relu", "sigmoid"]
Order = Literal["inside", "outside"]

# γ: the largest slope of each.
STEEPEST = {"tanh": 1.0, "relu": 1.0, "sigmoid": 0.25}
# No two values of an activation are further apart.
_SPAN = {"tanh": 2.0, "relu": math.inf, "sigmoid": 1.0}

_UNIT, _TINY = unit(torch.float64), tiny(torch.float64)
# More than the rounding of a slope's formula: exp counts EXP_ULPS, the rest a handful.
_SLACK = 1 + 2 * EXP_ULPS * _UNIT


class RecurrentCell(nn.Module):
    """A step of a recurrent network: h = Wσ(h) + Ux + b ("inside") or g = σ(Wg + Ux + b) ("outside").

    "outside" is `torch.nn.RNNCell`. The same weights in the other order are the same network, and the two cells load
    each other's `state_dict`.

    Args:
        inputs: features of an input.
        width: features of the state.
        activation: σ: tanh, sigmoid or relu.
        order: "outside", σ(Wg + Ux + b), or "inside", Wσ(h) + Ux + b.

    >>> import torch, avow
    >>> cell = avow.nn.RecurrentCell(inputs=2, width=3)
    >>> cell(torch.randn(5, 2), torch.zeros(5, 3)).shape
    torch.Size([5, 3])
    """

    @declared()
    def __init__(self, inputs: int, width: int, activation: Activation = "tanh", order: Order = "outside") -> None:
        super().__init__()
        for name, size in (("inputs", inputs), ("width", width)):
            check_count(name, size, 64)
        self.activation, self.order = activation, order
        self.recurrent = nn.Linear(width, width, bias=False)  # W
        self.intake = nn.Linear(inputs, width)  # U and b

    def forward(self, x: Float[Tensor, "*b i"], state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The next state.

        Args:
            x: an input, (…, inputs).
            state: the state, (…, width).

        Returns:
            The next state, (…, width).
        """
        if self.order == "inside":
            return self.recurrent(self.activated(state)) + self.intake(x)
        return self.activated(self.recurrent(state) + self.intake(x))

    def run(self, inputs: Float[Tensor, "t *b i"], state: Float[Tensor, "*b d"]) -> Float[Tensor, "t *b d"]:
        """The state after each input.

        Args:
            inputs: inputs, (t, …, inputs).
            state: the first state, (…, width).

        Returns:
            States, (t, …, width).
        """
        states = []
        for x in inputs:
            state = self(x, state)
            states.append(state)
        return torch.stack(states)

    def activated(self, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """σ(z).

        Args:
            z: any numbers.

        Returns:
            The same shape.
        """
        activations = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
        return activations[self.activation](z)

    def extra_repr(self) -> str:
        return f"activation={self.activation}, order={self.order}"


@dataclass(frozen=True)
class GradientHorizon:
    r"""How long :math:`\partial h_T/\partial h_0` is, in spectral norm: a proved bound and a measurement.

    Attributes:
        steps: T.
        bound: an upper bound, which holds in real arithmetic.
        measured: the norm of the product of the steps' Jacobians in float64.
        kind: "contraction": the bound is δ^T, for every start and every input; "product": it is for the start and the
            inputs given.
        rate: δ, or the bound's T-th root.
    """

    steps: int
    bound: float
    measured: float
    kind: Literal["contraction", "product"]
    rate: float

    def __str__(self) -> str:
        scope = "whatever the inputs" if self.kind == "contraction" else "on these inputs"
        rates = f"{self.bound:.3g} {scope}, {self.rate:.4g} a step; measured {self.measured:.3g}"
        return f"‖∂h_{self.steps}/∂h_0‖ ≤ {rates}"


def gradient_horizon(
    cell: RecurrentCell, steps: int, inputs: Float[Tensor, "t i"] | None = None, start: Float[Tensor, "d"] | None = None
) -> GradientHorizon:
    r"""How long the gradient through `steps` steps is: bounded with proof, and measured.

    If :math:`\delta = \gamma\,\sigma_{\max}(W) < 1`, the bound is :math:`\delta^T` [claim rnn-vanishing]; otherwise it
    comes from the steps' own Jacobians, :math:`W\,\mathrm{diag}(\sigma'(z_t))`, every rounding enclosed: the norm of
    their product or the product of their norms, whichever is smaller. A ReLU's slope at 0 counts as anything from 0 to
    1.

    Args:
        cell: the network.
        steps: how many steps.
        inputs: an input for each step, (steps, inputs); None is zeros.
        start: the first state, (width,); None is zeros.

    Returns:
        The bound, and what was measured.

    Raises:
        ParameterError: there is not one step.
        ShapeError: inputs or start do not fit the cell.
        MissingPackage: python-flint is not installed.

    >>> import torch, avow
    >>> cell = avow.nn.RecurrentCell(inputs=2, width=3)
    >>> horizon = avow.nn.gradient_horizon(cell, steps=4)
    >>> horizon.measured <= horizon.bound
    True
    """
    _check(cell, steps, inputs, start)
    width, taken = cell.recurrent.in_features, cell.intake.in_features
    # float64 holds every weight exactly, and its rounding on the CPU is known.
    exact = copy.deepcopy(cell).cpu().double().requires_grad_(False)
    x = torch.zeros(steps, taken).double() if inputs is None else inputs.detach().cpu().double()
    state = torch.zeros(width).double() if start is None else start.detach().cpu().double()
    for name, values in [*exact.named_parameters(), ("inputs", x), ("start", state)]:
        if not bool(values.isfinite().all()):
            raise NonFiniteError(name, "nan or inf", "must hold finite numbers", "look for what broke the training")
    norm = spectral_bound(exact.recurrent.weight)
    rate = _times(norm, STEEPEST[cell.activation])
    if rate < 1:
        bound = functools.reduce(_times, [rate] * steps, 1.0)
        return GradientHorizon(steps, bound, _measured(exact, x, state), "contraction", rate)
    bound = _product_bound(exact, x, state, norm)
    return GradientHorizon(steps, bound, _measured(exact, x, state), "product", bound ** (1 / steps))


def _times(a: float, b: float) -> float:
    """A product of nonnegative numbers, rounded up; never below the smallest normal number unless it is 0."""
    return max(a * b * SAFETY, _TINY) if a and b else 0.0


class _Enclosed(NamedTuple):
    """Real numbers, each within its radius of its middle."""

    middle: Float[Tensor, "d"]
    radius: Float[Tensor, "d"]


def _product_bound(cell: RecurrentCell, inputs: Tensor, start: Tensor, norm: float) -> float:
    r"""An upper bound on :math:`\|J_T \cdots J_1\|_2`, from a computed product P and a bound on how far it has drifted.

    With ‖J_t‖ ≤ f_t = ‖W‖·max σ', a step takes the drift from e to at most f_t·e + ‖J_t − Ĵ_t‖·‖P‖ + its rounding.
    """
    width, size = cell.recurrent.in_features, frobenius_bound(cell.recurrent.weight)
    product, drift, norms = torch.eye(width, dtype=torch.float64), 0.0, 1.0
    for slope in _slopes(cell, inputs, start):
        factor = _times(norm, float((slope.middle + slope.radius).max()))
        norms = _times(norms, factor)
        length = frobenius_bound(product)
        # fl(W·D·P) errs by γ_{d+1}|W||D||P| by entries, so by γ_{d+1}‖W‖_F·max D·‖P‖_F in norm.
        rounding = gamma(width + 1, _UNIT) * size * float(slope.middle.max()) * length
        rounding += 4 * width**2 * (1 + size) * _TINY
        drift = (factor * drift + norm * float(slope.radius.max()) * length + rounding) * SAFETY
        product = _jacobian_times(cell, slope.middle, product)
    if not bool(product.isfinite().all()):
        return norms
    together = (spectral_bound(product) + drift) * SAFETY
    return together if together < norms else norms


def _slopes(cell: RecurrentCell, inputs: Tensor, start: Tensor) -> Iterator[_Enclosed]:
    """The activation's slopes at each step, whichever order the cell has."""
    state = _Enclosed(start, torch.zeros_like(start))
    if cell.order == "inside":
        slope = _slope(cell.activation, state)
        yield slope
        state, inputs = _activated(cell, state, slope), inputs[:-1]
    bias: Tensor = cell.intake.bias
    weights = torch.cat([cell.recurrent.weight, cell.intake.weight, bias[:, None]], 1)  # (d, d + i + 1)
    one = torch.ones(1).double()
    for x in inputs:
        entering = torch.cat([state.middle, x, one])  # (d + i + 1,)
        # Computed sums err by γ_n Σ|w||s|; the state's own radius grows by |W|.   [claim rounding-gamma]
        rounding = gamma(len(entering), _UNIT) * (weights.abs() @ entering.abs()) + len(entering) * _TINY
        spread = cell.recurrent.weight.abs() @ state.radius
        z = _Enclosed(weights @ entering, (rounding + spread) * SAFETY)
        if not bool((z.middle.abs() + z.radius).isfinite().all()):
            remedy = "ask for fewer steps, or for smaller weights"
            raise RangeError("state", "inf", "must stay within float64", remedy)
        slope = _slope(cell.activation, z)
        yield slope
        state = _activated(cell, z, slope)


def _activated(cell: RecurrentCell, z: _Enclosed, slope: _Enclosed) -> _Enclosed:
    """σ of enclosed numbers: the mean value theorem, and the rounding of σ itself."""
    middle = cell.activated(z.middle)
    moved = (slope.middle + slope.radius) * z.radius + EXP_ULPS * _UNIT * middle.abs() + _TINY
    return _Enclosed(middle, (moved * SAFETY).clamp(max=_SPAN[cell.activation]))


def _slope(activation: Activation, z: _Enclosed) -> _Enclosed:
    """σ' of enclosed numbers."""
    if activation == "relu":
        least, most = (z.middle - z.radius > 0).double(), (z.middle + z.radius >= 0).double()
    else:
        # Both slopes are even and fall away from 0: the steepest point is the one nearest to 0.
        reach = z.radius * _SLACK
        most = _bell(activation, (z.middle.abs() / _SLACK - reach).clamp(min=0)) * _SLACK + _TINY
        least = (_bell(activation, z.middle.abs() * _SLACK + reach) / _SLACK - _TINY).clamp(min=0)
        most = most.clamp(max=STEEPEST[activation])
    middle = (least + most) / 2
    return _Enclosed(middle, (most - least) / 2 * SAFETY + 2 * _UNIT * middle)


def _bell(activation: Activation, z: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    """σ'(z) for z ≥ 0, to a hundred units in the last place: 1 − tanh² would cancel."""
    shrunk = torch.exp(-2 * z if activation == "tanh" else -z)
    return 4 * STEEPEST[activation] * (shrunk / (1 + shrunk) ** 2)


def gradients_along(
    cell: RecurrentCell, inputs: Float[Tensor, "t i"], state: Float[Tensor, "d"]
) -> Iterator[Float[Tensor, "d d"]]:
    """∂h_t/∂h_0 for t = 0, 1, …: the products of the steps' Jacobians along the computed states of a float64 cell.

    Autograd would take tanh' as 1 − tanh², of which nothing is left if the unit is saturated.
    """
    total = torch.eye(len(state), dtype=torch.float64)
    yield total
    for x in inputs:
        z = state if cell.order == "inside" else cell.recurrent(state) + cell.intake(x)
        total, state = _jacobian_times(cell, _slope_at(cell.activation, z), total), cell(x, state)
        yield total


def _jacobian_times(cell: RecurrentCell, slope: Float[Tensor, "d"], total: Float[Tensor, "d d"]) -> Tensor:
    """The Jacobian of a step, with the activation's slopes in it, times a matrix."""
    weight, scales = cell.recurrent.weight, slope[:, None]
    return weight @ (scales * total) if cell.order == "inside" else scales * (weight @ total)


def _measured(cell: RecurrentCell, inputs: Tensor, state: Tensor) -> float:
    """The spectral norm of the product of the steps' Jacobians along the computed states."""
    *_, total = gradients_along(cell, inputs, state)
    if not bool(total.isfinite().all()):
        raise RangeError("gradient", "inf", "must stay within float64", "ask for fewer steps, or for smaller weights")
    return float(torch.linalg.matrix_norm(total, 2))


def _slope_at(activation: Activation, z: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    return (z > 0).double() if activation == "relu" else _bell(activation, z.abs())


def _check(cell: RecurrentCell, steps: int, inputs: Tensor | None, start: Tensor | None) -> None:
    if not isinstance(cell, RecurrentCell):
        raise DtypeError("cell", type(cell).__name__, "must be a RecurrentCell", "copy its weights into one")
    check_count("steps", steps, 50)
    wanted = {
        "inputs": (inputs, (steps, cell.intake.in_features), "(steps, inputs of the cell)"),
        "start": (start, (cell.recurrent.in_features,), "(width of the cell,)"),
    }
    for name, (given, shape, words) in wanted.items():
        if given is None:
            continue
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise DtypeError(name, kind, "must be a tensor of floating-point numbers", f"convert {name} to a tensor")
        if tuple(given.shape) != shape:
            raise ShapeError(f"{name}.shape", tuple(given.shape), f"must be {shape}", f"give {name} as {words}")
