"""The command line: what it prints where, what it writes, and what it says when it is told nonsense."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import avow
from avow import calibration, file_io
from avow.bench import compare
from avow.calibration import Rate
from avow.cli.options import methods
from avow.core import Method
from avow.planner import Plan
from tests.helpers.command import refused, run
from tests.test_schema import faults

SMALL = ["--length", "72", "--heads", "2", "--dim", "8", "--quick"]


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with the built-in rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AVOW_CALIBRATION", "off")


@pytest.mark.commands
def test_json_is_one_document_with_every_method_and_nothing_else_is_on_stdout() -> None:
    done = run("compare", *SMALL, "--kinds", "copying,diffuse", "--json")
    document = json.loads(done.stdout)
    assert [w["kind"] for w in document["workloads"]] == ["copying", "diffuse"]
    for w in document["workloads"]:
        assert {row["method"] for row in w["rows"]} == set(avow.all_methods())
        measured = [row for row in w["rows"] if not row["why"]]
        assert all(row["ratio"] > 0 and row["error"] >= 0 and row["peak_bytes"] > 0 for row in measured)
        assert any(row["frontier"] for row in measured)
        assert w["decoding"]["keys"] == 72 and [step["tol"] for step in w["decoding"]["steps"]] == [
            0.1,
            0.01,
            1e-3,
            0.01,
        ]
    assert document["headline"] and "wrote out/compare.html" in done.stderr


@pytest.mark.commands
def test_the_table_names_every_method_and_fits_eighty_columns() -> None:
    done = run("compare", *SMALL, "--kinds", "clustered")
    assert all(name in done.stdout for name in avow.all_methods())
    assert "…" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert Path("out/compare.html").read_text().startswith("<!doctype html>")


def test_the_sweep_grows_in_length() -> None:
    arguments = ["--length", "64", "--heads", "1", "--dim", "8", "--kinds", "diffuse", "--methods", "exact", "--json"]
    document = json.loads(run("compare", *arguments).stdout)
    assert [point["length"] for point in document["scaling"]] == [16, 32, 64, 128, 256]


@pytest.mark.commands
def test_decoding_is_shown_at_the_longest_length_of_the_sweep() -> None:
    arguments = ["--length", "64", "--heads", "1", "--dim", "8", "--kinds", "diffuse", "--methods", "exact,sparse"]
    shown = run("compare", *arguments).stdout
    assert "decoding: the last query against 256 keys in a cache" in shown
    assert "decoding" not in run("compare", *arguments, "--methods", "exact").stdout


def test_a_report_that_cannot_be_written_whole_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out").mkdir()
    Path("out/compare.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    line = refused_after_lines("compare", *SMALL, "--kinds", "diffuse", "--methods", "exact")
    assert line == "avow: path=out/compare.html cannot be written (No space left on device); name another place"
    assert Path("out/compare.html").read_text() == "old" and os.listdir("out") == ["compare.html"]


def refused_after_lines(*arguments: str) -> str:
    return str(run(*arguments, code=2).stderr.strip().splitlines()[-1])


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "peak_bytes", interrupted)
    done = run("compare", *SMALL, "--kinds", "diffuse", code=130)
    assert done.stderr.endswith("avow: interrupted; nothing was written\n") and list(Path("out").iterdir()) == []


def test_a_setting_can_be_pinned() -> None:
    arguments = ["--kinds", "diffuse", "--methods", "low_rank", "--set", "low_rank.rank=7", "--json"]
    (w,) = json.loads(run("compare", *SMALL, *arguments).stdout)["workloads"]
    assert [row["parameters"] for row in w["rows"]] == [{"rank": 7}]


def test_a_picture_is_written_on_request() -> None:
    run("compare", *SMALL, "--kinds", "diffuse", "--methods", "exact", "--png", "pictures/frontier.png")
    assert Path("pictures/frontier.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--kinds", "wild"], "kind='wild' is not a kind of workload; known kinds: "),
        (["--kinds", ","], "kinds=',' names no kind of workload; known kinds: "),
        (["--methods", "magic"], "method='magic' is not a method; known methods: exact, "),
        (["--set", "nonsense"], "set='nonsense' must read METHOD.NAME=VALUE; try --set low_rank.rank=32"),
        (["--set", "magic.x=1"], "method='magic' is not a method; "),
        (["--set", "low_rank.colour=1"], "low_rank: colour='1' is not a parameter; known parameters: rank"),
        (["--set", "low_rank.rank=many"], "low_rank: rank=many must be a whole number; the default is 64"),
        (["--set", "low_rank.rank=0"], "low_rank: rank=0 must be from 1 to 65536; "),
        (["--set", "low_rank.rank=99"], "low_rank: rank=99 exceeds 72 keys; use rank<=72"),
        (
            ["--methods", "exact", "--set", "low_rank.rank=8"],
            "set='low_rank.rank=8' sets a method that is not compared; ",
        ),
        (["--length", "0"], "length='0' must be at least 1; see avow "),
        (["--threads", "0"], "threads='0' must be at least 1; see avow "),
        (["--device", "abacus"], "device=abacus is not available; use --device cpu"),
        (["--html", "."], "path=. is a folder; name a file in it"),
        (["--input", "none.safetensors"], "input=none.safetensors does not exist; check the path"),
    ],
)
def test_nonsense_gets_name_value_rule_and_remedy(arguments: list[str], line: str) -> None:
    assert refused("compare", *SMALL, *arguments).startswith(f"avow: {line}")


def test_a_truncated_file_and_one_without_q_are_refused() -> None:
    x = torch.randn(1, 8, 4)
    save_file({"k": x, "v": x.clone()}, "keys.safetensors")
    assert "lacks q (it holds k, v); save tensors" in refused("compare", "--input", "keys.safetensors")
    Path("cut.safetensors").write_bytes(Path("keys.safetensors").read_bytes()[:50])
    assert "is truncated or no safetensors file" in refused("plan", "--input", "cut.safetensors")


@pytest.mark.commands
def test_a_users_own_heads_are_compared() -> None:
    heads = {"q": torch.randn(4, 5, 8), "k": torch.randn(2, 40, 8), "v": torch.randn(2, 40, 8)}
    save_file(heads | {"q_positions": torch.tensor([3, 9, 20, 30, 39])}, "own.safetensors")
    (w,) = json.loads(run("compare", "--input", "own.safetensors", "--causal", "--quick", "--json").stdout)["workloads"]
    assert w["sizes"]["queries"] == 5 and w["sizes"]["key_heads"] == 2
    assert {row["method"] for row in w["rows"] if not row["why"]} == set(avow.all_methods())
    (short,) = json.loads(
        run("compare", "--input", "own.safetensors", "--causal", "--length", "21", "--quick", "--json").stdout
    )["workloads"]
    assert (short["sizes"]["queries"], short["sizes"]["keys"]) == (3, 21)


def missing_from_help(text: str) -> list[str]:
    """Methods and parameters that a help text leaves out."""
    words = {name: name for name in avow.all_methods()}
    for name, kind in avow.all_methods().items():
        words |= {f"{name}.{p.name}": f"{name}.{p.name}={p.default}" for p in kind.declared()}
    return [name for name, word in words.items() if word not in text]


def test_help_lists_every_method_and_parameter() -> None:
    assert missing_from_help(run("compare", "--help").stdout) == []
    assert missing_from_help("exact: exact.precision=native") != []


def test_a_new_method_shows_up_in_help_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Window(Method):
        name = "window"
        summary = "the last few keys"

    monkeypatch.setattr(avow, "all_methods", lambda: {"window": Window})
    assert methods() == {"Methods": [("window", "the last few keys")]}


def test_plan_ranks_and_gives_every_loser_a_reason() -> None:
    arguments = ["plan", "--length", "256", "--heads", "2", "--dim", "16", "--tol", "1e-2"]
    document = json.loads(run(*arguments, "--json").stdout)
    first, *rest = document["candidates"]
    assert document["chosen"] == 0 and first["lost"] == "" and first["seconds"] > 0 and first["bound"] <= 1e-2
    assert {c["method"] for c in document["candidates"]} == set(avow.all_methods())
    assert any(c["lost"] for c in rest)
    shown = run(*arguments)
    assert "would run" in shown.stdout and "→" in shown.stdout


def test_a_long_plan_is_priced_for_its_length_without_drawing_it() -> None:
    def price(length: int) -> dict[str, float]:
        arguments = ["plan", "--length", str(length), "--heads", "1", "--dim", "8", "--json"]
        found = json.loads(run(*arguments).stdout)["candidates"]
        return {c["method"]: c["seconds"] for c in found}

    near, far = price(4096), price(2**20)
    assert far["exact"] > 1e4 * near["exact"]


def test_a_plan_is_for_the_type_the_batch_and_the_key_heads_that_are_asked_for() -> None:
    arguments = ["plan", "--length", "256", "--heads", "4", "--dim", "16", "--json"]

    def exact(*more: str) -> dict[str, float]:
        found = json.loads(run(*arguments, *more).stdout)["candidates"]
        return next(c for c in found if c["parameters"] == {"precision": "native"})

    one, several = exact(), exact("--batch", "8")
    assert several["seconds"] > 6 * one["seconds"] and several["peak_bytes"] > 2 * one["peak_bytes"]
    assert exact("--dtype", "bfloat16")["bound"] > 10 * one["bound"]
    assert exact("--queries", "1")["seconds"] < one["seconds"]
    shared = json.loads(run(*arguments, "--key-heads", "2").stdout)
    assert shared["candidates"] and shared["schema"] == "avow.plan/1"


def test_a_plan_follows_its_schema() -> None:
    for more in (["--tol", "1e-2"], ["--rtol", "0.5", "--confidence", "0.9"], ["--tol", "1e-20"], []):
        found = json.loads(run("plan", "--length", "64", "--heads", "1", "--dim", "8", *more, "--json").stdout)
        assert faults(found, Plan.json_schema()) == []
        assert faults(found | {"chosen": "exact"}, Plan.json_schema()) != []
        assert faults({**found, "candidates": [{}]}, Plan.json_schema()) != []


def test_a_plan_of_few_queries_tells_where_decoding_is_planned() -> None:
    hint = "for steps that read a cache: avow plan-decode"
    arguments = ["plan", "--length", "256", "--heads", "1", "--dim", "8"]
    assert hint in " ".join(run(*arguments, "--queries", "1").stdout.split())
    assert hint not in " ".join(run(*arguments).stdout.split())


def test_plan_says_that_it_measures_and_json_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AVOW_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = {name: Rate(1e-6, 1e-10, 1e-12) for name in avow.all_methods()}
    monkeypatch.setattr(calibration, "measure_rates", lambda device: rates)
    arguments = ["plan", "--length", "64", "--heads", "1", "--dim", "8"]
    line = "avow: measuring how fast this machine runs each method: about 2 s, at most 6 s, once\n"
    done = run(*arguments, "--json")
    assert done.stderr == line and json.loads(done.stdout)["rates"].startswith("measured on 2")
    assert run(*arguments).stderr == "" and run(*arguments, "--recalibrate").stderr == line
    half = " ".join(run(*arguments, "--dtype", "bfloat16").stdout.split())
    assert "times are those of float32: this machine was not measured in bfloat16" in half


def test_a_plan_without_hope_says_so() -> None:
    arguments = ["plan", "--length", "64", "--heads", "1", "--dim", "8", "--tol", "1e-20"]
    assert "nothing available proves tolerance 1e-20; the best bound is" in run(*arguments).stdout
    assert json.loads(run(*arguments, "--json").stdout)["chosen"] is None


def test_a_wrong_tolerance_is_refused() -> None:
    line = refused("plan", "--tol", "-1")
    assert line == "avow: tol=-1.0 must be a number above 0; try tol=1e-2, or leave it out for exact"


def test_the_version_is_shown() -> None:
    assert run("--version").stdout == f"avow {avow.__version__}\n"


def test_the_place_is_checked_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.Bench, "board", lambda *_: pytest.fail("work began"))
    Path("file").write_text("")
    assert "has no folder" in refused("compare", *SMALL, "--html", "file/page.html")
    assert file_io.ready(Path("fine/page.html")) is None


def test_errors_are_shown_in_both_units() -> None:
    arguments = ["--length", "64", "--heads", "1", "--dim", "8", "--kinds", "diffuse", "--methods", "exact", "--quick"]
    shown = run("compare", *arguments).stdout
    assert "errors and bounds are relative to the longest value that a row sees" in shown
    assert "diffuse: errors relative to the length of the true answer" in shown
    (load,) = json.loads(run("compare", *arguments, "--json").stdout)["workloads"]
    for row in load["rows"]:
        assert row["error"] < row["relative_error"] < row["relative_bound"] and row["bound"] < row["relative_bound"]
    page = Path("out/compare.html").read_text()
    assert "<th>bound of answer</th>" in page and "relative to the true answer" in page


def test_a_plan_is_made_for_a_relative_tolerance() -> None:
    arguments = ["plan", "--length", "256", "--heads", "2", "--dim", "16", "--rtol", "1e-2"]
    document = json.loads(run(*arguments, "--json").stdout)
    assert (document["tol"], document["rtol"]) == (None, 1e-2) and 0 < document["aim"] < 1e-2
    assert "plan for relative tolerance 0.01, which is about" in run(*arguments).stdout
    assert "rtol=-1.0 must be a number above 0" in refused("plan", "--rtol", "-1")


def test_a_plan_of_one_query_is_a_step_of_decoding() -> None:
    def memory(*more: str) -> int:
        found = json.loads(run("plan", "--length", "65536", "--heads", "1", "--dim", "8", "--json", *more).stdout)
        (native,) = [x for x in found["candidates"] if x["parameters"] == {"precision": "native"}]
        return int(native["peak_bytes"])

    step = memory("--queries", "1")
    assert memory() > step + 65535 * 8 * 4
    assert memory("--queries", "1", "--causal") == step, "the last query sees every key"
    assert memory("--queries", "2") > step
    assert "queries='0' must be at least 1" in refused("plan", "--queries", "0")
    assert "queries=9 must be from 1 to the 8 there are" in refused("plan", "--length", "8", "--queries", "9")
