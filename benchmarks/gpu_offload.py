"""Caches in host memory on a GPU: one layer, device memory, hits of consecutive steps, and a model of an 8B shape.

Every answer is compared with float64 before it is timed. Rivals are transformers' offloaded cache, which moves whole
layers, and exact attention with all tokens on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from avow.attend import Attended
from avow.bench import cases, generate
from avow.bench.clock import Clock
from avow.bench.decode import check
from avow.bench.results import Goal, Result, Row, attempted, tell_row
from avow.nn import KeyValueCache
from benchmarks.options import Options

_TOL, _STEPS, _PART, _ROOM = 1e-2, 64, 2**16, 2**12
_DRAFTS = 15
"""With the token itself, as many queries of four siblings as one pass over the tokens answers."""


class Sizes(NamedTuple):
    """Lengths of a layer; the length at which memory is limited, and the bytes allowed; and of whole models."""

    lengths: tuple[int, ...]
    limited: tuple[int, int]
    models: tuple[int, ...]
    model: generate.Sizes
    rounds: int


FULL = Sizes((131072, 524288, 1048576), (524288, 2**30), (131072, 524288), generate.FULL["cuda"], 5)
QUICK = Sizes((8192,), (8192, 2**29), (8192,), generate.QUICK["cuda"], 2)
# Tokens, confidence, and how many times as fast as transformers' offloaded cache a step should be.
_FASTER = {(1048576, 1.0): 12.0, (1048576, 0.999): 40.0}


def run(options: Options) -> list[Result]:
    """One layer, and a cache for which the device has no room."""
    sizes, loads, text = _asked_for(options)
    with torch.no_grad():
        return [_layers(sizes, loads, text), _limited(sizes, loads, text)]


def models(options: Options) -> Result:
    """Tokens of a whole model."""
    with torch.no_grad():
        return _models(*_asked_for(options))


def _asked_for(options: Options) -> tuple[Sizes, Any, str]:
    assert options.heads is not None
    text, loads = next(iter(cases.stored(options.heads).items()))
    return QUICK if options.quick else FULL, loads, text


def _case(n: int, loads: Any, text: str, device: str = "cuda") -> cases.Case:
    return cases.real(device, cases.Sizes((n,), 32, 8, 0, 0, queries=_STEPS), n, loads, text)


def _filled(case: cases.Case, **more: Any) -> KeyValueCache:
    cache = KeyValueCache(8, 128, dtype=case.k.dtype, device="cuda", capacity=case.length + _ROOM, **more)
    for start in range(0, case.length, _PART):
        cache.append(*(x[:, :, start : start + _PART].cuda() for x in (case.k, case.v)))
    return cache


class _Steps:
    """Steps of a cache in a CUDA graph, each with the next of the queries."""

    def __init__(self, case: cases.Case, cache: KeyValueCache, tol: float | None, confidence: float) -> None:
        self.case, self.cache, self.confidence, self.at = case, cache, confidence, 0
        self.q = case.q[:, :, :1].cuda().contiguous()
        self.token = tuple(x[:, :, :1].cuda().contiguous() for x in (case.k, case.v))

        def step() -> Attended:
            cache.append(*self.token)
            return cache.attend(self.q, tol, confidence, case.scale)

        for _ in range(3):
            self.answer = step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.answer = step()

    def __call__(self) -> None:
        self.q.copy_(self.case.q[:, :, self.at % _STEPS : self.at % _STEPS + 1])
        self.at += 1
        self.graph.replay()

    def faults(self) -> list[str]:
        """What is wrong with the answer of a step."""
        self()
        torch.cuda.synchronize()
        asked = cases.Case(self.case.name, self.q, self.case.k, self.case.v, self.case.scale)
        return check(asked, self.cache, self.answer)[1]

    def seconds(self, rounds: int) -> tuple[float, int, int]:
        """Of a step, the median of rounds of all queries; and the hits and misses of one round."""
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_STEPS):
                self()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _STEPS)
        costs = []
        for _ in range(_STEPS):
            self()
            costs.append(self.answer.certificate.cost)
        return (
            statistics.median(times),
            sum(cost.hits for cost in costs if cost is not None),
            sum(cost.misses for cost in costs if cost is not None),
        )


def _moved(case: cases.Case) -> Callable[[], object]:
    """A token of one layer by transformers' offloaded cache and SDPA: half of two layers in turn."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(offloading=True)
    cache.layer_class_to_replicate, cache.layers = None, [DynamicLayer(), DynamicLayer()]
    for i in range(2):
        cache.update(case.k, case.v, i)
    token, q = tuple(x[:, :, :1].contiguous() for x in (case.k, case.v)), case.q[:, :, :1].contiguous()

    def call() -> None:
        for i in range(2):
            keys, values = cache.update(*token, i)
            scaled_dot_product_attention(q, keys, values, scale=case.scale, enable_gqa=True)

    return call


