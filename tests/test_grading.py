"""Answers to questions: the sources' own right and wrong ones, in different forms, and what is no answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sympy

from avow.errors import ParameterError
from avow.theory.claims import claims_in
from avow.theory.claims.grading import grade
from avow.theory.claims.questions import QUESTIONS
from avow.theory.claims.template import TEMPLATE
from tests.helpers import command
from tests.helpers.hostile_formulas import CODE

RIGHT = [
    ("copy-gap-enough", "log((n - 1)/eps)"),
    ("copy-gap-enough", r"\ln\frac{n-1}{\varepsilon}"),
    ("copy-gap-enough", "log(n) - log(eps)"),
    ("copy-gap-enough", r"\log\frac{n-1}{\epsilon}"),
    ("copy-gap-enough", "ln(n - 1) - ln(ε)"),
    ("copy-gap-enough", r"ln(\frac{n-1}{eps})"),
    ("softmax-weight", r"\frac{a}{Z}"),
    ("average-bias", "1 - β^t"),
    ("copy-gap-needed", r"-\ln\varepsilon"),
    ("softmax-weight", "1/(Z/a)"),
    ("moved-weights", r"2\frac{e^{\delta}-1}{e^{\delta}+1}"),
    ("dropped-tail", "tau"),
    ("dropped-mass", "1/(1 + L/U)"),
    ("ratio-error", "3*E/Z"),
    ("residual", r"\sqrt{r}\sqrt{s}"),
    ("rounding", "1/(1 - n*u) - 1"),
    ("rbf-logit", "(2*a - b)/(2*sigma)"),
    ("average-weight", r"\beta^{t-i}(1-\beta)"),
    ("weight-decay", r"2\eta\gamma"),
]
WRONG = [
    ("copy-gap-enough", "log(1/eps)"),
    ("copy-gap-needed", "log(2/eps)"),
    ("softmax-weight", "a/(1 + Z)"),
    ("moved-weights", "delta"),
    ("dropped-tail", "tau/(1 - tau)"),
    ("ratio-error", "E/Z"),
    ("residual", "r*s"),
    ("rounding", "n*u"),
    ("rbf-logit", "a - b/2"),
    ("copy-length", r"\ln(n/\varepsilon)"),
    ("average-weight", "beta**(t - i)"),
    ("average-bias", "1 - beta"),
    ("weight-decay", r"\eta\gamma"),
]


@pytest.mark.parametrize(("question", "answer"), RIGHT)
def test_a_right_answer_is_right_in_any_form(question: str, answer: str) -> None:
    found = grade(QUESTIONS[question], answer)
    assert found.judgement == "right", found.why


@pytest.mark.parametrize(("question", "answer"), WRONG)
def test_a_wrong_answer_is_wrong_with_numbers(question: str, answer: str) -> None:
    found = grade(QUESTIONS[question], answer)
    assert found.judgement == "wrong" and "=" in found.why, found.why


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_answer_on_record_is_right_and_is_that_of_its_claim(question: str) -> None:
    one = QUESTIONS[question]
    assert grade(one, one.answer).judgement == "right"
    if one.claim.formal is not None and not one.unique:
        judged = one.claim.judge_answer(one.put(one.function(one.read(one.answer))))
        assert judged.verdict == one.claim.expected, judged.trouble


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_right_answer_is_accepted_as_it_is_printed(question: str) -> None:
    one = QUESTIONS[question]
    printed = grade(one, one.answer).read
    assert grade(one, printed).judgement == "right", printed
    in_latex = sympy.latex(one.read(one.answer), ln_notation=True)
    assert grade(one, in_latex).judgement == "right", in_latex
    # What is printed is read, and not only compared: half of it is another answer.
    assert grade(one, f"({printed})/2").judgement != "right" or not one.unique


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (r"\frac{n}{", r"answer='\frac{n}{' has a bracket without its partner; write LaTeX such as \ln\frac{n}{2}"),
        (r"\frac{}{2}", r"answer='\frac{}{2}' is not a formula in LaTeX; write LaTeX such as \ln\frac{n}{2}"),
        (r"n \le 2", r"answer='n \le 2' is not a real number; write LaTeX such as \ln\frac{n}{2}"),
        (r"\frac{1}{0}", r"answer='\frac{1}{0}' is not a real number; write LaTeX such as \ln\frac{n}{2}"),
        (r"\ln k", r"answer='\ln k' holds k; use the letters n, eps, ε"),
        ("n^", "answer='n^' is not a formula; use numbers, n, eps, ε, pi, e, + - * / **, sqrt, ln, exp, log,"),
    ],
)
def test_an_answer_that_cannot_be_read_is_one_clear_error(typed: str, message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        grade(QUESTIONS["copy-gap-enough"], typed)


@pytest.mark.parametrize("typed", [*CODE[:6], r"\input{/etc/passwd}", r"\frac{1}{", "", "n +", "k / eps", r"\ln k"])
def test_what_is_no_formula_is_refused_and_never_run(typed: str) -> None:
    with pytest.raises(ParameterError):
        grade(QUESTIONS["copy-gap-enough"], typed)


def test_grades_come_as_json_and_wrong_ones_fail() -> None:
    found = json.loads(command.run("claims", "grade", "weight-decay", "2*eta*gamma", "--json").stdout)
    assert found["judgement"] == "right" and found["claim"] == "sgd-l2-decay"
    command.run("claims", "grade", "weight-decay", "eta*gamma", code=1)
    listed = json.loads(command.run("claims", "questions", "--json").stdout)["questions"]
    assert [one["id"] for one in listed] == list(QUESTIONS)


def test_the_file_that_new_writes_is_proved(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TEMPLATE, encoding="utf-8")
    (own,) = claims_in(path).values()
    assert own.judge().verdict == "proved" and own.judge_sabotage("two thirds").rejected
