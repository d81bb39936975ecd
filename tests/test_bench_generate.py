"""`avow bench generate`: tokens of a whole model that asks real heads' queries, in every way beside the others."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from typer.testing import CliRunner

from avow.bench import generate
from avow.cli import app
from avow.integrations.transformers import CertifiedCache, Verification, verified

TINY = generate.QUICK["cpu"]._replace(lengths=(256,), layers=1, hidden=32, inner=32, words=64, rounds=1, calls=17)
WAYS = [
    "ideal",
    "transformers, dynamic cache",
    "transformers, static cache",
    "avow, 0.01",
    "avow, verified (16)",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate.QUICK, "cpu", TINY)


def test_every_way_writes_tokens_and_verified_ones_say_what_was_read() -> None:
    result = CliRunner().invoke(app, ["bench", "generate", "--quick", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["results"]
    assert [row["way"] for row in table["rows"]] == WAYS
    assert all(row["ms"] > 0 and row["n"] == 256 for row in table["rows"])
    last = table["rows"][-1]
    assert last["accepted"] > 0.5 and 0 < last["read"] < 1
    assert "1 layers" in table["title"] and "float32" in table["title"]


def test_a_draft_beyond_the_tolerance_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a certificate of a draft that promises less."""
    monkeypatch.setattr(Verification, "look", lambda told, _: setattr(told, "bound", 0.5))
    result = CliRunner().invoke(app, ["bench", "generate", "--quick", "--device", "cpu", "--json"])
    assert result.exit_code == 1
    (table,) = json.loads(result.stdout)["results"]
    assert table["failures"] == ["sharp, n = 256: drafts within 5.0e-01, beyond 0.01"]


@torch.no_grad()
def test_attention_is_asked_the_given_queries_at_their_places_and_its_own_afterwards() -> None:
    model = generate._model("cpu", TINY)
    table = torch.randn(1, 4, 8, 128)
    ids = torch.arange(5)[None]
    seen: dict[str, Any] = {}
    layer = model.model.layers[0].self_attn

    def before(module: Any, given: Any, output: Any) -> None:
        seen["out"] = output[0]

    handle = layer.register_forward_hook(before)
    plain = model(ids).logits
    with generate._asking(table):
        asked = model(ids)
    k, v = asked.past_key_values.layers[0].keys, asked.past_key_values.layers[0].values
    wanted = scaled_dot_product_attention(table[:, :, :5], k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(seen["out"], layer.o_proj(wanted.transpose(1, 2).flatten(2)))
    assert not torch.equal(plain, asked.logits) and torch.equal(plain, model(ids).logits)
    handle.remove()


def test_models_of_two_ways_share_their_weights() -> None:
    model = generate._model("cpu", TINY)
    twin = generate._twin(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs) and twin.config is not model.config


def test_what_a_way_has_to_read_and_holds_is_counted_in_bytes() -> None:
    model, cache = generate._model("cpu", TINY), DynamicCache()
    k, v = torch.randn(2, 1, TINY.groups, 256, 128)
    cache.update(k, v, 0)
    theirs = generate._Facts.of(model, SimpleNamespace(cache=cache), 256)
    assert theirs.held == (k.nbytes + v.nbytes) / 256
    weights = sum(x.nbytes for name, x in model.named_parameters() if "embed_tokens" not in name)
    assert theirs.bytes == weights + k.nbytes + v.nbytes
    ours = CertifiedCache(model.config, capacity=256)
    ours.update(k, v, 0)
    found = generate._Facts.of(model, SimpleNamespace(cache=ours), 256)
    assert found.held == pytest.approx(ours.layers[0].cache.nbytes / 256) and found.bytes == theirs.bytes
    ours.drafts = verified.Drafts(Verification(tokens=16, passes=1, drafted=15, looked=1, read=0.1, bound=1e-3))
    found = generate._Facts.of(model, SimpleNamespace(cache=ours), 256)
    sparse = weights + (k.nbytes + v.nbytes) * (0.1 + ours.layers[0].cache.overhead)
    assert found.bytes == pytest.approx((15 * sparse + theirs.bytes) / 16) and found.bound == 1e-3


def test_queries_are_replaced_where_nothing_else_has_registered_our_functions() -> None:
    """As in the command line's process, where nothing imports them before."""
    lines = "import torch", "from avow.bench import generate", "with generate._asking(torch.zeros(1, 1, 1, 8)): pass"
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
