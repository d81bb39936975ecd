"""Mutants of the proof scripts of the claims that others cite most: each must end a proof, or prove what it says.

    python -m tests.mutate_proofs             all of them
    python -m tests.mutate_proofs copy-gap    of one claim

A mutant is a proof's function with one thing changed: a comparison turned round or made strict, an arithmetic operation
or a number exchanged, an argument left out, a statement left out. It is killed if the claim loses its verdict. A
survivor is listed with its line and what stands there: a person has to say why it may live. Examples, on which no
verdict rests, are left out before, and so is what is computed for them alone.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator

from avow.theory.claims import Claim, catalogue
from avow.theory.claims.claim import citations

COMPARED = {ast.LtE: ast.Lt, ast.GtE: ast.Gt, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq}
COMBINED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult}
# What is written beside a proof: sentences, and examples on which nothing rests.
BESIDE = ("says", "shows")


def most_used(count: int = 10) -> list[Claim]:
    """The formal claims with a proof that most modules and other claims rest on."""
    claims = [one for one in catalogue().values() if one.formal and one.expected in ("proved", "corrected")]
    needed = [id for one in catalogue().values() for id in one.needs]
    return sorted(claims, key=lambda one: (-len(citations().get(one.id, ())) - needed.count(one.id), one.id))[:count]


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Each mutant of a function: the line, what was changed, and the tree."""
    for place, node in enumerate(ast.walk(tree)):
        for change in range(4):
            if _changed(copy.deepcopy(node), change):
                mutant = copy.deepcopy(tree)
                target = next(one for at, one in enumerate(ast.walk(mutant)) if at == place)
                done = _changed(target, change)
                yield getattr(node, "lineno", 0), f"{done}: {ast.unparse(target).splitlines()[0]}", mutant


def _changed(node: ast.AST, change: int) -> str:
    """Change a node in place, in one of some ways; what was done, or nothing."""
    if isinstance(node, ast.Compare) and change == 0 and type(node.ops[0]) in COMPARED:
        node.ops[0] = COMPARED[type(node.ops[0])]()
        return "comparison"
    if isinstance(node, ast.BinOp) and change == 0 and type(node.op) in COMBINED:
        node.op = COMBINED[type(node.op)]()
        return "operation"
    if isinstance(node, ast.Constant) and change == 0 and type(node.value) is int:
        node.value += 1
        return "number"
    if isinstance(node, ast.Call) and 0 < change < len(node.args) and ast.unparse(node.func).startswith("proof."):
        del node.args[change]
        return f"argument {change + 1} of {ast.unparse(node.func)} left out"
    body = getattr(node, "body", None)
    if isinstance(node, ast.FunctionDef) and isinstance(body, list) and change < 1:
        # Of the statements, the conclusions: a proof without one proves less.
        last = next((at for at in range(len(body) - 1, -1, -1) if "conclude" in ast.unparse(body[at])), None)
        if last is not None:
            del body[last]
            return "the last conclusion left out"
    return ""


def _script(one: Claim) -> ast.Module:
    tree = ast.parse(textwrap.dedent(inspect.getsource(one.check)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    function.body = [line for line in function.body if "proof.shows" not in ast.unparse(line)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in BESIDE]
    while unread := [line for line in function.body if _is_unread(line, function)]:
        function.body = [line for line in function.body if line not in unread]
    return tree


def _is_unread(line: ast.stmt, function: ast.FunctionDef) -> bool:
    """Whether a statement sets names alone that nothing else reads; a step of the proof is never one."""
    if not isinstance(line, ast.Assign | ast.With) or "proof" in ast.unparse(line) or "against" in ast.unparse(line):
        return False
    stored = {node.id for node in ast.walk(line) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    others = (node for one in function.body if one is not line for node in ast.walk(one))
    return not stored & {node.id for node in others if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def survivors(one: Claim) -> tuple[int, list[str]]:
    """How many mutants of a proof there are, and those that leave the verdict."""
    module, script = one.check.__module__.rsplit(".", 1)[-1], _script(one)
    first = inspect.getsourcelines(one.check)[1]
    # Of a claim that has no verdict every mutant would be noticed.
    assert _keeps_verdict(one, script), f"{one.id} has no verdict without its examples"
    count, alive = 0, []
    for line, done, mutant in mutants(script):
        count += 1
        if _keeps_verdict(one, mutant):
            alive.append(f"{module}.py:{first + line - 1}: {done}")
    return count, alive


def _keeps_verdict(one: Claim, script: ast.Module) -> bool:
    space = dict(vars(importlib.import_module(one.check.__module__)))
    exec(compile(ast.fix_missing_locations(script), "mutant", "exec"), space)
    made = copy.copy(one)
    object.__setattr__(made, "check", space[script.body[0].name])  # type: ignore[attr-defined]
    # A search is no part of the proof.
    object.__setattr__(made, "falsifier", None)
    return made.judge().verdict == one.expected


def main(names: list[str]) -> None:
    total = living = 0
    for one in [catalogue()[name] for name in names] or most_used():
        count, alive = survivors(one)
        total, living = total + count, living + len(alive)
        print(f"{one.id}: {count - len(alive)} of {count} mutants noticed", *alive, sep="\n  ", flush=True)
    print(f"{total - living} of {total}: {100 * (total - living) / total:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
