"""One of two processes that train together: `torchrun --nproc-per-node=2 -m tests.helpers.two FOLDER ACT …`.

compare          of each kind: the gradients of a first step, and a run to hold against one process's
whole            of each kind: the run to interrupt, uninterrupted
stop:KIND:NAME   the same run until torchrun, in the middle of it, gets the signal of that name
resume:KIND      what was stopped, to its end
cross:KIND       a copy of what was stopped, to its end as the other kind
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from avow.training import Progress, TrainConfig, train
from avow.training.distributed import Ranks, ranks
from avow.training.loop import Trainer
from tests.helpers.runs import small

KINDS = ("replicated", "sharded")
# As one process would train them: without dropout, which differs between processes.
EVEN = ("model.dropout=0.0", "schedule.steps=6", "run.log_every=1", "model.layers=2")
# Processes ask each other at step 10 whether to stop; no scheduled save falls there.
STOPPED = ("schedule.steps=16", "run.save_every=7", "model.layers=2")


def gradients(trainer: Trainer) -> list[Tensor]:
    """Of the first step, undivided."""
    trainer.model.train()
    trainer.backward(trainer.batches[0])
    found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return [x.full_tensor() if isinstance(x, DTensor) else x.clone() for x in found]


def kept(numbers: list[Tensor]) -> float:
    """The share of some tensors that this process holds."""
    here = sum(x.to_local().numel() if isinstance(x, DTensor) else x.numel() for x in numbers)
    return here / sum(x.numel() for x in numbers)


def compared(config: TrainConfig, folder: Path) -> dict[str, object]:
    """What the test compares with a single process, from a run left in `folder`."""
    with ranks("cpu") as here:
        first = Trainer(config, folder.with_name("unused"), here)
        found: dict[str, object] = {"gradients": gradients(first)}
        # As if a process took its part of the mean for the mean of its own examples.
        first.here = Ranks(here.rank, 1, here.device)
        found["wrong"] = gradients(first)
        trainer = Trainer(config, folder, here)
        done = trainer.run()
        states = [entries["exp_avg"] for entries in trainer.optimiser.state.values()]
        found["kept"] = kept(list(trainer.model.parameters())), kept(states)
        ids = torch.arange(2, 22)[None]
        found["logits"] = trainer.model.eval()(ids).detach()
        found["returned"] = done.model.eval()(ids).detach()
    return found


def telling_torchrun(kind: signal.Signals) -> Callable[[Progress], None]:
    """A progress callback that sends torchrun a signal at step 6, and goes on when it came back to this process."""

    def callback(progress: Progress) -> None:
        if progress.step == 6:
            listener = signal.getsignal(kind)
            os.kill(os.getppid(), kind)
            while signal.getsignal(kind) is listener:  # The first signal heard, the usual handler is back.
                time.sleep(0.01)

    return callback


def act(folder: Path, name: str, *details: str) -> None:
    kinds = details[:1] or KINDS
    for kind in kinds:
        even, stopped = (small(folder, *flags, f"run.parallel={kind}") for flags in (EVEN, STOPPED))
        if name == "compare":
            found = compared(even, folder / kind / "even")
            if os.environ["RANK"] == "0":
                torch.save(found, folder / f"{kind}.pt")
        elif name == "whole":
            train(stopped, folder / kind / "whole")
        elif name == "stop":
            train(stopped, folder / kind / "half", progress=telling_torchrun(signal.Signals[details[1]]))
        elif name == "resume":
            train(stopped, folder / kind / "half", resume=True)
        else:
            (other,) = {*KINDS} - {kind}
            train(small(folder, *STOPPED, f"run.parallel={other}"), folder / kind / "crossed", resume=True)


def main() -> int:
    torch.set_num_threads(1)
    for asked in sys.argv[2:]:
        act(Path(sys.argv[1]), *asked.split(":"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
