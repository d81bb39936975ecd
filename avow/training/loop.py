"""Training, from a configuration to a folder with weights, a log and all that is needed to go on.

    run/config.json      what was asked
    run/log.csv          what happened
    run/checkpoints/     the last two, each whole
    run/.lock            held by the process that writes all this

On a CPU a run that was interrupted and resumed, with as many threads, ends in the same weights, bit for bit, as one
that was not.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow import file_io
from avow.errors import NonFiniteError, ParameterError
from avow.nn import build
from avow.optim import adamw, warmup_cosine
from avow.parameters import declared
from avow.training import checkpoint, resuming, speed
from avow.training.batches import Batches, Step
from avow.training.checkpoint import Snapshot
from avow.training.config import TrainConfig
from avow.training.corpus import Corpus
from avow.training.draws import uniform
from avow.training.graphs import Replayed
from avow.training.grid import Grid
from avow.training.interrupt import listening
from avow.training.log import Log, Progress
from avow.training.parallel import Ranks, placed, ranks
from avow.training.prefetch import ahead
from avow.training.questions import Loss
from avow.training.run_lock import locked_by_first
from avow.training.tasks import corpus_of, examples_of, vocabulary_of
from avow.training.vocabulary import PAD, Vocabulary

# Steps between two times that the processes of a run ask each other whether to stop.
ASK = 10


@dataclass(frozen=True)
class Trained:
    """What a run came to; `last` is its last line in the log, `interrupted` whether it can be resumed.

    `signal` is the one that stopped it, as far as this process heard it; else 0.
    """

    model: nn.Module
    vocabulary: Vocabulary
    step: int
    interrupted: bool
    checkpoint: Path
    last: Progress | None
    signal: int = 0


@declared()
def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool | Path = False,
    progress: Callable[[Progress], None] | None = None,
) -> Trained:
    """Train as configured and leave everything in `folder`.

    `resume=True` goes on from the last checkpoint there, if there is one; a path goes on from that checkpoint, which
    must be one of this folder. No other process may write there meanwhile. First weights and dropout draw from torch's
    own generators, which know no others; they are left as they were found.
    """
    with ranks(config.run.device, config.run.timeout) as here, locked_by_first(Path(folder), here):
        return train_here(config, Path(folder), here, resume, progress)


def train_here(
    config: TrainConfig,
    folder: Path,
    here: Ranks,
    resume: bool | Path,
    progress: Callable[[Progress], None] | None,
) -> Trained:
    """The same in processes that know each other, in a folder that they hold."""
    before = checkpoint.generators()
    try:
        return Trainer(config, folder, here, resume).run(progress)
    finally:
        checkpoint.restore_generators(before)


def summed_loss(logits: Float[Tensor, "b n c"], targets: Tensor) -> Float[Tensor, ""]:
    """Cross-entropy in nats, summed over the targets that are not padding."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="sum"
    )


