"""A short search for broken certificates, and proof that it climbs and that it would find one."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from avow.core import Promise
from avow.methods.exact import Exact
from tests.search import METHODS, PATIENCE, Climb, Job, evaluate, main, replay, search


@pytest.mark.parametrize("method", list(METHODS))
def test_a_short_search_breaks_nothing(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr("tests.search.DRAWS", 30)
    result = search(Job(method, "float32" if method != "cache" else "bfloat16", 5, 600.0, calls=40))
    assert not result.broken and result.ratio < 1, result
    assert result.calls >= 40


def test_a_climb_gets_higher_than_its_random_start_and_its_recipe_makes_the_same_again() -> None:
    rng = random.Random(1)
    climb = Climb("exact", "float32", 3)
    while climb.evaluations < 2 * PATIENCE:
        climb.step(rng)
    climb.isolate()
    assert climb.ratio > 1.3 * climb.first > 0
    recipe = json.loads(climb.recipe)
    again = replay(recipe)
    assert all(torch.equal(getattr(again, name), getattr(climb.state, name)) for name in "qkv")
    found = evaluate("exact", "float32", again)
    assert found is not None and float(found.heads.max()) == climb.ratio
    # Half of the steps make another call.
    other = replay(recipe | {"steps": recipe["steps"][: len(recipe["steps"]) // 2]})
    assert not all(torch.equal(getattr(other, name), getattr(again, name)) for name in "qkv")


def test_a_bound_that_random_inputs_keep_and_a_climb_breaks_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, first = Exact.promise, Climb("exact", "float32", random.Random(0).getrandbits(32)).first
    slack = 0.5 / first  # the start keeps half of what is left

    def boastful(*arguments: object) -> Promise:
        promise = honest(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(promise, rows=promise.rows / slack)

    monkeypatch.setattr(Exact, "promise", boastful)
    arguments = ["--method", "exact", "--dtype", "float32", "--processes", "1", "--minutes", "5", "--calls", "400"]
    assert main(arguments) == 1
    told = capsys.readouterr().out
    assert "BROKEN" in told
    recipe = told.split("--recipe '")[1].split("'\n")[0]
    assert main(["--recipe", recipe]) == 1
    monkeypatch.undo()
    assert main(["--recipe", recipe]) == 0
