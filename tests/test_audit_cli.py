"""`avow audit` on models in folders: what it prints and writes, when it fails, what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from typer.testing import CliRunner

import avow
from avow.cli import app
from avow.report.audit import audit_page
from tests.helpers.model_folders import TEXT, long_model, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(long_model(), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own with a text in it; threads are given back."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(folder: Path, *arguments: object, code: int = 0) -> Any:
    words = ["audit", folder, "--text", "text.txt", "--threads", "1", "--tokens", "60", "--generate", "8", *arguments]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_healthy_model_passes_with_a_page_and_one_json_document(folder: Path) -> None:
    document = json.loads(run(folder, "--json").stdout)
    assert document["healthy"] and document["unseen"] == {}
    assert {"model.layers.0.self_attn", "model.layers.0.self_attn · cache"} <= {x["name"] for x in document["layers"]}
    page = Path("out/audit.html").read_text()
    terminal = run(folder).stdout
    assert "Layers model.layers.*.self_attn" in terminal and re.search(r"^1 · cache +\w+ +\d", terminal, re.M)
    assert max(map(len, terminal.splitlines())) <= 80 and terminal.count("computed by") == 1
    assert "no alarm in" in page and "model.layers.1.self_attn" in page and 'class="alarm"' not in page


def test_a_broken_kernel_fails_and_is_named(folder: Path) -> None:
    def broken(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> Any:
        v = v.roll(1, -2) if module.layer_idx == 1 else v
        grouped, causal = q.shape[1] != k.shape[1], mask is None and q.shape[2] > 1
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=grouped).transpose(1, 2), None

    AttentionInterface.register("broken", broken)
    AttentionMaskInterface.register("broken", sdpa_mask)
    done = run(folder, "--attention", "broken", code=1)
    assert "avow: ALARM in 1 layer: model.layers.1.self_attn" in done.stderr
    assert 'class="alarm"' in Path("out/audit.html").read_text()


def test_a_tolerance_below_rounding_fails(folder: Path) -> None:
    assert "ALARM" in run(folder, "--tol", "1e-12", "--rate", "0.5", code=1).stderr


def test_an_attention_that_is_not_there_is_refused(folder: Path) -> None:
    done = run(folder, "--attention", "flashiest", code=2)
    assert done.stderr.startswith("avow: attention=flashiest is not available") and "try sdpa or eager" in done.stderr


def test_a_page_of_nothing_and_one_of_hostile_names_are_pages() -> None:
    with avow.auditing() as report:
        pass
    assert "nothing is said" in audit_page(report, "none", 0, "avow audit", "one machine")
    with avow.auditing(rate=1.0, tol=1e-30) as report:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 9, 8).unbind())
    (layer,) = report.layers.values()
    layer.name, layer.error = "</script><b>", math.inf
    report._layers = {layer.name: layer}
    page = audit_page(report, "<tiny>", 9, "avow audit <b>", "one machine")
    assert "<tiny>" not in page and "</script><b>" not in page and "avow audit &lt;b&gt;" in page
