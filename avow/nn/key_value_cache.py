r"""All keys and values so far, attended to with a certificate, and where the tolerance allows it only in part.

Beside the keys stands a sketch of them, a few bits a number (`avow.maths.sketch`): it says which tokens may matter to a
query, and only those are read in full. Groups of 64 tokens are sketched when they are complete; the open group is
always read. The lengths of values, and of the longest key of each head, are kept too, so that attending never reads
what it does not use.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended, checked_wishes, exactly
from avow.certificates import certify
from avow.contract import Norms, Problem
from avow.contract.problem import DTYPES
from avow.errors import DtypeError, FileError, ParameterError, ShapeError
from avow.maths.norms import check_range, row_norms, slack
from avow.maths.sketch import GROUP, Sketch, joined_spread, sketched
from avow.methods.sparse import NothingToSave, Sparse
from avow.nn import cache_file

# Where more than this share of the tokens would have to be gathered, reading them all in order is as fast.
_WORTHWHILE = 0.4
# Caches of fewer tokens are read in full sooner than they are looked at.
_SHORT = 4096
# After the sketch saved nothing, this many answers at most are exact before it is asked again.
_LONGEST_PAUSE = 64
# Groups whose numbers are this far from the first ones' are beyond a sketch: they are always read.
_BEYOND = 1e30

_PARTS = ("codes", "scale", "zero", "radius", "reach")


class KeyValueCache:
    """Keys and values of `key_heads` heads, to which tokens are appended and queries attend, certified.

    With `bits` (1 to 8) a sketch is kept, which adds less than 30% to a bfloat16 cache of 32 or more dimensions;
    `bits=None` keeps none, and every answer is exact. With a `window`, a token sees the last `window` tokens, itself
    included; older ones make way when the room is full, which is twice what the window and the last tokens need. It is
    for inference: answers carry no gradient.

    >>> cache = KeyValueCache(key_heads=2, dim=16)
    >>> cache.append(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16))
    >>> out, certificate = cache.attend(torch.randn(1, 8, 1, 16), tol=1e-2)
    >>> tuple(out.shape), certificate.bound <= 1e-2
    ((1, 8, 1, 16), True)
    """

    def __init__(
        self,
        key_heads: int,
        dim: int,
        value_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        bits: int | None = 4,
        window: int | None = None,
    ) -> None:
        value_dim = dim if value_dim is None else value_dim
        for name, value in (("key_heads", key_heads), ("dim", dim), ("value_dim", value_dim), ("batch", batch)):
            _check_whole(name, value, 1, math.inf)
        if bits is not None:
            _check_whole("bits", bits, 1, 8)
        if window is not None:
            _check_whole("window", window, 1, math.inf)
        if dtype not in DTYPES:
            known = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise DtypeError("dtype", dtype, f"must be one of {known}", "use torch.bfloat16")
        self.key_heads, self.dim, self.value_dim, self.batch = key_heads, dim, value_dim, batch
        self.dtype, self.device, self.bits, self.window = dtype, torch.device(device), bits, window
        self._position = 0
        """How many tokens were appended in all."""
        self._base = 0
        """The position of the first token that the buffers hold: the first of a group."""
        self._longest = torch.zeros(batch, key_heads, dtype=torch.float64, device=self.device)
        self._metric: Tensor | None = None
        self._size: Tensor | None = None
        self._spread: Tensor | None = None
        self._buffers = self._room(0)
        self._pause, self._left, self._asked = 0, 0, ""

    @property
    def length(self) -> int:
        """How many tokens the next query sees."""
        return self._position if self.window is None else min(self._position, self.window)

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, the room for tokens to come included."""
        return sum(x.numel() * x.element_size() for x in self._buffers.values())

    @property
    def overhead(self) -> float:
        """The bytes of the sketch and of norms, relative to those of keys and values."""
        plain = {"keys", "values"}
        per_group = self._room(GROUP)
        own, more = (
            sum(x.numel() * x.element_size() for name, x in per_group.items() if (name in plain) == kept)
            for kept in (True, False)
        )
        return more / own

    def append(self, k: Float[Tensor, "b g l d"], v: Float[Tensor, "b g l e"]) -> None:
        """Remember tokens. Where anything is wrong with them, or there is no memory, the cache stays as it was."""
        self._check(k, v)
        k, v = k.detach(), v.detach()
        norms = row_norms(v, "v", faithful=True)
        longest = row_norms(k, "k")
        check_range(0.0, _largest(longest), _largest(norms), 1.0)
        count = k.shape[-2]
        if count == 0:
            return
        after = self._position + count
        # The first of these tokens sees a window that ends with itself.
        base = self._base if self.window is None else max(0, self._position - self.window + 1) // GROUP * GROUP
        buffers, base = self._fitting(base, after)
        start, end = self._position - base, after - base
        fresh = self._fresh_groups(k, start)
        # Nothing below can fail: only now does the cache change.
        for name, x in (("keys", k), ("values", v), ("norms", norms)):
            buffers[name][:, :, start:end] = x
        if fresh is not None:
            first = start // GROUP
            self._metric, self._size, self._spread = fresh.metric, fresh.size, joined_spread(self._spread, fresh.spread)
            for name in _PARTS:
                part = getattr(fresh, name)
                buffers[name][:, :, first : first + part.shape[2]] = part
        self._longest = torch.maximum(self._longest, longest.amax(-1))
        self._buffers, self._base, self._position = buffers, base, after

    @torch.no_grad()
    def attend(
        self,
        q: Float[Tensor, "b h n d"],
        tol: float | None = None,
        confidence: float | None = None,
        scale: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """The answers to the queries of the last n tokens, and the certificate of the error they made.

        The bound never exceeds `tol`; None means exact. `confidence < 1` accepts bounds that hold with that probability
        for each row, which lets flat heads be sampled.
        """
        if isinstance(tol, int | float) and tol <= 0:
            raise ParameterError("tol", tol, "must be above 0", "try tol=1e-2, or leave it out for exact")
        tol, sure = checked_wishes(tol, confidence)
        with torch.autocast(self.device.type, enabled=False):
            problem, first = self._problem(q, scale)
            norms = self._norms(problem, first)
            why = self._why_not(tol, sure)
            if tol is not None and not why and not problem.empty:
                attended, why = self._sparse(problem, norms, first, tol, sure, generator)
                if attended is not None:
                    return attended
            return exactly(problem, norms, tol, why)

    def save(self, path: str | Path) -> None:
        """Write what the cache holds to a safetensors file, whole or not at all."""
        held, groups = self._position - self._base, self._groups
        tensors = {name: x[:, :, : groups if name in _PARTS else held] for name, x in self._buffers.items()}
        tensors["longest"] = self._longest
        if self._metric is not None and self._size is not None and self._spread is not None:
            tensors |= {"metric": self._metric, "size": self._size, "spread": self._spread}
        made = {name: getattr(self, name) for name in ("key_heads", "dim", "value_dim", "batch", "bits", "window")}
        facts = {"made": made, "dtype": str(self.dtype).removeprefix("torch."), "state": self._state()}
        cache_file.write(Path(path), tensors, facts)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> KeyValueCache:
        """The cache that `save` wrote; it answers as that one would have."""
        tensors, facts = cache_file.read(Path(path))
        try:
            cache = KeyValueCache(**facts["made"], dtype=getattr(torch, facts["dtype"]), device=device)
            for name, value in facts["state"].items():
                setattr(cache, f"_{name}", value)
            buffers, _ = cache._fitting(cache._base, cache._position)
            for name, x in buffers.items():
                x[:, :, : tensors[name].shape[2]] = tensors[name].to(cache.device)
            cache._buffers, cache._longest = buffers, tensors["longest"].to(cache.device)
            if "metric" in tensors:
                cache._metric, cache._size, cache._spread = (
                    tensors[name].to(cache.device) for name in ("metric", "size", "spread")
                )
        except (KeyError, TypeError, RuntimeError) as problem:
            raise FileError("path", path, f"does not fit together ({problem})", "save the cache again") from problem
        return cache

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in ("position", "base", "pause", "left", "asked")}

    @property
    def _groups(self) -> int:
        """Whole groups among the tokens held."""
        return (self._position - self._base) // GROUP

    def _room(self, tokens: int) -> dict[str, Tensor]:
        """Buffers for so many tokens."""
        b, g, groups = self.batch, self.key_heads, tokens // GROUP
        room = {
            "keys": torch.empty(b, g, tokens, self.dim, dtype=self.dtype, device=self.device),
            "values": torch.empty(b, g, tokens, self.value_dim, dtype=self.dtype, device=self.device),
            "norms": torch.empty(b, g, tokens, dtype=torch.float64, device=self.device),
        }
        if self.bits is not None:
            # One group of zeros shows the shapes and types of a sketch.
            one = sketched(torch.zeros(1, 1, GROUP, self.dim, device=self.device), self.bits)
            for name in _PARTS:
                part = getattr(one, name)
                room[name] = part.new_empty(b, g, groups, *part.shape[3:])
        return room

    def _fitting(self, base: int, after: int) -> tuple[dict[str, Tensor], int]:
        """Buffers with room up to the position `after`, and the position they start from: at most `base`.

        While there is room nothing moves; then all from `base` on moves to new buffers, in which half is free.
        """
        held = self._buffers
        capacity = held["keys"].shape[2]
        if after - self._base <= capacity:
            return held, self._base
        needed = -(-(after - base) // GROUP) * GROUP
        room = self._room(max(2 * capacity, needed) if self.window is None else 2 * needed)
        start, end = base - self._base, min(self._position - self._base, capacity)
        for name, x in room.items():
            by = GROUP if name in _PARTS else 1
            old = held[name][:, :, start // by : max(end // by, start // by)]
            x[:, :, : old.shape[2]] = old
        return room, base

    def _fresh_groups(self, k: Tensor, start: int) -> Sketch | None:
        """The sketch of the groups that these keys, the first at `start` in the buffers, complete."""
        if self.bits is None:
            return None
        begun = start % GROUP
        if begun + k.shape[-2] < GROUP:
            return None
        open_rows = self._buffers["keys"][:, :, self._position - self._base - begun : self._position - self._base]
        rows = torch.cat([open_rows, k], 2)
        size = self._size
        if size is None:
            largest = rows[:, :, : rows.shape[2] // GROUP * GROUP].double().abs().amax((2, 3))
            # Nothing but zeros says nothing of how large keys are.
            size = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-300)))), 1.0)
        fresh = sketched(rows, self.bits, self._metric, size)
        wild = ~(fresh.reach <= _BEYOND)
        if not bool(wild.any()):
            return fresh
        reach = fresh.reach.masked_fill(wild, math.inf)
        scale, zero, radius = (
            getattr(fresh, x).masked_fill(wild.unsqueeze(-1), 0) for x in ("scale", "zero", "radius")
        )
        return dataclasses.replace(fresh, scale=scale, zero=zero, radius=radius, reach=reach)

    def _problem(self, q: Tensor, scale: float | None) -> tuple[Problem, int]:
        """What is asked of the tokens that these queries see, and where in the buffers those begin: with a group."""
        if self._position == 0:
            raise ShapeError("cache.length", 0, "must be at least 1", "append keys and values first")
        if not isinstance(q, Tensor) or q.ndim != 4:
            shape = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
            raise ShapeError("q.shape", shape, "must be (batch, heads, length, dim)", "give q its four axes")
        if q.shape[0] != self.batch:
            raise ShapeError("q.shape[0]", q.shape[0], f"must equal batch={self.batch}", "attend with the whole batch")
        if q.dtype != self.dtype:
            raise DtypeError("q.dtype", q.dtype, f"must equal the cache's {self.dtype}", f"use q.to({self.dtype})")
        n, end = q.shape[-2], self._position - self._base
        oldest = 0 if self.window is None else max(0, self._position - n - self.window + 1)
        if n > self._position or oldest < self._base:
            rule = f"exceeds the {min(self._position, end)} tokens held"
            raise ShapeError("q.shape[-2]", n, rule, "attend right after appending their keys")
        first = (oldest - self._base) // GROUP * GROUP
        k, v = (self._buffers[name][:, :, first:end] for name in ("keys", "values"))
        return Problem.of(q, k, v, mask=self._mask(n, end - first), scale=scale, enable_gqa=True), first

    def _mask(self, n: int, s: int) -> Tensor | None:
        """Which of the last s tokens each of the last n sees: those up to itself, within the window."""
        if n == 1 and (self.window is None or s <= self.window):
            return None
        own = torch.arange(s - n, s, device=self.device).unsqueeze(-1)
        tokens = torch.arange(s, device=self.device)
        seen = tokens <= own
        return seen if self.window is None else seen & (tokens > own - self.window)

    def _norms(self, problem: Problem, first: int) -> Norms:
        s = problem.k.shape[-2]
        values = self._buffers["norms"][:, :, first : first + s]
        keys = self._longest.unsqueeze(-1).expand(-1, -1, s)
        widest = max(self.dim, self.value_dim)
        norms = Norms(row_norms(problem.q, "q"), keys, values, slack(widest, self.dtype))
        check_range(*norms.most, problem.scale)
        return norms

    def _why_not(self, tol: float | None, confidence: float) -> str:
        """Why the sketch is not even asked; empty where it is."""
        if tol is None:
            return ""
        if self.bits is None:
            return "the cache keeps no sketch"
        if self.length < _SHORT:
            return f"{self.length} tokens are read sooner than chosen among"
        asked = f"{tol:g} {confidence:g}"
        if asked != self._asked:
            self._asked, self._pause, self._left = asked, 0, 0
        if self._left == 0:
            return ""
        self._left -= 1
        return f"the sketch saved nothing lately; it is asked again after {self._left} more"

    def _sparse(
        self,
        problem: Problem,
        norms: Norms,
        first: int,
        tol: float,
        confidence: float,
        generator: torch.Generator | None,
    ) -> tuple[Attended | None, str]:
        """The answer from a part of the tokens where that pays and keeps `tol`; otherwise None, and why."""
        method = Sparse(**Sparse.aimed({"bits": self.bits}, problem.sizes, tol, confidence))
        if method.drop == 0 or not method.foresee(problem, norms, confidence).bound <= tol:
            return None, "rounding leaves nothing of the tolerance to drop"
        known = dataclasses.replace(problem, norms=norms)
        try:
            computed = method.compute(known, generator, self._sketch(first), _WORTHWHILE)
        except NothingToSave as lost:
            self._pause = min(max(1, 2 * self._pause), _LONGEST_PAUSE)
            self._left = self._pause
            return None, str(lost)
        self._pause = 0
        certificate = certify(method, problem, norms, computed, confidence)
        if not certificate.keeps(tol):
            return None, f"sparse could prove only {certificate.bound:.1e}"
        return Attended(computed.out, certificate), ""

    def _sketch(self, first: int) -> Sketch:
        """The sketch of the whole groups from a place in the buffers on."""
        assert self.bits is not None
        if self._metric is None or self._size is None:
            return sketched(self._buffers["keys"][:, :, :0], self.bits)
        span = slice(first // GROUP, self._groups)
        codes, scale, zero, radius, reach = (self._buffers[name][:, :, span] for name in _PARTS)
        return Sketch(codes, scale, zero, radius, reach, self._metric, self._size, self.bits, self._spread)

    def _check(self, k: Tensor, v: Tensor) -> None:
        """Raise where tokens are not of this cache's kind."""
        for name, x, width in (("k", k, self.dim), ("v", v, self.value_dim)):
            if not isinstance(x, Tensor):
                raise DtypeError(name, type(x).__name__, "must be a torch.Tensor", "wrap it with torch.as_tensor")
            if x.dtype != self.dtype:
                raise DtypeError(f"{name}.dtype", x.dtype, f"must equal the cache's {self.dtype}", "convert it first")
            if x.device != self.device:
                raise DtypeError(f"{name}.device", x.device, f"must equal the cache's {self.device}", "move it first")
            wanted = (self.batch, self.key_heads, width)
            if x.ndim != 4 or (*x.shape[:2], x.shape[-1]) != wanted:
                rule = f"must be ({self.batch}, {self.key_heads}, length, {width}), as the cache was made"
                raise ShapeError(f"{name}.shape", tuple(x.shape), rule, "append what its own heads gave")
        if k.shape[-2] != v.shape[-2]:
            rule = f"must equal k.shape[-2]={k.shape[-2]}"
            raise ShapeError("v.shape[-2]", v.shape[-2], rule, "each key needs one value")


def _largest(norms: Tensor) -> float:
    return float(norms.amax()) if norms.numel() else 0.0


def _check_whole(name: str, value: object, least: int, most: float) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        rule = f"must be a whole number of at least {least}" if most == math.inf else f"must be from {least} to {most}"
        raise ParameterError(name, value, rule, f"try {name}={4 if name == 'bits' else 64}")
