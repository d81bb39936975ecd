"""A cache in one file that is whole or refused: safetensors with a digest over all it holds, every field checked.

The digest tells accidents, not intent: anyone can compute it. So nothing that a certificate rests on is trusted:
loading sketches the keys again, and checks the other bounds against the keys and values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow import file_io
from avow.core import DTYPES, dtype_name
from avow.errors import FileError
from avow.extras import require
from avow.numerics.norms import LONGEST_KEY
from avow.numerics.sketch import GROUP, METRIC_RANGE

FORMAT = "avow key-value cache 3"

SIZES = ("key_heads", "dim", "value_dim", "batch", "bits", "window")
STATE = ("position", "base", "asked", "wide", "shortness")
_AGAIN = "save the cache again"
# An empty cache has no numbers to show for its sizes, and making it takes memory in proportion to them.
_WIDEST = 1 << 16
_MOST_TOKENS = 1 << 53
_LOW, _HIGH = METRIC_RANGE
# What the numbers of each tensor must be; those of keys and values are looked at when they are appended.
_RULES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norms": (lambda x: (x >= 0) & x.isfinite(), "finite and at least 0"),
    "longest": (lambda x: (x >= 0) & (x <= LONGEST_KEY), f"from 0 to {LONGEST_KEY:g}"),
    "metric": (lambda x: (x >= _LOW) & (x <= _HIGH), f"from {_LOW:g} to {_HIGH:g}"),
    "size": (lambda x: (x > 0) & x.isfinite() & (torch.frexp(x).mantissa == 0.5), "powers of two"),
    "spread": (lambda x: x > 0, "above 0"),
    "bold": (lambda x: (x >= 0) & x.isfinite(), "finite and at least 0"),
}


class Saved(NamedTuple):
    """What a cache was made with, what it had learnt, and the tensors it held; checked, if it came from a file.

    Tensors are `keys`, `values`, `norms` (bounds on the lengths of values), `longest` (of the keys); `metric`, `size`
    and `spread` if there is a sketch; and perhaps `bold`.
    """

    sizes: Mapping[str, Any]
    dtype: torch.dtype
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write(path: Path, saved: Saved) -> None:
    """Write a cache to `path`, all or nothing: an old file stays until the new one is complete."""
    require("safetensors", purpose="to save a cache")
    from safetensors.torch import save

    content = {name: x.detach().cpu().contiguous() for name, x in saved.tensors.items()}
    facts = json.dumps({"made": saved.sizes, "dtype": dtype_name(saved.dtype), "state": saved.state}, sort_keys=True)
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
    _check_names("its facts", facts, ("made", "dtype", "state"))
    sizes, state, kinds = facts["made"], facts["state"], {dtype_name(x): x for x in DTYPES}
    _check_names("made", sizes, SIZES)
    _check_names("state", state, STATE)
    for name in SIZES:
        if sizes[name] is not None or name not in ("bits", "window"):
            _check_whole(name, sizes[name], 1, 8 if name == "bits" else _MOST_TOKENS)
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in kinds:
        raise _Misfit(f"dtype is not one of {', '.join(kinds)}")
    position, base, window = state["position"], state["base"], sizes["window"]
    _check_whole("position", position, 0, _MOST_TOKENS)
    _check_whole("base", base, 0, 0 if window is None else max(0, position - window))
    if base % GROUP:
        raise _Misfit(f"base={base} is not a multiple of {GROUP}")
    if not isinstance(state["asked"], str) or not isinstance(state["wide"], bool):
        raise _Misfit("asked is not a string, or wide not true or false")
    if not (state["shortness"] is None or (type(state["shortness"]) is float and 0 <= state["shortness"] <= 2)):
        raise _Misfit("shortness is not a number from 0 to 2")
    if position == 0 and max(sizes["dim"], sizes["value_dim"]) > _WIDEST:
        raise _Misfit(f"an empty cache is wider than {_WIDEST} dimensions")
    if "metric" in tensors and (sizes["bits"] is None or position < GROUP):
        raise _Misfit("metric is there, and no sketch")
    dtype, of_norms = kinds[facts["dtype"]], torch.float64 if state["wide"] else torch.float32
    _check_tensors(tensors, sizes, dtype, of_norms, position - base)
    return Saved(sizes, dtype, state, tensors)


def _check_tensors(
    tensors: dict[str, Tensor], sizes: Mapping[str, int], dtype: torch.dtype, of_norms: torch.dtype, held: int
) -> None:
    """Raise if a tensor is missing, of another shape or type, or holds what no cache does."""
    b, g, d, e = (sizes[name] for name in ("batch", "key_heads", "dim", "value_dim"))
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "keys": ((b, g, held, d), dtype),
        "values": ((b, g, held, e), dtype),
        "norms": ((b, g, held), of_norms),
        "longest": ((b, g), torch.float64),
    }
    if "metric" in tensors:
        forms |= {"metric": ((b, g, d), torch.float32), "size": ((b, g), torch.float64)}
        forms |= {"spread": ((b, g, d), torch.float32)}
    if "bold" in tensors:
        forms |= {"bold": ((b, g, *tensors["bold"].shape[2:3]), torch.float64)}
    _check_names("its tensors", tensors, tuple(forms))
    for name, x in tensors.items():
        shape, kind = forms[name]
        if tuple(x.shape) != shape or x.dtype != kind:
            raise _Misfit(f"{name} is {tuple(x.shape)} of {x.dtype}, not {shape} of {kind}")
        if name in _RULES:
            holds, words = _RULES[name]
            if not bool(holds(x.double()).all()):
                raise _Misfit(f"{name} holds numbers that are not {words}")


def _check_names(what: str, given: Any, names: tuple[str, ...]) -> None:
    if not isinstance(given, dict) or given.keys() != set(names):
        raise _Misfit(f"{what} must be {', '.join(names)}")


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise _Misfit(f"{name}={str(value)[:40]} is not a whole number from {least} to {most}")


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(memoryview(x.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]  # it is a buffer
    return digest.hexdigest()
