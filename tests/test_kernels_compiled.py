"""What is interpreted elsewhere compiles, too: every kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parent.parent
STEP = "_bounded _marked _attended _merged _read_again _merged_again"
SCANS = """
    part_sums part_prefixes part_rows row_slopes
    row_lengths feature_sums feature_rows divide_shares feature_key_gradients add_shares
    column_sums causal_rows causal_key_gradients whole_rows whole_query_gradients whole_key_gradients
"""


def compiled(family: str) -> list[str]:
    """The kernels that a process of its own compiled, in order."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compiled", family],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    return told.stdout.split()


def test_every_kernel_of_a_step_compiles_for_a_gpu() -> None:
    assert compiled("decode") == STEP.split()
    draws = STEP.replace("_marked", "_drawn")
    assert compiled("draws") == draws.split()
    assert compiled("queries") == 3 * f"{STEP} {draws}".split()


def test_every_kernel_that_writes_tokens_compiles_for_a_gpu() -> None:
    assert compiled("append") == ["_append"] * 6 + ["_append", "_noted"] * 3 + ["_cropped"]


def test_every_kernel_of_a_step_that_reads_all_tokens_compiles_for_a_gpu() -> None:
    assert compiled("whole") == ["_read_again", "_merged_again"] * 3


def test_steps_with_rows_on_the_device_compile_for_a_gpu() -> None:
    step = STEP.replace("_attended", "_sought _attended")
    draws = step.replace("_marked", "_drawn")
    assert compiled("offload") == [*f"{step} {draws}".split(), "_append", "_append", "_noted"]


def test_the_kernel_that_measures_rows_compiles_for_a_gpu() -> None:
    assert compiled("lengths") == ["_flat_row_lengths", "_row_lengths"] * 3


def test_every_kernel_of_a_scan_compiles_for_a_gpu() -> None:
    assert set(compiled("scans")) == set(SCANS.split())


def test_every_kernel_of_a_single_token_compiles_for_a_gpu() -> None:
    assert set(compiled("tokens")) == {"_random", "_softmaxes", "_stepped"}
