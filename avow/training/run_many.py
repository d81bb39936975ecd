"""Several runs at once, each in a process of its own; one that fails or is killed leaves the others alone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from avow.errors import FileError, InputError, ParameterError
from avow.training import checkpoint
from avow.training.config import TrainConfig
from avow.training.data import corpus_of
from avow.training.evaluation import Evaluation
from avow.training.knowledge import Arm, Result
from avow.training.run_folder import listening, locked
from avow.training.run_worker import PATIENCE, RESULT
from avow.workers import Process

# Seconds between two looks at whether someone asked to stop.
LOOK = 0.2


@dataclass(frozen=True)
class News:
    """How far an arm is: `found` (it had finished before), `began`, `progress`, then `finished`, `failed` or
    `interrupted`."""

    arm: Arm
    kind: str
    step: int = 0
    steps: int = 0
    loss: float = float("nan")
    why: str = ""

    @property
    def last(self) -> bool:
        return self.kind in ("finished", "failed", "interrupted")


class Interrupted(Exception):
    """Someone asked to stop, by this signal; every arm was saved first, and `resume=True` goes on."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def side_by_side(
    arms: Sequence[Arm],
    folder: str | Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    tell: Callable[[News], None] = lambda news: None,
) -> list[Result]:
    """What came of each arm, in order; `jobs` at once: on a CPU one for each core, on a GPU one, unless told.

    `resume=True` goes on where an earlier call stopped: arms that finished then are not run again. No other experiment
    may write the folder meanwhile.
    """
    folder = Path(folder)
    with locked(folder, "out"):
        return _run_all(arms, folder, resume, jobs, tell)


def _run_all(
    arms: Sequence[Arm], folder: Path, resume: bool, jobs: int | None, tell: Callable[[News], None]
) -> list[Result]:
    results = {arm.name: found for arm in arms if (found := _standing(arm, folder / arm.name, resume)) is not None}
    waiting = [arm for arm in arms if arm.name not in results]
    for arm in arms:
        if arm.name in results:
            tell(News(arm, "found"))
    jobs = jobs or _jobs(waiting)
    heard: queue.Queue[tuple[Worker, str]] = queue.Queue()
    running: list[Worker] = []
    with listening() as interruption, contextlib.ExitStack() as workers:
        while waiting or running:
            if interruption.heard:
                waiting.clear()
                for worker in running:
                    worker.stop()
            while waiting and len(running) < jobs:
                arm = waiting.pop(0)
                running.append(workers.enter_context(Worker(arm, folder / arm.name, _threads(arm, jobs), heard)))
                tell(News(arm, "began"))
            with contextlib.suppress(queue.Empty):
                worker, line = heard.get(timeout=LOOK)
                if worker not in running:
                    continue  # It had said its last.
                news = worker.news(line)
                if news.last:
                    running.remove(worker)
                    found = read_result(news.arm, folder / news.arm.name) if news.kind == "finished" else None
                    results[news.arm.name] = found or Result(news.arm, why=news.why or news.kind)
                tell(news)
        if interruption.heard:
            raise Interrupted(interruption.signal)
    return [results[arm.name] for arm in arms]


def read_result(arm: Arm, folder: Path) -> Result | None:
    """What a finished arm left in its folder; None where it has not finished, or was asked other questions."""
    try:
        left = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if left["questions"] != corpus_of(arm.config.data.corpus).dev_digest:
            return None
        figures = {name: left[name] for name in ("parameters", "seconds", "cpu_seconds")}
        return Result(arm, Evaluation.of(left["evaluation"]), **figures)
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None  # Damaged or absent: its run is at hand, and asked anew.


def _standing(arm: Arm, folder: Path, resume: bool) -> Result | None:
    """The result of an arm that finished earlier; a folder with another run in it is not touched."""
    if not checkpoint.checkpoints(folder / "checkpoints"):
        return None
    if not resume:
        raise FileError("out", folder, "holds a run already", "use --resume to go on with it, or another --out")
    try:
        there = TrainConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"holds a run without its config.json ({error.strerror})"
        raise FileError("out", folder, rule, "remove that folder, or use another --out") from error
    if checkpoint.differences(arm.config, json.loads(there.to_json())):
        raise ParameterError(
            "--resume",
            folder,
            "holds a run of another configuration",
            "repeat what it began with, or use another --out",
        )
    kept = checkpoint.newest(folder / "checkpoints")
    if kept is not None and checkpoint.facts(kept)["data"] != corpus_of(arm.config.data.corpus).digest:
        rule = f"holds other texts than those that the run in {folder} has read"
        raise FileError("corpus", arm.config.data.corpus, rule, "put those back, or use another --out")
    return read_result(arm, folder)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _jobs(arms: Sequence[Arm]) -> int:
    return 1 if _on_gpu(arms) else max(1, min(len(arms), cores()))


def _threads(arm: Arm, jobs: int) -> int:
    """A small model waits for its threads longer than they help it; a large one takes what others leave."""
    return 1 if arm.config.model.width < 256 else max(1, cores() // jobs)


def _on_gpu(arms: Sequence[Arm]) -> bool:
    return torch.cuda.is_available() and any(arm.config.run.device != "cpu" for arm in arms)


class Worker:
    """A process at work on one arm; its lines, and an empty one when it has ended, arrive in the queue."""

    def __init__(self, arm: Arm, folder: Path, threads: int, heard: queue.Queue[tuple[Worker, str]]) -> None:
        self.arm, self._asked = arm, 0.0
        # Ctrl-C must reach it from here alone: a second one would end it before its checkpoint.
        self._process = Process(
            "avow.training.run_worker", lambda line: heard.put((self, line)), threads=threads, apart=True
        )
        self._process.send(
            {"config": json.loads(arm.config.to_json()), "folder": str(folder.absolute()), "threads": threads}
        )

    def news(self, line: str) -> News:
        """What a line says, or its end."""
        if not line:
            return News(self.arm, "failed", why=self._last_words())
        said = json.loads(line)
        return News(self.arm, said.pop("news"), **said)

    def stop(self) -> None:
        """Ask it to save and stop; one that does not in time is ended, and has its checkpoint before."""
        if not self._asked:
            self._asked = time.monotonic()
            self._process.terminate()
        elif time.monotonic() - self._asked > PATIENCE:
            self._process.kill()

    def _last_words(self) -> str:
        code, last = self._process.last_words()
        how = f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        return how + (f": {last}" if last else "")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.end()
