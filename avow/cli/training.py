"""A run of `avow train` from its configuration to its last line, whether it ends or is stopped."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from avow.cli.output import document
from avow.errors import ParameterError

if TYPE_CHECKING:
    from avow.training import TrainConfig, Trained

# What each command trains on.
TASKS = {"pretrain": ("pretrain", "mixed", "cloze"), "finetune": ("finetune",)}


def fit(
    name: str,
    run: Path,
    file: Path | None,
    flags: list[str],
    defaults: list[str],
    resume: bool | Path,
    as_json: bool,
) -> None:
    """Train, tell how far it is, and say what came of it; `name` is the command's."""
    from avow.report.terminal import training_progress
    from avow.training import read_config, train

    if "=" in run.name:
        raise ParameterError("RUN", repr(str(run)), "reads like a field", "name the folder of the run first")
    if resume and file is None and (run / "config.json").exists():
        file = run / "config.json"  # A run remembers what it was told.
    config = read_config(file, flags, defaults)
    if config.data.task not in TASKS[name]:
        other = next(other for other, tasks in TASKS.items() if config.data.task in tasks)
        rule = f"contradicts avow train {name}"
        raise ParameterError("data: task", repr(config.data.task), rule, f"use avow train {other}")
    first = os.environ.get("RANK", "0") == "0"
    try:
        with training_progress() if first else nullcontext() as tell:
            done = train(config, run, resume=resume, progress=tell)
    except KeyboardInterrupt as error:
        # The second interrupt, or one before the first step.
        if first:
            typer.echo(f"avow: stopped at once; {_standing(name, run)}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from error
    if first:
        _told(name, run, config, done, as_json)
    if done.interrupted:
        raise typer.Exit(128 + (done.signal or signal.SIGINT))


def _told(name: str, run: Path, config: TrainConfig, done: Trained, as_json: bool) -> None:
    """A run's end, on stdout as JSON or in words; where it was interrupted, on stderr how to go on."""
    from avow.training.run_folder import COLUMNS, read_log

    if done.last is not None:
        last = asdict(done.last)
    else:  # Nothing was left to do, or it stopped before its first line.
        rows = read_log(run / "log.csv")
        last = {column: float(rows[-1][column]) if rows else None for column in COLUMNS}
    if last["step"] and done.step > last["step"]:
        last["epoch"] *= done.step / last["step"]  # It stopped between two lines.
    if as_json:
        told = {name: last[name] for name in ("epoch", "loss", "rate", "tokens_per_second", "mfu")}
        files = {"checkpoint": str(done.checkpoint), "config": str(run / "config.json"), "log": str(run / "log.csv")}
        document({"run": str(run), "step": done.step, "interrupted": done.interrupted, **told, **files})
    elif last["loss"] is not None:
        typer.echo(
            f"{done.step:,} steps, {last['epoch']:,.1f} epochs: loss {last['loss']:.3f} nats per character, "
            f"{last['tokens_per_second']:,.0f} tokens/s, MFU {last['mfu']:.1%}"
        )
    if done.interrupted:
        typer.echo(f"avow: interrupted at step {done.step:,} and saved in {done.checkpoint}", err=True)
        typer.echo(f"go on with: {_again(name, run)}", err=True)
    elif not as_json:
        typer.echo(f"checkpoint {done.checkpoint}")
        typer.echo(f"next: {_next(run, config)}")


def _next(run: Path, config: TrainConfig) -> str:
    """The command that makes sense after a run."""
    from avow.training import corpus_of

    corpus, place = corpus_of(config.data.corpus), shlex.quote(str(run))
    if config.data.task == "pretrain" and corpus.train:
        return f"avow train finetune {shlex.quote(f'{run}-tuned')} --from {place}"
    if corpus.dev and config.data.task != "pretrain":
        return f"avow train evaluate {place}"
    begin = (corpus.documents[0].text if corpus.documents else corpus.train[0].question).split()[0]
    return f"avow train sample {place} {shlex.quote(begin)}"


def _again(name: str, run: Path) -> str:
    """The command that resumes a run, as it was started."""
    words = ["train", name, str(run), "--resume"]
    world = os.environ.get("LOCAL_WORLD_SIZE")
    begin = ["torchrun", f"--nproc-per-node={world}", "-m", "avow"] if world else ["avow"]
    return shlex.join(begin + words)


def _standing(name: str, run: Path) -> str:
    """What is left of a run that was stopped at once."""
    from avow.training import checkpoint

    kept = checkpoint.newest(run / "checkpoints")
    return f"{kept} is whole; go on with: {_again(name, run)}" if kept else "no checkpoint was written yet"
