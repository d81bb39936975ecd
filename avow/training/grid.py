"""Processes as a grid: its rows read examples of their own, and the processes of a row hold each sequence in parts.

Rank r stands in row r // sequence, at place r % sequence: neighbours in a row are neighbours in `torchrun`, where links
are fast. Every process holds its part of each sequence, reads from the parts before it, and adds the losses of its own
targets; weights and gradients know nothing of the grid, which is why both are shared among all processes as ever.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from avow.errors import ParameterError, ShapeError
from avow.nn.attention import Shard
from avow.training.parallel import Ranks


class Grid:
    """Where this process stands: in `row` of `rows`, at `place` of `places`, its `mesh` of data × sequence."""

    def __init__(self, here: Ranks, sequence: int) -> None:
        if here.world % sequence:
            fits = ", ".join(str(n) for n in range(1, here.world + 1) if here.world % n == 0)
            rule = f"does not divide the {here.world} processes of this run"
            raise ParameterError(
                "run: sequence", sequence, rule, f"use one of {fits}, or start a multiple of {sequence}"
            )
        self.rows, self.places = here.world // sequence, sequence
        self.row, self.place = divmod(here.rank, sequence)
        self.mesh: DeviceMesh | None = None
        if sequence > 1:
            self.mesh = _mesh(torch.arange(here.world).view(self.rows, sequence), here)

    def cut(
        self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"]
    ) -> tuple[Int[Tensor, "b part"], Int[Tensor, "b part"], Shard | None]:
        """This process's part of some sequences, and where it lies; parts differ in length by one at most."""
        if self.mesh is None:
            return ids, targets, None
        length = ids.shape[1]
        if length < self.places:
            rule = f"is fewer tokens than the {self.places} processes that share a sequence"
            raise ShapeError("length", length, rule, f"pad it to {self.places}, or lower run.sequence")
        begin, end = (place * length // self.places for place in (self.place, self.place + 1))
        return ids[:, begin:end], targets[:, begin:end], Shard(begin, self.mesh.get_group("sequence"))


def _mesh(numbers: Int[Tensor, "rows places"], here: Ranks) -> DeviceMesh:
    # Groups that a mesh makes by itself wait as long as torch likes, and not as long as the run was told.
    wait = timedelta(seconds=here.wait_for)
    lines = (numbers.T, numbers)
    groups = [dist.new_subgroups_by_enumeration(line.tolist(), timeout=wait)[0] for line in lines]
    return DeviceMesh.from_group(groups, here.device.type, mesh=numbers, mesh_dim_names=("data", "sequence"))
