"""Try to break the bounds of selections and quantised caches: `python -m tests.fuzz_bounds --rows 100000`.

The reference is 80-bit arithmetic written from the definitions, and answers are those of PyTorch's own kernels. Heads
are hostile: huge and tiny norms, ties, values that cancel, hidden rows, biases of −1e9, selections that read nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.bounds import Blocks, Quantised, QuantisedBound, Selection, SelectionBound, SkipThreshold, Window
from avow.errors import RangeError
from tests.helpers.truth import Question, verdict

Wide = np.ndarray[Any, np.dtype[Any]]
_KINDS = ("usual", "sharp", "flat", "ties", "cancelling", "huge", "tiny", "lopsided", "zeros", "far")
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Head(NamedTuple):
    """A drawn call: q, k, v, what it is told, and which keys each row sees."""

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    seen: Wide
    bias: Wide


def draw(chance: random.Random) -> Head:
    """A hostile head of any kind, type, size and mask."""
    generator = torch.Generator().manual_seed(chance.randrange(2**62))
    kind, dtype = chance.choice(_KINDS), chance.choice(_DTYPES)
    b, g, group = chance.choice([1, 1, 2]), chance.choice([1, 2]), chance.choice([1, 1, 3])
    n, s = chance.choice([1, 3, 17]), chance.choice([1, 2, 9, 33, 64, 70])
    d, e = chance.choice([1, 4, 8]), chance.choice([1, 3, 8])
    h = g * group
    q, k, v = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((b, h, n, d), (b, g, s, d), (b, g, s, e))
    )
    scale = None
    if kind == "sharp":
        q = q * 30
    elif kind == "flat":
        q = q * 1e-3
    elif kind == "ties":
        k = k[:, :, torch.randint(0, max(1, s // 4), (s,), generator=generator)]
    elif kind == "cancelling":
        v = v[:, :, :1] * torch.where(torch.arange(s) % 2 == 0, 1.0, -1.0)[:, None] + 1e-6 * v
    elif kind == "huge":
        size = {torch.float16: 1e2, torch.float64: 1e60}.get(dtype, 1e9)
        q, k, v = q * size, k * size, v * size
    elif kind == "tiny":
        size = {torch.float16: 1e-5, torch.float64: 1e-200}.get(dtype, 1e-30)
        q, v = q * size, v * (size if dtype != torch.float64 else chance.choice([1e-200, 1e-305]))
    elif kind == "lopsided":
        v = v * 10.0 ** torch.randint(-6, 4, (b, g, s, 1), generator=generator)
        k = k * 10.0 ** torch.randint(-3, 2, (b, g, s, 1), generator=generator)
    elif kind == "zeros":
        v, k = (
            v * (torch.rand(b, g, s, 1, generator=generator) < 0.3),
            k * (torch.rand(b, g, s, 1, generator=generator) < 0.5),
        )
    elif kind == "far":
        scale = chance.choice([0.0, -0.3, 50.0])
    q, k, v = (x.to(dtype) for x in (q, k, v))
    causal = chance.random() < 0.4
    seen = np.ones((b, h, n, s), dtype=bool)
    if causal:
        seen &= np.arange(s)[None] <= np.arange(n)[:, None]
    bias = np.zeros((b, h, n, s), dtype=np.longdouble)
    mask: Tensor | None = None
    chosen = chance.choice(["none", "none", "boolean", "keys", "bias"])
    if chosen in ("boolean", "keys"):
        size = (b, 1, n, s) if chosen == "boolean" else (b, 1, 1, s)
        mask = torch.rand(size, generator=generator) < 0.6
        seen &= mask.numpy()
    elif chosen == "bias":
        mask = torch.randn(1, h, n, s, generator=generator, dtype=torch.float64) * chance.choice([1.0, 20.0])
        mask = mask - (1e9 if chance.random() < 0.2 else 0.0)
        mask = mask.masked_fill(torch.rand(1, h, n, s, generator=generator) < 0.3, -math.inf)
        seen &= (mask > -math.inf).numpy()
        bias = np.broadcast_to(mask.masked_fill(mask == -math.inf, 0.0).numpy().astype(np.longdouble), bias.shape)
    options = {"mask": mask, "causal": causal, "scale": scale, "enable_gqa": group > 1}
    return Head(kind, q, k, v, options, seen, bias)


def numbers(x: Tensor) -> Wide:
    """A tensor in 80 bits."""
    return x.double().numpy().astype(np.longdouble)


class Truth(NamedTuple):
    """Logits, weights and values of a call in 80 bits, heads of keys repeated."""

    logits: Wide
    values: Wide

    @staticmethod
    def of(head: Head, k: Wide, v: Wide) -> Truth:
        group, d = head.q.shape[1] // k.shape[1], head.q.shape[-1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scale = head.options["scale"]
        factor = np.longdouble(1) / np.sqrt(np.longdouble(d)) if scale is None else np.longdouble(scale)
        if scale is None:
            factor = np.longdouble(1 / math.sqrt(d))  # the scale itself is float64's
        # Without each row's largest bias, which changes no weight: beside −1e9 even 80 bits lose digits.
        top = np.where(head.seen, head.bias, -np.inf).max(-1, keepdims=True)
        logits = factor * np.einsum("bhnd,bhsd->bhns", numbers(head.q), k) + (
            head.bias - np.where(np.isfinite(top), top, 0)
        )
        return Truth(np.where(head.seen, logits, -np.inf), v)

    def mean(self, some: Wide) -> tuple[Wide, Wide]:
        """The log of the weight of some keys, and the average of their values; zeros without a key."""
        logits = np.where(some, self.logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        average = np.einsum("bhns,bhse->bhne", weights / np.where(total > 0, total, 1), self.values)
        return (np.log(total) + top)[..., 0], average


def length(x: Wide) -> Wide:
    return np.sqrt((x * x).sum(-1))


def longest(values: Wide, seen: Wide) -> Wide:
    """The longest value that each row sees."""
    return np.where(seen, length(values)[..., None, :], 0).max(-1)


def selection(head: Head, chance: random.Random) -> tuple[Selection, Wide]:
    """A drawn selection, and the keys that it reads, written out one by one."""
    (b, h, n, _), s = head.q.shape, head.k.shape[2]
    read = np.zeros((b, h, n, s), dtype=bool)
    places = [(i, j, r) for i in range(b) for j in range(h) for r in range(n)]
    chosen = chance.choice(["index", "mask", "window", "blocks", "threshold"])
    if chosen == "index":
        lists = torch.full((b, h, n, chance.choice([1, 4, 12])), -1)
        for i, j, r in places:
            some = chance.sample(range(s), min(s, chance.randrange(lists.shape[-1] + 1)))
            spots = chance.sample(range(lists.shape[-1]), len(some))
            lists[i, j, r, spots] = torch.tensor(some, dtype=torch.long)
            read[i, j, r, some] = True
        return lists, read
    if chosen == "mask":
        shown = np.array([[[chance.random() < 0.5 for _ in range(s)] for _ in range(n)]])
        return torch.from_numpy(shown), read | shown[None]
    if chosen == "window":
        rule = Window(chance.choice([1, 3, 20]), chance.choice([0, 0, 2]))
        for i, j, r in places:
            own = np.flatnonzero(head.seen[i, j, r])
            read[i, j, r, own[: rule.sinks]] = read[i, j, r, own[-rule.size :]] = True
        return rule, read
    if chosen == "blocks":
        rows, keys = chance.choice([1, 4]), chance.choice([1, 16])
        shown = np.array([[chance.random() < 0.5 for _ in range(-(-s // keys))] for _ in range(-(-n // rows))])
        for i, j, r in places:
            for x in range(s):
                read[i, j, r, x] = shown[r // rows, x // keys]
        return Blocks(torch.from_numpy(shown), rows, keys), read
    tile, rows, factor = chance.choice([1, 7, 16]), chance.choice([1, 4]), chance.choice([0.0, 0.01, 0.3])
    logits = Truth.of(head, numbers(head.k), numbers(head.v)).logits
    for i, j in {(i, j) for i, j, _ in places}:
        for first in range(0, n, rows):
            running = np.full(min(rows, n - first), -np.inf)
            for x in range(0, s, tile):
                tops = logits[i, j, first : first + rows, x : x + tile].max(-1)
                running = np.maximum(running, tops)
                skipped = [
                    top == -np.inf or (factor > 0 and top - most < math.log(factor / s))
                    for top, most in zip(tops, running, strict=True)
                ]
                read[i, j, first : first + rows, x : x + tile] = not all(skipped)
    return SkipThreshold(factor, tile, rows), read


def answered(head: Head, k: Tensor, v: Tensor, read: Wide | None = None) -> Tensor:
    """What PyTorch's kernel answers over the keys that are read."""
    shown = head.seen if read is None else head.seen & read
    mask = torch.from_numpy(np.where(shown, head.bias.astype(np.float64), -np.inf))
    mask = mask - mask.amax(-1, keepdim=True).clamp(min=-1e300)
    mask = mask.to(head.q.dtype if head.q.dtype in (torch.float32, torch.float64) else torch.float32)
    group = head.q.shape[1] // k.shape[1]
    out = scaled_dot_product_attention(
        head.q if head.q.dtype == mask.dtype else head.q.float(),
        k.to(mask.dtype).repeat_interleave(group, 1),
        v.to(mask.dtype).repeat_interleave(group, 1),
        mask.nan_to_num(nan=-math.inf),
        scale=head.options["scale"],
    )
    return torch.where(torch.from_numpy(shown.any(-1))[..., None], out, 0.0).to(head.q.dtype)


