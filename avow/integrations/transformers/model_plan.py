"""A plan for a whole model: what each head of each layer is asked, and the model it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.errors import AvowError, FileError
from avow.integrations.transformers.setting import Setting

FORMAT = "avow plan 1"


@dataclass(frozen=True)
class ModelPlan:
    """How each head of each attention layer attends; `fingerprint` is that of the model it was made for."""

    model: str
    fingerprint: str
    tol: float
    layers: Mapping[str, tuple[Setting, ...]]

    @property
    def changed(self) -> int:
        """How many heads may answer with an error."""
        return sum(setting.tol is not None for heads in self.layers.values() for setting in heads)

    @property
    def heads(self) -> int:
        return sum(len(heads) for heads in self.layers.values())

    def to_json(self) -> str:
        """The plan as its file has it, a line for each head."""
        named = ("format", FORMAT), ("model", self.model), ("fingerprint", self.fingerprint), ("tol", self.tol)
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in named]
        layers = []
        for name, heads in self.layers.items():
            listed = ",\n".join(f"   {json.dumps(_plain(setting))}" for setting in heads)
            layers.append(f"  {json.dumps(name)}: [\n{listed}\n  ]")
        return "\n".join(["{", *lines, ' "layers": {', ",\n".join(layers), " }", "}", ""])

    @staticmethod
    def from_json(text: str) -> ModelPlan:
        """The plan that `to_json` wrote."""
        plain = json.loads(text)
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, not {FORMAT!r}")
        layers = {str(name): tuple(_setting(head) for head in heads) for name, heads in plain["layers"].items()}
        return ModelPlan(str(plain["model"]), str(plain["fingerprint"]), float(plain["tol"]), layers)


def read_plan(path: str | Path) -> ModelPlan:
    """The plan in a file."""
    try:
        return ModelPlan.from_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise FileError("plan", path, "does not exist", "write one with avow profile MODEL --plan") from problem
    except OSError as problem:
        raise FileError("plan", path, f"cannot be read ({problem.strerror})", "name a readable file") from problem
    except AvowError as problem:
        raise FileError("plan", path, f"asks what cannot be done ({problem})", "profile the model again") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        rule = f"is no plan for a model ({type(problem).__name__}: {problem})"
        raise FileError("plan", path, rule, "write one with avow profile MODEL --plan") from problem


def _plain(setting: Setting) -> dict[str, Any]:
    plain: dict[str, Any] = {"method": setting.method, "tol": setting.tol}
    if setting.confidence is not None:
        plain["confidence"] = setting.confidence
    return plain | ({"parameters": dict(setting.parameters)} if setting.parameters else {})


def _setting(plain: dict[str, Any]) -> Setting:
    known = {"method", "tol", "confidence", "parameters"}
    if unknown := sorted(set(plain) - known):
        raise ValueError(f"it asks a head for {unknown[0]!r}")
    return Setting(plain["tol"], plain["method"], plain.get("confidence"), plain.get("parameters", {}))
