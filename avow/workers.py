"""Processes that work beside this one, each at a module of avow: lines of JSON go in, lines come out.

They are started afresh and never forked: what a thread holds here at that moment a forked child would hold for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any


def surroundings(threads: int = 1) -> dict[str, str]:
    """The environment of such a process: it finds the same modules as this one, and computes with so many threads."""
    same = os.pathsep.join(map(os.path.abspath, sys.path))
    return os.environ | {"PYTHONPATH": same, "OMP_NUM_THREADS": str(threads)}


class Process:
    """A process at work on a module; `hear` is called with each of its lines, and with an empty one at its end.

    It hears Ctrl-C as this process does, unless it is `apart`.
    """

    def __init__(self, module: str, hear: Callable[[str], None], threads: int = 1, apart: bool = False) -> None:
        # What it prints, for the words of its end.
        self._says = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process is: `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._says,
            env=surroundings(threads),
            start_new_session=apart,
            text=True,
            encoding="utf-8",
        )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, args=(hear,), daemon=True).start()

    def send(self, words: Mapping[str, Any]) -> None:
        """One line for it; where it has ended meanwhile, its listener hears that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        """Have it stop."""
        self._process.kill()

    def last_words(self) -> tuple[int, str]:
        """The exit code of one that has ended by itself, and the last line it printed, if it did."""
        code = self._process.wait()
        self._says.seek(0)
        lines = self._says.read().decode(errors="replace").strip().splitlines()
        return code, lines[-1] if lines else ""

    def end(self) -> None:
        """Leave nothing of it behind."""
        self._process.kill()
        self._process.wait()
        self._says.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self, hear: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                hear(line)
        hear("")
