"""Training, from a configuration to a folder with weights, a log and all that is needed to continue.

    run/run.toml         what was asked: the configuration, which --config takes
    run/log.csv          what happened
    run/checkpoints/     the last two, each complete
    run/.lock            held by the process that writes all this

On a CPU a run that was interrupted and resumed, with as many threads, ends in the same weights, bit for bit, as one
that was not.
"""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from avow import file_io
from avow.errors import NonFiniteError, ParameterError, is_out_of_memory
from avow.extras import require
from avow.nn import build
from avow.optim import AveragedWeights, adamw, warmup_cosine
from avow.parameters import declared
from avow.training import checkpoint
from avow.training.batches import Batches, Step, naming_lost_workers
from avow.training.checkpoint import Snapshot
from avow.training.config import TrainConfig
from avow.training.data import INVENTED, Corpus, Document, tokenizer_of
from avow.training.distributed import Grid, Ranks, place_model, ranks
from avow.training.evaluation import TextLoss, summed_loss, target_characters
from avow.training.examples import HELD_OUT_STEPS, Examples, Loss, TaskExamples, examples_of, uniform
from avow.training.run_folder import CONFIG, Log, Progress, listening, locked_by_first
from avow.training.sources import read_data
from avow.training.tokenizer import PAD, FileTokenizer, Tokenizer

# Steps between two times that the processes of a run ask each other whether to stop.
ASK = 10
Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
# Kernels choose their algorithms and buffers the first few times they run, and none of that may be recorded.
_REHEARSALS = 3
# Seconds after which a first step says that it is done: the first line of the log may be minutes away.
_SLOW_STEP = 5.0
# A graph, the tensors that it reads (ids, targets, their number), and the loss that it writes.
Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Trained:
    """The result of a run; `last` is its last line in the log, `interrupted` whether it can be resumed.

    `signal` is the one that stopped it, if this process received it; else 0. `repr` leaves the weights and texts out.
    """

    model: nn.Module = field(repr=False)
    tokenizer: Tokenizer
    step: int
    interrupted: bool
    checkpoint: Path
    last: Progress | None
    corpus: Corpus = field(repr=False)
    reading: Reading
    signal: int = 0


@dataclass(frozen=True)
class Reading:
    """How much data a run has, and how often it reads it.

    `tokens` are those of the documents, `unread` those of them that no example holds. `examples` are trained on,
    `held_out` are not; `unit` is what one of them is, in the plural. `asked` training questions are left out.
    """

    documents: int
    empty: int
    characters: int
    tokens: int
    unread: int
    questions: int
    examples: int
    held_out: int
    unit: str
    steps: int
    batch: int
    asked: int = 0

    @property
    def epochs(self) -> float:
        """How often the run reads every example it trains on."""
        return self.steps * self.batch / self.examples

    def __str__(self) -> str:
        return f"read {self._text}: {self._examples}; {self._length}"

    @property
    def _text(self) -> str:
        """
        >>> Reading(3, 1, 1000, 1000, 0, 2, 8, 1, "windows of 128 tokens", 4, 16)._text
        '1,000 characters in 3 documents (and 1 empty), 2 questions'
        """
        parts = []
        if self.documents:
            tokens = f"{self.tokens:,} tokens"
            amount = f"{self.characters:,} characters" if self.characters else tokens
            if self.characters and self.characters != self.tokens:
                amount += f" ({tokens})"
            empty = f" (and {self.empty:,} empty)" if self.empty else ""
            parts.append(f"{amount} in {_counted(self.documents, 'document')}{empty}")
        if self.questions:
            asked = f" (and {self.asked:,} that dev.tsv asks too)" if self.asked else ""
            parts.append(_counted(self.questions, "question") + asked)
        return ", ".join(parts)

    @property
    def _examples(self) -> str:
        held = f"{self.held_out:,} of them held out" if self.held_out else "none held out"
        count, (what, *more) = self.examples + self.held_out, self.unit.split(" ")
        words = f"{count:,} {' '.join([what.removesuffix('s') if count == 1 else what, *more])}, {held}"
        if not self.unread:
            return words
        share = self.unread / self.tokens
        return f"{words}; {share:.1%} of the text is too far from the start of its document to be read"

    @property
    def _length(self) -> str:
        length = f"{_counted(self.steps, 'step')} of {self.batch:,} are"
        if self.epochs >= 1:
            return f"{length} {self.epochs:,.1f} epochs"
        all_of_them = -(-self.examples // self.batch)
        share = f"only {self.epochs:.1%} of it is trained on; schedule.steps={all_of_them} reads all"
        return f"{length} {self.epochs:.2g} epochs: {share}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@declared()
def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool | Path = False,
    progress: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] | None = None,
    wait: float = 0.0,
) -> Trained:
    """Train as configured and leave everything in a folder.

    No other process may write there meanwhile. First weights and dropout draw from torch's own generators, which have
    their old states afterwards.

    Args:
        config: everything that decides the run.
        folder: where the log, the configuration and the checkpoints go.
        resume: True continues from the last checkpoint there, if there is one; a path continues from that checkpoint,
            which must be one of this folder. A configuration with more steps goes on with a longer schedule.
        progress: called with every line of the log.
        tell: called with what there is to know before the first step: how much is read, how often, and what a longer
            schedule means.
        wait: seconds to wait at most for another process that writes there.

    Returns:
        The model, its tokenizer, and where the last checkpoint is.

    Raises:
        ParameterError: the configuration contradicts the checkpoint.
        FileError: the folder is in use, or a file cannot be read or written.
        MissingPackage: safetensors is not installed.

    >>> import tempfile
    >>> from avow.training import read_config, train
    >>> few = ["schedule.steps=2", "model.layers=1", "model.width=16", "model.heads=2", "model.block=64"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(read_config(flags=few), folder).step
    2
    """
    # Said before the first step, not after it.
    require("safetensors", purpose="to save checkpoints", extra="train")
    with (
        ranks(config.run.device, config.run.timeout) as here,
        locked_by_first(Path(folder), here, wait),
        torch.random.fork_rng([here.device] if here.device.type == "cuda" else []),
    ):
        return Trainer(config, Path(folder), here, resume).run(progress, tell)


