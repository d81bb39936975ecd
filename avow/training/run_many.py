"""The arms of an experiment, several at once, each in a process of its own.

An arm that fails or is killed leaves the others alone. An arm trains, answers the dev questions and leaves
`result.json` in its folder. When the process of the experiment ends, so do its arms, with a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avow import file_io
from avow.errors import AvowError, FileError, InputError, ParameterError
from avow.training import checkpoint
from avow.training.config import TrainConfig, read_config
from avow.training.evaluation import Evaluation, evaluate
from avow.training.examples import rewritten
from avow.training.knowledge import Arm, Result
from avow.training.loop import train
from avow.training.run_folder import CONFIG, Progress, listening, locked
from avow.training.sources import read_data
from avow.worker_pool import Handler, Send, Worker, WorkerError

RESULT, SPENT = "result.json", "spent.json"
# Seconds between two checks of whether someone asked to stop.
_POLL_SECONDS = 0.2
# Seconds that an arm which was asked to stop has for its checkpoint.
_CHECKPOINT_SECONDS = 60.0


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
    """What came of each arm, in order; `jobs` at once: by default one for each core on a CPU, one on a GPU.

    `resume=True` goes on where an earlier call stopped: arms that finished then are not run again. No other experiment
    may write the folder meanwhile.
    """
    folder = Path(folder)
    messages: queue.Queue[News] = queue.Queue()
    running: dict[str, Worker] = {}
    deadline: float | None = None
    with locked(folder, "out"), listening() as signals, contextlib.ExitStack() as workers:
        earlier = [(arm, _earlier_result(arm, folder / arm.name, resume)) for arm in arms]
        results = {arm.name: result for arm, result in earlier if result is not None}
        waiting = [arm for arm, result in earlier if result is None]
        for arm, result in earlier:
            if result is not None:
                tell(News(arm, "found"))
        on_gpu = torch.cuda.is_available() and any(arm.config.run.device != "cpu" for arm in waiting)
        jobs = jobs or (1 if on_gpu else max(1, min(len(waiting), cores())))
        while waiting or running:
            if signals and deadline is None:
                deadline = time.monotonic() + _CHECKPOINT_SECONDS
                waiting.clear()
                for worker in running.values():
                    worker.terminate()
            elif deadline is not None and time.monotonic() > deadline:
                for worker in running.values():
                    worker.kill()
            while waiting and len(running) < jobs:
                arm = waiting.pop(0)
                # A small model waits for its threads longer than they help it; a large one takes what others leave.
                threads = 1 if arm.config.model.width < 256 else max(1, cores() // jobs)
                running[arm.name] = _started(arm, folder / arm.name, threads, messages)
                workers.callback(running[arm.name].kill)
                tell(News(arm, "began"))
            with contextlib.suppress(queue.Empty):
                news = messages.get(timeout=_POLL_SECONDS)
                name = news.arm.name
                if name not in running:
                    continue  # It had sent its last message.
                if news.kind != "progress":
                    running.pop(name).kill()
                    result = read_result(news.arm, folder / name) if news.kind == "finished" else None
                    results[name] = result or Result(news.arm, why=news.why or news.kind)
                tell(news)
        if signals:
            raise Interrupted(signals[0])
    return [results[arm.name] for arm in arms]


def _started(arm: Arm, folder: Path, threads: int, messages: queue.Queue[News]) -> Worker:
    """A process that trains one arm; its messages, the last of them that it failed where it died, go to the queue."""
    # Ctrl-C must reach it from here alone: a second one would end it before its checkpoint.
    worker = Worker("avow.training.run_many:handler", threads=threads, own_session=True)
    request = {"config": arm.config.plain(), "folder": str(folder.absolute())}

    def listen() -> None:
        try:
            for line in worker.messages(request):
                messages.put(News(arm, **json.loads(line)))
        except WorkerError as error:
            messages.put(News(arm, "failed", why=f"its process {error}"))
        finally:
            worker.end()

    threading.Thread(target=listen, daemon=True).start()
    return worker


def handler() -> Handler:
    """What a worker does with the configuration and the folder of an arm: it trains and says how far it is."""

    def handle(request: dict[str, Any], content: bytes, send: Send) -> None:
        def tell(**news: Any) -> None:
            send(json.dumps(news).encode())

        def progress(step: Progress) -> None:
            tell(kind="progress", step=step.step, steps=step.steps, loss=step.loss)

        try:
            tell(kind=run_arm(TrainConfig.of(request["config"]), Path(request["folder"]), progress))
        except AvowError as error:
            tell(kind="failed", why=str(error))
        except Exception as error:
            tell(kind="failed", why=f"{type(error).__name__}: {error}")

    return handle


def run_arm(config: TrainConfig, folder: Path, progress: Callable[[Progress], None] | None = None) -> str:
    """Train and judge one arm, from its last checkpoint where there is one; whether it is "finished" or "interrupted".

    The seconds are those of all processes that worked at it and came to an end of their own.
    """
    spent, clock, busy = {"seconds": 0.0, "cpu_seconds": 0.0}, time.perf_counter(), time.process_time()
    with contextlib.suppress(OSError, ValueError):
        spent |= json.loads((folder / SPENT).read_text(encoding="utf-8"))
    # An arm whose experiment was killed may still be writing its last checkpoint.
    done = train(config, folder, resume=True, progress=progress, wait=_CHECKPOINT_SECONDS)
    result: dict[str, Any] = {}
    if not done.interrupted:
        corpus = read_data(config.data.sources)
        evaluation = evaluate(done.model, done.tokenizer, corpus.dev, rewritten(corpus, config.mixture))
        result = {"parameters": sum(p.numel() for p in done.model.parameters())}
        result |= {"questions": corpus.dev_digest, "evaluation": evaluation.plain()}
    spent["seconds"] += time.perf_counter() - clock
    spent["cpu_seconds"] += time.process_time() - busy
    if result:
        file_io.write(folder / RESULT, json.dumps(result | spent, ensure_ascii=False))
    file_io.write(folder / SPENT, json.dumps(spent))
    return "interrupted" if done.interrupted else "finished"


def read_result(arm: Arm, folder: Path) -> Result | None:
    """What a finished arm left in its folder; None where it has not finished, or was asked other questions."""
    try:
        left = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if left["questions"] != read_data(arm.config.data.sources).dev_digest:
            return None
        figures = {name: left[name] for name in ("parameters", "seconds", "cpu_seconds")}
        return Result(arm, Evaluation.of(left["evaluation"]), **figures)
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None  # Damaged or absent: the run itself is there, and is evaluated again.


def _earlier_result(arm: Arm, folder: Path, resume: bool) -> Result | None:
    """The result of an arm that finished earlier; a folder with another run in it is not touched."""
    if not checkpoint.checkpoints(folder / "checkpoints"):
        return None
    if not resume:
        raise FileError("out", folder, "holds a run already", "use --resume to go on with it, or another --out")
    if not (folder / CONFIG).exists():
        raise FileError("out", folder, f"holds a run without its {CONFIG}", "remove that folder, or use another --out")
    if checkpoint.differences(arm.config, read_config(folder / CONFIG).plain()):
        rule, remedy = "holds a run of another configuration", "repeat what it began with, or use another --out"
        raise ParameterError("--resume", folder, rule, remedy)
    newest = checkpoint.newest(folder / "checkpoints")
    trained_on = None if newest is None else checkpoint.described(newest)["facts"]["data"]
    if trained_on not in (None, read_data(arm.config.data.sources).digest):
        rule = f"holds other texts than those that the run in {folder} has read"
        raise FileError("corpus", ", ".join(arm.config.data.sources), rule, "put those back, or use another --out")
    return read_result(arm, folder)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
