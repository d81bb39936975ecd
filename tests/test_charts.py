"""A chart is the same chart on a page, in a file and in a terminal."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from avow.core.chart import Chart, Picture, Table
from avow.report import charts
from avow.report.page import html_table
from avow.report.style import LOOKS

LINES = Chart(
    "How <fast> it falls",
    "units, $",
    "error",
    {"one & only": ([1, 2, 4], [1e-1, 1e-2, 0.0]), "other": ([1, 8], [0.5, math.inf])},
    log_y=True,
)
BARS = Chart("Weights", "key", "weight", {"softmax": ([0, 1, 2], [0.9, 0.06, 0.04])}, marks="bars")
TABLE = Table("What it costs", ("method", "units", "works"), [("flat", 354, True), ("deep", 26, False)])


def shown(picture: Picture) -> str:
    held = io.StringIO()
    Console(width=80, file=held).print(charts.columns(picture))
    return held.getvalue()


def test_a_page_gets_every_point_that_its_axis_can_show() -> None:
    figure = charts.figure(LINES)
    first, second = figure["traces"]
    assert first["x"] == [1, 2, 4] and first["y"] == [1e-1, 1e-2, None]
    assert second["y"] == [0.5, None]
    assert figure["y"]["log"] and "log" not in figure["x"]
    json.dumps(figure, allow_nan=False)


def test_shares_that_are_all_zero_stand_at_the_foot_of_their_axis() -> None:
    def axis(ys: list[float]) -> object:
        return charts.figure(Chart("", "", "", {"a": ([1, 2], ys)}))["y"].get("range")

    assert axis([0, 0]) == [0, 1] and axis([0, 0.5]) is None and axis([0, -0.5]) is None


def test_names_on_a_page_are_words_not_markup() -> None:
    evil = Table("", ("<b>",), [("<script>",)])
    assert "<script>" not in html_table(evil) and "&lt;b&gt;" in html_table(evil)


def test_series_are_told_apart_by_colour_and_by_dash_or_mark() -> None:
    first, second = charts.figure(LINES)["traces"]
    assert first["colour"] != second["colour"] and first["dash"] != second["dash"]
    many = Chart("", "", "", {str(i): ([0], [i]) for i in range(len(LOOKS))}, marks="points")
    assert len({trace["symbol"] for trace in charts.figure(many)["traces"]}) == len(LOOKS)


def test_bars_stand_in_the_order_of_their_xs() -> None:
    figure = charts.figure(Chart("", "", "", {"a": ([3, 1], [1, 2]), "b": ([2], [3])}, marks="bars"))
    assert figure["x"]["names"] == ["1", "2", "3"]
    assert [trace["x"] for trace in figure["traces"]] == [["3", "1"], ["2"]]


def test_a_page_may_say_more_of_an_axis_than_its_chart() -> None:
    axis = charts.figure(LINES, y={"range": (1e-3, 1), "every": 2})["y"]
    assert axis == {"title": "error", "range": [1e-3, 1], "log": True, "every": 2}


def test_a_terminal_gets_one_row_for_each_x_and_a_gap_where_a_series_has_none() -> None:
    text = shown(LINES)
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "0.1", "0.5"] in lines and ["2", "0.01", "–"] in lines and ["8", "–", "inf"] in lines
    assert "How <fast> it falls (error)" in text


def test_a_long_chart_is_thinned_from_its_first_point_to_its_last() -> None:
    long = Chart("long", "x", "y", {"y": (range(1000), [float(x) for x in range(1000)])})
    rows = [line.split() for line in shown(long).splitlines()][2:]
    assert len(rows) == 12 and rows[0] == ["0", "0"] and rows[-1] == ["999", "999"]


def test_a_table_reads_the_same_in_a_terminal() -> None:
    lines = [line.split() for line in shown(TABLE).splitlines()]
    assert ["flat", "354", "yes"] in lines and ["deep", "26", "no"] in lines


def test_brackets_are_words_in_a_terminal() -> None:
    assert "[bold]x" in shown(Table("t", ("[bold]x",), [("[red]",)]))


@pytest.mark.parametrize("picture", [LINES, BARS, TABLE, Table("empty", ("a",))])
def test_a_file_is_a_png(picture: Picture) -> None:
    assert charts.png(picture)[:4] == b"\x89PNG"


def axes(picture: Picture) -> Any:
    return charts.drawing(picture).axes[0]


def test_a_file_shows_the_lines_with_their_names_and_scales() -> None:
    panel = axes(LINES)
    assert [line.get_label() for line in panel.lines] == ["one & only", "other"]
    assert list(panel.lines[0].get_xdata()) == [1, 2, 4]
    assert (panel.get_yscale(), panel.get_xscale()) == ("log", "linear")
    assert panel.get_xlabel() == r"units, \$"


def test_a_file_shows_bars_of_the_right_height() -> None:
    panel = axes(BARS)
    assert [bar.get_height() for bar in panel.patches] == [0.9, 0.06, 0.04]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "1", "2"]


def test_a_file_shows_a_table_cell_by_cell() -> None:
    (table,) = axes(TABLE).tables
    assert table[1, 1].get_text().get_text() == "354" and table[2, 0].get_text().get_text() == "deep"
