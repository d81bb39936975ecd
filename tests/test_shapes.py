"""The shapes in signatures are true: every method and all of maths run under a checker that reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parent.parent


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.helpers.shapes", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_every_signature_tells_the_truth_about_its_shapes() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_a_wrong_shape_is_rejected() -> None:
    done = run("--spoil")
    assert done.returncode != 0
    assert "jaxtyping.TypeCheckError" in done.stderr
    assert "scan.running" in done.stderr


def test_without_the_checker_the_wrong_shape_would_pass() -> None:
    done = run("--spoil", "--unchecked")
    assert done.returncode == 0, done.stderr
