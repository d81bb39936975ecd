"""Docstrings as data."""

from __future__ import annotations

from avow.core.docstring import Docstring, parse

TEXT = """What one gets.

    More of it: with a colon.

    Args:
        q: queries, (b, h, n, d): four axes.
        k, v: keys and values,
            in two lines.
        **parameters: those of the method.

    Returns:
        The answer,
        and more.

    Raises:
        ShapeError: they do not fit.

    >>> 1 + 1
    2

    Afterthought.
    """


def test_a_docstring_falls_into_its_parts() -> None:
    assert parse(TEXT) == Docstring(
        text="What one gets.\n\nMore of it: with a colon.",
        args={
            "q": "queries, (b, h, n, d): four axes.",
            "k": "keys and values, in two lines.",
            "v": "keys and values, in two lines.",
            "parameters": "those of the method.",
        },
        returns="The answer, and more.",
        raises={"ShapeError": "they do not fit."},
        examples=">>> 1 + 1\n2\n\nAfterthought.",
    )


def test_a_docstring_without_sections_is_prose() -> None:
    assert parse("Only words.\n\n>>> 1\n1") == Docstring(text="Only words.\n\n>>> 1\n1")
    assert parse(None) == Docstring()


def test_attributes_are_described_as_arguments_are() -> None:
    assert parse("It.\n\nAttributes:\n    a: one.\n").described == {"a": "one."}
