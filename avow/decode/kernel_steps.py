"""Decoding steps of a cache by kernels on a GPU, none of which waits for the last.

The answer is right when it is handed out: if a bound would exceed the tolerance, the kernels themselves read all
tokens. How many tokens there are, whether looking at the sketch pays and the seed of draws are on the device, so a step
can be captured in a CUDA graph and replayed while the cache grows. Its certificate stays on the device, too, until
somebody looks at it. A step that is called again and again outside of a graph is captured by the cache itself: a replay
is one launch instead of six.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from avow.core import Certificate, Cost, LazyCertificate, Method, Problem, Sizes
from avow.core.certify import absolute_errors, relative_errors
from avow.core.requirement import INDEPENDENT
from avow.methods.exact import Exact
from avow.methods.sparse import Sparse
from avow.numerics.rounding import tiny, unit
from avow.numerics.sketch import GROUP

if TYPE_CHECKING:
    from avow.kernels.append_tokens import TokenStore
    from avow.kernels.hot_rows import HotRows

# What kernels can multiply, how many rows may share a key head (its query heads times the queries of each), how wide
# heads may be, and of how many tokens they can draw.
_TYPES, ROWS, _WIDEST = (torch.bfloat16, torch.float16, torch.float32), 64, 256
_DRAWABLE = 2**24
# Of a tolerance these shares are aimed at by what is not read, and by draws; the rest is for rounding, and for guesses
# that were off.
_AIM, _AIM_OF_DRAWS = 0.6, 0.45
# Shorter heads are read in full without a look at the sketch.
SHORTEST = 2**12
# Steps that a cache keeps captured, each for other arguments.
_GRAPHS = 4
# The host looks at the bounds of every step at first, then of one in so many: a look costs as much as a launch.
_NOTICE = 16
# What the kernels' bounds assume of a GPU.
_SUMS = "tensor cores sum in float32, with twice its unit"
_POWERS = "ex2.approx is right to two units of float32, lg2.approx to 2^-21"


class Asked(NamedTuple):
    """What a step is asked for, beside its queries."""

    tol: float
    confidence: float
    scale: float
    always: bool
    """Whether the sketch is used whatever it saves."""
    window: int | None = None
    """How many tokens a query sees, if not all."""
    whole: str | None = None
    """Why all tokens are read, if they are."""

    @property
    def drop(self) -> float:
        """The error that is aimed at by what is not read."""
        return self.tol * (_AIM if self.confidence == 1 else _AIM_OF_DRAWS)


@dataclass
class _Notice:
    """Bounds on their way to the host: they say whether something is wrong that only the host can do about."""

    bounds: Tensor
    done: torch.cuda.Event | None
    tol: float

    @property
    def arrived(self) -> bool:
        return self.done is None or self.done.query()

    @property
    def ill(self) -> bool:
        return not bool((self.bounds <= self.tol).all())


class Replayed:
    """A call on tensors of the same shapes again and again: from the second one on, the replay of its CUDA graph.

    What it returns is written over by the next call. A copy of whoever has it must make its own.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._called = call, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        if not self._called:
            # Kernels are loaded now: that cannot be captured.
            self._called = True
            return self._call(*inputs)
        if self._graph is None:
            self._inputs, graph = tuple(x.clone() for x in inputs), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = self._call(*self._inputs)
            self._graph = graph
        for own, x in zip(self._inputs, inputs, strict=True):
            own.copy_(x)
        self._graph.replay()
        return self._result


class _StepReport(NamedTuple):
    """What a step reported, of which tokens, what it was asked, and its queries' shape and type."""

    report: Float32[Tensor, "5 b h"]
    reads: Int32[Tensor, "bg spans 2"] | None
    """Of listed rows, how many were read on the device and from host memory, if some are on the device."""
    store: TokenStore
    asked: Asked
    shape: tuple[int, ...]
    dtype: torch.dtype
    offload: bool
    """Whether keys and values are in host memory."""


@dataclass
class _Last:
    """What the last compiled step reported."""

    step_report: _StepReport | None = None

    @property
    def fields(self) -> dict[str, Any]:
        assert self.step_report is not None
        return _fields(self.step_report)


