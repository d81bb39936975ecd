"""`avow profile` and `avow verify` on models in folders: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import avow
from avow.cli import app
from avow.integrations.transformers import profiling
from avow.integrations.transformers.head_kinds import KINDS
from avow.integrations.transformers.model_files import load_model
from tests.helpers.model_folders import LLAMA, TEXT, long_model, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(long_model(), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own with a text in it; threads are given back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    Path("text.txt").write_text(TEXT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--text", "text.txt", "--threads", "1"])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def refused(*arguments: object) -> str:
    """The one line that a mistake ends in, with nothing written."""
    done = run(*arguments, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert not list(Path("out").glob("*"))
    return str(done.stderr.strip())


def test_a_profile_gives_a_page_a_plan_and_one_json_document_and_its_plan_is_verified(folder: Path) -> None:
    done = run("profile", folder, "--tokens", "160", "--json", "--budget", "0.9")
    document = json.loads(done.stdout)
    assert document["model"] == "tiny" and document["tokens"] == 160
    assert list(document["layers"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    head = document["layers"]["model.layers.1.self_attn"][3]
    assert head["kind"] in KINDS and len(head["tokens"]) == 3
    assert len(head["readings"]) == 8 and document["unmeasured"] == []
    assert head["within_tolerance"]["sparse"]["bound"] <= 0.01
    assert done.stderr.endswith("wrote out/profile.html\nwrote out/plan.json\n")
    lines = done.stderr.splitlines()
    assert lines[0] == "[1/3] model.layers.0.self_attn", "nothing is known of the time left"
    assert re.fullmatch(r"\[2/3\] model.layers.1.self_attn · \d+:\d\d left", lines[1])
    assert re.fullmatch(r"\[3/3\] the cost of a new token · \d+:\d\d left", lines[2])
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    avow.apply(model, "out/plan.json")

    more = ["--plan", "out/plan.json", "--tokens", "160", "--places", "16", "--generate", "4"]
    done = run("verify", folder, *more, "--json")
    verdict, lines = json.loads(done.stdout), done.stderr.splitlines()
    assert lines[:3] == [
        "[1/4] the text before, by exact attention",
        "[2/4] 21 tokens by exact attention",
        "[3/4] tokens 1 to 16 of 21 under the plan",
    ]
    assert re.fullmatch(r"\[4/4\] tokens 17 to 21 of 21 under the plan · \d+:\d\d left", lines[3]) and len(lines) == 4
    assert verdict["kept"] and verdict["within"] and verdict["places"] == 16 and verdict["generated"] == 4
    assert verdict["plan"]["fingerprint"] == document["fingerprint"]
    assert max(verdict["bounds"].values()) <= 0.01 and verdict["divergence"] < 1e-2
    shown = run("verify", folder, *more).stdout
    assert "every layer is proved within 0.01" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_the_table_is_for_people_and_fits_eighty_columns(folder: Path) -> None:
    shown = run("profile", folder, "--tokens", "100").stdout
    assert all(word in shown for word in ("resting", "induction", "sparse", "low_rank", "random_features", "of 8"))
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    page = Path("out/profile.html").read_text()
    assert page.startswith("<!doctype html>") and "Every figure of every head" in page
    heads = json.loads(page.partition('id="heads">')[2].partition("</script>")[0])
    assert heads["words"] == list(TEXT[:100]), "the page has the text's words"


@pytest.mark.parametrize("when", ["layer", "speed"])
def test_an_interrupted_run_reports_and_writes_what_it_has(
    folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if when == "speed":
        monkeypatch.setattr("avow.integrations.transformers.model_plan.decoding_speed", interrupt)
    else:
        measure = profiling._heads
        calls = iter([measure, interrupt])
        monkeypatch.setattr(profiling, "_heads", lambda *given: next(calls)(*given))
    done = run("profile", folder, "--tokens", "100", code=130)
    last = done.stderr.splitlines()[-1]
    plan = avow.integrations.transformers.ModelPlan.from_json(Path("out/plan.json").read_text())
    page = Path("out/profile.html").read_text()
    assert list(plan.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    avow.apply(transformers.LlamaForCausalLM.from_pretrained(folder), plan)
    if when == "speed":
        assert last == "avow: interrupted after all layers, before the cost of a new token was measured"
        assert "of 8" in done.stdout and "was interrupted" not in page
        return
    assert last == "avow: interrupted after 1 of 2 layers; the others are exact in the plan"
    assert "tiny, 1 of 2 layers: " in done.stdout and "of 4" in done.stdout
    assert "The run was interrupted." in page
    assert all(setting.method == "exact" for setting in plan.layers["model.layers.1.self_attn"])


def test_an_installed_package_is_found_and_none_of_its_code_is_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "carries_a_model"
    package.parent.mkdir()
    os.symlink(folder, package)
    (folder / "__init__.py").write_text("raise RuntimeError('code was run')")
    monkeypatch.syspath_prepend(str(package.parent))
    assert load_model("carries_a_model").name == "carries_a_model"


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("nowhere/at/all", [], "model=nowhere/at/all is neither a folder, nor a file, nor an installed package, nor a"),
        ("json", [], "model=json holds neither config.json nor a GGUF file; name the folder or the file of one model"),
        ("text.txt", [], "model=text.txt is not a GGUF file; name a folder, a .gguf file, an installed package"),
        (
            None,
            ["--tokens", "9999"],
            f"tokens=9999 exceeds the text's {len(TEXT)}; give a longer text or ask for fewer",
        ),
        (None, ["--tokens", "1"], "tokens=1 is too few; give at least 2 tokens"),
        (None, ["--tokens", "520"], "tokens=520 exceeds the model's 512 positions; ask for at most 512"),
        (None, ["--tol", "0"], "tol=0.0 must be above 0 and finite; try tol=1e-2"),
        (None, ["--budget", "2"], "budget=2.0 must be above 0 and at most 1; try budget=0.5"),
        (None, ["--html", "/proc/none/a.html"], "path=/proc/none/a.html has no folder"),
        (None, ["--threads", "0"], "threads='0' must be at least 1; see avow "),
    ],
)
def test_a_wrong_argument_is_named(folder: Path, model: str | None, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["profile", str(model or folder), "--text", "text.txt", *arguments])
    assert done.exit_code == 2 and done.stderr.strip().splitlines()[-1].startswith(f"avow: {words}"), done.stderr


def test_a_missing_text_and_one_that_is_no_text_are_named(folder: Path) -> None:
    Path("text.txt").unlink()
    assert refused("profile", folder) == "avow: text=text.txt does not exist; check the path"
    Path("text.txt").write_bytes(b"\xff\xfe\x00")
    assert refused("profile", folder).startswith("avow: text=text.txt cannot be read (")
    Path("text.txt").unlink()
    Path("text.txt").mkdir()
    told = "avow: text=text.txt cannot be read (Is a directory); name a text file in UTF-8"
    assert refused("profile", folder) == told
    assert refused("profile", "nowhere") == told, "a text is read before a model is loaded"


def test_a_model_that_is_not_supported_is_named_with_the_reason(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    bloom = saved(transformers.BloomForCausalLM(config), tmp_path / "bloom")
    words = "avow: model=transformer.h.0.self_attention (BloomAttention) computes attention by itself"
    assert refused("profile", bloom).startswith(words)


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    broken = saved(LLAMA.build(), tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(b"nothing")
    assert refused("profile", broken).startswith(f"avow: model={file} is truncated or no safetensors file (7 bytes are")
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert refused("profile", broken).startswith(f"avow: model={broken} cannot be loaded (")


def test_a_plan_of_another_model_is_refused_and_so_is_no_plan(folder: Path, tmp_path: Path) -> None:
    run("profile", folder, "--tokens", "60", "--plan", "plan.json", "--html", "page.html")
    torch.manual_seed(1)
    other = saved(long_model(), tmp_path / "other")
    line = refused("verify", other, "--plan", "plan.json")
    assert line.startswith("avow: plan=tiny was made for a model with the fingerprint ") and "run avow profile" in line
    line = refused("verify", folder, "--plan", "none.json")
    assert line == "avow: plan=none.json does not exist; write one with avow profile MODEL --plan"
    line = refused("verify", "no-such-model", "--plan", "plan.json", "--tokens", "100")
    assert line == (
        "avow: tokens=100 is too short a text to predict its last 128 from at least one before them; "
        "use 130 tokens or more, or fewer places"
    ), "before a model is looked for"
