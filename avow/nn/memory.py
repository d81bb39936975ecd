"""What an attention module keeps: its random draw, and what a decoder remembers of the tokens it has read.

Exact attention remembers every key and value, in room made once. Separable attention and random features remember sums
over keys, of a size that does not depend on how many there were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.core import Method, Problem
from avow.core.requirement import RandomStream
from avow.errors import ParameterError, ShapeError
from avow.methods.exact import Exact
from avow.methods.random_features import FeatureState, RandomFeatures
from avow.methods.separable import ColumnState, Separable
from avow.numerics import features as feature_maps
from avow.numerics import rounding, scan


class RandomSeed(nn.Module):
    """A seed, taken from torch's own generator when made; part of the state dict.

    A random method draws again at each call, which is right for one answer and wrong for a model: weights adapt to one
    draw, a cache made under one draw means nothing under another, and a run that is resumed must go on as it would
    have. An integer does not change with the module's type or device.
    """

    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seed", torch.randint(2**62, (), device="cpu"))

    def generator(self) -> torch.Generator:
        """A generator at the start of this draw."""
        stream = RandomStream()
        stream.manual_seed(int(self.seed))
        return stream


class Directions(RandomSeed):
    """The draw of random features: their directions, as the method itself would draw them from this seed.

    They are held beside the seed, since to read it at each call would make the host wait for the device, and are
    drawn again whenever it is moved, loaded or written to.
    """

    def __init__(self, method: RandomFeatures, dim: int) -> None:
        super().__init__()
        self.method, self.dim = method, dim
        self._renew()

    def start(self, p: Problem) -> FeatureState:
        """The state before any key: this draw and no sums. A pass over a sequence and a decoder begin alike."""
        # A compiled graph cannot ask; it is made after the module was moved and loaded.
        if not torch.compiler.is_compiling() and self._drawn_from != self._stamp():
            self._renew()
        wide = rounding.accumulator(p.q.dtype)
        frame = feature_maps.frame_of(p, wide)
        empty = scan.nothing(p.v.to(wide), self.method.features, 1)
        return FeatureState(self.directions, frame, empty, None)

    def _stamp(self) -> tuple[int, int]:
        """Another whenever the seed may be another, without reading it."""
        return id(self.seed), 0 if self.seed.is_inference() else self.seed._version

    def _renew(self) -> None:
        if self.seed.is_meta:
            return
        self.directions: Float[Tensor, "m d"] = feature_maps.draw(
            self.method.features, self.dim, self.method.orthogonal, self.generator(), self.seed.device
        )
        self._drawn_from = self._stamp()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Directions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._renew()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._renew()


@dataclass(eq=False)
class Memory(ABC):
    """What one attention remembers of `length` tokens; changed in place by reading on."""

    block: int
    length: int = field(default=0, init=False)

    def read(
        self, q: Float[Tensor, "b h l d"], k: Float[Tensor, "b g l d"], v: Float[Tensor, "b g l e"]
    ) -> Float[Tensor, "b h l e"]:
        """The answers to the next queries; their keys and values are remembered."""
        after = self.length + q.shape[-2]
        if after > self.block:
            rule = f"exceeds block={self.block}"
            raise ShapeError("length", after, rule, "start again with a shorter text, or make a longer block")
        out = self._read(q, k, v)
        self.length = after
        return out

    @abstractmethod
    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(eq=False)
class KeysAndValues(Memory):
    """All keys and values so far."""

    method: Exact
    keys: Float[Tensor, "b g block d"] | None = None
    values: Float[Tensor, "b g block e"] | None = None

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, after = self.length, self.length + q.shape[-2]
        if self.keys is None or self.values is None:
            # Room for the whole block at once: growing by one token would copy all tokens each time.
            # Ordinary tensors even under inference_mode: others could not be written to outside.
            with torch.inference_mode(False):
                self.keys, self.values = (x.new_zeros(*x.shape[:2], self.block, x.shape[-1]) for x in (k, v))
        self.keys[..., before:after, :] = k
        self.values[..., before:after, :] = v
        mask = None
        if before and q.shape[-2] > 1:
            mask = torch.ones(q.shape[-2], after, dtype=torch.bool, device=q.device).tril(before)
        seen = self.keys[..., :after, :], self.values[..., :after, :]
        # A single last row sees everything, and rows from the first on see what SDPA calls causal.
        causal = not before and q.shape[-2] > 1
        problem = Problem.of(q, *seen, mask=mask, causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.method.compute(problem).out


@dataclass(eq=False)
class ColumnSums(Memory):
    """Separable attention's sums over keys, per feature, in O(d²): the numerators and denominators of its columns."""

    method: Separable
    state: ColumnState | None = None

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.state is None:
            values, features = v.to(rounding.accumulator(q.dtype)), q.shape[-1]
            self.state = ColumnState(scan.nothing(values, features, features))
        out = self.method.step(q, k, v, self.state)
        if out is None:
            out, self.state = self.method.read_on(q, k, v, self.state)
        return out


@dataclass(eq=False)
class FeatureSums(Memory):
    """Random features' sums over keys, in O(m·e), with the draw they were made under."""

    draw: Directions
    state: FeatureState | None = None

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = Problem.of(q, k, v, causal=True, enable_gqa=q.shape[1] != k.shape[1])
        state = self.draw.start(problem) if self.state is None else self.state
        out = self.draw.method.step(problem, state)
        if out is None:
            computed = self.draw.method.compute(problem, initial_state=state)
            out, state = computed.out, computed.trace.final_state
        self.state = state
        return out


def memory_of(method: Method, draw: RandomSeed | None, block: int) -> Memory:
    """An empty memory for a method that can read on from where it stopped."""
    match method:
        case Exact():
            return KeysAndValues(block, method)
        case Separable():
            return ColumnSums(block, method)
        case RandomFeatures():
            assert isinstance(draw, Directions)
            return FeatureSums(block, draw)
    chosen = method.selects_landmarks
    why = "its landmarks are chosen among all keys" if chosen else "it carries no state from key to key"
    rule = f"cannot decode token by token: {why}"
    raise ParameterError("method", method.name, rule, "decode with exact, separable or random_features")


@dataclass
class Cache:
    """What every layer of a model remembers; `step` changes it in place, so branch from a `copy.deepcopy` of it."""

    batch: int
    layers: list[Memory]

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.layers[0].length
