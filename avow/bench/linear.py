"""Linear attention against exact attention and its peers: by kernels on a GPU, by the plain path on a CPU.

Every kernel is compared with float64 first, answers and gradients, and steps token by token; the plain path's answers
are checked against their certificates. What fails is not timed. Only speed needs a GPU: with the kernels interpreted,
every line runs on a CPU at tiny sizes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import audit
from avow.bench import linear_checks
from avow.bench.cases import sdpa
from avow.bench.clock import Clock, peak_bytes
from avow.bench.linear_checks import FEATURES, Call, Inputs, drawn, token_steps, variants
from avow.bench.results import Goal, Result, Row, attempted, rate_row, tell_row
from avow.core import Method, Problem
from avow.methods import method_named


class Sizes(NamedTuple):
    """What is measured: length, heads, widths, lengths beside exact attention, rounds, calls timed together."""

    length: int
    heads: int
    widths: tuple[int, ...]
    crossover: tuple[int, ...]
    rounds: int
    calls: int


class Times(NamedTuple):
    """Seconds of a forward pass, and of one with its gradients."""

    forward: float
    training: float


FULL = Sizes(131072, 16, (64, 128), (2048, 4096, 8192, 16384, 131072), 9, 5)
QUICK = Sizes(16384, 16, (64,), (2048, 8192), 3, 5)
REHEARSAL = Sizes(320, 2, (32,), (200,), 1, 1)
FAMILIES = ("linear", "random", "separable", "step")
HEADS, WIDTH = 16, 64  # of single tokens
# Batch, heads, length and width, beside the usual ones.
OTHER_SHAPES = ((4, 12, 8192, 64), (2, 16, 32768, 64), (1, 24, 65536, 128))

PLAIN_FULL = Sizes(8192, 4, (64,), (2048, 8192), 3, 1)
PLAIN_QUICK = Sizes(2048, 2, (32,), (512, 2048), 2, 1)
_PLAIN_FEATURES = 64
METHODS: dict[str, dict[str, Any]] = {"separable": {}, "random_features": {"features": _PLAIN_FEATURES}}

_GOALS: dict[str, tuple[tuple[str, float], ...]] = {
    "linear": (("faster", 1.8), ("training faster", 1.6)),
    "random features": (("faster", 4.0), ("training faster", 3.0)),
    "separable": (("of the limit", 0.7),),
}


def run(
    device: str, sizes: Sizes, only: str | None, tell: Callable[[str], None], rehearsed: bool = False
) -> list[Result]:
    """The tables: whole attention against its peers, its kernels one by one, exact attention, single steps."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    limit = clock.bandwidth()
    names = [name for name in variants() if only is None or name.startswith(only)]
    step_names = list(token_steps()) if only in (None, "step") else []
    batches = (2,) if rehearsed else (1, 64)
    tell("checks")
    faults = linear_checks.checked(device, names, rehearsed) if names else {}
    step_faults = {
        name: [fault for b in batches for fault in linear_checks.check_step(device, name, b)] for name in step_names
    }
    sound = [name for name in names if not faults[name]]
    results = []
    tell("sequences")
    if names:
        others = OTHER_SHAPES if device == "cuda" else ()
        rows = list(timed(device, sizes, sound, clock, limit, others))
        where = f"{sizes.heads} heads, n = {sizes.length} unless said, bf16, {device}; a copy: {limit / 1e12:.3g} TB/s"
        remark = (
            "`of the limit`: the time to read q, k and v and write the answer once, over the time taken; training has "
            f"to read and write 11 such tensors at least. Random features: {FEATURES}; fla gets them from torch."
        )
        failures = [fault for some in faults.values() for fault in some]
        results.append(Result(f"linear attention ({where})", rows, list(goals(rows)), [remark], failures))
    tell("kernels")
    if "linear" in sound:
        results.append(Result("linear attention: its kernels", list(stages(device, sizes, clock, limit))))
    tell("exact attention")
    pairs = [name for name in sound if name in ("random features", "separable, causal")]
    if pairs:
        rows = [row for name in pairs for row in crossed(device, sizes, name)]
        results.append(Result("linear attention beside exact attention, causal", rows))
    tell("steps")
    if step_names:
        rows = list(steps(device, clock, limit, [name for name in step_names if not step_faults[name]], batches))
        title, failures = f"single tokens, {HEADS} heads of {WIDTH}", [x for some in step_faults.values() for x in some]
        results.append(Result(title, rows, list(step_goals(rows)), failures=failures))
    return results


