"""What four processes do together, and then two, from where the four were: `python -m tests.helpers.grid FOLDER`."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from avow.errors import AvowError
from avow.nn.attention import Shard
from avow.training import checkpoint, loop, train
from avow.training.distributed import Grid
from tests.helpers import lose
from tests.helpers.launch import launched
from tests.helpers.runs import small

# As one process would train it: without dropout, which differs between processes. The longest sequences are odd.
SAME = ["model.dropout=0.0", "schedule.steps=6", "run.log_every=1", "run.save_every=3", "model.layers=2"]
SAME += ["model.block=61", "run.timeout=60"]
ROTARY = [*SAME, "model.positions=rotary", "model.key_heads=1"]
# The run that is left in peace here, and loses a process elsewhere.
STEPS = 16

FOUR = {
    "two_by_two": [*SAME, "run.sequence=2"],
    "four_rotary": [*ROTARY, "run.sequence=4", "run.parallel=sharded"],
    "three": [*SAME, "run.sequence=3"],
}
TWO = {
    "two": [*SAME, "run.sequence=2"],
    "misplaced": [*SAME, "run.sequence=2"],
    "four_to_two_rotary": [*ROTARY, "run.sequence=2", "run.parallel=sharded"],
    "in_peace": [*lose.flags(2, STEPS)],
    "full": [*SAME, "run.parallel=sharded"],
}


class Misplaced(Grid):
    """A grid that forgets where parts begin."""

    def cut(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Shard | None]:
        ids, targets, shard = super().cut(ids, targets)
        return ids, targets, None if shard is None else Shard(0, shard.group)


def work(folder: Path, runs: dict[str, list[str]]) -> None:
    """Train one after the other, each to its end or to an error that is kept."""
    torch.set_num_threads(1)
    for name, flags in runs.items():
        vars(loop)["Grid"] = Misplaced if name == "misplaced" else Grid
        if name == "full" and os.environ["RANK"] == "1":
            # The kernel refuses this process to write past this, as a full disk does.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            train(small(folder, *flags), folder / name, resume=True)
        except AvowError as error:
            (folder / f"{name}.{os.environ['RANK']}.txt").write_text(str(error), encoding="utf-8")


def halfway(folder: Path, name: str, copy: str) -> None:
    """A copy of a run as it was before its second half."""
    shutil.copytree(folder / name, folder / copy)
    _, last = checkpoint.checkpoints(folder / copy / "checkpoints")
    shutil.rmtree(last)


def main() -> int:
    folder = Path(sys.argv[1])
    small(folder)  # The corpus, before several processes want to make it.
    launched(work, folder, FOUR, ranks=4, words=folder / "words")
    halfway(folder, "four_rotary", "four_to_two_rotary")
    halfway(folder, "four_rotary", "four_to_one_rotary")
    launched(work, folder, TWO, ranks=2, words=folder / "words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