def _layers(sizes: Sizes, loads: Any, text: str) -> Result:
    rows, failures, goals = list[Row](), list[str](), list[Goal]()
    clock = Clock("cuda", sizes.rounds, 5)
    for n in sizes.lengths:
        case = _case(n, loads, text)
        single = cases.Case(case.name, case.q[:, :, :1].contiguous(), case.k, case.v, case.scale)
        here = min(clock.seconds(call, graph=True) for _, call in cases.exact(single))
        moved = clock._replace(calls=2).seconds(_moved(case), graph=False) / 2
        dense = case.k.nbytes + case.v.nbytes
        for name, tol, confidence, hot in _asked(dense):
            cache = _filled(case, offload=True, hot=hot)
            steps = _Steps(case, cache, tol, confidence)
            label = f"n = {n}, {name}"
            if faults := steps.faults():
                failures += [f"{label}: {fault}" for fault in faults]
                continue
            own, hits, misses = steps.seconds(sizes.rounds if tol is not None else 1)
            share = (cache.nbytes - cache.host_nbytes) / cache.host_nbytes
            row: Row = {
                "n": n,
                "step": name,
                "ms": 1e3 * own,
                "transformers ms": 1e3 * moved,
                "on device ms": 1e3 * here,
            }
            row |= {"times faster": moved / own, "over on device": own / here, "device bytes": share}
            row |= {"hits": hits / max(1, hits + misses), "rows a step": (hits + misses) / _STEPS}
            rows.append(row)
            tell_row(row)
            if hot is None and tol is not None:
                aim = _FASTER.get((n, confidence))
                if aim:
                    found = moved / own
                    goals.append(Goal(f"{label}: {aim:g} times transformers'", f"{found:.3g}", found >= aim))
                if confidence < 1 and n == FULL.lengths[-1]:
                    goals.append(Goal(f"{label}: within 2x on device", f"{own / here:.3g}", own <= 2 * here))
                if n == FULL.lengths[-1]:
                    goals.append(Goal(f"{label}: a sixth of the bytes", f"{share:.3g}", share <= 1 / 6))
            del cache, steps
        del case, single
        torch.cuda.empty_cache()
    remarks = [
        f"32 query heads on 8 key heads of 128, bfloat16, {text}, tol = {_TOL:g}; steps in a CUDA graph, the queries "
        f"of {_STEPS} tokens in turn. The stored queries are those of every fourth token."
    ]
    return Result("offload: a step of one layer", rows, goals, remarks, failures)


