"""The runs page: what stands on disk, nothing that is half there, and no path that a page could name."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from avow.cli import app
from avow.errors import ParameterError
from avow.lab.pages import runs
from avow.lab.pages.runs import PAGE, RunsInputs, preview
from avow.training import train
from avow.training.run_folder import COLUMNS, OPTIONAL, Log, Progress, parse_log, read_log
from tests.helpers.lab import Lab, running
from tests.helpers.lab_visits import Visit
from tests.helpers.runs import small

CONFIG = '[model]\nattention = "exact"\nlayers = 2\nwidth = 64\n[data]\ntask = "mixture"\n'


def progress(step: int, steps: int = 100) -> Progress:
    return Progress(step, steps, 0.5, 3.0 / step, 1e-3, 1.25, 4321.0, 0.1, 12.5)


def a_run(folder: Path, *steps: int, of: int = 100) -> Log:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(CONFIG)
    log = Log(folder / "log.csv", 0)
    for step in steps:
        log.add(progress(step, of))
    return log


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runs.VARIABLE, str(tmp_path))
    return tmp_path


def facts(answer: dict[str, Any]) -> dict[str, str]:
    return {fact["label"]: fact["value"] for fact in answer["facts"]}


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {run["name"]: run["state"] for run in answer["runs"]}


# ---- what stands on disk


def test_a_real_run_is_drawn_as_it_was_logged(below: Path) -> None:
    train(small(below / "made", "schedule.steps=6", "run.log_every=2"), below / "made" / "run")
    answer = preview(RunsInputs())
    assert states(answer) == {"made/run": "finished"}
    (curve,) = answer["figures"]["curves"]["traces"]
    lines = read_log(below / "made" / "run" / "log.csv")
    assert curve["x"] == [line.step for line in lines] == [2.0, 4.0, 5.0, 6.0]
    assert curve["y"] == [line.loss for line in lines]
    assert facts(answer)["Loss"] == f"{lines[-1].loss:.4g}" and "1 layer of 16" in facts(answer)["Model"]
    (held_out,) = preview(RunsInputs.of({"curve": "held-out loss"}))["figures"]["curves"]["traces"]
    assert held_out["x"] == [5.0, 6.0] and held_out["y"] == [line.held_out_loss for line in lines[2:]]


def test_states_tell_running_finished_stopped_and_not_begun(below: Path) -> None:
    a_run(below / "set/now", 10, 20)
    a_run(below / "set/done", 50, 100)
    a_run(below / "set/old", 10)
    an_hour_ago = time.time() - 3600
    os.utime(below / "set/old/log.csv", (an_hour_ago, an_hour_ago))
    (below / "set/new").mkdir()
    (below / "set/new/run.toml").write_text(CONFIG)
    told = {"set/now": "running", "set/done": "finished", "set/old": "stopped", "set/new": "has not begun"}
    assert states(preview(RunsInputs())) == told
    assert {trace["name"] for trace in preview(RunsInputs())["figures"]["curves"]["traces"]} == {"now", "done", "old"}


def test_one_run_or_one_folder_is_chosen_by_its_name_in_the_list(below: Path) -> None:
    a_run(below / "early/a", 10)
    a_run(below / "early/b", 20)
    long_ago = time.time() - 9999
    for name in ("a", "b"):
        os.utime(below / "early" / name / "log.csv", (long_ago, long_ago))
    a_run(below / "late/c", 30)

    def names(run: str) -> list[str]:
        return [one["name"] for one in preview(RunsInputs(run=run))["runs"] if one["chosen"]]

    assert names("") == ["late/c"] and names("early/b") == ["early/b"] and names("early") == ["early/a", "early/b"]
    assert [one["name"] for one in preview(RunsInputs())["runs"]] == ["late/c", "early/a", "early/b"]
    a_run(below / "top", 10)
    assert names(".") == ["top"]
    assert facts(preview(RunsInputs(run="early/b")))["State"] == "stopped"


@pytest.mark.parametrize("name", ["/etc", "..", "../secret", "set/../../secret", "set\x00", "nowhere"])
def test_a_name_that_is_not_in_the_list_is_no_path(below: Path, name: str) -> None:
    a_run(below.parent / f"{below.name}-secret", 10)
    a_run(below / "set/a", 10)
    answer = preview(RunsInputs(run=name))
    assert "is not one of the runs that are here; choose one from the list" in str(answer["trouble"])
    assert [run["name"] for run in answer["runs"]] == ["set/a"] and not answer["figures"], "here is the list"
    with pytest.raises(ParameterError, match="must have at most 300 characters"):
        RunsInputs.of({"run": "x" * 301})


def test_links_are_not_followed(below: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    a_run(elsewhere / "run", 10)
    (below / "linked").symlink_to(elsewhere)
    assert preview(RunsInputs())["runs"] == []
    a_run(below / "own")
    (below / "own/log.csv").unlink()
    (below / "own/log.csv").symlink_to(elsewhere / "run/log.csv")
    assert states(preview(RunsInputs())) == {"own": "has not begun"}


def test_curves_can_be_rate_gradient_and_speed_in_factors_or_not(below: Path) -> None:
    a_run(below / "a", 10, 20)
    for curve, value in (("learning rate", 1e-3), ("gradient", 1.25), ("speed", 4321.0)):
        drawn = preview(RunsInputs.of({"curve": curve, "log": False}))["figures"]["curves"]
        assert drawn["traces"][0]["y"] == [value, value] and "log" not in drawn["y"]
    assert preview(RunsInputs())["figures"]["curves"]["y"]["log"]


def test_a_loss_that_is_no_number_leaves_a_gap(below: Path) -> None:
    log = a_run(below / "a", 10)
    log.add(Progress(20, 100, 0.5, float("nan"), 1e-3, 1.0, 1.0, 0.1, 1.0))
    assert preview(RunsInputs())["figures"]["curves"]["traces"][0]["y"] == [0.3, None]


# ---- nothing half-written


def test_a_log_cut_anywhere_shows_only_lines_that_have_ended(below: Path) -> None:
    a_run(below / "a", 10, 20, 30)
    whole = (below / "a/log.csv").read_bytes()
    truth = [progress(step) for step in (10, 20, 30)]
    for end in range(len(whole) + 1):
        ended = max(0, whole[:end].count(b"\n") - 1)
        assert parse_log(whole[:end].decode()) == truth[:ended]
        assert runs.curves_of(whole[:end])["eta"] == [line.eta for line in truth[:ended]]


def test_reading_half_a_line_would_have_been_wrong() -> None:
    """The sabotage: a number cut short is another number, and a reader of unfinished lines takes it."""
    head, line = ",".join(COLUMNS), "10,100,0.5,3.25,0.001,1.0,4321.0,0.1,0.0,1.5,4.5,12.75"
    cut = f"{head}\r\n{line[:-2]}"
    careless = list(csv.DictReader(cut.splitlines()))[-1]
    assert float(careless["bits_per_character"]) == 12.0 != 12.75
    (whole,) = parse_log(f"{head}\r\n{line}\r\n")
    assert parse_log(cut) == [] and whole.bits_per_character == 12.75


@pytest.mark.parametrize(
    "junk",
    [b"", b"\xff\xfe\x00", b"{", b"[]", b'"x"', b"[" * 5000, b"a = [" * 5000, b"model = 1\ndata = 2", b"#" * 70000],
)
def test_files_that_are_no_configuration_no_log_and_no_result_are_passed_over(below: Path, junk: bytes) -> None:
    a_run(below / "good", 10)
    (below / "bad").mkdir()
    for name in ("run.toml", "log.csv", "knowledge.json"):
        (below / "bad" / name).write_bytes(junk)
    (below / "good/knowledge.json").write_bytes(junk)
    answer = preview(RunsInputs())
    assert states(answer) == {"good": "running"} and answer["knowledge"] == []


def test_a_log_of_another_shape_is_a_run_that_has_not_begun(below: Path) -> None:
    a_run(below / "a", 10)
    (below / "a/log.csv").write_text("time,value\n1,2\n")
    assert states(preview(RunsInputs())) == {"a": "has not begun"}


def test_a_log_that_grows_is_read_again(below: Path) -> None:
    log = a_run(below / "a", 10)
    assert preview(RunsInputs())["figures"]["curves"]["traces"][0]["x"] == [10.0]
    log.add(progress(20))
    assert preview(RunsInputs())["figures"]["curves"]["traces"][0]["x"] == [10.0, 20.0]


def test_a_long_log_keeps_its_first_and_its_last_step() -> None:
    def content(held_out_every: int) -> bytes:
        own = len(COLUMNS) - len(OPTIONAL)
        rows = ([str(i)] * own + ["1.5" if i % held_out_every == 0 else ""] * len(OPTIONAL) for i in range(3001))
        return "".join(",".join(row) + "\r\n" for row in (COLUMNS, *rows)).encode()

    steps = runs.curves_of(content(10**6))["step"]
    assert len(steps) == 500 and (steps[0], steps[-1]) == (0.0, 3000.0) and steps == sorted(set(steps))
    # Held-out losses are rare, and none of them is lost.
    assert runs.curves_of(content(100))["held_out_loss"].count(1.5) == 31
    assert len(runs.curves_of(content(1))["step"]) <= 1000


# ---- the knowledge table


RESULT = {
    "headline": "After reading, exact is right in 80% of 64 questions.",
    "majority": {"right": 6, "asked": 64, "accuracy": 0.09375, "interval": [0.035, 0.193]},
    "rows": [
        {"arm": "no pretraining", "right": 2, "asked": 64, "accuracy": 0.03125, "interval": [0.0038, 0.108]},
        {
            **{"arm": "exact", "right": 51, "asked": 64, "accuracy": 0.796875, "interval": [0.677, 0.887]},
            **{"accuracy_at_half": 0.9375, "parameters": 107008, "seconds": 77.9},
        },
        {"arm": "latent", "seed": None, "runs": []},
    ],
}


def cells(table: str) -> list[list[str]]:
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table.split("<tbody>")[1], re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


def test_the_knowledge_table_says_what_the_experiment_left(below: Path) -> None:
    (below / "know").mkdir()
    (below / "know/knowledge.json").write_text(json.dumps(RESULT))
    (table,) = preview(RunsInputs())["knowledge"]
    assert "What models know: know" in table and f"<p>{RESULT['headline']}</p>" in table
    rows = cells(table)
    assert rows[0] == ["majority answer", "6/64", "9.4%", "3–20%", "–", "–", "–"]
    assert rows[2] == ["exact", "51/64", "79.7%", "67–89%", "93.8%", "107,008", "77.9 s"]
    assert rows[3] == ["latent", *["–"] * 6]
    assert re.findall(r'<tr class="best"><th scope="row">(.*?)</th>', table) == ["exact"]
    assert 'data-share="0.796875"' in table


def test_a_result_of_other_types_is_dashes_and_no_error(below: Path) -> None:
    (below / "know").mkdir()
    strange = {"headline": "<x>", "majority": [], "rows": [3, {"arm": {}, "accuracy": "high", "interval": [1]}]}
    (below / "know/knowledge.json").write_text(json.dumps(strange))
    (table,) = preview(RunsInputs())["knowledge"]
    assert cells(table) == [["{}", *["–"] * 6]] and "<p>&lt;x&gt;</p>" in table and "best" not in table


# ---- the page and the command


def test_the_command_says_where_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.VARIABLE, "as it was")
    monkeypatch.setattr("avow.lab.server.server", lambda *given: Mock())
    assert CliRunner().invoke(app, ["lab", "--no-open", "--runs", "elsewhere"]).exit_code == 0
    assert runs.folder() == Path("elsewhere")
    assert CliRunner().invoke(app, ["lab", "--no-open"]).exit_code == 0
    assert runs.folder() == Path(runs.DEFAULT_FOLDER)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def own_lab(place: Path) -> Iterator[Lab]:
    """A lab that was told where runs are, as its processes must be when they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(runs.VARIABLE, str(place))
        with running() as found:
            yield found


