"""Arguments held to the types that a signature declares: one of another type is refused before anything runs.

@declared("copy_query")
def copy_query(keys: Tensor, target: int, eps: float) -> CopyQuery: ...
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from avow.errors import DtypeError, InputError, ParameterError
from avow.parameters import as_float

_C = TypeVar("_C", bound=Callable[..., Any])
# Whole numbers beyond these are sizes of nothing, and torch has no room for them.
_WHOLE = range(-(2**63), 2**63)
_NUMBERS = frozenset((float, Fraction))
# Names that people import, where a class knows itself by another.
_NAMES = {
    nn.Module: "torch.nn.Module",
    torch.optim.Optimizer: "torch.optim.Optimizer",
}


class _Fault(NamedTuple):
    """What does not fit: where it stands in the argument, what it is, what it must be, and a remedy."""

    place: str
    value: object
    words: str
    remedy: str


def declared(owner: str = "") -> Callable[[_C], _C]:
    """A function, or a class, whose arguments are looked at first; `owner` goes before their names in an error.

    A number is whatever `float` makes one of, a whole number whatever can be an index, but neither is True. What is in
    a list, a tuple or a mapping is looked at too. Types that are loaded at use only are left to the function.
    """

    def checked(thing: _C) -> _C:
        if isinstance(thing, type):
            type.__setattr__(thing, "__init__", checked(vars(thing)["__init__"]))
            return thing
        signature = inspect.signature(thing)

        @functools.cache
        def hints() -> dict[str, Any]:
            return {name: _hint(thing, one.annotation) for name, one in signature.parameters.items()}

        @functools.wraps(thing)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                given = signature.bind(*arguments, **options).arguments
            except TypeError:
                return thing(*arguments, **options)  # Python's own words for what is missing
            for name, value in given.items():
                parameter = signature.parameters[name]
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or value is parameter.default:
                    continue
                if fault := _fault(hints()[name], value):
                    raise _refusal(f"{owner}: {name}" if owner else name, parameter, fault)
            return thing(*arguments, **options)

        return typing.cast("_C", run)

    return checked


def _hint(function: Callable[..., Any], annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    written = inspect.unwrap(function)  # under other decorators, where its names are known
    try:
        return eval(annotation, written.__globals__) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _refusal(name: str, parameter: inspect.Parameter, fault: _Fault) -> InputError:
    value, default = fault.value, parameter.default
    plain = value is None or isinstance(value, str | bytes | numbers.Number | list | tuple | dict)
    shown = repr(value) if plain else type(value).__name__
    shown = shown if len(shown) <= 60 else type(value).__name__
    remedy = fault.remedy
    if isinstance(default, bool | int | float | str | torch.dtype):
        remedy = f"the default is {default!r}"
    elif default is not parameter.empty:
        remedy = f"{remedy}, or leave it out"
    kind = DtypeError if fault.words == "a torch.Tensor" else ParameterError
    return kind(name + fault.place, shown, f"must be {fault.words}", remedy)


def _fault(hint: Any, value: Any, place: str = "") -> _Fault | None:
    """What keeps a value from being what a hint says; None where nothing does."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _of_none(inside, value, place)
    if origin is typing.Literal:
        fits, words = isinstance(value, str) and value in inside, f"one of {', '.join(map(str, inside))}"
        return None if fits else _Fault(place, value, words, f'try "{inside[0]}"')
    if origin is collections.abc.Callable:
        return None if callable(value) else _Fault(place, value, "a function", "pass what can be called")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _in_mapping(inside, value, place)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _in_series(inside, value, place)
    kind = getattr(hint, "array_type", hint)  # Float[Tensor, "n d"] is a tensor
    if not isinstance(kind, type) or kind is Any:
        return None
    fits, words, remedy = _of_kind(kind, value)
    return None if fits else _Fault(place, value, words, remedy)


def _of_none(choices: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    """What keeps a value from being any of some things."""
    faults = [_fault(one, value, place) for one in choices if one is not types.NoneType]
    found = [fault for fault in faults if fault is not None]
    if len(found) < len(faults) or (value is None and types.NoneType in choices):
        return None
    # A list with one wrong entry is nearer to the truth than what is no list.
    inside = next((fault for fault in found if fault.place != place), None)
    if _NUMBERS.intersection(choices):
        found = [fault for fault in found if fault.words != "a whole number"]
    words = " or ".join(dict.fromkeys(fault.words for fault in found))
    return inside or _Fault(place, value, words, found[0].remedy)


def _in_mapping(inside: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    if not isinstance(value, Mapping):
        return _Fault(place, value, "a mapping", "pass a dict")
    for key, held in value.items():
        if fault := _fault(inside[0], key, f"{place}: key") or _fault(inside[1], held, f"{place}[{key!r}]"):
            return fault
    return None


def _in_series(inside: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    """How many there must be is left to the function, which knows what they are for."""
    if isinstance(value, Iterator):
        return None  # to look inside would use it up
    unlike = isinstance(value, str | bytes | Mapping) or (isinstance(value, Tensor) and inside[0] not in (int, float))
    try:
        parts = None if unlike else list(value)
    except TypeError:
        parts = None
    if parts is None:
        return _Fault(place, value, "a sequence", "put what there is in a list")
    faults = (_fault(inside[0], part, f"{place}[{i}]") for i, part in enumerate(parts))
    return next((fault for fault in faults if fault), None)


def _of_kind(kind: type, value: Any) -> tuple[bool, str, str]:
    """Whether a value is of a kind, the words for that kind, and a remedy."""
    if kind is Tensor:
        return isinstance(value, Tensor), "a torch.Tensor", "wrap it with torch.as_tensor"
    if kind is bool:
        return isinstance(value, bool), "True or False", "pass one of them"
    if kind is int:
        number = _whole(value)
        if number is None or number in _WHOLE:
            return number is not None, "a whole number", "count in whole numbers"
        return False, "a number of 64 bits", "use a smaller one"
    if kind in _NUMBERS:
        real = isinstance(value, numbers.Real) or not math.isnan(as_float(value))
        return real and not isinstance(value, bool), "a number", "pass one such as 0.5"
    if kind is str:
        return isinstance(value, str), "text", "pass a str"
    if kind is Path:
        return isinstance(value, os.PathLike), "a path", "pass a pathlib.Path"
    if kind is torch.Generator:
        return isinstance(value, kind), "a torch.Generator", "pass torch.Generator().manual_seed(0)"
    if kind.__module__.startswith("avow."):
        name = kind.__name__
        return isinstance(value, kind), f"{'an' if name[0] in 'AEIO' else 'a'} {name}", f"make one with avow's {name}"
    name = _NAMES.get(kind, f"{kind.__module__.split('.')[0]}.{kind.__name__}")
    return isinstance(value, kind), f"a {name}", "pass one"


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        return None
