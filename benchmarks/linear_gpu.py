"""Linear attention's kernels against their peers on a GPU: `python -m benchmarks.linear_gpu`.

Every kernel is compared with float64 first, answers and gradients; what fails there gets no speed. Peers are PyTorch's
exact attention and, where it can be imported, flash-linear-attention. `--device cpu --quick` rehearses every line at
tiny sizes with the kernels interpreted; `--tune` tries layouts instead.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.linear_variants import FEATURES, Case, error, feature_logs, variants
from benchmarks.results import Goal, Result, Row
from benchmarks.run import machine
from benchmarks.sparse_decode import _BACKENDS, Clock

Inputs = tuple[Tensor, Tensor, Tensor]
_FRESH = 2**-22  # errors below this, relatively, are no fault of anyone


class Sizes(NamedTuple):
    """What is measured: length, heads, widths, lengths for the crossover, rounds, and calls timed together."""

    length: int
    heads: int
    widths: tuple[int, ...]
    crossover: tuple[int, ...]
    rounds: int
    calls: int


_FULL = Sizes(131072, 16, (64, 128), (2048, 4096, 8192, 16384, 131072), 9, 5)
_QUICK = Sizes(320, 2, (32,), (200,), 1, 1)


class Timer(Clock):
    """Also times calls as they come, for those that a graph cannot hold."""

    def eager(self, call: Callable[[], Any]) -> float:
        """What one call takes when many follow each other."""
        if self.device != "cuda":
            return statistics.median(self._once(call) for _ in range(self.rounds))
        for _ in range(2):
            call()
        times = []
        for _ in range(self.rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self.calls):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / self.calls)
        return statistics.median(times)

    def peak(self, call: Callable[[], Any]) -> float:
        """The bytes that a call takes beyond what was there before it."""
        if self.device != "cuda":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def drawn(device: str, b: int, h: int, g: int, n: int, d: int, e: int, kind: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed + n + d)
    shapes = ((b, h, n, d), (b, g, n, d), (b, g, n, e))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(kind) for shape in shapes)
    return q, k, v


def gradients(call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs, seed: Tensor) -> list[Tensor]:
    """An answer and its gradients, all in one list."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = call(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), seed.to(out.dtype))]


def check(device: str, name: str, case: Case) -> list[str]:
    """What is wrong with a kernel, beside float64 and beside the plain formula in the same type."""
    if device == "cpu":
        from avow.kernels.interpreted import interpret

        interpret()
    variant, (kind, (b, h, g, n, d, e)) = variants()[name], case
    inputs = variant.prepare(*drawn(device, b, h, g, n, d, e, kind))
    seed = torch.randn(b, h, n, e, device=device).to(kind)
    told = f"{name}, {str(kind)[6:]}, {b}x{h}/{g}x{n}, d = {d}, e = {e}"
    try:
        own, again = (gradients(variant.call, inputs, seed) for _ in range(2))
    except Exception as why:  # whatever a compiler or a launch may raise is a finding
        return [f"{told}: {type(why).__name__}: {str(why).splitlines()[0][:200]}"]
    wide = inputs[0].double(), inputs[1].double(), inputs[2].double()
    truth, plain = gradients(variant.formula, wide, seed.double()), gradients(variant.formula, inputs, seed)
    faults = []
    for what, x, y, t, p in zip(("out", "dq", "dk", "dv"), own, again, truth, plain, strict=True):
        mine, other = error(x, t), error(p, t)
        if not mine <= 2 * other + _FRESH:
            faults.append(f"{told}: {what} is {mine:.3g} off, the plain formula {other:.3g}")
        if not torch.equal(x, y):
            faults.append(f"{told}: {what} differs from run to run")
    return faults


def checked(device: str, names: list[str], quick: bool) -> dict[str, list[str]]:
    """Faults by variant; on a GPU, in processes of their own, since most of the time is the compilers'."""
    return faults_of(
        [
            (device, name, case)
            for name in names
            for case in (variants()[name].quick_cases if quick else variants()[name].cases)
        ]
    )


