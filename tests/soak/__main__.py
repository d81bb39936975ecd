"""Every public surface, hostile, in turns: `python -m tests.soak --minutes 60 [--only attend,caches] [--seed S]`.

A failure is told with the command that repeats it. 1 where anything failed, or memory kept growing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tests.soak import caches, calls, checkpoints, claims_files, constructions, files, lab, model_caches, modules
from tests.soak.turns import Soak, Surface

SURFACES: dict[str, Surface] = {
    "attend": calls.surface,
    "caches": caches.surface,
    "model-caches": model_caches.surface,
    "files": files.surface,
    "claims": claims_files.surface,
    "checkpoints": checkpoints.surface,
    "modules": modules.surface,
    "constructions": constructions.surface,
    "lab": lab.surface,
}


def main(arguments: list[str] | None = None) -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(SURFACES), help="surfaces, separated by commas")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--turn", type=float, default=20.0, help="seconds of each surface before the next")
    parser.add_argument("--case", type=int, help="one case alone, its failure raised; with a single surface")
    chosen = parser.parse_args(arguments)
    names = chosen.only.split(",")
    if unknown := set(names) - set(SURFACES):
        parser.error(f"no surface {', '.join(sorted(unknown))}; there are {', '.join(SURFACES)}")
    surfaces = {name: SURFACES[name] for name in names}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["AVOW_CALIBRATION"] = "off"  # Prices do not matter here, and measuring them takes long.
    with tempfile.TemporaryDirectory() as folder:
        if chosen.case is not None:
            (surface,) = surfaces.values()
            with surface(Path(folder)) as case:
                print(case(chosen.case))
            return 0
        print(f"seed {chosen.seed}", flush=True)
        soak = Soak(surfaces, Path(folder), chosen.seed, chosen.turn)
        sound = soak.run(60 * chosen.minutes, lambda words: print(words, flush=True))
    print("nothing failed" if sound else "SOMETHING FAILED")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