class Trainer:
    """A run in progress: the model, its optimiser, and where it stands."""

    def __init__(self, config: TrainConfig, folder: Path, here: Ranks, resume: bool | Path = False) -> None:
        self.config, self.folder, self.here = config, folder, here
        self.checkpoints = folder / "checkpoints"
        self.grid = Grid(here, config.run.sequence)
        self.origin = origin = resuming.origin(self.checkpoints, resume)
        state = None if origin is None else checkpoint.described(origin)
        corpus = corpus_of(config.data.corpus)
        resuming.agree_on_texts(here, corpus.digest, config.data.corpus)
        if state is not None and origin is not None:
            resuming.check_same(config, state["facts"], corpus, origin, self.checkpoints)
            resuming.check_alone(state["facts"], origin)
        resuming.agree(here, -1 if state is None else state["step"], self.checkpoints)
        if origin is not None and here.rank == 0:
            resuming.set_aside_later(origin)
        # A run that goes on has its weights, and needs no longer where it began.
        start = checkpoint.load(Path(config.run.start)) if config.run.start and state is None else None
        facts = state["facts"] if state is not None else start.facts if start is not None else None
        self.identity = {"run": uuid.uuid4().hex if state is None else state["facts"]["run"], "data": corpus.digest}
        self.vocabulary = vocabulary_of(corpus) if facts is None else Vocabulary(facts["characters"])
        self.batches = self._batches(corpus)
        self.steps = config.schedule.steps or self.batches.steps_in(config.schedule.epochs)
        torch.manual_seed(config.run.seed)  # The same first weights in every process.
        self.model = build(config.model)
        if start is not None:
            checkpoint.restore_weights(self.model, start, Path(config.run.start))
        self.model.to(here.device)
        self.placed = placed(config.run.parallel, self.model, here)
        c, fused = config.optimiser, here.device.type == "cuda"
        betas = c.beta1, c.beta2
        self.optimiser = adamw(self.model, c.rate, weight_decay=c.decay, betas=betas, fused=fused)
        self.schedule = warmup_cosine(self.optimiser, config.schedule.warmup, self.steps, config.schedule.floor)
        self._seed(0)
        self.running, self.counted = torch.zeros((), dtype=torch.float64, device=here.device), 0
        self.positions = 0  # Read by all processes since this one began, without padding.
        if state is not None and origin is not None:
            self._restore(state, origin)
        self.callable = self._callable()
        self.source = ahead(self.batches, self.steps) if here.device.type == "cuda" else self.batches
        if config.run.graphs and here.world > 1:
            rule = f"records one process, and here are {here.world}"
            raise ParameterError("run: graphs", True, rule, "leave it out")
        self.replayed = Replayed(self._pass, self.model.parameters()) if config.run.graphs else None

    def _batches(self, corpus: Corpus) -> Batches:
        """What this process reads of the task, step by step."""
        c, size = self.config, self.vocabulary.size
        if c.model.vocabulary != size:
            rule = f"contradicts the {size} of the corpus"
            raise ParameterError("model: vocabulary", c.model.vocabulary, rule, "leave it out")
        loss = cast(Loss, c.data.loss)
        text = corpus, self.vocabulary, c.model.block, c.run.seed
        return Batches(
            examples_of(c.data.task, *text, c.data.spans, loss, c.mixture),
            c.data.batch,
            c.run.seed,
            block=c.model.block,
            accumulate=c.data.accumulate,
            rank=self.grid.row,
            world=self.grid.rows,
            narrowest=self.grid.places,
        )

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.batches.position

    def advance(self) -> Tensor:
        """Do one step; the length of its gradient before clipping."""
        self.backward(next(self.source))
        norm = self.placed.clipped(self.config.optimiser.clip)
        self.optimiser.step()
        self.schedule.step()
        return norm

    def backward(self, step: Step) -> None:
        """Set the gradients of a step's mean loss per target, over all micro-batches and all processes."""
        self.optimiser.zero_grad(set_to_none=self.replayed is None)
        for number, micro in enumerate(step.micros):
            if self.replayed is not None:
                self.running += self.replayed(*micro, step.targets)
                continue
            last = number == len(step.micros) - 1
            with self.placed.exchanging(now=last):
                ids, targets = (x.to(self.here.device, non_blocking=True) for x in micro)
                self.running += self._pass(ids, targets, step.targets)
        self.counted += 1
        self.positions += step.positions

    def run(self, progress: Callable[[Progress], None] | None = None) -> Trained:
        """Train to the end, or until someone asks to stop."""
        self.model.train()
        if self.here.rank == 0:
            file_io.write(self.folder / "config.json", self.config.to_json())
        record = Log(self.folder / "log.csv", self.step) if self.here.rank == 0 else nullcontext()
        pace = _Pace(self)
        last: Progress | None = None
        with record as log, listening() as interruption:
            path = self.origin or self._save()
            while self.step < self.steps:
                norm = self.advance()
                done = self.step == self.steps
                if self.step % self.config.run.log_every == 0 or done:
                    last = self._report(norm, pace)
                    if log is not None:
                        log.add(last)
                        if progress is not None:
                            progress(last)
                asked = (self.here.world == 1 or self.step % ASK == 0) and self.here.any(interruption.heard)
                if asked or done or self.step % self.config.run.save_every == 0:
                    path = self._save()
                if asked:
                    break
        stopped = self.step < self.steps
        model = self.placed.undivided(path)
        return Trained(model, self.vocabulary, self.step, stopped, path, last, interruption.signal)

    def _pass(self, ids: Tensor, targets: Tensor, whole: float | Tensor) -> Tensor:
        """A micro-batch's part of a step's mean loss over `whole` targets; its gradients are added."""
        ids, targets, shard = self.grid.cut(ids, targets)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.config.run.precision == "bfloat16"):
            logits = self.callable(ids) if shard is None else self.callable(ids, shard)
        loss = summed_loss(logits, targets) / whole
        # Processes average their gradients, and the share of each is already a part of the mean.
        (loss * self.here.world).backward()
        return loss.detach()

    def _callable(self) -> Callable[..., Tensor]:
        # Cut by length, batches differ in width from step to step, and one program must do for all of them.
        many = True if self.config.data.accumulate > 1 else None
        model: Any = torch.compile(self.model, dynamic=many) if self.config.run.compile else self.model
        return self.placed.joined(model)

    def _report(self, norm: Tensor, pace: _Pace) -> Progress:
        loss = float(self.here.total(self.running)) / self.counted
        self.running.zero_()
        self.counted = 0
        if not math.isfinite(loss):
            rule = f"is not finite by step {self.step}"
            remedy = f"lower optimiser.rate={self.config.optimiser.rate} or resume from {self.checkpoints}"
            raise NonFiniteError("loss", loss, rule, remedy)
        tokens, mfu, eta = pace.measure()
        rate = self.optimiser.param_groups[0]["lr"]
        epoch = self.step * self.batches.size / len(self.batches.examples)
        return Progress(self.step, self.steps, epoch, loss, rate, float(norm), tokens, mfu, eta)

    def _save(self) -> Path:
        states = self.here.gathered(checkpoint.generators())
        facts = {
            **self.identity,
            "config": json.loads(self.config.to_json()),
            "characters": self.vocabulary.characters,
            "running": [float(self.here.total(self.running)), self.counted],
            "world": self.here.world,
        }
        weights, state = self.placed.state(self.optimiser)
        snapshot = Snapshot(self.step, weights, state, self.schedule.state_dict(), states, facts)
        return self.placed.save(snapshot, self.checkpoints)

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        snapshot = self.placed.restore(self.optimiser, state, path)
        self.schedule.load_state_dict(dict(snapshot.schedule))
        self.batches.position = snapshot.step
        total, self.counted = snapshot.facts["running"]
        self.running.fill_(total if self.here.rank == 0 else 0.0)
        if snapshot.facts["world"] != self.here.world:
            self._seed(snapshot.step)  # No process goes on where another was: draws begin anew, the same each time.
            return
        suffix = f".{self.here.rank}"
        own = {name.removesuffix(suffix): x for name, x in snapshot.generators.items() if name.endswith(suffix)}
        checkpoint.restore_generators(own)

    def _seed(self, step: int) -> None:
        """Begin the draws of dropout from a step on, which must differ between processes."""
        (own,) = uniform(self.config.run.seed, np.array([step]), np.array([self.here.rank]), 5)
        torch.manual_seed(int(own[0] * 2**53))


