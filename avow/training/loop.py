"""Training, from a configuration to a folder with weights, a log and all that is needed to continue.

    run/config.json      what was asked
    run/log.csv          what happened
    run/checkpoints/     the last two, each complete
    run/.lock            held by the process that writes all this

On a CPU a run that was interrupted and resumed, with as many threads, ends in the same weights, bit for bit, as one
that was not.
"""

from __future__ import annotations

import functools
import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from avow import file_io
from avow.errors import NonFiniteError, ParameterError, is_out_of_memory
from avow.nn import build
from avow.optim import adamw, warmup_cosine
from avow.parameters import declared
from avow.training import checkpoint
from avow.training.batches import Batches, Step, naming_lost_workers
from avow.training.checkpoint import Snapshot
from avow.training.config import TrainConfig
from avow.training.data import PAD, Corpus, Vocabulary, corpus_of, vocabulary_of
from avow.training.distributed import Grid, Ranks, place_model, ranks
from avow.training.examples import Loss, examples_of, uniform
from avow.training.run_folder import Log, Progress, listening, locked_by_first

# Steps between two times that the processes of a run ask each other whether to stop.
ASK = 10
Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
# Kernels choose their algorithms and buffers the first few times they run, and none of that may be recorded.
_REHEARSALS = 3
# A graph, the tensors that it reads (ids, targets, their number), and the loss that it writes.
Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Trained:
    """The result of a run; `last` is its last line in the log, `interrupted` whether it can be resumed.

    `signal` is the one that stopped it, if this process received it; else 0.
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
    wait: float = 0.0,
) -> Trained:
    """Train as configured and leave everything in `folder`.

    `resume=True` continues from the last checkpoint there, if there is one; a path continues from that checkpoint,
    which must be one of this folder. No other process may write there meanwhile: one that does is waited for, `wait`
    seconds at most. First weights and dropout draw from torch's own generators, which have their old states afterwards.
    """
    with (
        ranks(config.run.device, config.run.timeout) as here,
        locked_by_first(Path(folder), here, wait),
        torch.random.fork_rng([here.device] if here.device.type == "cuda" else []),
    ):
        return Trainer(config, Path(folder), here, resume).run(progress)


def summed_loss(logits: Float[Tensor, "b n c"], targets: Tensor) -> Float[Tensor, ""]:
    """Cross-entropy in nats, summed over the targets that are not padding."""
    scores = logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=PAD, reduction="sum")


class Trainer:
    """A run in progress: the model, its optimiser, and how far it is."""

    def __init__(self, config: TrainConfig, folder: Path, here: Ranks, resume: bool | Path = False) -> None:
        self.config, self.folder, self.here = config, folder, here
        self.checkpoints = folder / "checkpoints"
        self.grid = Grid(here, config.run.sequence)
        corpus = corpus_of(config.data.corpus)
        self.origin, state = checkpoint.resume_point(config, corpus, self.checkpoints, resume, here)
        # A run that continues has its weights, and no longer needs what it began with.
        start = checkpoint.load(Path(config.run.start)) if config.run.start and not state else None
        facts: Mapping[str, Any] = state["facts"] if state else start.facts if start else {}
        self.identity = {"run": facts["run"] if state else uuid.uuid4().hex, "data": corpus.digest}
        self.vocabulary = Vocabulary(facts["characters"]) if facts else vocabulary_of(corpus)
        self.batches = self._batches(corpus)
        self.steps = config.schedule.steps or self.batches.steps_in(config.schedule.epochs)
        torch.manual_seed(config.run.seed)  # The same first weights in every process.
        self.model = build(config.model)
        if start is not None:
            checkpoint.restore_weights(self.model, start, Path(config.run.start))
        self.model.to(here.device)
        self.placed = place_model(config.run.parallel, self.model, here)
        c, on_gpu = config.optimiser, here.device.type == "cuda"
        self.optimiser = adamw(self.model, c.rate, weight_decay=c.decay, betas=(c.beta1, c.beta2), fused=on_gpu)
        self.schedule = warmup_cosine(self.optimiser, config.schedule.warmup, self.steps, config.schedule.floor)
        self._seed(0)
        self.running, self.counted = torch.zeros((), dtype=torch.float64, device=here.device), 0
        self.positions = 0  # Read by all processes since this one began, without padding.
        if self.origin is not None:
            self._restore(self.origin, state)
        # Cut by length, batches differ in width from step to step, and one program must do for all of them.
        dynamic = True if config.data.accumulate > 1 else None
        model: Any = torch.compile(self.model, dynamic=dynamic) if config.run.compile else self.model
        self.callable: Callable[..., Tensor] = self.placed.wrapped(model)
        self.source = self.batches.prefetched(self.steps) if on_gpu else self.batches
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
        text = corpus, self.vocabulary, c.model.block, c.run.seed
        return Batches(
            examples_of(c.data.task, *text, c.data.spans, cast(Loss, c.data.loss), c.mixture),
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
        """The number of steps done."""
        return self.batches.position

    def advance(self) -> Tensor:
        """Do one step; the length of its gradient before clipping."""
        self.backward(next(self.source))
        norm = self.placed.clip_gradients(self.config.optimiser.clip)
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
            with self.placed.gradient_sync(now=number == len(step.micros) - 1):
                ids, targets = (x.to(self.here.device, non_blocking=True) for x in micro)
                self.running += self._pass(ids, targets, step.targets)
        self.counted += 1
        self.positions += step.positions

    def run(self, progress: Callable[[Progress], None] | None = None) -> Trained:
        """Train to the end, or until someone asks to stop."""
        if first := self.here.rank == 0:
            file_io.write(self.folder / "config.json", self.config.to_json())
        pace, last, stop = _Pace(self), None, False
        self.model.train()
        record = Log(self.folder / "log.csv", self.step) if first else nullcontext()
        with record as log, naming_lost_workers(), listening() as signals:
            path = self.origin or self._save()
            while self.step < self.steps and not stop:
                norm = self.advance()
                done = self.step == self.steps
                if self.step % self.config.run.log_every == 0 or done:
                    last = self._report(norm, pace)
                    if log is not None:
                        log.add(last)
                        if progress is not None:
                            progress(last)
                stop = (self.here.world == 1 or self.step % ASK == 0) and self.here.any(bool(signals))
                if stop or done or self.step % self.config.run.save_every == 0:
                    path = self._save()
        model, interrupted = self.placed.full_model(path), self.step < self.steps
        return Trained(model, self.vocabulary, self.step, interrupted, path, last, *signals[:1])

    def _pass(self, ids: Tensor, targets: Tensor, whole: float | Tensor) -> Tensor:
        """A micro-batch's part of a step's mean loss over `whole` targets; its gradients are added."""
        ids, targets, shard = self.grid.cut(ids, targets)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.config.run.precision == "bfloat16"):
            logits = self.callable(ids) if shard is None else self.callable(ids, shard)
        loss = summed_loss(logits, targets) / whole
        # Processes average their gradients, and the share of each is already a part of the mean.
        (loss * self.here.world).backward()
        return loss.detach()

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
        states = {
            f"{name}.{rank}": state
            for rank, generators in enumerate(self.here.gathered(checkpoint.generators()))
            for name, state in generators.items()
        }
        facts = {
            **self.identity,
            "config": json.loads(self.config.to_json()),
            "characters": self.vocabulary.characters,
            "running": [float(self.here.total(self.running)), self.counted],
            "world": self.here.world,
        }
        weights, optimiser = self.model.state_dict(), self.optimiser.state_dict()
        snapshot = Snapshot(self.step, weights, optimiser, self.schedule.state_dict(), states, facts)
        return checkpoint.save(snapshot, self.checkpoints, self.here, self.placed.sharded)

    def _restore(self, path: Path, state: Mapping[str, Any]) -> None:
        snapshot = self.placed.restore(self.optimiser, state, path)
        self.schedule.load_state_dict(dict(snapshot.schedule))
        self.batches.position = snapshot.step
        total, self.counted = snapshot.facts["running"]
        self.running.fill_(total if self.here.rank == 0 else 0.0)
        if snapshot.facts["world"] != self.here.world:
            self._seed(snapshot.step)  # No process continues another's draws: new ones begin, the same each time.
            return
        own = f".{self.here.rank}"
        checkpoint.restore_generators(
            {name.removesuffix(own): x for name, x in snapshot.generators.items() if name.endswith(own)}
        )

    def _seed(self, step: int) -> None:
        """Begin the draws of dropout from a step on, which must differ between processes."""
        (own,) = uniform(self.config.run.seed, np.array([step]), np.array([self.here.rank]), 5)
        torch.manual_seed(int(own[0] * 2**53))


class _Pace:
    """Positions per second without padding, the share of the device's peak that they use, and the time left."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, here, grid = trainer, trainer.here, trainer.grid
        length = max(grid.places, round(trainer.batches[trainer.step].positions / trainer.batches.size))
        ids = torch.full((1, length), 2, dtype=torch.int64, device=here.device)
        part, _, shard = grid.cut(ids, ids)
        with FlopCounterMode(display=False) as counter:
            trainer.model.eval()(part, *(() if shard is None else (shard,)))
        # What all processes of a row spend on one position of a text of this length; backward takes twice the forward.
        self._flops = 3 * sum(here.gathered(counter.get_total_flops())) / (grid.rows * length)
        dtype = torch.bfloat16 if trainer.config.run.precision == "bfloat16" else torch.float32
        self._peak = peak_rate(here.device, dtype) * here.world
        self._begin = self._mark = time.perf_counter()
        self._first, self._seen = trainer.step, trainer.positions

    def measure(self) -> tuple[float, float, float]:
        """Tokens per second and MFU since the last time, and the seconds left at the pace of the whole run."""
        now, step = time.perf_counter(), self._trainer.step
        tokens = (self._trainer.positions - self._seen) / (now - self._mark)
        eta = (self._trainer.steps - step) * (now - self._begin) / (step - self._first)
        self._mark, self._seen = now, self._trainer.positions
        return tokens, tokens * self._flops / self._peak, eta