@pytest.mark.browser
def test_a_page_without_runs_says_how_to_make_one_and_finds_it_by_itself(
    browser: Any, own_lab: Lab, place: Path
) -> None:
    found = Visit(browser, own_lab, "runs", viewport={"width": 390, "height": 844})
    found.page.wait_for_selector("#none:not([hidden])")
    assert f"avow train pretrain {place}/first" in found.page.inner_text("#none")
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    log = a_run(place / "set/first", 10, 20)
    a_run(place / "set/second", 15)
    found.page.wait_for_selector("#runs button[data-state=running]")
    assert found.page.locator("#none").is_hidden()
    found.page.wait_for_selector("#curves svg .line", state="attached")

    button = found.page.locator("#runs li button").first
    button.focus()
    found.page.keyboard.press("Enter")
    found.page.wait_for_selector("#facts dt:has-text('State')")
    found.page.wait_for_url(re.compile("run="))
    assert found.inputs == {"run": "set/first"} and found.fact("Loss") == "0.15"
    log.add(progress(100))
    found.page.wait_for_selector("#runs button[data-state=finished]")
    assert found.fact("Loss") == "0.03"
    focused = found.page.evaluate("document.activeElement.textContent")
    assert focused.startswith("first"), "the button that was pressed keeps the focus"

    (place / "knowledge.json").write_text(json.dumps(RESULT))
    found.page.wait_for_selector("#knowledge tr.best th:has-text('exact')")
    found.close()


def test_nobody_can_ask_for_a_file_by_name(own_lab: Lab) -> None:
    for name in ("/etc/passwd", "../..", "%2e%2e/secret"):
        done = own_lab.post("/api/runs/preview", {"run": name})
        assert done.status == 422 and "choose one from the list" in done.mistake
    assert own_lab.post("/api/runs/preview", {"folder": "/"}).status == 422
    assert PAGE.verdict is None and own_lab.post("/api/runs/verdict", {}).status == 404
