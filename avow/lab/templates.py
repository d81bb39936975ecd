"""The HTML around every page: where one is, the controls that its inputs declare, and places for what is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from avow.lab.page import Page
from avow.lab.static_files import static_files
from avow.report.mathml import display

_FRONT = "See attention keep its word"


def page(page: Page, pages: Sequence[Page], token: str) -> str:
    """One page of the lab."""
    presets = "".join(
        f'<button type="button" data-preset="{escape(json.dumps(dict(inputs)))}">{escape(words)}</button>'
        for words, inputs in page.presets.items()
    )
    formulas = "".join(f'<div class="formula">{display(latex)}</div>' for latex in page.formulas)
    upload = _UPLOAD if page.takes_files else ""
    picture, controls = _placed(page)
    body = f"""<h1>{escape(page.title)}</h1>
<p class="lead">{escape(page.summary)}</p>
{f'<div class="presets" role="group" aria-label="Examples">{presets}</div>' if presets else ""}
<p id="trouble" role="alert" hidden></p>
<div class="bench">
<section class="picture" aria-label="Picture">{picture}</section>
<section class="beside" aria-label="What it shows">
<div id="verdict" class="card" aria-live="polite" {"" if page.verdict else "hidden"}>
<p><span id="mark" class="badge">preview</span> <span id="says"></span></p>
<details hidden><summary>How it was proved</summary><ol id="steps"></ol></details>
</div>
<dl id="facts"></dl>
<form id="controls" autocomplete="off" aria-label="Controls">{upload}{controls}</form>
</section>
</div>
{f'<section class="formulas" aria-label="Formulas">{formulas}</section>' if formulas else ""}"""
    return _document(f"{page.title} · avow lab", body, pages, page.name, token)


def front(pages: Sequence[Page], token: str, lost: str = "") -> str:
    """The list of pages, for who comes in or has `lost` the way at an address that is not here."""
    cards = "".join(
        f'<li><a href="/{page.name}">{_sign(page)}<strong>{escape(page.title)}</strong>'
        f"<span>{escape(page.summary)}</span></a></li>"
        for page in pages
    )
    lead = "While you move something, numbers are a preview in float arithmetic. Let go, and they are proved."
    body = f"""<h1>{escape(f"There is no page {lost}" if lost else _FRONT)}</h1>
<p class="lead">{"These are the pages that there are." if lost else lead}</p>
<ul class="pages">{cards}</ul>"""
    return _document("avow lab", body, pages, "", token)


def _sign(page: Page) -> str:
    return f'<svg viewBox="0 0 96 48" aria-hidden="true">{page.sign}</svg>' if page.sign else ""


_UPLOAD = """<label class="control">A .safetensors file of your own
<input type="file" id="file" accept=".safetensors"></label><p id="held" class="soft" aria-live="polite"></p>"""


def _document(title: str, body: str, pages: Sequence[Page], here: str, token: str) -> str:
    links = "".join(
        f'<a href="/{page.name}"{" aria-current=page" if page.name == here else ""}>{escape(page.title)}</a>'
        for page in pages
    )
    script = f'<script type="module" src="/static/{here}.js"></script>' if here else ""
    look = f'<link rel="stylesheet" href="/static/{here}.css">\n' if f"{here}.css" in static_files() else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="avow-token" content="{escape(token)}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/style.css">
<link rel="stylesheet" href="/static/lab.css">
{look}<link rel="stylesheet" href="/static/paper.css">
</head>
<body data-page="{here}">
<header class="bar"><a class="home" href="/">avow lab</a><nav aria-label="Pages">{links}</nav></header>
<main>
{body}
</main>
<script src="/static/paper.js"></script>
{script}
</body>
</html>
"""


def _placed(page: Page) -> tuple[str, str]:
    """The picture with the controls that it has a slot for, and the other controls in the order of declaration."""
    picture, rest = page.body, ""
    for name, spec in page.inputs.model_json_schema()["properties"].items():
        if "control" not in spec:
            continue
        slot, made = f'<slot name="{name}"></slot>', _control(name, spec)
        if slot in picture:
            picture = picture.replace(slot, made)
        else:
            rest += made
    return picture, rest


def _control(name: str, spec: dict[str, Any]) -> str:
    # What may be left out is declared as a type or nothing.
    kind = next((one for one in spec.get("anyOf", [spec]) if one.get("type") != "null"), spec)
    label, about, extra = escape(spec["title"]), spec.get("description", ""), spec["control"]
    default = spec.get("default")
    when = f" data-when='{escape(json.dumps(extra['when']), quote=True)}'" if extra["when"] else ""
    quiet = ' data-quiet="yes"' if extra["quiet"] else ""
    head = f'data-name="{name}" data-default="{escape(json.dumps(default))}"{when}{quiet}'
    note = f'<small id="about-{name}">{escape(about)}</small>' if about else ""
    described = f' aria-describedby="about-{name}"' if about else ""
    if "enum" in kind or "const" in kind:
        choices = "".join(
            f'<label><input type="radio" name="{name}" value="{escape(str(choice))}"'
            f"{' checked' if choice == default else ''}>{escape(str(choice).replace('_', ' '))}</label>"
            for choice in kind.get("enum", [kind.get("const")])
        )
        return f'<fieldset class="control" {head} data-kind="choice"><legend>{label}</legend>{choices}{note}</fieldset>'
    if kind["type"] == "boolean":
        checked = " checked" if default else ""
        box = f'<input type="checkbox" id="{name}"{checked}{described}>'
        return f'<div class="control" {head} data-kind="switch"><label>{box} {label}</label>{note}</div>'
    if kind["type"] == "string":
        longest = f' maxlength="{kind["maxLength"]}"' if "maxLength" in kind else ""
        value = escape(str(default or ""))
        box = f'<input type="text" id="{name}" value="{value}"{longest}{described} spellcheck="false">'
        return f'<div class="control" {head} data-kind="text"><label for="{name}">{label}</label>{box}{note}</div>'
    low, high = kind["minimum"], kind["maximum"]
    step = extra["step"] or (1 if kind["type"] == "integer" else (high - low) / 200)
    # A slider that moves in factors has decades, and finer steps within them; its script reads it so.
    ends = f'data-low="{low}" data-high="{high}" data-step="{step}" data-log="{"yes" if extra["log"] else ""}"'
    below = f' data-below="{extra["below"]}"' if extra["below"] else ""
    slider = f'<input type="range" id="{name}"{described}>'
    return (
        f'<div class="control" {head} data-kind="number" {ends}{below}><label for="{name}">{label}</label>'
        f'<output for="{name}"></output>{slider}{note}</div>'
    )
