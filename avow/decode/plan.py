"""What a decode loop costs: seconds of a step by exact and sparse attention, bytes, and from which length sparse pays.

Steps are those of `KeyValueCache.append` and `attend`, priced by what such steps take on this machine (`step_rates`);
bytes are those of the cache's buffers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Problem, Sizes, check_dtype, dtype_name, notebook
from avow.core.quantities import count, ratio, seconds
from avow.core.quantities import memory as size_text
from avow.core.schema import json_schema
from avow.decode.key_value_cache import KeyValueCache
from avow.decode.step_rates import StepRates, share_read, shortest, step_rates
from avow.decode.token_buffers import HOT
from avow.errors import ParameterError, ShapeError
from avow.parameters import as_float, check_count, check_key_heads, declared

_LOG = logging.getLogger(__name__)
USUAL_SHARE = 0.1
"""The share of the tokens that is assumed to be read if nothing is known of the heads."""


SCHEMA = "avow.plan_decode/1"


class DecodePlanDocument(TypedDict):
    """A plan of a decode loop in JSON.

    Attributes:
        tokens: tokens in the cache of each sequence that a query sees.
        window: how many tokens a query sees at most; null if it sees all.
        batch: sequences.
        heads: query heads.
        key_heads: key heads, which the query heads share.
        queries: queries of each head in a step.
        dim: dimension of queries and keys.
        value_dim: dimension of values.
        dtype: type of the tokens.
        device: where steps run.
        rates: where the predicted times come from.
        chosen: the faster one, "exact" or "sparse".
        kept: the share of the tokens that sparse steps are taken to read.
        kept_source: how that share is known.
        why_not_sparse: why a step of this length reads all tokens; empty if it may read a part of them.
        exact_seconds: a step that reads all tokens.
        sparse_seconds: a step that reads the share `kept`; null if no step does.
        sdpa_seconds: the same step by PyTorch's SDPA; null if it was not measured.
        sketch_seconds: sketching all tokens, once.
        pays_from: from how many tokens on sparse steps are faster; null if they never are.
        pays_below: below which share sparse steps of this length are faster; null if none are.
        steps_to_pay: after how many steps sketching is paid for; null if sparse steps save nothing.
        token_bytes: keys and values.
        exact_bytes: a cache without a sketch.
        sparse_bytes: a cache with its sketch.
        offloaded_bytes: what stays on the device if keys and values are in host memory.
        offloaded_seconds: a step that reads the share `kept` from host memory; null if no step does.
        layers: how many such layers there are; all other figures are of one.
        memory: bytes of the device that caches may take; null if that is not known.
        fits: "on the device", "offloaded" or "no": whether caches of all layers fit; null if `memory` is.
    """

    tokens: int
    window: int | None
    batch: int
    heads: int
    key_heads: int
    queries: int
    dim: int
    value_dim: int
    dtype: str
    device: str
    rates: str
    chosen: Literal["exact", "sparse"]
    kept: float
    kept_source: str
    why_not_sparse: str
    exact_seconds: float
    sparse_seconds: float | None
    sdpa_seconds: float | None
    sketch_seconds: float | None
    pays_from: int | None
    pays_below: float | None
    steps_to_pay: int | None
    token_bytes: int
    exact_bytes: int
    sparse_bytes: int
    offloaded_bytes: int
    offloaded_seconds: float | None
    layers: int
    memory: int | None
    fits: Literal["on the device", "offloaded", "no"] | None


@dataclass(frozen=True)
class DecodePlan:
    """What a decoding step of one layer costs. Seconds are predicted, bytes are those of a cache without spare room."""

    sizes: Sizes
    """Of a step; `keys` is the number of tokens in the cache that a query sees."""
    kept: float
    """The share of the tokens that sparse steps are taken to read in full."""
    rates: StepRates
    """What steps take on this machine, measured or typical."""
    token_bytes: int
    """Keys and values of all tokens."""
    norm_bytes: int
    """Lengths of all values, which every cache keeps."""
    sketch_bytes: int
    """A sketch of all keys, of 4 bits a number."""
    kept_source: str = "given"
    """How `kept` is known: given, assumed, or found on some heads."""
    window: int | None = None
    """How many tokens a query sees at most; None: all."""
    layers: int = 1
    """How many such layers there are; all other figures are of one."""
    memory: int | None = None
    """Bytes of the device that caches may take; None if that is not known."""

    @property
    def exact_seconds(self) -> float:
        """A step that reads all tokens."""
        return self.rates.exact.seconds(self.sizes.keys)

    @property
    def sparse_seconds(self) -> float | None:
        """A step that reads the share `kept` of the tokens; None if no step does (`why_not_sparse`)."""
        return None if self.why_not_sparse else self.rates.sparse_seconds(self.sizes.keys, self.kept)

    @property
    def sdpa_seconds(self) -> float | None:
        """The same step by PyTorch's SDPA on the same tokens; None if it was not measured."""
        return None if self.rates.sdpa is None else self.rates.sdpa.seconds(self.sizes.keys)

    @property
    def sketch_seconds(self) -> float | None:
        """Sketching all tokens, once; None if nothing would use the sketch."""
        return None if self.why_not_sparse else self.sizes.keys * self.rates.sketch

    @property
    def why_not_sparse(self) -> str:
        """Why a step of this length reads all tokens; empty if it may read a part of them."""
        if self.rates.unfit:
            return self.rates.unfit
        least = shortest(self.sizes.device)
        return f"caches of fewer than {least:,} tokens are read in full" if self.sizes.keys < least else ""

    @property
    def chosen(self) -> Literal["exact", "sparse"]:
        """The faster one: "exact" or "sparse"."""
        return "sparse" if self.sparse_seconds is not None and self.sparse_seconds < self.exact_seconds else "exact"

    @property
    def seconds(self) -> float:
        """A step of the faster one."""
        return min(self.exact_seconds, math.inf if self.sparse_seconds is None else self.sparse_seconds)

    @property
    def pays_from(self) -> int | None:
        """From how many tokens on a sparse step is faster than an exact one; None if it never is."""
        if self.rates.sparse is None:
            return None
        least = shortest(self.sizes.device)
        bends = {n for curve in self.rates.curves.values() if curve for n in curve.tokens}
        lengths = [float(least), *sorted(n for n in bends if n > least)]
        lengths.append(2 * lengths[-1])
        saved = [self.rates.exact.seconds(n) - (self.rates.sparse_seconds(n, self.kept) or 0.0) for n in lengths]
        if saved[-1] <= saved[-2]:
            return None
        # What is saved is straight from each length to the next, and on beyond the last: the last time it rises above
        # zero counts.
        for i in reversed(range(len(lengths) - 1)):
            if saved[i] <= 0:
                slope = (saved[i + 1] - saved[i]) / (lengths[i + 1] - lengths[i])
                return math.ceil(lengths[i] - saved[i] / slope)
        return least

    @property
    def pays_below(self) -> float | None:
        """Sparse steps of this length are faster if they read less than this share of the tokens; None if none are."""
        looking = self.rates.sparse_seconds(self.sizes.keys, 0.0)
        if self.why_not_sparse or looking is None or looking >= self.exact_seconds:
            return None
        reading = self.rates.read.seconds(self.sizes.keys)
        return min(1.0, (self.exact_seconds - looking) / reading) if reading > 0 else 1.0

    @property
    def steps_to_pay(self) -> int | None:
        """After how many steps sketching is paid for by what sparse steps save; None if they save nothing."""
        if self.chosen != "sparse" or self.sparse_seconds is None or self.sketch_seconds is None:
            return None
        return math.ceil(self.sketch_seconds / (self.exact_seconds - self.sparse_seconds))

    @property
    def exact_bytes(self) -> int:
        """A cache without a sketch."""
        return self.token_bytes + self.norm_bytes

    @property
    def sparse_bytes(self) -> int:
        """A cache with its sketch."""
        return self.exact_bytes + self.sketch_bytes

    @property
    def offloaded_bytes(self) -> int:
        """What stays on the device if keys and values are in host memory: the sketch, the lengths of values and a few
        rows.
        """
        return self.norm_bytes + self.sketch_bytes + round(HOT * self.token_bytes)

    @property
    def offloaded_seconds(self) -> float | None:
        """A step that reads the share `kept` of the tokens from host memory, none of them on the device; None if no
        step does.
        """
        looking = None if self.why_not_sparse else self.rates.sparse_seconds(self.sizes.keys, 0.0)
        if looking is None or self.rates.link is None:
            return None
        return looking + self.kept * self.sizes.keys * self.rates.link

    @property
    def fits(self) -> Literal["on the device", "offloaded", "no"] | None:
        """Whether caches of all layers fit into the device's memory, or what stays there if they are offloaded."""
        if self.memory is None:
            return None
        if self.layers * (self.exact_bytes if self.chosen == "exact" else self.sparse_bytes) <= self.memory:
            return "on the device"
        can = self.offloaded_seconds is not None and self.layers * self.offloaded_bytes <= self.memory
        return "offloaded" if can else "no"

    def plain(self) -> dict[str, Any]:
        """Everything as JSON has it, in the form that `json_schema` says."""
        z = self.sizes
        sizes = {"tokens": z.keys, "dtype": dtype_name(z.dtype), "rates": self.rates.source}
        names = [name for name in DecodePlanDocument.__annotations__ if name not in sizes]
        own = {name: getattr(z if hasattr(z, name) else self, name) for name in names}
        return {"schema": SCHEMA, **sizes, **own}

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The schema of what `plain` returns."""
        return json_schema(DecodePlanDocument, SCHEMA)

    @property
    def heading(self) -> tuple[str, str]:
        """What is planned, and for which heads, in two lines."""
        z = self.sizes
        shared = "" if z.heads == z.key_heads else f" on {count(z.key_heads, 'key head')}"
        parts = [count(z.heads, "head") + shared, f"dimension {z.dim}", dtype_name(z.dtype), z.device]
        parts += [f"batch {z.batch}"] * (z.batch > 1) + [f"{z.queries} queries a step"] * (z.queries > 1)
        seen = "" if self.window is None else f" in a window of {self.window:,}"
        return f"a decoding step over {count(z.keys, 'token')}{seen}, one layer", ", ".join(parts)

    @property
    def table(self) -> list[list[str]]:
        """A line for each way: its name, what a step is predicted to take, how that compares with SDPA, its memory."""
        sdpa = self.sdpa_seconds
        ways = {
            "exact": (self.exact_seconds, self.exact_bytes),
            "sparse": (self.sparse_seconds, self.sparse_bytes),
            "PyTorch's SDPA": (sdpa, self.token_bytes),
        }
        if self.offloaded_seconds is not None:
            ways["offloaded"] = self.offloaded_seconds, self.offloaded_bytes
        return [
            [name, seconds(time), ratio(None if sdpa is None or time is None else time / sdpa), size_text(held)]
            for name, (time, held) in ways.items()
        ]

    def notes(self, advice: str = "pass kept=, or find it with avow.nn.share_of_heads") -> list[str]:
        """What the figures rest on.

        Args:
            advice: how to name a share that was assumed.

        Returns:
            Lines of text.
        """
        notes = []
        if self.why_not_sparse:
            notes.append(f"sparse is not used: {self.why_not_sparse}")
        else:
            remedy = f": {advice}" if self.kept_source == "assumed" else ""
            notes.append(f"sparse: {self.kept:.1%} of the tokens read, {self.kept_source}{remedy}")
        if self.sketch_seconds is not None:
            paid = "" if self.steps_to_pay is None else f", which {count(self.steps_to_pay, 'step')} pay for"
            notes.append(f"the sketch takes {seconds(self.sketch_seconds)} once{paid}")
        if self.offloaded_seconds is not None:
            notes.append(
                f"offloaded: {size_text(self.token_bytes)} in host memory, the memory named here on the device; every "
                "row that is read crosses the bus"
            )
        notes.append("memory is that of the tokens; buffers without capacity= may have room for twice as many")
        if self.sdpa_seconds is None:
            notes.append("SDPA was not measured")
        return [*notes, f"times: {self.rates.source}"]

    @property
    def verdict(self) -> list[str]:
        """The faster way, and where sparse decoding pays."""
        faster = ""
        if self.chosen == "sparse":
            faster = f", {self.exact_seconds / self.seconds:.1f} times as fast as exact"
        if self.sdpa_seconds is not None:
            faster += f", {self.sdpa_seconds / self.seconds:.1f} times as fast as SDPA"
        lines = [f"{self.chosen}: {seconds(self.seconds)} a step{faster}", *self._fitting]
        if self.rates.sparse is None:
            return lines
        if self.pays_from is None:
            return [*lines, f"sparse pays at no length if {self.kept:.1%} of the tokens are read"]
        below = (
            "" if self.pays_below is None else f", and at {self.sizes.keys:,} if less than {self.pays_below:.0%} are"
        )
        if self.pays_below == 1:
            below = f", and at {self.sizes.keys:,} whatever share is read"
        return [*lines, f"sparse pays from {self.pays_from:,} tokens on if {self.kept:.1%} of them are read{below}"]

    @property
    def _fitting(self) -> list[str]:
        """Whether all layers fit, and what a token takes."""
        if self.fits is None or self.memory is None:
            return []
        away = self.fits == "offloaded" and self.offloaded_seconds is not None
        taken = (self.offloaded_seconds or 0.0) if away else self.seconds
        token = "" if self.fits == "no" else f", {seconds(self.layers * taken)} a token"
        held = {"on the device": "fit on the device", "offloaded": "fit offloaded", "no": "do not fit, not offloaded"}
        caches = f"{count(self.layers, 'layer')} of {size_text(self.token_bytes)} of keys and values"
        return [f"{caches} in {size_text(self.memory)}: {held[self.fits]}{token}"]

    def __str__(self) -> str:
        rows = [["", "predicted", "of SDPA", "memory"], *self.table]
        lines = [f"{name:14}{time:>11}{share:>9}{held:>12}" for name, time, share, held in rows]
        return "\n".join([*self.heading, *lines, *self.notes(), *self.verdict])

    def _repr_html_(self) -> str:
        marked = [row[0] for row in self.table].index(self.chosen)
        table = notebook.table(("", "predicted", "of SDPA", "memory"), self.table, marked)
        about = [("step", ", ".join(self.heading)), *(("", line) for line in (*self.verdict[1:], *self.notes()))]
        return notebook.card(self.verdict[0], table, notebook.facts(about))


@declared()
def plan_decode(
    tokens: int,
    heads: int,
    key_heads: int | None = None,
    dim: int = 128,
    *,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    queries: int = 1,
    device: str = "cpu",
    kept: float | None = None,
    window: int | None = None,
    layers: int = 1,
    memory: int | None = None,
    tell: Callable[[str], object] = _LOG.info,
    again: bool = False,
) -> DecodePlan:
    """What a step of a decode loop costs with these tokens in a `KeyValueCache`: time, memory, and where sparse pays.

    What steps take is measured at the first call for heads of this shape, in about two seconds, and kept in a file. A
    machine that is too busy for that in ten seconds is left alone for an hour. With `AVOW_CALIBRATION=off`, or on such
    a machine, rates are typical ones, and the plan says so. The first of all calls on a CPU may wait half a minute for
    numba to compile decoding steps.

    Args:
        tokens: tokens in the cache.
        heads: query heads.
        key_heads: heads of keys and values; None is as many as query heads.
        dim: features of a query and of a key.
        value_dim: features of a value; None is `dim`.
        dtype: type of the cache.
        batch: sequences.
        queries: queries of each head in a step, those of the last tokens.
        device: "cpu" or "cuda".
        kept: the share of the tokens that sparse steps read: it depends on the heads and the tolerance, and
            `avow.nn.share_of_heads` finds it. By default a tenth is assumed.
        window: how many tokens a query sees at most, as the cache has it: older ones are neither kept nor read. None:
            all.
        layers: how many such layers there are.
        memory: bytes of the device that their caches may take; None is what is free on a GPU.
        tell: called with a line that says that something is measured.
        again: whether to measure whatever is known already.

    Returns:
        Seconds, bytes and lengths of exact and of sparse steps; prints as a table.

    Raises:
        ParameterError: a number is not one that a cache can have, or the device is not available.

    >>> import avow, torch
    >>> plan = avow.plan_decode(131_072, heads=32, key_heads=8, dtype=torch.bfloat16)
    >>> plan.token_bytes == 131_072 * 8 * (128 + 128) * 2
    True
    """
    key_heads, value_dim = heads if key_heads is None else key_heads, dim if value_dim is None else value_dim
    counts = {"tokens": tokens, "heads": heads, "key_heads": key_heads, "dim": dim, "value_dim": value_dim}
    for name, value in (counts | {"batch": batch, "queries": queries, "layers": layers}).items():
        check_count(name, value, 64)
    check_key_heads(heads, key_heads)
    if memory is not None:
        check_count("memory", memory, 2**34)
    if window is not None:
        check_count("window", window, 4096)
    if queries > tokens:
        raise ParameterError("queries", queries, f"exceeds the {tokens} tokens", f"try queries={tokens}")
    if kept is not None and not 0 <= as_float(kept) <= 1:
        raise ParameterError("kept", kept, "must be from 0 to 1", f"try kept={USUAL_SHARE}")
    check_dtype("dtype", dtype, "use torch.bfloat16")
    if device not in ("cpu", "cuda"):
        raise ParameterError("device", repr(device), "must be 'cpu' or 'cuda'", "the default is 'cpu'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device", repr(device), "is not available", "use device='cpu'")
    seen = tokens if window is None else min(tokens, window)
    sizes = Sizes(batch, heads, key_heads, queries, seen, dim, value_dim, dtype, device)
    share, source = (USUAL_SHARE, "assumed") if kept is None else (float(kept), "given")
    if memory is None and device == "cuda":
        memory, _ = torch.cuda.mem_get_info()
    known = step_rates(sizes, tell, again)
    return DecodePlan(sizes, share, known, *_bytes(sizes), source, window, layers, memory)


def _bytes(z: Sizes) -> tuple[int, int, int]:
    """Bytes of keys and values, of the lengths of values, and of a sketch."""
    tokens = z.batch * z.key_heads * z.keys * (z.dim + z.value_dim) * z.item
    without, with_sketch = (
        KeyValueCache(z.key_heads, z.dim, z.value_dim, dtype=z.dtype, bits=bits).overhead for bits in (None, 4)
    )
    return tokens, round(tokens * without), round(tokens * (with_sketch - without))


@torch.no_grad()
def share_of_heads(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    tol: float = 1e-2,
    scale: float | None = None,
) -> float:
    """The share of the tokens that sparse steps read of these heads within a tolerance.

    A cache of another length is likely to need about the same share, but nothing proves that.

    Args:
        q: queries, (batch, heads, n, dim), one for each of n steps; each sees all tokens.
        k, v: keys and values of the tokens.
        tol: the error that a row may have, relative to the longest value.
        scale: as in `avow.attend`.

    Returns:
        The share, averaged over the steps; 1 if they read everything.

    Raises:
        ShapeError: there are no keys or no queries.

    >>> import torch
    >>> from avow.nn import share_of_heads
    >>> 0 <= share_of_heads(torch.randn(1, 8, 1, 16), torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)) <= 1
    True
    """
    problem = Problem.of(q, k, v, scale=scale, enable_gqa=True)
    q, k, v = problem.q, problem.k, problem.v
    if problem.empty:
        raise ShapeError("q, k", (tuple(q.shape), tuple(k.shape)), "have no keys or no queries", "pass some of each")
    cache = KeyValueCache(k.shape[1], k.shape[3], v.shape[3], k.shape[0], dtype=k.dtype, device=k.device)
    cache.append(k, v)
    shares = [share_read(cache.attend(one, tol, scale=scale, method="sparse").certificate) for one in q.split(1, 2)]
    return sum(shares) / len(shares)
