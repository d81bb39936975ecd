r"""How linear attention's kernels round: what certificates must add for products of short numbers.

A kernel's mean is :math:`N/D`, with :math:`N = \sum_{jf} w_{jf} v_j (1+ε_{jf})`, :math:`D = \sum_{jf} w_{jf}
(1+ε'_{jf})` and all weights positive. Sums in between have signs where values do, but are rounded in proportion to
:math:`\sum w|v|`, entry by entry, and the norm of that is at most :math:`\sum w \|v\|`. So every rounding on the way
is one of three kinds, and costs, in lengths of the largest value,

- *shared*: the same number in N and D, such as a feature rounded to bfloat16 before both products. It moves a weight
  by a factor :math:`e^{\pm δ}`, and the mean by at most :math:`2\tanh(δ/2)` [claim softmax-perturbation];
- *apart*: in N alone or in D alone. Relative errors a of N and b of D move the mean by at most (a + b)/(1 − b);
- *steps*: float32 sums, counted by their depth as on every other path.

`entry` is how far a product's factor may be moved: 2⁻⁸ where it is rounded to bfloat16; 2⁻¹⁰ where the tensor cores
cut float32 to TF32, as they do for float16's features; nothing for float32, whose products are three of TF32, with
small parts of at most 2⁻¹¹ that are cut at 2⁻¹⁰ of themselves: 2⁻²⁰ + 2⁻²² in all, which is 20 units of float32, and
less than `GRAIN` units for each of four additions. A tensor core may cut where IEEE rounds, adds its accumulator once
for each eight or sixteen products, and exponentials that rescale sums are right to four units: `GRAIN` covers each.

**Random features.** Features of a row and of a key are rounded once each before they enter N and D alike: shared, 2
entries. Sums are rounded when a row meets them, and so are pairs of a chunk before they meet values, which are exact;
what a block of features adds to N is rounded once more. So N has 2 roundings apart, and D has none. TF32 cuts features
in products alone, where N is made: a key's and a row's once more each. So there are at most 4 apart.
For 16-bit inputs directions are rounded to float16: a logarithm is moved by the length of what one lost, at most
`lost`, times the row's. Numbers of the row are exact in float16 but for those below its smallest, once multiplied by a
power of two p with :math:`\sqrt{s} \log_2 e \le 8p`: each is off by 2⁻²⁵, which moves a logarithm by 2⁻²² times the sum
of a direction's entries at most: `floor`.

Features of a row are relative to a guess λ‖x‖ at the largest, λ = √(2 ln(m+1)), those of keys to the largest
b_j = λ‖k_j‖ − ‖k_j‖²/2 up to the end of their chunk; with L the longest direction, logs of features are within
(L + λ)‖x‖ of the guess. `reaches` demands (L + λ)‖x‖ ≤ 60 of rows and keys and a range of b of 10: then no feature
underflows, since e^-70 is above 2⁻¹²⁶, or overflows, and a row sees a key whose b is no more than 10 below that of its
chunk. A product that vanishes is below 2⁻¹²⁶ where that key brings e^-(L+λ)‖k‖ e^-10 at least, and the kernel itself
demands 2⁻⁶⁰ < D < 2⁶⁰ relative to the largest b up to the chunk's end. What vanishes is therefore at most s·m·2⁻¹²⁶
over the smaller of these two: `least`.

**Separable attention.** A key's exponential is rounded once, to bfloat16, for N and D alike: shared, 1 entry; TF32 cuts
it in N and in D by themselves: 2 apart. The row's share is rounded once, and the sums or pairs it meets once: 2 apart.
Logarithms are to base 2, so that numbers as large as keys are rounded before what they share is subtracted. Causal
rows are relative to the largest key of their chunk, and the kernel demands that their totals be 2⁻⁸⁰ of it at least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.numerics import rounding

# Units of float32 that every multiply-add of a kernel may cost.
GRAIN = 8
# Kernels answer for values of these lengths: the largest of a head.
COMFORT = 1e-3, 3e4
# Totals below this, relative to the largest key of a chunk, are not answered for.
THIN = 2.0**-80
# What logs of features may be away from the guess, logs of keys from each other, and logits of softmaxes from zero.
_REACH, RANGE, STEEP = 60.0, 10.0, 256.0
# Factors of logarithms up to this one, and down to its inverse, need no power of two beside them.
NEAR = 8.0
# Normalisers that random features' kernels answer for.
_LEAST_NORMALISER = 2.0**-60

_ENTRIES = {torch.bfloat16: rounding.unit(torch.bfloat16), torch.float16: rounding.TF32, torch.float32: 0.0}
# Second-order terms, of which the largest are four entries of bfloat16.
_SECOND = 1.03


class KernelRounding(NamedTuple):
    """What a kernel added to the roundings of float32, and in how many steps it summed."""

    steps: int
    shared: float
    apart: float

    @property
    def products(self) -> rounding.Products:
        """Products and sums in float32; switches of the user's do not reach into kernels."""
        return rounding.Products(0.0, GRAIN * rounding.unit(torch.float32))


def of_features(kind: torch.dtype, steps: int) -> KernelRounding:
    """The roundings of random features for inputs of a type, but for those of directions."""
    entry = _ENTRIES[kind]
    return KernelRounding(steps, _SECOND * 2 * entry, _SECOND * 4 * entry)


def lost(directions: Float[Tensor, "m d"], kind: torch.dtype) -> float:
    """How long a part of a direction rounding takes away, at most, for inputs of a type."""
    held = directions.float() if kind == torch.float32 else directions.float().half()
    return _SECOND * float(torch.linalg.vector_norm(directions.double() - held.double(), dim=-1).amax())


def floor(directions: Float[Tensor, "m d"], kind: torch.dtype) -> float:
    """What numbers of a row that are too small for products with directions may move a logarithm by."""
    return 0.0 if kind == torch.float32 else 2.0**-25 * NEAR * float(directions.abs().sum(-1).amax()) * _SECOND


def of_columns(kind: torch.dtype, steps: int) -> KernelRounding:
    """The roundings of separable attention for inputs of a type."""
    entry = _ENTRIES[kind]
    shared, apart = (0, 4) if kind == torch.float16 else (1, 2)
    return KernelRounding(steps, _SECOND * shared * entry, _SECOND * apart * entry)


def lift(features: int) -> float:
    """λ: about how many standard deviations the largest of so many Gaussians is above zero."""
    return math.sqrt(2 * math.log(features + 1))


def reaches(features: int, longest: float, radius_q: float, radius_k: float) -> bool:
    """Whether features and weights of rows and keys of these lengths stay in float32; not where lengths are nan."""
    guess = lift(features)
    spread = guess**2 / 2 + max(0.0, radius_k**2 / 2 - guess * radius_k)
    known = radius_q >= 0 and radius_k >= 0
    return known and (longest + guess) * max(radius_q, radius_k) <= _REACH and spread <= RANGE


def least(features: int, longest: float, radius_k: float) -> float:
    """What a row's normaliser is at least, relative to what may vanish beside it."""
    return min(_LEAST_NORMALISER, math.exp(-(longest + lift(features)) * radius_k)) * math.exp(-RANGE)
