"""The one table of terminals: columns where they fit, rows below one another where they do not, nothing cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from avow.report.terminal import Columns, show

TABLE = Columns(
    "lrw",
    ("method", "to\nsoftmax", "why"),
    [("exact(precision=native)", "1.5e-07", "the cheapest that keeps its word"), ("low_rank(rank=64)", "", "[bold]")],
    "a title",
    ["a note that is longer than many a terminal is wide, and wraps"],
    ["bold", ""],
)


def printed(table: Columns, width: int) -> str:
    held = io.StringIO()
    Console(file=held, width=width).print(table)
    return "\n".join(line.rstrip() for line in held.getvalue().splitlines())


def test_a_wide_terminal_has_columns() -> None:
    assert printed(TABLE, 80).splitlines()[:5] == [
        "a title",
        "                              to",
        "method                   softmax  why",
        "exact(precision=native)  1.5e-07  the cheapest that keeps its word",
        "low_rank(rank=64)                 [bold]",
    ]


def test_prose_wraps_before_anything_else_gives_way() -> None:
    shown = printed(TABLE, 52)
    assert "exact(precision=native)  1.5e-07  the cheapest that" in shown and "keeps its word" in shown


@pytest.mark.parametrize("width", [30, 40, 49])
def test_a_narrow_terminal_has_rows_below_one_another_and_loses_nothing(width: int) -> None:
    shown = printed(TABLE, width)
    assert max(map(len, shown.splitlines())) <= width and "…" not in shown
    together = "".join(shown.split())
    assert all("".join(str(cell).split()) in together for row in TABLE.rows for cell in row)
    assert shown.splitlines()[1] == "method", "what stands out has a heading, too"
    assert "  to softmax" in shown and shown.count("softmax") == 1  # an empty cell has no line


def test_where_columns_end_is_the_narrowest_that_shows_all() -> None:
    least = TABLE._narrowest()
    assert printed(TABLE, least).count("why") == 1 and printed(TABLE, least - 1).count("why") == 2


def test_a_table_without_headings_or_rows_has_no_empty_lines() -> None:
    assert printed(Columns("ll", ("", ""), [("a", Text("b"))]), 20) == "a  b"
    assert printed(Columns("ll", ("x", "y"), [], "only a title"), 20) == "only a title"


def test_words_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show("[red]x[/] :smile:", Columns("l", ("n",), [("[b]1",)]))
    shown = capsys.readouterr().out
    assert "[red]x[/] :smile:" in shown and "[b]1" in shown and "\x1b" not in shown