@dataclass
class KernelSteps:
    """Decoding steps by kernels, and what was learnt from them."""

    _states: dict[bool, Int32[Tensor, "4"]] = field(default_factory=dict, repr=False)
    _reports: dict[tuple[int, ...], tuple[Float32[Tensor, "5 b h"], Int32[Tensor, "bh circle"] | None]] = field(
        default_factory=dict, repr=False
    )
    """With histograms, by batch, heads and number of the queries; kept, since a captured graph writes to them. Steps
    that read all tokens have their own, and no histograms.
    """
    report: Float32[Tensor, "5 b h"] | None = field(default=None, repr=False)
    """That of the last step: bounds are its first row, shares of tokens read the last."""
    _seed: Tensor | None = field(default=None, repr=False)
    _notice: _Notice | None = field(default=None, repr=False)
    _graphs: dict[Any, Replayed] = field(default_factory=dict, repr=False)
    """Steps by what is asked of them."""
    _steps: int = 0
    _next_notice: int = 0
    """The step whose bounds the host gets to see: each time twice as far ahead, up to a limit."""
    _landing: tuple[Tensor, torch.cuda.Event] | None = field(default=None, repr=False)
    """Where bounds arrive on the host, and the event that says so."""
    _last: _Last = field(default_factory=lambda: _Last(), repr=False)
    latest: LazyCertificate = field(init=False, repr=False)
    """Tells of the last compiled step whenever it is looked at."""

    def __post_init__(self) -> None:
        # Nothing here may refer to itself: what waits for the garbage collector may be freed while a graph is captured,
        # and a CUDA graph that is freed then ends the capture.
        last = self._last
        self.latest = LazyCertificate.of(lambda: last.fields, follows=True)

    def __reduce__(self) -> tuple[type[KernelSteps], tuple[()]]:
        """Copies and files start over: another cache learns for itself."""
        return KernelSteps, ()

    def forget_addresses(self) -> None:
        """Captures nothing that reads buffers which have moved."""
        self._graphs.clear()

    @staticmethod
    def unfit(problem: Problem, tol: float, confidence: float) -> str:
        """Why the kernels cannot do a step; empty if they can."""
        rows = problem.q.shape[1] // problem.k.shape[1] * problem.q.shape[2]
        return unfit_rows(rows, problem.k.shape[2], problem.q.dtype, problem.scale, tol, confidence)

    @property
    def ill(self) -> bool:
        """Whether the last step that is known to be done has a bound above its tolerance."""
        if self._notice is None or not self._notice.arrived:
            return False
        if not self._notice.ill:
            self._notice = None
        return self._notice is not None

    def found_ill(self) -> bool:
        """The same, said once."""
        ill = self.ill
        if ill:
            self._notice = None
        return ill

    @torch.inference_mode(False)  # what it keeps is written to outside of that mode, too
    @torch.no_grad()
    def step(
        self,
        q: Float[Tensor, "b h n d"],
        store: TokenStore,
        asked: Asked,
        generator: torch.Generator | None = None,
        sinks: Float[Tensor, "h"] | None = None,
        direct: bool = False,
        hot: HotRows | None = None,
        offload: bool = False,
    ) -> tuple[Tensor, Certificate]:
        """The answers to the last queries of each head, with their certificate; `direct` captures no graph for them."""
        state, own, counts = self._written(q, asked)
        self.report = own
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        seed = self._next_seed(q.device, generator) if asked.confidence < 1 else None
        rows = q.detach().resolve_neg().contiguous()
        if not q.is_cuda or capturing or direct or generator is not None:
            out = _decode(rows, store, hot, asked, state, own, counts, seed, sinks)
        else:
            # What a graph reads stays where it was: sinks are known by their place and by how they lie there.
            key = rows.shape, asked, None if sinks is None else (sinks.data_ptr(), sinks.stride(), sinks.dtype)
            if key not in self._graphs:
                if len(self._graphs) >= _GRAPHS:
                    self._graphs.clear()
                self._graphs[key] = Replayed(lambda x: _decode(x, store, hot, asked, state, own, counts, seed, sinks))
            out = self._graphs[key](rows).clone()
        report = own if capturing else own.clone()
        if not (capturing or direct) and self._notice is None and self._steps >= self._next_notice:
            self._notice = self._sent(report, asked.tol)
            self._next_notice = self._steps + min(self._steps, _NOTICE)
        self._steps += 1
        reads = None if hot is None else hot.reads if capturing else hot.reads.clone()
        step_report = _StepReport(report, reads, store, asked, tuple(q.shape), q.dtype, offload)
        return out, LazyCertificate.of(lambda: _fields(step_report), capturing)

    def doubt(self) -> None:
        """Take the last step for one with a bound above its tolerance."""
        if self.report is not None:
            self._notice = _Notice(torch.full_like(self.report[0], torch.inf), None, 1.0)

    def compiled_step(
        self,
        q: Tensor,
        store: TokenStore,
        asked: Asked,
        sinks: Tensor | None,
        hot: HotRows | None = None,
        offload: bool = False,
    ) -> Tensor:
        """The answers inside of `torch.compile`, which sees one operator; `latest` is their certificate."""
        state, own, counts = self._written(q, asked)
        seed = None
        if asked.confidence < 1:
            if self._seed is None:
                self._seed = torch.randint(2**62, (1,), device=q.device)
            seed = self._seed
        reads, extra = None if hot is None else hot.reads, None if sinks is None else sinks.detach()
        self._last.step_report = _StepReport(own, reads, store, asked, tuple(q.shape), q.dtype, offload)
        return _decode(q.detach(), store, hot, asked, state, own, counts, seed, extra)

    def _written(
        self, q: Tensor, asked: Asked
    ) -> tuple[Int32[Tensor, "4"] | None, Float32[Tensor, "5 b h"], Int32[Tensor, "bh circle"] | None]:
        """The state, the report and the histograms that steps of such queries write to."""
        from avow.kernels.finalize import blank_report
        from avow.kernels.pausing import blank_state
        from avow.kernels.planning import blank_counts

        b, h, n, _ = q.shape
        if asked.whole is not None:
            if (b, h, n, 0) not in self._reports:
                self._reports[b, h, n, 0] = blank_report(b, h * n, q.device), None
            return None, *self._reports[b, h, n, 0]
        if asked.always not in self._states:
            shortest = 0 if asked.always else SHORTEST
            self._states[asked.always] = blank_state(q.device, shortest, asked.always)
        if (b, h, n) not in self._reports:
            self._reports[b, h, n] = blank_report(b, h * n, q.device), blank_counts(b * h * n, q.device)
        return self._states[asked.always], *self._reports[b, h, n]

    def _sent(self, report: Tensor, tol: float) -> _Notice:
        """Bounds under way: a copy to memory that a GPU writes while the host goes on."""
        if not report.is_cuda:
            return _Notice(report[0], None, tol)
        if self._landing is None or self._landing[0].shape != report.shape[1:]:
            self._landing = torch.empty(report.shape[1:], pin_memory=True), torch.cuda.Event()
        there, done = self._landing
        there.copy_(report[0], non_blocking=True)
        done.record()
        return _Notice(there, done, tol)

    def _next_seed(self, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """The seed of a step's draws: a generator's next number, or what the step before left."""
        if generator is None and self._seed is not None and self._seed.device == device:
            return self._seed
        home = torch.device("cpu") if generator is None else generator.device
        number = torch.randint(2**62, (1,), generator=generator, device=home).to(device, non_blocking=True)
        if generator is None:
            self._seed = number
        return number


def _decode(
    q: Tensor,
    store: TokenStore,
    hot: HotRows | None,
    asked: Asked,
    state: Tensor | None,
    report: Tensor,
    counts: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    from avow.kernels.operators import decode_step, exact_step

    held = [x for x in store[: len(store) - 1] if x is not None]  # whose rows are hot is among those of `hot`
    if state is None or counts is None:
        return exact_step(q, held, report, sinks, asked.scale, asked.window)
    # What draws are aimed at follows from the limit, which single precision may round up.
    limits = asked.drop, asked.tol * (1 - 2.0**-20), asked.confidence, asked.scale
    return decode_step(q, held, list(hot or ()), state, report, counts, seed, sinks, *limits, asked.window)


def unfit_rows(rows: int, tokens: int, dtype: torch.dtype, scale: float, tol: float, confidence: float) -> str:
    """Why the kernels cannot answer so many rows that share a key head; empty if they can."""
    reasons = {
        f"{rows} queries share a key head": rows > ROWS,
        "the scale is not above 0": not scale > 0,
        f"the kernels sample at most {_DRAWABLE} tokens": confidence < 1 and tokens > _DRAWABLE,
        "rounding takes most of the tolerance": dtype in _TYPES and not tol >= 2.5 * unit(dtype),
    }
    return next((text for text, holds in reasons.items() if holds), "")


def fits(dim: int, value_dim: int, dtype: torch.dtype, bits: int | None, moves: bool) -> str:
    """Why kernels cannot keep and read a cache of this shape, whose tokens may move; empty if they can."""
    reasons = {
        f"the kernels do not support {dtype}": dtype not in _TYPES,
        "the sketch does not have 4 bits": bits != 4,
        f"{dim} dimensions are not a multiple of 16 up to {_WIDEST}": dim % 16 != 0 or dim > _WIDEST,
        f"{value_dim} dimensions of values are more than {_WIDEST}": value_dim > _WIDEST,
        "the tokens of a sliding window move; with capacity= they stay": moves,
    }
    return next((text for text, holds in reasons.items() if holds), "")


def absent(device: torch.device) -> str:
    """Why there are no kernels for a device."""
    if device.type != "cuda":
        return f"kernels are for GPUs, and the cache is on {device.type}"
    from avow.kernels.availability import why_not

    return why_not(device)


def _fields(step_report: _StepReport) -> dict[str, Any]:
    """What a report says of the answers to queries of a shape; a look at it waits for the step to be done."""
    report, _, store, asked, shape, dtype, _ = step_report
    chance, (b, h, n, d), e = 1 - asked.confidence, shape, store.v.shape[-1]
    g = store.used.numel() // b
    rows, lengths, most, _, share = (x.double().view(b, h, n) for x in report)
    # Answers were measured in float32, to 2^-13, and then rounded to their type.
    floors = (lengths * (1 - 2.0**-11 - unit(dtype)) - e**0.5 * tiny(dtype)).clamp(min=0.0)
    # The longest value is at least `most`, and hardly longer.
    own = relative_errors(absolute_errors(rows, most * (1 + 2.0**-18)), floors)
    own = torch.where(rows < torch.inf, own, torch.inf)
    read = float(share.mean())
    parted = f"{read:.1%} of the tokens were read in full, those that {'were drawn' if chance else 'may matter'}"
    reason = parted if read < 1 else "all tokens were read: the sketch saved nothing"
    method: Method = Sparse(bits=4, drop=asked.drop, chance=chance)
    if asked.whole is not None:
        method, reason = Exact(), asked.whole
    return {
        "method": method.name,
        "parameters": method.parameters,
        "target": method.target,
        "kind": "statistical" if chance else "deterministic",
        "rows": rows,
        "bound": float(rows.amax()),
        "relative_rows": own,
        "relative": float(own.amax()),
        "confidence": asked.confidence,
        "coverage": 1.0,
        "rounding": True,
        "assumptions": (_SUMS, _POWERS, *((INDEPENDENT,) if chance else ())),
        "reason": reason,
        "cost": _cost(step_report, method.cost(Sizes(b, h, g, n, int(store.used.amax()), d, e, dtype))),
    }


def _cost(step_report: _StepReport, cost: Cost) -> Cost:
    """What a step did, with the rows that it read on the device and from host memory."""
    if not step_report.offload:
        return cost
    tokens, (_, _, n, _), window = step_report.store.used.double(), step_report.shape, step_report.asked.window
    if window is not None:
        tokens -= (tokens - window - n + 1).clamp(min=0).div(GROUP, rounding_mode="floor") * GROUP
    share = step_report.report[4].double().reshape(len(tokens), -1).amax(-1)
    listed = share * tokens
    near = torch.zeros_like(tokens)
    if step_report.reads is not None and step_report.asked.whole is None:
        near, far = step_report.reads.double().sum(1).unbind(-1)
        # Heads that a list did not suffice for were read in full besides.
        listed = near + far + torch.where((share == 1) & (near + far < tokens), tokens, 0.0)
    return dataclasses.replace(cost, hits=int(near.sum()), misses=round(float((listed - near).sum())))
