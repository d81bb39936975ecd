"""Formulas as browsers draw them by themselves: LaTeX turned into MathML."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from avow.extras import require

# A thick space, \enspace, \quad and \qquad; thinner ones tie what they part.
_WIDE = ("0.278em", "0.5em", "1em", "2em")
_THIN = {"width": "0.17em"}
_ARROWS = frozenset("⇒⟹⟺⇔⇐")
_OPENING, _CLOSING = frozenset("([{⟨⌊⌈"), frozenset(")]}⟩⌋⌉")


def formula(latex: str) -> str:
    """LaTeX as MathML, to stand in a line; as code, word for word, where it cannot be read."""
    root = _read(latex)
    return _source(latex) if root is None else ElementTree.tostring(root, encoding="unicode")


def display(latex: str) -> str:
    """LaTeX as a display that breaks into lines: browsers never break a formula, so it comes in parts that they may.

    Parts end where TeX might end a line: at a space, or after a comma, outside brackets. Words are words of the page.
    """
    root = _read(latex)
    if root is None:
        return _source(latex)
    parts = "".join(_written(part) for part in _parts(list(root[0])))
    return parts.replace("</math><math", "</math> <math")


def _read(latex: str) -> ElementTree.Element | None:
    require("latex2mathml", purpose="to draw formulas")
    from latex2mathml.converter import convert_to_element

    try:
        root: ElementTree.Element = convert_to_element(latex)
    except Exception:  # its errors share no base but this; whatever is wrong, the reader gets the source
        return None
    root.attrib.clear()  # a namespace and the display that HTML takes for granted
    _fix(root)
    # A command it does not know comes through as its name.
    unknown = any(re.search(r"\\[A-Za-z]", node.text or "") for node in root.iter())
    return None if unknown else root


def _parts(nodes: list[ElementTree.Element]) -> Iterator[list[ElementTree.Element]]:
    part: list[ElementTree.Element] = []
    depth = 0
    for node in _flat(nodes):
        text, base = node.text or "", _base(node)
        if base.tag == "mo":
            depth = max(0, depth + (base.text in _OPENING) - (base.text in _CLOSING))
        words = depth == 0 and node.tag == "mtext"
        if part and (words or (depth == 0 and text in _ARROWS)):
            yield part
            part = []
        part.append(node)
        wide, comma = node.attrib.get("width") in _WIDE, node.tag == "mo" and text in (",", ";", ":")
        if words or (depth == 0 and (wide or comma)):
            yield part
            part = []
    if part:
        yield part


def _flat(nodes: Iterable[ElementTree.Element]) -> Iterator[ElementTree.Element]:
    r"""Nodes without the wrapping that a \textstyle puts around all that follows it."""
    for node in nodes:
        if node.tag == "mstyle" and len(node) > 1:
            yield from _flat(node)
        else:
            yield node


def _written(part: list[ElementTree.Element]) -> str:
    if part[0].tag == "mtext":
        return html.escape((part[0].text or "").replace("\xa0", " "))
    math = ElementTree.Element("math", {"displaystyle": "true"})
    ElementTree.SubElement(math, "mrow").extend(part)
    return ElementTree.tostring(math, encoding="unicode")


def _source(latex: str) -> str:
    return f'<code class="latex">{html.escape(latex)}</code>'


def _fix(parent: ElementTree.Element) -> None:
    """Text as text, relations as relations, bold letters bold, and names of functions set apart as TeX does."""
    for node in parent:
        # The converter writes its characters as entities and expects the markup to be unescaped as a whole, which
        # would turn the words of a LaTeX text into markup too.
        node.text = html.unescape(node.text or "")
        if node.text == r"\arg":  # The one name among those of TeX that it does not know.
            node.text = "arg"
        if node.tag == "mi" and (_is_relation(node.text) or node.text in (":", ";")):
            node.tag = "mo"
        if node.tag in ("mi", "mo") and (_is_name(node.text) or node.text in ("∞", "∅")):
            node.tag = "mi"
        if node.text == "/":
            node.attrib |= {"lspace": "0", "rspace": "0"}
        if node.attrib.get("mathvariant") == "bold":
            # Browsers know only letters that are bold by themselves.
            del node.attrib["mathvariant"]
            node.text = "".join(map(_bold, node.text))
        _fix(node)
    if parent.tag not in ("mrow", "mstyle"):
        return
    for i in range(len(parent) - 1, -1, -1):
        if not _is_function(parent[i]):
            continue
        if i + 1 < len(parent) and not _is_sign(parent[i + 1]):
            parent.insert(i + 1, ElementTree.Element("mspace", _THIN))
        before = parent[i - 1] if i else None
        closed = before is not None and (not _is_sign(before) or before.text in _CLOSING)
        if before is not None and closed and not _is_function(before):
            parent.insert(i, ElementTree.Element("mspace", _THIN))


def _is_name(text: str) -> bool:
    return len(text) > 1 and "".join(text.split()).isalpha()


def _is_relation(text: str) -> bool:
    return len(text) == 1 and unicodedata.category(text) in ("Sm", "So") and text not in "∞∂∇∅∀∃"


def _base(node: ElementTree.Element) -> ElementTree.Element:
    """What carries the things below and above it."""
    while node.tag in ("msub", "msup", "msubsup", "munder", "mover", "munderover") and len(node):
        node = node[0]
    return node


def _is_function(node: ElementTree.Element) -> bool:
    """A name such as ln, or one with something below or above it."""
    base = _base(node)
    return base.tag == "mi" and _is_name(base.text or "")


def _is_sign(node: ElementTree.Element) -> bool:
    return node.tag in ("mo", "mspace")


def _bold(letter: str) -> str:
    size = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    name = unicodedata.name(letter).rsplit(" ", 1)[-1]
    try:
        return unicodedata.lookup(f"MATHEMATICAL BOLD {size} {name}")
    except KeyError:
        return letter
