"""A wheel of this repository, and an environment that has it, what it depends on, and nothing else.

Nothing is fetched: dependencies are links to the packages that the tests themselves run with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def built(target: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist (`target`) of a source tree, written into a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def metadata(wheel: Path) -> Distribution:
    """What a wheel says of itself."""
    (folder,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(folder)  # type: ignore[arg-type]  # a path inside an archive is one, too


def dependencies(of: Distribution) -> dict[str, Distribution]:
    """What a distribution depends on without extras, directly or not, as it is installed here."""
    found: dict[str, Distribution] = {}
    waiting = [*_required(of)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            waiting += _required(found[name])
    return found


def _required(of: Distribution) -> Iterator[str]:
    for line in of.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name.lower()


class Bare(NamedTuple):
    """An environment: its folder, and a home where commands may leave files."""

    folder: Path
    home: Path

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that lead neither to the repository nor to other packages."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
        return kept | {"HOME": str(self.home), "AVOW_CALIBRATION": "off", "OMP_NUM_THREADS": "1"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What comes of a command of the environment."""
        words = [str(self.folder / "bin" / command[0]), *command[1:]]
        return subprocess.run(
            words, cwd=self.home, env=self.variables, capture_output=True, text=True, timeout=300, check=False
        )


def bare(wheel: Path, folder: Path) -> Bare:
    """An environment with a wheel and links to what it depends on."""
    made = Bare(folder / "environment", folder / "home")
    venv.create(made.folder, symlinks=True)
    made.home.mkdir()
    for one in dependencies(metadata(wheel)).values():
        for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (made.site / name).exists():  # some share a folder
                (made.site / name).symlink_to(one.locate_file(name))
    pip = [sys.executable, "-m", "pip", "--python", str(made.folder / "bin" / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--quiet", "--no-index", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made
