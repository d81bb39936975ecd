"""The randomness of a module: drawn once, kept as a seed, the same at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.core import Problem
from avow.methods.random_features import FeatureState, RandomFeatures
from avow.numerics import features as feature_maps
from avow.numerics import rounding, scan
from avow.numerics.random_stream import RandomStream


class RandomSeed(nn.Module):
    """A seed, taken from torch's own generator when made; part of the state dict.

    A random method draws anew at each call, which is right for one answer and wrong for a model: weights learn to
    live with one draw, a cache made under one draw means nothing under another, and a run that is resumed must
    go on as it would have. A whole number stays what it is through any change of the module's type or device.
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
