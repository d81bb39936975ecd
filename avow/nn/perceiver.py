r"""A language model whose past is held by learned latents: down, latent blocks, up; causal by horizons.

The block is cut into segments of length L. At the horizon :math:`h_t = tL` the m latents read all tokens before it,
talk among themselves in `latent_layers` blocks, and are then read by the positions of segment t, which also read the
segment before theirs and their own up to themselves. Every position thus reaches its whole past, token by token near it
and through the latents of its horizon beyond, and nothing it reads has seen its future.

What the latents read has read its own near past: a word looks the same to them wherever it stands between horizons,
and letters alone would not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from avow.core import Problem
from avow.errors import ParameterError
from avow.methods.exact import Exact
from avow.nn.attention import Attention, Rotary, project
from avow.nn.config import ModelConfig
from avow.nn.transformer import STD, Block, CharacterModel, TransformerLM, check_ids, initialise, mlp, quieten
from avow.parameters import check_count, declared

# Horizons to a block if the config does not say: latents are computed again at each.
_HORIZONS = 8


class Crossing(nn.Module):
    """A block whose queries and keys come from different places: attention over a context, then an MLP."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__()
        c, self.rotary, self.method = config, rotary, Exact()
        self.dim = c.width // c.heads
        self.before_attention = nn.LayerNorm(c.width)
        self.before_context = nn.LayerNorm(c.width)
        self.inward = nn.Linear(c.width, c.width + 2 * self.dim * (c.key_heads or c.heads))  # queries, keys, values
        self.outward = nn.Linear(c.width, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.before_mlp = nn.LayerNorm(c.width)
        self.mlp = mlp(c.width, c.dropout)

    def forward(
        self,
        x: Float[Tensor, "b n w"],
        context: Float[Tensor, "b s w"],
        seen: Bool[Tensor, "*b n s"],
        places: tuple[Int[Tensor, "#b n"], Int[Tensor, "#b s"]],
    ) -> Float[Tensor, "b n w"]:
        """x with what it read of the context added; `places` are those of x and of the context."""
        out = torch.zeros_like(x)
        if context.shape[-2]:
            q, k, v = project(self.inward, self.dim, self.before_attention(x), self.before_context(context))
            if self.rotary is not None:
                q, k = (self.rotary.at(y, at) for y, at in zip((q, k), places, strict=True))
            with torch.autocast(q.device.type, enabled=False):
                problem = Problem.of(q, k, v, mask=seen, enable_gqa=q.shape[1] != k.shape[1])
                out = self.method.compute(problem).out.transpose(1, 2).flatten(2)  # (b, n, w)
        x = x + self.dropout(self.outward(out))
        return x + self.mlp(self.before_mlp(x))


@dataclass
class PerceiverCache:
    """Tokens as the latents read them, the latents of the last horizon, and what each layer of tokens still sees."""

    batch: int
    tokens: Float[Tensor, "b n w"]
    latents: Float[Tensor, "b m w"] | None
    near: list[Float[Tensor, "b l w"]]

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.tokens.shape[1]

    def remember(self, layer: int, x: Float[Tensor, "b l w"]) -> Float[Tensor, "b s w"]:
        """What a layer of tokens reads besides latents, these last ones included."""
        self.near[layer] = torch.cat([self.near[layer], x], 1)
        return self.near[layer]


class PerceiverLM(CharacterModel):
    """Logits of the next character at every position, the far past seen through learned latents.

    Of the `layers`, `latent_layers` work on the latents and one leads down to them. The others are of tokens: half of
    them, rounded down, before the latents, the rest up from them. `settings` may hold `segment`, the distance between
    horizons.

    Args:
        config: what it is made of; `attention` is "latent".

    Raises:
        ParameterError: the config does not fit.

    >>> import torch
    >>> from avow.nn import ModelConfig, PerceiverLM
    >>> model = PerceiverLM(ModelConfig(vocabulary=256, attention="latent"))
    >>> model(torch.tensor([[72, 101, 108]])).shape
    torch.Size([1, 3, 256])
    """

    @declared()
    def __init__(self, config: ModelConfig) -> None:
        _check(config)
        super().__init__(config)
        c, rotary = config, self.rotary()
        self.segment = c.settings.get("segment", max(1, c.block // _HORIZONS))
        self.latents = nn.Parameter(STD * torch.randn(c.latents, c.width))
        self.down = Crossing(c, rotary)
        # Attention among the latents of one horizon, all of which know the same tokens.
        self.blocks = nn.ModuleList(
            Block(c.width, Attention(c.width, c.heads, key_heads=c.key_heads, dropout=c.dropout), c.dropout)
            for _ in range(c.latent_layers)
        )
        layers = [Crossing(c, rotary) for _ in range(c.layers - c.latent_layers - 1)]
        half = len(layers) // 2
        self.near, self.up = nn.ModuleList(layers[:half]), nn.ModuleList(layers[half:])
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        initialise(self, c.layers)
        for crossing in (self.down, *layers):
            quieten(crossing.outward, crossing.mlp, c.layers)

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n vocabulary"]:
        """Logits of the character after each.

        Args:
            ids: tokens, (batch, n), n at most `config.block`.

        Returns:
            Logits, (batch, n, vocabulary).

        Raises:
            ShapeError: there are more than a block.
        """
        check_ids(ids, self.config, start=0)
        x = self.embedded(ids, 0)
        at = torch.arange(-(-x.shape[1] // self.segment), device=x.device) * self.segment  # horizons (t,)
        for near in self.near:
            x = self._over_segments(near, x, at, None)
        latents = self._latents(x, at)  # (b·t, m, w)
        for up in self.up:
            x = self._over_segments(up, x, at, latents)
        return self.head(self.norm(x))

    def _over_segments(
        self, layer: nn.Module, x: Float[Tensor, "b n w"], at: Int[Tensor, "t"], latents: Float[Tensor, "bt m w"] | None
    ) -> Float[Tensor, "b n w"]:
        """A layer of tokens: every segment reads the latents of its horizon, the segment before it, and itself."""
        (b, n, w), size, count = x.shape, self.segment, at.shape[0]
        whole = pad(x, (0, 0, size, count * size - n))  # a segment of nothing, then those of the text
        before, own = (whole[:, first : first + count * size].reshape(b * count, size, w) for first in (0, size))
        offsets = torch.arange(-size, size, device=x.device)
        places = at[:, None] + offsets  # (t, 2l)
        seen = (offsets <= offsets[size:, None]) & (places >= 0)[:, None]  # (t, l, 2l)
        context = torch.cat([before, own], 1)
        if latents is not None:
            m = latents.shape[1]
            context, seen = torch.cat([latents, context], 1), pad(seen, (m, 0), value=True)
            places = torch.cat([at[:, None].expand(-1, m), places], 1)  # (t, m + 2l)
        places = places.clamp(0, self.config.block - 1).repeat(b, 1)  # what lies outside is padding, and not seen
        x = layer(own, context, seen.repeat(b, 1, 1)[:, None], (places[:, -size:], places))
        return x.reshape(b, count * size, w)[:, :n]

    def _latents(self, tokens: Float[Tensor, "b n w"], at: Int[Tensor, "t"]) -> Float[Tensor, "bt m w"]:
        """What the latents of each horizon know: all tokens before it."""
        b, n, w = tokens.shape
        m, count = self.latents.shape[0], at.shape[0]
        places = torch.arange(n, device=tokens.device)
        start = self.latents.expand(count, m, w)
        if self.places is not None:
            start = start + self.places(self.config.block)[at].unsqueeze(1)
        own = at.repeat_interleave(m)  # (t·m,)
        rows = start.reshape(1, count * m, w).expand(b, -1, -1)
        latents = self.down(rows, tokens, places < own[:, None], (own[None], places[None]))
        latents = latents.reshape(b * count, m, w)
        for block in self.blocks:
            latents = block(latents)
        return latents

    def start(self, batch: int) -> PerceiverCache:
        """An empty cache for so many sequences.

        Args:
            batch: how many sequences.

        Returns:
            What `step` needs.
        """
        check_count("batch", batch, usual=1)
        nothing = self.latents.new_zeros(batch, 0, self.config.width).detach()
        return PerceiverCache(batch, nothing, None, [nothing for _ in (*self.near, *self.up)])

    @torch.no_grad()
    def step(
        self, ids: Int[Tensor, "b l"], cache: PerceiverCache
    ) -> tuple[Float[Tensor, "b l vocabulary"], PerceiverCache]:
        """Logits after each of the next ids, equal to those of a whole pass in evaluation; and the cache, updated.

        Args:
            ids: the next tokens, (batch, l).
            cache: what `start` made; it is changed in place.

        Returns:
            Logits, (batch, l, vocabulary), and the cache.
        """
        self.check_step(ids, cache.length, cache.batch)
        parts, first = [], 0
        while first < ids.shape[1]:
            last = min(ids.shape[1], first + self.segment - cache.length % self.segment)
            parts.append(self._within_segment(ids[:, first:last], cache))
            first = last
        return torch.cat(parts, 1), cache

    def _within_segment(self, ids: Int[Tensor, "b l"], cache: PerceiverCache) -> Float[Tensor, "b l vocabulary"]:
        """Logits of positions that share a segment with each other, the first of it perhaps remembered."""
        inside = cache.length % self.segment
        if not inside:
            cache.near = [near[:, -self.segment :] for near in cache.near]
            cache.latents = self._latents(cache.tokens, torch.tensor([cache.length], device=ids.device))
        assert cache.latents is not None
        x = self.embedded(ids, cache.length)
        places = torch.arange(cache.length - cache.near[0].shape[1], cache.length + x.shape[1], device=x.device)
        own = places[-x.shape[1] :]
        seen = places <= own[:, None]
        m = cache.latents.shape[1]
        behind = torch.cat([own.new_full((m,), cache.length - inside), places])
        for index, near in enumerate(self.near):
            x = near(x, cache.remember(index, x), seen, (own[None], places[None]))
        cache.tokens = torch.cat([cache.tokens, x], 1)
        seen = pad(seen, (m, 0), value=True)
        for index, up in enumerate(self.up, len(self.near)):
            x = up(x, torch.cat([cache.latents, cache.remember(index, x)], 1), seen, (own[None], behind[None]))
        return self.head(self.norm(x))


def _check(c: ModelConfig) -> None:
    if "latents" in c.settings:
        rule = "is a field of the config for a Perceiver"
        raise ParameterError("settings: latents", c.settings["latents"], rule, "set config.latents instead")
    if c.layers < c.latent_layers + 2:
        rule = f"must be at least 2 more than latent_layers={c.latent_layers}"
        raise ParameterError("layers", c.layers, rule, f"use layers={c.latent_layers + 2}, or fewer latent_layers")


@declared()
def build(config: ModelConfig) -> nn.Module:
    """The model a config describes: a Perceiver for latent attention, a transformer for every other.

    Args:
        config: what the model is made of.

    Returns:
        A `TransformerLM` or a `PerceiverLM`.

    >>> from avow.nn import ModelConfig, build
    >>> type(build(ModelConfig(vocabulary=256, layers=2))).__name__
    'TransformerLM'
    """
    return PerceiverLM(config) if config.attention == "latent" else TransformerLM(config)
