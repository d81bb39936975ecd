"""Try to break decoding's kernels on a GPU: `python -m tests.gpu_decode --rows 1000000`.

So many rows at least are held to deterministic bounds, and as many to statistical ones, against float64. Caches come in
families: Gaussian, clustered, with giant keys, all keys equal, with values that grow with their weight, or that point
away from what is read. Truth in float64 errs by far less than these bounds, all of which hold answers in 16 bits or 32.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from avow.kernels.sparse_decode import decode, value_lengths
from avow.maths.sketch import sketched

_CONFIDENCE = 0.999
# Caches of a batch, key heads, queries that each cache is asked.
_BATCH, _GROUPS, _ASKED = 8, 8, 16

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


def judge(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[Tensor], Tensor]:
    """How far answers are from the truth, in the unit of bounds."""
    wide = q.double().unflatten(1, (k.shape[1], -1))  # (b, g, r, d)
    truth = torch.softmax(wide @ k.double().mT * scale, -1) @ v.double()
    unit = torch.linalg.vector_norm(v.double(), dim=-1).amax(-1)[..., None]

    def errors(out: Tensor) -> Tensor:
        apart = torch.linalg.vector_norm(out.double().unflatten(1, (k.shape[1], -1)) - truth, dim=-1)
        return torch.where(apart == 0, 0.0, apart / unit).flatten(1)

    return errors


def run(rows: int, seed: int, device: str) -> tuple[Counter[str], list[str]]:
    """Counts of rows, misses and samples, and stories of what broke."""
    rng, counts, stories = random.Random(seed), Counter[str](), list[str]()
    torch.manual_seed(seed)
    while min(counts["deterministic"], counts["statistical"]) < rows:
        family, kind = (
            rng.choice(list(FAMILIES)),
            rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        )
        d, siblings, s = rng.choice((32, 64, 128)), rng.choice((1, 4, 8)), rng.choice((700, 2048, 4100))
        drop, steep = 10 ** rng.uniform(-3, -0.3), 10 ** rng.uniform(-1, 0.9)
        shape = (_BATCH, _GROUPS, s, d)
        k, v = FAMILIES[family](torch.randn(shape, device=device), torch.randn(shape, device=device), rng)
        k, v = (x.to(kind).contiguous() for x in (k, v))
        sketch, lengths, scale = sketched(k), value_lengths(v), d**-0.5
        draws = torch.tensor([rng.getrandbits(60)], device=device)
        for asked in range(_ASKED):
            q = (steep * torch.randn(_BATCH, _GROUPS * siblings, d, device=device)).to(kind)
            errors = judge(q, k, v, scale)
            told = f"{family}, {kind}, d = {d}, {siblings} siblings, {s} tokens, drop {drop:.2g}, call {asked}"
            sure = decode(q, k, v, sketch, lengths, drop, scale)
            broken = int((~(errors(sure.out) <= sure.bound)).sum())
            counts["deterministic"] += sure.bound.numel()
            counts["deterministic, part read"] += int((sure.kept < s).sum()) * siblings
            counts["broken"] += broken
            # Draws pay where much may be dropped.
            wide = max(drop, 0.05)
            first, second = (
                decode(q, k, v, sketch, lengths, wide, scale, None, None, _CONFIDENCE, draws) for _ in range(2)
            )
            missed = sum(int((~(errors(x.out) <= x.bound)).sum()) for x in (first, second))
            counts["statistical"] += 2 * first.bound.numel()
            counts["sampled"] += 2 * int((first.out != second.out).any(-1).sum())
            counts["useful"] += sum(int((x.bound < 1).sum()) for x in (first, second))
            counts["missed"] += missed
            if broken:
                stories.append(f"{told}: {broken} rows broken")
            if missed:
                stories.append(f"{told}: {missed} rows missed")
    return counts, stories


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.gpu_decode", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each kind to judge at least")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    counts, stories = run(chosen.rows, chosen.seed, "cuda")
    print(*stories[:20], sep="\n")
    print(", ".join(f"{name} {number:,}" for name, number in counts.items()), f"in {time.monotonic() - start:.0f} s")
    # Without a miss, 99% sure that the rate is below this.
    print(f"0 of {counts['sampled']:,} sampled rows would put the rate below {4.61 / max(counts['sampled'], 1):.2g}")
    allowed = (1 - _CONFIDENCE) * counts["sampled"]
    return int(counts["broken"] > 0 or counts["missed"] > allowed + 3 * math.sqrt(allowed + 1))


if __name__ == "__main__":
    sys.exit(main())
