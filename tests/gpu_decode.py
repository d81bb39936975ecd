"""Try to break decoding's kernels on a GPU: `python -m tests.gpu_decode --rows 1000000`.

First each kernel is held to its reference at a few shapes. Then come whole steps.
So many rows at least are held to deterministic bounds, and as many to statistical ones, against float64; a line every
few seconds tells how far it is, and with `--seconds` it ends about then with what it has. For a part of that time come
caches as users have them, with sequences of different lengths, crops, windows, sinks and several queries in a step,
called and replayed from CUDA graphs; then those whose keys and values are in host memory, with few places for hot rows,
all of them poisoned, and with other tokens in the place of some that were forgotten. Caches come in families:
Gaussian, clustered, with giant keys, all keys equal, with values that grow with their weight, or that point away from
what is read. Truth in float64 errs by far less than these bounds, all of which hold answers in 16 bits or 32.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.kernels.hot_rows import bytes_of_place
from avow.kernels.sparse_decode import decode
from avow.nn import KeyValueCache
from avow.numerics.sketch import sketched
from tests.helpers.decode_checks import faults_beside_references
from tests.helpers.decode_references import value_lengths

_CONFIDENCE = 0.999
# Seconds between two lines, and queries that each cache is asked.
_PAUSE, _ASKED = 5.0, 8


class Shape(NamedTuple):
    """Caches of a batch, key heads of each, siblings, tokens, widths and type; each has kernels of its own."""

    batch: int
    groups: int
    siblings: int
    tokens: int
    dim: int
    kind: torch.dtype


# Few, since what takes the time is compiling kernels: a step of each has ten.
SHAPES = (
    Shape(8, 8, 4, 32_768, 128, torch.bfloat16),
    Shape(16, 8, 8, 8_200, 64, torch.bfloat16),
    Shape(16, 8, 4, 16_000, 64, torch.float16),
    Shape(32, 8, 8, 1_000, 32, torch.float32),
)

Family = Callable[[Tensor, Tensor, random.Random], tuple[Tensor, Tensor]]


def _plain(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    return k, v


def _clustered(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    centres = k[:, :, : rng.choice((2, 8, 30))]
    near = centres[:, :, torch.randint(0, centres.shape[2], (k.shape[2],), device=k.device)]
    return near + 10 ** rng.uniform(-4, -0.5) * k, v


def _giant(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    k = k.clone()
    k[:, :, rng.randrange(k.shape[2])] *= 10 ** rng.uniform(0.5, 2)
    return k, v


def _equal(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    return k[:, :, :1].expand_as(k) + 10 ** rng.uniform(-6, -2) * k, v


def _heavy(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Few values that are far longer than all others."""
    lengths = torch.rand(v.shape[:3], device=v.device).clamp(min=1e-4) ** -rng.uniform(0.3, 1.5)
    return k, v * lengths.unsqueeze(-1)


