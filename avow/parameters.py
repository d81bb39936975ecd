"""What an argument may be, declared once: in a field, `rank: int = param(64, at_least(1), "landmarks per head")`, or by
the types of a function's signature, `@declared("copy_query")`.

A field's declaration gives the check, the message, the command line's help and the lab's form. A signature's gives the
check and the message, before anything runs.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from avow.errors import DtypeError, InputError, ParameterError, value_text

# Names that other libraries have for the same.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "embed_dim": ("width",),
    "d_model": ("width",),
    "hidden_size": ("width",),
    "num_heads": ("heads",),
    "n_heads": ("heads",),
    "num_attention_heads": ("heads",),
    "kv_heads": ("key_heads",),
    "num_kv_heads": ("key_heads",),
    "num_key_value_heads": ("key_heads",),
    "head_dim": ("dim",),
    **dict.fromkeys(("context", "context_length", "n_ctx", "seq_len", "sequence_length"), ("tokens", "length")),
    "length": ("tokens",),
    "tokens": ("length",),
    "batch_size": ("batch",),
    **dict.fromkeys(("out", "output"), ("plan", "save", "export", "html", "png")),
    "is_causal": ("causal",),
    "attn_mask": ("mask",),
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "float": ("float32",),
    "fp64": ("float64",),
    "double": ("float64",),
    "softmax": ("exact",),
    "sdpa": ("exact",),
    "full": ("exact",),
    "linear": ("separable", "random_features"),
    "efficient": ("separable",),
    "performer": ("random_features",),
    "favor+": ("random_features",),
    "rfa": ("random_features",),
    "taylor": ("polynomial",),
    "nystrom": ("low_rank",),
    "nystromformer": ("low_rank",),
    "linformer": ("low_rank",),
    "perceiver": ("latent",),
    "topk": ("sparse",),
}
_C = TypeVar("_C", bound=Callable[..., Any])
_NUMBERS = frozenset((float, Fraction))


@dataclass(frozen=True)
class Rule:
    """A condition on a value, and the words for it; a form needs its choices or its ends too."""

    words: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf


def at_least(low: float) -> Rule:
    return Rule(f"must be at least {low:g}", lambda value: value >= low)


def between(low: float, high: float) -> Rule:
    """Strictly above `low`, at most `high`."""
    most = f" and at most {high:g}" if math.isfinite(high) else ""
    return Rule(f"must be above {low:g}{most}", lambda value: low < value <= high)


def from_to(low: float, high: float) -> Rule:
    return Rule(f"must be from {low} to {high}", lambda value: low <= value <= high, low=low, high=high)


def at_most_characters(count: int) -> Rule:
    return Rule(f"must have at most {count} characters", lambda value: len(value) <= count, high=count)


def one_of(*choices: str) -> Rule:
    return Rule(f"must be one of {', '.join(choices)}", lambda value: value in choices, choices)


def anything() -> Rule:
    return Rule("may be anything of its type", lambda value: True)


def check_count(name: str, value: object, usual: int = 8) -> None:
    """Raise unless this is a whole number of at least one; `usual` is one to try."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParameterError(name, value_text(value), "must be a whole number of at least 1", f"try {name}={usual}")


def check_key_heads(heads: int, key_heads: int) -> None:
    """Raise unless query heads share the key heads evenly."""
    check_count("key_heads", key_heads)
    if heads % key_heads:
        fits = [str(x) for x in range(1, heads + 1) if heads % x == 0]
        raise ParameterError("key_heads", key_heads, f"must divide heads={heads}", f"use {' or '.join(_few(fits))}")


def _few(words: list[str]) -> list[str]:
    """As few words as a message needs: all but the last joined by commas."""
    return words if len(words) < 3 else [", ".join(words[:-1]), words[-1]]


def as_float(value: object) -> float:
    """The number, or nan for what is not one: numpy scalars and tensors of one element are numbers."""
    if isinstance(value, bool | str | bytes) or value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # what is not a number raises, and is caught
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of one method."""

    name: str
    type: type
    default: Any
    rule: Rule
    help: str

    def check(self, owner: str, value: Any) -> None:
        """Raise unless `value` keeps the rule and has the declared type itself, for JSON; a default None may stay."""
        if value is None and self.default is None:
            return
        numeric = self.type is float and isinstance(value, int)
        if not (isinstance(value, self.type) or numeric) or (isinstance(value, bool) and self.type is not bool):
            raise self._refusal(owner, value_text(value), f"must be {_type_words(self.type).words}")
        # Nan, and integers beyond what a float can hold.
        if (self.type is float and math.isnan(as_float(value))) or not self.rule.holds(value):
            raise self._refusal(owner, value_text(value), self.rule.words)

    def read(self, owner: str, text: str) -> Any:
        """The value a command line's `name=text` means."""
        try:
            value = {"true": True, "false": False}[text.lower()] if self.type is bool else self.type(text)
        except (ValueError, KeyError) as error:
            raise self._refusal(owner, text, f"must be {_type_words(self.type).words}") from error
        self.check(owner, value)
        return value

    def _refusal(self, owner: str, value: str, rule: str) -> ParameterError:
        name = f"{owner}: {self.name}" if owner else self.name
        return ParameterError(name, value, rule, f"the default is {self.default!r} ({self.help})")


