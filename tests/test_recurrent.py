"""Recurrent cells: one network in two orders, and gradients that stay within what was proved of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator

import pytest
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

from avow.errors import DtypeError, InputError, NonFiniteError, ParameterError, RangeError, ShapeError
from avow.nn.recurrent import STEEPEST, GradientHorizon, RecurrentCell, gradient_horizon
from avow.numerics import intervals
from avow.numerics.norms import spectral_bound

ACTIVATIONS = ("tanh", "relu", "sigmoid")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_order = pytest.mark.parametrize("order", ["inside", "outside"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cell_of(weight: Tensor, activation: str = "tanh", order: str = "inside", bias: float = 0.0) -> RecurrentCell:
    """A cell with a given W and one input that it ignores."""
    cell = RecurrentCell(1, len(weight), activation, order).double()  # type: ignore[arg-type]
    with torch.no_grad():
        cell.recurrent.weight.copy_(weight)
        cell.intake.weight.zero_()
        cell.intake.bias.fill_(bias)
    return cell


@each_activation
def test_the_two_orders_are_one_network_read_at_two_places(activation: str) -> None:
    inside = RecurrentCell(3, 5, activation, "inside").double()  # type: ignore[arg-type]
    outside = RecurrentCell(3, 5, activation, "outside").double()  # type: ignore[arg-type]
    outside.load_state_dict(inside.state_dict())
    x, h = torch.randn(9, 2, 3).double(), torch.randn(2, 5).double()
    hidden, given = inside.run(x, h), outside.run(x, inside.activated(h))
    torch.testing.assert_close(inside.activated(hidden), given, rtol=1e-12, atol=1e-13)
    # Started from h itself it is another network's life.
    assert not torch.allclose(inside.activated(hidden)[0], outside.run(x, h)[0])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_outer_order_is_torchs_own_cell(activation: str) -> None:
    theirs = nn.RNNCell(3, 5, nonlinearity=activation)
    ours = RecurrentCell(3, 5, activation)  # type: ignore[arg-type]
    with torch.no_grad():
        ours.recurrent.weight.copy_(theirs.weight_hh)
        ours.intake.weight.copy_(theirs.weight_ih)
        ours.intake.bias.copy_(theirs.bias_ih + theirs.bias_hh)
    x, state = torch.randn(2, 3), torch.randn(2, 5)
    torch.testing.assert_close(ours(x, state), theirs(x, state))
    assert repr(ours).startswith(f"RecurrentCell(\n  activation={activation}, order=outside")


def shorter(matrix: arb_mat, bound: float) -> bool:
    """Whether ‖M‖₂ is below a bound for certain: bound²·I − MᵀM has positive leading minors (Sylvester)."""
    size = matrix.ncols()
    gram = matrix.transpose() * matrix
    square = arb(bound) ** 2
    gap = [[(square if i == j else arb(0)) - gram[i, j] for j in range(size)] for i in range(size)]
    return all(arb_mat([row[:k] for row in gap[:k]]).det() > 0 for k in range(1, size + 1))


def test_a_norms_bound_is_above_the_norm_and_hardly_so() -> None:
    below = 0
    for trial in range(60):
        m, n = (int(size) for size in torch.randint(1, 6, (2,)))
        x = torch.randn(m, n).double() * 10.0 ** (trial % 9 - 4)
        computed, bound = float(torch.linalg.matrix_norm(x, 2)), spectral_bound(x)
        with intervals.precision(400):
            assert shorter(intervals.grid(x), bound)
            below += not shorter(intervals.grid(x), computed)
        assert bound <= computed * (1 + 4e-9)
    # What LAPACK calls the norm is often below it: the proof is needed.
    assert below > 5


def test_a_norms_bound_holds_at_the_ends_of_the_range() -> None:
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    root = math.sqrt(2)
    for scale in (1.0, 1e300, 1e-300, 2.0**-1040):
        assert root * scale * (1 + 1e-12) < spectral_bound(hadamard * scale) or scale < 1e-308
        assert spectral_bound(hadamard * scale) <= max(root * scale * (1 + 4e-9), 2.0**-1022)
    assert spectral_bound(hadamard * 1.5e308) == math.inf
    assert spectral_bound(torch.zeros(3, 2)) == 0.0
    assert spectral_bound(torch.tensor([[1.0, 1e-310]]).double()) >= 1.0


Drawn = tuple[RecurrentCell, int, Tensor, Tensor]


def drawn(count: int, most_steps: int = 12, most_width: int = 16) -> list[Drawn]:
    """Random cells of every activation and order, from strong contractions to chaos, with steps, inputs and a start."""
    found = []
    for trial in range(count):
        activation, order = ACTIVATIONS[trial % 3], ("inside", "outside")[trial // 3 % 2]
        width, inputs, steps = (int(torch.randint(1, most + 1, ())) for most in (most_width, 6, most_steps))
        cell = RecurrentCell(inputs, width, activation, order)  # type: ignore[arg-type]
        # γ·σ_max(W) from about a fifth to about eight.
        size = 0.1 * 40 ** float(torch.rand(())) / STEEPEST[activation]
        nn.init.normal_(cell.recurrent.weight, std=size / math.sqrt(width))
        found.append((cell, steps, torch.randn(steps, inputs), torch.randn(width)))
    return found


def test_no_gradient_of_a_thousand_random_cells_exceeds_its_bound() -> None:
    ratios: dict[str, list[float]] = {"contraction": [], "product": []}
    careless = 0
    for cell, steps, inputs, start in drawn(1000):
        found = gradient_horizon(cell, steps, inputs, start)
        assert found.bound >= found.measured, (cell, steps, found)
        if found.measured > 1e-200:
            ratios[found.kind].append(found.bound / found.measured)
        # The spectral radius in place of the norm is no bound.
        radius = float(torch.linalg.eigvals(cell.recurrent.weight.detach().double()).abs().max())
        careless += (radius * STEEPEST[cell.activation]) ** steps < found.measured
    assert min(map(len, ratios.values())) > 250
    # On its own inputs a gradient is enclosed; δ^T is for all inputs, and a random W is far from the worst.
    assert statistics.median(ratios["product"]) < 1.001
    assert statistics.median(ratios["contraction"]) > 10
    assert careless > 20


def true_jacobian(cell: RecurrentCell, inputs: Tensor, start: Tensor) -> arb_mat:
    """∂h_T/∂h_0 in balls, straight from the two recurrences."""
    sigma = {"tanh": lambda z: z.tanh(), "sigmoid": lambda z: 1 / (1 + (-z).exp())}[cell.activation]
    slope = {"tanh": lambda s: 1 - s * s, "sigmoid": lambda s: s * (1 - s)}[cell.activation]
    W, U, b = (intervals.grid(p.reshape(len(start), -1)) for p in (cell.recurrent.weight, *cell.intake.parameters()))
    width = len(start)
    state = intervals.grid(start[:, None])
    total = arb_mat(width, width, [int(i == j) for i in range(width) for j in range(width)])
    for x in inputs:
        fed = U * intervals.grid(x[:, None]) + b
        if cell.order == "inside":
            out = arb_mat([[sigma(z)] for z in state.entries()])
            total = W * diagonal([slope(s) for s in out.entries()]) * total
            state = W * out + fed
        else:
            state = arb_mat([[sigma(z)] for z in (W * state + fed).entries()])
            total = diagonal([slope(s) for s in state.entries()]) * W * total
    return total


def diagonal(entries: list[arb]) -> arb_mat:
    return arb_mat([[e if i == j else arb(0) for j in range(len(entries))] for i, e in enumerate(entries)])


def test_bounds_hold_in_real_arithmetic_and_a_smaller_one_would_not() -> None:
    refused, kinds = 0, set()
    cells = [one for one in drawn(90, 25, 4) if one[0].activation != "relu"]
    for cell, steps, inputs, start in cells:
        found = gradient_horizon(cell, steps, inputs, start)
        kinds.add(found.kind)
        with intervals.precision(400):
            truth = true_jacobian(cell, inputs, start)
            assert shorter(truth, found.bound), (cell, steps, found)
            refused += not shorter(truth, found.measured * 0.999999)
    assert len(cells) == 60 and refused == 60 and kinds == {"contraction", "product"}


@each_activation
@each_order
def test_a_contraction_holds_whatever_the_inputs(activation: str, order: str) -> None:
    cell = cell_of(torch.linalg.qr(torch.randn(6, 6).double())[0] * 0.9 / STEEPEST[activation], activation, order)
    nn.init.normal_(cell.intake.weight, std=5.0)
    for _ in range(5):
        found = gradient_horizon(cell, 20, 10 * torch.randn(20, 1), 10 * torch.randn(6))
        assert found.kind == "contraction" and found.bound >= found.measured
        assert found.bound == pytest.approx(0.9**20, rel=1e-6) and found.rate == pytest.approx(0.9, rel=1e-8)


def test_a_linear_life_meets_its_bound() -> None:
    # One tanh unit at 0 has slope 1: the gradient is W^T, for W below 1 and above.
    for weight, kind in ((0.5, "contraction"), (3.0, "product")):
        found = gradient_horizon(cell_of(torch.tensor([[weight]])), 12)
        assert found.kind == kind and found.measured == pytest.approx(weight**12, rel=1e-12)
        assert found.measured <= found.bound <= found.measured * (1 + 1e-6)
        assert found.rate == pytest.approx(weight, rel=1e-6)


def test_a_long_w_may_still_kill_the_gradient_and_the_bound_sees_it() -> None:
    # [claim rnn-exploding]: a nilpotent W of norm 2, and a saturated unit of weight 3.
    nilpotent = gradient_horizon(cell_of(torch.tensor([[0.0, 2.0], [0.0, 0.0]])), 20)
    assert nilpotent.kind == "product" and nilpotent.measured == 0 and nilpotent.bound < 1e-6
    saturated = gradient_horizon(cell_of(torch.tensor([[3.0]])), 20, start=torch.tensor([3.0]))
    assert saturated.measured <= saturated.bound < 1e-20


@each_order
def test_saturated_units_are_measured_where_autograd_has_no_digits_left(order: str) -> None:
    cell, start = cell_of(torch.tensor([[3.0]]), order=order, bias=18.0), torch.tensor([18.0]).double()
    found = gradient_horizon(cell, 2, start=start)
    with intervals.precision(400):
        truth = float(true_jacobian(cell, torch.zeros(2, 1).double(), start)[0, 0].mid())
    assert found.measured == pytest.approx(truth, rel=1e-9, abs=0)
    assert found.measured <= found.bound <= found.measured * (1 + 1e-6)
    lost = torch.func.jacrev(lambda h: cell.run(torch.zeros(2, 1).double(), h)[-1])(start)
    assert float(lost.detach()) != pytest.approx(truth, rel=0.01, abs=0)


def test_what_float64_cannot_hold_is_bounded_from_above_all_the_same() -> None:
    vanished = gradient_horizon(cell_of(torch.tensor([[1e-3]])), 500)
    assert vanished.measured == 0 < vanished.bound < 1e-300
    assert gradient_horizon(cell_of(torch.zeros(2, 2)), 3).bound == 0
    assert gradient_horizon(cell_of(torch.eye(2), "relu"), 3).measured == 0  # torch's slope at 0; the bound allows 1
    assert gradient_horizon(cell_of(torch.eye(2), "relu"), 3).bound == pytest.approx(1)


@each_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_value_is_the_jacobian_of_the_whole_run(order: str, dtype: torch.dtype) -> None:
    cell = RecurrentCell(2, 6, "tanh", order).to(dtype)  # type: ignore[arg-type]
    before = {name: weight.clone() for name, weight in cell.state_dict().items()}
    x, h = torch.randn(10, 2), torch.randn(6)
    found = gradient_horizon(cell, 10, x, h)
    assert all(weight.dtype == dtype and torch.equal(weight, before[n]) for n, weight in cell.state_dict().items())
    exact = RecurrentCell(2, 6, "tanh", order).double()  # type: ignore[arg-type]
    exact.load_state_dict(cell.state_dict())
    exact.requires_grad_(False)
    jacobian = torch.func.jacrev(lambda h: exact.run(x.double(), h)[-1])(h.double())
    assert found.measured == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-10)


def test_a_horizon_reads_as_a_sentence() -> None:
    found = GradientHorizon(20, 0.1216, 0.00312, "contraction", 0.9)
    assert str(found) == "‖∂h_20/∂h_0‖ ≤ 0.122 whatever the inputs, 0.9 a step; measured 0.00312"
    assert "on these inputs" in str(GradientHorizon(20, 12.0, 11.0, "product", 1.13))


def broken() -> RecurrentCell:
    return cell_of(torch.tensor([[math.nan]]))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: RecurrentCell(0, 4),
            ParameterError,
            "inputs=0 must be a whole number of at least 1; try inputs=64",
        ),
        (
            lambda: RecurrentCell(4, 4, "gelu"),  # type: ignore[arg-type]
            ParameterError,
            "activation='gelu' must be one of tanh, relu, sigmoid; the default is 'tanh'",
        ),
        (
            lambda: RecurrentCell(4, 4, order="before"),  # type: ignore[arg-type]
            ParameterError,
            "order='before' must be one of inside, outside; the default is 'outside'",
        ),
        (
            lambda: gradient_horizon(nn.RNNCell(1, 1), 3),  # type: ignore[arg-type]
            DtypeError,
            "cell=RNNCell must be a RecurrentCell; copy its weights into one",
        ),
        (
            lambda: gradient_horizon(RecurrentCell(1, 1), 0),
            ParameterError,
            "steps=0 must be a whole number of at least 1; try steps=50",
        ),
        (
            lambda: gradient_horizon(RecurrentCell(2, 3), 4, torch.zeros(3, 2)),
            ShapeError,
            "inputs.shape=(3, 2) must be (4, 2); give inputs as (steps, inputs of the cell)",
        ),
        (
            lambda: gradient_horizon(RecurrentCell(2, 3), 4, start=torch.zeros(2)),
            ShapeError,
            "start.shape=(2,) must be (3,); give start as (width of the cell,)",
        ),
        (
            lambda: gradient_horizon(RecurrentCell(2, 3), 4, torch.zeros(4, 2, dtype=torch.int64)),
            DtypeError,
            "inputs=torch.int64 must be a tensor of floating-point numbers; convert inputs to a tensor",
        ),
        (
            lambda: gradient_horizon(broken(), 2),
            NonFiniteError,
            "recurrent.weight=nan or inf must hold finite numbers; look for what broke the training",
        ),
        (
            lambda: gradient_horizon(
                cell_of(torch.tensor([[1e200]], dtype=torch.float64), "relu"), 3, start=torch.ones(1)
            ),
            RangeError,
            "state=inf must stay within float64; ask for fewer steps, or for smaller weights",
        ),
        (
            lambda: gradient_horizon(cell_of(torch.tensor([[1e200]], dtype=torch.float64)), 3),
            RangeError,
            "gradient=inf must stay within float64; ask for fewer steps, or for smaller weights",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_value_rule_and_remedy(
    act: Callable[[], object], error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        act()
