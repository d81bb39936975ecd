"""avow: attention with a certificate of its error.

    out, certificate = avow.attend(q, k, v, tol=1e-2)   the cheapest method that proves the tolerance, and its proof
    avow.plan(q, k, v, tol=1e-2)                        what would run, what it would cost, and why
    avow.audit(out, q, k, v)                            sampled rows of anybody's answer, recomputed in float64

q, k and v are (batch, heads, length, dim), as in `torch.nn.functional.scaled_dot_product_attention`.

    avow.nn             modules, and `KeyValueCache` for decoding
    avow.integrations   `enable(model, tol=...)` for Hugging Face transformers
    avow.distributed    attention over several processes
    avow.training       a trainer, and the experiment on knowledge
    avow.theory         claims about attention with proofs, and weights in closed form

Subpackages are loaded when they are first used: after `import avow`, `avow.nn.Attention` is there.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from avow.attend import attend, audit, features_needed, plan
from avow.core import Certificate, Cost, Method, Problem, Sizes
from avow.core.record import record
from avow.errors import AvowError, InputError, ToleranceUnreachable
from avow.methods import all_methods

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

_SUBPACKAGES = ("bench", "distributed", "integrations", "lab", "nn", "optim", "report", "theory", "training")


def apply(model: Any, plan: Any) -> None:
    """Have each head of a Hugging Face model attend as a plan says; `plan` is one, or the path of its file.

    `avow profile` writes plans; `avow.integrations.transformers.disable` takes this one back. A plan that was made for
    another model is refused, and the model stays as it was.
    """
    from avow.integrations.transformers import model_plan

    model_plan.apply(model, plan)


if not TYPE_CHECKING:  # or every misspelt name would pass for a module

    def __getattr__(name: str) -> ModuleType:
        if name in _SUBPACKAGES:
            return importlib.import_module(f"avow.{name}")
        raise AttributeError(f"module 'avow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_SUBPACKAGES))
