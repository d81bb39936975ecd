"""Proofs of formal statements: what a proof must not be able to show, and what it must not leave out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import sympy
from flint import arb
from sympy import And, Eq, Implies, Sum, atan, exp, log

from avow.errors import ParameterError
from avow.theory.claims import Claim, Statement, Unproved, claim, each, real, sequence, whole
from avow.theory.claims.formal import Exists, Prime, holds, text
from avow.theory.claims.proof import Proof, Refutation

x, y, z, t = real("x y z t")
n, i, j, k = whole("n i j k")
a, b = sequence("a b")
over_keys = (j, 1, n)
SOME = {x: "a number", y: "another", z: "a third", n: "how many", a: "a sequence"}


def about(*then: Any, given: Any = ()) -> Proof:
    """A proof of some formulas, about the variables that they and the hypotheses speak of."""
    from avow.theory.claims.formal import variables

    named = set().union(*(variables(formula) for formula in [*then, *given]))
    parts = {str(place): formula for place, formula in enumerate(then)}
    return Proof(Statement({name: words for name, words in SOME.items() if name in named}, parts, given))


def refused(words: str, call: Callable[..., object], *args: Any, **more: Any) -> None:
    with pytest.raises(Unproved, match=words):
        call(*args, **more)


def test_what_follows_is_accepted_and_what_does_not_is_refused_with_a_case() -> None:
    proof = about(x**2 >= 1, given=[x >= 1])
    refused("it does not follow: x = [^;]*$", proof.have, x >= 2, proof.given(x >= 1))
    open_ = "it does not follow: e\\^x = .*; of terms like e\\^x no more is known than the steps say$"
    refused(open_, proof.have, sympy.exp(x) >= 2)
    proof.conclude("0", proof.given(x >= 1))
    proof.finish()


def test_what_is_not_among_the_hypotheses_is_not_given() -> None:
    refused("x ≥ 2 is not among the hypotheses", about(x >= 1, given=[x >= 1]).given, x >= 2)


def test_a_conclusion_that_was_not_drawn_is_missed() -> None:
    proof = about(x**2 >= 1, given=[x >= 1])
    proof.have(x >= 0, proof.given(x >= 1))
    refused("not concluded: 0", proof.finish)


def test_a_step_that_nothing_rests_on_is_an_error() -> None:
    proof = about(x**2 >= 1, given=[x >= 1])
    proof.have(x >= 0, proof.given(x >= 1))
    proof.conclude("0", proof.given(x >= 1))
    refused("x ≥ 0: nothing rests on this step", proof.finish)


def test_a_premise_that_is_not_needed_is_an_error() -> None:
    proof = about(x**2 >= 1, given=[x >= 1, x <= 2])
    refused("x ≤ 2 is not needed for it", proof.have, x**2 >= 1, proof.given(x >= 1), proof.given(x <= 2))


def test_a_hypothesis_that_nothing_rests_on_is_an_error() -> None:
    proof = about(x**2 >= 1, given=[x >= 1, x <= 2])
    proof.conclude("0", proof.given(x >= 1))
    refused("nothing rests on the hypothesis x ≤ 2", proof.finish)


def test_hypotheses_that_contradict_each_other_prove_nothing() -> None:
    proof = about(x >= 7, given=[x >= 1, x <= 0])
    proof.conclude("0", proof.given(x >= 1), proof.given(x <= 0))
    refused("the hypotheses contradict each other", proof.finish)


@pytest.mark.parametrize("part", [1 / x >= 0, log(x) <= x, sympy.sqrt(x) >= 0, x ** sympy.Rational(-1, 2) >= 0])
def test_a_statement_must_have_a_value_wherever_its_hypotheses_hold(part: Any) -> None:
    proof = about(part, given=[x >= 0] if part.has(log) else [])
    refused("may have no value", proof._well_defined, part)


def test_the_slope_of_what_jumps_shows_nothing() -> None:
    """The arctangent of 1/(1 − x) starts above zero and never falls but where it jumps."""
    for term in (1 / (1 - t), atan(1 / (1 - t))):
        proof = about(x >= 0)
        refused("no step says|may have no value|not known to be smooth", proof.rising, term, t, 0)
    shown = about(x >= 0).rising(exp(t) - 1 - t, t, 0, about(x >= 0).exp_monotone(0, t))
    assert text(shown.formula) == "t ≥ 0 implies -t + e^t - 1 ≥ 0"


# ---- what provers would take for some number without a word

FOREIGN = [
    (Eq(sympy.tan(x) * sympy.cos(x), sympy.sin(x), evaluate=False), "tan is none of the functions"),
    (Eq(n * sympy.factorial(n - 1), sympy.factorial(n), evaluate=False), "factorial is none of the functions"),
    (Eq(x * sympy.gamma(x), sympy.gamma(x + 1), evaluate=False), "gamma is none of the functions"),
    (Eq(Sum(1, (j, 1, x)), x, evaluate=False), "does not run from a whole number to a whole number"),
    (sympy.Integral(x * y, (x, 0, 1)) >= y / 2, "binds a name"),
    (sympy.Product(y, (j, 1, 3)) >= y**3, "binds a name"),
    (sympy.Limit(x / (x + y), x, 0) >= 0, "binds a name"),
    (sympy.Ne(sympy.sin(sympy.Symbol("r", rational=True)), 0), "carries more than that it is real or whole"),
    (sympy.Symbol("p", positive=True) + x >= x**2, "carries more than that it is real or whole"),
]


@pytest.mark.parametrize(("formula", "words"), FOREIGN, ids=lambda one: text(one) if not isinstance(one, str) else "")
def test_a_term_that_may_have_no_value_or_hides_a_name_or_a_supposition_is_no_term_of_a_proof(
    formula: Any, words: str
) -> None:
    """At π/2 the tangent times the cosine is not 1; there are no 2½ numbers from 1 to 2½; sin π is zero."""
    with pytest.raises(ParameterError, match=words):
        about(formula)
    refused(words, about(x >= 0)._add, formula, "a rule", "", ())


def test_without_that_a_false_identity_would_be_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = FOREIGN[0][0]
    refused("tan is none of the functions", about(x >= 0).equal, *identity.args)
    for name in ("formal", "kernel"):
        module = importlib.import_module(f"avow.theory.claims.{name}")
        monkeypatch.setattr(module, "unreadable", lambda formula: "")
    proof = about(identity)
    proof.conclude("0", proof.equal(*identity.args))
    proof.finish()


def test_nothing_is_put_into_a_slope_where_it_would_vary() -> None:
    """The slope of x·y along x is y; with x for y it would be that of x², which is not x."""
    proof = about(x >= 0)
    slope = proof.equal(sympy.Derivative(t * y, t), y)
    refused("is a slope where y varies", proof.at, slope, {y: t})
    assert proof.at(proof.exp_tangent(y), {y: t})


def test_equal_terms_are_not_caught_by_a_sum_of_the_function_they_are_put_into() -> None:
    """From j = 1 follows nothing for Σ_j j, whose j is another."""
    proof = about(x >= 0)
    same = proof.same_value(lambda term: Sum(term, (j, 1, 2)), j, 1)
    instance = proof.at(same, {j: sympy.Integer(1)})
    refused("it does not follow", proof.have, x >= 100, instance)
    caught = Implies(Eq(j, 1), Eq(Sum(j, (j, 1, 2)), 2, evaluate=False))
    refused("it does not follow", proof.have, caught, same)
    free = proof.same_value(lambda term: Sum(exp(term * j), (j, 1, 2)), i, 1)
    proof.have(Implies(Eq(i, 1), Eq(Sum(exp(i * j), (j, 1, 2)), Sum(exp(j), (j, 1, 2)))), free)


# ---- terms that cancel when they are put in


def test_an_instance_keeps_what_must_hold_before_it_cancels() -> None:
    """For y = 0, y/z is 0; with z for y that is 1 = 0, unless z is no zero."""
    proof = about(x >= 0)
    quotient = proof.have(Implies(Eq(y, 0), Eq(y / z, 0)))
    instance = proof.at(quotient, {y: z})
    refused("it does not follow", proof.have, sympy.Ne(z, 0), instance)
    tangent = proof.exp_tangent(t)
    refused("it does not follow", proof.have, y >= 1 + log(y), proof.at(tangent, {t: log(y)}))


def test_sums_keep_what_must_hold_before_they_cancel() -> None:
    """Terms a_j/Z that sum to one are none where Z is zero."""
    whole_sum = Sum(a[j], over_keys)
    proof = about(x >= 0, given=[each(j, 1, n, a[j] >= 0)])
    known = proof.given(each(j, 1, n, a[j] >= 0))
    sign = proof.have(Implies(And(j >= 1, j <= n), a[j] >= 0), proof.member(each(j, 1, n, a[j] >= 0), j), known)
    most = proof.sum_member(a[j], over_keys, i, sign)
    none = proof.have(Implies(And(whole_sum <= 0, i >= 1, i <= n), a[i] / whole_sum <= 0), most, proof.at(sign, {j: i}))
    summed = proof.sum_most(a[i] / whole_sum, 0, (i, 1, n), none, when=whole_sum <= 0)
    refused("it does not follow", proof.have, whole_sum > 0, summed)


def test_no_index_escapes_from_a_sum_by_a_choice_between_cases() -> None:
    """SymPy pulls cases out of a sum within a sum, with the inner index in their conditions."""

    def nested(term: Any) -> Any:
        return Sum(x * Sum(term, (j, 1, n)), (k, 1, n))

    choice = sympy.Piecewise((1, j <= k), (2, True))
    assert j in nested(choice).free_symbols
    named = {x: "a number", n: "how many", j: "an index"}
    with pytest.raises(ParameterError, match="holds a sum within a case"):
        Statement(named, {"it": nested(choice) >= 0}, [j >= 1])
    proof = about(y >= 0, given=[y >= 1])
    refused("changed the meaning", proof.have, nested(choice) ** 2 + y > 0, proof.given(y >= 1))
    assert proof.have(nested(j + k) ** 2 + y > 0, proof.given(y >= 1))


def test_a_witness_without_a_value_is_none() -> None:
    exists = Exists(y, Eq(y * z, 1))
    proof = about(x >= 0)
    shown = proof.some(exists, 1 / z)
    refused("it does not follow", proof.have, exists, shown)


# ---- names that are bound


def test_a_term_that_is_put_in_is_not_caught_by_a_sum() -> None:
    """Σ_j y·a_j is y times a sum, also where y is a_j for some other j."""
    proof = about(x >= 0)
    line = proof.have(Eq(Sum(y * a[j], over_keys), y * Sum(a[j], over_keys), evaluate=False))
    instance = proof.at(line, {y: a[j]})
    caught = Eq(Sum(a[j] ** 2, over_keys), a[j] * Sum(a[j], over_keys), evaluate=False)
    refused("it does not follow", proof.have, caught, instance)


def test_a_term_that_is_put_in_is_not_caught_by_a_sum_of_sums() -> None:
    """SymPy makes one sum with two indices of a sum of sums: both are bound."""
    proof = about(x >= 0)
    over_both = over_keys, (i, 1, n)
    line = proof.have(Eq(Sum(y * a[j] * b[i], *over_both), y * Sum(a[j] * b[i], *over_both), evaluate=False))
    for caught in (a[j], b[i]):
        instance = proof.at(line, {y: caught})
        false = Eq(Sum(caught * a[j] * b[i], *over_both), caught * Sum(a[j] * b[i], *over_both), evaluate=False)
        refused("it does not follow", proof.have, false, instance)
    other = Sum(a[k] * b[k - 1], (k, 1, n)), Sum(a[i] * b[i - 1], (i, 1, n))
    proof.have(Eq(*other, evaluate=False))
    assert text(Sum(a[i] * b[j], (i, 1, j), (j, 1, n))) == "Σ_{j=1..n} Σ_{i=1..j} (a_i·b_j)"


def test_the_end_of_a_sum_is_not_what_it_binds() -> None:
    """Sums up to i and up to j differ, though each calls its index by the name of its end."""
    sums = Sum(a[i], (i, 1, i)), Sum(a[j], (j, 1, j))
    refused("it does not follow", about(x >= 0).have, Eq(*sums, evaluate=False))


def test_a_sum_of_sums_is_plainly_positive_only_where_all_of_them_have_terms() -> None:
    """For n = 1 the outer sum is empty, though the inner one is not."""
    total = Sum(exp(a[j] * a[i]), over_keys, (i, 2, n))
    refused("may have no value", about(1 / total >= 0, given=[n >= 1])._well_defined, 1 / total >= 0)
    about(1 / total >= 0, given=[n >= 2])._well_defined(1 / total >= 0)


def test_a_sum_with_a_delta_is_the_one_term_that_is_left() -> None:
    proof = about(x >= 0)
    delta = sympy.KroneckerDelta
    only = proof.sum_delta(a[j], over_keys, k)
    left = Eq(Sum(a[j] * delta(j, k), over_keys), a[k], evaluate=False)
    proof.have(Implies(And(k >= 1, k <= n), left), only)
    refused("it does not follow", proof.have, left, only)
    refused("stands outside of its own range", proof.sum_delta, a[j], over_keys, j)
    refused("x is not known to be whole", proof.sum_delta, a[j], over_keys, x)


def test_no_whole_number_lies_between_two_neighbours() -> None:
    proof = about(x >= 0)
    proof.have(Implies(And(i < j, j < k), i + 2 <= k), proof.next_whole(i, j), proof.next_whole(j, k))
    refused("it does not follow", proof.have, Implies(And(i < j, j < k), i + 3 <= k), proof.next_whole(i, j))
    refused("x is not known to be whole", proof.next_whole, x, i)


def test_a_delta_is_one_where_its_indices_are_equal_and_zero_elsewhere() -> None:
    delta = sympy.KroneckerDelta(i, j)
    proof = about(x >= 0)
    proof.have(Implies(Eq(i, j), Eq(delta, 1)))
    proof.have(Implies(sympy.Ne(i, j), Eq(delta, 0)))
    refused("it does not follow", proof.have, Eq(delta, 0))
    assert holds(Eq(delta, 1), {i: 2, j: 2}) and not holds(Eq(delta, 1), {i: 2, j: 3})


def test_an_index_that_is_a_variable_of_the_statement_is_not_any_index() -> None:
    proof = about(a[n] >= 0, given=[a[n] >= 0])
    refused("is a variable of the statement", proof.sum_most, 0, a[n], (n, 1, 5), proof.given(a[n] >= 0))
    refused("is a variable of the statement", proof.every, each(n, 1, 5, a[n] >= 0), proof.given(a[n] >= 0))


def test_what_holds_for_whole_numbers_is_not_said_of_others() -> None:
    proof = about(x >= 0, given=[each(j, 1, n, a[j] >= 0)])
    refused("x is not known to be whole", proof.member, each(j, 1, n, a[j] >= 0), x)
    refused("1/2 is not known to be whole", proof.sum_member, sympy.Abs(a[j]), over_keys, sympy.Rational(1, 2))
    counted = proof.induction(2 * k >= k + 1, k, 1)
    refused("x is not known to be whole", proof.at, counted, {k: x})


def test_a_sum_that_ends_before_it_begins_is_empty() -> None:
    proof = about(x >= 0)
    refused("it does not follow", proof.have, Eq(Sum(1, over_keys), n, evaluate=False))
    proof.have(Implies(n >= 0, Eq(Sum(1, over_keys), n, evaluate=False)))
    assert holds(Eq(Sum(1, over_keys), 0, evaluate=False), {n: -3})


def test_equal_terms_have_equal_sums_and_others_need_not() -> None:
    proof = about(x >= 0)
    refused("no step says that", proof.sum_most, a[j], b[j], over_keys)
    refused("no step says that", proof.sum_same, a[j], b[j], over_keys)
    refused("no step says that", proof.sum_positive, a[j], over_keys)
    refused("no step says that", proof.sum_member, a[j], over_keys, i)


def test_induction_needs_its_start_and_its_step() -> None:
    proof = about(x >= 0)
    refused("no step says that", proof.induction, k >= 5, k, 0)
    refused("no step says that", proof.induction, k <= 5, k, 0)
    proof.induction(k**2 >= k, k, 0)


def test_a_quadratic_is_judged_by_its_discriminant_only_if_it_is_one() -> None:
    proof = about(x >= 0)
    refused("no step says that", proof.discriminant, t**2 - 1, t)
    refused("is not quadratic", proof.discriminant, t**4 + 1, t)
    shown = proof.discriminant(x**2 + z**2 + 2 * x * y * t + y**2 * t**2, t)
    assert sympy.expand(shown.formula.rhs - shown.formula.lhs) == 4 * y**2 * z**2


def test_balls_show_what_holds_on_a_box_and_nothing_else() -> None:
    proof = about(x >= 0)
    proof.covered(exp(t) <= 3, {t: (0, 1)})
    refused("still open", proof.covered, exp(t) <= sympy.Rational(27, 10), {t: (0, 1)}, most=50)
    proof.computed(sympy.pi > 3)
    refused("balls cannot show it", proof.computed, sympy.pi > 4)
    refused("is not about numbers alone", proof.computed, x > 4)


def test_terms_are_equal_only_where_they_have_values() -> None:
    proof = about(x >= 0, given=[z > 0])
    refused("may have no value", proof.equal, x / y, x / y)
    proof.equal(log(z * exp(x)), log(z) + x, proof.given(z > 0))


# ---- refutations


def test_a_case_refutes_only_if_the_hypotheses_hold_and_the_conclusion_does_not() -> None:
    statement = Statement({x: "a number"}, {"it": x**2 >= x}, [x >= 0])
    for value, broken in ((sympy.Rational(1, 2), True), (2, False), (-1, False)):
        against = Refutation(statement)
        if broken:
            against.case({x: value}, "a half")
            (found,) = against.evidence()
            assert found.kind == "counterexample" and found.facts["x"] == "1/2"
        else:
            refused("this is not a counterexample", against.case, {x: value}, "no case")


def test_no_case_is_no_refutation() -> None:
    with pytest.raises(Unproved, match="no case was given"):
        list(Refutation(Statement({x: "a number"}, {"it": x > 0})).evidence())


def test_what_exists_is_denied_by_a_proof() -> None:
    against = Refutation(Statement({x: "a number"}, {"root": Exists(y, Eq(y**2, x))}))
    denial = against.impossible({x: -1}, "root", "no real number has a square of −1")
    none = denial.whichever(Exists(y, Eq(y**2, -1)), sympy.false)
    denial.conclude("root", none)
    assert [one.kind for one in against.evidence()][-1] == "counterexample"


# ---- statements


def test_a_statement_names_all_it_speaks_of() -> None:
    with pytest.raises(ParameterError, match="y is not a variable of it; declare it"):
        Statement({x: "a number"}, {"it": x >= y})
    with pytest.raises(ParameterError, match="is True whatever the variables are"):
        Statement({x: "a number"}, {"it": x >= x})
    with pytest.raises(ParameterError, match="is no term of it"):
        Statement({x: "a number"}, {"it": x >= 0}, terms={"size": x**2}).spelled()


def formal(stated: Statement, check: Callable[..., None], **words: Any) -> Claim:
    words = {"topic": "test", "plain": "Some words.", "expected": "proved", "source": "own.py"} | words
    return claim("own", formal=stated, **words)(check)


def nothing(proof: Proof, subject: Any) -> None:
    """A check that gives no proof."""


FALSE = {
    "every value of n² + n + 41 is prime": Statement(
        {n: "a whole number"}, {"it": Prime(n**2 + n + 41)}, [n >= 0], spans={n: range(60)}
    ),
    "no weight exceeds one half": Statement(
        {x: "one score", y: "another"},
        {"it": exp(x) / (exp(x) + exp(y)) <= sympy.Rational(1, 2)},
        spans={x: (-3, 3), y: (-3, 3)},
    ),
    "cubes are not negative": Statement({x: "a number"}, {"it": x**3 >= 0}, spans={x: (-2, 2)}),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_claim_of_ones_own_is_refuted_by_the_search(name: str) -> None:
    found = formal(FALSE[name], nothing).judge()
    assert found.verdict == "refuted" and not found.as_recorded
    assert not found.trouble, "a case says more than what a prover made of terms that it does not know"
    assert found.evidence[-1].kind == "counterexample" and "found by a search" in found.evidence[-1].says


def test_fractions_are_compared_exactly_and_nothing_else_is() -> None:
    thirds = Eq(Sum(a[j] / 3, (j, 1, 3)), 1, evaluate=False)
    assert holds(thirds, {a: [1, 1, 1]}) is True
    assert holds(thirds, {a: [1, 1, 1 + Fraction(1, 10**99)]}) is False
    assert holds(thirds, {a: [arb(1) / 3 * 3, 1, 1]}) is None, "a ball is not a fraction"
    assert holds(Eq(sympy.sin(x) ** 2 + sympy.cos(x) ** 2, 1), {x: 1}) is None
    assert holds(Eq(1 / x, 1 / x + y, evaluate=False), {x: 0, y: 0}) is None, "there is no 1/0"


def test_one_is_not_two() -> None:
    with pytest.raises(ParameterError, match="is False whatever the variables are"):
        Statement({x: "a number"}, {"it": Eq(sympy.Integer(1), 2)})
    spelled = Statement({x: "a number"}, {"it": Eq(x - x + 1, 2, evaluate=False)})
    assert formal(spelled, nothing).judge().verdict == "no verdict"


def test_words_of_a_formal_claim_spell_no_formula_out() -> None:
    statement = Statement({x: "a number", y: "another"}, {"it": x**2 >= y}, terms={"square": x**2})
    assert formal(statement, nothing, plain="A {square} is large.").plain == "A x^2 is large."
    for plain in ("A weight below 0.99 is small.", "It is ≥ a bound.", "At most ε."):
        with pytest.raises(ParameterError, match="spells a formula out"):
            formal(statement, nothing, plain=plain)
    with pytest.raises(ParameterError, match="which no term of the statement has"):
        formal(statement, nothing, plain="A {cube} is large.")
    with pytest.raises(ParameterError, match="is made of the formal statement; leave it out"):
        formal(statement, nothing, statement="x")


def test_examples_prove_nothing() -> None:
    from avow.theory.claims import toolbox

    def examples(_: Any) -> Any:
        yield toolbox.rational(all(sympy.isprime(m * m + m + 41) for m in range(40)), "forty of them")

    own = Claim("own", topic="t", statement="x", plain="x", expected="proved", check=examples, source="own.py")
    found = own.judge()
    assert found.verdict == "supported" and "only a formal statement can be proved" in found.trouble
