"""The nouns every layer speaks in: Problem, Norms, Cost, Certificate, Method. Frozen types, no algorithms.

Axes, everywhere: `b` batch, `h` query heads, `g` key heads (g divides h), `n` queries, `s` keys,
`d` head dimension, `e` value dimension.
"""

from avow.core.certificate import Certificate, Cost, Kind, Promise, check_limits, weakest
from avow.core.dtypes import DTYPES, check_dtype, check_numbers, check_tensor, named
from avow.core.method import SOFTMAX, BoundEstimate, Computed, Method
from avow.core.problem import MaskKind, Norms, Problem, Sizes

__all__ = [
    "DTYPES",
    "SOFTMAX",
    "BoundEstimate",
    "Certificate",
    "Computed",
    "Cost",
    "Kind",
    "MaskKind",
    "Method",
    "Norms",
    "Problem",
    "Promise",
    "Sizes",
    "check_dtype",
    "check_limits",
    "check_numbers",
    "check_tensor",
    "named",
    "weakest",
]
