"""avow: attention with a certificate of its error.

    out, certificate = avow.attend(q, k, v, tol=1e-2)   the cheapest method that proves the tolerance, and its proof
    avow.plan(q, k, v, tol=1e-2)                        what would run, what it would cost, and why
    avow.plan_decode(tokens, heads, key_heads)          what a step of a decode loop costs on this machine
    avow.audit(out, q, k, v)                            sampled rows of anybody's answer, recomputed in float64

q, k and v are (batch, heads, length, dim), as in `torch.nn.functional.scaled_dot_product_attention`.

    avow.scaled_dot_product_attention(q, k, v)          the answer alone, called as PyTorch's function is
    avow.record()                                       the certificates of every layer of a model while it runs
    avow.look(model, text)                              a page: what every head of a model must read of a text
    avow.auditing(model)                                sampled rows of all attention in a block, whoever computes it
    avow.bound_selection(q, k, v, read=...)             what keys that are left unread cost each row
    avow.bound_quantised(q, k, v, k_hat, v_hat)         what keys and values in fewer bits cost each row

Subpackages, which are loaded when they are first used:

    avow.nn             modules, and `KeyValueCache` for decoding
    avow.optim          what training needs beside torch.optim
    avow.integrations   `transformers.enable(model, tol=...)` for Hugging Face models
    avow.distributed    attention over several processes
    avow.training       a trainer, and the experiment on knowledge
    avow.theory         claims about attention with proofs, and weights in closed form
    avow.errors         all that can be raised, as a tree
    avow.core           what a method of your own is made of
"""

from typing import TYPE_CHECKING, Any

from avow.attend import Attended, attend, audit, features_needed, plan, scaled_dot_product_attention
from avow.core import Certificate, Cost, Method, Problem, Sizes
from avow.core.audit import Audit
from avow.core.lazy_modules import lazy_modules
from avow.core.record import Record, record
from avow.errors import AvowError, InputError, ToleranceUnreachable
from avow.methods import all_methods
from avow.planner import Plan

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "AttentionAudit",
    "Audit",
    "AvowError",
    "Certificate",
    "Cost",
    "InputError",
    "Method",
    "Plan",
    "Problem",
    "Record",
    "Sizes",
    "ToleranceUnreachable",
    "__version__",
    "all_methods",
    "apply",
    "attend",
    "audit",
    "auditing",
    "bound_quantised",
    "bound_selection",
    "features_needed",
    "look",
    "plan",
    "plan_decode",
    "record",
    "scaled_dot_product_attention",
]

_SUBPACKAGES = (
    *(
        "bench",
        "bounds",
        "core",
        "decode",
        "distributed",
        "errors",
        "integrations",
        "lab",
        "methods",
        "nn",
        "optim",
        "report",
    ),
    *("theory", "training"),
)


def apply(model: Any, plan: Any) -> None:
    """Have each head of a Hugging Face model attend as a plan says.

    `avow profile` writes plans; `avow.integrations.transformers.disable` takes this one back. A plan that was made for
    another model is refused, and the model stays as it was.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        plan: a `ModelPlan`, or the path of its file.

    Raises:
        ParameterError: this is not such a model, or the plan is for another one.
        FileError: the file is missing or is not a plan.
    """
    from avow.integrations.transformers import model_plan

    model_plan.apply(model, plan)


if TYPE_CHECKING:
    from avow.bounds import bound_quantised, bound_selection
    from avow.decode.plan import plan_decode
    from avow.integrations.attention_audit import AttentionAudit, auditing
    from avow.lab.look import look
else:  # or every misspelt name would pass for a module
    # What needs a cache, the lab or PyTorch's hooks is loaded when somebody asks.
    _LAZY = {"plan_decode": "decode.plan", "look": "lab.look"}
    _LAZY |= dict.fromkeys(("AttentionAudit", "auditing"), "integrations.attention_audit")
    _LAZY |= dict.fromkeys(("bound_quantised", "bound_selection"), "bounds")
    _LAB = ("fastapi", "uvicorn", "safetensors", "flint", "jinja2", "latex2mathml", "scipy", "sympy")
    __getattr__, __dir__ = lazy_modules(__name__, _SUBPACKAGES, __all__, _LAZY, {"lab": _LAB, "look": _LAB})
