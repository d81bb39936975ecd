"""Linear attention's kernels against their peers: whole sequences, exact attention, kernel by kernel, single tokens."""

from __future__ import annotations

import importlib
import sys
import warnings
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
from avow.bench.linear_checks import FEATURES, STEPS, VARIANTS, Call, Inputs, drawn, empty_state, random_features
from avow.bench.results import Row, tell_row

HEADS, WIDTH = 16, 64  # of single tokens


class Sizes(NamedTuple):
    """What is measured: length, heads, widths, lengths for the crossover, rounds, and calls timed together."""

    length: int
    heads: int
    widths: tuple[int, ...]
    crossover: tuple[int, ...]
    rounds: int
    calls: int


def fla() -> Any:
    """flash-linear-attention's kernel, or None."""
    try:
        return importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except Exception as error:  # a peer that cannot be imported is no peer, whatever stopped it
        print(f"  flash-linear-attention is not here ({type(error).__name__}: {str(error)[:80]})", file=sys.stderr)
        return None


def performer() -> Callable[[Tensor], Any] | None:
    """What makes performer-pytorch's causal attention for queries like these, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):
            attention = importlib.import_module("performer_pytorch").FastAttention
    except Exception as error:
        print(f"  performer-pytorch is not here ({type(error).__name__}: {str(error)[:80]})", file=sys.stderr)
        return None

    def make(q: Tensor) -> Any:
        return attention(q.shape[-1], FEATURES, causal=True).to(q.device)

    return make


def peer_of(name: str, rival: Any) -> Call | None:
    """flash-linear-attention's way to the same answer, for rows before heads."""
    if rival is None or name.startswith("separable"):
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "random features":
            q, k = random_features(q, k)
        return rival(q, k, v, scale=1.0, normalize=name != "linear")[0]

    return call


def both(clock: Clock, call: Call, inputs: Inputs) -> tuple[float, float]:
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
        variant, peer = VARIANTS[name], peer_of(name, rival)
        for d in sizes.widths if name.startswith("linear") else sizes.widths[:1]:
            q, k, v = variant.prepare(*drawn(device, (1, sizes.heads, sizes.heads, sizes.length, d, d), torch.bfloat16))
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
                **dict.fromkeys(("fla ms", "faster", "fla training ms", "training faster", "fla MB")),
                **dict.fromkeys(("performer ms", "faster than it")),
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
    variant = VARIANTS[name]
    for n in sizes.crossover:
        clock = Clock(device, 3, 1 if n > 20000 else 5)
        shape = 1, sizes.heads, sizes.heads, n, sizes.widths[0], sizes.widths[0]
        inputs = variant.prepare(*drawn(device, shape, torch.bfloat16))
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
    from avow.kernels import linear_attention as scan

    for d in sizes.widths:
        q, k, v = drawn(device, (1, sizes.heads, sizes.heads, sizes.length, d, d), torch.bfloat16)
        parts = scan.cut(q, d, False)
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


def tune(device: str, sizes: Sizes) -> list[Row]:
    """Forward times of the plain scan under other layouts."""
    from avow.kernels import linear_attention as scan
    from avow.kernels.chunking import Layout

    shipped = scan.config
    clock, rows = Clock(device, sizes.rounds, sizes.calls), list[Row]()
    for d in sizes.widths:
        q, k, v = drawn(device, (1, sizes.heads, sizes.heads, sizes.length, d, d), torch.bfloat16)
        for layout in product((64, 128), {d, d // 2}, (4, 8), (2, 3, 4), (1, 2)):
            chosen = Layout(*layout)
            scan.config = lambda *shape, chosen=chosen: chosen
            try:
                parts = scan.cut(q, d, False)
                known = scan.before(k, v, parts)
                first = clock.seconds(partial(scan.before, k, v, parts))
                second = clock.seconds(partial(scan.scanned, q, k, v, known, parts))
            except Exception:  # a layout that the device has no room for
                continue
            finally:
                scan.config = shipped
            rows.append({"d": d, "layout": str(layout), "sums ms": 1e3 * first, "scan ms": 1e3 * second})
    return sorted(rows, key=lambda row: (row["d"], float(row["sums ms"] or 0) + float(row["scan ms"] or 0)))


def steps(device: str, clock: Clock, limit: float, names: list[str], batches: tuple[int, ...]) -> Iterator[Row]:
    """Single tokens: what the state's way through the processor takes, and what a step does."""
    for b in batches:
        for name in names:
            step = STEPS[name]
            q, k, v = (torch.randn(b, HEADS, WIDTH, device=device).bfloat16() for _ in range(3))
            state = empty_state(step, device, b, HEADS, WIDTH, WIDTH)
            seconds = clock.seconds(partial(step.call, q, k, v, state))
            moved = 2 * state.sums.numel() * 4
            yield {
                "step": name,
                "batch": b,
                "us": 1e6 * seconds,
                "MB": moved / 1e6,
                "over the state's way": seconds / (moved / limit),
            }
