r"""The last queries of each head from a part of a cache's tokens on a CPU, in compiled code (`cpu_stages`); the proof.

A step looks at the sketch of all keys, once for all queries that share a key head, its rows. It chooses limits, reads
the tokens whose key is above the limit of any row, and the open group; then it proves what the rest may have moved each
row. If that is too much it reads more, at last everything. Heads that would read most of their tokens read all of them,
without a look for some steps.

A row sees the tokens up to its own, perhaps within a window: T and the sums below are over tokens that it sees. Others
that are read for its neighbours weigh exactly 0. Its unit is the longest value that it sees. A sink is a token that is
always read, whose value is 0; its logit is rounded in float64.

**The bound.** Logits are in bits: :math:`\lambda_j = a \cdot k_j` with :math:`a = q \cdot scale \cdot \log_2 e`. With u
the unit of float32, :math:`\gamma_n = nu/(1 - nu)`, and :math:`p = a \cdot size`, as keys are in units of their sketch:

1. The sketch: :math:`|a \cdot k_j - p \cdot \hat k_j| \le \|Ap\| \cdot radius_j` [claim residual-cauchy-schwarz].
   :math:`p \cdot \hat k_j = \sum p_c zero_c + \sum (p_c scale_c) code_{jc}`. In the first sum a term meets at most
   d/16 + 24 roundings, in the second d + 4: p and its product with the scale, two of the first multiply-add, then one
   each. By Cauchy and Schwarz both are off by at most :math:`\gamma_{d+8} \|p\| reach` (with 16 more for d below 32),
   for reach is at least the length of :math:`|zero| + 15 scale`. Then three additions round numbers of at most
   :math:`2\|p\| reach + \|Ap\| radius`: less than :math:`8u \|p\| reach` and 8u of the last term. So

   .. math:: U_j = p \cdot \hat k_j + \|Ap\| radius_j + tilt \cdot reach + floor \ge \lambda_j

   with :math:`tilt = \|p\| (\gamma_{d+24} + 16u)`, and :math:`\|Ap\|` rounded up by a part of 16u. What is below 2^-126
   may be taken for zero, which moves a logit by less than the floor, for :math:`\|p\| \le 2^{20}` and
   :math:`reach \le 2^{40}`: else the query is answered elsewhere, the group always read. So is a group with
   :math:`\|p\| reach > 2^{13}`.
2. What is not read weighs at most :math:`L = \sum_T 2^{U_j - origin}`, and M with each value's length. Differences down
   to -126 are rounded by 2^-17 at most, `power_of_two` by a part of 2^-20; smaller powers are taken for 2^-126; lanes
   add 32 terms before float64 goes on. A part of 2^-12 covers it all.
3. What is read: a product :math:`a \cdot k_j` meets d/16 + 24 roundings at most, and its difference from the largest
   one of twice its size. So logarithms of weights are off by :math:`stray = \ln 2 \cdot \|a\| \|k\| (\gamma_{d/16+24} +
   4u) + 2^{-19}` at most, averages by :math:`2\tanh(stray/2)` [claim softmax-perturbation]; sums of 64 weighted
   values, and of weights, by :math:`\gamma_{72}` each; all in units of the longest value.
4. With Z the computed sum of the weights that were read and o their average [claim tail-mass-output],

   .. math:: \|o^* - o\| \le \frac{M + L (\|o\| + rounding)}{Z} 2^{origin - top} e^{2 stray} + rounding.

   The rest is float64, for which a part of 10^-9 is added; `Sparse` adds what rounding to the answer's type moves.

Nothing is assumed of the order of threads, of fused multiply-adds, or of subnormal numbers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from avow.core import Certificate, Computed, Cost, LazyCertificate, Norms, Problem, Sizes
from avow.core.certify import certify
from avow.core.quantities import count
from avow.errors import is_out_of_memory
from avow.methods.exact import Exact
from avow.methods.sparse import Sparse, Trace
from avow.numerics.norms import row_norms, slack
from avow.numerics.rounding import tiny
from avow.numerics.sketch import GROUP

_LOG = logging.getLogger(__name__)
_EXACT = Exact()
# Loading what was compiled before takes a second or two.
_PATIENCE = 5.0
_COMPILING = "compiling CPU decoding steps, once per installation: about half a minute"
# Types of tokens, as compiled code numbers them.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Why compiled code gives a step up, by its `status`.
_WHY_NOT = (
    "",
    "logits are too large for float32",
    "rounding in float32 would take more than a tenth of the tolerance",
    "sums are not finite",
)
# Lengths of values for which float32 has room.
_FAINT, _LONG = 1e-15, 1e15
# Shorter caches are read in full. On two cores a step takes 0.7 to 1.2 of PyTorch's time at 8,192 tokens, which may be
# in a processor's caches, and half of it at 32,768. Making a sketch, some 2 µs a token, pays after dozens of steps.
SHORTEST = 16_384
# How many queries may share a key head, and of how many a look at the sketch saves more time than it takes: products
# with the sketch take as long as those with keys, which are read from memory once for all queries.
MOST_ROWS, LOOK_ROWS = 256, 8


class CachedTokens(NamedTuple):
    """The tokens of a cache as they lie in its buffers, from a group on, and what is known of them."""

    buffers: Mapping[str, Tensor]
    metric: Float32[Tensor, "b g d"]
    size: Float64[Tensor, "b g"]
    first: int
    """Where in the buffers the tokens begin: with a group, in which the first query's window begins."""
    tokens: int
    window: int
    """How many tokens a query sees at most."""
    longest_key: list[float]
    longest: Float64[np.ndarray, "H n"]
    """Of the values that each of the last queries sees."""
    least: float
    """A lower bound on the length of any value."""