def shapes(device: str, count: int, rehearsed: bool) -> list[Result]:
    """Random shapes and types, and the faults at them."""
    faults = linear_checks.fuzzed(device, count, rehearsed)
    return [Result(f"{count} random shapes and types, {len(faults)} faults", failures=faults)]


def goals(rows: list[Row]) -> Iterator[Goal]:
    """Which of the goals this run could judge, and whether it met them."""
    for row in rows:
        for key, goal in _GOALS.get(str(row["kernel"]), ()):
            if row[key] is not None:
                value = float(row[key] or 0)
                label = f"{row['kernel']}, {row['shape']} × {row['d']}: {key} at least {goal:g}"
                yield Goal(label, f"{value:.3g}", value >= goal)


def step_goals(rows: list[Row]) -> Iterator[Goal]:
    """A step should take as long as moving its state; with a small state the launch alone takes longer."""
    for row in rows:
        if row["batch"] == 64:
            value = float(row["over the state's way"] or 0)
            yield Goal(f"{row['step']}: a step within 1.5 of moving its state", f"{value:.3g}", value <= 1.5)


def peer(name: str, module: str, attribute: str) -> Any:
    """A peer's function or class, or None if it cannot be imported."""
    with warnings.catch_warnings(action="ignore"):
        return attempted(name, lambda: getattr(importlib.import_module(module), attribute))


def fla_call(name: str, fla: Any) -> Call | None:
    """flash-linear-attention's call for the same answer, with rows before heads; None if it has none."""
    if fla is None or name.startswith("separable"):
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "random features":
            q, k = linear_checks.random_features(q, k)
        return fla(q, k, v, scale=1.0, normalize=name != "linear")[0]

    return call


def passes(call: Call, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward pass, and one with its gradients."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    seed = torch.randn_like(call(*inputs))

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*inputs)

    return forward, lambda: torch.autograd.grad(call(*leaves), leaves, seed)


def times(clock: Clock, call: Call, inputs: Inputs) -> Times:
    """The times of a call with and without gradients; autograd cannot be captured in a graph."""
    forward, training = passes(call, inputs)
    return Times(clock.seconds(forward), clock.seconds(training, graph=False))


def timed(
    device: str, sizes: Sizes, sound: list[str], clock: Clock, limit: float, others: tuple[tuple[int, ...], ...] = ()
) -> Iterator[Row]:
    """One row for every variant and width whose kernel passed; without a feature map, also for other shapes."""
    on_gpu = device == "cuda"
    fla = peer("flash-linear-attention", "fla.ops.linear_attn", "chunk_linear_attn") if on_gpu else None
    use_performer = on_gpu and "random features" in sound
    performer = peer("performer-pytorch", "performer_pytorch", "FastAttention") if use_performer else None
    for name in sound:
        variant, other = variants()[name], fla_call(name, fla)
        widths = sizes.widths if name.startswith("linear") else sizes.widths[:1]
        usual = [(1, sizes.heads, sizes.length, d) for d in widths]
        for b, h, n, d in (*usual, *(others if name == "linear" else ())):
            q, k, v = variant.prepare(*drawn(device, (b, h, h, n, d, d), torch.bfloat16))
            own = times(clock, variant.call, (q, k, v))
            least = 4 * q.numel() * q.element_size() / limit
            row: Row = {"kernel": name, "shape": f"{b} × {h} × {n:,}", "d": d}
            row |= {"forward ms": 1e3 * own.forward, "of the limit": least / own.forward}
            row |= {"training ms": 1e3 * own.training, "of its limit": 11 / 4 * least / own.training}
            row |= {"MB": _megabytes(device, variant.call, (q, k, v))}
            row |= dict.fromkeys(("fla ms", "faster", "fla training ms", "training faster", "fla MB"))
            row |= dict.fromkeys(("performer ms", "faster than it"))
            if other is not None:
                turned = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                beside = attempted(f"fla, {name}, d = {d},", partial(_beside_fla, clock, other, turned, own))
                row |= beside or {}
            if performer is not None and name == "random features":
                measure = partial(_beside_performer, clock, performer, (q, k, v), own)
                row |= attempted("performer-pytorch", measure) or {}
            tell_row(row)
            yield row
            if on_gpu:
                torch.cuda.empty_cache()


