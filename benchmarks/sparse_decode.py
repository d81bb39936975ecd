"""Certified sparse decoding against the best exact attention: `python -m benchmarks.sparse_decode --heads DIR`.

Every answer is compared with float64 first; what fails there gets no speed. `--device cpu --quick` rehearses every
line at tiny sizes, with the kernels interpreted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from avow.maths.sketch import GROUP, Sketch, sketched
from benchmarks.results import Goal, Result, Row
from benchmarks.run import machine

_DROP, _TOL = 5e-3, 1e-2
_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Neighbouring tokens that stay together when real keys are resampled, so that groups are as alike as in a text.
_WINDOW = 256


class Sizes(NamedTuple):
    """What is measured: lengths, query heads, key heads, rounds, and calls that are timed together."""

    lengths: tuple[int, ...]
    heads: int
    groups: int
    rounds: int
    calls: int


_FULL = Sizes((131072, 1048576), 32, 8, 15, 20)
_QUICK = Sizes((320, 500), 8, 2, 2, 1)


@dataclass(frozen=True)
class Case:
    """One cache and one query per head."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    before: Tensor | None = None
    """The queries of the step before, whose answers' lengths are this step's hint."""

    @property
    def length(self) -> int:
        return self.k.shape[2]


class Checked(NamedTuple):
    """A case with all that a step needs, what it answered, and what is wrong with that."""

    step: Callable[[], Any]
    sketch: Sketch
    lengths: Any
    hint: Tensor | None
    found: Any
    error: float
    faults: list[str]


def run(device: str, sizes: Sizes, folder: str | None) -> list[Result]:
    """The table of whole steps, and that of their kernels."""
    clock = Clock(device, sizes)
    limit = clock.bandwidth()
    steps: list[Row] = []
    kernels: list[Row] = []
    checks = (200, 4096 if device == "cuda" else 300)
    unsound = [f"kernels at {n} tokens: {fault}" for n in checks for fault in twins(device, n)]
    failures = list(unsound)
    for case in cases(device, sizes, folder):
        checked = check(case)
        label = f"{case.name}, n = {case.length}"
        failures += [f"{label}: {fault}" for fault in checked.faults]
        if unsound or checked.faults:
            # No speed for what may be wrong.
            continue
        own = clock.seconds(checked.step)
        rivals = {name: clock.seconds(rival) for name, rival in exact(case, clock)}
        best = min(rivals, key=lambda name: rivals[name])
        steps.append(
            {
                "keys": case.name,
                "n": case.length,
                "read": float(checked.found.kept.double().mean()) / case.length,
                "bound": float(checked.found.bound.max()),
                "error": checked.error,
                "step ms": 1e3 * own,
                "exact ms": 1e3 * rivals[best],
                "exact by": best,
                "times faster": rivals[best] / own,
            }
        )
        kernels += profile(case, checked, clock, limit)
        del checked
        if device == "cuda":
            torch.cuda.empty_cache()
    remarks = [
        f"Steps include the certificate; drop = {_DROP:g}, bounds aim at {_TOL:g}; medians of {sizes.rounds} rounds of "
        f"{sizes.calls} replays.",
        "Exact is the fastest of cuDNN, flash and efficient, with sibling heads as heads or as rows.",
        f"Real keys are windows of {_WINDOW} neighbouring tokens of a text; hints are another step's lengths.",
    ]
    if folder is None:
        remarks.append("No folder of real heads was given: only made-up keys.")
    told = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, bf16, {device}"
    return [
        Result(f"sparse decode: one certified step ({told})", steps, goals(steps, kernels), remarks, failures),
        Result(
            f"sparse decode: its kernels (a copy runs at {limit / 1e12:.3g} TB/s here)",
            kernels,
            remarks=["Bytes are what a kernel must read and write; `of the limit` is their rate over that of a copy."],
        ),
    ]


