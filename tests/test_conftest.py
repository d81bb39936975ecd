"""The house rules of `conftest.py`, each seen to bite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def suite(folder: Path, sources: list[str], *options: str, ci: bool) -> subprocess.CompletedProcess[str]:
    """A suite of some files, run under this conftest."""
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for number, source in enumerate(sources):
        (folder / f"test_{number}.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["CI"] = "true" if ci else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


FINE = "def test_fine(): pass\n"
SKIPS = "import pytest\ndef test_it(): pytest.skip('no such machine')\n"
SKIPS_WHOLE = "import pytest\npytest.skip('no such module', allow_module_level=True)\n"


@pytest.mark.commands
def test_a_skipped_test_or_module_fails_the_suite_in_ci(tmp_path: Path) -> None:
    done = suite(tmp_path, [FINE, SKIPS, SKIPS_WHOLE], "-n", "1", ci=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "skipped where nothing may be: test_1.py::test_it: no such machine" in done.stdout
    assert "skipped where nothing may be: test_2.py: no such module" in done.stdout


@pytest.mark.commands
def test_a_skip_is_fine_at_home(tmp_path: Path) -> None:
    assert suite(tmp_path, [FINE, SKIPS], ci=False).returncode == 0


@pytest.mark.commands
def test_a_suite_without_skips_is_fine_in_ci(tmp_path: Path) -> None:
    assert suite(tmp_path, [FINE], ci=True).returncode == 0


def test_uninitialised_memory_is_poisoned() -> None:
    assert bool(torch.empty(3).isnan().all())
    assert bool(torch.ones(2).new_empty(3).isnan().all())


def test_every_test_starts_from_the_same_seed() -> None:
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
