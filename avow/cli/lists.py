"""Lists at the end of a command's help, made from what the library itself declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from typer.core import TyperCommand

import avow
from avow.bench.workloads import KINDS

# Terms and their meanings by title.
Lists = dict[str, list[tuple[str, str]]]


def command_with(lists: Callable[[], Lists]) -> type[TyperCommand]:
    """A kind of command whose help ends in such lists."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            for title, terms in lists().items():
                with formatter.section(title):
                    formatter.write_dl(terms)

    return Command


def kinds() -> Lists:
    """Every kind of workload in a line."""
    return {"Kinds": [(name, kind.summary) for name, kind in KINDS.items()]}


def methods() -> Lists:
    """Every method with its parameters, as the methods themselves declare them."""
    terms = []
    for name, kind in avow.all_methods().items():
        terms.append((name, kind.summary))
        terms += [(f"  {name}.{p.name}={p.default}", p.help) for p in kind.declared()]
    return {"Methods": terms}


def configuration(**own: object) -> Lists:
    """The fields of a configuration; `own` are a command's own defaults."""
    from avow.nn import ModelConfig
    from avow.parameters import parameters_of
    from avow.training.config import SECTIONS

    lists = {}
    for section, kind in SECTIONS.items():
        terms = []
        for p in parameters_of(kind):
            choices = f" ({', '.join(p.rule.choices)})" if p.rule.choices else ""
            terms.append((f"{section}.{p.name}={own.get(p.name, p.default)}", f"{p.help}{choices}"))
        lists[f"Fields of {section}, in a file or as section.name=value"] = terms
    usual = ModelConfig(vocabulary=1)
    names = [field.name for field in fields(usual) if field.name != "vocabulary"]
    lists["Fields of model"] = [(f"model.{name}={getattr(usual, name)}", "") for name in names]
    return lists