@functools.cache
def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product: the best of several, measured for a fifth of a second."""
    n, accelerator = (8192, torch.cuda) if device.type == "cuda" else (1024, torch.cpu)
    # Not torch's global generator: measuring must not change the draws of a run.
    a, b = (torch.full((n, n), 0.5, device=device, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + 0.2
    while best == float("inf") or time.perf_counter() < end:
        accelerator.synchronize(device)
        begin = time.perf_counter()
        a @ b
        accelerator.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


class Replayed:
    """The same as `run(ids, targets, whole)`, which adds to the gradients of `parameters` and returns the loss.

    A small model keeps a GPU busy for less time than Python takes to call its kernels one by one. A pass is recorded as
    a CUDA graph once for every shape. Replayed, it starts at once and does exactly what was recorded: the same kernels
    on the same memory, with new draws of dropout.
    """

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter]) -> None:
        self._run, self._parameters = run, [p for p in parameters if p.requires_grad]
        if any(parameter.device.type != "cuda" for parameter in self._parameters):
            raise ParameterError("run: graphs", True, "needs a model on a GPU", "use run.device=cuda, or leave it out")
        self._recorded: dict[torch.Size, Recorded] = {}
        # Graphs never run at the same time, so they share what memory they need in between.
        self._pool = torch.cuda.graph_pool_handle()
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # Recorded addresses: never replaced, only zeroed.

    def __call__(self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"], whole: float) -> Float[Tensor, ""]:
        """The loss, in memory that the next call with the same shape overwrites."""
        if ids.shape not in self._recorded:
            self._recorded[ids.shape] = self._record(ids, targets, whole)
        graph, given, loss = self._recorded[ids.shape]
        given[0].copy_(ids, non_blocking=True)
        given[1].copy_(targets, non_blocking=True)
        given[2].fill_(whole)
        graph.replay()
        return loss

    def _record(self, ids: Tensor, targets: Tensor, whole: float) -> Recorded:
        device = self._parameters[0].device
        given = (ids.to(device), targets.to(device), torch.tensor(whole, device=device))
        before = [gradient.clone() for gradient in self._gradients]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_REHEARSALS):
                self._run(*given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on fetching batches meanwhile, which would void a recording of the whole process.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self._run(*given)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            rule = f"cannot record this model ({str(error).splitlines()[0]})"
            raise ParameterError("run: graphs", True, rule, "use run.graphs=false") from error
        for gradient, old in zip(self._gradients, before, strict=True):
            gradient.copy_(old)
        return graph, given, loss
