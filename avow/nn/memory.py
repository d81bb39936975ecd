"""What an attention module keeps: its random draw, and what a decoder remembers of the tokens it has read.

Exact attention remembers every key and value, in room made once. Methods with a running state remember that: its size
does not depend on how many keys there were.
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
from avow.methods import all_methods


class RandomDraw(nn.Module):
    """A seed, taken from torch's own generator when made, and what the method draws from it once, if anything.

    A random method draws again at each call, which is right for one answer and wrong for a model: weights adapt to one
    draw, a cache made under one draw means nothing under another, and a run that is resumed must go on as it would
    have. An integer does not change with the module's type or device. It is part of the state dict.
    """

    seed: Tensor

    def __init__(self, method: Method, dim: int) -> None:
        super().__init__()
        self.method, self.dim = method, dim
        self.register_buffer("seed", torch.randint(2**62, (), device="cpu"))
        self._renew()

    def generator(self) -> torch.Generator:
        """A generator at the start of this draw."""
        stream = RandomStream()
        stream.manual_seed(int(self.seed))
        return stream

    def sample(self) -> Tensor | None:
        """What `Method.draw` gives for this seed.

        It is held beside the seed, since to read the seed at each call would make the host wait for the device, and is
        drawn again whenever the seed is moved, loaded or written to.
        """
        # A compiled graph cannot ask; it is made after the module was moved and loaded.
        if not torch.compiler.is_compiling() and self._drawn_from != self._stamp():
            self._renew()
        return self._sample

    def extra_repr(self) -> str:
        return f"{self.method.name}, dim={self.dim}"

    def _stamp(self) -> tuple[int, int]:
        """Another whenever the seed may be another, without reading it."""
        return id(self.seed), 0 if self.seed.is_inference() else self.seed._version

    def _renew(self) -> None:
        if not self.seed.is_meta:
            self._sample = self.method.draw(self.dim, self.generator(), self.seed.device)
            self._drawn_from = self._stamp()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomDraw:
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
    method: Method
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
class RunningState(Memory):
    """A method's running state over all keys so far, with the draw it was made under."""

    draw: RandomDraw | None = None
    state: Any = None

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = Problem.of(q, k, v, causal=True, enable_gqa=q.shape[1] != k.shape[1])
        if self.state is None:
            self.state = self.method.initial_state(problem, None if self.draw is None else self.draw.sample())
        out = self.method.step(problem, self.state)
        if out is None:
            out, self.state = self.method.read_on(problem, self.state)
        return out


def memory_of(method: Method, draw: RandomDraw | None, block: int) -> Memory:
    """An empty memory for a method that can read on from where it stopped."""
    if method.is_exact:
        return KeysAndValues(block, method)
    if method.has_state:
        return RunningState(block, method, draw)
    chosen = method.selects_landmarks
    why = "its landmarks are chosen among all keys" if chosen else "it carries no state from key to key"
    rule = f"cannot decode token by token: {why}"
    able = [name for name, kind in all_methods().items() if kind.is_exact or kind().has_state]
    raise ParameterError("method", method.name, rule, f"decode with {' or '.join(able)}")


@dataclass
class Cache:
    """What every layer of a model remembers; `step` changes it in place, so branch from a `copy.deepcopy` of it.

    Attributes:
        batch: sequences.
        layers: what each layer remembers.
    """

    batch: int
    layers: list[Memory]

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.layers[0].length
