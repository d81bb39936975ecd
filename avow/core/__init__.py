"""The nouns every layer uses: Problem, Norms, Cost, Certificate, Method, and what is done with certificates.

Axes, everywhere: `b` batch, `h` query heads, `g` key heads (g divides h), `n` queries, `s` keys,
`d` head dimension, `e` value dimension.

    problem       q, k, v and a mask in canonical form; sizes, norms, number types
    method        what a way to compute attention must offer, and what is known of it
    certificate   what is promised of an answer, and what it cost
    requirement   what a caller will accept, and the generator that random methods draw from
    certify       from a method's promise to the certificate of an answer
    audit         sampled rows, recomputed in float64
    compose       certificates of parts make the certificate of the whole
    record        the certificates of a model's layers while it runs
    chart         figures and tables as data
"""

from avow.core.certificate import Certificate, Cost, Kind, Promise, check_limits, weakest
from avow.core.method import SOFTMAX, BoundEstimate, Computed, Method
from avow.core.problem import (
    DTYPES,
    MaskKind,
    Norms,
    Problem,
    Sizes,
    check_dtype,
    check_numbers,
    check_tensor,
    has_tangents,
    named,
)

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
    "has_tangents",
    "named",
    "weakest",
]
