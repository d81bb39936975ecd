"""`avow claims`: what it lists, what it judges, when it fails, and what it says to nonsense."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.helpers import command

SAMPLE = str(Path(__file__).parent / "helpers" / "sample_claims.py")

HEAD = """
from sympy import Eq
from avow.theory.claims import Statement, claim, real

x = real("x")
words = {"topic": "t", "expected": "proved", "plain": "Some words."}

def squares(factor):
    return Statement({x: "a number"}, {"it": x**2 >= factor * x}, spans={x: (-1, 1)})
"""

MISTAKEN = (
    HEAD
    + """
@claim("mistaken", formal=squares, subject=2, sabotage={"worse": 3}, **words)
def mistaken(proof, factor):
    proof.conclude("it")

@claim("gullible", formal=Statement({x: "a number"}, {"it": x**2 + 1 >= x}), sabotage={"any": 2}, **words)
def gullible(proof, told):
    proof.conclude("it")
"""
)

MISTAKES = (
    HEAD
    + """
@claim("false", formal=lambda k: Statement({x: "a number"}, {"it": Eq(x * x + k, x * x)}), subject=x, **words)
def false(proof, k):
    proof.conclude("it")

@claim("crash", formal=squares(2), subject=0, sabotage={"worse": 3}, **words)
def crash(proof, other):
    1 / other
"""
)

run, refused = (functools.partial(act, "claims") for act in (command.run, command.refused))


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_list_names_every_claim_with_its_record() -> None:
    shown = run("list", "--user", SAMPLE).stdout
    for words in (
        "binomial",
        "square-grows",
        "primes-odd",
        "cosine-small",
        "algebra",
        "corrected",
        "Every prime is odd.",
    ):
        assert words in shown
    narrowed = json.loads(run("list", "--user", SAMPLE, "--topic", "numbers", "--json").stdout)["claims"]
    assert [(claim["id"], claim["recorded"]) for claim in narrowed] == [
        ("primes-odd", "refuted"),
        ("cosine-small", "supported"),
    ]


def test_the_list_is_narrowed_by_the_verdict_on_record() -> None:
    narrowed = json.loads(run("list", "--user", SAMPLE, "--verdict", "refuted", "--json").stdout)["claims"]
    assert [claim["id"] for claim in narrowed] == ["primes-odd"]
    assert refused("list", "--user", SAMPLE, "--verdict", "true") == (
        "avow: verdict='true' is not one on record; use one of proved, refuted, corrected, supported"
    )


def test_a_false_identity_and_a_crash_say_what_to_do_and_where() -> None:
    Path("own.py").write_text(MISTAKES)
    false, crash = json.loads(run("run", "--user", "own.py", "--json", code=1).stdout)["claims"]
    assert (false["verdict"], crash["verdict"]) == ("no verdict", "no verdict")
    assert "it does not follow: x = " in false["trouble"]
    assert crash["trouble"] == "the check raised ZeroDivisionError: division by zero (line 17)"


def test_the_catalogue_is_listed_whole() -> None:
    from avow.theory.claims import catalogue

    listed = json.loads(run("list", "--json").stdout)["claims"]
    assert [claim["id"] for claim in listed] == list(catalogue()) and len(listed) > 0


@pytest.mark.commands
def test_a_run_gives_every_verdict_writes_the_page_and_ends_well() -> None:
    done = run("run", "--user", SAMPLE)
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "proved" in rows["binomial"] and "2 of 2" in rows["binomial"]
    assert "corrected" in rows["square-grows"] and "counterexample" in rows["square-grows"]
    assert "refuted" in rows["primes-odd"] and "supported" in rows["cosine-small"]
    assert "4 claims: 1 proved, 1 corrected, 1 refuted and 1 supported." in done.stdout
    assert "all 5 broken variants rejected" in " ".join(done.stdout.split())
    assert "[1/4]" in done.stderr and done.stderr.endswith("wrote out/claims-sample_claims.html\n")
    assert not Path("out/claims.html").exists(), "that is the catalogue's"
    assert Path("out/claims-sample_claims.html").read_text().startswith("<!doctype html>")


@pytest.mark.commands
def test_a_verdict_that_differs_and_a_sabotage_that_passes_fail_the_run_by_name() -> None:
    Path("own.py").write_text(MISTAKEN)
    done = run("run", "--user", "own.py", "--html", "page.html", "--json", code=1)
    document = json.loads(done.stdout)
    (case,) = [step["facts"] for step in document["claims"][0]["evidence"] if step["kind"] == "counterexample"]
    faults = [
        f"mistaken: refuted, recorded as proved: x = {case['x']}",
        "gullible: accepts what was broken on purpose (any)",
    ]
    assert document["faults"] == faults and all(f"{fault}\n" in done.stderr for fault in faults)
    assert [claim["verdict"] for claim in document["claims"]] == ["refuted", "proved"]
    assert document["claims"][0]["sabotages"] == {"worse": True}
    assert "recorded as proved" in Path("page.html").read_text()


def test_one_claim_is_shown_whole() -> None:
    shown = run("show", "square-grows", "--user", SAMPLE).stdout
    for words in (
        "square-grows (algebra): corrected",
        "A number's square is never below it.",
        "x^2 ≥ x",
        "what is true instead",
        "It is not where x ≥ 1.",
        "counterexample: half of a half",
        "x = 1/2",
        "symbolic, of what is true instead: a product with what is at least 1",
        "a number above 1 → rejected",
        "0.25",
        "rests on",
    ):
        assert words in shown, words
    assert "\\" not in shown, "LaTeX is for pages"


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import avow.theory.claims

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(avow.theory.claims, "run", interrupted)
    done = run("run", "--user", SAMPLE, code=130)
    assert done.stderr.endswith("avow: interrupted; nothing was written\n") and list(Path("out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["show", "binomail"], f"claim='binomail' is not known in {SAMPLE}; did you mean binomial?"),
        (["show", "zzz"], f"claim='zzz' is not known in {SAMPLE}; avow claims list --user {SAMPLE} names them all"),
        (["run", "binomial", "prime"], f"claim='prime' is not known in {SAMPLE}; did you mean primes-odd?"),
        (["run", "--topic", "poetry"], "topic='poetry' is not known; known topics: algebra, numbers"),
        (["run", "binomial", "--topic", "numbers"], "topic='numbers' is not that of binomial; leave out one"),
        (["run", "--seconds", "0"], "seconds=0.0 must be above 0; try --seconds 60"),
        (["run", "--html", "."], "path=. is a folder; name a file in it"),
    ],
)
def test_nonsense_gets_name_value_rule_and_remedy(arguments: list[str], line: str) -> None:
    assert refused(*arguments, "--user", SAMPLE).startswith(f"avow: {line}")


def test_a_claim_of_the_catalogue_is_looked_up_there() -> None:
    assert refused("show", "zzz").startswith("avow: claim='zzz' is not known; avow claims list names them all")
    assert refused("run", SAMPLE).endswith(f"is not known; a file of claims is given by --user {SAMPLE}")


def test_a_file_without_claims_is_refused() -> None:
    Path("empty.py").write_text("x = 1\n")
    assert "holds no claims" in refused("list", "--user", "empty.py")
    assert "does not exist" in refused("list", "--user", "none.py")
