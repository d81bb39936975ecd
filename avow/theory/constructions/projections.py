r"""Taking one part out of a sum: from v_a + v_b back to v_a, when v_a lies in span A and v_b in span B.

If the columns of A and B together are independent there is one matrix C of A-coordinates,

.. math:: C\,[A\;B] = [I\;0], \qquad P = AC, \qquad PA = A, \quad PB = 0,

the first rows of the dual basis of [A B]. For orthonormal A and B with :math:`A^\top B = 0` it is :math:`C = A^\top`
and :math:`P = AA^\top`; otherwise P is the oblique projector along span B [claim project-out].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from avow.core import dtype_name
from avow.core.chart import Table
from avow.errors import DtypeError, ParameterError, ShapeError
from avow.numerics import intervals, rounding
from avow.numerics.intervals import frobenius, rounded
from avow.parameters import declared
from avow.theory.constructions.construction import Construction, Proof, checked_matrix

# Bits for the dual basis: a basis so thin that these do not show it independent is of no use in float64 either.
_BITS = 256
# A rounded projector whose promise is worse than this has lost what it should keep.
_WORST = 0.25


@dataclass(frozen=True)
class ProjectOut(Construction):
    """`projection` P returns v_a from v_a + v_b; `coordinates` C returns its coordinates along A's columns.

    `smallest` is a proved lower bound on the smallest singular value of [A B].
    """

    a: Tensor
    b: Tensor
    coordinates: Tensor
    projection: Tensor
    smallest: float
    eps: float

    @property
    def promise(self) -> str:
        return (
            f"‖PA − A‖ ≤ {self.bound:.3g}‖A‖ and ‖PB‖ ≤ {self.bound:.3g}‖B‖, and for the coordinates "
            f"‖CA − I‖ ≤ {self.bound:.3g} and ‖CB‖ ≤ {self.bound:.3g}‖B‖/‖A‖ (Frobenius norms)"
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"projection": self.projection, "coordinates": self.coordinates}

    def verify(self) -> Proof:
        with intervals.precision(_BITS):
            a, b = intervals.grid(self.a), intervals.grid(self.b)
            projection, coordinates = intervals.grid(self.projection), intervals.grid(self.coordinates)
            size_a, size_b = frobenius(a), frobenius(b)
            identity = intervals.grid(torch.eye(self.a.shape[1]))
            errors = {
                "‖PA − A‖/‖A‖": frobenius(projection * a - a) / size_a,
                "‖PB‖/‖B‖": frobenius(projection * b) / size_b,
                "‖CA − I‖": frobenius(coordinates * a - identity),
                "‖CB‖·‖A‖/‖B‖": frobenius(coordinates * b) * size_a / size_b,
            }
            bounds = {name: intervals.upper(error) for name, error in errors.items()}
        steps = (*(f"{name} ≤ {error:.6g}" for name, error in bounds.items()), f"σ_min([A B]) ≥ {self.smallest:.6g}")
        return Proof(self.promise, self.bound, max(bounds.values()), steps)

    def picture(self) -> Table:
        """What the projection does to each column of A and of B."""
        rows = []
        for name, side, kept in (("A", self.a, 1.0), ("B", self.b, 0.0)):
            for i, column in enumerate(side.double().mT):
                off = self.projection.double() @ column - kept * column
                rows.append((f"{name}[{i}]", float(column.norm()), "kept" if kept else "removed", float(off.norm())))
        return Table("What P keeps and removes", ("column", "length", "should be", "error"), rows)

    def as_module(self) -> nn.Linear:
        """v_a + v_b (…, d) to v_a (…, d)."""
        return linear(self.projection)


@declared("project_out")
def project_out(a: Tensor, b: Tensor) -> ProjectOut:
    """The projector that keeps A's columns (d, p) and removes B's (d, q), in their type, with its rounding bounded.

    The spans must be independent: the smallest singular value of [A B] is proved to be above zero, and large enough
    for the projector to survive rounding; otherwise the combination of columns that nearly vanishes is in the error.

    Args:
        a: columns to keep, (d, p).
        b: columns to remove, (d, q).

    Returns:
        The projector, with a bound on its rounding.

    Raises:
        InputError: the spans are not independent, or nearly not; the message has the combination that vanishes.
        ShapeError: sizes do not fit.

    >>> import torch
    >>> from avow.theory.constructions import project_out
    >>> project_out(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [1.0]])).projection.tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    a, b = checked_matrix("project_out: A", a), checked_matrix("project_out: B", b)
    if a.shape[0] != b.shape[0]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ShapeError("project_out: A and B", shapes, "must have equally long columns", "give (d, p) and (d, q)")
    if a.dtype != b.dtype:
        types = f"{a.dtype} and {b.dtype}"
        raise DtypeError("project_out: A and B", types, "must be of one type", "convert one of them")
    columns = torch.cat((a, b), 1).double()
    basis = dual_basis(columns)
    if basis is None:
        raise _dependent(columns, a.shape[1], "so the spans are not proved independent")
    p, d = a.shape[1], a.shape[0]
    with intervals.precision(_BITS):
        exact = intervals.grid(torch.eye(p, columns.shape[1])) * basis
        coordinates = rounded(exact, a.dtype)
        along = intervals.grid(a) * exact
        projection = rounded(along, a.dtype)
        # The smallest singular value is 1/‖D‖₂ ≥ 1/‖D‖_F.
        smallest = intervals.lower(1 / frobenius(basis))
        # Rounding moves each entry by u of itself, or by the underflow unit: ‖δP·A‖ ≤ ‖δP‖‖A‖, and so for the rest.
        size = frobenius(intervals.grid(a))
        relative = max(intervals.upper(frobenius(along)), intervals.upper(frobenius(exact) * size))
        flushed = rounding.tiny(a.dtype) * d * max(1.0, intervals.upper(size))
    error = (rounding.unit(a.dtype) * relative + flushed) * (1 + 1e-6)
    if not bool(projection.isfinite().all() and coordinates.isfinite().all()) or error > _WORST:
        raise _dependent(columns, p, f"too little for a projector in {dtype_name(a.dtype)}")
    return ProjectOut(a, b, coordinates, projection, smallest, error)


