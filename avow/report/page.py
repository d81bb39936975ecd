"""Pages: one HTML file that needs nothing else, neither network nor folder, light or dark, made from templates."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

from avow.extras import require

require("jinja2", "latex2mathml", purpose="to write HTML pages")

from jinja2 import BaseLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import avow
from avow.core.chart import Table
from avow.report.formatting import between, count, listed, number, percent, ratio, seconds, shape
from avow.report.mathml import display, formula

DOCUMENTATION = "https://github.com/avow-attention/avow/blob/main/docs/README.md"
_FORMATS = (between, count, listed, number, percent, ratio, seconds, shape)


def render(template: str, figures: Mapping[str, Any], **values: Any) -> str:
    """A whole page. Each figure, as `charts.figure` describes it, is drawn in the page's element of that id."""
    made = {"date": datetime.date.today().isoformat(), "version": avow.__version__, "documentation": DOCUMENTATION}
    return _templates().get_template(template).render(figures=_rounded(figures), **made, **values)


def _rounded(value: Any) -> Any:
    """The same with six digits in every number, more than a figure shows: they are most of its size."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def document(title: str, body: str, style: str = "") -> str:
    """A whole page around a body that is HTML already."""
    return render("page.html", {}, title=title, body=Markup(body), style=Markup(style))


def html_table(table: Table) -> str:
    """A table as a page shows it; it scrolls by itself where it is wider than the window."""
    return str(macro("macros.html", "table")(table))


def macro(template: str, name: str) -> Any:
    """A macro of a template, to be called with its arguments; its answer is markup."""
    return getattr(_templates().get_template(template).module, name)


@functools.cache
def asset(name: str) -> Markup:
    """A stylesheet or a script of the reports."""
    return Markup((resources.files("avow.report") / name).read_text(encoding="utf-8"))


def environment(loader: BaseLoader, **options: Any) -> Environment:
    """Templates that stop at a name they are not given, with the formats of numbers and formulas as their filters."""
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    made.filters |= {one.__name__: one for one in _FORMATS} | {"as": format}
    made.filters["display"] = lambda latex: Markup(display(str(latex)))
    made.filters["formula"] = lambda latex: Markup(formula(latex))
    return made


@functools.cache
def _templates() -> Environment:
    templates = environment(PackageLoader("avow.report"), autoescape=True, keep_trailing_newline=True)
    templates.globals["asset"] = asset
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates
