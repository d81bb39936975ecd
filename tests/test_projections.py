"""Taking v_a out of v_a + v_b: the projector, its coordinates, and the spans for which there is none."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from avow.errors import AvowError, DtypeError, NonFiniteError, ParameterError, ShapeError
from avow.numerics.intervals import frobenius
from avow.theory.constructions import project_out
from avow.theory.constructions.projections import dual_basis

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def orthonormal(d: int, p: int, q: int) -> tuple[Tensor, Tensor]:
    columns = torch.linalg.qr(torch.randn(d, p + q, dtype=torch.float64))[0]
    return columns[:, :p], columns[:, p:]


def oblique(d: int, p: int, q: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(d, p, dtype=torch.float64).to(dtype), torch.randn(d, q, dtype=torch.float64).to(dtype)


def test_for_orthonormal_spans_the_coordinates_are_the_transpose() -> None:
    a, b = orthonormal(12, 3, 4)
    made = project_out(a, b)
    torch.testing.assert_close(made.coordinates, a.mT, atol=1e-15, rtol=0)
    torch.testing.assert_close(made.projection, a @ a.mT, atol=1e-15, rtol=0)
    assert made.verify() and made.bound < 1e-14
    assert 1 / math.sqrt(7) - 1e-12 < made.smallest < 1


def test_the_transpose_returns_coordinates_and_not_the_vector() -> None:
    a, b = orthonormal(6, 2, 2)
    x, y = torch.randn(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    made = project_out(a, b)
    mixed = a @ x + b @ y
    torch.testing.assert_close(made.coordinates @ mixed, x)
    torch.testing.assert_close(made.as_module()(mixed), a @ x)
    # In these spans the transpose alone is of the wrong size, so it cannot be the vector itself.
    assert made.coordinates.shape == (2, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "p", "q"), [(2, 1, 1), (9, 3, 5), (16, 8, 8)])
def test_the_oblique_projector_keeps_one_span_and_removes_the_other(d: int, p: int, q: int, dtype: torch.dtype) -> None:
    a, b = oblique(d, p, q, dtype)
    if d == 16:  # A square basis may be too thin for the coarse types.
        a = (a.double() + 12 * torch.eye(d)[:, :p]).to(dtype)
        b = (b.double() + 12 * torch.eye(d)[:, p:]).to(dtype)
    made = project_out(a, b)
    proof = made.verify()
    assert proof and made.projection.dtype == dtype
    kept = made.projection.double() @ a.double() - a.double()
    removed = made.projection.double() @ b.double()
    assert float(kept.norm()) <= proof.bound * float(a.double().norm()) * (1 + 1e-9)
    assert float(removed.norm()) <= proof.bound * float(b.double().norm()) * (1 + 1e-9)
    truth = float(torch.linalg.svdvals(torch.cat((a, b), 1).double())[-1])
    assert truth / math.sqrt(p + q) - 1e-9 <= made.smallest <= truth + 1e-9


def test_the_transpose_does_not_do_for_oblique_spans() -> None:
    a, b = oblique(8, 2, 2)
    a, b = torch.linalg.qr(a)[0], torch.linalg.qr(b)[0]
    made = project_out(a, b)
    assert made.verify()
    assert not replace(made, coordinates=a.mT.contiguous()).verify()
    assert not replace(made, projection=a @ a.mT).verify()


def test_a_moved_entry_is_seen() -> None:
    made = project_out(*oblique(8, 2, 3))
    projection = made.projection.clone()
    projection[3, 4] += 1e-12
    assert made.verify() and not replace(made, projection=projection).verify()


def test_lengths_far_apart_are_no_dependence() -> None:
    a, b = orthonormal(6, 2, 2)
    made = project_out(a * 1e-150, b * 1e150)
    assert made.verify() and made.bound < 1e-14
    torch.testing.assert_close(made.projection, a @ a.mT, atol=1e-14, rtol=0)


def test_the_picture_names_every_column() -> None:
    table = project_out(*oblique(5, 2, 1)).picture()
    assert [row[0] for row in table.rows] == ["A[0]", "A[1]", "B[0]"]
    assert max(float(str(row[3])) for row in table.rows) < 1e-12


def test_a_nearly_dependent_basis_is_shown_to_be_independent_and_an_exact_one_is_not() -> None:
    columns = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2.0**-50]], dtype=torch.float64)
    basis = dual_basis(columns)
    truth = 2.0**-50 / 2
    assert basis is not None and truth * 0.99 < float(1 / frobenius(basis)) <= truth * 1.01
    columns[1, 1] = 1.0
    assert dual_basis(columns) is None


def test_independent_spans_too_close_for_their_type_are_refused() -> None:
    a, b = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [1.0 + 2.0**-22]])
    with pytest.raises(ParameterError, match="too little for a projector in float32"):
        project_out(a, b)
    assert project_out(a.double(), b.double()).verify()


@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        (
            torch.tensor([[1.0], [2.0]]),
            torch.tensor([[2.0], [4.0]]),
            ParameterError,
            "·B[0] (of columns at unit length) has length at most ",
        ),
        (
            torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
            torch.tensor([[3.0], [4.0], [0.0]]),
            ParameterError,
            "so the spans are not proved independent; drop one of these columns, or separate them",
        ),
        (torch.zeros(3, 1), torch.ones(3, 1), ParameterError, "project_out: [A B]=+1·A[0] (of columns at unit length)"),
        (torch.eye(3), torch.ones(3, 1), ParameterError, "project_out: [A B]="),
        (
            torch.ones(3, 1),
            torch.ones(4, 1),
            ShapeError,
            "(3, 1) and (4, 1) must have equally long columns; give (d, p)",
        ),
        (torch.ones(3), torch.ones(3, 1), ShapeError, "project_out: A=(3,) must be a matrix of at least one row"),
        (
            torch.ones(3, 1),
            torch.ones(3, 0),
            ShapeError,
            "project_out: B=(3, 0) must be a matrix of at least one row and one column",
        ),
        (
            torch.ones(3, 1),
            torch.full((3, 1), math.nan),
            NonFiniteError,
            "project_out: B[0]=[nan] holds a number that is",
        ),
        (
            torch.ones(3, 1),
            torch.ones(3, 1).double(),
            DtypeError,
            "torch.float32 and torch.float64 must be of one type",
        ),
        (torch.ones(3, 1).int(), torch.ones(3, 1), DtypeError, "project_out: A=torch.int32 must be of a floating type"),
    ],
)
def test_spans_without_a_projector_are_refused_in_words(
    a: Tensor, b: Tensor, error: type[AvowError], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        project_out(a, b)


def test_the_combination_in_the_error_really_vanishes() -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    with pytest.raises(ParameterError) as refused:
        project_out(a, torch.tensor([[3.0], [4.0], [0.0]], dtype=torch.float64))
    coefficients = {name: float(c) for c, name in re.findall(r"([+-][\d.]+)·([AB]\[\d\])", str(refused.value))}
    unit = {"A[0]": (1.0, 0.0), "A[1]": (0.0, 1.0), "B[0]": (0.6, 0.8)}
    assert set(coefficients) == set(unit)
    for axis in (0, 1):
        assert abs(sum(coefficients[name] * unit[name][axis] for name in unit)) < 1e-3
