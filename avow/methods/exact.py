r"""Softmax attention itself, on the fastest kernel the device offers, with the rounding it commits proved.

With u the unit round-off of the accumulator and :math:`S_i = |scale| \|q_i\| \max_j \|k_j\|`, the computed
logits are within :math:`\delta_i \approx \gamma_d S_i` of the real ones, so the weights move by at most
:math:`2\tanh(\delta_i/2)`; sums over keys add :math:`\gamma`, half-precision weights and outputs their own
unit. All of it is divided by the largest visible value norm, which therefore cancels.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention  # torch.nn.functional's may have been replaced, by ours even
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from avow.core import BoundEstimate, Computed, Cost, Method, Norms, Problem, Promise, Sizes, dtype_name, has_tangents
from avow.core.timing import timed
from avow.errors import is_out_of_memory
from avow.numerics import heads, rounding
from avow.numerics.cpu_sums import MOST_ROWS, fewest_rows
from avow.numerics.masks import additive
from avow.numerics.norms import norm_floor
from avow.numerics.softmax import softmax_average
from avow.parameters import one_of, param

# Values that are all shorter are brought near one before they are summed.
_FAINT = 2.0**-60
# Exponentials of more say no more.
_HOPELESS = 700.0
# Taken here, because Dynamo of torch 2.15 cannot trace an enumeration's value.
_FLASH, _ERROR = SDPBackend.FLASH_ATTENTION.value, SDPBackend.ERROR.value


@dataclass(frozen=True)
class Exact(Method):
    """Softmax attention in the inputs' own precision, or in a wider one."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "softmax attention on the best PyTorch kernel; its rounding proved"
    is_exact: ClassVar[bool] = True
    rests_on_lengths: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    precision: str = param("native", one_of("native", "float32", "float64"), "arithmetic to compute in")

    def arithmetic(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the tensors the kernel is given."""
        if self.precision == "native":
            return dtype
        return torch.promote_types(dtype, getattr(torch, self.precision))

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p, kind = problem, self.arithmetic(problem.q.dtype)
        (n, d), (s, e) = p.q.shape[-2:], p.v.shape[-2:]
        q, k, v = p.q, p.k, p.v
        if kind != q.dtype:
            q, k, v = (x.to(kind) for x in (q, k, v))
        # The fused kernels want one width; zero features change no logit and zero values are cut off again.
        if d != e:
            q, k, v = (pad(x, (0, max(d, e) - x.shape[-1])) for x in (q, k, v))
        scale = p.scale
        if scale <= 0:
            # The fused kernels multiply hidden logits, −inf, by the scale: its sign goes into the queries.
            q, scale = (-q, -scale) if scale < 0 else (0 * q, 1.0)
        masked = p.allowed is not None or p.bias is not None
        mask = additive(p, rounding.accumulator(kind)) if masked else None
        mask = None if mask is None else mask.expand(*mask.shape[:2], n, s)
        size = 1.0 if p.known_norms is None else _size(p.known_norms, p.q.dtype)
        out = _fastest(q, k, v if size == 1 else v / size, mask, p.causal and not masked, scale)
        out = out[..., :e] if d != e else out
        return Computed(heads.cast_output(p, out if size == 1 else out * size), None if size == 1 else size)

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms = problem, problem.norms
        keys = heads.per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])  # (b, h, 1)
        reach = norms.q * (abs(p.scale) * keys)  # S_i
        model = self.model(p, *norms.most[:2])
        # 2·tanh(δ/2) for the weights, then what sums, flushing and the output's type add.
        merging = torch.expm1(reach * model.merge_slope + model.merge_floor) if model.merge_slope else 0.0
        rows = reach.mul_(model.slope / 2).add_(model.floor / 2).tanh_().mul_(2).add_(merging).mul_(model.grown)
        rows.add_(_flushed(p, model, computed.trace or 1.0) + model.sums * (1 + model.final))
        if model.final:
            # The answer's own rounding is relative to its length, which is known by now: on flat heads that is little.
            rows = rows + model.final * rounding.SAFETY * _shares(p, computed)
        return Promise("deterministic", heads.mask_bounds(p, rows), assumptions=(self.assumption(p),))

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        norms = problem.norms
        if not self.fits(problem, *norms.most):
            return BoundEstimate(math.inf, "none", True, f"{self.arithmetic(problem.q.dtype)} would overflow")
        query, key, _ = norms.most
        model = self.model(problem, query, key)
        delta = abs(problem.scale) * query * key * model.slope + model.floor
        lost = _flushed(problem, model, _size(norms, problem.q.dtype))
        flushed = float(lost.amax()) if isinstance(lost, Tensor) else lost
        if flushed > 1 and self.arithmetic(problem.q.dtype) != torch.float64:
            return BoundEstimate(math.inf, "none", True, f"values underflow in {self.arithmetic(problem.q.dtype)}")
        merging = math.expm1(min(_HOPELESS, abs(problem.scale) * query * key * model.merge_slope + model.merge_floor))
        bound = (2 * math.tanh(delta / 2) + merging) * model.grown
        last = model.final * rounding.SAFETY  # rounding the output, which is relative to it
        bound += model.sums * (1 + model.final) + last + flushed
        return BoundEstimate(bound * rounding.SAFETY, "deterministic", True, of_answer=last * rounding.SAFETY)

    def fits(self, problem: Problem, query: float, key: float, value: float) -> bool:
        """Whether no intermediate result can overflow for norms up to these, whatever order the kernel works in."""
        kind = self.arithmetic(problem.q.dtype)
        limit, scale = rounding.safe(kind), abs(problem.scale)
        if scale > limit or (0 < scale < 1 / limit and kind != torch.float64):
            return False  # the kernel holds the scale in the type, too
        return query * key * max(1.0, scale) <= limit and value * problem.k.shape[-2] <= limit

    def model(self, p: Problem, query: float, key: float, keys: int | None = None) -> Model:
        """The constants of the bound, for norms of q and k up to these; of so many of the keys where that is said."""
        kind, dtype, device = self.arithmetic(p.q.dtype), p.q.dtype, p.q.device.type
        wide, products = rounding.accumulator(kind), rounding.products(kind, device)
        u, tiny = products.u, rounding.tiny(wide)
        d, s, e = p.q.shape[-1], p.k.shape[-2] if keys is None else keys, p.v.shape[-1]
        scale = abs(p.scale)
        # Growing with the query: the dot product, its scaling, the argument of exp (twice S at most).
        slope = products.dot(d + 8) + 8 * u
        # Not growing: underflow, of products and of what is scaled before them (by √scale, in some kernels) or after;
        # exp itself, rescaling between tiles.
        floor = 4 * d * tiny * (1 + scale + (scale + math.sqrt(scale)) * (query + key))
        floor += rounding.exponentials(s, kind, device)
        if p.bias is not None:
            # Only keys within Λ = 4S + ln s + 100 of the row's top matter; their shifted bias is at most Λ.
            slope, floor = slope + 32 * u, floor + 8 * u * (math.log(s) + rounding.NEGLIGIBLE_NATS)
            if p.kernel == "rbf":
                floor += heads.distance_rounding(p, 0.5 * scale * key**2)
                slope += 16 * rounding.unit(torch.float64)
        merge_slope, merge_floor = rounding.merging(s, kind, device)
        if p.bias is not None:
            merge_slope, merge_floor = 2 * merge_slope, merge_floor + merge_slope * rounding.NEGLIGIBLE_NATS
        if s == 1:
            # One key has all the weight, whatever its logit.
            slope = floor = merge_slope = merge_floor = 0.0
        depths = rounding.tiled_depths(s, kind, device, self._many_at_once(p))
        sums = sum(map(products.dot, depths)) + 8 * u + 4 * s * tiny + 1e-40
        if kind in (torch.bfloat16, torch.float16):
            # The kernel rounds each weight to the input type before it meets the values.
            sums += rounding.unit(kind) + s * rounding.tiny(kind)
        lost, ends = s * math.sqrt(e) * tiny, math.sqrt(e) * rounding.tiny(dtype)
        final = 0.0 if dtype == wide else rounding.unit(dtype)
        sums, lost, ends = (x * rounding.SAFETY for x in (sums, lost, ends))
        return Model(slope, floor, merge_slope, merge_floor, sums, lost, ends, final)

    def _many_at_once(self, p: Problem) -> bool:
        """Whether a CPU's kernel adds many weighted values of this type and width at once."""
        width = max(p.q.shape[-1], p.v.shape[-1])
        return p.q.device.type == "cpu" and fewest_rows(self.arithmetic(p.q.dtype), width) > 0

    def assumption(self, p: Problem) -> str:
        """What the promise rests on."""
        kind = self.arithmetic(p.q.dtype)
        wide = dtype_name(rounding.accumulator(kind))
        if p.q.device.type != "cpu":
            tiles, right = f"tiles of 32 to {rounding.LARGEST_TILE} keys", "64 ulp"
        else:
            tiles = "tiles of 512 keys" if self._many_at_once(p) else "any order"
            right = "2^-12" if kind in (torch.bfloat16, torch.float16) else "64 ulp"
        return f"the kernel accumulates in {wide}, in {tiles}, with exp right to {right}"

    def cost(self, sizes: Sizes) -> Cost:
        z, width = sizes, max(sizes.dim, sizes.value_dim)
        kind = self.arithmetic(z.dtype)
        item, wide = kind.itemsize, rounding.accumulator(kind).itemsize
        rows = z.batch * z.heads * z.queries
        pairs = rows * z.keys
        held = rows * width * item + rows * wide
        copies = z.batch * (z.heads * z.queries + 2 * z.key_heads * z.keys)
        if kind != z.dtype or z.dim != z.value_dim:
            held += copies * width * item
        if z.mask != "none":
            held += (
                z.queries * z.keys * (2 * item if z.biased else 2) if z.causal or z.mask == "full" else z.keys * item
            )
        if z.device == "cpu":
            # PyTorch's CPU kernel works on 512 keys and up to 256 rows per thread.
            tall = 256 if z.queries >= 768 else 64 if z.queries >= 192 else 32
            per_thread = tall * min(512, z.keys) + 2 * tall + tall * width
            held += torch.get_num_threads() * per_thread * (wide if item == wide else wide + item)
        if kind != z.dtype:
            held += rows * z.value_dim * (item + z.item)
        weight = 2.0 if kind == torch.float64 else 1.0
        return Cost(4 * pairs * width, pairs // (2 if z.causal else 1), 2, held, weight)

    def reference(self, problem: Problem) -> Tensor:
        return softmax_average(problem)

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Exact]:
        for precision in ("native", "float32", "float64"):
            method = cls(precision)
            if precision == "native" or method.arithmetic(sizes.dtype) != sizes.dtype:
                yield method


class Model(NamedTuple):
    """The bound (2·tanh((slope·S + floor)/2) + e^(merge_slope·S + merge_floor) − 1 + sums)·(1 + final) + final

    + (lost·size + ends)/ceiling. S is a row's largest logit, and values are summed divided by `size`.
    """

    slope: float
    floor: float
    merge_slope: float
    """The logarithm of what the weights may sum to, where parts of the keys are merged by rounded logarithms."""
    merge_floor: float
    sums: float
    lost: float
    ends: float
    """What an answer may lose to underflow in its own type."""
    final: float
    """The unit of the answer's type, where that is narrower than the sums'."""

    @property
    def grown(self) -> float:
        return (1 + self.final) * rounding.SAFETY


def _size(norms: Norms, dtype: torch.dtype) -> float:
    """The power of two that values are divided by: one, unless all are near underflow. The type has its reciprocal."""
    longest, least = norms.most[2], -1000 if dtype == torch.float64 else -100
    return 2.0 ** max(least, math.frexp(longest)[1]) if 0 < longest < _FAINT else 1.0


def _shares(p: Problem, computed: Computed) -> Tensor:
    """An upper bound on each answer's length over the longest value that its row sees; at most 1, as before rounding.

    A number rounded by way of float32 is rounded twice, which the margin of 2^-10 covers, and the sum's own rounding;
    squares of entries below 2^-60 may vanish.
    """
    norms, masked = p.norms, p.allowed is not None and p.allowed.shape[-2] > 1
    least = norms.least_value * (1 - norms.slack)
    # Rows that see different values share the shortest of all where none is near underflow: to look would cost more.
    if masked and least > 1e-10:
        longest = torch.full_like(norms.q, least)
    else:
        longest = norm_floor(heads.longest_seen(p, norms.v), norms.slack, p.v.shape[-1])
    lengths = computed.lengths
    if lengths is None:
        lengths = torch.linalg.vector_norm(computed.out.detach().float(), dim=-1).double()
    lengths = lengths * (1 + 2.0**-10) + 2.0**-60 * math.sqrt(p.v.shape[-1])
    return (lengths / longest.clamp(min=1e-300)).clamp(max=1.0).nan_to_num(nan=1.0)


def _flushed(p: Problem, model: Model, size: float) -> Tensor | float:
    """What underflow may cost a row, relative to the largest value it sees; nothing where all it sees is zero."""
    norms, lost = p.norms, model.lost * size + model.ends
    least = norms.least_value * (1 - norms.slack)
    if least > 1e-10:
        return lost / least
    longest = heads.longest_seen(p, norms.v)
    # A number divided by a tensor is computed through its reciprocal, which overflows for subnormals: hence the fill.
    relative = torch.full_like(longest, lost) / norm_floor(longest, norms.slack, p.v.shape[-1])
    return torch.where(longest > 0, relative, 0.0)


def _fastest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention on the kernel that is fastest here, among those that round as the bound says."""
    grouped = q.shape[1] != k.shape[1]
    call = functools.partial(
        scaled_dot_product_attention, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if has_tangents(q, k, v, mask):
        return _in_float64(q, k, v, mask, causal, scale)  # no fused kernel has derivatives forward
    if q.device.type == "cpu":
        return _on_cpu(q, k, v, mask, causal, scale)
    if not torch.compiler.is_compiling():
        # A GPU's kernels read sixteen bytes at once, and do not all look where rows begin.
        q, k, v = (x if _has_rows(x, 16) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type != "cuda" or q.dtype == torch.float64 or (mask is None and torch.compiler.is_compiling()):
        return call(q, k, v)
    if mask is None:
        bucket = 1 << (max(q.shape[-2], 1) - 1).bit_length()
        try:
            backend = _quickest(q.device, q.dtype, q.shape[-1], min(bucket, 8192), causal)
        except torch.OutOfMemoryError:
            backend = _fused(q.dtype)  # no room to measure which is faster, and maybe enough for the call itself
        if _choice(q, k, v, mask, causal, scale) == backend[0].value:
            return call(q, k, v)  # to set what is set already takes longer than to launch the kernel
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend, set_priority=True):
                warnings.simplefilter("ignore")
                return call(q, k, v)
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
    # What is left may round more often than the bound allows for in half precision; in float32 it does not.
    if not half:
        return call(q, k, v)
    return call(q.float(), k.float(), v.float()).to(q.dtype)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention on the one fused kernel that PyTorch has for CPUs, in blocks of rows enough for its bound."""
    if torch.compiler.is_exporting():
        # Of a program that runs elsewhere nothing is promised, and it is for any length.
        return _fused_on_cpu(q, k, v, mask, causal, scale)
    (b, h, n, width), grouped = q.shape, q.shape[1] != k.shape[1]
    if grouped and n == 1 and mask is None and not causal:
        # Siblings are rows of one head: far faster than heads that share their keys.
        rows = q.reshape(b, k.shape[1], -1, width)
        return _on_cpu(rows, k, v, mask, causal, scale).reshape(*q.shape[:3], v.shape[3])
    # Where rows overlap, products of matrices leave the library for plain loops, which round at every key.
    q, k, v = (x if _has_rows(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    # A block of few rows may be rounded at every few keys, or at each. More of them, which are cut off again, make it
    # a product of matrices, which rounds once in 128 keys or more.
    height = 256 if n >= 768 else 64 if n >= 192 else 32
    compiling = torch.compiler.is_compiling()
    fewest = MOST_ROWS if compiling else fewest_rows(q.dtype, width)
    short = max(0, fewest - n % height) if n % height else 0
    if short:
        q = torch.cat([q, q[:, :, -1:].expand(-1, -1, short, -1)], 2)
        mask = mask if mask is None else torch.cat([mask, mask[:, :, -1:].expand(-1, -1, short, -1)], 2)
    # A block that is alone would be spread over threads, few rows for each.
    lone = b * h == 1 and n <= height and (compiling or torch.get_num_threads() > 1)
    if lone:
        q, k, v = (x.expand(-1, 2, -1, -1) for x in (q, k, v))
    out = _fused_on_cpu(q, k, v, mask, causal, scale)
    return out[:, :h, :n] if lone or short else out


def _has_rows(x: Tensor, aligned: int = 1) -> bool:
    """Whether rows follow one another, as libraries take matrices, and begin at multiples of so many bytes."""
    if aligned > 1 and x.is_contiguous():
        return not (math.gcd(x.storage_offset(), x.shape[-1]) * x.element_size()) % aligned
    rows = x.stride(-1) == 1 and x.shape[-1] <= x.stride(-2) < 2**31
    places = (x.storage_offset(), *x.stride()[:-1]) if aligned > 1 else ()
    return rows and all(place * x.element_size() % aligned == 0 for place in places)


def _fused_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if not torch.compiler.is_compiling() and _choice(q, k, v, mask, causal, scale) != _FLASH:
        # The kernel does not take masks with gradients, and may be switched off.
        return _in_float64(q, k, v, mask, causal, scale)
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped).to(q.dtype)


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> int:
    """The kernel that PyTorch would take under the user's switches."""
    grouped = q.shape[1] != k.shape[1]
    try:
        return int(torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped))
    except RuntimeError:  # no kernel at all is switched on for them
        return _ERROR


def _in_float64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention without a fused kernel: what is left sums in an unknown order, so in float64."""
    kind, grouped = q.dtype, q.shape[1] != k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    if mask is not None:  # which is added as it is
        nothing = torch.zeros_like(mask, dtype=q.dtype)
        mask = nothing.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask.double()
    plain = torch.ops.aten._scaled_dot_product_attention_math
    return plain(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)[0].to(kind)


@functools.cache
def _quickest(device: torch.device, dtype: torch.dtype, dim: int, length: int, causal: bool) -> list[SDPBackend]:
    """The fused kernels of a device from the fastest down, measured once for each family of sizes."""
    # A generator of its own: to measure must not move the draws of whoever asks.
    draws = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 8, length, dim, generator=draws, dtype=dtype, device=device) for _ in range(3))

    def seconds(backend: SDPBackend) -> float:
        call = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
        try:
            with sdpa_kernel(backend):
                timed(call, device, calls=3)  # warm-up
                return timed(call, device, calls=5)
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            return math.inf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(_fused(dtype), key=seconds)


def _fused(dtype: torch.dtype) -> list[SDPBackend]:
    """The fused kernels of GPUs that round as the bound says."""
    if dtype == torch.float32:
        return [SDPBackend.EFFICIENT_ATTENTION]
    return [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def _is_refusal(error: RuntimeError) -> bool:
    """Whether a fused kernel says that it does not take these sizes: any other error is the caller's to see."""
    refusals = ("No available kernel", "cuDNN Frontend error", "No valid execution plans")
    return any(words in str(error) for words in refusals) and not is_out_of_memory(error)
