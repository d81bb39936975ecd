"""A model cut over processes: each holds a share of every weight and of its optimiser's state; files hold the whole.

A checkpoint does not show how the model that wrote it lay: names, shapes and numbers are those of an undivided one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from avow.nn import build
from avow.nn.perceiver import Crossing
from avow.nn.transformer import Block
from avow.training import checkpoint
from avow.training.checkpoint import Snapshot
from avow.training.parallel import Ranks, Whole


class Sharded(Whole):
    """A model of which every process holds a share; the weights of a block are whole while it computes, and no longer.

    Gradients are averaged as those of a replicated model are, and each process is left those of its share.
    """

    def __init__(self, model: nn.Module, here: Ranks) -> None:
        super().__init__(model, here)
        mesh = init_device_mesh(here.device.type, (here.world,))
        for module in model.modules():
            if isinstance(module, Block | Crossing):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def joined(self, model: nn.Module) -> nn.Module:
        return model

    @contextmanager
    def exchanging(self, now: bool) -> Iterator[None]:
        cast(FSDPModule, self.model).set_requires_gradient_sync(now)
        yield

    def clipped(self, longest: float) -> Tensor:
        # Each process knows the length of its share; the sum of their squares is what everyone must clip by.
        return cast(DTensor, super().clipped(longest)).full_tensor()

    def gathered(self, optimiser: Optimizer) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(self.model, options=options)
        described: dict[str, Any] = {"state": {}, "param_groups": optimiser.state_dict()["param_groups"]}
        if optimiser.state:  # Asked before the first step, torch would take one to have an answer.
            found: Any = states.get_optimizer_state_dict(self.model, optimiser, options=options)
            # Told by name; an optimiser by itself counts its parameters from group to group.
            numbers = {name: number for number, name in enumerate(chain(*self._names(optimiser)))}
            described["state"] = {numbers[name]: entries for name, entries in found.get("state", {}).items()}
        return weights, described

    def restore(self, optimiser: Optimizer, snapshot: Snapshot, path: Path) -> None:
        checkpoint.check_architecture(self.model, snapshot, path)
        options = states.StateDictOptions(full_state_dict=True)
        # Tensors are dealt out one by one, so all processes must take them in the same order; files have none.
        weights: dict[str, Any] = {name: snapshot.weights[name] for name in sorted(snapshot.weights)}
        states.set_model_state_dict(self.model, weights, options=options)
        if not snapshot.optimiser["state"]:
            return  # Before the first step there is none, and the schedule brings the rate.
        names = self._names(optimiser)
        flat = list(chain(*names))
        saved: Any = snapshot.optimiser
        by_name: dict[str, Any] = {
            "state": {
                flat[number]: dict(sorted(entries.items())) for number, entries in sorted(saved["state"].items())
            },
            "param_groups": [group | {"params": own} for group, own in zip(saved["param_groups"], names, strict=True)],
        }
        states.set_optimizer_state_dict(self.model, optimiser, by_name, options=options)

    def undivided(self, path: Path) -> nn.Module:
        whole = build(cast(Any, self.model).config)
        checkpoint.restore_weights(whole, checkpoint.load(path), path)
        return whole.to(self._here.device).train(self.model.training)

    def _names(self, optimiser: Optimizer) -> list[list[str]]:
        """The names of the parameters in each of an optimiser's groups."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        return [[known[id(p)] for p in group["params"]] for group in optimiser.param_groups]
