r"""The rounding model: how far floating point may be from real arithmetic.

A sum of products of length n, in any order, errs by at most :math:`\gamma_n \sum |x_i y_i|` with
:math:`\gamma_n = nu/(1-nu)` and u the unit round-off, plus n times the underflow unit. Every bound
built from these is multiplied by `SAFETY`, which covers the rounding of the bound itself.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_Lengths = TypeVar("_Lengths", float, Tensor, np.ndarray)

SAFETY = 1 + 1e-9

# What tensor cores may cut off a factor of float32, relative to it, when they take it for TF32.
TF32 = 2.0**-10

# Beyond this many nats below the row's top, a key's whole share is smaller than any bound we state.
NEGLIGIBLE_NATS = 100.0

# The most keys a GPU's fused attention kernel sums before it rescales: up to 176 were seen, 256 leaves room.
LARGEST_TILE = 256

# exp by vectorised polynomials (20 ulp in PyTorch's fused CPU attention) or by the GPU's exp2 unit.
EXP_ULPS = 64


def unit(dtype: torch.dtype) -> float:
    """The unit round-off of a type."""
    return torch.finfo(dtype).eps / 2


def tiny(dtype: torch.dtype) -> float:
    """The largest absolute error of a result too small for a type.

    Subnormals may be flushed (on GPUs, or under torch.set_flush_denormal), so the smallest normal number counts;
    float16 conversions never flush.
    """
    return 2.0**-25 if dtype == torch.float16 else torch.finfo(dtype).tiny


def flush_threshold(dtype: torch.dtype) -> float:
    """Numbers of a type that are smaller may be read as zero (torch.set_flush_denormal, and some GPUs).

    The switch belongs to each thread of a pool, so nobody can ask for it: it always counts. Conversions from float16
    read every number.
    """
    return 0.0 if dtype == torch.float16 else torch.finfo(dtype).tiny


def misread_logits(query: _Lengths, key: _Lengths, scale: float, dim: int, dtype: torch.dtype) -> _Lengths:
    """How far logits of queries and keys up to these lengths move if subnormal numbers among them are read as zero.

    |(q + a)·(k + b) − q·k| ≤ |a||k| + |q||b| + |a||b| with |a|, |b| ≤ √d·unread.
    """
    step = 2 * math.sqrt(dim) * flush_threshold(dtype)
    return abs(scale) * step * (query + key + step)


def safe(dtype: torch.dtype) -> float:
    """The magnitude below which no intermediate of a type overflows, with room for sums of 2^20 terms."""
    return 1e290 if dtype == torch.float64 else 1e30


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type sums are carried in for inputs of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a type; what lies beyond its range stops at the end of it."""
    most = torch.finfo(dtype).max
    return x if x.dtype == dtype else x.clamp(-most, most).to(dtype)


def gamma(terms: float, u: float) -> float:
    """γ_n; infinite where n·u is not small."""
    return math.inf if terms * u >= 0.5 else terms * u / (1 - terms * u)


@dataclass(frozen=True)
class Products:
    """The rounding of matrix products: each entry moves by `entry`, each multiply-add by `u`, relatively."""

    entry: float
    u: float

    def dot(self, terms: float) -> float:
        """The relative error of a sum of so many products, against the sum of their absolute values."""
        return 2 * self.entry + self.entry**2 + gamma(terms, self.u) * (1 + self.entry) ** 2


def products(dtype: torch.dtype, device: str) -> Products:
    """How matrix products round for inputs of a type, the user's precision switches obeyed.

    On a GPU, tensor cores may truncate where IEEE rounds, which doubles the unit, and float32 attention may run as
    three TF32 passes, which stay within eight units. Whether a CPU honours narrower products is tested once on it.
    """
    u, word = unit(accumulator(dtype)), _float32_products(device)
    entry = {"tf32": TF32, "bf16": unit(torch.bfloat16)}.get(word, 0.0) if dtype == torch.float32 else 0.0
    asked = entry > 0 and device == "cpu" and not torch.compiler.is_compiling()
    if asked and not _narrows_on_cpu(word, torch.backends.mkldnn.enabled):
        entry = 0.0
    grain = 1 if device == "cpu" or dtype == torch.float64 else 8 if dtype == torch.float32 else 2
    return Products(entry, grain * u)