def goals(steps: list[Row], kernels: list[Row]) -> list[Goal]:
    """Which of the aims this run could judge, and whether it met them."""
    found = []
    for name, n, aim in (
        ("real", 1048576, 2.5),
        ("real", 131072, 1.6),
        ("diffuse", 1048576, 0.93),
        ("diffuse", 131072, 0.93),
    ):
        rows = [row for row in steps if row["keys"] == name and row["n"] == n]
        for row in rows:
            ratio = float(row["times faster"] or 0)
            found.append(Goal(f"{name} keys, n = {n}: at least {aim:g} times exact", f"{ratio:.3g}", ratio >= aim))
    for row in kernels:
        if row["kernel"] == "bounds" and row["n"] == 1048576:
            share = float(row["of the limit"] or 0)
            found.append(
                Goal(f"{row['keys']}: the sketch pass at 60% of the memory limit", f"{share:.0%}", share >= 0.6)
            )
    return found


def cases(device: str, sizes: Sizes, folder: str | None) -> Iterator[Case]:
    for n in sizes.lengths:
        if folder is not None:
            yield real(device, sizes, n, Path(folder))
        generator = torch.Generator(device).manual_seed(n)
        shapes = [(1, sizes.heads, 128), (1, sizes.groups, n, 128), (1, sizes.groups, n, 128)]
        q, k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes)
        yield Case("sharp", 6 * q, k, v, 128**-0.5)
        yield Case("diffuse", 0.01 * q, k, v, 128**-0.5)


