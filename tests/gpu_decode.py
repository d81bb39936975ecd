"""Try to break decoding's kernels on a GPU: `python -m tests.gpu_decode --rows 1000000`.

First each kernel is held to its reference at a few shapes. Then come whole steps.
So many rows at least are held to deterministic bounds, and as many to statistical ones, against float64; a line every
few seconds tells how far it is, and with `--seconds` it ends about then with what it has. For a part of that time come
caches that grow token by token, called and replayed from CUDA graphs. Caches come in families:
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
from typing import NamedTuple

import torch
from torch import Tensor

from avow.kernels.sparse_decode import decode, value_lengths
from avow.nn import KeyValueCache
from avow.numerics.sketch import sketched
from tests.helpers.decode_checks import faults_beside_references

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


def run_caches(
    seed: int, device: str, seconds: float, shapes: Sequence[Shape] = SHAPES
) -> tuple[Counter[str], list[str]]:
    """The same for caches as users call them: tokens in any portions, then steps from Python and in a CUDA graph."""
    rng, counts, stories = random.Random(seed), Counter[str](), list[str]()
    torch.manual_seed(seed)
    start = time.monotonic()
    # Every shape without chance, then with it.
    for shape, confidence in itertools.cycle((shape, sure) for shape in shapes for sure in (1.0, _CONFIDENCE)):
        batch, groups, siblings, s, d, kind = shape
        family, tol = rng.choice(list(FAMILIES)), 10 ** rng.uniform(-1.7, -0.3)
        s = rng.randrange(s // 2, s)
        k, v = FAMILIES[family](*(torch.randn(batch, groups, s + 64, d, device=device) for _ in range(2)), rng)
        k, v = (x.to(kind).contiguous() for x in (k, v))
        cache = KeyValueCache(groups, d, batch=batch, dtype=kind, device=device, capacity=s + 64)
        while cache.position < s:
            many = min(rng.choice((1, 7, 64, 65, 1000, s)), s - cache.position)
            cache.append(*(x[:, :, cache.position : cache.position + many] for x in (k, v)))
        token, scale = [x[:, :, s : s + 1].clone() for x in (k, v)], d**-0.5
        q = torch.empty(batch, groups * siblings, 1, d, dtype=kind, device=device)
        graph, captured = None, None
        for at in range(s, s + 24):
            sought = k[:, :, torch.randint(at, (siblings,), device=device)].float().flatten(1, 2).unsqueeze(2)
            q.copy_(10 ** rng.uniform(-1, 0.5) * torch.randn_like(q) + rng.choice((0.0, 1.0, 3.0)) * sought)
            for own, x in zip(token, (k, v), strict=True):
                own.copy_(x[:, :, at : at + 1])
            if graph is not None and captured is not None:
                graph.replay()
                out, certificate = captured
            else:
                cache.append(*token)
                out, certificate = cache.attend(q, tol, confidence, scale)
            truth = Truth(k[:, :, : at + 1], v[:, :, : at + 1], scale)
            (errors,) = truth.errors(q[:, :, 0], out[:, :, 0])
            wrong = int((~(errors <= certificate.rows[..., 0])).sum())
            how = "called" if graph is None else "replayed"
            counts[how if confidence == 1 else f"{how}, drawn"] += errors.numel()
            counts["broken" if confidence == 1 else "missed"] += wrong
            counts["beyond the tolerance"] += int((certificate.rows > tol).sum())
            if wrong:
                stories.append(f"{family}, {shape}, {s} tokens, tol {tol:.2g}, {how}: {wrong} rows broken or missed")
            if device == "cuda" and at == s + 11:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    cache.append(*token)
                    captured = cache.attend(q, tol, confidence, scale)
        if cache.length != s + 24:
            stories.append(f"{shape}: {cache.length} tokens held instead of {s + 24}")
        if time.monotonic() - start > seconds:
            return counts, stories
    raise AssertionError("shapes must not be empty")


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
    counts, stories = run(chosen.rows, chosen.seed, "cuda", 0.7 * chosen.seconds)
    own, others = run_caches(chosen.seed, "cuda", min(0.3 * chosen.seconds, 120.0))
    print(*faults, *stories[:20], *others[:20], sep="\n")
    print(f"{_told(counts)} in {time.monotonic() - start:.0f} s")
    print(f"caches: {_told(own)}")
    faults += others if own["broken"] or own["missed"] > 1e-3 * own.total() else []
    # Without a miss, 99% sure that the rate is below this.
    print(f"0 of {counts['sampled']:,} sampled rows would put the rate below {4.61 / max(counts['sampled'], 1):.2g}")
    allowed = (1 - _CONFIDENCE) * counts["sampled"]
    return int(bool(faults) or counts["broken"] > 0 or counts["missed"] > allowed + 3 * math.sqrt(allowed + 1))


if __name__ == "__main__":
    sys.exit(main())
