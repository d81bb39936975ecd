"""`avow plan-decode`: what it prints, what it finds out about heads, and what it says to nonsense."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from avow.cli import plan_decode as cli
from avow.decode import step_rates as decode_rates
from avow.decode.plan import DecodePlan
from tests.test_cli import at_home as at_home
from tests.test_cli import refused, run
from tests.test_decode_plan import RATES
from tests.test_schema import faults

SHAPE = ["--heads", "32", "--key-heads", "8", "--dim", "128", "--dtype", "bfloat16"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates as a measurement leaves them, of whatever heads."""
    monkeypatch.setattr(decode_rates, "_of_few", lambda z, tell, again: RATES)


def test_json_has_time_and_memory_of_a_step_and_follows_its_schema(measured: None) -> None:
    found = json.loads(run("plan-decode", "--tokens", "131072", *SHAPE, "--json").stdout)
    assert faults(found, DecodePlan.json_schema()) == []
    assert found["schema"] == "avow.plan_decode/1" and found["tokens"] == 131072 and found["dtype"] == "bfloat16"
    assert found["token_bytes"] == 131072 * 8 * 256 * 2 < found["exact_bytes"] < found["sparse_bytes"]
    assert found["offloaded_bytes"] < 0.35 * found["token_bytes"]
    assert found["exact_seconds"] > found["sparse_seconds"] > 0 and found["chosen"] == "sparse"
    assert found["kept"] == 0.1 and found["kept_source"] == "assumed" and found["rates"] == "made up"
    assert faults(found | {"chosen": "fast"}, DecodePlan.json_schema()) != []


def test_the_table_says_what_every_figure_rests_on(measured: None) -> None:
    shown = run("plan-decode", *SHAPE).stdout
    lines, words = shown.splitlines(), " ".join(shown.split())
    assert max(map(len, lines)) <= 80 and "…" not in shown
    assert lines[0] == "a decoding step over 131,072 tokens, one layer"
    assert lines[1] == "32 heads on 8 key heads, dimension 128, bfloat16, cpu"
    assert [line.split()[0] for line in lines[3:6]] == ["exact", "sparse", "PyTorch's"]
    assert "sparse: 10.0% of the tokens read, assumed: name it with --kept" in words
    assert "host memory" not in words, "on a CPU it is the device's"
    assert "times: made up" in words and "sparse pays from 16,384 tokens on if 10.0% of them are read" in words
    assert "times as fast as exact" in words and "times as fast as SDPA" in words


def test_a_short_cache_is_exact(measured: None) -> None:
    shown = " ".join(run("plan-decode", "--tokens", "8192", *SHAPE).stdout.split())
    assert "sparse is not used: caches of fewer than 16,384 tokens are read in full" in shown
    assert "exact: 82 ms a step" in shown and "the sketch takes" not in shown


def test_heads_that_read_much_are_exact_at_any_length(measured: None) -> None:
    shown = " ".join(run("plan-decode", *SHAPE, "--kept", "0.9").stdout.split())
    assert "sparse: 90.0% of the tokens read, given" in shown and "exact: " in shown
    assert "sparse pays at no length if 90.0% of the tokens are read" in shown


def test_without_measurements_sdpa_is_not_priced() -> None:
    shown = run("plan-decode", *SHAPE).stdout
    assert "SDPA was not measured" in shown and "typical rates: AVOW_CALIBRATION=off" in shown


def test_the_share_is_found_on_a_users_own_heads() -> None:
    k, v = torch.randn(2, 2, 640, 16).unbind()
    positions = torch.tensor([100, 300, 599])
    q = 40 * k[:, positions].repeat_interleave(2, 0)  # each looks at its own key
    save_file({"q": q, "k": k, "v": v, "q_positions": positions}, "own.safetensors")
    found = json.loads(run("plan-decode", "--input", "own.safetensors", "--tokens", "50000", "--json").stdout)
    assert (found["heads"], found["key_heads"], found["dim"], found["dtype"]) == (4, 2, 16, "float32")
    assert found["tokens"] == 50_000 and 0 < found["kept"] < 0.5
    assert found["kept_source"] == "found on 600 tokens of own at tolerance 0.01"
    half = json.loads(
        run("plan-decode", "--input", "own.safetensors", "--tokens", "400", "--dtype", "bfloat16", "--json").stdout
    )
    assert half["dtype"] == "bfloat16" and half["kept_source"].startswith("found on 301 tokens of own")


