"""The method that CONTRIBUTING.md prints, dropped into a copy, is found by everything that looks for methods."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import ROOT, blocks

QUIET = ("-q", "-p", "no:cacheprovider")

# The method and the test file that the guide prints.
METHOD, TEST = (block.code for block in blocks((ROOT / "CONTRIBUTING.md").read_text()) if block.language == "python")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, with one new method and its test file."""
    place = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("avow", "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", place)
    (place / "avow/methods/flattened.py").write_text(METHOD)
    (place / "tests/test_flattened.py").write_text("from avow.methods.flattened import Flattened, Problem\n" + TEST)
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
        "print(avow.attend(q, k, v, method='flattened', warmth=0.5).certificate);"
        "print(avow.plan(q, k, v, tol=1e-2))"
    )
    done = run(copy, "-c", script)
    assert done.returncode == 0, done.stderr
    place, *_ = done.stdout.split()
    assert Path(place) == copy / "avow", "the subprocess read another package"
    assert "'flattened'" in done.stdout.splitlines()[0]
    assert "method   flattened (warmth=0.5)" in done.stdout
    assert "flattened(warmth=0.25)" in done.stdout


def test_the_command_line_knows_it(copy: Path) -> None:
    done = run(copy, "-m", "avow", "compare", "--help")
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "flattened softmax attention with smaller logits" in told
    assert "flattened.warmth=0.25 how much of each logit is left" in told


def test_the_comparison_contains_it(copy: Path) -> None:
    sizes = ("--length", "64", "--heads", "2", "--dim", "8", "--kinds", "diffuse", "--quick")
    done = run(copy, "-m", "avow", "compare", "--methods", "exact,flattened", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    assert '"flattened"' in json.dumps(json.loads(done.stdout))


def test_the_common_suite_judges_it(copy: Path) -> None:
    done = run(
        copy,
        "-m",
        "pytest",
        "tests/test_flattened.py",
        "tests/test_every_method.py",
        "-k",
        "flattened or test_file_of_its_own",
        *QUIET,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout


def test_without_its_test_file_the_suite_fails(copy: Path) -> None:
    test = copy / "tests/test_flattened.py"
    test.rename(test.with_suffix(".aside"))
    try:
        done = run(copy, "-m", "pytest", "tests/test_every_method.py", "-k", "test_file_of_its_own", *QUIET)
    finally:
        test.with_suffix(".aside").rename(test)
    assert done.returncode == 1 and "['flattened'] == []" in done.stdout


def test_a_lie_in_the_new_file_is_caught_by_the_common_suite(copy: Path) -> None:
    method = copy / "avow/methods/flattened.py"
    method.write_text(
        METHOD.replace("softmax_l1_bound((1 - self.warmth +", "softmax_l1_bound(0.01 * (1 - self.warmth +")
    )
    try:
        lied_about = "flattened and certificate_on_odd and float32"
        done = run(copy, "-m", "pytest", "tests/test_every_method.py", "-x", "-k", lied_about, *QUIET)
    finally:
        method.write_text(METHOD)
    assert done.returncode == 1 and " failed" in done.stdout
