"""What a page of the lab is, the inputs that it declares, and its answers and errors as JSON."""

from __future__ import annotations

import functools
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from avow.errors import AvowError, ParameterError
from avow.parameters import Parameter, anything, at_most_characters, check_parameters, from_to, parameters_of

PACKAGE = "avow.lab.pages"

# What a page answers, as JSON holds it. The shared script knows these entries, and hands the rest to the page's own:
#   shown    values of controls that the reader left to the page, by name
#   facts    [{"label", "value", "about"}], the numbers beside the picture
#   figures  plotly figures by the id of the element they are drawn in; a trace of null is the one drawn there before
#   verdict  {"tone", "word", "says", "steps"}, of a verdict only; tones are those of badges: proved, refuted, none
#   trouble  the error of an input that leaves something to show, such as a list to choose from
Answer = dict[str, Any]


def fact(label: str, value: str, about: str = "") -> dict[str, str]:
    """One number beside the picture."""
    return {"label": label, "value": value, "about": about}


def judgement(tone: str, word: str, says: str, steps: list[str]) -> Answer:
    """The entry `verdict` of an answer."""
    return {"tone": tone, "word": word, "says": says, "steps": steps}


def control(
    default: Any,
    label: str,
    *,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    log: bool = False,
    about: str = "",
    when: Mapping[str, tuple[str, ...]] | None = None,
    longest: int | None = None,
    below: str = "",
    quiet: bool = False,
) -> Any:
    """One input with its rule and its words: the check, the control on the page and the address share them.

    `when` names other inputs and the choices of theirs for which this one is shown. A default of None leaves the value
    to the page, which says under `shown` what it took. `log` lets the slider move in factors; one that is `below`
    another ends before it, as the last of n things does. A `quiet` one is set by presets and the address alone.
    """
    rule = anything()
    if low is not None and high is not None:
        rule = from_to(low, high)
    elif longest is not None:
        rule = at_most_characters(longest)
    form = {"step": step, "log": log, "about": about, "when": when, "below": below, "quiet": quiet}
    return field(default=default, metadata={"rule": rule, "help": label, "form": form})


@dataclass(frozen=True)
class Inputs:
    """Everything a reader can set on a page; every number has bounds, and nothing else is taken."""

    @classmethod
    def declared(cls) -> tuple[Parameter, ...]:
        kind: type = cls
        return parameters_of(kind)

    @classmethod
    def of(cls, given: Any) -> Self:
        """The inputs of a request, checked; what is left out keeps its default."""
        if not isinstance(given, dict):
            raise ParameterError("body", repr(given), "must be a JSON object", "send one such as {}")
        check_parameters("", cls, given)
        kinds = {parameter.name: parameter.type for parameter in cls.declared()}
        # A whole number is a number too.
        return cls(**{n: float(x) if kinds[n] is float and x is not None else x for n, x in given.items()})

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON schema of the inputs, for the OpenAPI document."""
        properties = {parameter.name: _schema(parameter) for parameter in cls.declared()}
        return {"type": "object", "title": cls.__name__, "properties": properties, "additionalProperties": False}

    @classmethod
    def controls(cls) -> list[dict[str, Any]]:
        """What the template needs of each control, in the order of declaration."""
        forms = {one.name: one.metadata["form"] for one in fields(cls) if "form" in one.metadata}
        return [_control(one, forms[one.name]) for one in cls.declared() if one.name in forms]


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _schema(parameter: Parameter) -> dict[str, Any]:
    kind, rule = _JSON_TYPES[parameter.type], parameter.rule
    spec: dict[str, Any] = {"type": [kind, "null"] if parameter.default is None else kind, "default": parameter.default}
    if rule.choices:
        spec["enum"] = list(rule.choices)
    elif kind == "string" and rule.high < math.inf:
        spec["maxLength"] = rule.high
    elif kind in ("integer", "number"):
        spec |= {"minimum": rule.low, "maximum": rule.high}
    return spec


def _control(parameter: Parameter, form: dict[str, Any]) -> dict[str, Any]:
    rule = parameter.rule
    kind = "choice" if rule.choices else {bool: "switch", str: "text"}.get(parameter.type, "number")
    step = form["step"] or (1 if parameter.type is int else (rule.high - rule.low) / 200)
    about = {"name": parameter.name, "kind": kind, "label": parameter.help, "default": parameter.default}
    return form | about | {"choices": rule.choices, "low": rule.low, "high": rule.high, "step": step}


@dataclass(frozen=True)
class Page:
    """One page: `avow/lab/pages/<name>.py` holds it as PAGE, and `avow/lab/static/<name>.js` draws it.

    `preview` is float arithmetic, quick enough to follow a drag; `verdict` is rigorous. Both run in a process that is
    ended when they take longer than `seconds` or when nobody waits for them any more. Pages that take files get their
    tensors as a second argument. `avow/lab/templates/<name>.html` has the places that the script draws in, the formulas
    and the drawing for the front page.
    """

    name: str
    title: str
    summary: str
    order: int
    inputs: type[Inputs]
    preview: Callable[..., Answer]
    verdict: Callable[..., Answer] | None = None
    # Words on a button, and the inputs it sets; all others go back to their defaults.
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 20.0
    takes_files: bool = False
    # Whether the server keeps answers for its life: for pages whose answers depend on the inputs alone and take long.
    kept: bool = False


@functools.cache
def all_pages(package: str = PACKAGE) -> dict[str, Page]:
    """Every page of a package by its name, in the order they are shown: each module with a PAGE is one."""
    folder = importlib.import_module(package)
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)]
    pages = [module.PAGE for module in modules if hasattr(module, "PAGE")]
    return {page.name: page for page in sorted(pages, key=lambda page: (page.order, page.name))}


# How an error begins once it is written, and no answer does.
MISTAKE = b'{"error": '
# What someone sent is shown back, but not the whole of it.
_SHOWN = 200


def plain(value: Any) -> Any:
    """Numbers, words, lists and tables as JSON can hold them; numbers that it cannot hold are spelled out."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def json_bytes(value: Any) -> bytes:
    """The same as one line of JSON."""
    try:
        # Most answers are lists of numbers, which are written as they are; those that JSON cannot hold are rare.
        return json.dumps(value, allow_nan=False, default=plain).encode("ascii")
    except ValueError:
        return json.dumps(plain(value), allow_nan=False).encode("ascii")


def error_body(kind: str, name: str, value: object, rule: str, remedy: str) -> dict[str, Any]:
    """The four parts of an error, and its kind."""
    shown = value if isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + " …"
    return {"error": {"kind": kind, "name": name, "value": shown, "rule": rule, "remedy": remedy}}


def error_body_of(error: BaseException) -> dict[str, Any]:
    """An error of avow with its own four parts; any other is unexpected, and says so."""
    if isinstance(error, AvowError):
        return error_body(type(error).__name__, error.name[:_SHOWN], error.value, error.rule, error.remedy)
    rule = f"raised an unexpected {type(error).__name__}: {error}"
    return error_body("Unforeseen", "this input", "as given", rule[:_SHOWN], "change it, and report the page's address")
