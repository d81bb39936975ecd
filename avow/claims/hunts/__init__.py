"""What can be drawn at random, claim by claim: the numbers of a case, and by how much it breaks the statement.

An equality is broken by the size of the difference of its sides, an inequality by what one side has over the other.
Each file belongs to those of the same name in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping

from avow.claims.hunting import Hunt
from avow.claims.hunts import (
    costs,
    efficient,
    features,
    heads,
    layers,
    lemmas,
    linear_costs,
    mixtures,
    neighbours,
    noise,
    optimisers,
    positions,
    queries,
    recurrent,
    relu,
    singular,
    softmax,
)

_FILES = (softmax, queries, mixtures, noise, heads, layers, positions, efficient, features, singular)
_MORE = (costs, linear_costs, relu, recurrent, optimisers, lemmas, neighbours)

HUNTS: Mapping[str, Hunt] = {id: hunt for file in (*_FILES, *_MORE) for id, hunt in file.HUNTS.items()}