def fuzzed(device: str, count: int, quick: bool) -> dict[str, list[str]]:
    """Faults by variant at random shapes and types."""
    source = random.Random(0)
    widest, longest = (40, 150) if quick else (256, 2000)
    tasks = []
    for _ in range(count):
        groups, kind = source.choice((1, 2)), source.choice((torch.bfloat16, torch.float16, torch.float32))
        heads, d, e = groups * source.choice((1, 1, 2, 3)), source.randint(8, widest), source.randint(8, widest // 2)
        case = kind, (source.choice((1, 2)), heads, groups, source.randint(1, longest), d, e)
        tasks.append((device, source.choice(list(variants())), case))
    return faults_of(tasks)


def faults_of(tasks: list[tuple[str, str, Case]]) -> dict[str, list[str]]:
    """What is wrong at some shapes, by variant."""
    device, names = tasks[0][0], {name for _, name, _ in tasks}
    faults: dict[str, list[str]] = {name: [] for name in names}
    if device == "cpu":
        for task in tasks:
            faults[task[1]] += check(*task)
        return faults
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        for task, found in zip(tasks, pool.map(check, *zip(*tasks, strict=True)), strict=True):
            faults[task[1]] += found
    return faults


def fla() -> Any:
    """flash-linear-attention's kernel, or None."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except Exception as why:  # a peer that cannot be imported is no peer, whatever stopped it
        print(f"  flash-linear-attention is not here ({type(why).__name__}: {str(why)[:80]})", file=sys.stderr)
        return None
    return chunk_linear_attn


def both(clock: Timer, call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> tuple[float, float]:
    """Seconds of a forward pass, and of one with its gradients."""
    with torch.no_grad():
        forward = clock.seconds(lambda: call(*inputs))
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    seed = torch.randn_like(call(*inputs))

    def train() -> Any:
        return torch.autograd.grad(call(*leaves), leaves, seed)  # type: ignore[arg-type]

    return forward, clock.eager(train)


def peer_of(name: str, rival: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """flash-linear-attention's way to the same answer, for rows before heads."""
    if rival is None or name.startswith("separable") or "all keys" in name:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "random features":
            q, k, _ = feature_logs(q, k)
        return rival(q, k, v, scale=1.0, normalize=name != "linear")[0]

    return call


def timed(device: str, sizes: Sizes, sound: list[str], clock: Timer, limit: float) -> Iterator[Row]:
    """One row for every variant and width whose kernel passed."""
    rival = fla() if device == "cuda" else None
    for name in sound:
        variant, peer = variants()[name], peer_of(name, rival)
        for d in sizes.widths if name.startswith("linear") else sizes.widths[:1]:
            q, k, v = variant.prepare(*drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16))
            forward, training = both(clock, variant.call, (q, k, v))
            least = 4 * q.numel() * q.element_size() / limit
            with torch.no_grad():
                room = clock.peak(lambda: variant.call(q, k, v))  # noqa: B023
            row: Row = {
                "kernel": name,
                "d": d,
                "forward ms": 1e3 * forward,
                "of the limit": least / forward,
                "training ms": 1e3 * training,
                "of its limit": 11 / 4 * least / training,
                "MB": room / 1e6,
                "fla ms": None,
                "faster": None,
                "fla training ms": None,
                "training faster": None,
                "fla MB": None,
            }
            if peer is not None:
                turned = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                try:
                    seconds, whole = both(clock, peer, turned)
                    with torch.no_grad():
                        other = clock.peak(lambda: peer(*turned))  # noqa: B023
                    row |= {
                        "fla ms": 1e3 * seconds,
                        "faster": seconds / forward,
                        "fla training ms": 1e3 * whole,
                        "training faster": whole / training,
                        "fla MB": other / 1e6,
                    }
                except Exception as why:  # a peer may fail at what we ask of it
                    print(f"  fla, {name}, d = {d}: {type(why).__name__}: {str(why)[:120]}", file=sys.stderr)
            yield row
            if device == "cuda":
                torch.cuda.empty_cache()


