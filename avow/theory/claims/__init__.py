"""The ledger: statements about attention that are proved, refuted or corrected by machine.

    from avow.theory.claims import catalogue, run
    for finding in run(catalogue()): print(finding.claim.id, finding.verdict)

`avow claims run` does the same.
"""

from __future__ import annotations

from avow.extras import require

require("flint", "scipy", "sympy", "z3", purpose="to judge claims")

import avow.theory.claims.catalogue  # noqa: F401  # loaded later, the package would take the place of its namesake below
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Claim, Finding, Verdict, claim, verdict_of
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.formal import ForAll, Statement, each, real, sequence, whole
from avow.theory.claims.ledger import catalogue, claims_in
from avow.theory.claims.running import run

__all__ = ["Claim", "Evidence", "Finding", "ForAll", "Statement", "Unproved", "Verdict", "catalogue", "claim"]
__all__ += ["claims_in", "each", "real", "run", "sequence", "toolbox", "verdict_of", "whole"]
