"""A trained model from its files."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from avow.errors import FileError
from avow.nn import ModelConfig, build
from avow.parameters import declared
from avow.training import checkpoint
from avow.training.vocabulary import Vocabulary


@declared()
def load_model(path: str | Path) -> tuple[nn.Module, Vocabulary]:
    """The model, ready to be asked, and its vocabulary: of a checkpoint, or of the last one of a run's folder."""
    path = last_of(path)
    snapshot = checkpoint.load(path)
    model = build(ModelConfig.of(snapshot.facts["config"]["model"]))
    checkpoint.restore_weights(model, snapshot, path)
    return model.eval(), Vocabulary(snapshot.facts["characters"])


def last_of(path: str | Path) -> Path:
    """The checkpoint that a path means, whole or not: itself, or the last one of a run's folder."""
    path = Path(path)
    if (path / "checkpoints").is_dir():
        there = checkpoint.checkpoints(path / "checkpoints")
        if not there:
            raise FileError("run", path, "has no checkpoint yet", "train it first")
        return there[-1]
    if not (path / "state.json").exists() and not path.name.startswith("step-"):
        rule = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
        raise FileError("run", path, rule, "give the folder of a run, or one of its checkpoints")
    return path