def _megabytes(device: str, call: Call, inputs: Inputs) -> float:
    """Memory that a forward pass takes on a GPU beyond its inputs."""
    if device != "cuda":
        return 0.0
    with torch.no_grad():
        return peak_bytes(partial(call, *inputs), torch.device(device)) / 1e6


def _beside_fla(clock: Clock, call: Call, inputs: Inputs, own: Times) -> Row:
    other = times(clock, call, inputs)
    row: Row = {"fla ms": 1e3 * other.forward, "faster": other.forward / own.forward}
    row |= {"fla training ms": 1e3 * other.training, "training faster": other.training / own.training}
    return row | {"fla MB": _megabytes(clock.device, call, inputs)}


def _beside_performer(clock: Clock, performer: Any, inputs: Inputs, own: Times) -> Row:
    """performer-pytorch on the same inputs, in the type that it computes in."""
    q, k, v = (x.float() for x in inputs)
    with torch.no_grad():
        call = performer(q.shape[-1], FEATURES, causal=True).to(q.device)
        seconds = clock.seconds(lambda: call(q, k, v), graph=False)
    return {"performer ms": 1e3 * seconds, "faster than it": seconds / own.forward}


def _beside_exact(own: Times, exact: Times, heading: str) -> Row:
    row: Row = {heading: 1e3 * own.forward, "exact ms": 1e3 * exact.forward, "faster": exact.forward / own.forward}
    row |= {"training ms": 1e3 * own.training, "exact training ms": 1e3 * exact.training}
    return row | {"training faster": exact.training / own.training}


def crossed(device: str, sizes: Sizes, name: str) -> Iterator[Row]:
    """One variant beside exact attention by the best backend, from short sequences to long ones."""
    variant = variants()[name]
    for n in sizes.crossover:
        clock = Clock(device, 3, 1 if n > 20000 else 5)
        shape = 1, sizes.heads, sizes.heads, n, sizes.widths[0], sizes.widths[0]
        inputs = variant.prepare(*drawn(device, shape, torch.bfloat16))
        own = times(clock, variant.call, inputs)
        backends = ("cuDNN", "flash") if device == "cuda" else ("math",)
        calls = {backend: partial(sdpa, backend, is_causal=True) for backend in backends}
        exact = [attempted(backend, partial(times, clock, call, inputs)) for backend, call in calls.items()]
        best = Times(*map(min, zip(*filter(None, exact), strict=True)))
        row: Row = {"kernel": name, "n": n, **_beside_exact(own, best, "forward ms")}
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
            yield {"stage": name, "d": d, "parts": parts.parts, **rate_row(clock.seconds(call), moved, limit)}


