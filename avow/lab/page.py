"""What a page of the lab is: typed inputs, a quick preview, a rigorous verdict, and a picture that its script draws."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

PACKAGE = "avow.lab.pages"

# What a page answers, as JSON holds it. The shared script knows these entries, and hands the rest to the page's own:
#   shown    values of controls that the reader left to the page, by name
#   facts    [{"label", "value", "about"}], the numbers beside the picture
#   figures  plotly figures by the id of the element they are drawn in; a trace of null is the one drawn there before
#   verdict  {"tone", "word", "says", "steps"}, of a verdict only; tones are those of badges: proved, refuted, none
#   trouble  the error of an input that leaves something to show: a list to choose from, say
Answer = dict[str, Any]


def fact(label: str, value: str, about: str = "") -> dict[str, str]:
    """One number beside the picture."""
    return {"label": label, "value": value, "about": about}


class Inputs(BaseModel):
    """Everything a reader can set on a page; every number has bounds, and nothing else is taken."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    """One input with its bounds and its words: the check, the control on the page and the address share them.

    `when` names other inputs and the choices of theirs for which this one is shown. A default of None leaves the value
    to the page, which says under `shown` what it took. `log` lets the slider move in factors; one that is `below`
    another ends before it, as the last of n things does. A `quiet` one is set by presets and the address alone.
    """
    extra: dict[str, Any] = {
        "step": step,
        "log": log,
        "below": below,
        "quiet": quiet,
        "when": {name: list(words) for name, words in (when or {}).items()},
    }
    return Field(
        default,
        title=label,
        description=about,
        ge=low,
        le=high,
        max_length=longest,
        json_schema_extra={"control": extra},
    )


@dataclass(frozen=True)
class Page:
    """One page: `avow/lab/pages/<name>.py` holds it as PAGE, and `avow/lab/static/<name>.js` draws it.

    `preview` is float arithmetic, quick enough to follow a drag; `verdict` is rigorous. Both run in a process that is
    ended when they take longer than `seconds` or when nobody waits for them any more. Pages that take files get their
    tensors as a second argument.
    """

    name: str
    title: str
    summary: str
    order: int
    inputs: type[Inputs]
    preview: Callable[..., Answer]
    verdict: Callable[..., Answer] | None = None
    # HTML of the picture; the script finds its places by id, and <slot name="…"></slot> is the place of a control.
    body: str = ""
    # What the front page shows of it: the inside of an SVG of 96 × 48, lines that may be `faint`, and circles as `dot`.
    sign: str = ""
    formulas: tuple[str, ...] = ()
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
    modules = [importlib.import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder.__path__)]
    found = [module.PAGE for module in modules if hasattr(module, "PAGE")]
    return {page.name: page for page in sorted(found, key=lambda page: (page.order, page.name))}
