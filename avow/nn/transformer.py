"""A language model short enough to be read at once: embeddings, blocks of attention and MLP, a head."""

from __future__ import annotations

import math
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.nn.attention import Attention, Learned, Rotary, Shard, Sinusoidal
from avow.nn.config import ModelConfig, check_dropout
from avow.nn.memory import Cache, Memory
from avow.parameters import check_count, declared

# GPT-2's first weights are N(0, 0.02²).
STD = 0.02


class Block(nn.Module):
    """Attention, then an MLP on each position, both added to what was there, normalised before.

    Args:
        width: features of a position.
        attention: what mixes positions.
        dropout: share of the MLP's output that is dropped in training.

    >>> import torch, avow
    >>> block = avow.nn.Block(64, avow.nn.Attention(64, heads=4), dropout=0.1)
    >>> block(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    @declared()
    def __init__(self, width: int, attention: Attention, dropout: float) -> None:
        super().__init__()
        check_count("width", width)
        check_dropout(dropout)
        self.before_attention = nn.LayerNorm(width)
        self.attention = attention
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = mlp(width, dropout)

    def forward(self, x: Float[Tensor, "b n w"], shard: Shard | None = None) -> Float[Tensor, "b n w"]:
        """The positions after attention and MLP.

        Args:
            x: positions, (batch, n, width).
            shard: of sequences that processes hold between them, which part `x` is.

        Returns:
            The output, (batch, n, width).
        """
        x = x + self.attention(self.before_attention(x), shard=shard)
        return x + self.mlp(self.before_mlp(x))

    def step(self, x: Float[Tensor, "b l w"], memory: Memory) -> Float[Tensor, "b l w"]:
        """The same for the next positions of a sequence whose start is remembered.

        Args:
            x: the next positions, (batch, l, width).
            memory: what the attention's `start` made; it is changed in place.

        Returns:
            The output, (batch, l, width).
        """
        x = x + self.attention.step(self.before_attention(x), memory)
        return x + self.mlp(self.before_mlp(x))


class CharacterModel(nn.Module):
    """What every language model here begins with: vectors of characters and places, and positions by turning."""

    @declared()
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.places: Learned | Sinusoidal | None = None
        if c.positions == "learned":
            self.places = Learned(c.block, c.width)
        elif c.positions == "sinusoidal":
            # As loud as the tokens are at first: a sine's root mean square is its amplitude over √2.
            self.places = Sinusoidal(c.block, c.width, amplitude=STD * math.sqrt(2))
        self.dropout = nn.Dropout(c.dropout)

    def rotary(self) -> Rotary | None:
        """What turns queries and keys of all layers, if the config says so."""
        c = self.config
        return Rotary(c.width // c.heads, c.block) if c.positions == "rotary" else None

    def embedded(self, ids: Int[Tensor, "b n"], start: int) -> Float[Tensor, "b n w"]:
        """What enters the first layer: `ids` from place `start` on.

        Args:
            ids: tokens, (batch, n).
            start: the place of the first.

        Returns:
            Embeddings with positions, (batch, n, width).
        """
        x = self.tokens(ids)  # (b, n, w)
        return self.dropout(x if self.places is None else x + self.places(ids.shape[-1], start))

    def check_step(self, ids: Tensor, length: int, batch: int) -> None:
        """Raise on ids that cannot be read after `length` others of so many sequences.

        Args:
            ids: the next tokens, (batch, l).
            length: how many were read before.
            batch: how many sequences there are.

        Raises:
            ShapeError: they do not fit.
        """
        check_ids(ids, self.config, length)
        if ids.shape[0] != batch:
            rule = f"must be {batch}, the batch this cache was started for"
            raise ShapeError("ids.shape[0]", ids.shape[0], rule, f"call start({ids.shape[0]})")


class TransformerLM(CharacterModel):
    """A pre-norm GPT over characters: logits of the next one at every position.

    Args:
        config: what it is made of.

    Raises:
        ParameterError: the config does not fit.

    >>> import torch
    >>> from avow.nn import ModelConfig, TransformerLM
    >>> model = TransformerLM(ModelConfig(vocabulary=256))
    >>> model(torch.tensor([[72, 101, 108]])).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        c = config
        how = {"causal": True, "dropout": c.dropout, "positions": self.rotary(), **c.settings}
        self.blocks = nn.ModuleList(
            Block(c.width, Attention(c.width, c.heads, c.attention, c.key_heads, **how), c.dropout)
            for _ in range(c.layers)
        )
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        initialise(self, c.layers)

    def forward(self, ids: Int[Tensor, "b n"], shard: Shard | None = None) -> Float[Tensor, "b n vocabulary"]:
        """Logits of the token after each.

        Args:
            ids: tokens, (batch, n), n at most `config.block`.
            shard: of sequences that processes hold between them, which part `ids` is.

        Returns:
            Logits, (batch, n, vocabulary).

        Raises:
            ShapeError: there are more than a block.
        """
        start = 0 if shard is None else shard.start
        check_ids(ids, self.config, start)
        x = self.embedded(ids, start)
        for block in self.blocks:
            x = block(x, shard)
        return self.head(self.norm(x))

    def start(self, batch: int) -> Cache:
        """An empty cache for so many sequences.

        Args:
            batch: how many sequences.

        Returns:
            What `step` needs.
        """
        check_count("batch", batch, usual=1)
        return Cache(batch, [block.attention.start(self.config.block) for block in self._stack])

    @torch.no_grad()
    def step(self, ids: Int[Tensor, "b l"], cache: Cache) -> tuple[Float[Tensor, "b l vocabulary"], Cache]:
        """Logits after each of the next ids, equal to those of a whole pass in evaluation; and the cache, updated.

        Args:
            ids: the next tokens, (batch, l).
            cache: what `start` made; it is changed in place.

        Returns:
            Logits, (batch, l, vocabulary), and the cache.
        """
        self.check_step(ids, cache.length, cache.batch)
        x = self.embedded(ids, cache.length)
        for block, memory in zip(self._stack, cache.layers, strict=True):
            x = block.step(x, memory)
        return self.head(self.norm(x)), cache

    @property
    def _stack(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))


