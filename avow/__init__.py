"""avow: attention that keeps its word."""

from avow.apply import apply as apply
from avow.attend import attend as attend
from avow.attend import audit as audit
from avow.attend import features_needed as features_needed
from avow.attend import plan as plan
from avow.core import Certificate as Certificate
from avow.core import Cost as Cost
from avow.core import Method as Method
from avow.core import Problem as Problem
from avow.core import Sizes as Sizes
from avow.core.record import record as record
from avow.errors import AvowError as AvowError
from avow.errors import InputError as InputError
from avow.errors import ToleranceUnreachable as ToleranceUnreachable
from avow.methods import all_methods as all_methods

__version__ = "0.1.0"

__all__ = [
    "AvowError",
    "Certificate",
    "Cost",
    "InputError",
    "Method",
    "Problem",
    "Sizes",
    "ToleranceUnreachable",
    "__version__",
    "all_methods",
    "apply",
    "attend",
    "audit",
    "features_needed",
    "plan",
    "record",
]