def task_examples(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer) -> TaskExamples:
    """What a run trains on, and what it holds out."""
    data, model = config.data, config.model
    if model.vocabulary != tokenizer.size:
        rule = f"contradicts the {tokenizer.size} of the data"
        raise ParameterError("model: vocabulary", model.vocabulary, rule, "leave it out")
    text = corpus, tokenizer, model.block, config.run.seed
    how = data.spans, cast(Loss, data.loss), config.mixture
    return examples_of(data.task, *text, *how, data.held_out, HELD_OUT_STEPS * data.batch)


class Trainer:
    """A run in progress: the model, its optimiser, and how far it is."""

    def __init__(self, config: TrainConfig, folder: Path, here: Ranks, resume: bool | Path = False) -> None:
        self.config, self.folder, self.here = config, folder, here
        self.checkpoints = folder / "checkpoints"
        self.grid = Grid(here, config.run.sequence)
        corpus = self.corpus = read_data(config.data.sources)
        self.origin, state = checkpoint.resume_point(config, corpus, self.checkpoints, resume, here)
        # A run that continues has its weights, and no longer needs what it began with.
        start = checkpoint.load(Path(config.run.start)) if config.run.start and not state else None
        facts: Mapping[str, Any] = state["facts"] if state else start.facts if start else {}
        self.identity = {"run": facts["run"] if state else uuid.uuid4().hex, "data": corpus.digest}
        self.tokenizer = self._tokenizer(corpus, facts)
        examples = task_examples(config, corpus, self.tokenizer)
        self.batches = self._batches(examples.training)
        self.held_out = self._batches(examples.held_out) if examples.held_out is not None else None
        self.held_out_characters = None if self.held_out is None else target_characters(self.held_out, self.tokenizer)
        self.steps = config.schedule.steps or self.batches.steps_in(config.schedule.epochs)
        self.reading = self._reading(corpus, examples)
        if self.origin is None and start is None and 0 < examples.tokens < config.model.block:
            rule = f"is longer than the text, which has {examples.tokens:,} tokens"
            remedy = f"use model.block<={examples.tokens}, or give more text"
            raise ParameterError("model: block", config.model.block, rule, remedy)
        if self.origin is not None:
            checkpoint.check_longer(self.steps, facts["steps"], self.origin)
        # The steps of its schedule until now, if it goes on with a longer one.
        self.longer_than = facts["steps"] if self.origin is not None and self.steps > facts["steps"] else None
        torch.manual_seed(config.run.seed)  # The same first weights in every process.
        self.model = build(config.model)
        if start is not None:
            checkpoint.restore_weights(self.model, start, Path(config.run.start))
        self.model.to(here.device)
        self.placed = place_model(config.run.parallel, self.model, here)
        c, on_gpu = config.optimizer, here.device.type == "cuda"
        self.optimiser = adamw(self.model, c.lr, weight_decay=c.weight_decay, betas=(c.beta1, c.beta2), fused=on_gpu)
        self.schedule = warmup_cosine(self.optimiser, config.schedule.warmup, self.steps, config.schedule.floor)
        self.averages = AveragedWeights(self.model, c.average) if c.average else None
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

    def _tokenizer(self, corpus: Corpus, facts: Mapping[str, Any]) -> Tokenizer:
        """That of the checkpoint that the run goes on from or begins with, else that of the data."""
        path = self.origin or (Path(self.config.run.start) if self.config.run.start else None)
        return checkpoint.load_tokenizer(path, facts) if path else tokenizer_of(self.config.data.tokenizer, corpus)

    def _batches(self, examples: Examples) -> Batches:
        """What this process reads of some examples, step by step."""
        c = self.config
        return Batches(
            examples,
            c.data.batch,
            c.run.seed,
            block=c.model.block,
            accumulate=c.data.accumulate,
            rank=self.grid.row,
            world=self.grid.rows,
            narrowest=self.grid.places,
        )

    def _reading(self, corpus: Corpus, examples: TaskExamples) -> Reading:
        asked = self.config.data.task in ("questions", "spans+questions", "mixture")
        documents = () if self.config.data.task == "questions" else corpus.documents
        return Reading(
            len(documents),
            corpus.empty,
            sum(len(document.text) for document in documents if isinstance(document, Document)),
            examples.tokens,
            examples.unread,
            len(corpus.train) if asked else 0,
            len(examples.training),
            0 if examples.held_out is None else len(examples.held_out),
            examples.unit,
            self.steps,
            self.config.data.batch,
            corpus.asked if asked else 0,
        )

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.batches.position

    def advance(self) -> Tensor:
        """Do one step; the length of its gradient before clipping. The last one ends with the averaged weights."""
        self.backward(next(self.source))
        norm = self.placed.clip_gradients(self.config.optimizer.clip)
        self.optimiser.step()
        self.schedule.step()
        if self.averages is not None:
            self.averages.update()
            if self.step == self.steps:
                self.model.load_state_dict(self.averages.state_dict()["averages"], strict=False)
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

    def run(
        self, progress: Callable[[Progress], None] | None = None, tell: Callable[[str], None] | None = None
    ) -> Trained:
        """Train to the end, or until someone asks to stop."""
        if first := self.here.rank == 0:
            file_io.write(self.folder / CONFIG, self.config.to_toml())
            if tell is not None:
                for line in self._notes():
                    tell(line)
        pace, last, stop = _Pace(self), None, False
        begin, before = time.perf_counter(), self.step
        self.model.train()
        record = Log(self.folder / "log.csv", self.step) if first else nullcontext()
        with record as log, naming_lost_workers(), listening() as signals:
            path = self.origin or self._save()
            while self.step < self.steps and not stop:
                norm = self.advance()
                done = self.step == self.steps
                if first and tell is not None and self.step == before + 1:
                    self._tell_slow_start(time.perf_counter() - begin, tell)
                measured = self.held_out is not None and self._is_due(self.config.run.evaluate_every)
                if self._is_due(self.config.run.log_every) or measured:
                    last = self._report(norm, pace, measured)
                    if log is not None:
                        log.add(last)
                        if progress is not None:
                            progress(last)
                stop = (self.here.world == 1 or self.step % ASK == 0) and self.here.any(bool(signals))
                if stop or done or self.step % self.config.run.save_every == 0:
                    path = self._save()
        model, interrupted = self.placed.full_model(path), self.step < self.steps
        read = self.corpus, self.reading
        return Trained(model, self.tokenizer, self.step, interrupted, path, last, *read, *signals[:1])

    def _tell_slow_start(self, seconds: float, tell: Callable[[str], None]) -> None:
        """Say how long the first step took, if the first line of the log is still far away."""
        every = self.config.run.log_every
        if seconds > _SLOW_STEP and not self._is_due(every):
            more = min(-self.step % every, self.steps - self.step)
            tell(f"the first step took {seconds:.0f} s; the next line comes after {more:,} more")

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.steps

    def _notes(self) -> Iterator[str]:
        """What there is to know before the first step."""
        if self.config.data.sources == (INVENTED,):
            yield "the data is avow's example, invented people; --data FILE reads your own"
        yield str(self.reading)
        if self.origin is not None and self.step >= self.steps:
            more = f"schedule.steps={2 * self.steps}"
            yield f"this run is finished: all {self.steps:,} steps are done; {more}, or any larger number, continues it"
        if self.longer_than is not None:
            lr = self.optimiser.param_groups[0]["lr"]
            yield (
                f"{self.steps:,} steps instead of {self.longer_than:,}: from step {self.step:,} on, the learning rate "
                f"follows the schedule of {self.steps:,} steps (it goes on at {lr:.3g}); the steps before it followed "
                f"the shorter one, so this is not the run that {self.steps:,} steps from the start would have been"
            )

    def _pass(self, ids: Tensor, targets: Tensor, whole: float | Tensor) -> Tensor:
        """A micro-batch's part of a step's mean loss over `whole` targets; its gradients are added."""
        loss = self._summed_loss(self.callable, ids, targets) / whole
        # Processes average their gradients, and the share of each is already a part of the mean.
        (loss * self.here.world).backward()
        return loss.detach()

    def _summed_loss(self, model: Callable[..., Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of this process's part of a micro-batch, in nats."""
        ids, targets, shard = self.grid.cut(ids, targets)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.config.run.precision == "bfloat16"):
            logits = model(ids) if shard is None else model(ids, shard)
        return summed_loss(logits, targets)

    @torch.no_grad()
    def measure_held_out(self) -> TextLoss:
        """The loss over everything held out, by all processes; it draws nothing and changes nothing of the run."""
        assert self.held_out is not None
        nats, tokens = torch.zeros(2, dtype=torch.float64, device=self.here.device)
        self.model.eval()
        for micro in self.held_out.once():
            ids, targets = (x.to(self.here.device) for x in micro)
            nats += self._summed_loss(self.model, ids, targets)
            tokens += (self.grid.cut(ids, targets)[1] != PAD).sum()
        self.model.train()
        return TextLoss(float(self.here.total(nats)), int(self.here.total(tokens)), self.held_out_characters)

    def _report(self, norm: Tensor, pace: _Pace, measured: bool) -> Progress:
        loss = float(self.here.total(self.running)) / self.counted
        self.running.zero_()
        self.counted = 0
        if not math.isfinite(loss):
            rule = f"is not finite by step {self.step}"
            remedy = f"lower optimizer.lr={self.config.optimizer.lr} or resume from {self.checkpoints}"
            raise NonFiniteError("loss", loss, rule, remedy)
        tokens, mfu, eta = pace.measure()
        lr = self.optimiser.param_groups[0]["lr"]
        epoch = self.step * self.batches.size / len(self.batches.examples)
        line = Progress(self.step, self.steps, epoch, loss, lr, float(norm), tokens, mfu, eta)
        if not measured:
            return line
        held = self.measure_held_out()
        pace.skip()  # Steps are not slower for it.
        bits = held.bits_per_character
        return replace(line, held_out_loss=held.loss, perplexity=held.perplexity, bits_per_character=bits)

    def _save(self) -> Path:
        states = {
            f"{name}.{rank}": state
            for rank, generators in enumerate(self.here.gathered(checkpoint.generators()))
            for name, state in generators.items()
        }
        facts = {
            **self.identity,
            "config": self.config.plain(),
            "steps": self.steps,
            "tokenizer": self.tokenizer.plain(),
            "running": [float(self.here.total(self.running)), self.counted],
            "world": self.here.world,
        }
        if self.averages is not None and self.step:
            # Kept with the optimiser's state, which is divided and saved as the weights are.
            averages = self.averages.state_dict()["averages"]
            for name, parameter in self.model.named_parameters():
                self.optimiser.state[parameter]["average"] = averages[name]
        weights, optimiser = self.model.state_dict(), self.optimiser.state_dict()
        file = self.tokenizer.content if isinstance(self.tokenizer, FileTokenizer) else None
        snapshot = Snapshot(self.step, weights, optimiser, self.schedule.state_dict(), states, facts, file)
        return checkpoint.save(snapshot, self.checkpoints, self.here, self.placed.sharded)

    def _restore(self, path: Path, state: Mapping[str, Any]) -> None:
        snapshot = self.placed.restore(self.optimiser, state, path)
        self.schedule.load_state_dict(dict(snapshot.schedule))
        self.batches.position = snapshot.step
        if self.averages is not None and snapshot.step:
            weights = self.model.named_parameters()
            averages = {name: self.optimiser.state[parameter]["average"] for name, parameter in weights}
            state = {"decay": self.averages.decay, "updates": snapshot.step, "averages": averages}
            self.averages.load_state_dict(state)
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

    def skip(self) -> None:
        """Leave out the time since the last measure."""
        self._mark = time.perf_counter()


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
