"""What is known about attention: statements with their verdicts, and weights in closed form.

- `claims`         statements about attention, each proved, refuted by a counterexample, or corrected
- `constructions`  queries, heads and ReLU networks in closed form, each with its proof
"""

from typing import TYPE_CHECKING

from avow.core.lazy_modules import lazy_modules

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_modules(
        __name__, ("claims", "constructions"), needs={"claims": ("flint", "scipy", "sympy", "z3")}
    )
