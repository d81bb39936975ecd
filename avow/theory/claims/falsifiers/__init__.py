"""What can be drawn at random, claim by claim: the numbers of a case, and by how much it breaks the statement.

An equality is broken by the size of the difference of its sides, an inequality by what one side has over the other.
Each file belongs to the one of its name in the catalogue, or to those whose names begin so.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from avow.theory.claims.random_search import Hunt

_FILES = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]

HUNTS: Mapping[str, Hunt] = {id: hunt for file in _FILES for id, hunt in file.HUNTS.items()}
