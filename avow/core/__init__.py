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
    sdpa_names    PyTorch's names for options
    schema        JSON schemas of what is written
    docstring     docstrings as data
    eager         what must not be compiled
    lazy_modules  packages whose modules are loaded at use
    timing        how long a call takes
    chart         figures and tables as data
    notebook      cards that notebooks show
    quantities    numbers with their units, in words
"""

from avow.core.certificate import SOFTMAX as SOFTMAX
from avow.core.certificate import Certificate as Certificate
from avow.core.certificate import Cost as Cost
from avow.core.certificate import Kind as Kind
from avow.core.certificate import LazyCertificate as LazyCertificate
from avow.core.certificate import Promise as Promise
from avow.core.certificate import check_limits as check_limits
from avow.core.certificate import weakest as weakest
from avow.core.certificate import with_reason as with_reason
from avow.core.method import BoundEstimate as BoundEstimate
from avow.core.method import Computed as Computed
from avow.core.method import Method as Method
from avow.core.problem import DTYPES as DTYPES
from avow.core.problem import MaskKind as MaskKind
from avow.core.problem import Norms as Norms
from avow.core.problem import Problem as Problem
from avow.core.problem import Sizes as Sizes
from avow.core.problem import check_dtype as check_dtype
from avow.core.problem import check_numbers as check_numbers
from avow.core.problem import check_tensor as check_tensor
from avow.core.problem import dtype_name as dtype_name
from avow.core.problem import has_tangents as has_tangents
