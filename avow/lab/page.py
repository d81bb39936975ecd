"""What a page of the lab is, the inputs that it declares, and its answers and errors as JSON."""

from __future__ import annotations

import functools
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import jinja2

from avow.errors import AvowError, ParameterError, value_text
from avow.lab.scenes import claims_about
from avow.parameters import Parameter, anything, at_most_characters, check_parameters, from_to, parameters_of
from avow.report.page import environment
from avow.theory.claims.evidence import as_json

PACKAGE = "avow.lab.pages"

# What a page answers, as JSON holds it. The shared script knows these entries, and hands the rest to the page's own:
#   shown    values of controls that the reader left to the page, by name
#   facts    [{"label", "value", "about"}], the numbers beside the picture; the page shows three digits of each
#   figures  as charts.figure describes them, by the id of the element they are drawn in; a trace of null is the one
#            drawn there before
#   verdict  {"tone", "word", "says", "steps"}, of a verdict only; tones are those of badges: proved, refuted, none
#   live     {"tone", "word", "says"}, of a preview only: what the verdict will probably be, shown as "≈ word" meanwhile
#   python   what a reader would type to get the same: lines that import avow and call what is public
#   trouble  the error of an input that leaves something to show, such as a list to choose from
Answer = dict[str, Any]


def fact(label: str, value: str, about: str = "") -> dict[str, str]:
    """One number beside the picture."""
    return {"label": label, "value": value, "about": about}


def judgement(tone: str, word: str, says: str, steps: Sequence[str] = ()) -> Answer:
    """The entry `verdict` of an answer."""
    return {"tone": tone, "word": word, "says": says, "steps": list(steps)}


def expectation(holds: bool, says: str, kept: str = "kept", broken: str = "not kept") -> Answer:
    """The entry `live` of a preview's answer: the verdict that float arithmetic expects."""
    return {"tone": "proved" if holds else "refuted", "word": kept if holds else broken, "says": says}


class Words:
    """What a page says: macros of a file of `avow/lab/templates`, called with the values they speak of."""

    def __init__(self, file: str) -> None:
        self._file = file

    def say(self, macro: str, *values: Any, **more: Any) -> str:
        """A sentence, on one line."""
        return " ".join(self.html(macro, *values, **more).split())

    def facts(self, macro: str, *values: Any, **more: Any) -> list[dict[str, str]]:
        """Numbers beside the picture: a line each, as label | value or label | value | about."""
        lines = (line.strip() for line in self.html(macro, *values, **more).splitlines())
        return [fact(*line.split(" | ", 2)) for line in lines if line]

    def html(self, macro: str, *values: Any, **more: Any) -> str:
        """What the macro writes; what it is given is escaped if its file is HTML."""
        return str(getattr(templates().get_template(self._file).module, macro)(*values, **more))


@functools.cache
def templates(package: str = PACKAGE) -> jinja2.Environment:
    """The lab's templates, and those that stand beside the pages of a package; what goes into HTML is escaped."""
    folders = [str(Path(__file__).parent / "templates"), *importlib.import_module(package).__path__]
    escape = jinja2.select_autoescape(("html",), default=False)
    made = environment(jinja2.FileSystemLoader(folders), autoescape=escape)
    made.globals["claims_about"] = claims_about
    return made


class Form(TypedDict, total=False):
    """What a control may say besides its label and its bounds."""

    step: float
    about: str
    log: bool  # the slider moves in factors
    when: Mapping[str, tuple[str, ...]]  # other inputs, and the choices of theirs for which this one is shown
    below: str  # another input: the slider ends before it, as the last of n things does
    quiet: bool  # set by presets and the address alone
    means: Mapping[str, str]  # what each choice is, which a bubble says before it is chosen