def test_the_share_is_found_on_drawn_heads_of_a_kind() -> None:
    arguments = ["plan-decode", "--heads", "4", "--key-heads", "2", "--dim", "64", "--tokens", "20000", "--json"]
    sharp, flat = (json.loads(run(*arguments, "--kind", kind).stdout) for kind in ("copying", "diffuse"))
    assert sharp["kept"] < 0.2 < flat["kept"] and sharp["kept_source"].startswith("found on 4,096 tokens of copying")
    assert sharp["chosen"] == "sparse" and flat["sparse_seconds"] > sharp["sparse_seconds"]


def test_measuring_is_said_on_stderr_and_json_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AVOW_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decode_rates, "measure_steps", lambda z: (RATES, False))
    done = run("plan-decode", *SHAPE, "--json")
    assert json.loads(done.stdout)["exact_seconds"] > 0
    assert done.stderr.endswith(
        "avow: measuring decoding steps of these heads on this machine, once: 2 to 5 s, given up after 10 s "
        "if other work has the processors\n"
    )
    assert run("plan-decode", *SHAPE, "--json").stderr == ""
    assert "measuring decoding steps" in run("plan-decode", *SHAPE, "--recalibrate").stderr


def test_without_numba_nothing_is_looked_for_that_no_step_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cli, "_share", lambda *arguments: pytest.fail("a share was looked for"))
    shown = " ".join(run("plan-decode", *SHAPE, "--kind", "copying").stdout.split())
    assert "sparse is not used: numba is not installed (pip install 'avow[cpu]')" in shown and "exact: " in shown
    found = json.loads(run("plan-decode", *SHAPE, "--kind", "copying", "--json").stdout)
    assert found["kept_source"] == "not looked for" and found["chosen"] == "exact"


def test_a_window_bounds_what_is_read_and_kept(measured: None) -> None:
    found, short = (
        json.loads(run("plan-decode", *SHAPE, *more, "--json").stdout)
        for more in (("--window", "4096"), ("--tokens", "4096"))
    )
    assert found["window"] == 4096 and short["window"] is None
    assert found | {"window": None} == short
    assert "over 4,096 tokens in a window of 4,096, one layer" in run("plan-decode", *SHAPE, "--window", "4096").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "tokens='0' must be at least 1; see avow plan-decode --help"),
        (["--key-heads", "3"], "key_heads=3 must divide heads=32; use 1, 2, 4, 8, 16 or 32"),
        (["--dtype", "int4"], "dtype='int4' is not known; use one of float64"),
        (["--kept", "2"], "kept=2.0 must be from 0 to 1; try kept=0.1"),
        (["--queries", "9", "--tokens", "8"], "queries=9 exceeds the 8 tokens; try queries=8"),
        (["--kept", "0.1", "--kind", "copying"], "kind=copying would find the share that --kept gives; leave one of"),
        (
            ["--tol", "0.1"],
            "tol=0.1 needs heads: which share of the tokens it lets a step read depends on them; add --input FILE or "
            "--kind averaging, or give the share with --kept",
        ),
        (["--kind", "wild"], "kind='wild' is not a kind of workload; known kinds: "),
        (["--device", "abacus"], "device=abacus is not available; use --device cpu"),
        (["--input", "none.safetensors"], "input=none.safetensors does not exist; check the path"),
        (["--recalibrate"], "recalibrate=True would measure this machine, and AVOW_CALIBRATION=off forbids it; unset"),
        (["--ranks", "8"], "option=--ranks is not known to avow plan-decode; --ranks belongs to avow plan-ranks"),
        (
            ["--length", "8"],
            "option=--length is not known to avow plan-decode; did you mean --tokens? --length belongs",
        ),
        (["--input", "a", "--heads", "3"], "heads=3 follows from the heads of --input; leave --heads or --input out"),
        (["--input", "a", "--key-heads", "3"], "key-heads=3 follows from the heads of --input; leave --key-heads or"),
    ],
)
def test_nonsense_is_answered_in_one_line(arguments: list[str], words: str) -> None:
    assert refused("plan-decode", *arguments).startswith(f"avow: {words}")