def above(found: Wide, bound: Tensor | Wide, slack: float = 0.0) -> Wide:
    """Where 80 bits find more than a bound says; nan is."""
    limit = bound.numpy().astype(np.longdouble) if isinstance(bound, Tensor) else bound
    return ~(found <= limit * (1 + np.longdouble(2) ** -50) + slack)


def judge_selection(head: Head, chance: random.Random) -> tuple[int, list[str]]:
    """Rows that were held to the bounds of a selection, and what broke."""
    rule, read = selection(head, chance)
    bound: SelectionBound = avow.bound_selection(head.q, head.k, head.v, read=rule, **head.options)
    truth = Truth.of(head, numbers(head.k), numbers(head.v))
    with np.errstate(all="ignore"):
        (heavy, mean), (light, other), (_, target) = (
            truth.mean(x) for x in (head.seen & read, head.seen & ~read, head.seen)
        )
        share = np.where(np.isneginf(light), 0, 1 / (1 + np.exp(heavy - light)))
        unit = longest(truth.values, head.seen)
        # Small differences lose digits even in 80 bits; the product of the identity loses none.
        error, product = length(mean - target), share * length(mean - other)
        error = np.where(error > 1e-6 * unit, error, product)
        wrong = {
            "mass above": above(share, bound.mass),
            "mass below": above(bound.least_mass.numpy().astype(np.longdouble), share, 1e-300),
            "loss": above(error, bound.loss.numpy() * unit, 1e-4000),
        }
    name = f"{head.kind} {rule if not isinstance(rule, Tensor) else tuple(rule.shape)}"
    return error.size, faults(head, bound, wrong, answered(head, head.k, head.v, read), target, name)


