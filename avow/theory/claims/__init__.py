"""The ledger: statements about attention that are proved, refuted or corrected by machine.

from avow.theory.claims import catalogue, run
for finding in run(catalogue()): print(finding.claim.id, finding.verdict)
"""

from __future__ import annotations

import importlib

from avow.errors import MissingPackage

try:
    import flint
except ImportError as error:
    raise MissingPackage("python-flint", "missing", "is needed to judge claims", "pip install 'avow[rigor]'") from error
# SymPy loads it too, so it is looked at first.
if tuple(int(part) for part in flint.__version__.split(".")[:2]) < (0, 9):
    old = flint.__version__
    raise MissingPackage("python-flint", old, "negates balls wrongly and proves nothing", "pip install 'avow[rigor]'")
try:
    # Looked for here, so that the error is said once and early.
    for prover in ("scipy", "sympy"):
        importlib.import_module(prover)
except ImportError as error:
    name = error.name or "a prover"
    raise MissingPackage(name, "missing", "is needed to judge claims", "pip install 'avow[rigor]'") from error

import avow.theory.claims.catalogue  # noqa: F401  # loaded later, the package would take the place of its namesake below
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Claim, Evidence, Finding, Unproved, Verdict, claim, verdict_of
from avow.theory.claims.ledger import catalogue, claims_in
from avow.theory.claims.running import run

__all__ = ["Claim", "Evidence", "Finding", "Unproved", "Verdict", "catalogue", "claim", "claims_in", "run", "toolbox"]
__all__ += ["verdict_of"]
