"""Pretraining on a GPU against the plain loop, in one run: `python -m benchmarks.training --corpus DIR`.

The plain loop is what people write first: every batch padded to the block, made when it is needed, float32, one kernel
after the other. Both train the same model on the same examples; speeds are shown only if their gradients agree and
their losses stay together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from avow.training import Progress, TrainConfig, read_config, train
from avow.training.loop import Trainer, summed_loss
from avow.training.parallel import Ranks
from avow.training.speed import peak_rate
from benchmarks.results import Goal, Result, Row

# Of bfloat16's rounding, in the gradient of a whole step, relative to its length.
_NEAR = 0.03
# Between the mean losses of both loops over the compared steps, relative.
_TOGETHER = 0.02
_AIM = 90.0
_FAST = ("run.precision=bfloat16", "run.compile=true", "run.graphs=true", "data.accumulate=2")


class Plain(NamedTuple):
    """What the plain loop did: mean loss over its steps, and seconds for one of them."""

    loss: float
    seconds: float


def configuration(corpus: str, epochs: int, *more: str) -> TrainConfig:
    """The classic pretraining: 4 layers, 8 heads, width 256, block 128, 128 documents a step."""
    common = (f"data.corpus={corpus}", f"schedule.epochs={epochs}", "run.save_every=1000000", "run.device=cuda")
    return read_config(None, [*common, "run.log_every=100", *more])


def plain(config: TrainConfig, folder: Path, steps: int) -> tuple[Plain, list[Tensor]]:
    """So many steps of the plain loop, and the gradients of its first step."""
    trainer = Trainer(config, folder, _here())
    model, block = trainer.model.train(), config.model.block
    first: list[Tensor] = []
    losses = torch.zeros((), device="cuda")
    before = time.perf_counter()
    for number in range(steps):
        step = trainer.batches.at(number)
        ids, targets = (
            torch.cat([pad(x, (0, block - x.shape[1])) for x in side]) for side in zip(*step.micros, strict=True)
        )
        trainer.optimiser.zero_grad()
        loss = summed_loss(model(ids.to("cuda")), targets.to("cuda")) / step.targets
        loss.backward()
        if number == 0:
            first = [_gradient(p).clone() for p in model.parameters()]
        if number == 10:  # What the first steps spend on choosing kernels is not the loop's fault.
            torch.cuda.synchronize()
            before = time.perf_counter()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimiser.clip)
        trainer.optimiser.step()
        trainer.schedule.step()
        losses += loss.detach()
    torch.cuda.synchronize()
    return Plain(float(losses) / steps, (time.perf_counter() - before) / (steps - 11)), first


def ours(config: TrainConfig, folder: Path, steps: int) -> tuple[float, list[Tensor]]:
    """The mean loss over as many steps of the library's loop, and the gradients of its first step."""
    trainer = Trainer(config, folder, _here())
    trainer.model.train()
    trainer.backward(trainer.batches.at(0))
    first = [_gradient(p).clone() for p in trainer.model.parameters()]
    trainer.running.zero_()
    for _ in range(steps):
        trainer.advance()
    return float(trainer.running) / steps, first


def run(corpus: str, epochs: int, steps: int) -> Result:
    """The comparison, then the whole pretraining."""
    more = ("model.dropout=0", "schedule.warmup=100")
    with tempfile.TemporaryDirectory() as folder:
        slow, expected = plain(configuration(corpus, epochs, *more), Path(folder) / "plain", steps)
        loss, found = ours(configuration(corpus, epochs, *more, *_FAST), Path(folder) / "ours", steps)
        whole = Path(folder) / "whole"
        config = configuration(corpus, epochs, "schedule.warmup=100", *_FAST)
        lines: list[tuple[float, Progress]] = []
        before = time.perf_counter()
        trained = train(config, whole, progress=lambda line: lines.append((time.perf_counter(), line)))
        total = time.perf_counter() - before
        size = sum(p.numel() for p in trained.model.parameters())
    # Up to the first line the model is compiled: paid once, whatever the length of the run, and told by itself.
    (begin, first), (end, last) = lines[0], lines[-1]
    seconds = (end - begin) * last.step / (last.step - first.step)
    tokens, mfu = (
        statistics.median(values) for values in zip(*((x.tokens_per_second, x.mfu) for _, x in lines[1:]), strict=True)
    )
    difference = _distance(found, expected)
    failures = []
    if difference > _NEAR:
        failures.append(f"gradients differ by {difference:.3g} of their length")
    if abs(loss - slow.loss) > _TOGETHER * slow.loss:
        failures.append(f"after {steps} steps the losses are {loss:.4f} and {slow.loss:.4f}")
    rows: list[Row] = [
        {"loop": "plain: padded, float32", "seconds": slow.seconds * trained.step, "ms a step": 1e3 * slow.seconds},
        {"loop": "avow", "seconds": seconds, "ms a step": 1e3 * seconds / trained.step, "tokens/s": tokens, "MFU": mfu},
    ]
    remarks = [
        f"{size:,} parameters; {trained.step:,} steps of {config.data.batch}; last loss {last.loss:.4f}",
        f"gradients of the first step differ by {difference:.2g} of their length; mean loss over {steps} steps "
        f"{loss:.4f} and {slow.loss:.4f}; the plain loop's seconds are its pace over those steps times all steps",
        f"with set-up, compiling and the last checkpoint {total:.1f} s; peak {_peak():.3g} TFLOP/s measured",
        f"{slow.seconds * trained.step / seconds:.3g} times faster than the plain loop",
    ]
    goal = Goal(f"{epochs} epochs in at most {_AIM:g} s of training", f"{seconds:.1f} s", seconds <= _AIM)
    title = f"training: {epochs} epochs of span corruption on {torch.cuda.get_device_name()}"
    return Result(title, rows if not failures else [], [goal], remarks, failures)


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    length = torch.stack([y.norm() for y in expected]).norm()
    return float(torch.stack([(x - y).norm() for x, y in zip(found, expected, strict=True)]).norm() / length)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _peak() -> float:
    return peak_rate(torch.device("cuda"), torch.bfloat16) / 1e12


def _here() -> Ranks:
    return Ranks(0, 1, torch.device("cuda"))


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where the two loops do not learn the same."""
    parser = argparse.ArgumentParser("python -m benchmarks.training", description=__doc__)
    parser.add_argument("--corpus", default="invented", help="a folder with wiki.txt, or invented")
    parser.add_argument("--epochs", type=int, default=650, help="times that the text is read")
    parser.add_argument("--steps", type=int, default=300, help="steps over which both loops are compared")
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU")
        return 1
    result = run(parsed.corpus, parsed.epochs, parsed.steps)
    print(result.text())
    return int(bool(result.failures))


if __name__ == "__main__":
    raise SystemExit(main())
