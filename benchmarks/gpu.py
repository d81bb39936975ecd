"""What needs a GPU. Nothing here needs more than torch, so that a bare machine with a GPU can run it."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from avow.bench.results import Goal, Result, Row
from benchmarks.arms import calibration, coverage, recitations
from benchmarks.arms import rows as arm_rows
from benchmarks.commands import tokens_read
from benchmarks.options import Options

if TYPE_CHECKING:
    from avow.training.knowledge import Arm

_SEEDS = 3
# Arms on the GPU at a time: one alone leaves most of it idle.
_JOBS = 6
# The recipe before statements, each step of it alone, and all of them; the default recipe is that of four phrases.
_EARLIER = ("mixture.facts=0", "mixture.questions=2", "mixture.spans=1", "mixture.cloze=8")
_RECIPE: dict[str, tuple[str, ...]] = {
    "earlier recipe": _EARLIER,
    "full names": (*_EARLIER, "mixture.full_name=true"),
    "other orders": (*_EARLIER, "mixture.permuted=true"),
    "reverse": (*_EARLIER, "mixture.reverse=2"),
    "more questions": (*(flag for flag in _EARLIER if "questions" not in flag), "mixture.questions=6"),
    "averaged weights": (*_EARLIER, "optimizer.average=0.999"),
    "facts in one phrase": ("mixture.phrasings=1",),
    "facts, the likeliest alone": ("mixture.odds=false",),
    "facts in four phrases": (),
    "every step": ("mixture.full_name=true", "mixture.permuted=true", "mixture.reverse=1", "optimizer.average=0.999"),
}
# Tokens of the vocabulary of byte pairs; the model is narrower for it, and has no more weights.
_PAIRS = 1000


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


def generation(options: Options) -> Result:
    """Tokens of a whole model in every way, and how many times as fast as a loop of SDPA they should be."""
    from avow.bench import generate as model

    (result,) = model.run("cuda", (model.QUICK if options.quick else model.FULL)["cuda"], options.heads, _tell)
    goals = []
    for row in result.rows:
        for n, least in ((131072, 1.3), (524288, 2.0)):
            if row["n"] == n and row["way"] in (f"avow, {model.TOL:g}", f"avow, verified ({model.DRAFTS})"):
                found = float(row["times ideal"] or 0)
                goals.append(
                    Goal(f"{row['way']}, n = {n:,}: {least} of the ideal loop", f"{found:.3g}", found >= least)
                )
        if row["n"] == 131072 and row["way"] == f"avow, {model.TOL:g}":
            faster, share = (float(row[name] or 0) for name in ("times transformers", "of limit"))
            goals.append(Goal("3 times transformers' fastest at 131,072", f"{faster:.3g}", faster >= 3))
            goals.append(Goal("85% of what the bytes allow at 131,072", f"{share:.0%}", share >= 0.85))
    return replace(result, goals=goals)


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


def knowledge(options: Options) -> list[Result]:
    """The knowledge experiment on a text of one's own: every attention, three seeds."""
    from avow.training.knowledge import arms

    steps = 50 if options.quick else None
    attentions = ["random_features", "separable", "latent", "exact"]  # The slowest first.
    chosen = arms(str(options.corpus), attentions, ["rotary"], _SEEDS, steps, "auto")
    return _trained("knowledge: questions about real people", "people", chosen, options)


def recipe(options: Options) -> list[Result]:
    """Steps of the recipe, each alone and all of them, with exact attention, three seeds and half of the steps."""
    from avow.training.knowledge import NOT_READ, arms

    steps, chosen, steps_of = 50 if options.quick else 3500, [], dict(_RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("tokenizers"):
            pairs = Path(options.runs or folder) / "byte-pairs.json"
            _byte_pairs(str(options.corpus), pairs)
            steps_of["byte pairs"] = (f"data.tokenizer={pairs}", "model.width=240", "model.heads=6")
        else:
            _tell("byte pairs: left out, the library tokenizers is not installed")
        for label, flags in steps_of.items():
            some = arms(str(options.corpus), ["exact"], ["rotary"], _SEEDS, steps, "auto", flags)
            chosen += [replace(arm, label=label) for arm in some if arm.label != NOT_READ]
        return _trained("knowledge: steps of the recipe", "recipe", chosen, options)


def _trained(title: str, name: str, chosen: list[Arm], options: Options) -> list[Result]:
    """What came of some arms, several of them at a time on one GPU."""
    from avow.training.knowledge import Experiment
    from avow.training.run_many import News, side_by_side

    def tell(news: News) -> None:
        if news.kind != "progress":
            _tell(f"{news.arm.name}: {news.kind} {news.why}")

    # A process each, and what is left to the processor has to fit on its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.runs or temporary) / name
        made = Experiment.of(
            str(options.corpus), folder, side_by_side(chosen, folder, resume=True, jobs=_JOBS, tell=tell)
        )
    failures, plain = [f"{one.arm.name}: {one.why}" for one in made.failures], made.plain()
    shown = {"recited and extracted": recitations, "surest answers": coverage, "calibration": calibration}
    others = [Result(f"{title}: {what}", rows(plain)) for what, rows in shown.items()]
    return [Result(title, arm_rows(plain), failures=failures), *others]


def _byte_pairs(corpus: str, path: Path) -> None:
    """A vocabulary of byte pairs for the texts that are trained on, as a file of the library tokenizers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from avow.training import corpus_of

    texts = list(corpus_of(corpus).texts)
    made = Tokenizer(models.BPE())
    # A word, a sign and a space are tokens apart, so that names and spans begin and end where tokens do.
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    made.decoder = decoders.Fuse()
    alphabet = sorted(set().union(*texts))
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=_PAIRS, initial_alphabet=alphabet, show_progress=False)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))


def _tell(step: str) -> None:
    print(f"  {step}", file=sys.stderr, flush=True)
