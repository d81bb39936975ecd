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
from avow.bench.cases import Case, Shape, Sizes, cases, count, distances, exact, real, stored
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, shown
from avow.cli import app
from avow.decode import key_value_cache
from avow.nn import KeyValueCache
from benchmarks.figures import result_of, text

TINY = Sizes((200,), 4, 2, 1, 1, torch.float32)


def run(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def saved(folder: Path, keys: int = 300, dim: int = 64, name: str = "a", queries: int = 3) -> Path:
    """A folder with a file of two key heads and four query heads."""
    folder.mkdir(exist_ok=True)
    heads = {"q": torch.randn(4, queries, dim), "k": torch.randn(2, keys, dim), "v": torch.randn(2, keys, dim)}
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
    found = cache.attend(case.q, 1e-2, scale=case.scale)
    assert decode.check(case, cache, found)[1] == []
    loose = dataclasses.replace(found.certificate, bound=0.5)
    assert decode.check(case, cache, Attended(found.out, loose))[1] == ["the bound 0.5 exceeds the tolerance 0.01"]
    lost = Attended(found.out * torch.nan, found.certificate)
    assert decode.check(case, cache, lost)[1][0] == "an answer is not finite"


def test_the_distance_is_that_of_the_definition_and_only_right_rivals_start() -> None:
    case = next(cases("cpu", TINY, None))
    weights = torch.softmax(case.q[0, 3, 0].double() @ case.k[0, 1].double().T * case.scale, -1)
    truth = weights @ case.v[0, 1].double()
    out = torch.zeros(1, 4, 1, 128, dtype=torch.float64)
    unit = torch.linalg.vector_norm(case.v[0, 1].double(), dim=-1).max()
    assert distances(case, out)[0, 3, 0] == pytest.approx(float(truth.norm() / unit))
    names = [name for name, _ in exact(case)]
    assert "math, heads" in names and "math, rows" in names


def test_a_rival_that_is_wrong_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, *_: object, **__: object) -> Tensor:
        return q * 100

    monkeypatch.setattr("avow.bench.cases.scaled_dot_product_attention", wrong)
    assert list(exact(next(cases("cpu", TINY, None)))) == []


def test_real_heads_are_resampled_in_windows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "heads", dim=32)
    case = next(cases("cpu", TINY._replace(lengths=(512,)), folder))
    (load,) = stored(folder)["real"]
    assert case.name == "real" and case.k.shape == (1, 2, 512, 32) and case.scale == pytest.approx(32**-0.5)
    assert case.before is not None
    assert torch.equal(case.q[0, 0], load.q[0, 0, -1:]) and torch.equal(case.before[0, 0], load.q[0, 0, -2:-1])
    starts = [int((load.k[0, 0] == case.k[0, 0, at]).all(-1).nonzero()) for at in (0, 256)]
    for at, start in zip((0, 256), starts, strict=True):
        assert torch.equal(case.k[0, :, at : at + 256], load.k[0, :, start : start + 256])
    paired = next(cases("cpu", TINY, saved(tmp_path / "pairs")))
    assert paired.k.shape[-1] == 128 and paired.scale == pytest.approx(1 / 8)


def test_with_several_layers_the_first_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "heads", name="layer00")
    saved(folder, name="layer01")
    assert [load.kind for load in stored(folder)["real"]] == ["layer01"]


