"""A model cut over processes: each holds a share of every weight and of its optimiser's state, and writes that.

To those who read a checkpoint it does not matter: names, shapes and numbers are those of an undivided model.
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
from avow.training import checkpoint, checkpoint_shares
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

    def save(self, snapshot: Snapshot, folder: Path) -> Path:
        return checkpoint_shares.save(snapshot, folder, self._here)

    def restore(self, optimiser: Optimizer, state: Mapping[str, Any], path: Path) -> Snapshot:
        if state["format"] == checkpoint.SHARES:
            return checkpoint_shares.load_into(self.model, optimiser, state, path)
        snapshot = checkpoint.read(path, state)
        self._deal(optimiser, snapshot, path)
        return snapshot

    def _deal(self, optimiser: Optimizer, snapshot: Snapshot, path: Path) -> None:
        """Take this process's share of a snapshot that is whole."""
        checkpoint.check_architecture(self.model, {name: tuple(x.shape) for name, x in snapshot.weights.items()}, path)
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