def layouts(device: str, sizes: Sizes) -> list[Result]:
    """Forward times of the plain scan under other layouts."""
    from avow.kernels import linear_attention as scan
    from avow.kernels.chunking import Layout

    shipped = scan.config
    clock, rows = Clock(device, sizes.rounds, sizes.calls), list[tuple[float, Row]]()
    for d in sizes.widths:
        q, k, v = drawn(device, (1, sizes.heads, sizes.heads, sizes.length, d, d), torch.bfloat16)
        for layout in product((64, 128), {d, d // 2}, (4, 8), (2, 3, 4), (1, 2)):
            chosen = Layout(*layout)
            scan.config = lambda *shape, chosen=chosen: chosen
            try:
                parts = scan.cut(q, d, False)
                known = scan.before(k, v, parts)
                sums = clock.seconds(partial(scan.before, k, v, parts))
                whole = clock.seconds(partial(scan.scanned, q, k, v, known, parts))
            except Exception:  # a layout that the device has no room for
                continue
            finally:
                scan.config = shipped
            row: Row = {"d": d, "layout": str(layout), "sums ms": 1e3 * sums, "scan ms": 1e3 * whole}
            rows.append((sums + whole, row))
    rows.sort(key=lambda timed_row: (timed_row[1]["d"], timed_row[0]))
    return [Result("layouts (chunk, columns, warps, stages, resident)", [row for _, row in rows])]


def steps(device: str, clock: Clock, limit: float, names: list[str], batches: tuple[int, ...]) -> Iterator[Row]:
    """Single tokens: the time of a step, and that time over what moving its state takes."""
    for b, name in product(batches, names):
        q, k, v = (torch.randn(b, HEADS, WIDTH, device=device).bfloat16() for _ in range(3))
        state = linear_checks.empty_state(token_steps()[name], device, b, HEADS, WIDTH, WIDTH)
        seconds = clock.seconds(partial(token_steps()[name].call, q, k, v, state))
        moved = 2 * state.sums.numel() * 4
        row: Row = {"step": name, "batch": b, "us": 1e6 * seconds, "MB": moved / 1e6}
        yield row | {"over the state's way": seconds / (moved / limit)}


def run_plain(sizes: Sizes, tell: Callable[[str], None]) -> list[Result]:
    """Causal attention of every linear method, with gradients and without, over exact attention."""
    clock, rows, failures = Clock("cpu", sizes.rounds, sizes.calls), list[Row](), list[str]()
    for n in sizes.crossover:
        q, k, v = (torch.randn(1, sizes.heads, n, sizes.widths[0]) * size for size in (0.5, 0.5, 1.0))
        for name, settings in METHODS.items():
            tell(f"{name}, n = {n}")
            method = method_named(name)(**settings)
            if fault := check_certificate(method, q, k, v):
                failures.append(f"{name}, n = {n}: {fault}")
                continue
            own = passes(partial(_attend, method), (q, k, v))
            exact = passes(partial(scaled_dot_product_attention, is_causal=True), (q, k, v))
            for call in (*own, *exact):
                call()  # the first of a kind takes longer
            seconds = clock.in_turns(*own, *exact)
            rows.append({"method": name, "n": n, **_beside_exact(Times(*seconds[:2]), Times(*seconds[2:]), "ms")})
    where = f"{sizes.heads} heads of {sizes.widths[0]}, float32, {_PLAIN_FEATURES} features, cpu"
    remarks = ["The plain path, without kernels, which run on GPUs. Medians of turns; answers are checked first."]
    return [Result(f"linear attention beside exact attention, causal ({where})", rows, [], remarks, failures)]


def _attend(method: Method, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return method.compute(Problem.of(q, k, v, causal=True)).out


def check_certificate(method: Method, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What is wrong with a certified answer beside sampled rows in float64; empty if nothing is."""
    out, certificate = avow.attend(q, k, v, method=method, causal=True)
    worst = audit(out, q, k, v, causal=True, method=method).certificate.bound
    return "" if worst <= certificate.bound else f"an error of {worst:.3g} where {certificate.bound:.3g} was certified"
