"""How PyTorch's fused attention on this CPU adds weighted values up, as seen from its rounding.

Products of matrices keep a sum in registers for 128 keys or more before they add it to the running one. Where few rows
are multiplied some libraries take products of a matrix and a vector instead, which round the running sum at every few
keys: with one row MKL does, and without AVX2 also with two to four.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from avow.maths.rounding import unit

# Sizes of values after the first, in units in its last place: near-ties, so that roundings of one direction add up.
_SIZES = (0.0, 0.5001, 0.4999, 0.2501, -0.2501, 0.7501, 1.5001, -0.4999, -0.5001, 1.2501, 0.3751, 1.0)
_KEYS = 4096
# What 128 keys at once may round, and no more: the first 512 keys each, and five times in every 512.
_MOST = 512 + 5 * _KEYS // 512


@functools.cache
def many_at_once() -> bool:
    """Whether two rows are summed as products of matrices are; asked once, of one million products."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # what half precision does elsewhere was not looked at
    return strayed(rows=2) <= _MOST


@torch.no_grad()
def strayed(rows: int) -> float:
    """The most that sums of values, whose first is one and all others about one unit, are off: in unit round-offs."""
    drawn, u = torch.Generator().manual_seed(0), unit(torch.float32)
    sizes = torch.tensor(_SIZES, dtype=torch.float32) * (2 * u)
    q = torch.zeros(1, 1, rows, 64, dtype=torch.float32)
    k = torch.zeros(1, 1, _KEYS, 64, dtype=torch.float32)  # all weigh alike
    most = 0.0
    for period in (4, 8, 16, 32):
        pattern = sizes[torch.randint(len(sizes), (period, 64), generator=drawn)]
        v = pattern.repeat(_KEYS // period, 1)
        v[0] = 1.0
        out = scaled_dot_product_attention(q, k, v.view(1, 1, _KEYS, 64), scale=1.0)
        off = out.double() * _KEYS - v.double().sum(0)
        most = max(most, float(off.abs().amax()) / u)
    return most
