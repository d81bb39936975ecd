"""Answers to questions, graded: an answer takes its place in a claim, and the claim is proved or refuted with it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NoReturn

import sympy
from sympy import Symbol

from avow.errors import ParameterError
from avow.extras import require
from avow.numerics import intervals
from avow.theory.claims.claim import Claim, Finding
from avow.theory.claims.formal import real, text, value
from avow.theory.claims.provers import follows, same
from avow.theory.claims.random_search import search
from avow.theory.constructions.formulas import parse

Judgement = Literal["right", "wrong", "not shown"]


@dataclass(frozen=True)
class Question:
    """A question whose answer is a formula.

    Attributes:
        id: its name, a word.
        asks: the question in words, which name every letter.
        claim: the claim that judges an answer.
        letters: what each letter of an answer stands for.
        answer: the answer on record, as it would be typed.
        put: the subject of the claim with an answer in its place, a function of the letters in their order.
        unique: whether no other formula is right; else one that proves the claim is right, too.
        spans: where each letter is tried, two ends each.
    """

    id: str
    asks: str
    claim: Claim
    letters: Mapping[str, str]
    answer: str
    put: Callable[[Callable[..., Any]], Any] = lambda formula: formula
    unique: bool = True
    spans: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def read(self, typed: str) -> Any:
        """The formula of an answer in Python, as answers are printed, or in LaTeX; it is read and never run."""
        symbols = {name: Symbol(name, positive=True) for name in self.letters}
        known = symbols | {_SPELLED[name]: symbol for name, symbol in symbols.items() if name in _SPELLED}
        if "\\" in typed or "{" in typed:
            return _from_latex(typed, known)
        try:
            return parse(typed.replace("·", "*").replace("^", "**"), known)
        except ParameterError as error:
            raise ParameterError("answer", f"'{typed}'", error.rule, error.remedy) from error

    def function(self, formula: Any) -> Callable[..., Any]:
        """An answer as a function of its letters, which may be symbols or balls."""
        symbols = [Symbol(name, positive=True) for name in self.letters]

        def of(*values: Any) -> Any:
            if any(isinstance(one, intervals.ball(0).__class__) for one in values):
                return value(formula, dict(zip(symbols, values, strict=True)))
            return formula.subs(dict(zip(symbols, values, strict=True)), simultaneous=True)

        return of


# How letters may be typed, too.
_SPELLED = {
    "eps": "ε",
    "delta": "δ",
    "tau": "τ",
    "beta": "β",
    "gamma": "γ",
    "eta": "η",
    "sigma": "σ",
    "alpha": "α",
}
_LATEX = {"varepsilon": "eps", "epsilon": "eps"}


@dataclass(frozen=True)
class Grade:
    """What is said of an answer.

    Attributes:
        question: its question.
        typed: the answer as it was typed.
        read: the formula that it was read as.
        judgement: "right", "wrong", or "not shown" where neither a proof nor a counterexample was found.
        why: in words, with the numbers of a counterexample.
        finding: what the claim's own check found with the answer in its place; None where it was not needed.
    """

    question: Question
    typed: str
    read: str
    judgement: Judgement
    why: str
    finding: Finding | None = None

    def plain(self) -> dict[str, Any]:
        """The grade as JSON has it."""
        evidence = [step.plain() for step in self.finding.evidence] if self.finding else []
        words = {"question": self.question.id, "asks": self.question.asks, "claim": self.question.claim.id}
        said = {name: getattr(self, name) for name in ("typed", "read", "judgement", "why")}
        return words | said | {"evidence": evidence}


def grade(question: Question, typed: str) -> Grade:
    """The grade of an answer: by the answer on record, by the claim's proof, or by a counterexample.

    Args:
        question: the question.
        typed: the answer, in Python or LaTeX.

    Returns:
        The grade.

    Raises:
        ParameterError: the answer is not a formula in the question's letters.
    """
    formula, known = question.read(typed), question.read(question.answer)
    read = text(formula)
    positive = [symbol > 0 for symbol in map(real, question.letters)]
    if same(formula, known) or follows(sympy.Eq(formula, known).subs(_as_real(question)), positive):
        return Grade(question, typed, read, "right", f"it is the answer on record, {text(known)}")
    if question.unique:
        apart = _apart(question, formula, known)
        if apart:
            return Grade(question, typed, read, "wrong", apart)
        return Grade(question, typed, read, "not shown", f"it may be {text(known)}, and SymPy cannot see that it is")
    judged = dataclasses.replace(question.claim, subject=question.put(question.function(formula)))
    finding = judged.judge_answer(judged.subject)
    if finding.verdict == judged.expected:
        return Grade(question, typed, read, "right", f"the claim {judged.id} is {finding.verdict} with it", finding)
    found = search(judged, cases=4000, seconds=20)
    if found.broken:
        case = ", ".join(f"{name} = {number}" for name, number in found.case.items())
        return Grade(question, typed, read, "wrong", f"it fails for {case}", finding)
    return Grade(question, typed, read, "not shown", finding.trouble, finding)


def _as_real(question: Question) -> dict[Any, Any]:
    """Letters without what is known of them, which stands beside them as premises."""
    return {Symbol(name, positive=True): real(name) for name in question.letters}


def _apart(question: Question, one: Any, other: Any) -> str:
    """Numbers for which two formulas differ for certain, and by how much; empty where none were found."""
    spans = {name: question.spans.get(name, (0.1, 0.9)) for name in question.letters}
    symbols = [Symbol(name, positive=True) for name in question.letters]
    for parts in itertools.product((0.5, 0.25, 0.9), repeat=len(symbols)):
        numbers = [
            Fraction(low).limit_denominator(100) * (1 - Fraction(part))
            + Fraction(high).limit_denominator(100) * Fraction(part)
            for part, (low, high) in zip(parts, spans.values(), strict=True)
        ]
        whole = [
            round(x) if isinstance(low, int) and high > 1 else x
            for x, (low, high) in zip(numbers, spans.values(), strict=True)
        ]
        case = dict(zip(symbols, whole, strict=True))
        values = [value(formula, case) for formula in (one, other)]
        if values[0].is_finite() and values[0] != values[1]:
            at = ", ".join(f"{name} = {number}" for name, number in zip(question.letters, whole, strict=True))
            return f"for {at} it is {float(values[0]):.6g}, and should be {float(values[1]):.6g}"
    return ""


def _from_latex(typed: str, known: Mapping[str, Any]) -> Any:
    require("latex2sympy2_extended", purpose="to read LaTeX")
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    def refuse(rule: str, remedy: str = r"write LaTeX such as \ln\frac{n}{2}") -> NoReturn:
        raise ParameterError("answer", f"'{typed}'", rule, remedy)

    # A logarithm without a base is natural here, and the letter ε has a name in Python.
    # Names may be typed as in Python, and a logarithm without a base is the natural one.
    plainer = re.sub(r"(?<![\\a-zA-Z])(ln|log|exp|tanh)(?![a-zA-Z])", r"\\\1", typed)
    plainer = re.sub(r"\\log(?![_a-zA-Z])", r"\\ln", re.sub(r"(?<![\\a-zA-Z])eps(?![a-zA-Z])", "ε", plainer))
    try:
        formula = latex2sympy(plainer, conversion_config=ConversionConfig(lowercase_symbols=False)).doit()
    except Exception:
        unclosed = any(typed.count(one) != typed.count(other) for one, other in ("{}", "()"))
        refuse("has a bracket without its partner" if unclosed else "is not a formula in LaTeX")
    if not isinstance(formula, sympy.Expr) or formula.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
        refuse("is not a real number")
    if "gamma" in known:
        formula = formula.xreplace({sympy.EulerGamma: known["gamma"]})
    letters = {symbol: known.get(_LATEX.get(symbol.name, symbol.name)) for symbol in formula.free_symbols}
    if strange := sorted(symbol.name for symbol, letter in letters.items() if letter is None):
        refuse(f"holds {', '.join(strange)}", f"use the letters {', '.join(known)}")
    return formula.xreplace(letters)
