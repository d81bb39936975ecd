"""Linear attention's kernels against their peers: whole sequences, exact attention, and kernel by kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from avow.bench.cases import BACKENDS
from avow.bench.clock import Clock
from avow.bench.linear_checks import drawn
from avow.bench.linear_peers import fla, peer_of, performer
from avow.bench.linear_variants import Inputs, variants
from avow.bench.results import Row, tell_row


class Sizes(NamedTuple):
    """What is measured: length, heads, widths, lengths for the crossover, rounds, and calls timed together."""

    length: int
    heads: int
    widths: tuple[int, ...]
    crossover: tuple[int, ...]
    rounds: int
    calls: int


def both(clock: Clock, call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> tuple[float, float]:
    """Seconds of a forward pass, and of one with its gradients."""
    with torch.no_grad():
        forward = clock.seconds(lambda: call(*inputs))
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    seed = torch.randn_like(call(*inputs))

    def train() -> Any:
        return torch.autograd.grad(call(*leaves), leaves, seed)

    return forward, clock.eager(train)


def timed(device: str, sizes: Sizes, sound: list[str], clock: Clock, limit: float) -> Iterator[Row]:
    """One row for every variant and width whose kernel passed."""
    rival = fla() if device == "cuda" else None
    others = performer() if device == "cuda" and "random features" in sound else None
    for name in sound:
        variant, peer = variants()[name], peer_of(name, rival)
        for d in sizes.widths if name.startswith("linear") else sizes.widths[:1]:
            q, k, v = variant.prepare(*drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16))
            forward, training = both(clock, variant.call, (q, k, v))
            least = 4 * q.numel() * q.element_size() / limit
            with torch.no_grad():
                room = clock.peak(partial(variant.call, q, k, v))
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
                "performer ms": None,
                "faster than it": None,
            }
            if peer is not None:
                turned = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                try:
                    seconds, whole = both(clock, peer, turned)
                    with torch.no_grad():
                        other = clock.peak(partial(peer, *turned))
                    row |= {
                        "fla ms": 1e3 * seconds,
                        "faster": seconds / forward,
                        "fla training ms": 1e3 * whole,
                        "training faster": whole / training,
                        "fla MB": other / 1e6,
                    }
                except Exception as error:  # a peer may fail at what we ask of it
                    print(f"  fla, {name}, d = {d}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
            if others is not None and name == "random features":
                row |= beside_performer(clock, others, (q, k, v), forward)
            tell_row(row)
            yield row
            if device == "cuda":
                torch.cuda.empty_cache()


def beside_performer(clock: Clock, make: Any, inputs: Inputs, own: float) -> Row:
    """What performer-pytorch takes for the same, in the type that it computes in."""
    q, k, v = (x.float() for x in inputs)
    try:
        with torch.no_grad():
            call = make(q)
            seconds = clock.eager(lambda: call(q, k, v))
    except Exception as error:  # a peer may fail at what we ask of it
        print(f"  performer-pytorch: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
        return {}
    return {"performer ms": 1e3 * seconds, "faster than it": seconds / own}


def crossed(device: str, sizes: Sizes, name: str) -> Iterator[Row]:
    """One variant beside exact attention by the best backend, from short sequences to long ones."""
    variant = variants()[name]
    for n in sizes.crossover:
        clock = Clock(device, 3, 1 if n > 20000 else 5)
        inputs = variant.prepare(
            *drawn(device, 1, sizes.heads, sizes.heads, n, sizes.widths[0], sizes.widths[0], torch.bfloat16)
        )
        own = both(clock, variant.call, inputs)
        best: dict[str, tuple[float, float]] = {}
        for backend in ("cuDNN", "flash") if device == "cuda" else ("math",):

            def exact(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
                with sdpa_kernel(BACKENDS[backend]):
                    return scaled_dot_product_attention(q, k, v, is_causal=True)

            try:
                best[backend] = both(clock, exact, inputs)
            except RuntimeError as error:
                print(f"  {backend}: does not run here ({str(error).splitlines()[0][:80]})", file=sys.stderr)
        forward, training = (min(times[i] for times in best.values()) for i in range(2))
        row: Row = {
            "kernel": name,
            "n": n,
            "forward ms": 1e3 * own[0],
            "exact ms": 1e3 * forward,
            "faster": forward / own[0],
            "training ms": 1e3 * own[1],
            "exact training ms": 1e3 * training,
            "training faster": training / own[1],
        }
        tell_row(row)
        yield row


def stages(device: str, sizes: Sizes, clock: Clock, limit: float) -> Iterator[Row]:
    """Each kernel of the plain scan alone, with the bytes that it must move."""
    from avow.kernels import causal_scan as scan
    from avow.kernels.chunking import cut

    for d in sizes.widths:
        q, k, v = drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16)
        parts = cut(sizes.length, sizes.heads, d, d, 2)
        known = scan.before(k, v, parts)
        one = q.numel() * 2
        share = (parts.parts - 1) / parts.parts
        held = known.sums.numel() * 4
        kernels: list[tuple[str, Callable[[], Any], float]] = [
            ("sums of parts, and before them", partial(scan.before, k, v, parts), 2 * one * share + 3 * held),
            ("scan", partial(scan.scanned, q, k, v, known, parts), 4 * one + held),
            ("scan from the end", partial(scan.scanned, q, k, v, known, parts, reverse=True), 4 * one + held),
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


def _taken(row: Row) -> tuple[float, float]:
    return float(row["d"] or 0), float(row["sums ms"] or 0) + float(row["scan ms"] or 0)


def _use(cuts: Any, chosen: Any) -> None:
    """Have every scan laid out in one way."""

    def config(m: int, e: int, itemsize: int, plain: bool = True) -> Any:
        return chosen

    cuts.config = config


def tune(device: str, sizes: Sizes) -> list[Row]:
    """Forward times of the plain scan under other layouts."""
    from avow.kernels import causal_scan as scan
    from avow.kernels import chunking

    shipped = chunking.config
    clock, rows = Clock(device, sizes.rounds, sizes.calls), list[Row]()
    for d in sizes.widths:
        inputs = drawn(device, 1, sizes.heads, sizes.heads, sizes.length, d, d, torch.bfloat16)
        q, k, v = inputs
        for layout in product((64, 128), {d, d // 2}, (4, 8), (2, 3, 4), (1, 2)):
            chosen = chunking.Config(*layout)
            _use(chunking, chosen)
            try:
                parts = chunking.cut(sizes.length, sizes.heads, d, d, 2)
                known = scan.before(k, v, parts)
                first = clock.seconds(partial(scan.before, k, v, parts))
                second = clock.seconds(partial(scan.scanned, q, k, v, known, parts))
            except Exception:  # a layout that the device has no room for
                continue
            finally:
                chunking.config = shipped
            rows.append({"d": d, "layout": str(layout), "sums ms": 1e3 * first, "scan ms": 1e3 * second})
    return sorted(rows, key=_taken)
