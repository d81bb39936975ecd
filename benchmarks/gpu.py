"""What needs a GPU. Nothing here needs more than torch, so that a bare machine with a GPU can run it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from avow.bench.results import Result, Row
from benchmarks.arms import rows as arm_rows
from benchmarks.commands import tokens_read
from benchmarks.options import Options


def calls(options: Options) -> list[Result]:
    """A certified step by the calls that a user makes, against the fastest exact attention called the same way.

    And where its time goes, launch by launch.
    """
    from avow.bench import decode as steps
    from benchmarks import step_kernels

    results = steps.run("cuda", (steps.QUICK if options.quick else steps.FULL)["cuda"], options.heads, _tell)
    for row in (row for result in results for row in result.rows):
        if "because" in row:
            row["tokens read"] = tokens_read(str(row["because"]))
    return [*results, step_kernels.run(options.heads, _tell, options.quick)]


def linear(options: Options) -> list[Result]:
    """Kernels of linear attention against exact attention and flash-linear-attention."""
    from avow.bench import linear as kernels

    results = kernels.run("cuda", kernels.QUICK if options.quick else kernels.FULL, None, _tell)
    for row in (row for result in results for row in result.rows):
        if "fla MB" in row:
            row["times the memory"] = float(row["fla MB"] or 0) / float(row["MB"] or 1) if row["fla MB"] else None
    return results


def rows(options: Options) -> Result:
    """A million rows of hostile caches against their certificates."""
    from tests import gpu_decode

    counts, stories = gpu_decode.run(10_000 if options.quick else 1_000_000, 0, "cuda")
    row: Row = dict(counts)
    allowed = 1e-3 * counts["sampled"]
    failures = stories if counts["broken"] or counts["missed"] > allowed else []
    return Result("rows of hostile caches", [{**dict.fromkeys(("broken", "missed"), 0), **row}], failures=failures)


def knowledge(options: Options) -> Result:
    """The knowledge experiment on a text of one's own."""
    from avow.training.knowledge import Experiment, arms
    from avow.training.run_many import side_by_side

    # Arms share the GPU; a process each, and what is left to the processor has to fit on its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = 50 if options.quick else 7000
    corpus = str(options.corpus)
    chosen = arms(corpus, ["exact", "latent", "separable"], ["rotary"], 1, steps, "cuda", ["data.batch=256"])
    with tempfile.TemporaryDirectory() as folder:
        made = Experiment.of(corpus, Path(folder), side_by_side(chosen, Path(folder), jobs=len(chosen)))
    failures = [f"{one.arm.name}: {one.why}" for one in made.failures]
    return Result("knowledge: questions about real people", arm_rows(made.plain()), failures=failures)


def _tell(step: str) -> None:
    print(f"  {step}", file=sys.stderr, flush=True)
