"""Formulas as browsers draw them by themselves: LaTeX turned into MathML."""

from __future__ import annotations

import html
import re
import unicodedata
from xml.etree import ElementTree


def formula(latex: str, block: bool = False) -> str:
    """LaTeX as MathML; as code, word for word, where it cannot be read."""
    from latex2mathml.converter import convert_to_element

    try:
        root = convert_to_element(latex, display="block" if block else "inline")
    except Exception:  # its errors share no base but this; whatever is wrong, the reader gets the source
        return _source(latex)
    _mend(root)
    drawn = ElementTree.tostring(root, encoding="unicode")
    # A command it does not know comes through as its name.
    return _source(latex) if re.search(r"\\[A-Za-z]", drawn) else drawn


def _source(latex: str) -> str:
    return f'<code class="latex">{html.escape(latex)}</code>'


def _mend(parent: ElementTree.Element) -> None:
    """Text as text, relations as relations, bold letters bold, and names of functions set apart as TeX does."""
    for node in parent:
        # The converter writes its characters as entities and expects the markup to be unescaped as a whole, which
        # would turn the words of a LaTeX text into markup too.
        node.text = html.unescape(node.text or "")
        if node.tag == "mi" and _is_relation(node.text):
            node.tag = "mo"
        if node.tag in ("mi", "mo") and (_is_name(node.text) or node.text in ("∞", "∅")):
            node.tag = "mi"
        if node.text == "/":
            node.attrib |= {"lspace": "0", "rspace": "0"}
        if node.attrib.get("mathvariant") == "bold":
            # Browsers know only letters that are bold by themselves.
            del node.attrib["mathvariant"]
            node.text = "".join(map(_bold, node.text))
        _mend(node)
    if parent.tag != "mrow":
        return
    for i in range(len(parent) - 1, -1, -1):
        if _is_function(parent[i]):
            if i + 1 < len(parent) and not _is_sign(parent[i + 1]):
                parent.insert(i + 1, _thin())
            if i > 0 and not _is_function(parent[i - 1]) and (not _is_sign(parent[i - 1]) or _closes(parent[i - 1])):
                parent.insert(i, _thin())


def _closes(node: ElementTree.Element) -> bool:
    return bool(node.text) and (node.text or "") in ")]}⟩⌋⌉"


def _thin() -> ElementTree.Element:
    return ElementTree.Element("mspace", {"width": "0.17em"})


def _is_name(text: str) -> bool:
    return len(text) > 1 and text.isalpha()


def _is_relation(text: str) -> bool:
    return len(text) == 1 and unicodedata.category(text) in ("Sm", "So") and text not in "∞∂∇∅∀∃"


def _is_function(node: ElementTree.Element) -> bool:
    """A name such as ln, or one with something below or above it."""
    if node.tag in ("msub", "msup", "msubsup", "munder", "mover", "munderover"):
        return len(node) > 0 and _is_function(node[0])
    return node.tag == "mi" and _is_name(node.text or "")


def _is_sign(node: ElementTree.Element) -> bool:
    return node.tag in ("mo", "mspace")


def _bold(letter: str) -> str:
    size = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    name = unicodedata.name(letter).rsplit(" ", 1)[-1]
    try:
        return unicodedata.lookup(f"MATHEMATICAL BOLD {size} {name}")
    except KeyError:
        return letter
