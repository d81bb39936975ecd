"""Attention as a module: projections and heads around any method, and the positions of tokens.

Attention alone does not know the order of its keys. `Learned` and `Sinusoidal` positions are added to the embeddings;
`Rotary` is applied to queries and keys, whose products then depend on the distance between them alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from avow.attend import Attended, attend
from avow.core import SOFTMAX, Method, Problem, check_tensor, dtype_name
from avow.core.eager import run_eagerly
from avow.core.record import is_recording, note, running_layer
from avow.errors import ParameterError, ShapeError, ToleranceUnreachable, value_text
from avow.methods import method_from, method_named
from avow.nn.config import check_dropout, check_heads
from avow.nn.memory import Memory, RandomDraw, memory_of
from avow.parameters import as_float, check_count, declared, suggestion

_LOG = logging.getLogger(__name__)
# What an answer may be required to keep, which is asked of a call and not of a module.
_LIMITS = ("tol", "rtol", "confidence")
# What a call of `nn.MultiheadAttention` says otherwise.
_INSTEAD = {
    "key_padding_mask": "use mask=~key_padding_mask: True at the keys that may be seen",
    "attn_mask": "use causal=True in the constructor, or avow.attend(q, k, v, mask=…) for any other mask of pairs",
    "is_causal": "use causal=True in the constructor",
    "need_weights": "leave it out: the output alone is returned, and most methods never form the weights",
    "average_attn_weights": "leave it out: the output alone is returned",
    **dict.fromkeys(("key", "value"), "use cross=True in the constructor and pass context=…, or leave it out"),
}
_BASE = 10_000.0
"""Of the geometric sequence of rates at which positions turn."""


@dataclass(frozen=True)
class Shard:
    """A part of each sequence, from place `start` on; the processes of `group` hold the whole, in their order.

    Attributes:
        start: the place of this part's first token in the whole sequence.
        group: the processes that hold the whole, in the order of their parts.
    """

    start: int
    group: ProcessGroup


def project(inward: nn.Linear, dim: int, x: Tensor, context: Tensor | None = None) -> list[Float[Tensor, "b h n d"]]:
    """Queries of `x`, keys and values of the context or else of `x`: the rows of `inward`, one below the other."""
    width, weight, bias = inward.in_features, inward.weight, inward.bias
    other = (inward.out_features - width) // 2
    if context is None:
        # One split: the gradients of two, one inside the other, would be brought together twice.
        parts = inward(x).split([width, other, other], -1)
    else:
        queries = linear(x, weight[:width], None if bias is None else bias[:width])
        others = linear(context, weight[width:], None if bias is None else bias[width:])
        parts = (queries, *others.chunk(2, -1))
    return [part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts]


class Attention(nn.Module):
    """Multi-head attention by any method, over a sequence itself or, with `cross`, over a context.

    Inputs are (batch, length, width). Methods that draw at random keep one draw for life: see `RandomDraw`. Dropout
    falls on the output, for every method alike: most methods never form the weights, and a certificate would not be
    about weights some of which were dropped. While `avow.record` is open, `forward` certifies its answers.

    Args:
        width: features of a position, in and out; divisible by `heads`.
        heads: query heads.
        method: name of a method, or a `Method` object.
        key_heads: heads of keys and values, each shared by heads/key_heads query heads; None is as many as query heads.
        cross: whether keys and values are those of a context, which `forward` is then given.
        causal: whether position i sees positions 0 to i alone.
        dropout: share of the output that is dropped in training.
        bias: whether projections have biases.
        positions: `Rotary` positions, applied to queries and keys; None for none.
        **settings: parameters of a method that is given by name.

    Raises:
        ParameterError: width, heads, dropout or a setting does not fit.
        UnknownMethod: there is no method of that name.

    >>> import torch, avow
    >>> attention = avow.nn.Attention(64, heads=4, causal=True)
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    @declared()
    def __init__(
        self,
        width: int,
        heads: int,
        method: str | Method = "exact",
        key_heads: int | None = None,
        cross: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: Rotary | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        check_heads(width, heads, key_heads)
        check_dropout(dropout)
        self.width, self.heads, self.key_heads = width, heads, heads if key_heads is None else key_heads
        self.cross, self.causal, self.settings = cross, causal, settings
        _check_settings(method, settings)
        self.given, self.method = method, method_from(method, settings)
        self.draw = RandomDraw(self.method, width // heads) if self.method.random else None
        self.positions = positions
        self.key_width = width // heads * self.key_heads
        # Queries, keys and values one below the other, as nn.MultiheadAttention has them.
        self.inward = nn.Linear(width, width + 2 * self.key_width, bias=bias)
        self.outward = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.inward.weight)
        if bias:
            nn.init.zeros_(self.inward.bias)
            nn.init.zeros_(self.outward.bias)

    def forward(
        self,
        x: Float[Tensor, "b n w"],
        context: Float[Tensor, "b s w"] | None = None,
        mask: Bool[Tensor, "b s"] | None = None,
        shard: Shard | None = None,
        **unknown: Any,
    ) -> Float[Tensor, "b n w"]:
        """What each position reads; a position that may see no key reads zeros.

        Args:
            x: the sequence, (batch, n, width).
            context: what keys and values are made of, (batch, s, width); for `cross` alone.
            mask: True at the keys that may be seen, (batch, s): `nn.MultiheadAttention` says the opposite.
            shard: of sequences that processes hold between them, which part `x` is: its positions read from all parts.
            **unknown: refused, with what to use instead.

        Returns:
            The output, (batch, n, width).

        Raises:
            ShapeError: sizes do not fit together.
            ParameterError: there is a context without `cross`, or the other way round, or an unknown argument.
        """
        # Checked here: a wrapper that checks arguments would cost torch.compile a break in the graph.
        for name, value in unknown.items():
            raise _unknown(name, value)
        if shard is not None and not isinstance(shard, Shard):
            raise ParameterError("shard", type(shard).__name__, "must be a Shard", "leave it out in one process")
        leaks = self.causal and self.method.selects_landmarks
        if leaks and self.training and not torch.compiler.is_compiling():
            _warn_of_landmarks(self.method.name)
        # Projections follow autocast; a method's arithmetic is its own, and its bounds are for that.
        q, k, v = self._projected(x, context, 0 if shard is None else shard.start)
        if shard is None and is_recording():
            out, certificate = run_eagerly("Attention in a record", self._attended, q, k, v, mask)
            note(running_layer(type(self).__name__), certificate)
            return self._joined(out)
        with torch.autocast(q.device.type, enabled=False):
            out = self._computed(self._problem(q, k, v, mask)) if shard is None else self._over(shard, q, k, v, mask)
        return self._joined(out)

    def certified(
        self,
        x: Float[Tensor, "b n w"],
        context: Float[Tensor, "b s w"] | None = None,
        mask: Bool[Tensor, "b s"] | None = None,
        tol: float | None = None,
        confidence: float | None = None,
        rtol: float | None = None,
    ) -> Attended:
        """The same through `avow.attend`, without dropout: the output, and what is proved of its heads' answers.

        Args:
            x: the sequence, (batch, n, width).
            context: what keys and values are made of, (batch, s, width); for `cross` alone.
            mask: True at the keys that may be seen, (batch, s).
            tol: the largest error of a row of a head that is accepted, relative to the longest value that the row sees;
                None sets no limit.
            confidence: accept bounds that hold with this probability for each row; None accepts certain ones alone.
            rtol: the largest error of a row of a head relative to the length of its true answer.

        Returns:
            The output, (batch, n, width), and the certificate of the heads' answers, whose rows are (batch, heads, n).

        Raises:
            ToleranceUnreachable: the method cannot prove the tolerance.

        >>> import torch, avow
        >>> out, certificate = avow.nn.Attention(64, heads=4).certified(torch.randn(2, 10, 64), tol=1e-2)
        >>> certificate.bound <= 1e-2
        True
        """
        q, k, v = self._projected(x, context)
        out, certificate = self._attended(q, k, v, mask, tol=tol, confidence=confidence, rtol=rtol)
        return Attended(self.outward(out.transpose(1, 2).flatten(2)), certificate)

    def start(self, block: int) -> Memory:
        """The memory of a decoder before its first token, for sequences up to `block`.

        Args:
            block: how many tokens there must be room for.

        Returns:
            What `step` needs and brings up to date.

        Raises:
            ParameterError: the module is not causal, or its method cannot decode token by token.
        """
        if self.cross or not self.causal:
            rule = "cannot decode token by token"
            raise ParameterError("attention", "cross" if self.cross else "not causal", rule, "use causal=True")
        return memory_of(self.method, self.draw, block)

    def step(self, x: Float[Tensor, "b l w"], memory: Memory) -> Float[Tensor, "b l w"]:
        """What the next positions read, given all before them; `memory` is brought up to date in place.

        Args:
            x: the next positions, (batch, l, width).
            memory: what `start` made.

        Returns:
            The output, (batch, l, width).

        Raises:
            ShapeError: there is no room for so many.

        >>> import torch, avow
        >>> attention = avow.nn.Attention(64, heads=4, causal=True)
        >>> memory = attention.start(block=10)
        >>> attention.step(torch.randn(2, 1, 64), memory).shape, memory.length
        (torch.Size([2, 1, 64]), 1)
        """
        q, k, v = self._projected(x, None, memory.length)
        with torch.autocast(q.device.type, enabled=False):
            out = memory.read(q, k, v)
        return self._joined(out)

    @classmethod
    def from_torch(
        cls,
        given: nn.MultiheadAttention,
        method: str | Method = "exact",
        cross: bool = False,
        causal: bool = False,
        **settings: Any,
    ) -> Attention:
        """The same weights under any method; with `exact` and no dropout, the same outputs.

        Batches come first here, whatever `batch_first` was, and dropout falls on the output.

        Args:
            given: PyTorch's module.
            method: name of a method, or a `Method` object.
            cross: whether keys and values are those of a context.
            causal: whether position i sees positions 0 to i alone.
            **settings: parameters of a method that is given by name.

        Returns:
            A module with copies of the weights, in their type, on their device.

        Raises:
            ParameterError: `kdim`, `vdim`, `add_bias_kv` or `add_zero_attn` was used.

        >>> import torch, avow
        >>> theirs, x = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval(), torch.randn(2, 10, 64)
        >>> expected = theirs(x, x, x, need_weights=False)[0]
        >>> torch.allclose(avow.nn.Attention.from_torch(theirs)(x), expected, atol=1e-5)
        True
        """
        if not isinstance(given, nn.MultiheadAttention):
            rule = "must be an nn.MultiheadAttention"
            raise ParameterError("given", type(given).__name__, rule, "pass one, or make an Attention of its own")
        width, weight = given.embed_dim, given.out_proj.weight
        unlike = {
            "kdim": (given.kdim, given.kdim != width),
            "vdim": (given.vdim, given.vdim != width),
            "add_bias_kv": (True, given.bias_k is not None),
            "add_zero_attn": (True, given.add_zero_attn),
        }
        for name, (value, differs) in unlike.items():
            if differs:
                remedy = "make the nn.MultiheadAttention without it"
                raise ParameterError(name, value, "has no counterpart in Attention", remedy)
        bias = given.in_proj_bias is not None
        attention = cls(width, given.num_heads, method, None, cross, causal, given.dropout, bias, **settings)
        attention = attention.to(weight.device, weight.dtype).train(given.training)
        with torch.no_grad():
            for mine, theirs in attention._pairs(given):
                mine.copy_(theirs)
        return attention

    def to_torch(self) -> nn.MultiheadAttention:
        """An `nn.MultiheadAttention` of the same weights, batch first; grouped key heads are written out.

        Returns:
            PyTorch's module with copies of the weights.

        Raises:
            ParameterError: the method is not softmax attention, or there are rotary positions.
        """
        if self.method.target != SOFTMAX:
            rule = "is not softmax attention, which nn.MultiheadAttention computes"
            raise ParameterError("method", self.method.name, rule, 'use method="exact"')
        if self.positions is not None:
            rule = "have no counterpart in nn.MultiheadAttention"
            raise ParameterError("positions", "Rotary", rule, "add positions to the input instead")
        bias, weight = self.inward.bias is not None, self.outward.weight
        like = {"device": weight.device, "dtype": weight.dtype}
        other = nn.MultiheadAttention(self.width, self.heads, self.dropout.p, bias, batch_first=True, **like)
        with torch.no_grad():
            for mine, theirs in self._pairs(other):
                theirs.copy_(self._per_head(mine) if theirs.shape != mine.shape else mine)
        return other.train(self.training)

    def _pairs(self, other: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
        """Own parameters beside those of an `nn.MultiheadAttention`."""
        pairs = [(self.inward.weight, other.in_proj_weight), (self.outward.weight, other.out_proj.weight)]
        if self.inward.bias is not None:
            assert other.in_proj_bias is not None
            pairs += [(self.inward.bias, other.in_proj_bias), (self.outward.bias, other.out_proj.bias)]
        return pairs

    def _per_head(self, x: Tensor) -> Tensor:
        """Rows of the inward projection with every query head's own keys and values."""
        q, *shared = x.split([self.width, self.key_width, self.key_width])
        many = self.heads // self.key_heads
        own = [y.unflatten(0, (self.key_heads, -1)).repeat_interleave(many, 0).flatten(0, 1) for y in shared]
        return torch.cat([q, *own])

    def _projected(
        self, x: Tensor, context: Tensor | None, start: int = 0
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:
        """Queries, keys and values of every head, queries and keys in their positions."""
        self._check_input("x", x)
        if self.cross != (context is not None):
            rule, remedy = "must be given to a module with cross=True", "pass context"
            if not self.cross:
                rule, remedy = "is given to a module that attends to x itself", "leave it out, or use cross=True"
            raise ParameterError("context", value_text(context), rule, remedy)
        if context is not None:
            self._check_input("context", context)
            if context.shape[0] != x.shape[0]:
                rule = f"must be x's {x.shape[0]}"
                raise ShapeError("context.shape[0]", context.shape[0], rule, "give each sequence its own context")
        q, k, v = project(self.inward, self.width // self.heads, x, context)
        if self.positions is not None:
            q, k = self.positions(q, start), self.positions(k, start)
        return q, k, v

    def _how(self, mask: Tensor | None, k: Tensor) -> dict[str, Any]:
        """The arguments of an attention call that this module decides."""
        if mask is not None:
            check_tensor("mask", mask)
            if mask.dtype != torch.bool or mask.shape != (k.shape[0], k.shape[-2]):
                value = f"{dtype_name(mask.dtype)} {tuple(mask.shape)}"
                rule = f"must be bool {(k.shape[0], k.shape[-2])}"
                raise ShapeError("mask", value, rule, "say for each key of each sequence whether it may be seen")
            mask = mask[:, None, None]  # (b, 1, 1, s)
        return {"mask": mask, "causal": self.causal, "enable_gqa": self.key_heads != self.heads}

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Problem:
        return Problem.of(q, k, v, **self._how(mask, k))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **limits: Any) -> Attended:
        """The answers of the heads by `avow.attend`, under this module's draw."""
        generator = None if self.draw is None else self.draw.generator()
        how = self._how(mask, k) | limits | self.settings
        try:
            return attend(q, k, v, method=self.given, generator=generator, **how)
        except ToleranceUnreachable as error:
            remedy = error.remedy.replace("convert q, k and v to", "run the module in")
            raise ToleranceUnreachable(error.name, error.value, error.rule, remedy, error.best) from None

    def _computed(self, problem: Problem) -> Float[Tensor, "b h n d"]:
        self.method.check(problem.sizes)
        if problem.empty:
            return torch.zeros_like(problem.q)
        if self.draw is None:
            return self.method.compute(problem).out
        sample = self.draw.sample()
        if sample is not None:
            return self.method.read_on(problem, self.method.initial_state(problem, sample))[0]
        return run_eagerly(f"Attention by {self.method.name}", self._drawn, problem, self.draw)

    def _drawn(self, problem: Problem, draw: RandomDraw) -> Float[Tensor, "b h n d"]:
        """The answers of a method whose draws depend on the inputs."""
        return self.method.compute(problem, draw.generator()).out

    def _over(self, shard: Shard, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Float[Tensor, "b h n d"]:
        """The same if the processes of a group hold keys and values, each those of its part of the sequence."""
        from avow.distributed.ring import ring_attention

        if not self.method.is_exact or self.cross or mask is not None:
            what = f"{self.method.name}{' with a mask' if mask is not None else ''}{', cross' if self.cross else ''}"
            rule = "cannot read a sequence that processes hold in parts"
            raise ParameterError("attention", what, rule, "use exact self-attention without a mask")
        wide, grouped = self.method.arithmetic(q.dtype), self.key_heads != self.heads
        qkv = (x.to(wide) for x in (q, k, v))
        return ring_attention(*qkv, group=shard.group, causal=self.causal, enable_gqa=grouped).to(q.dtype)

    def _joined(self, out: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n w"]:
        return self.dropout(self.outward(out.transpose(1, 2).flatten(2)))

    def _check_input(self, name: Literal["x", "context"], x: Tensor) -> None:
        check_tensor(name, x)
        if x.ndim != 3 or x.shape[-1] != self.width:
            rule = f"must be (batch, length, {self.width})"
            raise ShapeError(f"{name}.shape", tuple(x.shape), rule, "add the missing axes or project it first")

    def extra_repr(self) -> str:
        return f"{self.method.label}, heads={self.heads}, key_heads={self.key_heads}, causal={self.causal}"


def _check_settings(method: str | Method, settings: Mapping[str, Any]) -> None:
    """Raise if a setting is neither an argument of the module nor a parameter of its method."""
    if isinstance(method, Method):
        return
    kind = method_named(method)
    own = [name for name in inspect.signature(Attention).parameters if name != "settings"]
    known = [parameter.name for parameter in kind.declared()]
    for name, value in settings.items():
        if name in known:
            continue
        rule = f"is neither an argument of Attention nor a parameter of {kind.name}"
        remedy = f"known parameters: {', '.join(known) or 'none'}"
        if name in _LIMITS:
            remedy = f"give it to certified: attention.certified(x, {name}={value_text(value)})"
        if name == "batch_first":
            remedy = "leave it out: batches come first"
        raise ParameterError(name, value_text(value), rule, suggestion(name, [*own, *known], remedy))


def _unknown(name: str, value: object) -> ParameterError:
    """The refusal of an argument that `Attention.forward` does not have."""
    remedy = f"use attention.certified(x, {name}={value_text(value)})" if name in _LIMITS else _INSTEAD.get(name, "")
    known = ("context", "mask", "shard")
    remedy = remedy or suggestion(name, known, f"known arguments: x, {', '.join(known)}")
    return ParameterError(name, value_text(value), "is not an argument of Attention.forward", remedy)


@functools.cache
def _warn_of_landmarks(name: str) -> None:
    """Say once that causal rows of such a method know something of later tokens."""
    _LOG.warning(
        "%s chooses its landmarks among all keys: in training, causal positions learn something of later tokens; "
        "train with another method",
        name,
    )


class Learned(nn.Module):
    """A vector for each place, learned like the embeddings of tokens.

    Args:
        block: how many places there are.
        width: features of a vector.

    >>> import avow
    >>> avow.nn.Learned(block=128, width=64)(10).shape
    torch.Size([10, 64])
    """

    @declared()
    def __init__(self, block: int, width: int) -> None:
        super().__init__()
        check_count("block", block)
        check_count("width", width)
        self.block = block
        self.places = nn.Embedding(block, width)

    def forward(self, length: int, start: int = 0) -> Float[Tensor, "n w"]:
        """The vectors of `length` places from `start` on.

        Args:
            length: how many places.
            start: the first of them.

        Returns:
            Vectors to add to embeddings, (length, width).

        Raises:
            ShapeError: a place is beyond `block`.
        """
        return self.places.weight[_span(length, start, self.block)]


class Sinusoidal(nn.Module):
    r"""Sines and cosines of the place at geometrically spaced rates, nothing to learn.

    .. math:: p_{i,2f} = a \sin(i \cdot 10000^{-2f/w}), \quad p_{i,2f+1} = a \cos(i \cdot 10000^{-2f/w})

    The amplitude a is for the caller: it decides how loud places are beside tokens.

    Args:
        block: how many places there are.
        width: features of a vector; even.
        amplitude: the largest entry, a.

    >>> import avow
    >>> avow.nn.Sinusoidal(block=128, width=64)(10).shape
    torch.Size([10, 64])
    """

    table: Tensor

    @declared()
    def __init__(self, block: int, width: int, amplitude: float = 1.0) -> None:
        super().__init__()
        check_count("block", block)
        check_count("width", width)
        if not math.isfinite(as_float(amplitude)):
            raise ParameterError("amplitude", amplitude, "must be finite", "the default is 1.0")
        if width % 2:
            rule = "must be even: sines and cosines come in pairs"
            raise ParameterError("width", width, rule, f"use width={width + 1}")
        self.block = block
        angles = _angles(block, width)
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)  # (block, width)
        self.register_buffer("table", (float(amplitude) * table).to(torch.get_default_dtype()), persistent=False)

    def forward(self, length: int, start: int = 0) -> Float[Tensor, "n w"]:
        """The vectors of `length` places from `start` on.

        Args:
            length: how many places.
            start: the first of them.

        Returns:
            Vectors to add to embeddings, (length, width).

        Raises:
            ShapeError: a place is beyond `block`.
        """
        return self.table[_span(length, start, self.block)]

    def extra_repr(self) -> str:
        return f"block={self.block}, width={self.table.shape[-1]}"


class Rotary(nn.Module):
    r"""Turns each pair of features of a query or key by an angle that grows with its place.

    Feature f and f + d/2 make a pair, turned at place i by :math:`\theta = i \cdot 10000^{-2f/d}`. Turning both a query
    and a key leaves in their product the difference of the angles, :math:`R_i q \cdot R_j k = q \cdot R_{j-i} k`, and
    every norm as it was. The same table serves all heads and layers.

    Args:
        dim: features of a head; even.
        block: how many places there are.

    >>> import torch, avow
    >>> attention = avow.nn.Attention(64, heads=4, causal=True, positions=avow.nn.Rotary(16, block=128))
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    cosine: Tensor
    sine: Tensor

    @declared()
    def __init__(self, dim: int, block: int) -> None:
        super().__init__()
        check_count("block", block)
        if dim < 2 or dim % 2:
            rule = "must be even: features are turned in pairs"
            raise ParameterError("dim", dim, rule, f"use dim={dim + dim % 2 or 2}")
        self.dim, self.block = dim, block
        angles = _angles(block, dim)
        # Angles in float64: a place of a few thousand times a rounded rate would be off by 1e-4 in float32.
        for name, table in (("cosine", angles.cos()), ("sine", angles.sin())):
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Float[Tensor, "b h n d"], start: int = 0) -> Float[Tensor, "b h n d"]:
        """The same queries or keys, turned as at places `start`, `start` + 1, …

        Args:
            x: queries or keys, (batch, heads, n, dim).
            start: the place of the first.

        Returns:
            The same shape.

        Raises:
            ShapeError: a place is beyond `block`, or the dimension is another.
        """
        if x.shape[-1] != self.dim:
            rule = f"must be {self.dim}, the dimension this was made for"
            raise ShapeError("head dimension", x.shape[-1], rule, f"make Rotary({x.shape[-1]}, …)")
        span = _span(x.shape[-2], start, self.block)
        return _turned(x, self.cosine[span], self.sine[span])  # (n, d/2) each

    def extra_repr(self) -> str:
        return f"dim={self.dim}, block={self.block}"

    def at(self, x: Float[Tensor, "b h n d"], places: Int[Tensor, "#b n"]) -> Float[Tensor, "b h n d"]:
        """The same turned as at any places, each sequence at its own.

        Args:
            x: queries or keys, (batch, heads, n, dim).
            places: the place of each, (batch or 1, n).

        Returns:
            The same shape.
        """
        return _turned(x, *(table[places].unsqueeze(1) for table in (self.cosine, self.sine)))  # (b, 1, n, d/2) each


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)
    return turned.to(x.dtype)  # half precision is turned in the table's type


def _angles(block: int, dim: int) -> Float[Tensor, "block half"]:
    rates = _BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(block, dtype=torch.float64)[:, None] * rates


def _span(length: int, start: int, block: int) -> slice:
    """Places `start` to `start + length`, which must exist."""
    if min(start, length) < 0:
        name, value = ("start", start) if start < 0 else ("length", length)
        raise ParameterError(name, value, "must be at least 0", "count places from 0")
    if start + length > block:
        rule = f"exceeds block={block}"
        raise ShapeError("length", start + length, rule, "shorten the sequence or make a longer block")
    return slice(start, start + length)
