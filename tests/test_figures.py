"""Figures on pages are those that were measured: each is found in docs/figures, and none stands there unmeasured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from avow.bench.results import Goal, Result, Row
from benchmarks import run as running
from benchmarks.catalogue import ALL, NEEDS, Benchmark
from benchmarks.figures import Measured, NoFigure, answer, everything, table
from benchmarks.options import Options
from benchmarks.page import (
    NUMBERS,
    QUOTED,
    ROOT,
    TABLE,
    anchor,
    filled,
    main,
    markdown,
    numbers,
    pages,
    questions,
    section,
    written,
)

# What looks like a measurement: a number with a unit of time, memory or speed, a share, or so many times as much.
FIGURE = re.compile(
    r"(?<![\w.])[+−-]?\d[\d,.]*(?:e-?\d+)?(?:[–-]\d[\d,.]*)?(?:%|\s(?:ms|µs|us|s|seconds|minutes|min|GB|GiB|MB|MiB|kB|KiB|"
    r"times|TFLOP/s|TB/s|nats|microseconds)(?![\w/-]))(?!<!--)"
)
# What was decided or follows from sizes, and was not measured; in tutorials also what their own output shows.
NOT_MEASURED = {
    "docs/knowledge.md": ["95%, Clopper"],
    "docs/lab.md": ["at most 32 MiB", "64 KiB, which", "at most 64 KiB.", "at most 5 s,", "(270 MB)"],
    "docs/others.md": ["30%, 50% and 70% of skipped tiles"],
    "docs/profile.md": ["have 90%, 99% and 99.9% of the mass"],
    "docs/ranks.md": [
        "13 kB a row, 20 kB if",
        "A rank sends 20 kB a row for it, and 2 kB more",
    ],
    "docs/tutorials/audit.md": [
        "at least 99% of the 8,192 rows",
        "of at most 1%, over",
        "An error of 7% of the longest value",
        "2.2 times as long as",
        "up to 1% of the rows",
        "about 99% of the rows",
    ],
    "docs/tutorials/decode.md": ["an error of 1% of", "0.1% of the tokens could"],
}


def prose(text: str) -> str:
    """What a reader reads as words: no code, no formulas, no tables that a question made."""
    text = TABLE.sub("", text)
    text = re.sub(r"^ *```.*?^ *```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", text)


def unmeasured(text: str, allowed: list[str]) -> list[str]:
    """Figures on a page that carry no name, and are not said to be no measurements."""
    text = prose(text)
    for words in allowed:
        assert words in text, f"{words!r} is no longer there: take it off the list"
        text = text.replace(words, "")
    return [text[max(0, found.start() - 30) : found.end() + 10] for found in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_quotes_was_measured(page: Path) -> None:
    text = page.read_text()
    assert filled(text, questions(), everything()) == text, "python -m benchmarks.page puts figures in"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_stands_there_without_its_name(page: Path) -> None:
    assert unmeasured(page.read_text(), NOT_MEASURED.get(str(page.relative_to(ROOT)), [])) == []


def test_the_page_of_numbers_is_that_of_the_files() -> None:
    assert NUMBERS.read_text() == numbers(everything()), "python -m benchmarks.page writes it"


def test_every_section_of_the_page_shows_a_table() -> None:
    known = everything()
    assert [one.name for one in ALL if one.name in known and "\n| --" not in section(one, known)] == []


def test_every_name_is_quoted_somewhere_and_every_file_has_a_section() -> None:
    said = {found["name"] for page in pages() for found in QUOTED.finditer(page.read_text())}
    assert said == set(questions())
    assert set(everything()) <= {one.name for one in ALL}
    assert all(one.command == known.command for one in ALL if (known := everything().get(one.name)))


@pytest.mark.parametrize(
    "words",
    [
        "it is 3.2 times faster",
        "it takes 40 ms",
        "reads 6% of them",
        "| 0.230 ms |",
        "within 7–11% of it",
        "1.4 GB more",
    ],
)
def test_a_figure_without_a_name_is_caught(words: str) -> None:
    assert len(unmeasured(words, [])) == 1
    named = re.sub(r"(\d)(%?)(?= |$)", r"\1\2<!--name-->", words)
    assert unmeasured(named.replace("–", "<!--name--> to "), []) == []


@pytest.mark.parametrize("words", ["`--seconds 40 ms`", "$40 ms$", "```text\n40 ms\n```\n", "in 40 msec", "torch 2.11"])
def test_what_is_no_figure_is_left_alone(words: str) -> None:
    assert unmeasured(words, []) == []


def known(**changes: Any) -> dict[str, Measured]:
    rows: list[Row] = [
        {"keys": "real", "n": 1024, "read": 0.0634, "times faster": 3.216},
        {"keys": "real", "n": 2048, "read": 0.02, "times faster": 4.0271},
        {"keys": "made up", "n": 2048, "read": None, "times faster": 0.5},
    ]
    results = [Result("steps", rows, [Goal("fast", "4", True), Goal("faster", "4", False)], ["A remark."])]
    about: dict[str, Any] = {
        "command": "python -m benchmarks.run --only overhead",
        "machine": "an abacus, wood",
        "date": "2026-11-16",
    }
    return {"overhead": Measured("overhead", **(about | {"seconds": 12.3, "results": results} | changes))}


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("overhead; keys=real; n=2048; times faster", 4.0271),
        ("overhead; largest times faster", 4.0271),
        ("overhead; keys=real; smallest times faster", 3.216),
        ("overhead; keys=real|made up; n=2048; total times faster", 4.5271),
        ("overhead; seconds of all", 12.3),
    ],
)
def test_a_question_is_answered_from_the_rows(question: str, value: float) -> None:
    assert answer(question, known()) == pytest.approx(value)


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("linear; times faster", "linear was never measured"),
        ("overhead; keys=real; times faster", "2 rows say that, and differently"),
        ("overhead; keys=fake; times faster", "no row of overhead says that"),
        ("overhead; speed", "no row of overhead says that"),
        ("overhead; keys=made up; read", "no row of overhead says that"),
    ],
)
def test_a_question_without_one_answer_is_refused(question: str, why: str) -> None:
    with pytest.raises(NoFigure, match=why):
        answer(question, known())


def test_a_table_is_cut_from_the_rows() -> None:
    rows = table("overhead; keys=real; n as tokens, read as read %, times faster", known())
    assert rows[0] == {"tokens": 1024, "read %": pytest.approx(6.34), "times faster": 3.216} and len(rows) == 2
    assert markdown(rows).splitlines()[:3] == [
        "| tokens | read % | times faster |",
        "| ---: | ---: | ---: |",
        "| 1,024 | 6.34 | 3.22 |",
    ]
    with pytest.raises(NoFigure, match="no row of overhead says that"):
        table("overhead; keys=fake; n", known())
    rows = [{"n": 1024, "times as fast": 1.5}]
    assert table("overhead; n, times as fast", known(results=[Result("x", rows)])) == rows


def test_numbers_are_written_to_the_digits_that_the_page_gives() -> None:
    assert (written(0.1074, "9", True), written(-0.0012, "−0.1", True), written(0.001, "+0.1", True)) == (
        "11",
        "−0.1",
        "+0.1",
    )
    assert (written(4.0271, "3.9"), written(960768, "1"), written(2.46e-8, "1.0e-8")) == ("4.0", "960,768", "2.5e-8")


def test_a_page_is_filled_and_a_stale_one_differs() -> None:
    names = {"fast": "overhead; keys=real; n=2048; times faster", "read": "overhead; keys=real; n=1024; read"}
    page = (
        "It is **3.9<!--fast-->** times\nas fast, reads 7%<!--read-->.\n\n"
        "<!-- table: overhead; n=2048; keys, times faster -->\n| stale |\n<!-- end of table -->\n"
    )
    once = filled(page, names, known())
    assert "**4.0<!--fast-->** times" in once and "6%<!--read-->" in once and "| made up | 0.5 |" in once
    assert filled(once, names, known()) == once != page
    with pytest.raises(NoFigure, match=r"quoted.toml has no slow"):
        filled("1<!--slow-->", names, known())


def test_the_page_has_a_section_with_command_machine_day_and_goals() -> None:
    (overhead,) = (one for one in ALL if one.name == "overhead")
    made = numbers(
        known(results=[Result("x", [{"n": 1, "causal": "no", "on top": 0.1}], [Goal("aim", "less", False)])])
    )
    assert "0 of 1 goals were met." in made and "Goals met: 0 of 1.\n\n- MISSED: aim; found less" in made
    assert f"(#{anchor(overhead.title)})" in made and f"## {overhead.title}" in made
    assert "`python -m benchmarks.run --only overhead`, 2026-11-16, an abacus, wood; 12 s." in made


def test_a_result_is_kept_to_six_digits_and_read_again(tmp_path: Path) -> None:
    made = known(seconds=1.23456789)["overhead"]
    path = made.save(tmp_path)
    assert Measured.load(path).seconds == 1.23457 and Measured.load(path).results == made.results
    assert everything(tmp_path) == {"overhead": Measured.load(path)}


def test_the_command_fills_a_repository_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs" / "figures"
    folder.mkdir(parents=True)
    known()["overhead"].save(folder)
    (folder / "quoted.toml").write_text('fast = "overhead; largest times faster"\nslow = "linear; seconds"\n')
    (tmp_path / "README.md").write_text("1.0<!--fast--> times\n")
    (tmp_path / "CONTRIBUTING.md").write_text("nothing\n")
    assert main(["--root", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == "4.0<!--fast--> times\n"
    assert "## What a certificate costs" in (tmp_path / "docs" / "numbers.md").read_text()
    (tmp_path / "README.md").write_text("1.0<!--slow--> s\n")
    assert main(["--root", str(tmp_path)]) == 1
    assert "README.md: linear; seconds: linear was never measured" in capsys.readouterr().err


def catalogued(monkeypatch: pytest.MonkeyPatch, function: Any, needs: tuple[str, ...] = ()) -> None:
    """A catalogue of one benchmark that this module runs."""
    monkeypatch.setattr("tests.test_figures.toy", function, raising=False)
    one = Benchmark("toy", "A toy", "It counts.", "tests.test_figures:toy", 0.1, ("toy; n",), needs)
    monkeypatch.setattr(running, "ALL", (one,))


def test_a_run_keeps_its_figures_with_command_machine_and_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogued(monkeypatch, lambda options: Result("counted", [{"n": 3 if options.quick else 4}]))
    assert running.main(["--quick", "--figures", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "toy.json").read_text())
    assert kept["command"] == "python -m benchmarks.run --only toy" and kept["results"][0]["rows"] == [{"n": 3}]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", kept["date"]) and "torch" in kept["machine"] and kept["seconds"] >= 0
    assert "counted" in capsys.readouterr().out


def test_small_sizes_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogued(monkeypatch, lambda options: Result("counted", [{"n": 3}]))
    monkeypatch.setattr(Measured, "save", lambda made, folder: pytest.fail("kept"))
    assert running.main(["--quick"]) == 0


def test_what_fails_or_breaks_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogued(monkeypatch, lambda options: Result("counted", failures=["a bound was broken"]))
    assert running.main(["--figures", str(tmp_path)]) == 1 and "FAILED: a bound" in capsys.readouterr().out
    catalogued(monkeypatch, lambda options: 1 // 0)
    assert running.main(["--figures", str(tmp_path)]) == 1 and "ZeroDivisionError" in capsys.readouterr().err


def test_what_a_machine_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogued(monkeypatch, lambda options: pytest.fail("ran"), ("heads",))
    assert running.main([]) == 0 and "toy: left out; it needs --heads DIR" in capsys.readouterr().out
    assert running.main(["--only", "toy"]) == 1, "what was asked for and cannot run is a failure"
    assert running.main(["--only", "toys"]) == 2 and "toys is no benchmark; known: toy" in capsys.readouterr().err
    assert running.main(["--heads", str(tmp_path)]) == 2
    assert f"--heads: {tmp_path} holds no *.safetensors; name a folder of" in capsys.readouterr().err
    assert all(running.lacking(one, Options()) for one in ALL if "heads" in one.needs or "corpus" in one.needs)
    assert {need for one in ALL for need in one.needs} == set(NEEDS)


def test_every_benchmark_can_be_loaded_and_all_of_a_cpus_take_half_an_hour() -> None:
    import importlib

    for one in ALL:
        module, _, function = one.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function or "run")), one.run
    plain = [one for one in ALL if not set(one.needs) - {"browser"}]
    assert sum(one.minutes for one in plain) <= 40
