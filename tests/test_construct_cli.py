"""`avow construct`: weights with their proofs, files that are whole or absent, and formulas that are never run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import avow.theory.constructions
from avow.cli import app
from avow.errors import ParameterError
from avow.theory.constructions.construction import Proof
from avow.theory.constructions.formulas import parse

COMMANDS: dict[str, list[str]] = {
    "copy": ["--orthonormal", "5", "--target", "2", "--shortest"],
    "average": ["--random", "4", "--dim", "8", "--subset", "0,3"],
    "mixture": ["--orthonormal", "4", "--weights", "0.7,0.3", "--subset", "1,2"],
    "route": ["--orthonormal", "3", "--route", "0=1", "--route", "1=0,2"],
    "robust-heads": ["--orthonormal", "6"],
    "project-out": ["--dim", "6"],
    "relu-linear": ["--slope", "2", "--intercept", "-1/2"],
    "relu-square": ["--eps", "1e-2", "--deep"],
    "relu-piecewise": ["--formula", "exp(x)", "--eps", "1e-2"],
}


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["construct", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def refused(*arguments: str) -> str:
    """The one line that a mistake ends in, with nothing on stdout and no file."""
    done = run(*arguments, "--save", "weights.safetensors", code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert not Path("weights.safetensors").exists()
    return str(done.stderr.strip())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_prints_weights_and_a_proof_that_holds(name: str) -> None:
    document = json.loads(run(name, *COMMANDS[name], "--json").stdout)
    proof = document["proof"]
    assert proof["holds"] and proof["achieved"] <= document["bound"] and proof["steps"]
    assert document["promise"] and document["tensors"] and document["picture"]["title"]


def test_the_commands_are_all_there_are() -> None:
    from avow.cli import construct

    registered = [c.name or c.callback.__name__ for c in construct.app.registered_commands if c.callback]
    assert sorted(registered) == sorted(COMMANDS)


def test_every_construction_that_the_docs_show_holds() -> None:
    page = Path(__file__).parent.parent / "docs" / "constructions.md"
    shown = [shlex.split(line) for line in page.read_text().splitlines() if line.startswith("avow construct ")]
    assert {words[2] for words in shown} == set(COMMANDS)
    for words in shown:
        assert "holds: " in run(*words[2:]).stdout


def test_a_person_reads_the_weights_then_the_promise_then_the_proof() -> None:
    shown = run("relu-linear", "--slope", "2").stdout
    assert shown.index("w_0") < shown.index("holds: ") < shown.index("proved 0, promised 0") < shown.index("  - ")
    assert "2, -2" in shown and max(map(len, shown.splitlines())) <= 80


def test_what_is_saved_is_what_was_proved_with_its_promise_beside_it() -> None:
    done = run("copy", "--orthonormal", "4", "--eps", "0.05", "--save", "out/copy.safetensors", "--json")
    document = json.loads(done.stdout)
    held = load_file("out/copy.safetensors")
    assert held["query"].tolist() == document["tensors"]["query"]["values"]
    weights = torch.softmax(torch.eye(4, dtype=torch.float64) @ held["query"], 0)
    assert weights[0] >= 1 / 1.05 - 1e-12
    with safe_open("out/copy.safetensors", "pt") as file:
        told = file.metadata()
    assert told["promise"] == document["promise"] and float(told["bound"]) == document["bound"]
    assert float(told["proved"]) == document["proof"]["achieved"]
    assert done.stderr == "wrote out/copy.safetensors\n"


def test_a_saved_head_routes_by_itself() -> None:
    run("route", "--orthonormal", "3", "--route", "0=1", "--eps", "0.05", "--save", "head.safetensors")
    held, tokens = load_file("head.safetensors"), torch.eye(3, dtype=torch.float64)
    scores = (tokens @ held["W_Q"].mT) @ (tokens @ held["W_K"].mT).mT * held["scale"]
    received = torch.softmax(scores, -1) @ (tokens @ held["W_V"].mT)
    assert (received[0] - tokens[1]).norm() <= 0.05 + 1e-12


def test_keys_of_ones_own_are_used() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]])
    save_file({"keys": keys}, "keys.safetensors")
    document = json.loads(run("copy", "--keys", "keys.safetensors", "--target", "1", "--json").stdout)
    query = torch.tensor(document["tensors"]["query"]["values"], dtype=torch.float64)
    assert torch.softmax(keys.double() @ query, 0)[1] >= 1 / 1.01 - 1e-12


def test_random_keys_follow_their_seed() -> None:
    def drawn(seed: str) -> list[float]:
        made = json.loads(run("copy", "--random", "3", "--dim", "5", "--seed", seed, "--json").stdout)
        return list(made["tensors"]["query"]["values"])

    assert drawn("1") == drawn("1") != drawn("2")


def test_a_type_can_be_asked_for() -> None:
    made = json.loads(run("relu-square", "--eps", "1e-2", "--dtype", "float32", "--json").stdout)
    assert {tensor["dtype"] for tensor in made["tensors"].values()} == {"float32"}


def test_a_picture_is_written_on_request() -> None:
    run("relu-piecewise", *COMMANDS["relu-piecewise"], "--png", "curve.png")
    assert Path("curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("law", [["--scales", "1/2,3/2"], ["--gauss", "1,0.01"], ["--away", "--at-least", "-1"]])
def test_robust_heads_know_their_laws(law: list[str]) -> None:
    assert json.loads(run("robust-heads", "--orthonormal", "5", *law, "--json").stdout)["proof"]["holds"]


def test_a_proof_that_does_not_hold_fails_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = avow.theory.constructions.ReluLinear.verify

    def broken(self: avow.theory.constructions.ReluLinear) -> Proof:
        return replace(verify(self), achieved=self.bound + 1.0)

    monkeypatch.setattr(avow.theory.constructions.ReluLinear, "verify", broken)
    done = run("relu-linear", "--save", "line.safetensors", "--png", "line.png", code=1)
    assert "BROKEN" in done.stdout and done.stderr == "avow: the proof does not hold; nothing was written\n"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["copy"], "keys=(not given) must be given; use one of --keys FILE, --orthonormal N, --random N"),
        (
            ["copy", "--orthonormal", "3", "--random", "3"],
            "keys=--orthonormal N and --random N must be given in one way",
        ),
        (["copy", "--orthonormal", "0"], "keys=0 × 0 must have at least one key and one dimension; try 8"),
        (["copy", "--orthonormal", "4", "--dim", "2"], "dim=2 has no room for 4 orthonormal keys; try --dim 4"),
        (["copy", "--orthonormal", "3", "--eps", "2"], "copy_query: eps=2"),
        (["copy", "--orthonormal", "3", "--target", "9"], "copy_query: target=9"),
        (["copy", "--orthonormal", "3", "--dtype", "int8"], "dtype='int8' is not known; use one of float64, "),
        (["copy", "--keys", "none.safetensors"], "keys=none.safetensors does not exist; check the path"),
        (["copy", "--keys", "a.safetensors", "--dim", "3"], "dim=3 is for drawn keys, not for those of a file"),
        (["project-out", "--input", "none.safetensors"], "input=none.safetensors does not exist; check the path"),
        (["average", "--orthonormal", "3", "--subset", "a"], "subset='a' must be whole numbers; try --subset 0,1"),
        (["mixture", "--orthonormal", "3", "--weights", "x"], "weights='x' is not a number; try --weights 0.5, or 1/3"),
        (["mixture", "--orthonormal", "3", "--weights", ","], "weights=',' names no number; try --weights 0.7,0.3"),
        (
            ["mixture", "--orthonormal", "3", "--weights", "1", "--subset", "0,0"],
            "subset=[0, 0] must name 1 different keys among 3, one for each weight; try --subset 0,1",
        ),
        (["route", "--orthonormal", "3"], "route=nothing must name at least one route; try --route 0=1"),
        (["route", "--orthonormal", "3", "--route", "0"], "route='0' must read TOKEN=SOURCES; try --route 0=1"),
        (["route", "--orthonormal", "3", "--route", "0=1", "--route", "0=2"], "route='0=2' names a token twice; "),
        (["robust-heads", "--orthonormal", "3", "--gauss", "1"], "gauss='1' must be a mean and a variance"),
        (["project-out", "--kept", "0"], "kept=0 must be at least 1; try --kept 2"),
        (["relu-linear", "--from", "0"], "interval=from 0 to None has one end; give --from and --to, or neither"),
        (["relu-linear", "--from", "1", "--to", "1/2"], "relu_linear: interval=(1, 1/2) must rise from its first end"),
        (["robust-heads", "--orthonormal", "1"], "robust_heads: n=1 must be at least 2; give two keys or more"),
        (
            ["relu-linear", "--slope", "1/3"],
            "slope=1/3 is not a float64 number, and a rounded slope drifts from the line without end; give --from and "
            "--to, or a slope that the type holds, such as 1/4",
        ),
        (["relu-piecewise", "--formula", "x", "--from", "a"], "from='a' is not a number; try --from 0.5, or 1/3"),
        (["relu-piecewise", "--formula", "x^2"], "formula='x^2' uses ^, which is not a power here; write x**2"),
        (["relu-square", "--png", "a.pdf"], "png=a.pdf must be a .png file; try --png a.png"),
        (["relu-square", "--eps", "0"], "relu_square: eps=0"),
    ],
)
def test_nonsense_gets_name_value_rule_and_remedy(arguments: list[str], line: str) -> None:
    assert refused(*arguments).startswith(f"avow: {line}")


def test_a_file_without_the_tensor_is_refused() -> None:
    save_file({"x": torch.eye(2)}, "x.safetensors")
    assert "lacks keys (it holds x); save a tensor named keys" in refused("copy", "--keys", "x.safetensors")
    assert "lacks A (it holds x); save a tensor named A" in refused("project-out", "--input", "x.safetensors")


x = sympy.Symbol("x", real=True)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("exp(-x**2) / 2", sympy.exp(-(x**2)) / 2),
        ("0.1*x", x / 10),
        ("-x + +3", 3 - x),
        ("sqrt(2) - pi*e", sympy.sqrt(2) - sympy.pi * sympy.E),
        ("log(1 + x)", sympy.log(1 + x)),
        ("erf(x)", sympy.erf(x)),
    ],
)
def test_a_formula_means_what_it_says(text: str, meant: Any) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("__import__('os').system('true')", "which is not known here"),
        ("x.__class__", "which is not known here"),
        ("(lambda: x)()", "which is not known here"),
        ("[x for x in (1,)]", "which is not known here"),
        ("x if x else 1", "which is not known here"),
        ("open(x)", "which is not known here"),
        ("log(x, base=2)", "which is not known here"),
        ("exp", "which is not known here"),
        ("y", "which is not known here"),
        ("True * x", "which is not known here"),
        ("1j * x", "which is not known here"),
        ("1e999", "which is not known here"),
        ("x // 2", "uses an operator that is not known here"),
        ("exp(x", "is not a formula"),
        ("1if x else 2", "is not a formula"),
        ("", "is not a formula"),
        ("\0", "is not a formula"),
        ("9**9**9", "holds a power above 64"),
        ("(9**64)**64", "raises a number beyond"),
        ("1 / (x - x)", "divides by zero"),
        ("0**-1", "divides by zero"),
        ("sqrt(-1)", "is not a real number"),
        ("log(0)", "is not a real number"),
        ("(" * 150 + "x" + ")" * 150, "is 301 characters long"),
        ("((((x))))" * 20, "which is not known here"),
    ],
)
def test_what_is_no_formula_is_refused_and_never_run(text: str, rule: str) -> None:
    with pytest.raises(ParameterError) as problem:
        parse(text)
    assert str(problem.value).startswith("formula=") and rule in str(problem.value)
