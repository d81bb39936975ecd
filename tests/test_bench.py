"""`avow bench`: answers are checked before they are timed, what fails has no speed, and nonsense is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from avow.attend import Attended
from avow.bench import decode
from avow.bench.cases import Case, Sizes, cases, distances, exact, stored
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, shown
from avow.cli import app
from avow.nn import KeyValueCache, key_value_cache
from benchmarks.figures import result_of, text

TINY = Sizes((200,), 4, 2, 1, 1, torch.float32)


def run(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def saved(folder: Path, keys: int = 300, dim: int = 64, name: str = "a") -> Path:
    """A folder with a file of two key heads and four query heads."""
    folder.mkdir(exist_ok=True)
    heads = {"q": torch.randn(4, 3, dim), "k": torch.randn(2, keys, dim), "v": torch.randn(2, keys, dim)}
    save_file(heads, folder / f"{name}.safetensors")
    return folder


def test_a_step_that_reads_a_part_is_timed_beside_exact_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine where a look at the sketch costs little, so that short caches tell both ways apart.
    monkeypatch.setattr(key_value_cache, "SHORTEST", 1)
    done = run("--device", "cpu", "--quick", "--heads", str(saved(tmp_path / "heads")), "--json")
    document = json.loads(done.stdout)
    (result,) = document["results"]
    rows = {(row["keys"], row["confidence"]): row for row in result["rows"]}
    assert set(rows) == {(name, sure) for name in ("real", "sharp", "diffuse") for sure in (1.0, 0.999)}
    assert all(row["error"] <= row["bound"] <= 1e-2 and row["times faster"] > 0 for row in rows.values())
    assert rows["sharp", 1.0]["answered by"] == "sparse" and "read" in rows["sharp", 1.0]["because"]
    assert rows["diffuse", 1.0]["answered by"] == "exact"
    assert result["failures"] == [] and document["machine"] and "[3/3] diffuse" in done.stderr


def test_a_step_is_an_append_and_an_attend_beside_a_copy_and_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    appended, attended = [], []
    append, attend = KeyValueCache.append, KeyValueCache.attend

    def appending(self: KeyValueCache, k: Tensor, v: Tensor) -> None:
        appended.append(k.shape[2])
        append(self, k, v)

    def attending(self: KeyValueCache, *arguments: Any) -> Attended:
        attended.append(self.length)
        return attend(self, *arguments)

    monkeypatch.setattr(KeyValueCache, "append", appending)
    monkeypatch.setattr(KeyValueCache, "attend", attending)
    sizes = TINY._replace(lengths=(100,), rounds=2, calls=3)
    (result,) = decode.run("cpu", sizes, None, lambda step: None)
    assert [row["n"] for row in result.rows] == [100] * 4 and result.failures == []
    # Checked once, then timed: each time after one more token.
    assert attended == [*range(101, 108)] * 4 and appended == [100, *[1] * 7] * 4


def test_the_table_is_for_people() -> None:
    shown = run("--device", "cpu", "--quick", "--length", "100").stdout
    assert "times faster" in shown and "cache too short for sparse decoding (101 tokens)" in shown


def test_an_answer_that_breaks_its_bound_gets_no_speed_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KeyValueCache.attend

    def careless(self: KeyValueCache, *arguments: Any) -> Attended:
        out, certificate = honest(self, *arguments)
        return Attended(out + 0.1, certificate)

    monkeypatch.setattr(KeyValueCache, "attend", careless)
    done = run("--device", "cpu", "--length", "100", "--json", code=1)
    (result,) = json.loads(done.stdout)["results"]
    assert result["rows"] == [] and len(result["failures"]) == 4
    assert result["failures"][0].startswith("sharp, n = 100, confidence 1: a bound was broken: error ")


def test_a_bound_above_the_tolerance_is_a_fault() -> None:
    case = next(cases("cpu", TINY, None))
    cache = KeyValueCache(2, 128)
    cache.append(case.k, case.v)
    found = cache.attend(case.q.unsqueeze(2), 1e-2, scale=case.scale)
    assert decode.check(case, cache, found)[1] == []
    loose = dataclasses.replace(found.certificate, bound=0.5)
    assert decode.check(case, cache, Attended(found.out, loose))[1] == ["the bound 0.5 exceeds the tolerance 0.01"]
    lost = Attended(found.out * torch.nan, found.certificate)
    assert decode.check(case, cache, lost)[1][0] == "an answer is not finite"


def test_the_distance_is_that_of_the_definition_and_only_right_rivals_start() -> None:
    case = next(cases("cpu", TINY, None))
    weights = torch.softmax(case.q[0, 3].double() @ case.k[0, 1].double().T * case.scale, -1)
    truth = weights @ case.v[0, 1].double()
    out = torch.zeros(1, 4, 128, dtype=torch.float64)
    unit = torch.linalg.vector_norm(case.v[0, 1].double(), dim=-1).max()
    assert distances(case, out)[0, 3] == pytest.approx(float(truth.norm() / unit))
    names = [name for name, _ in exact(case)]
    assert "math, heads" in names and "math, rows" in names


def test_a_rival_that_is_wrong_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, *_: object, **__: object) -> Tensor:
        return q * 100

    monkeypatch.setattr("avow.bench.cases.scaled_dot_product_attention", wrong)
    assert list(exact(next(cases("cpu", TINY, None)))) == []


def test_real_heads_are_resampled_in_windows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "heads", dim=32)
    real = next(cases("cpu", TINY._replace(lengths=(512,)), folder))
    (load,) = stored(folder)
    assert real.name == "real" and real.k.shape == (1, 2, 512, 32) and real.scale == pytest.approx(32**-0.5)
    assert torch.equal(real.q[0, 0], load.q[0, 0, -1])
    starts = [int((load.k[0, 0] == real.k[0, 0, at]).all(-1).nonzero()) for at in (0, 256)]
    for at, start in zip((0, 256), starts, strict=True):
        assert torch.equal(real.k[0, :, at : at + 256], load.k[0, :, start : start + 256])
    paired = next(cases("cpu", TINY, saved(tmp_path / "pairs")))
    assert paired.k.shape[-1] == 128 and paired.scale == pytest.approx(1 / 8)


def test_with_several_layers_the_first_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "heads", name="layer00")
    saved(folder, name="layer01")
    assert [load.kind for load in stored(folder)] == ["layer01"]


def test_goals_are_judged_by_what_was_found() -> None:
    row: Row = {"keys": "real", "n": 65536, "confidence": 1.0, "times faster": 0.5}
    missed, met = (decode.goals([row | {"times faster": ratio}])[0] for ratio in (0.5, 1.5))
    assert str(missed) == "MISSED: real keys, n = 65536: not slower than exact; found 0.5" and met.met
    assert decode.goals([row | {"n": 4096}]) == []
    row = {"keys": "real", "n": 131072, "confidence": 1.0, "step ms": 0.3, "captured ms": 0.06}
    late, fast = decode.goals([row | {"captured times faster": 2.3}])
    assert str(late) == "MISSED: called at 131072 tokens: at most 0.2 ms; found 0.3 ms"
    assert str(fast).endswith("real keys, n = 131072: captured, 2.2 times exact; found 2.3") and fast.met


def test_calls_take_turns() -> None:
    order: list[str] = []
    times = Clock("cpu", 2, 2).in_turns(lambda: order.append("a"), lambda: order.append("b"))
    assert order == list("aabbaabb") and len(times) == 2 and all(seconds > 0 for seconds in times)


def test_a_result_travels_as_plain_data_and_shows_what_failed() -> None:
    made = Result("title", [{"a": 1, "b": 2.5e-7}], [Goal("aim", "found", False)], ["remark"], ["why"])
    assert result_of(json.loads(json.dumps(made.plain()))) == made
    lines = text(made).splitlines()
    assert lines[0] == "title" and "  FAILED: why" in lines and "  MISSED: aim; found found" in lines
    assert shown(None) == "–" and shown(0.0) == "0"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--length", "0"], "length='0' must be at least 1; see avow bench decode --help"),
        (["--length", "64", "--length", "-3"], "length='-3' must be at least 1; see avow bench decode --help"),
        (["--device", "abacus"], "device=abacus is not available; use --device cpu"),
        (["--heads", "nowhere"], "heads=nowhere is not a folder; name a folder of .safetensors files with q, k and v"),
        (["--heads", "empty"], "heads=empty holds no .safetensors file; save q, k and v of some heads there"),
        (["--heads", "short"], "heads=short holds a file of fewer than 256 keys or 2 queries; save longer heads"),
        (["--heads", "mixed"], "heads=mixed holds heads of different sizes; keep one model and one length to a folder"),
        (["--heads", "broken"], "heads=broken/a.safetensors is truncated or no safetensors file"),
    ],
)
def test_nonsense_gets_name_value_rule_and_remedy(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken"):
        Path(name).mkdir()
    Path("broken/a.safetensors").write_bytes(b"nothing")
    saved(Path("short"), keys=255)
    for name, dim in (("a", 64), ("b", 64), ("c", 32)):
        saved(Path("mixed"), dim=dim, name=name)
    done = run("--device", "cpu", *arguments, code=2)
    assert done.stdout == "" and done.stderr.startswith(f"avow: {line}") and done.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--device", "cuda", code=2).stderr == "avow: device=cuda is not available; use --device cpu\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("avow.cli.bench.find_spec", lambda name: None)
    line = "avow: triton=missing is needed by the kernels on a GPU; pip install triton, or use --device cpu\n"
    assert run(code=2).stderr == line


def test_a_case_knows_its_length() -> None:
    assert Case("", torch.zeros(1, 1, 2), torch.zeros(1, 1, 7, 2), torch.zeros(1, 1, 7, 2), 1.0).length == 7
