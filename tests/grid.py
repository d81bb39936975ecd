"""One of several processes that train together: `torchrun --nproc-per-node=4 -m tests.grid FOLDER NAME FLAGS …`.

Each pair of NAME and FLAGS is a run, left in FOLDER/NAME: a small one, with fields of a configuration parted by commas.
A run that is there already goes on. Where a name ends in `misplaced`, all parts of a sequence begin at its first place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from avow.errors import AvowError
from avow.nn.shard import Shard
from avow.training import TrainConfig, loop, train
from avow.training.context import Grid
from tests.runs import small

# As one process would train them: without dropout, which differs between processes. Sequences are of odd lengths.
SAME = ["model.dropout=0.0", "schedule.steps=6", "run.log_every=1", "run.save_every=3", "model.layers=2"]
SAME += ["model.block=61", "run.timeout=60"]


class Misplaced(Grid):
    """A grid that forgets where parts begin."""

    def cut(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Shard | None]:
        ids, targets, shard = super().cut(ids, targets)
        return ids, targets, None if shard is None else Shard(0, shard.group)


def config_of(folder: Path, flags: str) -> TrainConfig:
    return small(folder, *SAME, *filter(None, flags.split(",")))


def main() -> int:
    torch.set_num_threads(1)
    folder, pairs = Path(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    for name, flags in pairs:
        vars(loop)["Grid"] = Misplaced if name.endswith("misplaced") else Grid
        try:
            train(config_of(folder, flags), folder / name, resume=True)
        except AvowError as problem:
            (folder / f"{name}.{os.environ['RANK']}.txt").write_text(str(problem), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
