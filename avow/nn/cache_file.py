"""A cache in one file that is whole or refused: safetensors with a digest over all it holds, every field checked.

The digest tells accidents, not intent: anyone can compute it. So nothing that a certificate rests on is trusted:
loading sketches the keys again, and checks the other bounds against the keys and values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from avow import file_io
from avow.core import DTYPES, named
from avow.errors import FileError
from avow.numerics.norms import LONGEST_KEY
from avow.numerics.sketch import GROUP, METRIC_RANGE

FORMAT = "avow key-value cache 3"

_AGAIN = "save the cache again"
_SIZES = ("key_heads", "dim", "value_dim", "batch")
# An empty cache has no numbers to show for its sizes, and making it takes memory in proportion to them.
_WIDEST = 1 << 16
_MOST_TOKENS = 1 << 53


@dataclass(frozen=True)
class Saved:
    """What a cache was made with, the tokens it held, and what it had learnt; checked, if it came from a file."""

    made: Mapping[str, int | None]
    """key_heads, dim, value_dim, batch, bits and window."""
    dtype: torch.dtype
    position: int
    base: int
    pause: int
    left: int
    asked: str
    wide: bool
    shortness: float | None
    keys: Float[Tensor, "b g s d"]
    values: Float[Tensor, "b g s e"]
    norms: Float[Tensor, "b g s"]
    """Bounds on the lengths of values; checked against the values when loaded."""
    longest: Float64[Tensor, "b g"]
    metric: Float32[Tensor, "b g d"] | None
    size: Float64[Tensor, "b g"] | None
    spread: Float32[Tensor, "b g d"] | None
    bold: Float64[Tensor, "b g r"] | None


_STATE = ("position", "base", "pause", "left", "asked", "wide", "shortness")
_TENSORS = ("keys", "values", "norms", "longest", "metric", "size", "spread", "bold")


def write(path: Path, saved: Saved) -> None:
    """Write a cache to `path`, all or nothing: an old file stays until the new one is complete."""
    from safetensors.torch import save

    held = {name: x for name in _TENSORS if (x := getattr(saved, name)) is not None}
    content = {name: x.detach().cpu().contiguous() for name, x in held.items()}
    state = {name: getattr(saved, name) for name in _STATE}
    facts = json.dumps({"made": dict(saved.made), "dtype": named(saved.dtype), "state": state}, sort_keys=True)
    file_io.write(path, save(content, {"format": FORMAT, "facts": facts, "digest": _digest(content, facts)}))


def read(path: Path) -> Saved:
    """The cache that `write` put there, once its digest and every field are checked."""
    tensors, about = file_io.load_tensors(path, "path", _AGAIN)
    if about.get("format") != FORMAT:
        other = about.get("format", "").startswith(FORMAT.rstrip("0123456789"))
        remedy = "save the cache again with this version" if other else "name a file that KeyValueCache.save wrote"
        raise FileError("path", path, f"is not an {FORMAT!r}", remedy)
    facts = about.get("facts", "")
    if about.get("digest") != _digest(tensors, facts):
        raise FileError("path", path, "is damaged: its digest is not that of what it holds", _AGAIN)
    try:
        return _checked(json.loads(facts), tensors)
    except (_Misfit, ValueError, RecursionError) as error:
        raise FileError("path", path, f"does not fit together ({str(error)[:200]})", _AGAIN) from error


class _Misfit(Exception):
    """A field is not as any cache would have it; the message says how."""


def _checked(facts: Any, tensors: dict[str, Tensor]) -> Saved:
    _fields("its facts", facts, ("made", "dtype", "state"))
    made, state, kinds = facts["made"], facts["state"], {named(x): x for x in DTYPES}
    _fields("made", made, (*_SIZES, "bits", "window"))
    _fields("state", state, _STATE)
    for name in _SIZES:
        _whole(name, made[name], 1, _MOST_TOKENS)
    if made["bits"] is not None:
        _whole("bits", made["bits"], 1, 8)
    window = made["window"]
    if window is not None:
        _whole("window", window, 1, _MOST_TOKENS)
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in kinds:
        raise _Misfit(f"dtype is not one of {', '.join(kinds)}")
    position, base = state["position"], state["base"]
    _whole("position", position, 0, _MOST_TOKENS)
    _whole("base", base, 0, 0 if window is None else max(0, position - window))
    if base % GROUP:
        raise _Misfit(f"base={base} is not a multiple of {GROUP}")
    _whole("pause", state["pause"], 0, _MOST_TOKENS)
    _whole("left", state["left"], 0, state["pause"])
    if not isinstance(state["asked"], str) or not isinstance(state["wide"], bool):
        raise _Misfit("asked is not a string, or wide not true or false")
    if not (state["shortness"] is None or (type(state["shortness"]) is float and 0 <= state["shortness"] <= 2)):
        raise _Misfit("shortness is not a number from 0 to 2")
    dtype, bits = kinds[facts["dtype"]], made["bits"]
    if position == 0 and max(made["dim"], made["value_dim"]) > _WIDEST:
        raise _Misfit(f"an empty cache is wider than {_WIDEST} dimensions")
    if "metric" in tensors and (bits is None or position < GROUP):
        raise _Misfit("metric is there, and no sketch")
    _check_tensors(tensors, made, dtype, torch.float64 if state["wide"] else torch.float32, position - base)
    held = {name: tensors.get(name) for name in _TENSORS}
    return Saved(made, dtype, **state, **held)  # type: ignore[arg-type]  # all that may not be None is there


def _check_tensors(
    tensors: dict[str, Tensor], made: Mapping[str, int], dtype: torch.dtype, of_norms: torch.dtype, held: int
) -> None:
    """Raise if a tensor is missing, of another shape or type, or holds what no cache does."""
    b, g, d, e = (made[name] for name in ("batch", "key_heads", "dim", "value_dim"))
    shapes = {"keys": (b, g, held, d), "values": (b, g, held, e), "norms": (b, g, held), "longest": (b, g)}
    types = {"keys": dtype, "values": dtype, "norms": of_norms, "longest": torch.float64}
    if "metric" in tensors:
        shapes |= {"metric": (b, g, d), "size": (b, g), "spread": (b, g, d)}
        types |= {"metric": torch.float32, "size": torch.float64, "spread": torch.float32}
    if "bold" in tensors:
        shapes |= {"bold": (b, g, *tensors["bold"].shape[2:3])}
        types |= {"bold": torch.float64}
    _fields("its tensors", tensors, tuple(shapes))
    for name, x in tensors.items():
        if tuple(x.shape) != shapes[name] or x.dtype != types[name]:
            raise _Misfit(f"{name} is {tuple(x.shape)} of {x.dtype}, not {shapes[name]} of {types[name]}")
        if name not in ("keys", "values"):  # whose numbers are looked at when they are appended
            _check_numbers(name, x.double())


def _check_numbers(name: str, x: Float64[Tensor, "*shape"]) -> None:
    low, high = METRIC_RANGE
    rules = {
        "norms": ((x >= 0) & x.isfinite(), "finite and at least 0"),
        "longest": ((x >= 0) & (x <= LONGEST_KEY), f"from 0 to {LONGEST_KEY:g}"),
        "metric": ((x >= low) & (x <= high), f"from {low:g} to {high:g}"),
        "size": ((x > 0) & x.isfinite() & (torch.frexp(x).mantissa == 0.5), "powers of two"),
        "spread": (x > 0, "above 0"),
        "bold": ((x >= 1) & x.isfinite(), "finite and at least 1"),
    }
    valid, words = rules[name]
    if not bool(valid.all()):
        raise _Misfit(f"{name} holds numbers that are not {words}")


def _fields(what: str, given: Any, names: tuple[str, ...]) -> None:
    if not isinstance(given, dict) or given.keys() != set(names):
        raise _Misfit(f"{what} must be {', '.join(names)}")


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise _Misfit(f"{name}={str(value)[:40]} is not a whole number from {least} to {most}")


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(memoryview(x.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]  # it is a buffer
    return digest.hexdigest()
