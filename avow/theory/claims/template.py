"""The file that `avow claims new` writes: a claim of one's own, ready to run."""

TEMPLATE = '''"""Claims of my own. Judge them: avow claims run --user THIS_FILE"""

from sympy import Rational, exp

from avow.theory.claims import Statement, claim, real

a, b = real("a b")
weight = exp(a) / (exp(a) + exp(b))


def larger(share):
    """The statement as data: what must be proved is made of it, and so is the search for a counterexample."""
    return Statement(
        variables={a: "the score of a key", b: "the score of the other"},
        given=[a >= b],
        then={"at least": weight >= share},
        terms={"share": share},
        spans={a: (-5, 5), b: (-5, 5)},
    )


@claim(
    "my-claim",
    topic="mine",
    expected="proved",
    formal=larger,
    plain="Of two keys, the one with the larger score has at least {share} of the weight.",
    subject=Rational(1, 2),
    sabotage={"two thirds": Rational(2, 3)},  # a broken variant, which the proof must not accept
)
def my_claim(proof, share):
    # A step follows from those that it names; z3 checks it. Rules such as this one say what arithmetic does not know.
    proof.conclude("at least", proof.exp_monotone(b, a), proof.given(a >= b))
'''