def _float32_products(device: str) -> str:
    """What the user's switches allow products of float32 to be taken in: "ieee", "tf32" or "bf16"."""
    switches = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    chosen = (switches.matmul.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]  # torch makes these up as they are asked for
    return next((word for word in chosen if word != "none"), "ieee")


@functools.cache
@torch.no_grad()
def _narrows_on_cpu(word: str, onednn: bool) -> bool:
    """Whether products of float32 on this CPU really are narrower under these switches, which must be set: asked once.

    1 + 2^-12 is 1 in TF32 and in bfloat16. Which products narrow depends on the processor, and from there on at most
    on their being small.
    """
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        x = torch.full((4, 256, 256), 1 + 2.0**-12)
        means = [x[0] @ x[0] / 256, x[0, :1] @ x[0] / 256, x[0] @ x[0, 0] / 256, x @ x.mT / 256]
        heads = x[None, :2, :, :64].contiguous()
        q = torch.zeros(1, 2, 32, 64)
        means += [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, heads, heads)[0] * x[0, 0, 0]]
    return any(bool((mean - (1 + 2.0**-12) ** 2).abs().amax() > 2.0**-20) for mean in means)


def tiled_depths(n: int, dtype: torch.dtype, device: str, many: bool) -> tuple[float, float]:
    """The most roundings any one term goes through in the sums of an average over n keys: weighted values, weights.

    On a GPU tiles hold at least 32 keys; each is rescaled and added to those before it. PyTorch's CPU kernel takes 512
    keys at a time and rescales once; with `many` (`cpu_sums.fewest_rows`) it adds 128 of them or more to the sums of
    weighted values at once, 256 as was seen, and weights in 8 lanes or more. Otherwise, and in float64, for which two
    rows are not enough, nothing is assumed of the order.
    """
    if device != "cpu":
        depth = min(n, LARGEST_TILE + n / 16) + 8
        return depth, depth
    if dtype == torch.float64 or not many:
        return n + 8.0, n + 8.0
    tiles = -(-n // 512)
    return min(n, 512 + 5 * tiles) + 8.0, min(n, 96 + 2 * tiles) + 8.0


def exponentials(n: int, dtype: torch.dtype, device: str) -> float:
    """How far exp, and the rescaling between tiles, may move the logarithm of any weight in a fused attention kernel.

    For half-precision weights PyTorch's CPU kernel takes a cubic that is right to 1.2e-4. It rescales by the C
    library's exp, right to an ulp; GPUs have one exp for everything.
    """
    u = unit(accumulator(dtype))
    if device != "cpu":
        return (EXP_ULPS + n / 8) * u
    half = dtype in (torch.bfloat16, torch.float16)
    return (2.0**-12 if half else EXP_ULPS * u) + 4 * u * -(-n // 512)


def merging(n: int, dtype: torch.dtype, device: str) -> tuple[float, float]:
    r"""How far the logarithm of a row's sum of weights may be from 0, as (a, b): a·S + b, S the row's largest logit.

    GPUs' kernels share the keys of few rows among processors and merge the parts by their log-sum-exps, each at most
    :math:`S + \ln n` and rounded up to eight times: of two large ones the difference is off, and so is the
    normaliser. With :math:`S = 10^9` nothing is left of :math:`\ln 12`, and twelve equal parts add up to twelve.
    PyTorch's kernel for CPUs divides by the sum that it has.
    """
    if device == "cpu":
        return 0.0, 0.0
    u = unit(accumulator(dtype))
    return 8 * u, 8 * u * (math.log(n) + 1) if n else 0.0


def softmax_l1_bound(delta: Tensor) -> Tensor:
    r"""The most the weights move, in sum of absolute values, when every logit moves by at most `delta`.

    .. math:: \|softmax(a) - softmax(b)\|_1 \le 2\tanh(\|a-b\|_\infty / 2)   [claim softmax-perturbation]
    """
    return torch.tanh(delta * 0.5) * 2


def underflow_log(dtype: torch.dtype) -> float:
    """How far below the largest logit a weight may lie before it vanishes in the accumulator of a type."""
    return 745.2 if dtype == torch.float64 else 104.0