def param(default: Any, rule: Rule, help: str) -> Any:
    """A dataclass field that carries its own rule and help."""
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help})


@functools.cache
def parameters_of(owner: type) -> tuple[Parameter, ...]:
    """The parameters a dataclass declares with `param`, in order; a `Literal` type is its own rule."""
    hints = typing.get_type_hints(owner)
    parameters = []
    for field in dataclasses.fields(owner):
        if "rule" not in field.metadata:
            continue
        kind, rule = hints[field.name], field.metadata["rule"]
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        if typing.get_origin(kind) is typing.Literal:
            kind, rule = str, one_of(*typing.get_args(kind))
        kind = typing.get_origin(kind) or kind  # of a tuple, its rule says what it holds
        assert isinstance(kind, type), f"declare a plain type, not {kind}"
        parameters.append(Parameter(field.name, kind, field.default, rule, field.metadata["help"]))
    return tuple(parameters)


def check_parameters(owner: str, kind: type, given: Mapping[str, Any]) -> None:
    """Raise on a name that is not declared or a value that breaks its rule."""
    known = {p.name: p for p in parameters_of(kind)}
    for name, value in given.items():
        if name not in known:
            remedy = suggestion(name, known, f"known parameters: {', '.join(known) or 'none'}")
            place = f"{owner}: {name}" if owner else name
            raise ParameterError(place, value_text(value), "is not a parameter", remedy)
        known[name].check(owner, value)


def declared(owner: str = "") -> Callable[[_C], _C]:
    """A function, or a class, whose arguments are checked first; `owner` goes before their names in an error.

    A number is whatever `float` makes one of, an integer whatever can be an index, but neither is True. Entries of a
    list, a tuple or a mapping are checked too. Types that are loaded at use only are left to the function.
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
            except TypeError as error:
                raise _misfit(thing, signature, arguments, options, error, {}) from None
            for name, value in given.items():
                parameter = signature.parameters[name]
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or value is parameter.default:
                    continue
                if fault := _fault(hints()[name], value):
                    raise _refusal(f"{owner}: {name}" if owner else name, parameter, fault)
            return thing(*arguments, **options)

        return typing.cast("_C", run)

    return checked


def named_arguments(**advice: str) -> Callable[[_C], _C]:
    """A function that answers to arguments it does not have: with `advice` on them, or with the name that is near."""

    def checked(function: _C) -> _C:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                signature.bind(*arguments, **options)
            except TypeError as error:
                raise _misfit(function, signature, arguments, options, error, advice) from None
            return function(*arguments, **options)

        return typing.cast("_C", run)

    return checked


def suggestion(name: object, known: Iterable[str], otherwise: str) -> str:
    """The known name that was probably meant, as a question; if none is near, what is said `otherwise`.

    >>> suggestion("feature", ["features", "orthogonal"], ""), suggestion("num_heads", ["width", "heads"], "")
    ('did you mean features?', 'did you mean heads?')
    """
    names = list(known)
    near = called_elsewhere(name, names) or next(iter(difflib.get_close_matches(str(name), names, 1, 0.7)), None)
    return f"did you mean {near}?" if near else otherwise


def called_elsewhere(name: object, known: Iterable[str]) -> str | None:
    """The known name of what other libraries call by this one; None if there is none.

    >>> called_elsewhere("seq_len", ["length", "heads"]), called_elsewhere("lenght", ["length"])
    ('length', None)
    """
    names = list(known)
    return next((alias for alias in _ELSEWHERE.get(str(name), ()) if alias in names), None)


def _misfit(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    error: TypeError,
    advice: Mapping[str, str],
) -> Exception:
    """Why arguments do not fit a signature, in the names that people call it by."""
    public = type(arguments[0]).__name__ if function.__name__ == "__init__" and arguments else function.__name__
    names = [name for name in signature.parameters if name != "self"]
    free = [name for name in names if name not in options]
    for name, value in options.items():
        remedy = advice.get(name, "") or suggestion(name, free, "")
        if name not in names and remedy:
            return ParameterError(name, value_text(value), f"is not an argument of {public}", remedy)
    return TypeError(f"{public}() {error}")


def _hint(function: Callable[..., Any], annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    written = inspect.unwrap(function)  # under other decorators, where its names are known
    try:
        return eval(annotation, written.__globals__) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


class _Fault(NamedTuple):
    """What does not fit: where it stands in the argument, what it is, what it must be, and a remedy."""

    place: str
    value: object
    words: str
    remedy: str


def _refusal(name: str, parameter: inspect.Parameter, fault: _Fault) -> InputError:
    default, remedy = parameter.default, fault.remedy
    if isinstance(default, torch.dtype) and isinstance(getattr(torch, str(fault.value), None), torch.dtype):
        remedy = f"use torch.{fault.value}"
    elif isinstance(default, bool | int | float | str | torch.dtype):
        remedy = f"the default is {default!r}"
    elif default is not parameter.empty:
        remedy = f"{remedy}, or leave it out"
    kind = DtypeError if fault.words == _TYPES[Tensor].words else ParameterError
    return kind(name + fault.place, value_text(fault.value), f"must be {fault.words}", remedy)


def _fault(hint: Any, value: Any, place: str = "") -> _Fault | None:
    """Why a value is not what a hint says; None if it is."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_fault(inside, value, place)
    if origin is typing.Literal:
        fits, words = isinstance(value, str) and value in inside, f"one of {', '.join(map(str, inside))}"
        return None if fits else _Fault(place, value, words, f'try "{inside[0]}"')
    if origin is collections.abc.Callable:
        return None if callable(value) else _Fault(place, value, "a function", "pass what can be called")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_fault(inside, value, place)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _series_fault(inside, value, place)
    kind = getattr(hint, "array_type", hint)  # Float[Tensor, "n d"] is a tensor
    if not isinstance(kind, type) or kind is Any or _is_a(kind, value):
        return None
    if kind is int and _integer(value) is not None:
        return _Fault(place, value, "a number of 64 bits", "use a smaller one")
    return _Fault(place, value, *_type_words(kind))