def looks(rows: int, sparse: bool) -> bool:
    """Whether so many queries that share a key head look at its sketch: if that saves time, or is asked for."""
    return rows <= LOOK_ROWS or sparse


def not_installed() -> str:
    """Why no step can be taken without a look at the compiler: numba is missing; empty if it is there."""
    return "" if importlib.util.find_spec("numba") else "numba is not installed (pip install 'avow[cpu]')"


def unavailable() -> str:
    """Why no step can be taken on this machine, empty if steps can; asked first, it compiles the stages if need be."""
    # Asked every time: it may be installed while this process runs.
    return not_installed() or _uncompiled()


@functools.cache
def _uncompiled() -> str:
    return prepare(_LOG.warning)


def prepare(tell: Callable[[str], object]) -> str:
    """What `unavailable` says, found out again; `tell` is called with a line if that takes long."""
    if missing := not_installed():
        return missing
    # Numba alone knows whether it finds what it compiled before, and tells when it is done.
    late = threading.Timer(_PATIENCE, tell, [_COMPILING])
    late.daemon = True
    late.start()
    try:
        _stages()
    except Exception as error:  # whatever a compiler or its installation may come up with
        if is_out_of_memory(error):
            raise
        return f"numba could not compile ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    finally:
        late.cancel()
    return ""


@functools.cache
def _stages() -> ModuleType:
    """The compiled stages; the first process on a machine that asks for them waits for the compiler."""
    from avow.decode import cpu_stages

    return cpu_stages


@functools.cache
def _openmp() -> Any:
    """The library whose threads torch uses, if it is GNU's: they are awake already when a step begins; else None."""
    try:
        return ctypes.CDLL("libgomp.so.1", mode=getattr(os, "RTLD_NOLOAD", 0)).GOMP_parallel
    except (OSError, AttributeError):
        return None


def _run(step: Any, frame: int, threads: int) -> None:
    """Have threads take a step together; returns when it is done and none is left in it."""
    parallel = _openmp()
    if threads == 1:
        step.ctypes(frame)
    elif parallel is not None:
        parallel(ctypes.c_void_p(step.address), ctypes.c_void_p(frame), threads, 0)
    else:
        others = [threading.Thread(target=step.ctypes, args=(frame,)) for _ in range(threads - 1)]
        for other in others:
            other.start()
        step.ctypes(frame)
        for other in others:
            other.join()


