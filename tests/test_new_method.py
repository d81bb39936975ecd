"""A method is one file and one test file: dropped into a copy, it is found by everything that looks for methods."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUIET = ("-q", "-p", "no:cacheprovider")

METHOD = '''"""Softmax attention with its logits flattened towards a uniform average, and a bound on what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from avow.contract import Computed, Cost, Method, Norms, Problem, Promise, Sizes
from avow.maths import rounding
from avow.maths.heads import finished, per_query_head, settled
from avow.maths.masks import visible
from avow.maths.softmax import softmax_average
from avow.params import between, param


@dataclass(frozen=True)
class Uniform(Method):
    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "the average of the visible values, nearly"

    warmth: float = param(0.25, between(0, 1), "how much of each logit is left")

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p, heads = problem, problem.q.shape[1]
        q, k, v = p.q.double(), per_query_head(p.k.double(), heads), per_query_head(p.v.double(), heads)
        logits = (q @ k.transpose(-1, -2)) * p.scale + (0 if p.bias is None else p.bias.double())
        seen = visible(p.allowed, p.causal, q.shape[-2], k.shape[-2], q.device)
        if seen is not None:
            logits = torch.where(seen | ~seen.any(-1, keepdim=True), logits, -math.inf)
        return Computed(finished(p, torch.softmax(self.warmth * logits, -1) @ v))

    def promise(self, problem: Problem, norms: Norms, computed: Computed, confidence: float) -> Promise:
        p = problem
        reach = abs(p.scale) * norms.q * per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
        reach = reach + (0.0 if p.bias is None else float(p.bias.abs().amax()))
        rows = rounding.perturbed((1 - self.warmth) * reach) + 1e-9 + 2 * rounding.unit(p.q.dtype) + 1e-6 * reach
        return Promise("deterministic", settled(p, rows))

    def cost(self, sizes: Sizes) -> Cost:
        z, pairs = sizes, sizes.batch * sizes.heads * sizes.queries * sizes.keys
        return Cost(2 * pairs * (z.dim + z.value_dim), 4 * pairs, 10, 24 * pairs)

    def reference(self, problem: Problem) -> Tensor:
        p = problem
        return softmax_average(p.q, p.k, p.v, p.allowed, p.bias, p.causal, p.scale)

    @classmethod
    def settings(cls, sizes: Sizes) -> Iterator[Method]:
        yield cls()
'''

TEST = """import torch

import avow


def test_one_key_is_copied() -> None:
    q, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 1, 4)
    torch.testing.assert_close(avow.attend(q, v, v, method="uniform").out, v.expand(1, 1, 3, 4))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, with one new method and its test file."""
    place = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("avow", "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", place)
    (place / "avow/methods/uniform.py").write_text(METHOD)
    (place / "tests/test_uniform.py").write_text(TEST)
    return place


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(place), "AVOW_CALIBRATION": "off", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "CI"))}
    return subprocess.run(
        [sys.executable, *words], cwd=place, env=inherited | own, capture_output=True, text=True, check=False
    )


def test_the_new_file_is_short() -> None:
    assert len([line for line in METHOD.splitlines() if line.strip()]) < 60


def test_the_method_is_found_and_attends_and_is_planned(copy: Path) -> None:
    script = (
        "import avow, torch, pathlib; q, k, v = torch.randn(3, 1, 2, 64, 8).unbind();"
        "print(pathlib.Path(avow.__file__).parent, list(avow.all_methods()));"
        "print(avow.attend(q, k, v, method='uniform', warmth=0.5).certificate);"
        "print(avow.plan(q, k, v, tol=1e-2))"
    )
    done = run(copy, "-c", script)
    assert done.returncode == 0, done.stderr
    place, *_ = done.stdout.split()
    assert Path(place) == copy / "avow", "the subprocess read another package"
    assert "'uniform'" in done.stdout.splitlines()[0]
    assert "method   uniform (warmth=0.5)" in done.stdout
    assert "uniform(warmth=0.25)" in done.stdout


def test_the_command_line_knows_it(copy: Path) -> None:
    done = run(copy, "-m", "avow", "compare", "--help")
    assert done.returncode == 0, done.stderr
    assert "uniform: the average of the visible values, nearly" in done.stdout
    assert "uniform.warmth=0.25: how much of each logit is left" in done.stdout


def test_the_comparison_contains_it(copy: Path) -> None:
    sizes = ("--length", "64", "--heads", "2", "--dim", "8", "--kinds", "diffuse", "--quick")
    done = run(copy, "-m", "avow", "compare", "--methods", "exact,uniform", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    assert '"uniform"' in json.dumps(json.loads(done.stdout))


def test_the_common_suite_judges_it(copy: Path) -> None:
    done = run(copy, "-m", "pytest", "tests/test_every_method.py", "-k", "uniform or test_file_of_its_own", *QUIET)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout


def test_without_its_test_file_the_suite_fails(copy: Path) -> None:
    test = copy / "tests/test_uniform.py"
    test.rename(test.with_suffix(".aside"))
    try:
        done = run(copy, "-m", "pytest", "tests/test_every_method.py", "-k", "test_file_of_its_own", *QUIET)
    finally:
        test.with_suffix(".aside").rename(test)
    assert done.returncode == 1 and "['uniform'] == []" in done.stdout


def test_a_lie_in_the_new_file_is_caught_by_the_common_suite(copy: Path) -> None:
    method = copy / "avow/methods/uniform.py"
    method.write_text(METHOD.replace("(1 - self.warmth) * reach", "0.01 * (1 - self.warmth) * reach"))
    try:
        lied_about = "uniform and certificate_on_odd and float32"
        done = run(copy, "-m", "pytest", "tests/test_every_method.py", "-x", "-k", lied_about, *QUIET)
    finally:
        method.write_text(METHOD)
    assert done.returncode == 1 and " failed" in done.stdout