def faults(
    head: Head, bound: SelectionBound | QuantisedBound, wrong: dict[str, Wide], out: Tensor, target: Wide, name: str
) -> list[str]:
    """What broke: what was found wrong already, and errors of a kernel's answer beyond the certificate."""
    certificate = bound.certificate
    if certificate.kind != "none":
        asked = Question(head.q, head.k, head.v, _mask(head), False, head.options["scale"])
        found = verdict(asked, out, certificate.rows, most_balls=8)
        own = length(numbers(out) - target) > certificate.relative_rows.numpy() * length(target) * (1 + 1e-9)
        own &= np.isfinite(numbers(out)).all(-1) & (length(target) > 0)
        wrong |= {"certificate": np.array(found.broken > 0), "relative": own}
    return [
        f"{what}: {int(rows.sum())} rows; {name} {head.q.dtype} {tuple(head.q.shape)}"
        for what, rows in wrong.items()
        if rows.any()
    ]


def _mask(head: Head) -> Tensor:
    return torch.from_numpy(np.where(head.seen, head.bias.astype(np.float64), -np.inf))


def quantised(x: Tensor, chance: random.Random) -> tuple[Tensor | Quantised, Wide]:
    """Keys or values in one of the layouts that caches have, and the numbers that they stand for."""
    chosen, axis = chance.choice(["int8", "int4", "e4m3", "e5m2", "same"]), chance.choice([-1, -2])
    wide = x.double()
    if chosen == "same":
        return x, numbers(x)
    if chosen in ("e4m3", "e5m2"):
        kind, top = (torch.float8_e4m3fn, 448.0) if chosen == "e4m3" else (torch.float8_e5m2, 57344.0)
        scale = (wide.abs().amax(axis, keepdim=True) / top).clamp(min=1e-280)
        codes = (wide / scale).float().to(kind)
        return Quantised(codes, scale), numbers(codes.float()) * numbers(scale)
    if chosen == "int8" or x.shape[-1] % 2:
        scale = (wide.abs().amax(axis, keepdim=True) / 127).clamp(min=1e-280)
        codes = (wide / scale).round().to(torch.int8)
        return Quantised(codes, scale), numbers(codes) * numbers(scale)
    low = wide.amin(axis, keepdim=True)
    scale = ((wide.amax(axis, keepdim=True) - low) / 15).clamp(min=1e-280)
    zero = (-low / scale).round().clamp(-(2**40), 2**40)
    codes = (wide / scale + zero).round().clamp(0, 15).to(torch.uint8)
    packed = codes[..., ::2] | (codes[..., 1::2] << 4)
    return Quantised(packed, scale, zero, bits=4), (numbers(codes) - numbers(zero)) * numbers(scale)