def _union_fault(choices: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    faults = [_fault(one, value, place) for one in choices if one is not types.NoneType]
    unfit = [fault for fault in faults if fault is not None]
    if len(unfit) < len(faults) or (value is None and types.NoneType in choices):
        return None
    # A list with one wrong entry is nearer to the truth than what is not a list.
    inside = next((fault for fault in unfit if fault.place != place), None)
    if _NUMBERS.intersection(choices):
        unfit = [fault for fault in unfit if fault.words != _TYPES[int].words]
    words = " or ".join(dict.fromkeys(fault.words for fault in unfit))
    return inside or _Fault(place, value, words, unfit[0].remedy)


def _mapping_fault(inside: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    if not isinstance(value, Mapping):
        return _Fault(place, value, "a mapping", "pass a dict")
    for key, entry in value.items():
        if fault := _fault(inside[0], key, f"{place}: key") or _fault(inside[1], entry, f"{place}[{key!r}]"):
            return fault
    return None


def _series_fault(inside: tuple[Any, ...], value: Any, place: str) -> _Fault | None:
    """How many entries there must be is left to the function, which knows what they are for."""
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


def _is_a(kind: type, value: Any) -> bool:
    if kind is int:
        number = _integer(value)
        return number is not None and -(2**63) <= number < 2**63  # beyond, torch cannot hold it
    if kind in _NUMBERS:
        return (isinstance(value, numbers.Real) or not math.isnan(as_float(value))) and not isinstance(value, bool)
    return isinstance(value, os.PathLike if kind is Path else kind)


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        return None


class _Type(NamedTuple):
    """The words for a type, and what to do about a value of another."""

    words: str
    remedy: str


_NUMBER = _Type("a number", "pass one such as 0.5")
_TYPES: dict[type, _Type] = {
    Tensor: _Type("a torch.Tensor", "wrap it with torch.as_tensor"),
    bool: _Type("True or False", "pass one of them"),
    int: _Type("a whole number", "count in whole numbers"),
    float: _NUMBER,
    Fraction: _NUMBER,
    str: _Type("text", "pass a str"),
    tuple: _Type("a list", "pass a list"),
    Path: _Type("a path", "pass a pathlib.Path"),
    torch.Generator: _Type("a torch.Generator", "pass torch.Generator().manual_seed(0)"),
    # Names that people import; the classes know themselves by others.
    nn.Module: _Type("a torch.nn.Module", "pass one"),
    torch.optim.Optimizer: _Type("a torch.optim.Optimizer", "pass one"),
}


def _type_words(kind: type) -> _Type:
    name = kind.__name__
    if kind in _TYPES:
        return _TYPES[kind]
    if kind.__module__.startswith("avow."):
        return _Type(f"{'an' if name[0] in 'AEIO' else 'a'} {name}", f"make one with avow's {name}")
    return _Type(f"a {kind.__module__.split('.')[0]}.{name}", "pass one")
