"""One of two processes that train together; `tests/test_train_loop.py` starts them with torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from avow.training.loop import Trainer
from avow.training.parallel import ranks
from tests.runs import small


def main() -> int:
    folder = Path(sys.argv[1])
    config = small(folder, *sys.argv[2:])
    alone = torch.load(folder / "gradients.pt")
    with ranks("cpu") as here:
        trainer = Trainer(config, folder / "two", here)
        trainer.model.train()
        trainer.backward(trainer.batches.at(0))
        gap = max(float((p.grad - x).abs().max()) for p, x in zip(trainer.model.parameters(), alone, strict=True))
        with trainer.callable.no_sync():
            trainer.backward(trainer.batches.at(0))
        own = max(float((p.grad - x).abs().max()) for p, x in zip(trainer.model.parameters(), alone, strict=True))
        trainer.running.zero_()
        trainer.counted = 0
        trainer.run()
        if here.rank == 0:
            print(gap, own, flush=True)
    return 0


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    sys.exit(main())
