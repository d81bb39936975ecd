"""A page that answers, waits, fails or ends its own process, as it is told."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, control
from avow.parameters import at_most_characters, param


@dataclass(frozen=True)
class Tried(Inputs):
    how: Literal["answer", "wait", "stay", "raise", "mistake", "end", "infinite", "print", "scatter"] = control(
        "answer", "How"
    )
    number: int = control(1, "A number", (0, 9))
    file: str | None = param(None, at_most_characters(32), "handle of a file")
    # Where a computation leaves a mark: a file when it is through, or a folder to stay in. Tests name their own.
    mark: str | None = param(None, at_most_characters(400), "a path")


def preview(inputs: Tried, tensors: dict[str, Tensor]) -> Answer:
    return {"number": inputs.number, "process": os.getpid(), "held": {name: x.sum() for name, x in tensors.items()}}


def verdict(inputs: Tried, tensors: dict[str, Tensor]) -> Answer:
    match inputs.how:
        case "wait":
            time.sleep(2.0)
            if inputs.mark is not None:
                Path(inputs.mark).touch()
        case "stay":
            _stay(Path(str(inputs.mark)))
        case "raise":
            raise ZeroDivisionError("by a hair")
        case "mistake":
            raise ParameterError("trial: how", "mistake", "must not be asked for", "ask for an answer")
        case "end":
            os._exit(3)
        case "infinite":
            return {"number": float("inf")}
        case "print":
            print("this must not stand between question and answer")
        case "scatter":
            return {"grown": scattered()}
    return {"number": inputs.number, "process": os.getpid()}


def scattered() -> int:
    """Bytes that a process holds when large tensors have come and gone between small ones that stay."""
    del [torch.ones(1 << 20) for _ in range(2)][:]
    before = _resident()
    large = []
    for _ in range(150):
        large.append(torch.ones(1 << 18))  # a megabyte
        _STAYS.append(torch.ones(1 << 13))  # 32 KiB: no hole elsewhere takes it
    large.clear()
    return _resident() - before


_STAYS: list[Tensor] = []


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _stay(folder: Path) -> None:
    """Leave a file named after this process and computation, and go on only when the folder has one named `go`."""
    (folder / f"{os.getpid()}.{time.monotonic_ns()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)


def call(inputs: Tried, tensors: dict[str, Tensor]) -> Answer:
    """What is computed besides: its process remembers how often, and may be told to take its time."""
    _CALLS.append(inputs.number)
    if inputs.how == "wait":
        time.sleep(1.0)
    return {"process": os.getpid(), "calls": len(_CALLS), "threads": torch.get_num_threads()}


_CALLS: list[int] = []


def static() -> Answer:
    """What a copy without a server shows."""
    return {"number": 1, "words": "</script><!--"}


PAGE = Page(
    "trial",
    "Trial",
    "For tests.",
    1,
    Tried,
    preview,
    verdict,
    seconds=60.0,
    calls={"count": call},
    call_seconds=5.0,
    static=static,
)