class _Pace:
    """Positions per second without padding, the share of the device's peak that they use, and the time left."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        step = trainer.batches.at(trainer.step)
        dtype = torch.bfloat16 if trainer.config.run.precision == "bfloat16" else torch.float32
        length = max(trainer.grid.places, round(step.positions / trainer.batches.size))
        self._flops = _flops_per_position(trainer, length)
        self._peak = speed.peak_rate(trainer.here.device, dtype) * trainer.here.world
        self._begin = self._mark = time.perf_counter()
        self._first, self._seen = trainer.step, trainer.positions

    def measure(self) -> tuple[float, float, float]:
        """Tokens per second and MFU since the last time, and the seconds left at the pace of the whole run."""
        now, step = time.perf_counter(), self._trainer.step
        tokens = (self._trainer.positions - self._seen) / (now - self._mark)
        eta = (self._trainer.steps - step) * (now - self._begin) / (step - self._first)
        self._mark, self._seen = now, self._trainer.positions
        return tokens, tokens * self._flops / self._peak, eta


def _flops_per_position(trainer: Trainer, length: int) -> float:
    """Operations that all processes of a row spend on one position of a text of this length."""
    ids = torch.full((1, length), 2, dtype=torch.int64, device=trainer.here.device)
    part, _, shard = trainer.grid.cut(ids, ids)
    own = speed.flops(trainer.model, part) if shard is None else speed.flops(trainer.model, part, shard)
    everyone = trainer.here.total(torch.tensor(own, dtype=torch.float64, device=trainer.here.device))
    return float(everyone) / (trainer.grid.rows * length)