def control(
    default: Any, label: str, ends: tuple[float, float] | None = None, longest: int | None = None, **form: Unpack[Form]
) -> Any:
    """One input with its rule and its words: the check, the control on the page and the address share them.

    A number lies between its `ends`, a text has at most `longest` characters. A default of None leaves the value to the
    page, which says under `shown` what it took.
    """
    rule = from_to(*ends) if ends else at_most_characters(longest) if longest else anything()
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
            raise ParameterError("body", value_text(given), "must be a JSON object", "send one such as {}")
        check_parameters("", cls, given)
        numbers = {one.name for one in cls.declared() if one.type is float}
        # A whole number is a number too.
        return cls(**{n: float(x) if n in numbers and x is not None else x for n, x in given.items()})

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON schema of the inputs, for the OpenAPI document."""
        properties = {parameter.name: _schema(parameter) for parameter in cls.declared()}
        return {"type": "object", "title": cls.__name__, "properties": properties, "additionalProperties": False}

    @classmethod
    def controls(cls) -> dict[str, dict[str, Any]]:
        """What the template needs of each control, by name, in the order of declaration."""
        forms = {one.name: one.metadata["form"] for one in fields(cls) if "form" in one.metadata}
        return {one.name: _control(one, forms[one.name]) for one in cls.declared() if one.name in forms}


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


def _control(parameter: Parameter, form: Form) -> dict[str, Any]:
    rule = parameter.rule
    kind = "choice" if rule.choices else {bool: "switch", str: "text"}.get(parameter.type, "number")
    step = form.get("step") or (1 if parameter.type is int else (rule.high - rule.low) / 200)
    about = {"name": parameter.name, "kind": kind, "label": parameter.help, "default": parameter.default}
    bounds = {"choices": rule.choices, "low": rule.low, "high": rule.high, "step": step}
    return {**dict.fromkeys(Form.__annotations__), **form, **about, **bounds}


# Words on a button, and the inputs it sets; all others go back to their defaults.
Presets = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Page:
    """One page: `avow/lab/pages/<name>.py` holds it as PAGE, and `avow/lab/static/<name>.js` draws it.

    `preview` is float arithmetic, quick enough to follow a drag; `verdict` is rigorous. Both run in a process that is
    ended when they take longer than `seconds` or when nobody waits for them any more. Pages that take files get their
    tensors as a second argument. `avow/lab/templates/<name>.html` has the places that the script draws in and the
    formulas.

    The page that comes first is the front page, at `/`. Each leads to the next; those of the workshop come last, and
    `avow/lab/templates/signs.html` has the drawings that its index shows.
    """

    name: str
    title: str
    summary: str
    order: int
    inputs: type[Inputs]
    preview: Callable[..., Answer]
    verdict: Callable[..., Answer] | None = None
    presets: Presets = field(default_factory=dict)
    seconds: float = 20.0
    # A preview that does not come at once is of no use; a page that loads much before its first one may take longer.
    preview_seconds: float = 5.0
    # What a copy of the page without a server shows: the answer is embedded in it. Without this it shows its examples.
    static: Callable[[], Answer] | None = None
    # What else the page computes, by the last part of its address; in a process that keeps what it has loaded.
    calls: Mapping[str, Callable[..., Answer]] = field(default_factory=dict)
    call_seconds: float = 120.0
    # Its name in the row of pages, where that is not its title.
    short: str = ""
    workshop: bool = False

    @property
    def label(self) -> str:
        return self.short or self.title

    @property
    def takes_files(self) -> bool:
        """Whether a reader may upload one: its handle is the input `file`."""
        return hasattr(self.inputs, "file")


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


class Unforeseen(AvowError):
    """An error that no page raises on purpose."""


def json_bytes(value: Any) -> bytes:
    """A value as one line of JSON; numbers that it cannot hold are spelled out."""
    try:
        # Most answers are lists of numbers, which are written as they are; those that JSON cannot hold are rare.
        return json.dumps(value, allow_nan=False, default=as_json).encode("ascii")
    except ValueError:
        return json.dumps(as_json(value), allow_nan=False).encode("ascii")


def error_body(error: BaseException) -> dict[str, Any]:
    """An error of avow with its kind and its four parts; any other is unexpected, and says so."""
    if not isinstance(error, AvowError):
        rule = f"raised an unexpected {type(error).__name__}: {error}"[:_SHOWN]
        error = Unforeseen("this input", "as given", rule, "change it, and report the page's address")
    value = error.value if isinstance(error.value, str) else value_text(error.value)
    value = value if len(value) <= _SHOWN else value[:_SHOWN] + " …"
    parts = {"name": error.name[:_SHOWN], "value": value, "rule": error.rule, "remedy": error.remedy}
    return {"error": {"kind": type(error).__name__, **parts}}