def crossed(device: str, sizes: Sizes, name: str) -> Iterator[Row]:
    """One variant beside exact attention by the best backend, from short sequences to long ones."""
    variant = variants()[name]
    for n in sizes.crossover:
        clock = Timer(device, sizes._replace(rounds=3, calls=1 if n > 20000 else 5))
        inputs = variant.prepare(
            *drawn(device, 1, sizes.heads, sizes.heads, n, sizes.widths[0], sizes.widths[0], torch.bfloat16)
        )
        own = both(clock, variant.call, inputs)
        best: dict[str, tuple[float, float]] = {}
        for backend in ("cuDNN", "flash") if device == "cuda" else ("math",):

            def exact(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
                with sdpa_kernel(_BACKENDS[backend]):
                    return scaled_dot_product_attention(q, k, v, is_causal=True)

            try:
                best[backend] = both(clock, exact, inputs)
            except RuntimeError as why:
                print(f"  {backend}: does not run here ({str(why).splitlines()[0][:80]})", file=sys.stderr)
        forward, training = (min(times[i] for times in best.values()) for i in range(2))
        yield {
            "kernel": name,
            "n": n,
            "forward ms": 1e3 * own[0],
            "exact ms": 1e3 * forward,
            "faster": forward / own[0],
            "training ms": 1e3 * own[1],
            "exact training ms": 1e3 * training,
            "training faster": training / own[1],
        }


def steps(device: str, clock: Timer, limit: float, quick: bool) -> Iterator[Row]:
    """Single tokens: what the state's way through the processor takes, and what a step does."""
    from avow.kernels import linear_step
    from avow.kernels.feature_attention import FeatureSums
    from avow.kernels.linear_attention import LinearState
    from avow.kernels.separable_attention import ColumnSums

    batches = (2,) if quick else (1, 64)
    for b in batches:
        h, d, m = 16, 64, FEATURES
        q, k, v = (torch.randn(b, h, d, device=device).bfloat16() for _ in range(3))
        w = torch.randn(m, d, device=device)

        def made(features: int, *tops: int, b: int = b) -> list[Tensor]:
            low = torch.full((b, 16, *tops), -torch.inf, device=device)
            return [torch.zeros(b, 16, features, 64, device=device), torch.zeros(b, 16, features, device=device), low]

        plain, random, columns = LinearState(*made(d)[:2]), FeatureSums(*made(m)), ColumnSums(*made(d, d))
        for name, state, call in (
            ("linear, normalised", plain, lambda q, k, v, s: linear_step.linear_step(q, k, v, s, True)),
            ("random features", random, lambda q, k, v, s, w=w: linear_step.feature_step(q, k, v, w, s)),
            ("separable", columns, lambda q, k, v, s: linear_step.separable_step(q, k, v, s)),
        ):
            seconds = clock.seconds(lambda: call(q, k, v, state))  # noqa: B023
            moved = 2 * state.sums.numel() * 4
            yield {
                "step": name,
                "batch": b,
                "us": 1e6 * seconds,
                "MB": moved / 1e6,
                "over the state's way": seconds / (moved / limit),
            }


def stages(device: str, sizes: Sizes, clock: Timer, limit: float) -> Iterator[Row]:
    """Each kernel of the plain scan alone, with the bytes that it must move."""
    from avow.kernels import causal_scan as scan

    for d in sizes.widths:
        q, k, v = drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16)
        parts = scan.cut(sizes.length, sizes.heads, d, d, 2)
        known = scan.before(k, v, parts)
        one = q.numel() * 2
        share = (parts.parts - 1) / parts.parts
        held = known.sums.numel() * 4
        kernels: list[tuple[str, Callable[[], Any], float]] = [
            (
                "sums of parts, and before them",
                lambda k=k, v=v, p=parts: scan.before(k, v, p),
                2 * one * share + 3 * held,
            ),
            ("scan", lambda q=q, k=k, v=v, s=known, p=parts: scan.scanned(q, k, v, s, p), 4 * one + held),
            (
                "scan from the end",
                lambda q=q, k=k, v=v, s=known, p=parts: scan.scanned(q, k, v, s, p, reverse=True),
                4 * one + held,
            ),
        ]
        for name, call, moved in kernels:
            seconds = clock.seconds(call)
            yield {
                "stage": name,
                "d": d,
                "parts": parts.parts,
                "ms": 1e3 * seconds,
                "MB": moved / 1e6,
                "TB/s": moved / seconds / 1e12,
                "of the limit": moved / seconds / limit,
            }


