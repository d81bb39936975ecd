"""Steps of sparse decoding to test kernels with: friendly ones, hostile ones, and what is true of them in float64."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.kernels.choice import PLACES, Chosen
from avow.kernels.finalize import Decoded
from avow.kernels.pausing import Used, blank_state
from avow.kernels.planning import blank_counts
from avow.kernels.sketch_pass import Terms, bounded
from avow.kernels.sparse_decode import Lengths, decode
from avow.numerics.sketch import Sketch, sketched
from tests.helpers.decode_references import value_lengths


@dataclasses.dataclass
class Step:
    """Everything that one decoding step is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sketch: Sketch
    lengths: Lengths
    scale: float

    def run(self, drop: float = 1e-2, hint: Tensor | None = None, how: Callable[..., Decoded] = decode) -> Decoded:
        # A GPU does not warn of inf and nan.
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            return how(self.q, self.k, self.v, self.sketch, self.lengths, drop, self.scale, hint)

    @property
    def used(self) -> Used:
        """How many tokens each key head has: all that there is room for."""
        tokens = torch.full((self.k.shape[0] * self.k.shape[1],), self.k.shape[2], dtype=torch.int32)
        return Used(tokens, blank_state(tokens.device))

    def siblings(self, x: Tensor) -> Tensor:
        return x.double().repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)

    def logits(self) -> Tensor:
        """In float64, in octaves."""
        product = self.siblings(self.k) @ self.q.double().unsqueeze(-1)
        return product.squeeze(-1) * self.scale * math.log2(math.e)

    def errors(self, out: Tensor) -> Tensor:
        """How far an answer is from the truth, in the unit of bounds."""
        weights = torch.softmax(self.logits() * math.log(2), -1).unsqueeze(-2)
        values = self.siblings(self.v)
        apart = torch.linalg.vector_norm(out.double() - (weights @ values).squeeze(-2), dim=-1)
        unit = torch.linalg.vector_norm(values, dim=-1).amax(-1)
        return torch.where(apart == 0, 0.0, apart / unit)


Inputs = tuple[Tensor, Tensor, Tensor]


def step(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.bfloat16, scale: float | None = None) -> Step:
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    return Step(q, k, v, sketched(k), value_lengths(v), q.shape[-1] ** -0.5 if scale is None else scale)


def drawn(b: int = 1, g: int = 1, r: int = 2, s: int = 200, d: int = 64, e: int = 64, loud: float = 3.0) -> Inputs:
    """Queries that single out a few directions, keys and values."""
    return loud * torch.randn(b, g * r, d), torch.randn(b, g, s, d), torch.randn(b, g, s, e)


def terms_of(given: Step, hint: Tensor | None = None) -> Terms:
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        counts = blank_counts(given.q.shape[0] * given.q.shape[1], given.q.device)
        known = given.lengths.each, given.lengths.most, hint, given.scale, given.used, counts
        return bounded(given.q, given.sketch, *known)


def flags_of(chosen: Chosen, s: int) -> Tensor:
    """For each token, 0 where it is not listed, or else one more than the step of its odds."""
    heads, spans = chosen.found.shape
    flags = torch.zeros(heads, s, dtype=torch.int32)
    for head, (lists, found) in enumerate(zip(chosen.listed.view(heads, spans, -1), chosen.found, strict=True)):
        for own, number in zip(lists, found.tolist(), strict=True):
            flags[head, own[:number].long() & 2**PLACES - 1] = (own[:number] >> PLACES) + 1
    return flags


def unit_of(x: Tensor) -> float:
    return {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(x.dtype, 1e-3)


def permuted(a: int, b: int, selector: int) -> int:
    """PTX's prmt: four bytes chosen from the eight of two registers."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


def clustered() -> Inputs:
    centers = 3 * torch.randn(5, 64)
    k = (centers[torch.randint(5, (200,))] + 0.05 * torch.randn(200, 64))[None, None]
    return 2 * centers[:2][None], k, torch.randn(1, 1, 200, 64)


def ties() -> Inputs:
    """Two keys in turn, whose logits differ by nearly nothing, with opposite values."""
    a = torch.randn(64)
    even = torch.arange(200) % 2 == 0
    k = torch.where(even[:, None], a, a + 1e-3 * torch.randn(64))[None, None]
    return torch.randn(1, 2, 64), k, torch.where(even[:, None], 1.0, -1.0).expand(200, 64)[None, None]


def one_of(kind: str, size: float) -> Inputs:
    """Random inputs, one key or value of which is long."""
    q, k, v = drawn()
    {"key": k, "value": v}[kind][..., 77, :] *= size
    return q, k, v


def worst_values() -> Inputs:
    """What looks small points one way, what looks large the other, and the small ones are the longest."""
    q, k, _ = drawn(r=1, loud=2.0)
    logits = (k @ q.unsqueeze(-1)).squeeze(-1)
    return q, k, torch.where(logits < logits.quantile(0.8), 1.0, -0.01).unsqueeze(-1) * torch.ones(64)


def all_equal() -> Inputs:
    q, k, v = drawn()
    return q, k[:, :, :1].expand_as(k), v


def scaled(q: float = 1.0, k: float = 1.0, v: float = 1.0) -> Inputs:
    queries, keys, values = drawn()
    return queries * q, keys * k, values * v


HOSTILE: dict[str, Callable[[], Inputs]] = {
    "random": drawn,
    "clustered": clustered,
    "ties": ties,
    "one giant key": lambda: one_of("key", 1e4),
    "one long value": lambda: one_of("value", 1e3),
    "all keys equal": all_equal,
    "values against the choice": worst_values,
    "huge queries": lambda: scaled(q=100.0),
    "tiny queries": lambda: scaled(q=1e-20),
    "queries of zero": lambda: scaled(q=0.0),
    "huge keys": lambda: scaled(q=1e-12, k=1e12),
    "huge queries, tiny keys": lambda: scaled(q=1e25, k=1e-25),
    "logits beyond float32": lambda: scaled(q=1e25, k=1e25),
    "huge values": lambda: scaled(v=1e30),
    "tiny values": lambda: scaled(v=1e-25),
    "values of zero": lambda: scaled(v=0.0),
    "no whole group": lambda: drawn(s=40),
    "one token": lambda: drawn(s=1),
}


BEYOND = ("logits beyond float32", "huge queries, tiny keys")