def _asked(dense: int) -> Iterator[tuple[str, float | None, float, int | None]]:
    """What is asked of a cache, and how many bytes of rows it keeps: none, the usual hundredth, a sixteenth."""
    for confidence in (1.0, 0.999):
        for name, hot in (("no hot rows", 0), ("hot rows", None), ("a sixteenth hot", dense // 16)):
            yield f"{name}, {confidence:g}", _TOL, confidence, hot
    yield "exact", None, 1.0, 0


def _limited(sizes: Sizes, loads: Any, text: str) -> Result:
    """A cache whose keys and values do not fit into the memory that the process may use."""
    n, allowed = sizes.limited
    case = _case(n, loads, text, "cpu")
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + allowed) / whole)
    try:
        fits = attempted("all tokens on the device", lambda: _filled(case)) is not None
        torch.cuda.empty_cache()
        cache = _filled(case, offload=True)
        answers = [cache.attend(case.q[:, :, i : i + 1].cuda(), _TOL, None, case.scale) for i in range(4)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    asked = cases.Case(case.name, case.q[:, :, 3:4].cuda().contiguous(), case.k, case.v, case.scale)
    _, failures = check(asked, cache, answers[-1])
    row: Row = {"n": n, "GB allowed": allowed / 1e9, "GB of keys and values": cache.host_nbytes / 1e9}
    goals = [
        Goal(
            "decodes where the tokens do not fit", f"fits: {fits}; bound {answers[-1].certificate.bound:.2g}", not fits
        )
    ]
    return Result("offload: limited device memory", [row], goals, failures=failures)


def _models(sizes: Sizes, loads: Any, text: str) -> Result:
    from transformers import DynamicCache

    from avow.integrations.transformers import CertifiedCache, enable

    rows, failures, goals = list[Row](), list[str](), list[Goal]()
    clock, shape = Clock("cuda", 2, 2 * (_DRAFTS + 1)), sizes.model
    model = generate._model("cuda", shape)
    for n in sizes.models:
        wide = cases.Sizes((n,), shape.heads, shape.groups, 0, 0, shape.dtype, queries=_STEPS)
        case = cases.real("cuda", wide, n, loads, text)
        table, seconds, tokens = case.q * (case.scale * 128**0.5), dict[str, float](), dict[str, list[int]]()

        def loop(made: Callable[[Any], Any], **more: Any) -> generate._Loop:
            twin = generate._twin(model)
            if more:
                enable(twin, tol=_TOL, **more)
            cache = made(twin.config)
            for i in range(shape.layers):
                cache.update(case.k, case.v, i)  # noqa: B023
            return generate._Loop(twin, cache, case)  # noqa: B023

        own = partial(CertifiedCache, offloading=True, capacity=n + _ROOM)
        ways = {
            "certified": partial(loop, own, method="sparse"),
            f"verified ({_DRAFTS})": partial(loop, own, method="sparse", verify=_DRAFTS),
        }
        if n == sizes.models[0]:
            ways["transformers"] = partial(loop, lambda config: DynamicCache(config=config, offloading=True))
        with generate._asking(table):
            for name, make in ways.items():
                way = attempted(name, make)
                if way is None:
                    failures.append(f"n = {n}: {name} failed")
                    continue
                tokens[name] = [_next(way) for _ in range(24)]
                if name != "transformers":
                    for _ in range(generate.WARM):
                        way()
                seconds[name] = clock.seconds(way, graph=False)
                told = getattr(way.cache, "verification", None)
                row: Row = {"n": n, "way": name, "ms a token": 1e3 * seconds[name]}
                row["accepted"] = None if told is None else told.acceptance
                rows.append(row)
                tell_row(row)
                if told is not None and not told.bound <= _TOL:
                    failures.append(f"n = {n}: drafts within {told.bound:.1e}")
                del way
                torch.cuda.empty_cache()
        if "transformers" in seconds:
            for name in seconds.keys() - {"transformers"}:
                found = seconds["transformers"] / seconds[name]
                goals.append(Goal(f"{name}, n = {n}: 10 times transformers'", f"{found:.3g}", found >= 10))
                if name.startswith("verified"):
                    same = sum(a == b for a, b in zip(tokens[name], tokens["transformers"], strict=True))
                    goals.append(Goal(f"{name}, n = {n}: the same tokens", f"{same} of 24", same == 24))
        del case, table
    about = f"{shape.layers} layers, {shape.heads}/{shape.groups} heads of 128, {shape.hidden} wide, random weights"
    remarks = ["In bfloat16 the two likeliest words may be alike to the last bit; then tokens may differ."]
    return Result(f"offload: a token of a model ({about})", rows, goals, remarks, failures)


def _next(way: generate._Loop) -> int:
    """The next token that a loop writes."""
    way()
    return int(way.token)
