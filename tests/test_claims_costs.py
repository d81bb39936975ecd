"""Claims on costs: what structure tells of a program, and the programs that it sees through."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from avow.core import Cost, Sizes
from avow.methods.exact import Exact
from avow.methods.separable import Separable
from avow.theory.claims import counting
from avow.theory.claims.catalogue import costs, linear_costs
from avow.theory.claims.counting import Loop, counts, traced
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Statement, whole
from avow.theory.claims.proof import Proof

n, d, h, b, m = whole("n d h b m")


def heads(length: Any, width: Any) -> list[Tensor]:
    return [*costs._tokens(length, width), *costs._weights(length, width)]


def test_one_head_takes_what_the_text_books_say() -> None:
    found = traced(costs.one_head, heads, (n, d))
    assert found.time == 6 * n * d**2 + 4 * n**2 * d
    assert found.left == n * d and found.most == 2 * n**2 + 4 * n * d


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (5, 2), (70, 3)])
def test_structure_and_the_counter_agree(sizes: tuple[int, int]) -> None:
    for count in counts(costs.one_head, heads):
        assert count(*map(sympy.Integer, sizes)).structure() == count.at(sizes)


def test_numbers_held_are_counted_while_they_are_held() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1  # 6 numbers
        z = y @ y.T  # and 4, the view none
        del y
        return z * 2  # 4 and 4

    assert counting.held(program, torch.ones(2, 3)) == [6, 6, 10, 8]


def test_a_program_that_changes_at_some_size_is_refused_however_large() -> None:
    def late(rows: int) -> Any:
        return lambda x, *weights: costs.one_head(x * 1 if x.shape[0] < rows else x @ (x.T @ x), *weights)

    for rows in (3, 65, 10**9):
        with pytest.raises(Unproved, match="does something else from some size on"):
            traced(late(rows), heads, (n, d))


def test_a_program_whose_steps_depend_on_its_sizes_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = x + 1
        return x

    with pytest.raises(Unproved, match="does something else from some size on"):
        traced(program, costs._tokens, (n, d))


def test_a_program_that_is_right_for_some_sizes_only_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        torch._check(x.shape[0] <= 64)
        return x + 1

    with pytest.raises(Unproved, match="for some sizes only"):
        traced(program, costs._tokens, (n, d))


def test_a_program_that_hoards_is_refused() -> None:
    hoard: list[Tensor] = []

    def program(x: Tensor) -> Tensor:
        hoard.append(x + 1)
        return x + 2

    with pytest.raises(Unproved, match="keeps"):
        traced(program, costs._tokens, (n, d))


@pytest.mark.parametrize("number", [2, 6, 9])
def test_a_loop_whose_round_changes_is_refused(number: int) -> None:
    def more(x: Tensor, *weights: Tensor) -> Tensor:
        return costs.one_head(x @ (x.T @ x), *weights)

    loop = costs.kept(costs.changed_from(number, costs.one_head, more))
    with pytest.raises(Unproved, match="not the same program every time"):
        counting.looped(loop, (costs._tokens, costs._weights), (n, d), h)


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_a_loop_takes_what_its_rounds_take(rounds: int) -> None:
    for loop in (costs.kept(costs.one_head), costs.added(costs.one_head)):
        for count in counts(loop, costs._tokens, costs._weights):
            foreseen = count(sympy.Integer(3), sympy.Integer(2), sympy.Integer(rounds)).structure()
            assert foreseen.doit() == count.at((3, 2, rounds))


def test_tiles_within_tiles_take_what_the_counter_says() -> None:
    for count in counts(costs.TILES, costs._nothing, costs._rows, costs._tile_inputs):
        structure = count(b, d, m).structure()
        for sizes in ((1, 1, 1), (3, 2, 4), (2, 5, 9)):
            assert structure.subs(dict(zip((b, d, m), sizes, strict=True))).doit() == count.at(sizes)


def test_only_counts_of_whole_sizes_have_a_structure() -> None:
    time, _ = counts(costs.one_head, heads)
    proof = Proof(Statement({n: "a", d: "b"}, {"it": time(n, d) > 0}))
    assert proof.counted(time(n, d)).by == "its structure"
    with pytest.raises(Unproved, match="is not known to be whole"):
        proof.counted(time(n / 2, d))
    with pytest.raises(Unproved, match="no count of a program"):
        proof.counted(n + d)


def test_a_count_that_pytorch_does_not_make_is_refused() -> None:
    class Off(counting.Counted):
        trace = staticmethod(lambda *sizes: traced(costs.one_head, heads, sizes))
        run = staticmethod(lambda *sizes: (0, 0))

    with pytest.raises(Unproved, match=r"at \(1, 1\) PyTorch counts 0, and not 10"):
        Proof(Statement({n: "a", d: "b"}, {"it": n > d})).counted(Off(n, d))


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
    whole_ = torch.softmax(q @ k.T, -1) @ v
    torch.testing.assert_close(costs.tiled(q, k, v, 4), whole_)
    assert not torch.allclose(linear_costs.separable(q, k, v), whole_)


def test_heads_in_sequence_are_heads_side_by_side() -> None:
    x, *weights = torch.randn(7, 6, 6, dtype=torch.float64).unbind()
    shared, rounds = [x], [weights[:3], weights[3:]]
    answers = [costs.one_head(x, *own) for own in rounds]
    torch.testing.assert_close(costs.kept(costs.one_head)(shared, rounds), torch.cat(answers, -1))
    torch.testing.assert_close(costs.added(costs.one_head)(shared, rounds), sum(answers))


def test_a_loop_that_carries_nothing_leaves_its_answers() -> None:
    loop = Loop(lambda carried, x, y: ((), x + y))
    assert [float(one) for one in loop([torch.tensor(1.0)], [[torch.tensor(2.0)], [torch.tensor(5.0)]])[1]] == [3, 6]


def test_the_table_of_low_rank_names_the_operations_counted() -> None:
    k = whole("k")

    def count(product: linear_costs.Program) -> Any:
        return traced(product, linear_costs._factor_inputs, (n, k, d)).time

    assert count(linear_costs.by_factors) == 4 * n * k * d + 2 * k**2 * d
    assert count(linear_costs.put_together) == 2 * n * k**2 + 2 * n**2 * k + 2 * n**2 * d
    assert count(linear_costs.confused) == 2 * n * k**2