@dataclass
class CpuSteps:
    """Decoding steps of a cache, and the space they work in."""

    _space: _Space | None = field(default=None, repr=False)
    _methods: dict[tuple[float, torch.dtype], Sparse] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[type[CpuSteps], tuple[()]]:
        """Copies and files start over: another cache works in a space of its own."""
        return CpuSteps, ()

    def step(
        self,
        q: Float[Tensor, "b h n d"],
        held: CachedTokens,
        scale: float | None,
        tol: float,
        learnt: Tensor | None,
        sparse: bool = False,
        sinks: list[float] | None = None,
    ) -> tuple[Tensor, Certificate, Tensor] | str:
        """The answer, its certificate, and what the next step may begin with; or why float32 does not serve.

        `learnt` is what the step before gave, if any. The bound is at most `tol`. If all tokens were read, the
        certificate is that of exact attention, unless `sparse` was asked for.
        """
        (b, h, n, d), (g, _, e) = q.shape, held.buffers["values"].shape[1:]
        siblings, groups = h // g, held.tokens // GROUP
        if groups == 0:
            return "nothing is sketched"
        least, most = float(held.longest.min()), float(held.longest.max())
        if held.buffers["norms"].dtype != torch.float32 or not _FAINT <= least <= most <= _LONG:
            return "values are too long or too short for float32"
        shrunk = 1 - 2 * slack(e, q.dtype) - 2.0**-22
        # What an answer in float16 loses below its normal range must not be dropped besides. `Sparse.tune` has room for
        # less than a millionth; more is rounded up to a power of two, so that steps go on with the same method.
        vanished = math.sqrt(e) * tiny(q.dtype) / (least * shrunk)
        method = self._method(tol if vanished < 2e-7 else tol - 2.0 ** math.ceil(math.log2(vanished)), q.dtype)
        if method.drop <= 0:
            return "rounding leaves nothing of the tolerance to drop"
        if learnt is None or learnt.shape != (b, g, siblings + 2):
            with torch.inference_mode(False):  # it is written into and copied outside, too
                learnt = torch.tensor([0.5] * siblings + [0.0, 0.0], dtype=torch.float64).repeat(b, g, 1)
        sizes = (b * g, siblings, n, d, e)
        if self._space is None or self._space.sizes != sizes or self._space.groups < groups:
            self._space = _Space(sizes, groups)
        whole = not looks(siblings * n, sparse)
        scale = 1 / math.sqrt(d) if scale is None else float(scale)
        rows = q.detach().resolve_neg().float().contiguous()
        space = self._space
        unit = held.longest * shrunk
        status = space.step(rows, held, unit, scale * math.log2(math.e), method.drop, learnt, sinks, whole)
        if status:
            return status
        out = torch.from_numpy(space.out).to(q.dtype).view(b, h, n, e)
        # Captured now: whoever has the answer may write into it before anybody looks.
        answered = _Answered(q.detach().clone(), out.clone(), space.reports.copy(), unit)
        later = functools.partial(
            _fields,
            answered,
            held._replace(buffers={}),
            scale,
            method,
            "" if sparse else space.why_whole(learnt, whole),
            space.nbytes,
        )
        return out, LazyCertificate.of(later), learnt

    def _method(self, tol: float, dtype: torch.dtype) -> Sparse:
        key = tol, dtype
        if key not in self._methods:
            one = torch.zeros(1, 1, 1, 1, dtype=dtype)
            sizes = Problem.of(one, one, one).sizes
            self._methods = {key: Sparse(**Sparse.tune({}, sizes, tol, 1.0))}
        return self._methods[key]


class _Answered(NamedTuple):
    """Copies of a step's queries and answers, and what is known of these."""

    q: Float[Tensor, "b h n d"]
    out: Float[Tensor, "b h n e"]
    reports: Float64[np.ndarray, "H r 2"]
    unit: Float64[np.ndarray, "H n"]


