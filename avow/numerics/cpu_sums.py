"""How PyTorch's fused attention on this CPU adds weighted values up, as seen from its rounding.

Products of matrices keep a sum in registers for 128 keys or more before they add it to the running one. Where few rows
are multiplied, or values are narrow, some libraries take other products, which round the running sum at every few keys
or at each. MKL does so with one row of float32, on processors that are not Intel's with up to three rows of any type,
and there with values of eleven features or fewer whatever the rows. So each type and width is asked once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from avow.numerics.rounding import unit

# Sizes of values after the first, in units in its last place: near-ties, so that roundings of one direction add up.
_SIZES = (0.0, 0.5001, 0.4999, 0.2501, -0.2501, 0.7501, 1.5001, -0.4999, -0.5001, 1.2501, 0.3751, 1.0)
_PERIODS = (4, 8, 16, 32)
_KEYS = 4096
# What 128 keys at once may round, and no more: the first 512 keys each, and five times in every 512.
_MOST = 512 + 5 * _KEYS // 512
# So many patterns of near-ties at least: single ones round to nothing by chance.
_PATTERNS = 256
MOST_ROWS = 8
"""Blocks of so many rows are products of matrices where any are."""


def fewest_rows(dtype: torch.dtype, width: int) -> int:
    """How many rows a block must have to be summed as products of matrices are, heads side by side; 0: none suffices.

    It holds for values of this width, and is asked once, of some million products; again where oneDNN was switched off
    or on, since products may then be another library's.
    """
    return _fewest_rows(dtype, width, torch.backends.mkldnn.enabled)


@functools.cache
def _fewest_rows(dtype: torch.dtype, width: int, onednn: bool) -> int:
    if dtype == torch.float64 or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return 0  # what half precision does elsewhere was not looked at
    try:
        for fewest in (1, 2, 4, MOST_ROWS):
            if all(strayed(rows, dtype, width) <= _MOST for rows in (*range(fewest, fewest + 4), 13, 31, 32)):
                return fewest
        return 0
    finally:
        _near_ties.cache_clear()  # megabytes that nobody needs again


@torch.no_grad()
def strayed(rows: int, dtype: torch.dtype, width: int) -> float:
    """The most that sums of values, whose first is one and all others about one unit, are off: in unit round-offs.

    The last takes the first away again, so that what is left is small enough for any type to tell.
    """
    v, sums, one = _near_ties(dtype, width)
    heads = v.shape[1]
    q = torch.zeros(1, heads, rows, width, dtype=dtype, device="cpu")
    k = torch.zeros(1, 1, 1, width, dtype=dtype, device="cpu").expand(1, heads, _KEYS, width)  # all weigh alike
    # Itself: what stands before it may be set to take another kernel, or another type.
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
    return float((out.double() * _KEYS - sums).abs().amax()) / (unit(torch.float32) * one)


@functools.lru_cache(maxsize=1)
def _near_ties(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, float]:
    """The values, (1, heads, keys, width), their sums in float64, and what the first one is."""
    drawn, u = torch.Generator().manual_seed(0), unit(torch.float32)
    heads = max(2, -(-_PATTERNS // width))  # one alone would be spread over threads by the library
    columns = heads * width
    with torch.device("cpu"):
        sizes = torch.tensor(_SIZES, dtype=torch.float32) * (2 * u)
        patterns = sizes[torch.randint(len(sizes), (max(_PERIODS), columns), generator=drawn)]
        periods = torch.tensor(_PERIODS).repeat(-(-columns // len(_PERIODS)))[:columns]
        v = patterns.gather(0, torch.arange(_KEYS)[:, None] % periods).view(1, _KEYS, heads, width).transpose(1, 2)
        v[:, :, 0], v[:, :, -1] = 1.0, -1.0
        one = 4096.0 if dtype == torch.float16 else 1.0  # float16 has no numbers as small as a unit of one
        v = (v * one).to(dtype).contiguous()
        return v, v.double().sum(2, keepdim=True), one