def real(device: str, sizes: Sizes, n: int, folder: Path) -> Case:
    """Heads of a trained model, resampled to n tokens; heads of 64 dimensions are paired to 128."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(n)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for file in sorted(folder.glob("*.safetensors"))[1:] or sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        q, k, v = stored["q"], stored["k"], stored["v"]
        siblings = q.shape[0] // k.shape[0]
        for i in range(k.shape[0]):
            j = (i + 1) % k.shape[0] if k.shape[-1] == 64 else i
            rows = torch.stack([q[i * siblings + a % siblings] for a in range(sizes.heads // sizes.groups)])[:, -2:]
            others = torch.stack([q[j * siblings + (a + 1) % siblings] for a in range(sizes.heads // sizes.groups)])[
                :, -2:
            ]
            pair = (lambda x, y: torch.cat([x, y], -1)) if j != i else (lambda x, y: x)
            found.append((pair(rows, others), pair(k[i], k[j]), pair(v[i], v[j])))
    chosen = [found[i % len(found)] for i in range(sizes.groups)]
    q = torch.cat([x[0] for x in chosen])[None].bfloat16().to(device)  # (1, h, 2, 128)
    k, v = (torch.stack([x[part] for x in chosen])[None] for part in (1, 2))
    starts = torch.randint(0, k.shape[2] - _WINDOW + 1, (math.ceil(n / _WINDOW),), generator=generator)
    places = (starts[:, None] + torch.arange(_WINDOW)).flatten()[:n]
    k, v = (x.bfloat16().to(device)[:, :, places.to(device)].contiguous() for x in (k, v))
    return Case("real", q[:, :, 1].contiguous(), k, v, 1 / 8, q[:, :, 0].contiguous())


def check(case: Case) -> Checked:
    """One step, and how far it is from the truth in float64."""
    from avow.kernels.sparse_decode import decode, value_lengths

    sketch, lengths = sketched_by_head(case.k), value_lengths(case.v)
    hint = None
    if case.before is not None:
        hint = 1.1 * decode(case.before, case.k, case.v, sketch, lengths, _DROP, case.scale).length

    def step() -> Any:
        return decode(case.q, case.k, case.v, sketch, lengths, _DROP, case.scale, hint)

    found, again = step(), step()
    errors = distances(case, found.out)
    faults = []
    if not bool((errors <= found.bound).all()):
        faults.append(f"a bound was broken: error {float(errors.max()):.3g}, bound {float(found.bound.max()):.3g}")
    if not bool(torch.isfinite(found.out).all()):
        faults.append("an answer is not finite")
    if not all(torch.equal(x, y) for x, y in zip(found, again, strict=True)):
        faults.append("two runs differ")
    if not bool(found.within.all()):
        faults.append(f"{int((~found.within).sum())} rows dropped more than {_DROP:g}")
    return Checked(step, sketch, lengths, hint, found, float(errors.max()), faults)


def sketched_by_head(k: Tensor) -> Sketch:
    """The sketch of all keys, head by head: it is made in float64, and a long cache has no room for that at once."""
    parts = [sketched(k[:, i : i + 1]) for i in range(k.shape[1])]
    names = ("codes", "scale", "zero", "radius", "reach", "metric", "size")
    return Sketch(*(torch.cat([getattr(part, name) for part in parts], 1) for name in names), bits=4)


def distances(case: Case, out: Tensor) -> Tensor:
    """How far answers are from the truth, in the unit of bounds, one key head at a time."""
    found = []
    r = case.q.shape[1] // case.k.shape[1]
    for head in range(case.k.shape[1]):
        k, v = case.k[0, head].double(), case.v[0, head].double()
        rows = slice(head * r, head * r + r)
        truth = torch.softmax(case.q[0, rows].double() @ k.T * case.scale, -1) @ v
        apart = torch.linalg.vector_norm(out[0, rows].double() - truth, dim=-1)
        found.append(apart / torch.linalg.vector_norm(v, dim=-1).amax())
    return torch.cat(found)[None]


def twins(device: str, n: int) -> list[str]:
    """What is wrong with the kernels on this device, beside their twins and beside the truth."""
    from avow.kernels import sketch_pass
    from avow.kernels.sparse_decode import decode, decode_twin, value_lengths

    faults = []
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for r, d in ((4, 128), (8, 64), (1, 96)):
            generator = torch.Generator(device).manual_seed(d)
            q, k, v = (
                torch.randn(shape, generator=generator, device=device).to(kind)
                for shape in ((1, 2 * r, d), (1, 2, n, d), (1, 2, n, d))
            )
            q, told = 3 * q, f"{kind}, r = {r}, d = {d}"
            sketch, lengths, scale = sketched(k), value_lengths(v), d**-0.5
            mine, other = (how(q, k, v, sketch, lengths, 0.05, scale) for how in (decode, decode_twin))
            if float((mine.kept - other.kept).abs().max()) > 0.05 * n + 1:
                faults.append(f"{told}: {mine.kept.tolist()} tokens read, {other.kept.tolist()} by the twin")
            errors = distances(Case("", q, k, v, scale), mine.out)
            if not bool((errors <= mine.bound).all() & (mine.bound < 0.1).all()):
                faults.append(f"{told}: error {float(errors.max()):.3g}, bound {float(mine.bound.max()):.3g}")
            known = sketch_pass.prepared(q, sketch, lengths.most, None, scale)
            terms = sketch_pass.bounded(q, sketch, lengths.each, known)
            top = terms.top.transpose(1, 2).reshape(2 * r, -1).repeat_interleave(GROUP, 1)
            said = (top - terms.offset.int()).double() / sketch_pass.STEPS
            keys, values = (x[:, :, : sketch.rows].double().repeat_interleave(r, 1)[0] for x in (k, v))
            logits = (keys @ q[0].double().unsqueeze(-1)).squeeze(-1) * (scale * math.log2(math.e))
            nu = terms.nu.double().repeat_interleave(r)[:, None]
            true = logits + torch.log2(1 + torch.linalg.vector_norm(values, dim=-1) / nu)
            if bool((true > said).any()) or float((said - true).median()) > 8:
                wide = float((said - true).median())
                faults.append(f"{told}: {int((true > said).sum())} terms understated, {wide:.3g} octaves off")
    return faults


def exact(case: Case, clock: Clock) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every exact attention that runs here, sibling heads as heads that share keys and as rows of one head."""
    groups, d = case.k.shape[1], case.q.shape[-1]
    q = case.q.unsqueeze(2)
    rows = case.q.view(1, groups, -1, d)
    names = list(_BACKENDS)[:3] if clock.device == "cuda" else ["flash", "math"]
    for name in names:
        for form, x, shared in (("heads", q, True), ("rows", rows, False)):

            def call(x: Tensor = x, shared: bool = shared, name: str = name) -> Tensor:
                with sdpa_kernel(_BACKENDS[name]):
                    return scaled_dot_product_attention(x, case.k, case.v, scale=case.scale, enable_gqa=shared)

            try:
                out = call().reshape(case.q.shape)
            except RuntimeError as why:
                print(f"  {name}, {form}: does not run here ({str(why).splitlines()[0][:80]})", file=sys.stderr)
                continue
            if float(distances(case, out).max()) < 0.05:
                yield f"{name}, {form}", call


