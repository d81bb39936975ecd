"""Rules of whole numbers, powers, sums of the same terms, and of what is bound: each proves, and not too much."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import sympy
from flint import arb
from sympy import And, Eq, Implies, Sum

from avow.errors import ParameterError
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import (
    Exists,
    Measured,
    Row,
    Statement,
    decimal,
    each,
    function,
    holds,
    is_whole,
    latex,
    places,
    real,
    sequence,
    text,
    value,
    variables,
    violation,
    whole,
)
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.provers import follows

n, i, j, k = whole("n i j k")
x, beta = real("x beta")
f, g = sequence("f g")


def proof(then: Any, *given: Any) -> Proof:
    """A proof of a formula, under way."""
    return Proof(Statement({n: "a", x: "b", beta: "c", f: "d", g: "e"}, {"it": then}, given))


def test_a_power_is_one_step_less_and_the_base_once_more() -> None:
    assert follows(Eq(beta ** (n + 1), beta * beta**n), [beta > 0])
    assert follows(And(beta**n > 0, beta ** (n + 2) <= beta ** (n + 1)), [beta > 0, beta <= 1])
    # Of a base that may be 0 nothing is known, nor of two powers without a whole distance.
    assert not follows(beta**n > 0, [])
    assert not follows(beta**n >= beta ** (2 * n), [beta > 0, beta <= 1])


def test_a_sum_of_nothing_is_nought_and_one_of_something_need_not_be() -> None:
    at = proof(Eq(Sum(f[j], (j, 3, n)), 0), n < 3)
    at.conclude("it", at.sum_empty(f[j], (j, 3, n)), at.given(n < 3))
    at.finish()
    late = proof(Eq(Sum(f[j], (j, 3, n)), 0), n < 4)
    with pytest.raises(Unproved, match="does not follow"):
        late.conclude("it", late.sum_empty(f[j], (j, 3, n)), late.given(n < 4))


def test_sums_of_the_same_terms_are_the_same_and_of_any_terms_are_not() -> None:
    alike = each(j, 1, n, Eq(f[j], 2 * g[j]))
    at = proof(Eq(Sum(f[j], (j, 1, n)), 2 * Sum(g[j], (j, 1, n))), alike)
    own = at.member(alike, j)
    at.conclude("it", at.sum_same(f[j], g[j], (j, 1, n), at.given(alike), own, times=2))
    at.finish()
    with pytest.raises(Unproved, match="no step says"):
        at.sum_same(f[j], g[j], (j, 1, n), at.given(alike), own)
    with pytest.raises(Unproved, match="outside of its own range"):
        at.sum_same(j, sympy.Integer(1), (j, 1, n), times=j)


def test_whole_numbers_are_one_apart_and_others_are_not() -> None:
    at = proof(Implies(n > 4, n >= 5))
    at.conclude("it", at.next_whole(sympy.Integer(4), n))
    at.finish()
    with pytest.raises(Unproved, match="x is not known to be whole"):
        at.next_whole(sympy.Integer(4), x)
    assert is_whole(sympy.floor(1 / x) + 2 * n) and not is_whole(n / 2)


def test_there_is_a_whole_number_beyond_any_and_a_witness_must_be_whole() -> None:
    beyond = Exists(k, k >= x)
    at = proof(beyond)
    step = at.have(sympy.floor(x) + 1 >= x, at.whole_below(x))
    at.conclude("it", at.some(beyond, sympy.floor(x) + 1, step))
    at.finish()
    with pytest.raises(Unproved, match="x is not known to be whole"):
        at.some(beyond, x, at.have(x >= x - 1))
    with pytest.raises(Unproved, match="may have no value"):
        at.whole_below(1 / x)


def test_a_function_has_one_value_and_may_have_it_twice() -> None:
    class some(Measured):  # noqa: N801 - it is printed by its name
        def measured(self, values: Sequence[arb]) -> arb:
            return values[0] * values[0]

        def exact(self, values: Sequence[Any]) -> Any:
            return values[0] ** 2

    at = proof(Implies(Eq(x, beta + 1), Eq(some(x), some(beta + 1))))
    at.conclude("it", at.same_value(some, x, beta + 1))
    at.finish()
    other = proof(Implies(Eq(some(x), some(beta)), Eq(x, beta)))
    with pytest.raises(Unproved, match="does not follow"):
        other.conclude("it", other.same_value(some, x, beta))
    assert holds(Eq(some(x), 4), {x: -2}) is True and value(some(x), {x: arb(3)}) == 9


def test_what_is_bound_stays_bound_where_a_term_is_put_in() -> None:
    every = each(j, 1, n, f[j] > x)
    assert every.subs(j, k) == every
    moved = every.subs(x, f[j])
    assert moved.args[0] != j and moved.args[3].rhs == f[j]
    known = each(j, 1, j, f[j] > x)
    assert known.subs(j, n) == each(j, 1, n, f[j] > x)
    assert Exists(x, x > beta).subs(x, 3) == Exists(x, x > beta)
    assert Exists(x, x > beta).subs(beta, x).args[0] != x


def test_an_equality_that_fractions_show_is_fulfilled_in_a_search() -> None:
    third = decimal(arb("0.333"))
    doubled = Statement({x: "a", beta: "b"}, {"it": beta > 1}, [Eq(beta, 2 * x)])
    assert doubled.excess({x: third, beta: 2 * third}) > 0
    assert not doubled.excess({x: third, beta: Fraction(2, 3)}) > 0


def test_a_sequence_has_no_number_nought() -> None:
    with pytest.raises(TypeError, match="has no number 0"):
        value(f[n - 1], {n: 1, f: [1, 2]})


def test_that_something_exists_no_case_denies() -> None:
    against = Refutation(Statement({x: "a"}, {"it": Exists(k, k > x)}))
    with pytest.raises(Unproved, match="not a counterexample"):
        against.case({x: 1}, "one")


# ---- rows, functions, and sequences of whole numbers

phi, order = function("phi"), places("sigma")


def test_rows_are_the_same_where_all_their_numbers_are_and_functions_of_them_too() -> None:
    alike = each(j, 1, n, Eq(f[j], g[j]))
    one, other = Row(j, 1, n, f[j]), Row(i, 1, n, g[i])
    at = Proof(Statement({n: "a", f: "b", g: "c", phi: "d"}, {"it": Eq(phi(one), phi(other))}, [alike]))
    known = at.member(alike, k), at.given(alike)
    same = at.row_same(f[k], g[k], (k, 1, n), *known)
    at.conclude("it", same, at.same_value(phi, one, other))
    at.finish()
    with pytest.raises(Unproved, match="no step says"):
        at.row_same(f[k], g[k], (k, 1, n + 1), *known)
    with pytest.raises(Unproved, match="no step says"):
        at.row_same(f[k], 2 * g[k], (k, 1, n), *known)
    with pytest.raises(Unproved, match="does not follow"):
        at.have(Eq(f[1], g[1]), at.same_value(phi, one, other))


def test_a_term_that_is_put_in_is_not_caught_by_a_row() -> None:
    row = Row(j, 1, n, x * f[j])
    assert row.subs(x, f[j]) == Row(i, 1, n, f[j] * f[i]).xreplace({i: row.subs(x, f[j]).args[0]})
    assert row.subs(x, f[j]) != Row(j, 1, n, f[j] ** 2) and row.free_symbols >= {n, x} and j not in row.free_symbols


def test_a_function_is_a_variable_that_is_declared_and_has_a_value_where_a_case_gives_one() -> None:
    with pytest.raises(ParameterError, match="phi is not a variable of it"):
        Statement({x: "a number"}, {"it": phi(x) >= 0})
    assert variables(phi(x)) == {phi, x}
    case = {n: 2, f: [1, 2], x: 5, phi: lambda row: row[0] + 10 * row[1]}
    assert value(phi(Row(j, 1, n, x + f[j])), case) == 76
    assert text(Row(j, 1, n, f[j])) == "(f_j)_{j=1..n}" and latex(Row(j, 1, n, f[j])).endswith("_{j=1}^{n}")


def test_the_element_of_a_sequence_of_whole_numbers_is_a_place() -> None:
    assert is_whole(order[i]) and not is_whole(f[i])
    case = {order: [3, 1, 2], f: [7, 8, 9], i: 1}
    assert value(f[order[i]], case) == 9 and value(f[order[order[i] - 1]], case) == 7
    assert value(Sum(f[order[j]], (j, 1, order[i] - 1)), case) == 16


def test_what_fractions_show_to_be_equal_is_not_less() -> None:
    statement = Statement({x: "a number"}, {"less": x < x**2})
    assert statement.excess({x: Fraction(1)}) == 1 and statement.excess({x: Fraction(2)}) < 0


def test_the_sine_of_a_rational_number_is_not_nought_and_that_of_pi_is() -> None:
    at = proof(Implies(sympy.Ne(n, 0), sympy.Ne(sympy.sin(n / 2), 0)))
    at.conclude("it", at.sine_of_rational(n / 2))
    at.finish()
    for term in (x, n * sympy.pi):
        with pytest.raises(Unproved, match="is not known to be rational"):
            at.sine_of_rational(term)


def test_a_point_is_inside_a_hull_or_parted_from_it_and_nothing_bound_is_caught() -> None:
    at, (share, query) = proof(x > 0), sequence("s q")
    step = at.inside_or_apart(g[i], f[j, i], (j, 1, n), (i, 1, k), share, query)
    (inside,) = (part for part in step.formula.args if part.args[0] == share)
    (apart,) = (part for part in step.formula.args if part.args[0] == query)
    # Of the point 3 and the points 0 and 4, shares of a quarter and three quarters; of 5, the direction 1.
    line: dict[Any, Any] = {n: 2, k: 1, f: [[0], [4]]}
    assert holds(inside.args[1], {**line, g: [3], share: [Fraction(1, 4), Fraction(3, 4)]}) is True
    assert holds(apart.args[1], {**line, g: [5], query: [1]}) is True
    assert holds(apart.args[1], {**line, g: [3], query: [1]}) is False
    assert holds(inside.args[1], {**line, g: [5], share: [Fraction(-1, 4), Fraction(5, 4)]}) is False
    with pytest.raises(Unproved, match="hold a sequence that is bound"):
        at.inside_or_apart(query[i], f[j, i], (j, 1, n), (i, 1, k), share, query)
    with pytest.raises(Unproved, match="variable of the statement"):
        at.inside_or_apart(g[i], f[n, i], (n, 1, k), (i, 1, k), share, query)


def test_a_step_function_counts_what_is_above_nought() -> None:
    one = sympy.Heaviside(x, 0)
    assert follows(And(one >= 0, one <= 1, Implies(x > 0, Eq(one, 1)), Implies(x <= 0, Eq(one, 0))), [])
    assert not follows(Eq(one, 1), [x >= 0])


def test_a_logarithm_is_one_number_inside_a_sum_and_outside_of_it() -> None:
    high = sympy.log((x - 1) / beta)
    assert follows(Eq(Sum(high * f[j], (j, 1, n)), high * Sum(f[j], (j, 1, n))), [])
    assert not follows(Eq(Sum(high * f[j], (j, 1, n)), sympy.log(x / beta) * Sum(f[j], (j, 1, n))), [])


def test_an_equality_that_is_certain_settles_a_strict_inequality() -> None:
    for formula, broken in ((x > 2, True), (x >= 2, False), (sympy.Ne(x, 2), True), (x <= 2, False), (x < 2, True)):
        assert bool(violation(formula, {x: 2}) > 0) == broken, formula
