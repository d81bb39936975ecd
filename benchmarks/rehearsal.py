"""What `avow bench decode --device cuda` does, line by line, without a GPU: `python -m benchmarks.rehearsal`.

Kernels are interpreted, at tiny sizes: the speeds mean nothing, the checks mean what they always do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from avow.bench.cases import Sizes
from avow.kernels.interpreted import interpret
from benchmarks.figures import text

_SIZES = Sizes((320, 500), 8, 2, 2, 1)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 where an answer failed its check."""
    parser = argparse.ArgumentParser("python -m benchmarks.rehearsal", description=__doc__)
    parser.add_argument("--heads", type=Path, help="a folder of *.safetensors files with q, k and v of real heads")
    parsed = parser.parse_args(arguments)
    interpret()
    from avow.bench import decode

    results = decode.run_kernels("cpu", _SIZES, parsed.heads, lambda step: print(step, file=sys.stderr, flush=True))
    for result in results:
        print(f"\n{text(result)}", flush=True)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
