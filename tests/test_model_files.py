"""Models are found by their names on the hub, in the local Hugging Face cache alone; what is not there is said."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import IncompleteSnapshotError
from typer.testing import CliRunner

from avow.cli import app
from avow.errors import FileError
from avow.integrations.transformers.model_files import load_model
from tests.helpers.model_folders import TEXT, cached, long_model, saved

NAME = "acme/tiny-1B"
FIRST, SECOND, THIRD = ("1" * 40, "2" * 40, "3" * 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with different weights."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(saved(long_model(), tmp_path_factory.mktemp("models") / f"tiny{seed}"))
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a machine on which nothing can be fetched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something was fetched"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "hub"


def first_weight(model: Any) -> Any:
    return next(iter(model.parameters()))


def same(found: Any, folder: Path) -> bool:
    return torch.equal(first_weight(found.model), first_weight(load_model(str(folder)).model))


def refusal(source: str) -> str:
    with pytest.raises(FileError) as caught:
        load_model(source)
    return str(caught.value)


def test_a_cached_model_is_found_by_its_name(folders: list[Path], cache: Path) -> None:
    cached(folders[0], cache, NAME, FIRST, "main")
    found = load_model(NAME)
    assert found.name == NAME and same(found, folders[0])
    assert found.tokenizer("the dog").input_ids == load_model(str(folders[0])).tokenizer("the dog").input_ids


def test_a_name_means_main_and_other_revisions_are_named_after_it(folders: list[Path], cache: Path) -> None:
    cached(folders[0], cache, NAME, FIRST, "v1")
    cached(folders[1], cache, NAME, SECOND, "main")
    assert same(load_model(NAME), folders[1]) and not same(load_model(NAME), folders[0])
    for revision in ("v1", FIRST):
        found = load_model(f"{NAME}@{revision}")
        assert found.name == f"{NAME}@{revision}" and same(found, folders[0])


def test_the_only_revision_need_not_be_named_and_is_said(folders: list[Path], cache: Path) -> None:
    cached(folders[0], cache, NAME, FIRST, "v1")
    assert load_model(NAME).name == f"{NAME}@v1"


def test_of_several_revisions_without_main_one_must_be_named(folders: list[Path], cache: Path) -> None:
    cached(folders[0], cache, NAME, FIRST, "v1")
    cached(folders[1], cache, NAME, SECOND)
    words = f"model={NAME} is not in the Hugging Face cache, which has the revisions {SECOND}, v1; "
    assert refusal(NAME) == words + f"use {NAME}@{SECOND}, or run hf download {NAME} first; avow fetches nothing"
    assert refusal(f"{NAME}@v9").endswith(f"or run hf download {NAME} --revision v9 first; avow fetches nothing")


def test_a_model_that_is_not_cached_is_not_fetched(folders: list[Path], cache: Path) -> None:
    words = f"is not a folder, a file, an installed package, or in the Hugging Face cache {cache}; "
    for name in ("meta-llama/Llama-3.2-1B", "gpt2"):
        assert refusal(name) == f"model={name} {words}run hf download {name} first; avow fetches nothing"
    cached(folders[0], cache, NAME, FIRST, "main")
    assert refusal("acme/tiny") == f"model=acme/tiny {words}run hf download acme/tiny first; avow fetches nothing"


def test_a_model_without_its_weights_is_named_with_what_completes_it(folders: list[Path], cache: Path) -> None:
    snapshot = cached(folders[0], cache, NAME, FIRST, "main")
    (snapshot / "model.safetensors").unlink()
    line = refusal(NAME)
    assert line.startswith(f"model={NAME} cannot be loaded (")
    assert line.endswith(f"; run hf download {NAME}, which completes it; avow fetches nothing")


def test_files_that_transformers_does_not_need_may_be_missing(folders: list[Path], cache: Path) -> None:
    """The hub's client lists what a repository holds, and refuses a snapshot that lacks some of it."""
    snapshot = cached(folders[0], cache, NAME, FIRST, "main")
    names = ("model.safetensors", "pytorch_model.bin")
    listed = {
        name: TreeCacheEntry(size=1, blob_id="0", lfs_sha256=None, lfs_size=None, xet_hash=None) for name in names
    }
    write_tree_cache(str(snapshot.parents[1]), FIRST, listed)
    with pytest.raises(IncompleteSnapshotError):
        snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    assert load_model(NAME).name == NAME


def test_a_folder_without_a_tokenizer_says_what_is_missing(folders: list[Path], tmp_path: Path) -> None:
    """As `model.save_pretrained` alone leaves it."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(folders[0] / name, tmp_path / "bare")
    assert refusal("bare") == (
        "model=bare has no tokenizer; save one there with tokenizer.save_pretrained; "
        "in Python, profile and verify also take token ids"
    )


def test_a_package_is_found_by_the_name_that_pip_has_for_it(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders[0], tmp_path / "packages" / "my_llm")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert same(load_model("my-llm"), folders[0]) and same(load_model("my_llm"), folders[0])


def test_several_gguf_files_are_told_apart_by_their_paths(cache: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (files / name).write_bytes(b"GGUF")
    snapshot = cached(files, cache, NAME, FIRST, "main")
    assert refusal(NAME) == f"model={NAME} holds 2 GGUF files; name one of them, such as {snapshot / 'a.gguf'}"


def test_a_folder_of_that_name_comes_first(folders: list[Path], cache: Path) -> None:
    cached(folders[0], cache, NAME, FIRST, "main")
    shutil.copytree(folders[1], NAME)
    assert same(load_model(NAME), folders[1])


def test_the_commands_take_a_name(folders: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AVOW_CALIBRATION", "off")
    cached(folders[0], cache, NAME, FIRST, "main")
    Path("text.txt").write_text(TEXT)
    more = ["--text", "text.txt", "--tokens", "80", "--threads", "1", "--json"]
    done = CliRunner().invoke(app, ["profile", NAME, *more])
    assert done.exit_code == 0 and json.loads(done.stdout)["model"] == NAME, done.output
    done = CliRunner().invoke(
        app, ["verify", NAME, "--plan", "out/plan.json", "--places", "8", "--generate", "2", *more]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["plan"]["model"] == NAME, done.output
    done = CliRunner().invoke(app, ["profile", "acme/none", *more])
    assert done.exit_code == 2 and "run hf download acme/none first; avow fetches nothing" in done.stderr


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_is_where_the_hub_client_has_it(folders: list[Path], tmp_path: Path, variable: str) -> None:
    home = tmp_path / "elsewhere"
    cached(folders[0], home / "hub" if variable == "HF_HOME" else home, NAME, FIRST, "main")
    code = f"from avow.integrations.transformers.model_files import load_model; print(load_model({NAME!r}).name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {variable: str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{NAME}\n", done.stderr
