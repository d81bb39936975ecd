"""Kernels on a CPU, for rehearsals: slow, and without warnings that a GPU would not give."""

from __future__ import annotations

import warnings

import numpy as np


def interpreted() -> None:
    """Have kernels run in Python, from now on."""
    from avow.kernels.interpreted import interpret

    interpret()
    np.seterr(all="ignore")
    warnings.filterwarnings("ignore", category=RuntimeWarning)