def mlp(width: int, dropout: float) -> nn.Sequential:
    """Two layers with GELU between them, four times as wide inside."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))


def initialise(model: nn.Module, layers: int) -> None:
    """GPT-2's first weights: N(0, 0.02²), biases zero, and what is added to the residual stream smaller.

    Each of the 2·layers additions has its variance divided by their number, so that the stream's does not grow.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Block):
            quieten(module.attention.outward, module.mlp, layers)


def quieten(outward: nn.Linear, mlp: nn.Sequential, layers: int) -> None:
    """Smaller first weights for what a layer, one of so many, adds to the residual stream."""
    for last in (outward, cast("nn.Linear", mlp[2])):
        nn.init.normal_(last.weight, std=STD / math.sqrt(2 * layers))


def check_ids(ids: Tensor, config: ModelConfig, start: int) -> None:
    """Raise on ids of another shape or type, outside the vocabulary, or past the block."""
    if not isinstance(ids, Tensor):
        raise DtypeError("ids", type(ids).__name__, "must be a torch.Tensor", "wrap it with torch.tensor")
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError("ids.dtype", ids.dtype, "must be int64 or int32", "use ids.long()")
    if ids.ndim != 2 or ids.numel() == 0:
        rule = "must be (batch, length), neither of them 0"
        raise ShapeError("ids.shape", tuple(ids.shape), rule, "give at least one id of one sequence")
    if start + ids.shape[1] > config.block:
        rule = f"exceeds block={config.block}"
        raise ShapeError("length", start + ids.shape[1], rule, "shorten the text or make a longer block")
    if torch.compiler.is_compiling() or (ids.device.type != "cpu" and torch.is_grad_enabled()):
        return  # reading the ids would break the graph, or make the training loop wait for the device
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= config.vocabulary:
        rule = f"is outside the vocabulary of {config.vocabulary}"
        remedy = f"ids run from 0 to {config.vocabulary - 1}: encode the text with this model's vocabulary"
        raise ParameterError("id", low if low < 0 else high, rule, remedy)
