"""The lab as its command runs it, in a folder of its own and watched: what it writes, starts or calls is noted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.lab import Lab

ROOT = Path(__file__).parents[2]

# Python tells a hook of every file that is opened, every process that is started, every address that is called.
_WATCH = """
import os, sys
folder = os.environ["AVOW_WATCHED"]
notes = os.open(os.path.join(folder, "notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TOUCHES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
STARTS = {"os.system", "os.exec", "os.fork", "os.spawn", "pty.spawn", "socket.connect", "ctypes.dlopen/none"}

def own(path):
    path = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return not path or path.startswith((folder, "/dev/null", "/dev/shm", "/proc/self/"))

def watch(event, arguments):
    if event == "open":
        path, _, flags = arguments
        told = (flags or 0) & WRITES and not own(path) or "avow-secret" in str(path) or "passwd" in str(path)
    elif event in TOUCHES:
        told = not own(arguments[0])
    elif event == "subprocess.Popen":
        told = "avow.worker_pool" not in arguments[1]
    else:
        told = event in STARTS
    if told:
        os.write(notes, (event + " " + repr(arguments)[:300] + "\\n").encode())

sys.addaudithook(watch)
"""


@dataclass(frozen=True)
class Watched:
    """A lab in a process of its own."""

    lab: Lab
    token: str
    process: int
    folder: Path

    @property
    def notes(self) -> list[str]:
        """Everything it did that it should not."""
        said = (self.folder / "said").read_text().splitlines()
        troubles = [line for line in said if "Error" in line or line.startswith("ERROR")]
        return (self.folder / "notes").read_text().splitlines() + troubles

    def processes(self) -> int:
        """The server and its workers."""
        return 1 + len(_children(self.process))

    def memory(self) -> int:
        """Bytes that the server and its workers hold."""
        return sum(_resident(process) for process in [self.process, *_children(self.process)])


def _children(process: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _resident(process: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """`avow lab` with this folder as its home, its place and its temporary folder."""
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(_WATCH)
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "watch"), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "AVOW_WATCHED": str(folder),
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", "avow", "lab", "--no-open", "--json"]
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(
            command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=said, text=True
        ) as started,
    ):
        try:
            assert started.stdout is not None
            address = json.loads(started.stdout.readline())["address"]
            lab = Lab(int(address.rpartition(":")[2].strip("/")))
            found = re.search(rb'avow-token" content="([^"]+)', lab.get("/").body)
            assert found is not None
            yield Watched(lab, found[1].decode(), started.pid, folder)
        finally:
            started.terminate()
