"""What a model is made of, as one frozen record that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from avow.errors import ParameterError, value_text
from avow.methods import method_named
from avow.parameters import check_count, check_key_heads, check_parameters, declared

Positions = Literal["learned", "sinusoidal", "rotary"]

_COUNTS = ("vocabulary", "block", "layers", "heads", "width", "latents", "latent_layers")


@dataclass(frozen=True)
class ModelConfig:
    """A language model's sizes, its attention and its positions; checked when made.

    `attention` is the name of a method, with its parameters in `settings`, or "latent" for a Perceiver, which alone
    reads `latents` and `latent_layers`.

    >>> from avow.nn import ModelConfig
    >>> config = ModelConfig(vocabulary=256, attention="separable", settings={"temperature": 2.0})
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    vocabulary: int = field(metadata={"help": "tokens it knows, padding and mask included; comes from the data"})
    block: int = field(default=128, metadata={"help": "tokens it reads at once: the context length"})
    layers: int = field(default=4, metadata={"help": "layers, each of attention and an MLP"})
    heads: int = field(default=8, metadata={"help": "attention heads of a layer"})
    key_heads: int | None = field(default=None, metadata={"help": "heads of keys and values; None: as many as heads"})
    width: int = field(default=256, metadata={"help": "features of a token between layers: d_model, n_embd"})
    attention: str = field(default="exact", metadata={"help": "a method of attention; latent: a Perceiver"})
    settings: Mapping[str, Any] = field(
        default_factory=dict, hash=False, metadata={"help": 'parameters of the method, such as {"features": 256}'}
    )
    positions: Positions = field(default="learned", metadata={"help": "learned, sinusoidal or rotary"})
    dropout: float = field(default=0.1, metadata={"help": "share of numbers dropped in training, from 0 to below 1"})
    latents: int = field(default=32, metadata={"help": "latents of a Perceiver"})
    latent_layers: int = field(default=1, metadata={"help": "layers among the latents of a Perceiver"})

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        check_heads(self.width, self.heads, self.key_heads)
        check_dropout(self.dropout)
        known = get_args(Positions)
        if self.positions not in known:
            rule = f"must be one of {', '.join(known)}"
            raise ParameterError("positions", value_text(self.positions), rule, 'the default is "learned"')
        if self.positions == "sinusoidal" and self.width % 2:
            rule = "must be even for sinusoidal positions, which come in pairs of sine and cosine"
            raise ParameterError("width", self.width, rule, f"use width={self.width + 1} or learned positions")
        if self.positions == "rotary" and self.width // self.heads % 2:
            rule = f"gives {self.heads} heads an odd dimension, and rotary positions turn pairs of features"
            raise ParameterError("width", self.width, rule, f"use a width divisible by {2 * self.heads}")
        if not isinstance(self.settings, Mapping):
            rule = "must map names of parameters to values"
            raise ParameterError("settings", value_text(self.settings), rule, 'try {"features": 256}')
        object.__setattr__(self, "settings", dict(self.settings))  # the caller's own may change later
        check_parameters(self.attention, method_named(self.attention), self.settings)

    def to_json(self) -> str:
        """Every field, by name.

        Returns:
            The JSON.
        """
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    @declared()
    def from_json(cls, text: str) -> ModelConfig:
        """The config that `to_json` wrote.

        Args:
            text: the JSON.

        Returns:
            The config.

        Raises:
            ParameterError: this is not JSON, or not a config.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ParameterError("config", repr(text[:40]), f"is not JSON: {error}", "write it with to_json") from None
        if not isinstance(given, dict):
            raise ParameterError("config", value_text(given)[:40], "must be a JSON object", 'try {"vocabulary": 256}')
        return cls.of(given)

    @classmethod
    @declared()
    def of(cls, given: Mapping[str, Any]) -> ModelConfig:
        """The config of some fields, the others as usual.

        Args:
            given: fields by name; `vocabulary` must be among them.

        Returns:
            The config.

        Raises:
            ParameterError: a name is not a field, or a value does not fit.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ParameterError(
                    f"config: {name}", value_text(value), "is not a field", f"fields: {', '.join(known)}"
                )
        if "vocabulary" not in given:
            raise ParameterError("config: vocabulary", None, "must be given", "say how many characters there are")
        return cls(**given)


def check_heads(width: int, heads: int, key_heads: int | None) -> None:
    """Raise unless the heads share the width evenly, and query heads the key heads."""
    check_count("width", width)
    check_count("heads", heads)
    if width % heads:
        rule = f"must be divisible by heads={heads}"
        raise ParameterError("width", width, rule, f"use width={-(-width // heads) * heads}")
    if key_heads is not None:
        check_key_heads(heads, key_heads)


def check_dropout(dropout: object) -> None:
    """Raise unless this is a share of numbers that may be dropped: all of them may not."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ParameterError("dropout", value_text(dropout), "must be at least 0 and below 1", "try dropout=0.1")
