"""`avow plan-ranks` and `avow bench shards`: what they print and write, and what they say to nonsense."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from avow.cli.parsing import duration, operations, speed
from avow.distributed import parallel_plan, sparse
from avow.errors import ParameterError
from tests.test_cli import at_home as at_home
from tests.test_cli import refused, run

MANY = ["plan-ranks", "--ranks", "64", "--link", "400GB/s", "--heads", "32", "--key-heads", "8", "--dim", "128"]
DEVICE = ["--dtype", "bfloat16", "--compute", "400TFLOP/s", "--memory", "4.8TB/s"]


def test_json_prices_every_way_and_every_sharding() -> None:
    found = json.loads(run(*MANY, *DEVICE, "--latency", "5us", "--json").stdout)
    assert found["ranks"] == 64 and found["bandwidth"] == 4e11 and found["latency"] == 5e-6
    assert found["machine"] == "ranks of 400TFLOP/s and 4.8TB/s" and found["keys"] == found["queries"] == 131072
    ways = {way["way"]: way for way in found["ways"]}
    assert len(ways) == 6
    ring = ways["exact (ring)"]
    assert ring["over_heads"] * ring["over_sequence"] == 64 and ring["dominated_by"] == "computing"
    assert ring["bytes_sent"] == 7 * 131072 // 8 * 256 * 2
    assert ring["communication_dominates_from"] == 1024
    assert {(s["over_heads"], s["over_sequence"]) for s in ring["shardings"]} == {(1, 64), (2, 32), (4, 16), (8, 8)}
    assert ways["low_rank"]["dominated_by"] == "communication"
    for way in found["ways"]:
        assert way["seconds"] == min(s["seconds"] for s in way["shardings"])


def test_the_table_fits_eighty_columns_and_ends_in_a_verdict() -> None:
    shown = run(*MANY, *DEVICE).stdout
    lines = shown.splitlines()
    assert "…" not in shown and max(map(len, lines)) <= 80
    assert lines[0].startswith("plan for 64 ranks, 400 GB/s and 5 µs a message")
    assert "exact (ring), by sharding" in shown
    assert "exact (ring): 8 over heads × 8 over sequence, 11 ms, 100% of it computing" in lines
    assert "links take longer than computing: separable, random_features, low_rank and sparse" in " ".join(
        shown.split()
    )


def test_slow_links_hold_exact_attention_back() -> None:
    shown = run(*[word.replace("400GB/s", "1Gbit/s") for word in MANY], *DEVICE).stdout
    assert "exact (ring): 8 over heads × 8 over sequence, 471 ms, held back by links: 43× its computing" in " ".join(
        shown.split()
    )


def test_a_step_of_decoding_is_another_plan() -> None:
    found = json.loads(run(*MANY, *DEVICE, "--queries", "1", "--length", "1048576", "--json").stdout)
    assert found["ways"][0]["way"] == "exact (keys)" and found["ways"][-1]["way"] == "exact (ring)"


def test_ranks_like_this_machine_need_no_figures() -> None:
    found = json.loads(run("plan-ranks", "--ranks", "4", "--link", "1GB/s", "--length", "1024", "--json").stdout)
    assert found["machine"] == "ranks like this machine, typical rates: AVOW_CALIBRATION=off"
    assert all(way["seconds"] > 0 for way in found["ways"])


def test_weak_scaling_is_drawn() -> None:
    done = run(*MANY[:2], "256", *MANY[3:], *DEVICE, "--png", "out/weak.png")
    assert done.stderr.strip().endswith("wrote out/weak.png")
    assert Path("out/weak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "64", "--link", "fast"], "link='fast' is not a bandwidth; try --link 400GB/s, or 100Gbit/s"),
        (["--ranks", "64", "--link", "400"], "link='400' is not a bandwidth; try --link 400GB/s, or 100Gbit/s"),
        (["--ranks", "64", "--link", "0GB/s"], "link='0GB/s' must be above 0 and finite; try --link 400GB/s, or"),
        (["--ranks", "64", "--link", "1e400GB/s"], "link='1e400GB/s' must be above 0 and finite; try"),
        (["--ranks", "64", "--link", "1-1GB/s"], "link='1-1GB/s' has no number before its unit; try"),
        (["--ranks", "64"], "--link=(not given) must be given: "),
        (["--ranks", "0", "--link", "1GB/s"], "ranks='0' must be at least 1; see avow plan-ranks --help"),
        (["--ranks", "-3", "--link", "1GB/s"], "ranks='-3' must be at least 1; see avow plan-ranks --help"),
        (["--ranks", "999", "--link", "1GB/s", "--length", "9"], "ranks=999 cannot be spread over 9 keys and 4 key"),
        (["--ranks", "8", "--link", "1GB/s", "--latency", "soon"], "latency='soon' is not a time; try --latency 5us"),
        (["--ranks", "8", "--link", "1GB/s", "--latency", "-1us"], "latency='-1us' must be at least 0 and finite"),
        (
            ["--ranks", "8", "--link", "1GB/s", "--key-heads", "3"],
            "key_heads=3 must divide heads=4; use 1, 2 or 4",
        ),
        (
            ["--ranks", "8", "--link", "1GB/s", "--queries", "0"],
            "queries='0' must be at least 1; see avow plan-ranks --help",
        ),
        (
            ["--ranks", "8", "--link", "1GB/s", "--length", "-5"],
            "length='-5' must be at least 1; see avow plan-ranks --help",
        ),
        (["--ranks", "8", "--link", "1GB/s", "--dtype", "int4"], "dtype='int4' is not known; use one of float64"),
        (["--ranks", "8", "--link", "1GB/s", "--compute", "9TFLOP/s"], "memory=None is needed beside the other figure"),
        (
            ["--ranks", "8", "--link", "1GB/s", "--memory", "9GB/s", "--compute", "much"],
            "compute='much' is not a number of",
        ),
        (["--ranks", "8", "--link", "1GB/s", "--kept", "2"], "kept=2.0 must be from 0 to 1; try --kept 0.1"),
        (["--ranks", "8", "--link", "1GB/s", "--device", "abacus"], "device=abacus is not available; use --device cpu"),
        (
            ["--ranks", "8", "--link", "1GB/s", "--tol", "0.1"],
            "option=--tol is not known to avow plan-ranks; --tol belongs to avow plan and avow plan-decode",
        ),
        (
            ["--link", "400GB/s"],
            "--ranks=(not given) must be given: ranks to spread one attention call over; see avow plan-ranks",
        ),
        (
            ["--ranks", "8", "--link", "1GB/s", "--recalibrate"],
            "recalibrate=True would measure this machine, and AVOW_CALIBRATION=off forbids it; unset",
        ),
        (
            ["--ranks", "8", "--link", "1GB/s", *DEVICE, "--recalibrate"],
            "recalibrate=True measures this machine, and ranks have figures of their own; leave it out, or",
        ),
    ],
)
def test_nonsense_is_answered_in_one_line(arguments: list[str], words: str) -> None:
    assert refused("plan-ranks", *arguments).startswith(f"avow: {words}")


def test_quantities_are_read_as_people_write_them() -> None:
    assert speed("link", " 12.5 GB/s ") == 12.5e9 == speed("link", "100Gbit/s") == speed("link", "100Gb/s")
    assert speed("link", "1GiB/s") == 2**30 and speed("link", "5kB/s") == 5000 and speed("link", "3e2B/s") == 300
    assert duration("latency", "3ns") == 3e-9 and math.isclose(duration("latency", "0.5 ms"), 5e-4)
    assert duration("latency", "7µs") == duration("latency", "7us")
    assert operations("compute", "2tflops") == 2e12 == operations("compute", "2000 GFLOP/s")
    with pytest.raises(ParameterError, match="is not a bandwidth"):
        speed("link", "5gb/s")


def test_simulated_shards_are_counted_and_drawn() -> None:
    done = run("bench", "shards", "--ranks", "4", "--png", "out/shards.png", "--json")
    (result,) = json.loads(done.stdout)["results"]
    assert result["failures"] == [] and len(result["rows"]) == 3 * 6
    assert all(row["sent"] == row["modelled"] and (row["sent"] > 0) == (row["shards"] > 1) for row in result["rows"])
    assert Path("out/shards.png").read_bytes().startswith(b"\x89PNG")


def test_one_shard_is_no_plural() -> None:
    shown = run("bench", "shards", "--ranks", "1").stdout
    assert "8 keys on one shard\n" in shown and "1 shards" not in shown


def test_a_model_that_is_wrong_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SHARES", (0.1,) * 4)
    parallel_plan.Strategy.traffic.cache_clear()
    try:
        shown = run("bench", "shards", "--ranks", "2", code=1).stdout
    finally:
        parallel_plan.Strategy.traffic.cache_clear()
    assert "FAILED: sparse over 2: sent (67313, 17, 17), modelled" in shown


def test_too_many_simulated_shards_are_refused() -> None:
    assert refused("bench", "shards", "--ranks", "5000").startswith("avow: ranks='5000' must be at most 1024; see avow")
