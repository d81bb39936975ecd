"""Claims on costs: counts that can be wrong, and the tables they make."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor

from avow.core import Cost, Sizes
from avow.methods.exact import Exact
from avow.methods.separable import Separable
from avow.theory.claims import counting
from avow.theory.claims.catalogue import costs, linear_costs
from avow.theory.claims.claim import Unproved

a, b = counting.length("a"), counting.length("b")


def test_interpolation_finds_a_polynomial_from_as_many_counts_as_it_has_coefficients() -> None:
    asked = []

    def count(x: int, y: int) -> int:
        asked.append((x, y))
        return 3 * x**2 * y + 5 * y + 7

    assert counting.interpolated(count, [a, b], 3) == 3 * a**2 * b + 5 * b + 7
    assert len(asked) == len(set(asked)) == 10


def test_a_count_that_is_no_such_polynomial_is_caught_beyond_its_nodes() -> None:
    with pytest.raises(Unproved, match="steep: by interpolation"):
        list(counting.counted(lambda x: x**4, [a], [(7,)], "steep"))
    (step,) = counting.counted(lambda x: x**3, [a], [(7,)], "cubic")
    assert step.facts["polynomial"] == "a**3"


def test_an_order_too_low_or_too_high_is_refused() -> None:
    count = 6 * a * b**2 + 4 * a**2 * b
    assert len(list(counting.theta(count, a * b**2 + a**2 * b, "both terms"))) == 2
    with pytest.raises(Unproved, match="too low: at most"):
        list(counting.theta(count, a * b**2, "too low"))
    with pytest.raises(Unproved, match="has not every term"):
        list(counting.theta(count, a**2 * b**2, "too high"))


def test_growth_is_told_from_a_bound() -> None:
    assert counting.unbounded(a**2 * b / (a * b), a)
    assert not counting.unbounded(a * b / (a * b + a), b)


def test_numbers_held_are_counted_while_they_are_held() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1  # 6 numbers
        z = y @ y.T  # and 4, the view none
        del y
        return z * 2  # 4 and 4

    assert counting.held(program, torch.ones(2, 3)) == [6, 6, 10, 8]


def test_a_loop_that_hoards_is_not_settled() -> None:
    assert counting.settled([[1, 5, 5], [1, 5, 5, 5]], "steady").facts["runs"] == "2"
    with pytest.raises(Unproved, match="growing"):
        counting.settled([[1, 5], [1, 5, 9]], "growing")


def test_a_program_whose_steps_depend_on_its_sizes_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = x.view(x.shape)
        return x

    with pytest.raises(Unproved, match="steps, depending on its sizes"):
        list(counting.memory(program, lambda rows, width: [torch.ones(rows, width)], [a, b]))


def test_a_cost_model_that_is_off_by_one_operation_is_caught() -> None:
    class Off(Separable):
        def cost(self, sizes: Sizes) -> Cost:
            true = super().cost(sizes)
            return Cost(true.flops + 1, true.pointwise, true.launches, true.peak_bytes)

    counting.of_library(Separable(), 9, 3)
    with pytest.raises(Unproved, match=r"the cost model says \d+ operations, the counter \d+"):
        counting.of_library(Off(), 9, 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_count_does_not_depend_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert [counting.of_library(Exact(), *sizes) for sizes in ((1, 1), (3, 2))] == [4, 72]
    finally:
        torch.set_num_threads(before)


def test_attention_by_tiles_is_attention() -> None:
    q, k, v = torch.randn(3, 12, 5, dtype=torch.float64).unbind()
    whole = torch.softmax(q @ k.T, -1) @ v
    torch.testing.assert_close(costs.tiled(q, k, v, 4), whole)
    assert not torch.allclose(linear_costs.separable(q, k, v), whole)


def test_one_head_takes_what_the_text_books_say() -> None:
    heads = costs.Heads(costs.one_head, costs.kept)
    n, d, w = (counting.length(name) for name in "ndw")
    count = counting.interpolated(lambda *z: counting.flops(lambda: heads.head(*heads.of(*z))), [n, d, w], 3)
    assert count == 6 * n * d * w + 4 * n**2 * w


def test_the_table_of_low_rank_names_the_operations_counted() -> None:
    n, k, d = (counting.length(name) for name in "nkd")

    def count(product: linear_costs.Program) -> sympy.Expr:
        def once(rows: int, rank: int, width: int) -> int:
            inputs = counting.ones((rows, rank), (rank, rank), (rows, rank), (rows, width))
            return counting.flops(lambda: product(*inputs))

        return counting.interpolated(once, [n, k, d], 3)

    assert count(linear_costs.by_factors) == 4 * n * k * d + 2 * k**2 * d
    assert count(linear_costs.put_together) == 2 * n * k**2 + 2 * n**2 * k + 2 * n**2 * d
    assert count(linear_costs.confused) == 2 * n * k**2
