"""A Perceiver reaches its whole past and none of its future; the naive mask does not."""

from __future__ import annotations

import re

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from avow.errors import ParameterError, ShapeError
from avow.nn import ModelConfig, PerceiverLM, build
from avow.nn.transformer import check_ids

SMALL = {"vocabulary": 11, "block": 24, "heads": 2, "width": 16, "attention": "latent", "latents": 3, "dropout": 0.0}
every_position = pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])


def loud(model: nn.Module) -> nn.Module:
    """Weights far from their quiet start, so that every path carries something."""
    for x in model.parameters():
        if x.ndim > 1:
            nn.init.normal_(x, std=0.4)
    return model.double().eval()


def small(kind: type[PerceiverLM] = PerceiverLM, segment: int = 4, **more: object) -> nn.Module:
    return loud(kind(ModelConfig(**(SMALL | {"settings": {"segment": segment}} | more))))  # type: ignore[arg-type]


def changed(model: nn.Module, ids: Tensor) -> Tensor:
    """Entry (p, i) says whether the logits at position i change when the token at place p does, bit by bit."""
    same = ids.expand(ids.shape[-1], -1)
    other = (same + torch.eye(ids.shape[-1], dtype=ids.dtype)) % 11
    with torch.no_grad():
        return (model(same) != model(other)).any(-1)


@every_position
@pytest.mark.parametrize("segment", [1, 4, 5, 24])
@pytest.mark.parametrize("layers", [4, 6])
def test_no_position_sees_its_future_and_each_sees_its_whole_past(positions: str, segment: int, layers: int) -> None:
    model = small(segment=segment, positions=positions, layers=layers)
    found = changed(model, torch.randint(11, (1, 23)))
    assert not bool(found.tril(-1).any()), "the future was seen"
    assert bool(found[torch.ones(23, 23).triu().bool()].all()), "some of the past was not seen"


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    honest = model._latents
    monkeypatch.setattr(model, "_latents", lambda tokens, at: honest(tokens, at + 4))
    found = changed(model, torch.randint(11, (1, 20)))
    assert bool(found[7, 4:7].all()) and not bool(found[7, :4].any())


class NaivePerceiver(PerceiverLM):
    """The mask that suggests itself: triangular between latents and positions, without horizons.

    Latent r reads tokens 0 to r, position i reads latents 0 to i. Nothing of the future is seen, and nothing of the
    past from token m on either: m latents in a triangle cover the first m positions and no more.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.attention.causal = True  # latent r may only listen to those that know no more than it does

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n vocabulary"]:
        """Logits of the character after each, blind to what lies between the first m characters and itself."""
        check_ids(ids, self.config, start=0)
        x = self.embedded(ids, 0)
        b, n, w = x.shape
        m = self.latents.shape[0]
        places, order = torch.arange(n, device=x.device), torch.arange(m, device=x.device)
        at = order.clamp(max=self.config.block - 1)  # what lies past the block is padding
        latents = self.down(self.latents.expand(b, m, w), x, places <= order[:, None], (at[None], places[None]))
        for block in self.blocks:
            latents = block(latents)
        for layer in (*self.near, *self.up):
            x = layer(x, latents, order <= places[:, None], (places[None], at[None]))
        return self.head(self.norm(x))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_naive_mask_is_blind_to_what_lies_beyond_its_latents(positions: str) -> None:
    found = changed(small(NaivePerceiver, positions=positions), torch.randint(11, (1, 24)))
    # Three latents read the first three tokens; every later one is read by itself alone.
    expected = torch.eye(24).bool()
    expected[:3] = torch.ones(3, 24).triu().bool()
    assert torch.equal(found, expected)


@every_position
@pytest.mark.parametrize("segment", [1, 4, 5, 24])
def test_step_by_step_equals_the_whole_pass(positions: str, segment: int) -> None:
    model = small(segment=segment, positions=positions, layers=5, key_heads=1).float()
    ids = torch.randint(11, (3, 24))
    with torch.no_grad():
        whole, turned = model(ids), model(ids.flip(1))
    for lengths in ([1] * 24, [3, 1, 9, 2, 9]):
        cache, parts = model.start(3), []
        for part in ids.split(lengths, 1):
            logits, cache = model.step(part, cache)
            parts.append(logits)
        assert cache.length == 24
        assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-5 * float(whole.abs().max())
    # The measure is not blind: another order of the same tokens is another answer.
    assert float((turned - whole).abs().max()) > 1e-2


@every_position
def test_the_classic_sizes_fit_the_classic_budget(positions: str) -> None:
    model = build(ModelConfig(vocabulary=256, attention="latent", positions=positions))  # type: ignore[arg-type]
    assert isinstance(model, PerceiverLM)
    count = sum(x.numel() for x in model.parameters())
    assert 3.0e6 < count <= 3.4e6
    assert model(torch.randint(256, (2, 128))).shape == (2, 128, 256)


def test_every_parameter_learns() -> None:
    model = small()
    ids = torch.randint(11, (2, 24))
    model(ids).square().sum().backward()
    for name, x in model.named_parameters():
        assert x.grad is not None and bool(torch.isfinite(x.grad).all()), name
        assert float(x.grad.abs().sum()) > 0, name


def test_it_learns_to_copy_from_beyond_its_segment() -> None:
    def missed(model: nn.Module, generator: torch.Generator) -> Tensor:
        """The loss on four characters that were there before, two segments away."""
        word = torch.randint(1, 6, (32, 4), generator=generator)
        logits = model(torch.cat([word, word[:, :-1]], 1))[:, 3:]
        return cross_entropy(logits.flatten(0, 1), word.flatten())

    sizes = {"vocabulary": 6, "block": 8, "layers": 3, "heads": 2, "width": 32, "latents": 4, "latent_layers": 1}
    model = PerceiverLM(ModelConfig(**sizes, attention="latent", settings={"segment": 2}, dropout=0.0))  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(240):
        loss = missed(model, generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    # Guessing costs log 5 = 1.6; only who sees the first word does better.
    assert losses[0] > 1.5 and sum(losses[-20:]) / 20 < 1.0


def test_sizes_and_settings_that_contradict_are_refused() -> None:
    text = "layers=3 must be at least 2 more than latent_layers=2; use layers=4, or fewer latent_layers"
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        PerceiverLM(ModelConfig(11, attention="latent", layers=3, latent_layers=2))
    text = "settings: latents=4 is a field of the config for a Perceiver; set config.latents instead"
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        PerceiverLM(ModelConfig(11, attention="latent", settings={"latents": 4}))


def test_wrong_ids_are_refused() -> None:
    model = small()
    with pytest.raises(ShapeError, match="length=25 exceeds block=24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"ids.shape\[0\]=2 must be 1, the batch this cache was started for"):
        model.step(torch.zeros(2, 1, dtype=torch.int64), model.start(1))


def test_compiled_it_computes_the_same() -> None:
    model, ids = small(), torch.randint(11, (2, 24))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(ids), model(ids))
