"""Pretraining against the plain loop, in one run: `python -m benchmarks.run --only gpu_training --corpus DIR`.

The plain loop is what people write first: every batch padded to the block, made when it is needed, float32, one kernel
after the other. Both train the same model on the same examples; speeds are shown only if their gradients agree and
their losses stay together.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from avow.bench.clock import machine
from avow.bench.results import Goal, Result, Row
from avow.training import Progress, TrainConfig, read_config, train
from avow.training.distributed import Ranks
from avow.training.evaluation import summed_loss
from avow.training.loop import Trainer, peak_rate
from benchmarks.options import Options

# Of bfloat16's rounding, in the gradient of a whole step, relative to its length.
_NEAR = 0.03
# Between the mean losses of both loops over the compared steps, relative.
_TOGETHER = 0.02
_AIM = 90.0
_FAST = {
    "cuda": ("run.precision=bfloat16", "run.compile=true", "run.graphs=true", "data.accumulate=2"),
    "cpu": ("data.accumulate=4",),
}
# Steps that choose kernels and fill caches, and are not timed.
_WARM = 10


class Plain(NamedTuple):
    """What the plain loop did: mean loss over its steps, seconds for one of them, and tokens in a second of them."""

    loss: float
    seconds: float
    tokens: float


def configuration(corpus: str, epochs: int, device: str, *more: str) -> TrainConfig:
    """The classic pretraining: 4 layers, 8 heads, width 256, block 128, 128 documents a step."""
    common = (f"data.sources={corpus}", f"schedule.epochs={epochs}", "run.save_every=1000000", f"run.device={device}")
    # One example of span corruption for each document, from its start.
    task = ("data.task=mixture", *(f"mixture.{name}=0" for name in ("language", "cloze", "questions", "after_name")))
    return read_config(None, [*common, *task, "data.held_out=0", "schedule.warmup=20", *more])


def plain(config: TrainConfig, folder: Path, steps: int) -> tuple[Plain, list[Tensor]]:
    """So many steps of the plain loop, and the gradients of its first step."""
    trainer = _trainer(config, folder)
    model, block, device = trainer.model, config.model.block, trainer.here.device
    first: list[Tensor] = []
    losses = torch.zeros((), device=device)
    before, tokens = time.perf_counter(), 0
    for number in range(steps):
        step = trainer.batches[number]
        ids, targets = (
            torch.cat([pad(x, (0, block - x.shape[1])) for x in side]) for side in zip(*step.micros, strict=True)
        )
        trainer.optimiser.zero_grad()
        loss = summed_loss(model(ids.to(device)), targets.to(device)) / step.targets
        loss.backward()
        first = first or [_gradient(p).clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        trainer.optimiser.step()
        trainer.schedule.step()
        losses += loss.detach()
        tokens += step.positions
        if number == _WARM - 1:
            _settle(device)
            before, tokens = time.perf_counter(), 0
    _settle(device)
    seconds = time.perf_counter() - before
    return Plain(float(losses) / steps, seconds / (steps - _WARM), tokens / seconds), first


def ours(config: TrainConfig, folder: Path, steps: int) -> tuple[float, list[Tensor]]:
    """The mean loss over as many steps of the library's loop, and the gradients of its first step."""
    trainer = _trainer(config, folder)
    trainer.backward(trainer.batches[0])
    first = [_gradient(p).clone() for p in trainer.model.parameters()]
    trainer.running.zero_()
    for _ in range(steps):
        trainer.advance()
    return float(trainer.running) / steps, first


def run(options: Options) -> Result:
    """The comparison, then the whole pretraining."""
    corpus, device = str(options.corpus), "cuda" if torch.cuda.is_available() else "cpu"
    epochs, steps = (2, 20) if options.quick else (650, 300)
    fast = _FAST[device]
    with tempfile.TemporaryDirectory() as folder:
        # Dropout draws differently in the two, and would hide a difference that matters.
        slow, expected = plain(configuration(corpus, epochs, device, "model.dropout=0"), Path(folder) / "plain", steps)
        dry = configuration(corpus, epochs, device, "model.dropout=0", *fast)
        loss, found = ours(dry, Path(folder) / "ours", steps)
        config = configuration(corpus, epochs, device, *fast)
        lines: list[tuple[float, Progress]] = []
        before = time.perf_counter()
        trained = train(config, Path(folder) / "whole", progress=lambda x: lines.append((time.perf_counter(), x)))
        total = time.perf_counter() - before
    # Up to the first line the model is compiled: paid once, whatever the length of the run, and told by itself.
    (begin, first), (end, last) = lines[0], lines[-1]
    seconds = (end - begin) * last.step / (last.step - first.step)
    tokens, mfu = (statistics.median(getattr(x, name) for _, x in lines[1:]) for name in ("tokens_per_second", "mfu"))
    difference = _distance(found, expected)
    failures = []
    if not difference <= _NEAR:
        failures.append(f"gradients differ by {difference:.3g} of their length")
    if not abs(loss - slow.loss) <= _TOGETHER * slow.loss:
        failures.append(f"after {steps} steps the losses are {loss:.4f} and {slow.loss:.4f}")
    # One forward pass has the same arithmetic in both loops, so tokens tell its share of the peak.
    whole = slow.seconds * trained.step
    rows: list[Row] = [
        _row("plain: padded, float32", whole, trained.step, slow.tokens, slow.tokens * mfu / tokens),
        _row("avow", seconds, trained.step, tokens, mfu) | {"times faster": whole / seconds, "with compiling": total},
    ]
    size = sum(p.numel() for p in trained.model.parameters())
    remarks = [
        f"{size:,} parameters; {trained.step:,} steps of {config.data.batch}; last loss {last.loss:.4f}",
        f"gradients of the first step differ by {difference:.2g} of their length; mean loss over {steps} steps "
        f"{loss:.4f} and {slow.loss:.4f}; the plain loop's seconds are its pace over those steps times all steps",
        f"with set-up, compiling and the last checkpoint {total:.1f} s; peak {_peak(config):.3g} TFLOP/s measured",
    ]
    goal = Goal(f"{epochs} epochs in at most {_AIM:g} s of training", f"{seconds:.1f} s", seconds <= _AIM)
    where = torch.cuda.get_device_name() if device == "cuda" else machine()
    title = f"training: {epochs} epochs of span corruption on {where}"
    return Result(title, rows if not failures else [], [goal], remarks, failures)


def _row(loop: str, seconds: float, steps: int, tokens: float, mfu: float) -> Row:
    pace: Row = {"seconds": seconds, "ms a step": 1e3 * seconds / steps, "tokens/s": tokens, "MFU": mfu}
    return {"loop": loop, **pace, "times faster": 1.0, "with compiling": None}


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    length = torch.stack([y.norm() for y in expected]).norm()
    return float(torch.stack([(x - y).norm() for x, y in zip(found, expected, strict=True)]).norm() / length)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _peak(config: TrainConfig) -> float:
    kind = torch.bfloat16 if config.run.precision == "bfloat16" else torch.float32
    return peak_rate(torch.device(config.run.device), kind) / 1e12


def _trainer(config: TrainConfig, folder: Path) -> Trainer:
    trainer = Trainer(config, folder, Ranks(0, 1, torch.device(config.run.device)))
    trainer.model.train()
    return trainer


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