def profile(case: Case, checked: Checked, clock: Clock, limit: float) -> Iterator[Row]:
    """Each stage alone: its time, the bytes it must move, and how near the memory limit that is."""
    from avow.kernels import choice, gather_attention, sketch_pass

    q, k, v, scale, sketch, lengths = case.q, case.k, case.v, case.scale, checked.sketch, checked.lengths
    heads, n, d, e = k.shape[1], case.length, k.shape[3], v.shape[3]
    r, c = q.shape[1] // heads, sketch.codes.shape[2]
    known = sketch_pass.prepared(q, sketch, lengths.most, checked.hint, scale)
    terms = sketch_pass.bounded(q, sketch, lengths.each, known)
    cuts = choice.cuts(terms, lengths.most, _DROP)
    marks = choice.marked(terms, cuts, n)
    chosen = choice.listed(marks)
    parts = gather_attention.attended(q, k, v, chosen, scale)
    kept = float(chosen.kept.double().mean())
    rows, per_group = c * GROUP, heads * c
    held = sum(x.numel() * 4 for x in (parts.peak, parts.total, parts.values))
    stages: list[tuple[str, Callable[[], Any], float]] = [
        (
            "constants",
            lambda: sketch_pass.prepared(q, sketch, lengths.most, checked.hint, scale),
            per_group * (4 * d + 32),
        ),
        (
            "bounds",
            lambda: sketch_pass.bounded(q, sketch, lengths.each, known),
            heads * rows * (d / 2 + 4 + r) + per_group * (2 * d + 36 + 8 * r),
        ),
        ("histogram and cut", lambda: choice.cuts(terms, lengths.most, _DROP), heads * r * (rows + 8 * c)),
        ("marks", lambda: choice.marked(terms, cuts, n), heads * (r * (rows + 4 * c) + n)),
        ("list", lambda: choice.listed(marks), heads * (n + 4 * kept)),
        (
            "attention",
            lambda: gather_attention.attended(q, k, v, chosen, scale),
            heads * kept * (2 * (d + e) + 4) + held,
        ),
        (
            "merge",
            lambda: gather_attention.merged(q, v, parts, terms, chosen, lengths.most, _DROP, scale),
            held,
        ),
    ]
    for name, stage, moved in stages:
        seconds = clock.seconds(stage)
        yield {
            "kernel": name,
            "keys": case.name,
            "n": n,
            "ms": 1e3 * seconds,
            "MB": moved / 1e6,
            "TB/s": moved / seconds / 1e12,
            "of the limit": moved / seconds / limit,
        }


class Clock:
    """Medians of times: of CUDA graphs by events on a GPU, of calls elsewhere."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.rounds, self.calls = device, sizes.rounds, sizes.calls

    def seconds(self, call: Callable[[], Any]) -> float:
        """What one call takes."""
        if self.device != "cuda":
            return statistics.median(self._once(call) for _ in range(self.rounds))
        try:
            replay = self._captured(call).replay
        except RuntimeError as why:
            print(f"  timed without a graph ({str(why).splitlines()[0][:80]})", file=sys.stderr)
            replay = call
        times = []
        for _ in range(self.rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self.calls):
                replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / self.calls)
        return statistics.median(times)

    def bandwidth(self) -> float:
        """Bytes that a copy reads and writes in a second."""
        room = torch.zeros(2**30 if self.device == "cuda" else 2**24, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(room)
        return 2 * room.numel() / self.seconds(lambda: target.copy_(room))

    @staticmethod
    def _once(call: Callable[[], Any]) -> float:
        before = time.perf_counter()
        call()
        return time.perf_counter() - before

    @staticmethod
    def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 where an answer failed its check."""
    parser = argparse.ArgumentParser("python -m benchmarks.sparse_decode", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--heads", help="a folder of *.safetensors files with q, k and v of real heads")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cpu":
        from avow.kernels.interpreted import interpret

        interpret()
    print(machine(), flush=True)
    results = run(parsed.device, _QUICK if parsed.quick else _FULL, parsed.heads)
    for result in results:
        print(f"\n{result.text()}", flush=True)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