def judge_quantised(head: Head, chance: random.Random) -> tuple[int, list[str]]:
    """Rows that were held to the bounds of quantised keys and values, with the originals and from norms alone."""
    (k_hat, kh), (v_hat, vh) = quantised(head.k, chance), quantised(head.v, chance)
    k, v = numbers(head.k), numbers(head.v)
    true, hat, half = Truth.of(head, k, v), Truth.of(head, kh, vh), Truth.of(head, kh, v)
    residuals = [
        torch.from_numpy(np.nextafter(length(a - b).astype(np.float64) * (1 + 1e-15), np.inf))
        for a, b in ((k, kh), (v, vh))
    ]
    stories: list[str] = []
    with np.errstate(all="ignore"):
        target, moved, middle = (x.mean(head.seen)[1] for x in (true, hat, half))
        unit, error = longest(true.values, head.seen), length(moved - target)
        kernel = answered(head, torch.from_numpy(kh.astype(np.float64)), torch.from_numpy(vh.astype(np.float64)))
        for known in (True, False):
            if known:
                bound = avow.bound_quantised(head.q, head.k, head.v, k_hat, v_hat, **head.options)
            else:
                given = dict(zip(("key_residuals", "value_residuals"), residuals, strict=True))
                bound = avow.bound_quantised(head.q, None, None, k_hat, v_hat, **given, **head.options)
            wrong = {"loss": above(error, np.where(unit > 0, bound.loss.numpy() * unit, np.inf))}
            if known:
                wrong["keys"] = above(length(middle - target), np.where(unit > 0, bound.keys.numpy() * unit, np.inf))
                wrong["values"] = above(length(moved - middle), np.where(unit > 0, bound.values.numpy() * unit, np.inf))
            name = f"{head.kind}, {'originals' if known else 'norms'}, {type(k_hat).__name__}, {type(v_hat).__name__}"
            stories += faults(head, bound, wrong, kernel, target, name)
    return 2 * error.size, stories


def run(rows: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many rows were held to each kind of bound, and every story of a broken one."""
    chance, counts, stories = random.Random(seed), Counter[str](), list[str]()
    while min(counts["selection"], counts["quantised"]) < rows:
        head = draw(chance)
        judges = {"selection": judge_selection, "quantised": judge_quantised}
        for name, judge in judges.items():
            try:
                held, broken = judge(head, chance)
            except RangeError:
                counts["refused"] += 1
                continue
            counts[name] += held
            counts["broken"] += len(broken)
            stories += broken
    return counts, stories


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz_bounds", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts, stories = run(given.rows, given.seed)
    print(*stories[:20], ", ".join(f"{name} {many:,}" for name, many in counts.items()), sep="\n")
    return int(bool(stories))


if __name__ == "__main__":
    sys.exit(main())