def _one_sided(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """All values alike but for those of short keys: what is dropped points the other way."""
    short = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    return k, torch.where(short < short.median(), -1.0, 1.0) * v[:, :, :1] + 0.01 * v


FAMILIES: dict[str, Family] = {
    "plain": _plain,
    "clustered": _clustered,
    "giant": _giant,
    "equal": _equal,
    "heavy": _heavy,
    "one-sided": _one_sided,
}


class Truth:
    """What answers should be, in float64 and on the same device; keys and values are widened once."""

    def __init__(self, k: Tensor, v: Tensor, scale: float) -> None:
        self.keys, self.values, self.scale = k.double().mT, v.double(), scale
        self.unit = torch.linalg.vector_norm(self.values, dim=-1).amax(-1)[..., None]  # (b, g, 1)

    def errors(self, q: Tensor, *answers: Tensor) -> list[Tensor]:
        """How far answers to a query are from the truth, in the unit of bounds."""
        groups = self.values.shape[1]
        wide = q.double().unflatten(1, (groups, -1))  # (b, g, r, d)
        truth = torch.softmax(wide @ self.keys * self.scale, -1) @ self.values
        apart = [torch.linalg.vector_norm(out.double().unflatten(1, (groups, -1)) - truth, dim=-1) for out in answers]
        return [torch.where(x == 0, 0.0, x / self.unit).flatten(1) for x in apart]


def run(
    rows: int, seed: int, device: str, seconds: float = math.inf, shapes: Sequence[Shape] = SHAPES
) -> tuple[Counter[str], list[str]]:
    """Counts of rows, misses and samples, and stories of what broke."""
    rng, counts, stories = random.Random(seed), Counter[str](), list[str]()
    torch.manual_seed(seed)
    start = told_at = time.monotonic()
    for shape in itertools.cycle(shapes):
        batch, groups, siblings, s, d, kind = shape
        family = rng.choice(list(FAMILIES))
        drop, steep, towards = 10 ** rng.uniform(-3, -0.3), 10 ** rng.uniform(-1, 0.5), rng.choice((0.0, 1.0, 3.0))
        k, v = (torch.randn(batch, groups, s, d, device=device) for _ in range(2))
        largest = torch.finfo(kind).max
        k, v = (x.clamp(-largest, largest).to(kind).contiguous() for x in FAMILIES[family](k, v, rng))
        sketch, lengths, scale = sketched(k), value_lengths(v), d**-0.5
        truth = Truth(k, v, scale)
        draws = torch.tensor([rng.getrandbits(60)], device=device)
        for asked in range(_ASKED):
            if min(counts["deterministic"], counts["statistical"]) >= rows or time.monotonic() - start > seconds:
                return counts, stories
            q = steep * torch.randn(batch, groups * siblings, d, device=device)
            # Towards some key: trained heads weigh few tokens far above all others.
            sought = k[:, :, torch.randint(s, (siblings,), device=device)].float().flatten(1, 2)
            q = (q + towards * sought).to(kind)
            sure = decode(q, k, v, sketch, lengths, drop, scale)
            # Draws pay where much may be dropped.
            wide = max(drop, 0.15)
            first, second = (
                decode(q, k, v, sketch, lengths, wide, scale, None, None, _CONFIDENCE, draws) for _ in range(2)
            )
            # Hints that mislead: rows that then miss the limit are read again, and all of them.
            hint = torch.full((batch, groups * siblings), 1e-5, device=device) * lengths.most.amax()
            mended = decode(q, k, v, sketch, lengths, drop, scale, hint, 1.01 * drop)
            found = (sure, mended, first, second)
            errors = truth.errors(q, *(x.out for x in found))
            wrong = [int((~(own <= x.bound)).sum()) for own, x in zip(errors, found, strict=True)]
            broken, missed = sum(wrong[:2]), wrong[2:]
            counts["deterministic"] += 2 * sure.bound.numel()
            counts["read again"] += int((~mended.within).sum())
            counts["deterministic, part read"] += int((sure.kept < s).sum()) * siblings
            counts["broken"] += broken
            counts["statistical"] += 2 * first.bound.numel()
            counts["sampled"] += 2 * int((first.out != second.out).any(-1).sum())
            counts["useful"] += sum(int((x.bound < 1).sum()) for x in (first, second))
            counts["missed"] += sum(missed)
            told = f"{family}, {shape}, drop {drop:.2g}, call {asked}"
            if broken:
                stories.append(f"{told}: {broken} rows broken")
            if sum(missed):
                stories.append(f"{told}: {sum(missed)} rows missed")
            if time.monotonic() - told_at > _PAUSE:
                told_at = time.monotonic()
                print(f"{told_at - start:.0f} s: {_told(counts)}", flush=True)
    raise AssertionError("shapes must not be empty")


class Asking(NamedTuple):
    """How a cache is asked: queries of each head in a step, a window, sinks, sequences of different lengths."""

    queries: int
    window: int | None
    sunk: bool
    ragged: bool

    @property
    def unusual(self) -> list[str]:
        """What differs from one query of sequences of one length."""
        own = {"queries": self.queries > 1, "window": self.window is not None, "sunk": self.sunk, "ragged": self.ragged}
        return [name for name, there in own.items() if there]

    @staticmethod
    def drawn(rng: random.Random, siblings: int, tokens: int) -> Asking:
        queries = rng.choice([many for many in (1, 1, 2, 5, 8, 16) if many * siblings <= 64])
        window = rng.choice((None, None, rng.randrange(64, tokens)))
        return Asking(queries, window, rng.random() < 0.4, rng.random() < 0.5)


class Mirror:
    """What a cache should hold, kept by plain tensors and lists, and what its answers should be in float64."""

    def __init__(self, k: Tensor, v: Tensor, scale: float) -> None:
        self.given, self.scale = (k, v), scale
        self.k, self.v = torch.zeros_like(k), torch.zeros_like(v)
        self.held = [0] * k.shape[0]

    def next(self, rng: random.Random, many: int, least: int) -> tuple[list[int], Tensor, Tensor]:
        """The next tokens of each sequence, at least so many of them, with nan behind; they count as appended."""
        counts = [rng.randrange(least, many + 1) for _ in self.held]
        k, v = (x.new_full((len(counts), x.shape[1], many, x.shape[3]), math.nan) for x in self.given)
        for i, count in enumerate(counts):
            at = self.held[i]
            for own, mine, x in zip((k, v), (self.k, self.v), self.given, strict=True):
                own[i, :, :count] = mine[i, :, at : at + count] = x[i, :, at : at + count]
            self.held[i] += count
        return counts, k, v

    def replace(self, rng: random.Random) -> None:
        """Have other tokens come next than those that came there before."""
        k, v = self.given
        many = 1 + rng.randrange(99)
        self.given = k.roll(many, 2), v.roll(many, 2)

    def crop(self, lengths: list[int]) -> None:
        self.held = [min(x) for x in zip(self.held, lengths, strict=True)]

    def errors(self, q: Tensor, out: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
        """How far answers (b, h, n, e) are from the truth, in the unit of bounds; one sequence after the other."""
        _, h, n, _ = q.shape
        found = []
        for i, held in enumerate(self.held):
            k, v = (x[i, :, :held].double().repeat_interleave(h // x.shape[1], 0) for x in (self.k, self.v))
            own, tokens = torch.arange(held - n, held, device=q.device)[:, None], torch.arange(held, device=q.device)
            seen = (tokens <= own) & (tokens > own - (window or held))
            logits = (q[i].double() @ k.mT * self.scale).masked_fill(~seen, -math.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None, None].expand(h, n, 1)], -1)
            apart = torch.linalg.vector_norm(out[i].double() - torch.softmax(logits, -1)[..., :held] @ v, dim=-1)
            # Of the longest value that is held; those that no row sees may be longer than the others.
            unit = torch.linalg.vector_norm(v, dim=-1)[:, None].masked_fill(~seen, 0.0).amax(-1)
            found.append(torch.where(apart == 0, 0.0, apart / unit))
        return torch.stack(found)


def run_caches(
    seed: int, device: str, seconds: float, shapes: Sequence[Shape] = SHAPES, offload: bool = False
) -> tuple[Counter[str], list[str]]:
    """The same for caches as users call them: sequences of any lengths, which are cropped and go on, windows, sinks and
    several queries, from Python and in a CUDA graph; if asked for, with keys and values in host memory.
    """
    rng, counts, stories = random.Random(seed), Counter[str](), list[str]()
    torch.manual_seed(seed)
    start = time.monotonic()
    # Every shape without chance, then with it.
    for shape, confidence in itertools.cycle((shape, sure) for shape in shapes for sure in (1.0, _CONFIDENCE)):
        batch, groups, siblings, s, d, kind = shape
        family, tol = rng.choice(list(FAMILIES)), 10 ** rng.uniform(-1.7, -0.3)
        s = rng.randrange(s // 2, s)
        asking = Asking.drawn(rng, siblings, s)
        queries, window, sunk, ragged = asking
        room = s + 32 * queries
        k, v = FAMILIES[family](*(torch.randn(batch, groups, room, d, device=device) for _ in range(2)), rng)
        largest = torch.finfo(kind).max
        k, v = (x.clamp(-largest, largest).to(kind).contiguous() for x in (k, v))
        away = _places(rng, shape) if offload else {}
        cache = KeyValueCache(groups, d, batch=batch, dtype=kind, device=device, capacity=room, window=window, **away)
        if cache._hot is not None:
            cache._hot.k.fill_(math.nan)
            cache._hot.v.fill_(math.nan)
        mirror = Mirror(k, v, d**-0.5)
        while max(mirror.held) < s:
            many = min(rng.choice((1, 7, 64, 65, 1000, s)), s - max(mirror.held))
            lengths, *tokens = mirror.next(rng, many, 0 if ragged else many)
            cache.append(*tokens, **({"lengths": lengths} if ragged else {}))
            if ragged and window is None and rng.random() < 0.1:
                lengths = [rng.randrange(held + 1) for held in mirror.held]
                mirror.crop(lengths)
                cache.crop(lengths)
        sinks = 5 * torch.randn(groups * siblings, device=device) if sunk else None
        q = torch.empty(batch, groups * siblings, queries, d, dtype=kind, device=device)
        token = [torch.empty(batch, groups, queries, d, dtype=kind, device=device) for _ in range(2)]
        counted = torch.empty(batch, dtype=torch.int32, device=device)
        given = {"lengths": counted} if ragged else {}
        graph, captured = None, None
        for number in range(24):
            if offload and window is None and graph is None and rng.random() < 0.3:
                # Other tokens come in the place of these.
                lengths = [max(held - rng.randrange(64), min(held, queries)) for held in mirror.held]
                mirror.crop(lengths)
                mirror.replace(rng)
                cache.crop(lengths)
            # Enough tokens for all queries: those of short sequences are all new.
            short = min(mirror.held) < queries
            lengths, *fresh = mirror.next(rng, queries, queries if short or not ragged else 0)
            counted.copy_(torch.tensor(lengths))
            for own, x in zip(token, fresh, strict=True):
                own.copy_(x)
            sought = k[:, :, torch.randint(min(mirror.held), (siblings,), device=device)].float().flatten(1, 2)
            loud, towards = 10 ** rng.uniform(-1, 0.5), rng.choice((0.0, 1.0, 3.0))
            q.copy_(loud * torch.randn(q.shape, device=device) + towards * sought.unsqueeze(2))
            if graph is not None and captured is not None:
                graph.replay()
                out, certificate = captured
            else:
                cache.append(*token, **given)
                exact = offload and rng.random() < 0.1
                limits = (None, None) if exact else (tol, confidence)
                out, certificate = cache.attend(q, *limits, d**-0.5, sinks=sinks)
                counts["exact"] += q[..., 0].numel() * exact
            errors = mirror.errors(q, out, window, sinks)
            wrong = int((~(errors <= certificate.rows)).sum())
            how = "called" if graph is None else "replayed"
            counts[how if confidence == 1 else f"{how}, drawn"] += errors.numel()
            for name in asking.unusual:
                counts[name] += errors.numel()
            counts["broken" if confidence == 1 else "missed"] += wrong
            counts["hits"] += 0 if certificate.cost is None else certificate.cost.hits
            counts["misses"] += 0 if certificate.cost is None else certificate.cost.misses
            counts["beyond the tolerance"] += int((certificate.rows > tol).sum())
            if wrong:
                told = f"{family}, {shape}, {asking}, {mirror.held} tokens, tol {tol:.2g}, {how}"
                stories.append(f"{told}: {wrong} rows broken or missed")
            if device == "cuda" and number == 11:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    cache.append(*token, **given)
                    captured = cache.attend(q, tol, confidence, d**-0.5, sinks=sinks)
        if list(cache.lengths) != [min(held, window or held) for held in mirror.held]:
            stories.append(f"{shape}, {asking}: {cache.lengths} tokens held instead of {mirror.held}")
        if time.monotonic() - start > seconds:
            return counts, stories
    raise AssertionError("shapes must not be empty")


def _places(rng: random.Random, shape: Shape) -> dict[str, Any]:
    """Options of a cache in host memory, with places for a few rows of each head, or none."""
    many = rng.choice((0, 1, 7, 60, shape.tokens // 4))
    each = bytes_of_place(shape.dim, shape.dim, shape.kind.itemsize)
    return {"offload": True, "hot": many * shape.batch * shape.groups * each}


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.gpu_decode", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each kind to judge at least")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to end at the latest, with what there is")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    faults = faults_beside_references("cuda", (200, 5000))
    counts, stories = run(chosen.rows, chosen.seed, "cuda", 0.4 * chosen.seconds)
    own, others = run_caches(chosen.seed, "cuda", min(0.3 * chosen.seconds, 120.0))
    print(f"caches: {_told(own)}", flush=True)
    away, more = run_caches(chosen.seed, "cuda", min(0.3 * chosen.seconds, 120.0), offload=True)
    print(*faults, *stories[:20], *others[:20], *more[:20], sep="\n")
    print(f"{_told(counts)} in {time.monotonic() - start:.0f} s")
    for name, found, told in (("caches", own, others), ("caches in host memory", away, more)):
        print(f"{name}: {_told(found)}")
        faults += told if found["broken"] or found["missed"] > 1e-3 * found["replayed, drawn"] + 3 else []
    # Without a miss, 99% sure that the rate is below this.
    print(f"0 of {counts['sampled']:,} sampled rows would put the rate below {4.61 / max(counts['sampled'], 1):.2g}")
    allowed = (1 - _CONFIDENCE) * counts["sampled"]
    return int(bool(faults) or counts["broken"] > 0 or counts["missed"] > allowed + 3 * math.sqrt(allowed + 1))


if __name__ == "__main__":
    sys.exit(main())
