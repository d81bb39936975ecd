"""A page of Markdown as HTML: formulas as MathML, code in colours, pictures inside, links to other pages."""

from __future__ import annotations

import base64
import functools
import posixpath
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from avow.report.mathml import display, formula

_LEXERS = {"python": "python", "bash": "bash"}
_PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".gif": "image/gif"}
_OUTSIDE = re.compile(r"https://[\w.-]+\.[a-z]{2,}(/[\w./%~#?=&+-]*)?")


@dataclass
class Page:
    """One page: where its source lies in the repository, where it lies in the site, and what became of it."""

    source: str
    address: str
    text: str
    title: str = ""
    body: str = ""
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        self.faults.append(f"{self.source}: {words}")


@dataclass(frozen=True)
class Known:
    """What pages may speak of: the repository, the address of each source in the site, and of each public name."""

    root: Path
    addresses: Mapping[str, str]
    names: Mapping[str, str]


def rendered(page: Page, known: Known) -> None:
    """Fill in the title, the body, the anchors and the links of a page, and note what is wrong with it."""
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    # Labels, and dollars that are no formulas, stay out: a price needs no escape.
    drawn = functools.partial(_formula, page)
    markdown.use(dollarmath_plugin, allow_labels=False, allow_space=False, allow_digits=False, renderer=drawn)
    markdown.use(anchors_plugin, max_level=4)
    text = re.sub(r"^<!--.*?-->\n", "", page.text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--[\w-]+-->", "", text)  # the name of the figure that a number is
    page.body = markdown.render(text, {"page": page, "known": known})
    if not page.title:
        page.fault("has no title; begin with a line like '# Certificates'")


def relative(address: str, start: str) -> str:
    """A link from one page of the site to another."""
    return posixpath.relpath(address, posixpath.dirname(start) or ".")


class _Renderer(RendererHTML):
    """Tokens as HTML; what cannot be shown as it should be is noted on the page."""

    def heading_open(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        page: Page = env["page"]
        anchor = str(tokens[i].attrs["id"])
        page.anchors.add(anchor)
        if tokens[i].tag == "h1":
            if page.title:
                page.fault(f"has a second title: {tokens[i + 1].content!r}")
            page.title = re.sub(r"[`*]", "", tokens[i + 1].content)
        return f'<{tokens[i].tag} id="{escape(anchor)}">'

    def fence(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        language = tokens[i].info.strip()
        if language not in (*_LEXERS, "text"):
            env["page"].fault(f"a block is in {language or 'no language'!r}; use python, bash or text")
        code = escape(tokens[i].content)
        if language in _LEXERS:
            code = highlight(tokens[i].content, get_lexer_by_name(_LEXERS[language]), HtmlFormatter(nowrap=True))
        # A block that scrolls must be reachable by keyboard.
        return f'<pre tabindex="0" class="{language}"><code>{code}</code></pre>\n'

    def code_inline(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        known: Known = env["known"]
        page: Page = env["page"]
        text = tokens[i].content
        # Lines may end between the words of a command, not within an option.
        code = re.sub(r"(?<!\S)--[a-z][a-z-]*", r"<span>\g<0></span>", f"<code>{escape(text)}</code>")
        address = known.names.get(text.removesuffix("()"))
        linked = sum(token.nesting for token in tokens[:i] if token.type in ("link_open", "link_close")) > 0
        if address is None or linked or address.split("#")[0] == page.address:
            return code
        return f'<a href="{relative(address, page.address)}">{code}</a>'

    def link_open(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        known: Known = env["known"]
        page: Page = env["page"]
        target = str(tokens[i].attrs["href"])
        if re.match(r"[a-z]+:", target):
            if not _OUTSIDE.fullmatch(target):
                page.fault(f"{target!r} is no address; write https://…")
            return f'<a href="{escape(target)}">'
        path, _, anchor = unquote(target).partition("#")
        source = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), path)) if path else page.source
        if source not in known.addresses:
            page.fault(f"links to {target!r}, which is no page of the site")
            return "<a>"
        address = known.addresses[source] + (f"#{anchor}" if anchor else "")
        page.links.append(address)
        return f'<a href="{escape(relative(address, page.address))}">'

    def image(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        known: Known = env["known"]
        page: Page = env["page"]
        target = str(tokens[i].attrs["src"])
        file = known.root / posixpath.dirname(page.source) / target
        if not tokens[i].content.strip():
            page.fault(f"the picture {target!r} has no words for those who cannot see it")
        if file.suffix not in _PICTURES or not file.is_file():
            page.fault(f"the picture {target!r} is not a PNG, SVG or GIF in the repository")
            return ""
        data = base64.b64encode(file.read_bytes()).decode()
        return f'<img src="data:{_PICTURES[file.suffix]};base64,{data}" alt="{escape(tokens[i].content)}">'

    def table_open(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return '<div class="scroll" tabindex="0"><table>\n'

    def table_close(self, tokens: Sequence[Token], i: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return "</table></div>\n"


def _formula(page: Page, latex: str, options: Mapping[str, Any]) -> str:
    made = display(latex.strip()) if options["display_mode"] else formula(latex)
    if 'class="latex"' in made:
        page.fault(f"the formula {latex!r} cannot be read")
    return f'<div class="formula">{made}</div>' if options["display_mode"] else made
