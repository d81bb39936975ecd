"""One arm of an experiment in a process of its own: `python -m avow.training.run_worker`, asked by a line of JSON.

It trains, asks the dev questions, leaves `result.json` in the run's folder, and tells how far it is in lines of JSON.
Whoever started it holds its standard input open: when that ends, so does the arm, with a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from avow import file_io
from avow.errors import AvowError
from avow.training.config import TrainConfig
from avow.training.data import corpus_of
from avow.training.distributed import ranks
from avow.training.evaluation import evaluate
from avow.training.loop import train_here
from avow.training.run_folder import Progress, locked

RESULT, SPENT = "result.json", "spent.json"
# Seconds that an arm which was asked to stop has for its checkpoint.
PATIENCE = 60.0


def serve() -> None:
    """Train the arm that the first line of standard input describes."""
    # What else prints must not mix with the news.
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**words: Any) -> None:
        news.write(json.dumps(words) + "\n")
        news.flush()

    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_heed_the_end, daemon=True).start()
    torch.set_num_threads(asked["threads"])
    try:
        tell(news=run_arm(TrainConfig.of(asked["config"]), Path(asked["folder"]), lambda p: tell(**_short(p))))
    except AvowError as error:
        tell(news="failed", why=str(error))
    except Exception as error:
        tell(news="failed", why=f"{type(error).__name__}: {error}")


def run_arm(config: TrainConfig, folder: Path, progress: Any = None) -> str:
    """Train and judge one arm, from its last checkpoint where there is one; whether it is "finished" or "interrupted".

    The seconds are those of all processes that worked at it and came to an end of their own.
    """
    before, clock, busy = spent(folder), time.perf_counter(), time.process_time()

    def so_far() -> dict[str, float]:
        now = (time.perf_counter() - clock, time.process_time() - busy)
        return dict(zip(before, (a + b for a, b in zip(before.values(), now, strict=True)), strict=True))

    # An arm whose experiment was killed may still be writing its last checkpoint.
    with locked(folder, wait=PATIENCE), ranks(config.run.device, config.run.timeout) as here:
        done = train_here(config, folder, here, resume=True, progress=progress)
        if not done.interrupted:
            corpus = corpus_of(config.data.corpus)
            found = evaluate(done.model, done.vocabulary, corpus.dev)
            result: dict[str, Any] = {"parameters": sum(p.numel() for p in done.model.parameters()), **so_far()}
            result |= {"questions": corpus.dev_digest, "evaluation": found.plain()}
            file_io.write(folder / RESULT, json.dumps(result, ensure_ascii=False))
        file_io.write(folder / SPENT, json.dumps(so_far()))
    return "interrupted" if done.interrupted else "finished"


def spent(folder: Path) -> dict[str, float]:
    """The seconds that earlier processes put into a run."""
    try:
        return {**json.loads((folder / SPENT).read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return {"seconds": 0.0, "cpu_seconds": 0.0}


def _short(progress: Progress) -> dict[str, Any]:
    return {"news": "progress", "step": progress.step, "steps": progress.steps, "loss": progress.loss}


def _heed_the_end() -> None:
    """When nobody listens any more, stop as after SIGTERM: the run is saved and can be resumed."""
    # Past Python's own buffer: its lock, held while waiting here, would keep the process from ending.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    serve()