def dual_basis(columns: Tensor) -> intervals.arb_mat | None:
    """The least-norm rows D with D·columns = I; None if the columns (d, m) are not proved independent."""
    if columns.shape[0] < columns.shape[1] or not bool((columns != 0).any(0).all()):
        return None
    # Columns are brought to one size by powers of two, which is exact, so that only their angles matter.
    exponents = torch.frexp(columns.double().abs().amax(0)).exponent.clamp(-1000, 1000).tolist()
    even_out = torch.tensor([math.ldexp(1.0, -exponent) for exponent in exponents], dtype=torch.float64)
    with intervals.precision(_BITS):
        basis = intervals.grid(columns.double() * even_out)
        transposed = basis.transpose()
        try:
            rows = (transposed * basis).solve(transposed)
        except ZeroDivisionError:
            return None
        rows = intervals.grid(torch.diag(even_out)) * rows
        return rows if frobenius(rows).is_finite() else None


def linear(weight: Tensor) -> nn.Linear:
    """A linear map without a bias, frozen."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def _dependent(columns: Tensor, p: int, verdict: str) -> ParameterError:
    """The error that shows which combination of unit columns nearly vanishes, with its length proved."""
    lengths = columns.norm(dim=0)
    unit = columns / torch.where(lengths > 0, lengths, 1.0)
    z = torch.linalg.svd(unit, full_matrices=True).Vh[-1]
    z = z / z[z.abs().argmax()]
    with intervals.precision(_BITS):
        length = intervals.upper(frobenius(intervals.grid(unit) * intervals.grid(z[:, None])))
    names = [f"A[{i}]" if i < p else f"B[{i - p}]" for i in range(len(z))]
    order = z.abs().argsort(descending=True, stable=True).tolist()
    terms = [f"{float(z[i]):+.4g}·{names[i]}" for i in order if abs(float(z[i])) > 1e-6]
    shown = " ".join(terms[:6]) + (f" and {len(terms) - 6} more terms" if len(terms) > 6 else "")
    rule = f"(of columns at unit length) has length at most {length:.3g}, {verdict}"
    return ParameterError("project_out: [A B]", shown, rule, "drop one of these columns, or separate them")