def test_files_are_of_the_text_that_their_names_say(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    for name in ("layer00", "layer09", "code-layer00", "code-layer04", "code-layer13", "a-z-layer10"):
        saved(folder, name=name)
    texts = {text: [load.kind for load in loads] for text, loads in stored(folder).items()}
    # Only layers that are the first of the model are left out.
    assert texts == {"prose": ["layer09"], "a-z": ["a-z-layer10"], "code": ["code-layer04", "code-layer13"]}
    sizes = TINY._replace(lengths=(300, 400), shapes=(Shape("two", 300, batch=2),), steady=(300,))
    assert count(sizes, folder) == 2 * (3 + 2) + 2 and count(sizes, None) == 4
    assert [case.name for case in cases("cpu", TINY, folder)] == ["prose", "a-z", "code", "sharp", "diffuse"]


def test_key_heads_come_from_all_layers_and_siblings_do_not_repeat(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    for layer in range(1, 5):
        saved(folder, name=f"layer{layer:02d}")
    loads = stored(folder)["real"]
    case = real("cpu", TINY._replace(heads=16, groups=4), 256, loads)
    windows = [case.k[0, i, 0, :64] for i in range(4)]
    assert all(bool((load.k[0, 0] == own).all(-1).any()) for load, own in zip(loads, windows, strict=True))
    assert [len(own.unique(dim=0)) for own in case.q[0, :, 0].view(4, 4, 128)] == [4] * 4


def test_sequences_of_a_batch_and_queries_of_a_step_are_other_tokens(tmp_path: Path) -> None:
    loads = stored(saved(tmp_path / "heads", dim=32, queries=20))["real"]
    case = real("cpu", TINY._replace(batch=2, queries=3), 512, loads)
    assert case.q.shape == (2, 4, 3, 32) and case.k.shape == (2, 2, 512, 32) and case.before is not None
    asked = loads[0].q[0, 1]
    assert torch.equal(case.q[0, 1], asked[17:20]) and torch.equal(case.before[0, 1], asked[14:17])
    assert torch.equal(case.q[1, 1], asked[11:14]) and torch.equal(case.before[1, 1], asked[8:11])
    assert not torch.equal(case.k[0], case.k[1])


def test_a_query_among_several_is_held_to_what_it_sees() -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    v[:, :, -1] *= 100
    seen = torch.arange(20) <= torch.arange(17, 20)[:, None]
    wide = [x.double().repeat_interleave(2, 1) for x in (k, v)]
    out = torch.softmax((q.double() @ wide[0].mT).masked_fill(~seen, -torch.inf), -1) @ wide[1]
    case = Case("", q, k, v, 1.0)
    assert float(distances(case, out).max()) < 1e-12
    # The longest value is seen by the last query alone, and the others are not measured in it.
    far = distances(case, out + 0.5)
    unit = torch.linalg.vector_norm(wide[1][:, :, :18], dim=-1).amax(-1)
    assert torch.allclose(far[:, :, 0], 0.5 * 8**0.5 / unit)
    assert float(far[:, :, 2].max()) < 0.1 * float(far[:, :, 0].min())
    free = torch.softmax(q.double() @ wide[0].mT, -1) @ wide[1]
    assert float(distances(case, free, causal=False).max()) < 1e-12 < float(distances(case, free).max())


def test_every_text_is_measured_and_the_worst_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "heads", name="layer09", queries=20)
    saved(folder, name="code-layer04", queries=20)
    shapes = Shape("2 sequences", 300, batch=2, siblings=2), Shape("3 queries", 300, siblings=2, queries=3)
    told: list[str] = []
    sizes = TINY._replace(shapes=shapes, steady=(300,))
    steps, others, single = decode.run("cpu", sizes, folder, told.append)
    assert len(told) == count(sizes, folder)
    assert [result.failures for result in (steps, others, single)] == [[]] * 3
    names = ["prose", "code", decode.WORST, "sharp", "diffuse"]
    assert [row["keys"] for row in steps.rows] == [name for name in names for _ in range(2)]
    texts, worst = steps.rows[:4], steps.rows[4:6]
    for row in worst:
        some = [one for one in texts if one["confidence"] == row["confidence"]]
        least = min(some, key=lambda one: float(one["times faster"] or 0))
        assert row["times faster"] == least["times faster"] and row["because"] == f"{least['keys']}: {least['because']}"
    slow = str(worst[0]["because"]).partition(":")[0]
    assert [(row["shape"], row["text"], row["n"]) for row in others.rows] == [(one.name, slow, 300) for one in shapes]
    assert all(float(row["error"] or 0) <= float(row["bound"] or 0) <= 1e-2 for row in others.rows)
    (row,) = single.rows
    assert row["single steps"] == 64 and float(row["slowest over median"] or 0) >= 1
    # A page tells the tables apart by their columns.
    assert all("keys" not in row for row in others.rows + single.rows)
    assert all(len({tuple(row) for row in result.rows}) == 1 for result in (steps, others, single))


def test_the_worst_text_is_that_of_the_nearest_length() -> None:
    rows: list[Row] = [
        {"keys": name, "n": n, "confidence": 1.0, "times faster": 9.0, "captured times faster": ratio, "because": ""}
        for name, n, ratio in (
            ("a", 100, 2.0),
            ("b", 100, 3.0),
            ("a", 900, 3.0),
            ("b", 900, 2.0),
            ("diffuse", 100, 0.9),
        )
    ]
    assert [decode.worst_text(rows, ["a", "b"], n) for n in (1, 400, 600, 5000)] == ["a", "a", "b", "b"]
    told = decode.with_worst(rows, ["a", "b"])
    assert [(row["keys"], row["n"]) for row in told] == [
        ("a", 100), ("b", 100), (decode.WORST, 100), ("diffuse", 100), ("a", 900), ("b", 900), (decode.WORST, 900)
    ]  # fmt: skip
    assert decode.with_worst(rows, ["a"]) == rows


def test_goals_are_judged_by_what_was_found() -> None:
    row: Row = {"keys": "real", "n": 65536, "confidence": 1.0, "times faster": 0.5}
    missed, met = (decode.goals([row | {"times faster": ratio}])[0] for ratio in (0.5, 1.5))
    assert str(missed) == "MISSED: real keys, n = 65536: not slower than exact; found 0.5" and met.met
    assert decode.goals([row | {"n": 4096}]) == []
    row = {"keys": "real", "n": 131072, "confidence": 1.0, "step ms": 0.3, "captured ms": 0.06}
    late, fast = decode.goals([row | {"captured times faster": 2.3}])
    assert str(late) == "MISSED: called at 131072 tokens: at most 0.2 ms; found 0.3 ms"
    assert str(fast).endswith("real keys, n = 131072: captured, 2.2 times exact; found 2.3") and fast.met


def test_with_several_texts_goals_are_judged_on_the_worst() -> None:
    def row(keys: str, took: float, ratio: float) -> Row:
        ratios: Row = {"captured ms": 0.1, "captured times faster": ratio}
        return {"keys": keys, "n": 131072, "confidence": 1.0, "step ms": took} | ratios

    rows = [row("a", 0.1, 2.5), row("b", 0.3, 2.4), row(decode.WORST, 0.1, 1.5), row("diffuse", 1.0, 0.95)]
    late, slow, flat = decode.goals(rows, ["a", "b"])
    assert str(late) == "MISSED: called at 131072 tokens: at most 0.2 ms; found 0.3 ms"
    assert str(slow) == "MISSED: worst of the texts, n = 131072: captured, 2.2 times exact; found 1.5"
    assert flat.met and str(flat).endswith("diffuse keys, n = 131072: captured, 0.93 times exact; found 0.95")


def test_goals_of_other_shapes_and_single_steps() -> None:
    row: Row = {"shape": "8 queries", "text": "code", "n": 131072, "captured ms": None, "captured times faster": None}
    (goal,) = decode.shape_goals([row | {"because": "there are several queries to a head"}])
    aim = "8 queries, code, n = 131072: captured, 1.8 times exact"
    assert str(goal) == f"MISSED: {aim}; found not captured (there are several queries to a head)"
    (goal,) = decode.shape_goals([row | {"captured ms": 0.1, "captured times faster": 1.9}])
    assert str(goal) == f"met: {aim}; found 1.9"
    assert decode.shape_goals([row | {"n": 4096}]) == []
    single: Row = {"single steps": 64, "text": "code", "n": 262144, "slowest over median": 1.6}
    (goal,) = decode.steady_goals([single])
    assert str(goal) == "MISSED: slowest of 64 steps, code, n = 262144: at most 1.5 medians; found 1.6"
    assert decode.steady_goals([single | {"n": 300}]) == []


def test_exact_attention_far_behind_in_a_trial_is_not_timed_further() -> None:
    counted: list[str] = []

    class Fixed(Clock):
        def in_turns(self, *calls: Any, graph: bool = True) -> list[float]:
            for call in calls:
                call()
            return [{"fast": 1.0, "near": 1.1, "slow": 9.0}[name] for name in counted[-len(calls) :]]

    calls = [lambda name=name: counted.append(name) for name in ("slow", "near", "fast")]
    assert decode._fastest(calls, Fixed("cpu", 3, 1), False) == 1.0
    assert counted == ["slow", "near", "fast", "near", "fast"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_that_no_kernel_serves_is_told_and_not_captured(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Steady(Clock):
        def in_turns(self, *calls: Any, graph: bool = True) -> list[float]:
            return [0.002 if graph else 0.004 for _ in calls]

    def capture(steps: list[Any]) -> tuple[list[Any], Attended]:
        # Where the last step's answer appears: a replay appends nothing here.
        return [lambda: None], steps[-1]()

    monkeypatch.setattr(key_value_cache, "SHORTEST", 1 if sparse else 2**20)
    monkeypatch.setattr(decode, "captured_steps", capture)
    case = next(cases("cpu", TINY._replace(lengths=(4224,)), None))
    ((row, faults),) = decode._measure(case, Steady("cuda", 1, 1), (1.0,), "label")
    assert row is not None and faults == [] and row["captured exact ms"] == 2.0 and row["exact ms"] == 4.0
    assert row["answered by"] == ("sparse" if sparse else "exact")
    assert row["captured times faster"] == (0.5 if sparse else None)
    assert ("too short" in str(row["because"])) is not sparse
    assert "–" in text(Result("steps", [row])) or sparse


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
    line = (
        "avow: triton is not installed; it is needed by the kernels on a GPU; pip install triton, or use --device cpu\n"
    )
    assert run(code=2).stderr == line


def test_a_case_knows_its_length() -> None:
    assert Case("", torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 7, 2), torch.zeros(1, 1, 7, 2), 1.0).length == 7
