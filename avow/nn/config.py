"""What a model is made of, as one frozen record that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from avow.errors import ParameterError
from avow.methods import method_named
from avow.parameters import check_parameters, declared

Positions = Literal["learned", "sinusoidal", "rotary"]

_COUNTS = ("vocabulary", "block", "layers", "heads", "width", "latents", "latent_layers")


@dataclass(frozen=True)
class ModelConfig:
    """A language model's sizes, its attention and its positions; checked when made.

    `attention` is the name of a method, with its parameters in `settings`, or "latent" for a Perceiver, which alone
    reads `latents` and `latent_layers`.

    >>> config = ModelConfig(vocabulary=256, attention="separable", settings={"temperature": 2.0})
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    vocabulary: int
    block: int = 128
    layers: int = 4
    heads: int = 8
    key_heads: int | None = None
    width: int = 256
    attention: str = "exact"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    positions: Positions = "learned"
    dropout: float = 0.1
    latents: int = 32
    latent_layers: int = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        check_heads(self.width, self.heads, self.key_heads)
        check_dropout(self.dropout)
        known = get_args(Positions)
        if self.positions not in known:
            rule = f"must be one of {', '.join(known)}"
            raise ParameterError("positions", repr(self.positions), rule, 'the default is "learned"')
        if self.positions == "sinusoidal" and self.width % 2:
            rule = "must be even for sinusoidal positions, which come in pairs of sine and cosine"
            raise ParameterError("width", self.width, rule, f"use width={self.width + 1} or learned positions")
        if self.positions == "rotary" and self.width // self.heads % 2:
            rule = f"gives {self.heads} heads an odd dimension, and rotary positions turn pairs of features"
            raise ParameterError("width", self.width, rule, f"use a width divisible by {2 * self.heads}")
        if not isinstance(self.settings, Mapping):
            rule = "must map names of parameters to values"
            raise ParameterError("settings", repr(self.settings), rule, 'try {"features": 256}')
        object.__setattr__(self, "settings", dict(self.settings))  # the caller's own may change later
        check_parameters(self.attention, method_named(self.attention), self.settings)

    def to_json(self) -> str:
        """Every field, by name."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    @declared()
    def from_json(cls, text: str) -> ModelConfig:
        """The config that `to_json` wrote."""
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ParameterError("config", repr(text[:40]), f"is not JSON: {error}", "write it with to_json") from None
        if not isinstance(given, dict):
            raise ParameterError("config", repr(given)[:40], "must be a JSON object", 'try {"vocabulary": 256}')
        return cls.of(given)

    @classmethod
    @declared()
    def of(cls, given: Mapping[str, Any]) -> ModelConfig:
        """The config of some fields, the others as usual."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ParameterError(f"config: {name}", repr(value), "is not a field", f"fields: {', '.join(known)}")
        if "vocabulary" not in given:
            raise ParameterError("config: vocabulary", None, "must be given", "say how many characters there are")
        return cls(**given)


def check_count(name: str, value: object, usual: int = 8) -> None:
    """Raise unless this is a whole number of at least one; `usual` is one to try."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParameterError(name, repr(value), "must be a whole number of at least 1", f"try {name}={usual}")


def check_heads(width: int, heads: int, key_heads: int | None) -> None:
    """Raise unless the heads share the width evenly, and query heads the key heads."""
    check_count("width", width)
    check_count("heads", heads)
    if width % heads:
        rule = f"must be divisible by heads={heads}"
        raise ParameterError("width", width, rule, f"use width={-(-width // heads) * heads}")
    if key_heads is not None:
        check_count("key_heads", key_heads)
        if heads % key_heads:
            raise ParameterError("key_heads", key_heads, f"must divide heads={heads}", "use 1, or heads itself")


def check_dropout(dropout: object) -> None:
    """Raise unless this is a share of numbers that may be dropped: all of them may not."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ParameterError("dropout", repr(dropout), "must be at least 0 and below 1", "try dropout=0.1")
