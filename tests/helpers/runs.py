"""A run small enough to be repeated and killed: `python -m tests.helpers.runs FOLDER [flag …]` trains it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from avow.training import TrainConfig, invent, read_config, train, write_corpus

SMALL = ["model.width=16", "model.heads=2", "model.layers=1", "model.block=64", "model.dropout=0.2"]
SMALL += ["data.batch=8", "data.accumulate=2", "schedule.steps=14", "schedule.warmup=3", "optimizer.lr=0.01"]
SMALL += ["run.log_every=3", "run.evaluate_every=5", "run.save_every=4", "run.device=cpu", "data.held_out=0.1"]


def small(folder: Path, *flags: str) -> TrainConfig:
    """A configuration over ten invented people: an epoch ends within a step, and steps within epochs.

    Of their twenty documents, two are held out.
    """
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(invent(people=10, documents=2), corpus)
    return read_config(None, [*SMALL, f"data.sources={corpus}", *flags])


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    done = train(small(folder, *sys.argv[2:]), folder / "run", resume=True)
    print(done.step, done.interrupted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