def _fields(
    answered: _Answered, held: CachedTokens, scale: float, method: Sparse, whole: str, room: int
) -> dict[str, Any]:
    """The fields of a certificate; `whole` says why all tokens were read, if they were: then it is one of `Exact`.
    `room` is how many bytes the step worked in.

    Rows see different tokens, and values of different lengths: to the certificate each is a head of its own.
    """
    stages, (q, out), (b, h, n, d) = _stages(), answered[:2], answered.q.shape
    g, width, rows = held.size.shape[1], out.shape[3], (b, h * n)

    def of_rows(x: np.ndarray) -> Float64[Tensor, "b r"]:
        """What query heads that share keys have in common, (H, n) or (H, 1)."""
        shared = torch.from_numpy(x).view(b, g, 1, -1)
        return shared.expand(b, g, h // g, n).reshape(rows)

    nothing = q.new_zeros(1)
    own = [min(held.tokens - n + 1 + i, held.window) for i in range(n)]
    keys, values = (nothing.expand(*rows, max(own), x) for x in (d, width))
    problem = Problem.of(q.reshape(*rows, 1, d), keys, values, scale=scale)
    longest = of_rows(held.longest)
    ends = torch.stack([longest.clamp(max=held.least), longest], -1)
    key = of_rows(np.array(held.longest_key)).unsqueeze(-1).expand(ends.shape)
    problem = problem.with_norms(Norms(row_norms(problem.q, "q"), key, ends, slack(max(d, width), q.dtype) + 2.0**-22))
    report = torch.from_numpy(answered.reports).view(*rows, 1, stages.REPORT)
    lost = (max(own) + 4) * math.sqrt(width) * tiny(torch.float64) * longest.unsqueeze(-1)
    seen = of_rows(np.array([own] * (b * g), dtype=np.float64)).unsqueeze(-1)
    off, read = report[..., stages.OFF], report[..., stages.COUNT] * (max(own) / seen)
    trace = Trace(off, of_rows(answered.unit).unsqueeze(-1), read, lost, read)
    fields = dict(vars(certify(method, problem, Computed(out.reshape(*rows, 1, width), trace), 1.0)))
    fields |= {name: fields[name].view(b, h, n) for name in ("rows", "relative_rows")}
    sizes = Sizes(b, h, g, n, max(own), d, width, q.dtype)
    fields["cost"] = _EXACT.cost(sizes) if whole else _cost(sizes, float(read.sum()), room)
    if whole:
        fields |= {"method": _EXACT.name, "parameters": _EXACT.parameters, "reason": whole}
    return fields


def _cost(sizes: Sizes, read: float, room: int) -> Cost:
    """What a step cost: products of its rows with the sketch of all keys, and with the tokens that were read."""
    rows, z = sizes.batch * sizes.heads * sizes.queries, sizes
    return Cost(2 * rows * z.keys * z.dim + round(2 * read * (z.dim + z.value_dim)), rows * z.keys, 1, room)


class _Space:
    """The working arrays of steps of the same sizes, with room for a number of groups."""

    def __init__(self, sizes: tuple[int, int, int, int, int], groups: int) -> None:
        self.sizes, self.groups, stages = sizes, groups + groups // 8 + 1, _stages()
        heads, siblings, queries, d, e = sizes
        chunks, many = -(-self.groups // stages.CHUNK_GROUPS), siblings * queries
        rows = (heads, many)
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "sketch_q": ((*rows, d), np.float32),
            "key_q": ((*rows, d), np.float32),
            "upper": ((*rows, self.groups * GROUP), np.float32),
            "constants": ((*rows, stages.CONSTANTS), np.float64),
            "bins": ((*rows, stages.BINS), np.float64),
            "chunk_sums": ((heads, chunks, many, 2), np.float64),
            "partials": ((stages.ATTEMPTS, heads, chunks, many, stages.SUMS + e), np.float64),
            "out": ((*rows, e), np.float64),
            "reports": ((*rows, stages.REPORT), np.float64),
            "flags": ((heads, stages.FLAGS), np.int64),
            "counter": ((stages.PHASES, stages.PHASE // 8), np.int64),
            "longest_key": ((heads,), np.float64),
            "longest": ((heads, queries), np.float64),
            "unit": ((heads, queries), np.float64),
            "sinks": ((heads, siblings), np.float64),
        }
        self._arrays: dict[str, np.ndarray] = {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}
        self.out, self.reports, self._counter = (self._arrays[name] for name in ("out", "reports", "counter"))
        self.nbytes = sum(x.nbytes for x in self._arrays.values())
        self._frame = np.zeros(1, stages.FRAME)
        self._address = self._frame.ctypes.data
        # Fields in plain views: a record's own take ten times as long.
        self._whole: Any = self._frame.view(np.int64).data
        self._real: Any = self._frame.view(np.float64).data
        self._at: dict[str, int] = stages.AT
        self._held: tuple[Mapping[str, Tensor], int] | None = None
        self._set(heads=heads, siblings=siblings, queries=queries, dim=d, value_dim=e, width=-(-d // 2))
        self._set(**{name: x.ctypes.data for name, x in self._arrays.items()})

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._whole[self._at[name]] = value

    def _point_at(self, buffers: Mapping[str, Tensor], first: int) -> None:
        """Have the frame tell where the tokens and their sketch lie, from a group on."""
        self._held = buffers, first
        keys = buffers["keys"]
        self._set(token_type=_TYPES[keys.dtype], room=keys.shape[2], group_room=buffers["reach"].shape[2])
        for name in ("keys", "values", "norms", "codes", "scale", "zero", "radius", "reach"):
            x = buffers[name]
            place = first if name in ("keys", "values", "norms") else first // GROUP
            self._set(**{name: x.data_ptr() + place * x.stride(2) * x.element_size()})

    def step(
        self,
        q: Float32[Tensor, "b h n d"],
        held: CachedTokens,
        unit: Float64[np.ndarray, "H n"],
        factor: float,
        drop: float,
        learnt: Float64[Tensor, "b g r"],
        sinks: list[float] | None,
        whole: bool,
    ) -> str:
        """Takes a step, which leaves its answers in `out` and `rows`; or says why float32 does not serve."""
        stages, groups = _stages(), held.tokens // GROUP
        if self._held is None or self._held[0] is not held.buffers or self._held[1] != held.first:
            self._point_at(held.buffers, held.first)
        for name, x in (("longest_key", held.longest_key), ("longest", held.longest), ("unit", unit)):
            self._arrays[name][:] = x
        own = self._arrays["sinks"].reshape(held.size.shape[0], -1)
        own[:] = -math.inf if sinks is None else [x * math.log2(math.e) for x in sinks]
        self._real[self._at["factor"]], self._real[self._at["drop"]] = factor, drop
        self._set(tokens=held.tokens, window=held.window, groups=groups, chunks=-(-groups // stages.CHUNK_GROUPS))
        self._set(q=q.data_ptr(), metric=held.metric.data_ptr(), size=held.size.data_ptr(), learnt=learnt.data_ptr())
        self._set(whole=whole, attempt=0, status=0)
        self._counter.fill(0)
        _run(stages.step, self._address, torch.get_num_threads())
        status, (_, done, late) = self._whole[self._at["status"]], self._counter[4 + 3 * self.attempt].tolist()
        if status == 0 and (not done or late):
            raise MemoryError("not enough memory for a decoding step")
        return _WHY_NOT[status]

    @property
    def attempt(self) -> int:
        """How many cuts were not enough in the last step."""
        return int(self._whole[self._at["attempt"]])

    def why_whole(self, learnt: Float64[Tensor, "b g r"], asked: bool) -> str:
        """Why all tokens of all heads were read; empty if some were not."""
        if asked:
            rows = self.sizes[1] * self.sizes[2]
            return f"{rows} queries share a key head: reading all tokens is faster than choosing"
        if not self._arrays["flags"][:, _stages().WHOLE].all():
            return ""
        looked, left = bool((learnt[..., -2] == learnt[..., -1]).any()), int(learnt[..., -1].amin())
        if looked:
            return "most of the tokens would have to be read in full"
        return f"sparse decoding did not pay; retrying in {count(left, 'step') if left else 'the next step'}"
