"""Other people's implementations, installed beside the benchmarks and nowhere else."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / ".peers"
# performer-pytorch imports all of these, though fast attention itself needs only einops. None may bring its own torch.
_PERFORMER = (
    "performer-pytorch==1.1.4",
    "einops",
    "local-attention",
    "axial-positional-embedding",
    "hyper-connections",
)


class PeerMissing(Exception):
    """A peer that could not be installed or imported, and why."""


def performer() -> Any:
    """The module `performer_pytorch`, installed on first use."""
    if not (_FOLDER / "performer_pytorch").is_dir():
        _install(_PERFORMER)
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("performer_pytorch")
    except ImportError as error:
        raise PeerMissing(f"performer-pytorch cannot be imported: {error}") from error


def _install(packages: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(_FOLDER), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"pip did not finish: {error}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise PeerMissing(last[0])