def tune(device: str, sizes: Sizes) -> list[Row]:
    """Forward times of the plain scan under other layouts."""
    from avow.kernels import causal_scan as scan

    clock, shipped, rows = Timer(device, sizes), scan.config, []
    for d in sizes.widths:
        inputs = drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16)
        for chunk in (64, 128):
            for columns in {d, d // 2}:
                for warps in (4, 8):
                    for loads in (2, 3, 4):
                        for resident in (1, 2):
                            chosen = scan.Config(chunk, columns, warps, loads, resident)
                            scan.config = lambda m, e, itemsize, alone=False, chosen=chosen: chosen
                            try:
                                parts = scan.cut(sizes.length, sizes.heads, d, d, 2)
                                q, k, v = inputs
                                known = scan.before(k, v, parts)
                                first = clock.seconds(lambda: scan.before(k, v, parts))  # noqa: B023
                                second = clock.seconds(lambda: scan.scanned(q, k, v, known, parts))  # noqa: B023
                            except Exception:  # a layout that the device has no room for
                                continue
                            finally:
                                scan.config = shipped
                            rows.append(
                                {"d": d, "layout": str(tuple(chosen)), "sums ms": 1e3 * first, "scan ms": 1e3 * second}
                            )
    return sorted(rows, key=lambda row: (row["d"], float(row["sums ms"]) + float(row["scan ms"])))  # type: ignore[arg-type]


def run(device: str, sizes: Sizes, quick: bool, only: str | None) -> list[Result]:
    """The tables: whole attention against its peers, its kernels one by one, exact attention, single steps."""
    clock = Timer(device, sizes)
    limit = clock.bandwidth()
    names = [name for name in variants() if only is None or name.startswith(only)]
    began = time.perf_counter()
    faults = checked(device, names, quick)
    print(f"  checks took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    failures = [fault for name in names for fault in faults[name]]
    for fault in failures:
        print(f"    {fault}", file=sys.stderr, flush=True)
    sound = [name for name in names if not faults[name]]
    rows = list(timed(device, sizes, sound, clock, limit))
    told = f"{sizes.heads} heads, n = {sizes.length}, bf16, {device}; a copy runs at {limit / 1e12:.3g} TB/s"
    remarks = [
        "`of the limit`: the time to read q, k and v and write the answer once, over the time taken; training has to "
        f"read and write 11 such tensors at least. Random features: {FEATURES}; fla is given them from torch.",
    ]
    results = [Result(f"linear attention ({told})", rows, list(goals(rows)), remarks, failures)]
    if "linear" in sound:
        results.append(Result("linear attention: its kernels", list(stages(device, sizes, clock, limit))))
    beside = [
        row
        for name in sound
        if name in ("random features", "separable, causal")
        for row in crossed(device, sizes, name)
    ]
    if beside:
        results.append(Result("linear attention beside exact attention, causal", beside))
    if only in (None, "step"):
        results.append(Result("single tokens, 16 heads of 64", list(steps(device, clock, limit, quick))))
    return results


def goals(rows: list[Row]) -> Iterator[Goal]:
    """Which of the aims this run could judge, and whether it met them."""
    aims: dict[str, tuple[tuple[str, float], ...]] = {
        "linear": (("faster", 2.0), ("training faster", 1.6), ("of the limit", 0.6)),
        "random features": (("faster", 4.0), ("training faster", 3.0)),
        "separable": (("of the limit", 0.7),),
    }
    for row in rows:
        for key, aim in aims.get(str(row["kernel"]), ()):
            if row[key] is not None:
                found = float(row[key] or 0)
                yield Goal(f"{row['kernel']}, d = {row['d']}: {key} at least {aim:g}", f"{found:.3g}", found >= aim)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 where an answer failed its check."""
    parser = argparse.ArgumentParser("python -m benchmarks.linear_gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--only", choices=("linear", "all keys", "random", "separable", "step"), help="one family")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="check N random shapes and types instead")
    parser.add_argument("--tune", action="store_true", help="time other layouts of the plain scan")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cpu":
        from avow.kernels.interpreted import interpret

        interpret()
    print(machine(), flush=True)
    if parsed.fuzz:
        faults = [fault for found in fuzzed(parsed.device, parsed.fuzz, parsed.quick).values() for fault in found]
        print("\n".join([*faults, f"{parsed.fuzz} random shapes, {len(faults)} faults"]))
        return int(bool(faults))
    sizes = _QUICK if parsed.quick else _FULL
    if parsed.tune:
        print(Result("layouts (chunk, columns, warps, stages, resident)", tune(parsed.device, sizes)).text())
        return 0
    results = run(parsed.device, sizes, parsed.quick, parsed.only)
    for result in results:
        print(f"\n{result.text()}", flush=True)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
