"""A plan for a whole model: what each head of each layer is asked, the model it was made for, and putting it in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avow import file_io
from avow.errors import AvowError, FileError, ParameterError
from avow.integrations.transformers.enabling import enable
from avow.integrations.transformers.layers import Layer, mark, pretrained, replaceable
from avow.integrations.transformers.setting import Setting
from avow.parameters import declared

FORMAT = "avow plan 1"
# Evenly spaced numbers of each parameter that are looked at: training or quantising again moves nearly all of them.
_SAMPLE = 64


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


@declared()
def read_plan(path: str | Path) -> ModelPlan:
    """The plan in a file."""
    try:
        return ModelPlan.from_json(file_io.read_document(Path(path)))
    except FileNotFoundError as error:
        raise FileError("plan", path, "does not exist", "write one with avow profile MODEL --plan") from error
    except OSError as error:
        raise FileError("plan", path, f"cannot be read ({error.strerror})", "name a readable file") from error
    except AvowError as error:
        raise FileError("plan", path, f"asks what cannot be done ({error})", "profile the model again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no plan for a model ({type(error).__name__}: {error})"
        raise FileError("plan", path, rule, "write one with avow profile MODEL --plan") from error


@declared()
def apply(model: Any, plan: ModelPlan | str | Path) -> None:
    """Have each head of a model attend as a plan, or the file of one, says; `disable` takes it back.

    A plan that was made for another model is refused, and the model stays as it was. When a text is gone on with,
    layers whose heads are all `sparse` read the tokens that may matter, where their cache finds that this pays; the
    others read all of them, once for all heads. A text that is read at once is answered in the cheapest way that keeps
    the tolerance. Where a head's method cannot prove its tolerance, that answer is exact, and its certificate says so.
    """
    made, model = plan if isinstance(plan, ModelPlan) else read_plan(plan), pretrained(model)
    own = fingerprint(model)
    if own != made.fingerprint:
        rule = f"was made for a model with the fingerprint {made.fingerprint}, and this one's is {own}"
        raise ParameterError("plan", made.model, rule, "run avow profile on this model")
    found = replaceable(model)
    if list(found) != list(made.layers):
        missing = sorted(set(found) ^ set(made.layers)) or list(found)
        rule = f"does not name the model's attention layers ({missing[0]})"
        raise ParameterError("plan", made.model, rule, "run avow profile on this model")
    many = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    for name, heads in made.layers.items():
        if many is not None and len(heads) != many:
            raise ParameterError("heads of the plan", len(heads), f"must be the model's {many} in {name}", "profile it")
    enable(model)
    for name, module in found.items():
        mark(module, Layer(name, Setting(), made.layers[name]))


def fingerprint(model: nn.Module) -> str:
    """Twelve hexadecimal digits that change with any parameter's name, shape, type or sampled numbers."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLE, flat.numel()), dtype=torch.float64).long()
        numbers = flat[places.to(flat.device)].double().cpu().tolist()
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype), numbers)).encode())
    return digest.hexdigest()[:12]


def _plain(setting: Setting) -> dict[str, Any]:
    plain: dict[str, Any] = {"method": setting.method, "tol": setting.tol}
    if setting.confidence is not None:
        plain["confidence"] = setting.confidence
    if setting.rtol is not None:
        plain["rtol"] = setting.rtol
    return plain | ({"parameters": dict(setting.parameters)} if setting.parameters else {})


def _setting(plain: dict[str, Any]) -> Setting:
    known = {"method", "tol", "rtol", "confidence", "parameters"}
    if unknown := sorted(set(plain) - known):
        raise ValueError(f"it asks a head for {unknown[0]!r}")
    more = plain.get("confidence"), plain.get("parameters", {}), plain.get("rtol")
    return Setting(plain["tol"], plain["method"], *more)
