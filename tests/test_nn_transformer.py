"""The language model: its size, its first weights, its causality, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from avow.errors import DtypeError, InputError, ParameterError, ShapeError, UnknownMethod
from avow.nn import Block, ModelConfig, TransformerLM, build

SMALL = ModelConfig(vocabulary=20, block=32, layers=2, heads=2, width=16, dropout=0.0)
POSITIONS = ("learned", "sinusoidal", "rotary")
EVERY = [
    dataclasses.replace(SMALL, attention=attention, settings=settings, positions=positions)
    for attention, settings in (("exact", {}), ("separable", {}), ("random_features", {"features": 8}))
    for positions in POSITIONS
]
every_model = pytest.mark.parametrize("config", EVERY, ids=lambda c: f"{c.attention}-{c.positions}")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_classic_configuration_has_its_known_size() -> None:
    classic = ModelConfig(vocabulary=256)
    assert (classic.layers, classic.heads, classic.width, classic.block) == (4, 8, 256, 128)
    # 4 blocks of 12w² + 13w, a table of tokens, one of places, a norm, a head
    blocks = 4 * (12 * 256**2 + 13 * 256)
    assert count(TransformerLM(classic)) == blocks + 256 * 256 + 128 * 256 + 2 * 256 + 256 * 256 == 3_323_392
    assert count(TransformerLM(dataclasses.replace(classic, positions="rotary"))) == 3_323_392 - 128 * 256
    assert count(TransformerLM(dataclasses.replace(classic, key_heads=2))) < 3_323_392 <= 3_400_000


def test_it_is_the_gpt_of_the_textbook() -> None:
    model = TransformerLM(dataclasses.replace(SMALL, layers=1)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(20, (3, 11))
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (16,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["tokens.weight"][ids] + w["places.places.weight"][:11]
    inward = norm(x, "blocks.0.before_attention") @ w["blocks.0.attention.inward.weight"].T
    q, k, v = (inward + w["blocks.0.attention.inward.bias"]).reshape(3, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
    read = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 11, 16)
    x = x + read @ w["blocks.0.attention.outward.weight"].T + w["blocks.0.attention.outward.bias"]
    hidden = norm(x, "blocks.0.before_mlp") @ w["blocks.0.mlp.0.weight"].T + w["blocks.0.mlp.0.bias"]
    x = x + nn.functional.gelu(hidden) @ w["blocks.0.mlp.2.weight"].T + w["blocks.0.mlp.2.bias"]
    torch.testing.assert_close(model(ids), norm(x, "norm") @ w["head.weight"].T)


@torch.no_grad()
def test_first_weights_are_gpt_2_s() -> None:
    model = TransformerLM(ModelConfig(vocabulary=256))
    residual = 0.02 / math.sqrt(2 * 4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert float(parameter.abs().max()) == 0.0, name
        elif "norm" in name or "before" in name:
            assert bool((parameter == 1).all()), name
        else:
            expected = residual if name.endswith(("outward.weight", "mlp.2.weight")) else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.03), name
    logits = model.eval()(torch.randint(256, (2, 50)))
    loss = float(cross_entropy(logits[:, :-1].flatten(0, 1), torch.randint(256, (98,))))
    assert loss == pytest.approx(math.log(256), abs=0.2)  # a first guess is no guess


@every_model
def test_no_logit_sees_its_future(config: ModelConfig) -> None:
    model = build(config).double().eval()
    ids = torch.randint(20, (2, 32))
    other = ids.clone()
    other[:, 20:] = (other[:, 20:] + 1 + torch.randint(19, (2, 12))) % 20
    torch.testing.assert_close(model(other)[:, :20], model(ids)[:, :20], rtol=0, atol=1e-12)
    assert not torch.allclose(model(other)[:, 20:], model(ids)[:, 20:])


@every_model
def test_it_learns_to_copy_what_came_before(config: ModelConfig) -> None:
    model = build(dataclasses.replace(config, layers=1))
    ids = torch.arange(16).repeat(4, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < losses[0]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_places_matter_in_every_kind_of_position() -> None:
    ids = torch.tensor([[3, 3, 3, 3, 5, 3]])
    for config in EVERY[:3]:
        logits = build(dataclasses.replace(config, layers=1)).eval()(ids)
        moved = build(dataclasses.replace(config, layers=1)).eval()(ids.roll(-1, 1))
        assert not torch.allclose(logits[:, -1], moved[:, -1]), config.positions


def test_dropout_is_heard_only_while_training() -> None:
    model = TransformerLM(dataclasses.replace(SMALL, dropout=0.2))
    ids = torch.randint(20, (1, 9))
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.2}


def test_a_saved_model_loads_into_another() -> None:
    for config in EVERY:
        torch.manual_seed(1)
        model = build(config).eval()
        ids = torch.randint(20, (1, 9))
        torch.manual_seed(2)
        other = build(config).eval()
        assert not torch.allclose(other(ids), model(ids))
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(ids), model(ids))


def test_the_whole_model_compiles_into_one_graph() -> None:
    model = TransformerLM(dataclasses.replace(SMALL, layers=1, positions="rotary")).eval()
    ids = torch.randint(20, (2, 9))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(ids), model(ids))


def test_a_config_goes_to_json_and_back() -> None:
    for config in EVERY:
        assert ModelConfig.from_json(config.to_json()) == config
        assert build(ModelConfig.from_json(config.to_json())).config == config
    assert ModelConfig.from_json('{"vocabulary": 7}') == ModelConfig(vocabulary=7)
    given = {"temperature": 2.0}
    config = ModelConfig(vocabulary=7, attention="separable", settings=given)
    given["temperature"] = -1.0
    assert config.settings == {"temperature": 2.0}
    assert hash(config) == hash(ModelConfig.from_json(config.to_json()))


def test_every_block_of_a_model_is_of_the_method_asked_for() -> None:
    for config in EVERY:
        blocks = [m for m in build(config).modules() if isinstance(m, Block)]
        assert len(blocks) == 2
        assert all(block.attention.method.name == config.attention for block in blocks)
        assert all(dict(config.settings).items() <= block.attention.method.parameters.items() for block in blocks)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"width": 10, "heads": 4}, ParameterError, "width=10 must be divisible by heads=4; use width=12"),
        ({"key_heads": 3}, ParameterError, "key_heads=3 must divide heads=8; use 1, 2, 4 or 8"),
        ({"layers": 0}, ParameterError, "layers=0 must be a whole number of at least 1; try layers=8"),
        ({"block": 1.5}, ParameterError, "block=1.5 must be a whole number of at least 1"),
        ({"dropout": -0.1}, ParameterError, "dropout=-0.1 must be at least 0 and below 1; try dropout=0.1"),
        ({"dropout": "a"}, ParameterError, "dropout='a' must be at least 0 and below 1"),
        ({"attention": "flash"}, UnknownMethod, "method='flash' is not a method; known methods: exact"),
        ({"settings": {"features": 8}}, ParameterError, "exact: features=8 is not a parameter"),
        ({"settings": 8}, ParameterError, "settings=8 must map names of parameters to values"),
        (
            {"attention": "random_features", "settings": {"features": 0}},
            ParameterError,
            "random_features: features=0 must be from 1 to 16777216",
        ),
        (
            {"positions": "alibi"},
            ParameterError,
            "positions='alibi' must be one of learned, sinusoidal, rotary; the default is \"learned\"",
        ),
        (
            {"positions": "rotary", "width": 24},
            ParameterError,
            "width=24 gives 8 heads an odd dimension, and rotary positions turn pairs of features; use a width",
        ),
        (
            {"positions": "sinusoidal", "width": 9, "heads": 3},
            ParameterError,
            "width=9 must be even for sinusoidal positions",
        ),
        ({"depth": 3}, ParameterError, "config: depth=3 is not a field; fields: vocabulary, block, layers"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(fields: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        ModelConfig.from_json(json.dumps({"vocabulary": 256} | fields))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config='{' is not JSON: "),
        ("[1]", "config=[1] must be a JSON object; try "),
        ("{}", "config: vocabulary=None must be given; say how many characters there are"),
    ],
)
def test_what_is_no_config_is_refused(text: str, words: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(words)):
        ModelConfig.from_json(text)


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        (
            torch.tensor([[1, 20]]),
            ParameterError,
            "id=20 is outside the vocabulary of 20; ids run from 0 to 19: encode the text with this model's vocabulary",
        ),
        (torch.tensor([[1, -1]]), ParameterError, "id=-1 is outside the vocabulary of 20"),
        (torch.zeros(1, 33).long(), ShapeError, "length=33 exceeds block=32; shorten the text or make a longer block"),
        (torch.zeros(1, 3), DtypeError, "ids.dtype=torch.float32 must be int64 or int32; use ids.long()"),
        (None, DtypeError, "ids=NoneType must be a torch.Tensor; wrap it with torch.tensor"),
        (torch.zeros(3).long(), ShapeError, "ids.shape=(3,) must be (batch, length), neither of them 0"),
        (torch.zeros(1, 0).long(), ShapeError, "ids.shape=(1, 0) must be (batch, length), neither of them 0"),
    ],
)
def test_ids_it_cannot_read_are_refused(ids: torch.Tensor, kind: type[InputError], words: str) -> None:
    model = TransformerLM(SMALL)
    with pytest.raises(kind, match=re.escape(words)):
        model(ids)
    with pytest.raises(kind, match=re.escape(words)):
        model.step(ids, model.start(1))


@pytest.mark.parametrize("attention", ["exact", "separable", "latent"])
@pytest.mark.parametrize("batch", [0, -1, True, 1.5, None])
def test_a_cache_is_for_one_sequence_at_least(attention: str, batch: Any) -> None:
    model = build(ModelConfig(vocabulary=9, width=8, heads=2, layers=3, block=16, attention=attention))
    with pytest.raises(
        ParameterError, match=re.escape(f"batch={batch!r} must be a whole number of at least 1; try ba")
    ):
        model.start(batch)
