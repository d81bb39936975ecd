"""Training: what is interrupted ends where it would have, what is cut in pieces adds up, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from avow.errors import DtypeError, FileError, NonFiniteError, ParameterError
from avow.optim import AveragedWeights
from avow.training import PAD, Progress, Trained, checkpoint, load_model, loop, read_config, train
from avow.training.distributed import Ranks
from avow.training.evaluation import summed_loss
from avow.training.loop import Trainer
from avow.training.run_folder import read_log
from tests.helpers.kill import ends_alike, killed
from tests.helpers.runs import small
from tests.test_tokenizer import byte_level, saved

ROOT = Path(__file__).parent.parent
ALONE = Ranks(0, 1, torch.device("cpu"))
FEW = ["data.batch=4", "data.accumulate=1", "run.device=cpu", "data.sources=invented"]


def interrupting(step: int, kind: signal.Signals):  # type: ignore[no-untyped-def]
    """A progress callback that sends this process a signal."""

    def callback(progress: Progress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), kind)

    return callback


def same(one: Trained, other: Trained) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return one.step == other.step and all(torch.equal(x, y) for x, y in pairs)


def losses(folder: Path) -> list[tuple[int, float, float, float | None]]:
    return [(line.step, line.loss, line.norm, line.held_out_loss) for line in read_log(folder / "log.csv")]


@pytest.mark.parametrize(("kind", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, ["optimizer.average=0.8"])])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: Path, kind: signal.Signals, flags: list[str]) -> None:
    config = small(tmp_path, *flags)
    whole = train(config, tmp_path / "whole")
    assert "Linear(" not in repr(whole) and not any(text in repr(whole) for text in whole.corpus.texts)
    half = train(config, tmp_path / "half", progress=interrupting(6, kind))
    assert half.interrupted and half.step == 6 and half.checkpoint.name == "step-00000006"
    # 6 steps of 8 are 48 places: in the middle of the third epoch of 18 windows.
    torch.rand(7)  # Where the generator stands now must not matter.
    done = train(config, tmp_path / "half", resume=True)
    assert not done.interrupted and same(done, whole)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")


@pytest.mark.parametrize("lost", ["generators", "position", "optimiser", "schedule", "averages"])
def test_without_any_one_part_the_bits_would_differ(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path, "optimizer.average=0.8")
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "half", progress=interrupting(6, signal.SIGINT))
    before = Trainer._restore

    def forgetful(self: Trainer, *given) -> None:  # type: ignore[no-untyped-def]
        kept = {
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generators": torch.get_rng_state(),
        }
        before(self, *given)
        if lost == "position":
            self.batches.position += 1
        elif lost == "generators":
            torch.set_rng_state(kept["generators"])
        elif lost == "optimiser":
            self.optimiser.state.clear()
        elif lost == "averages":
            self.averages = AveragedWeights(self.model, 0.8)
        else:
            self.schedule.load_state_dict(kept["schedule"])

    monkeypatch.setattr(Trainer, "_restore", forgetful)
    done = train(config, tmp_path / "half", resume=True)
    assert not all(
        torch.equal(x, y)
        for x, y in zip(whole.model.state_dict().values(), done.model.state_dict().values(), strict=True)
    )


def test_a_run_ends_with_the_average_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[Tensor]] = []
    update = AveragedWeights.update

    def watched(self: AveragedWeights) -> None:
        steps.append([weight.detach().double().clone() for weight in self.model.parameters()])
        update(self)

    monkeypatch.setattr(AveragedWeights, "update", watched)
    done = train(small(tmp_path, "optimizer.average=0.8"), tmp_path / "run")
    loaded, _ = load_model(tmp_path / "run")
    shares = torch.tensor([0.8 ** (len(steps) - 1 - step) for step in range(len(steps))], dtype=torch.float64)
    for weight, saved_weight, *history in zip(done.model.parameters(), loaded.parameters(), *steps, strict=True):
        expected = torch.tensordot(shares / shares.sum(), torch.stack(history), 1)
        assert torch.equal(weight, saved_weight) and torch.allclose(weight.double(), expected, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(weight.double(), history[-1], rtol=1e-5, atol=1e-7)


def test_a_checkpoint_that_does_not_know_a_field_has_its_default(tmp_path: Path) -> None:
    plain = small(tmp_path).plain()
    del plain["optimizer"]["average"], plain["mixture"]
    assert checkpoint.differences(small(tmp_path), plain) == []
    changed = small(tmp_path, "optimizer.average=0.5")
    assert checkpoint.differences(changed, plain) == [("optimizer", "average", 0.0, 0.5)]


def test_a_run_leaves_the_draws_of_others_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    Trainer(small(tmp_path), tmp_path / "seen", ALONE).advance()
    assert not torch.equal(torch.get_rng_state(), before), "weights and dropout have no other generator"
    torch.set_rng_state(before)
    train(small(tmp_path), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_log_goes_on_where_the_checkpoint_stands(tmp_path: Path) -> None:
    config = small(tmp_path, "run.log_every=1")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "half", progress=interrupting(7, signal.SIGINT))
    with (tmp_path / "half" / "log.csv").open("a") as file:
        file.write("8,14,0.1,9.9,1,1,1,1,1,,,\n9,14,0.")  # Lines of a killed run beyond its checkpoint, one cut short.
    train(config, tmp_path / "half", resume=True)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "half")) == 14


def gradients(trainer: Trainer, step: int = 0) -> list[Tensor]:
    trainer.model.train()
    trainer.backward(trainer.batches[step])
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(some, others, strict=True))


def test_micro_batches_add_up_to_one_batch(tmp_path: Path) -> None:
    whole, cut, other = (
        gradients(Trainer(small(tmp_path, "model.dropout=0.0", f"data.accumulate={k}"), tmp_path / "run", ALONE), step)
        for k, step in ((1, 0), (4, 0), (4, 1))
    )
    assert apart(whole, cut) < 1e-6
    assert apart(whole, other) > 1e-3


def test_the_gradient_is_that_of_the_plain_padded_mean(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, "model.dropout=0.0", "data.accumulate=4"), tmp_path / "run", ALONE)
    found = gradients(trainer)
    ids, targets = trainer.batches.examples.rows(*trainer.batches.read(0))
    wide = [torch.from_numpy(np.pad(x, ((0, 0), (0, 64 - x.shape[1])))).long() for x in (ids, targets)]
    trainer.model.zero_grad()
    nn.functional.cross_entropy(trainer.model(wide[0]).flatten(0, 1), wide[1].flatten(), ignore_index=PAD).backward()
    assert apart(found, [p.grad for p in trainer.model.parameters() if p.grad is not None]) < 1e-6


def test_padding_has_no_loss() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[2, 3, PAD], [4, PAD, PAD]])
    by_hand = -sum(logits.log_softmax(-1)[b, n, targets[b, n]] for b, n in ((0, 0), (0, 1), (1, 0)))
    torch.testing.assert_close(summed_loss(logits, targets), by_hand)


def test_a_run_that_goes_on_needs_no_longer_where_it_began(tmp_path: Path) -> None:
    first = train(small(tmp_path), tmp_path / "first")
    config = small(tmp_path, "data.task=questions", f"run.start={first.checkpoint}")
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "half", progress=interrupting(6, signal.SIGINT))
    shutil.rmtree(tmp_path / "first")
    saved = read_config(tmp_path / "half" / "run.toml")
    assert same(train(saved, tmp_path / "half", resume=True), whole)
    with pytest.raises(FileError, match="first"):
        train(saved, tmp_path / "anew")


def test_a_run_that_was_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    small(tmp_path)
    kills = killed(tmp_path, times=2, seed=1, steps=60)
    assert all(kill.aim <= kill.survived for kill in kills)
    assert 0 <= kills[0].survived < kills[1].survived < 60, "both kills fell into the run, and the second went on"
    assert ends_alike(tmp_path, 60)


def test_a_small_run_learns(tmp_path: Path) -> None:
    rows: list[Progress] = []
    train(small(tmp_path, "schedule.steps=60"), tmp_path / "run", progress=rows.append)
    assert rows[-1].loss < rows[0].loss - 0.5
    assert rows[-1].eta == 0 and rows[0].eta > 0
    assert all(row.tokens_per_second > 0 and 0 < row.mfu < 1 for row in rows)
    assert rows[-1].lr == pytest.approx(0.001, rel=0.1)
    assert rows[-1].epoch == pytest.approx(60 * 8 / 18)


def test_a_trained_model_is_loaded_from_its_files(tmp_path: Path) -> None:
    done = train(small(tmp_path), tmp_path / "run")
    ids = torch.randint(2, done.tokenizer.size, (2, 9))
    for path in (tmp_path / "run", done.checkpoint):
        model, tokenizer = load_model(path)
        assert tokenizer == done.tokenizer
        assert torch.equal(model(ids), done.model.eval()(ids))
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileError, match="has no checkpoint yet; train it first"):
        load_model(tmp_path / "new")


def test_low_precision_trains_float32_weights(tmp_path: Path) -> None:
    done = train(small(tmp_path, "run.precision=bfloat16"), tmp_path / "run")
    assert {x.dtype for x in done.model.parameters()} == {torch.float32}
    other = train(small(tmp_path), tmp_path / "other")
    assert not same(done, other)


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    train(small(tmp_path, "schedule.steps=4"), tmp_path / "run")
    with pytest.raises(FileError, match="holds a run already; continue it with --resume"):
        train(small(tmp_path, "schedule.steps=4"), tmp_path / "run")


def test_a_resumed_run_keeps_its_configuration(tmp_path: Path) -> None:
    done = train(small(tmp_path), tmp_path / "run")
    with pytest.raises(ParameterError, match=re.escape("optimizer: lr=0.5 contradicts 0.01 of the checkpoint")):
        train(small(tmp_path, "optimizer.lr=0.5"), tmp_path / "run", resume=True)
    again = train(small(tmp_path, "run.save_every=9"), tmp_path / "run", resume=True)
    assert same(again, done)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_goes_on(tmp_path: Path) -> None:
    whole = train(small(tmp_path), tmp_path / "run")
    good, bad = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    (bad / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(FileError, match=re.escape(f"resume from the previous good one, {good}")):
        train(small(tmp_path), tmp_path / "run", resume=True)
    assert same(train(small(tmp_path), tmp_path / "run", resume=good), whole)


def test_a_damaged_checkpoint_that_was_passed_over_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    train(small(tmp_path), tmp_path / "run")
    good, bad = checkpoint.checkpoints(folder)
    (bad / "weights.safetensors").write_bytes(b"half")
    # It is stopped before it comes to that step again: what it goes on from is its own.
    often = small(tmp_path, "run.log_every=1")
    half = train(often, tmp_path / "run", resume=good, progress=interrupting(13, signal.SIGINT))
    assert half.interrupted and checkpoint.checkpoints(folder)[-1] == half.checkpoint
    assert (folder / f"damaged-{bad.name}" / "weights.safetensors").read_bytes() == b"half"
    train(small(tmp_path), tmp_path / "run", resume=True)


def weights(path: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(path).weights)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    first = train(small(tmp_path, "run.seed=1"), tmp_path / "first")
    second = train(small(tmp_path, "run.seed=2"), tmp_path / "second")
    early = checkpoint.checkpoints(tmp_path / "second" / "checkpoints")[0]
    before = weights(first.checkpoint), (tmp_path / "first" / "run.toml").read_text()
    words = f"checkpoint={early} is of another run, {tmp_path / 'second'}, than {tmp_path / 'first'}"
    remedy = f"; resume {tmp_path / 'second'}, or begin a new run with its weights: run.start={early}"
    # With the configuration of either: with one they differ in that, with the other in where they are.
    for seed, difference in ((2, ""), (1, ": run.seed is 2 there and 1 here")):
        with pytest.raises(FileError, match=re.escape(words + difference + remedy)):
            train(small(tmp_path, f"run.seed={seed}"), tmp_path / "first", resume=early)
    after = weights(first.checkpoint), (tmp_path / "first" / "run.toml").read_text()
    assert before[1] == after[1] and all(torch.equal(x, after[0][name]) for name, x in before[0].items())
    # The same checkpoint under another name of its folder is its own.
    (tmp_path / "link").symlink_to(tmp_path / "second")
    later = checkpoint.checkpoints(tmp_path / "link" / "checkpoints")[-1]
    assert same(train(small(tmp_path, "run.seed=2"), tmp_path / "second", resume=later), second)
    # And what the remedy says begins a new run.
    assert train(small(tmp_path, f"run.start={early}"), tmp_path / "third").step == 14


def test_a_checkpoint_of_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    for seed in (1, 2):
        train(small(tmp_path, f"run.seed={seed}"), tmp_path / f"{seed}")
    (_, own), (early, _) = (checkpoint.checkpoints(tmp_path / seed / "checkpoints") for seed in "12")
    moved = own.parent / early.name
    shutil.rmtree(moved)
    shutil.copytree(early, moved)
    words = f"checkpoint={moved} is of another run than {own}; move it away, then resume"
    with pytest.raises(FileError, match=re.escape(words)):
        train(small(tmp_path, "run.seed=1"), tmp_path / "1", resume=True)


def test_a_later_checkpoint_is_not_kept_nor_written_over_in_silence(tmp_path: Path) -> None:
    whole = train(small(tmp_path), tmp_path / "run")
    early, late = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    rule = f"checkpoint={late} is later than {early}, and the run would go on as if it were not there"
    with pytest.raises(FileError, match=re.escape(f"{rule}; resume from that one, or move it away first")):
        train(small(tmp_path), tmp_path / "run", resume=early)
    late.rename(tmp_path / "away")
    again = train(small(tmp_path), tmp_path / "run", resume=early)
    assert same(again, whole) and again.checkpoint == late
    assert all(torch.equal(x, weights(late)[name]) for name, x in again.model.state_dict().items())


def test_a_run_does_not_go_on_with_other_texts(tmp_path: Path) -> None:
    config = small(tmp_path)
    train(config, tmp_path / "run", progress=interrupting(6, signal.SIGINT))
    text = tmp_path / "corpus" / "wiki.txt"
    before = text.read_text()
    # The same characters and as many lines: nothing but the texts themselves tells.
    text.write_text("".join(reversed(before.splitlines(keepends=True))))
    words = f"data={config.data.sources[0]} holds other texts than those that the run of "
    with pytest.raises(FileError, match=re.escape(words)):
        train(config, tmp_path / "run", resume=True)
    text.write_text(before)
    # Questions to be judged by are no part of a run.
    with (tmp_path / "corpus" / "dev.tsv").open("a") as questions:
        questions.write("Where was nobody born?\tNowhere\n")
    assert not train(config, tmp_path / "run", resume=True).interrupted


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DtypeError, match="device=cuda is not available here; use device=cpu"):
        train(small(tmp_path, "run.device=cuda"), tmp_path / "run")


def test_a_loss_that_explodes_is_said(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=re.escape("lower optimizer.lr=1e+30")):
        train(small(tmp_path, "optimizer.lr=1e30", "optimizer.clip=inf"), tmp_path / "run")


def test_the_invented_corpus_is_the_default(tmp_path: Path) -> None:
    flags = ["model.width=16", "model.heads=2", "model.layers=1", "model.block=96", "schedule.steps=2"]
    for task in ("language", "spans", "questions", "spans+questions", "mixture"):
        done = train(read_config(None, [*flags, "run.device=cpu", f"data.task={task}"]), tmp_path / task)
        assert done.step == 2


def test_a_finished_run_is_given_more_steps(tmp_path: Path) -> None:
    first = train(small(tmp_path), tmp_path / "run")
    before = losses(tmp_path / "run")
    told: list[str] = []
    longer = small(tmp_path, "schedule.steps=20")
    done = train(longer, tmp_path / "run", resume=True, tell=told.append)
    assert (first.step, done.step, done.interrupted) == (14, 20, False)
    assert losses(tmp_path / "run")[: len(before)] == before and losses(tmp_path / "run")[-1][0] == 20
    # The rate had come to its floor, and goes on along the cosine of the longer schedule.
    lines = {line.step: line.lr for line in read_log(tmp_path / "run" / "log.csv")}
    whole = train(longer, tmp_path / "whole")
    expected = {line.step: line.lr for line in read_log(tmp_path / "whole" / "log.csv")}
    assert lines[14] == pytest.approx(0.001) and all(lines[step] == expected[step] for step in (15, 18, 20))
    # It is not the run that twenty steps from the start would have been, and says so.
    assert not same(done, whole)
    assert (
        "20 steps instead of 14: from step 14 on" in told[1] and "not the run that 20 steps from the start" in told[1]
    )
    assert train(longer, tmp_path / "run", resume=True).step == 20


def test_a_run_with_more_steps_that_is_interrupted_ends_in_the_same_bits(tmp_path: Path) -> None:
    longer = small(tmp_path, "schedule.steps=24", "run.log_every=1")
    ends = []
    for name, stop in (("whole", 0), ("half", 19)):
        train(small(tmp_path, "run.log_every=1"), tmp_path / name)
        end = train(longer, tmp_path / name, resume=True, progress=interrupting(stop, signal.SIGINT))
        ends.append(train(longer, tmp_path / name, resume=True) if end.interrupted else end)
    assert same(*ends) and losses(tmp_path / "whole") == losses(tmp_path / "half")


def test_a_slow_first_step_says_when_the_next_line_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick: list[str] = []
    train(small(tmp_path), tmp_path / "quick", tell=quick.append)
    assert not any("first step" in line for line in quick)
    monkeypatch.setattr(loop, "_SLOW_STEP", 0.0)
    slow: list[str] = []
    train(small(tmp_path, "run.log_every=5"), tmp_path / "slow", tell=slow.append)
    assert slow[-1].startswith("the first step took ") and slow[-1].endswith("; the next line comes after 4 more")
    every: list[str] = []
    train(small(tmp_path, "run.log_every=1"), tmp_path / "every", tell=every.append)
    assert not any("first step" in line for line in every)


def test_a_run_is_not_made_shorter(tmp_path: Path) -> None:
    train(small(tmp_path), tmp_path / "run")
    words = "schedule: steps=10 is fewer steps than the 14 of the checkpoint"
    with pytest.raises(ParameterError, match=re.escape(words)):
        train(small(tmp_path, "schedule.steps=10"), tmp_path / "run", resume=True)
    # In epochs it may be said, too: nine of 18 windows in steps of 8 are 21 steps.
    epochs = small(tmp_path, "schedule.steps=0", "schedule.epochs=9")
    assert train(epochs, tmp_path / "run", resume=True).step == 21


def test_a_tokenizers_file_travels_with_the_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, byte_level())
    done = train(small(tmp_path, f"data.tokenizer={path}"), tmp_path / "run")
    path.unlink()
    model, tokenizer = load_model(tmp_path / "run")
    assert tokenizer == done.tokenizer and tokenizer.decode(tokenizer.encode("Ada, née Łódź")) == "Ada, née Łódź"
    assert model.config.vocabulary == tokenizer.size  # type: ignore[union-attr]
    # The run goes on without the file, and what is trained further keeps it.
    longer = read_config(tmp_path / "run" / "run.toml", ["schedule.steps=16"])
    assert train(longer, tmp_path / "run", resume=True).step == 16
    tuned = read_config(None, [f"run.start={done.checkpoint}", "data.task=questions", "schedule.steps=2", *FEW])
    assert train(tuned, tmp_path / "tuned").tokenizer == tokenizer
    with pytest.raises(ParameterError, match="data: tokenizer='bytes' contradicts"):
        read_config(None, [f"run.start={done.checkpoint}", "data.tokenizer=bytes", "schedule.steps=2"])
    # One that is not what was written is noticed as any other file is.
    (done.checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match=r"is damaged: tokenizer\.json is not what was written"):
        load_model(done.checkpoint)
