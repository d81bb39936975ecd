"""Linear attention's kernels against their peers on a GPU: `python -m benchmarks.linear_gpu`.

Every kernel is compared with float64 first, answers and gradients; what fails there gets no speed. Peers are PyTorch's
exact attention and, where it can be imported, flash-linear-attention. `--device cpu --quick` rehearses every line at
tiny sizes with the kernels interpreted; `--tune` tries layouts instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.linear_variants import Variant, error, plain_variants
from benchmarks.results import Goal, Result, Row
from benchmarks.run import machine
from benchmarks.sparse_decode import Clock

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


def check(device: str, variant: Variant, quick: bool) -> list[str]:
    """What is wrong with a kernel, beside float64 and beside the plain formula in the same type."""
    faults = []
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for b, h, g, n, d, e in variant.quick_shapes if quick else variant.shapes:
            inputs = variant.prepare(*drawn(device, b, h, g, n, d, e, kind))
            seed = torch.randn(b, h, n, e, device=device).to(kind)
            told = f"{variant.name}, {str(kind)[6:]}, {b}x{h}/{g}x{n}, d = {d}, e = {e}"
            try:
                own, again = (gradients(variant.call, inputs, seed) for _ in range(2))
            except Exception as why:  # whatever a compiler or a launch may raise is a finding
                faults.append(f"{told}: {type(why).__name__}: {str(why).splitlines()[0][:200]}")
                continue
            wide = tuple(x.double() for x in inputs)
            truth = gradients(variant.formula, wide, seed.double())  # type: ignore[arg-type]
            plain = gradients(variant.formula, inputs, seed)
            for name, x, y, t, p in zip(("out", "dq", "dk", "dv"), own, again, truth, plain, strict=True):
                mine, other = error(x, t), error(p, t)
                if not mine <= 2 * other + _FRESH:
                    faults.append(f"{told}: {name} is {mine:.3g} off, the plain formula {other:.3g}")
                if not torch.equal(x, y):
                    faults.append(f"{told}: {name} differs from run to run")
    return faults


class Peer(NamedTuple):
    """Another way to the same answer, or to the exact one."""

    name: str
    inputs: Inputs
    call: Callable[[Tensor, Tensor, Tensor], Tensor]


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


def timed(device: str, sizes: Sizes, sound: dict[str, bool], clock: Timer, limit: float) -> Iterator[Row]:
    """One row for every variant and width whose kernel passed."""
    rival = fla() if device == "cuda" else None
    for variant in plain_variants():
        if not sound[variant.name]:
            continue
        for d in sizes.widths:
            q, k, v = variant.prepare(*drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16))
            forward, training = both(clock, variant.call, (q, k, v))
            least = 4 * q.numel() * q.element_size() / limit
            row: Row = {
                "kernel": variant.name,
                "d": d,
                "forward ms": 1e3 * forward,
                "of the limit": least / forward,
                "training ms": 1e3 * training,
                "of its limit": 11 / 4 * least / training,
                "fla ms": None,
                "faster": None,
                "fla training ms": None,
                "training faster": None,
            }
            if rival is not None:
                turned = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))

                def peer(q: Tensor, k: Tensor, v: Tensor, name: str = variant.name) -> Tensor:
                    return rival(q, k, v, scale=1.0, normalize=name != "linear")[0]

                seconds, whole = both(clock, peer, turned)  # type: ignore[arg-type]
                row |= {
                    "fla ms": 1e3 * seconds,
                    "faster": seconds / forward,
                    "fla training ms": 1e3 * whole,
                    "training faster": whole / training,
                }
            yield row


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
        for chunk in (32, 64, 128):
            for columns in {d, d // 2}:
                for warps in (4, 8):
                    for loads in (2, 3, 4, 5):
                        for resident in (1, 2, 4):
                            chosen = scan.Config(chunk, columns, warps, loads, resident)
                            scan.config = lambda m, e, itemsize, chosen=chosen: chosen
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


def run(device: str, sizes: Sizes, quick: bool) -> list[Result]:
    """The tables: whole attention against its peers, and its kernels one by one."""
    clock = Timer(device, sizes)
    limit = clock.bandwidth()
    sound, failures = {}, []
    for variant in plain_variants():
        began = time.perf_counter()
        found = check(device, variant, quick)
        print(
            f"  {variant.name}: {len(found)} faults, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
        )
        for fault in found:
            print(f"    {fault}", file=sys.stderr, flush=True)
        sound[variant.name] = not found
        failures += found
    rows = list(timed(device, sizes, sound, clock, limit))
    told = f"{sizes.heads} heads, n = {sizes.length}, bf16, {device}; a copy runs at {limit / 1e12:.3g} TB/s"
    remarks = [
        "`of the limit`: the time to read q, k and v and write the answer once, over the time taken; training has to "
        "read and write 11 such tensors at least.",
    ]
    results = [Result(f"linear attention ({told})", rows, list(goals(rows)), remarks, failures)]
    if sound["linear"]:
        results.append(Result("linear attention: its kernels", list(stages(device, sizes, clock, limit))))
    return results


def goals(rows: list[Row]) -> Iterator[Goal]:
    """Which of the aims this run could judge, and whether it met them."""
    for row in rows:
        if row["kernel"] == "linear" and row["faster"] is not None:
            name = f"linear, d = {row['d']}"
            for key, aim, what in (
                ("faster", 2.0, "forward at least 2 times fla"),
                ("training faster", 1.6, "training at least 1.6 times fla"),
                ("of the limit", 0.6, "forward at 60% of the memory limit"),
            ):
                found = float(row[key] or 0)
                yield Goal(f"{name}: {what}", f"{found:.3g}", found >= aim)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 where an answer failed its check."""
    parser = argparse.ArgumentParser("python -m benchmarks.linear_gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--tune", action="store_true", help="time other layouts of the plain scan")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cpu":
        from avow.kernels.interpreted import interpret

        interpret()
    print(machine(), flush=True)
    sizes = _QUICK if parsed.quick else _FULL
    if parsed.tune:
        print(Result("layouts (chunk, columns, warps, stages, resident)", tune(parsed.device, sizes)).text())
        return 0
    results = run(parsed.device, sizes, parsed.quick)
    for result in results:
        print(f"\n{result.text()}", flush=True)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
