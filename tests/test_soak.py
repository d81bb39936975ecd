"""A slice of the soak finds nothing, and what it looks for it would find."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

import avow
from avow.core import Promise
from avow.errors import AvowError, ParameterError
from avow.methods.exact import Exact
from tests.soak import caches, calls, checkpoints, claims_files, constructions, damage, files, model_caches, modules
from tests.soak.__main__ import SURFACES, main
from tests.soak.turns import Found, Soak, Surface, Tally, Wrong, once, resident, tried


def slice_of(surface: Surface, folder: Path, cases: int, seed: int) -> Tally:
    """So many cases of a surface."""
    tally, draw = Tally("some"), random.Random(seed)
    with surface(folder) as case:
        for _ in range(cases):
            once(tally, case, draw.getrandbits(40))
    return tally


@pytest.mark.parametrize(
    ("surface", "cases"),
    [
        (calls.surface, 80),
        (caches.surface, 4),
        (model_caches.surface, 10),
        (files.surface, 200),
        (checkpoints.surface, 20),
        (claims_files.surface, 20),
        (modules.surface, 60),
        (constructions.surface, 100),
    ],
    ids=["calls", "caches", "model caches", "files", "checkpoints", "claims", "modules", "constructions"],
)
def test_a_slice_of_each_surface_finds_nothing(tmp_path: Path, surface: Surface, cases: int) -> None:
    tally = slice_of(surface, tmp_path, cases, 11)
    assert tally.sound and not tally.stories, tally.stories
    assert tally.kinds.total() == cases and len(tally.kinds) > 1


def test_a_broken_certificate_is_told_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Exact.promise

    def boastful(*arguments: object) -> Promise:
        promise = honest(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(promise, rows=promise.rows * 1e-3)

    monkeypatch.setattr(Exact, "promise", boastful)
    tally = slice_of(calls.surface, tmp_path, 60, 11)
    assert not tally.sound
    assert any("--only some --case" in story and "broken bounds: exact" in story for story in tally.stories.values())


def test_an_input_that_is_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = avow.attend

    def careless(q: torch.Tensor, *arguments: object, **options: object) -> object:
        if isinstance(q, torch.Tensor) and q.numel() and not q.requires_grad and not q.is_inference():
            q.flatten()[0].add_(1) if q.is_contiguous() else q.mul_(2)
        return honest(q, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(avow, "attend", careless)
    stories = slice_of(calls.surface, tmp_path, 30, 11).stories.values()
    assert any("an input was changed" in story for story in stories)


def test_an_exception_of_any_other_kind_is_a_failure_and_a_refusal_needs_its_parts() -> None:
    assert tried(lambda: 3) == 3
    assert isinstance(tried(lambda: avow.attend(None, None, None)), AvowError)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        tried(lambda: 1 // 0)

    def mumble() -> None:
        raise ParameterError("tol", 3, "is wrong", " ")

    with pytest.raises(Wrong, match="a refusal without its parts"):
        tried(mumble)


def test_more_misses_than_chance_allows_are_a_failure() -> None:
    tally = Tally("some")
    for _ in range(200):
        tally.add(Found("sampled", 0.0, 0.1, 1, 0))
    assert tally.sound
    for _ in range(100):
        tally.add(Found("sampled", 0.0, 0.1, 1, 1))
    assert not tally.sound and "100 of 300 rows missed bounds that may fail at 0.1" in str(tally.unlucky)


def test_memory_that_keeps_growing_is_a_failure(tmp_path: Path) -> None:
    soak = Soak({}, tmp_path, 0)
    soak.memory = [2**29] * 9
    assert soak.sound and "A LEAK" not in str(soak)
    soak.memory = [2**29 + 2**26 * i for i in range(9)]
    assert not soak.sound and "A LEAK" in str(soak)
    assert resident() > 2**24


def test_accidents_change_what_they_happen_to() -> None:
    rng, data = random.Random(0), b"one\ntwo\nthree\n" * 9
    assert sum(damage.bytes_of(rng, data) != data for _ in range(200)) > 180
    plain = {"a": [1, 2.5, {"b": "c"}], "d": None}
    assert sum(damage.plain_of(rng, plain) != plain for _ in range(200)) > 180


def test_the_command_tells_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # the other tests keep theirs
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    assert main(["--only", "attend", "--case", "5"]) == 0
    assert capsys.readouterr().out.startswith("Found(what=")
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert f"there are {', '.join(SURFACES)}" in capsys.readouterr().err
