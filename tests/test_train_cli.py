"""`avow train`: what it prints where, what it leaves behind, how it stops, and what it says to nonsense."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from avow.nn import ModelConfig
from avow.parameters import parameters_of
from avow.report import terminal
from avow.training import Progress, checkpoint, invent, write_corpus
from avow.training.config import SECTIONS
from avow.training.run_folder import locked, read_log
from tests.helpers import command as commands
from tests.helpers.runs import SMALL
from tests.test_tokenizer import byte_level, saved

ROOT = Path(__file__).parent.parent
FLAGS = [*SMALL, "data.sources=corpus"]
TUNING = ["data.batch=4", "data.accumulate=2", "schedule.steps=4", "run.device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ten invented people in it, and a run that has read of them."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(invent(people=10), folder / "corpus")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        run("pretrain", "base", *FLAGS)
    return folder


@pytest.fixture(autouse=True)
def at_home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a copy of it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def lines(name: str) -> int:
    return len(Path("corpus", name).read_text().splitlines())


run = functools.partial(commands.run, "train")


def refused(*arguments: str) -> str:
    """The last line of a mistake, with nothing on stdout."""
    done = run(*arguments, code=2)
    assert done.stdout == ""
    return str(done.stderr.strip().splitlines()[-1])


def interrupting(monkeypatch: pytest.MonkeyPatch, step: int, kind: signal.Signals) -> None:
    """From now on, a signal comes with the line of a step."""
    before = terminal.ProgressLines.__call__

    def call(self: terminal.ProgressLines, progress: Progress) -> None:
        before(self, progress)
        if progress.step == step:
            os.kill(os.getpid(), kind)

    monkeypatch.setattr(terminal.ProgressLines, "__call__", call)


def test_pretrain_finetune_evaluate_and_sample_follow_each_other() -> None:
    first = run("pretrain", "first", *FLAGS)
    assert "14 steps" in first.stdout and "tokens/s" in first.stdout and "MFU" in first.stdout
    assert "checkpoint first/checkpoints/step-00000014" in first.stdout and "step 14/14  loss" in first.stderr
    # The next command is one that works.
    following = shlex.split(first.stdout.strip().splitlines()[-1].removeprefix("next: avow train "))
    assert following == ["finetune", "first-tuned", "--from", "first"]
    second = run(*following, *TUNING)
    config = tomllib.loads(Path("first-tuned/run.toml").read_text())
    assert (config["data"]["task"], config["data"]["sources"]) == ("questions", ["corpus"])
    assert config["run"]["start"] == "first/checkpoints/step-00000014" and config["model"]["width"] == 16
    # A run remembers what it began with.
    assert run("finetune", "first-tuned", "--resume").stdout == second.stdout
    following = shlex.split(second.stdout.strip().splitlines()[-1].removeprefix("next: avow train "))
    assert following == ["evaluate", "first-tuned"]
    third = run(*following)
    asked = lines("dev.tsv")
    assert re.search(rf"\d of {asked} right: \d+\.\d% \(95% interval \d+\.\d% to \d+\.\d%\)", third.stdout)
    assert re.search(rf"the majority answer, '\w+': \d of {asked} right", third.stdout)
    assert all(f"{share}%" in third.stdout for share in (25, 50, 75, 100)) and "mean confidence" in third.stdout
    assert "Where was" in third.stdout
    continued = run("sample", "base", "Where ", "--length", "7", "--temperature", "0").stdout
    assert continued.startswith("Where ") and len(continued) == len("Where ") + 7 + 1


def test_json_is_one_document_and_all_of_stdout() -> None:
    trained = json.loads(run("pretrain", "first", *FLAGS, "--json").stdout)
    assert (trained["step"], trained["interrupted"]) == (14, False)
    held_out = trained["reading"]["held_out"]
    assert (trained["reading"]["documents"], held_out) == (lines("wiki.txt"), 4)
    assert trained["epoch"] == pytest.approx(14 * 8 / (lines("wiki.txt") - held_out))
    (*_, last) = read_log(Path("first/log.csv"))
    assert (trained["loss"], trained["lr"]) == (last.loss, last.lr)
    assert trained["held_out"] == {
        "step": 14,
        "held_out_loss": last.held_out_loss,
        "perplexity": last.perplexity,
        "bits_per_character": last.bits_per_character,
    }
    assert last.held_out_loss is not None and last.perplexity == pytest.approx(math.exp(last.held_out_loss))
    assert last.bits_per_character == pytest.approx(last.held_out_loss / math.log(2)), "a token is a character"
    assert tomllib.loads(Path(trained["config"]).read_text())["optimizer"]["lr"] == 0.01
    assert Path(trained["picture"]).read_bytes().startswith(b"\x89PNG")
    found = json.loads(run("evaluate", trained["checkpoint"], "--json").stdout)
    assert (
        found["asked"] == lines("dev.tsv") == len(found["outcomes"]) and found["accuracy"] == found["coverage"][-1][1]
    )
    assert found["majority"]["asked"] == found["asked"] and 0 <= found["mean_confidence"] <= 1
    said = [
        json.loads(run("sample", "base", "Where was", "--seed", seed, "--length", "30", "--json").stdout)
        for seed in ("1", "1", "2")
    ]
    assert said[0] == said[1] and said[0]["written"] != said[2]["written"] and len(said[0]["written"]) == 30


def test_a_page_has_both_charts_and_every_answer_escaped() -> None:
    question, _ = Path("corpus/dev.tsv").read_text().splitlines()[0].split("\t")
    Path("asked.tsv").write_text(f"{question}\tnowhere\n{question}\t<b>a baker</b>\n")
    done = run("evaluate", "base", "--questions", "asked.tsv", "--html", "out/page.html")
    page = Path("out/page.html").read_text()
    assert done.stderr == "wrote out/page.html\n" and page.startswith("<!doctype html>")
    assert 'id="abstention"' in page and 'id="calibration"' in page and "&lt;b&gt;a baker&lt;/b&gt;" in page
    assert "<b>a baker" not in page
    # The training questions of the run's own corpus are at hand; without them there is no majority.
    assert re.search(r"the majority answer, '\w+': 0 of 2 right: 0.0%", done.stdout)
    Path("corpus").rename("elsewhere")
    assert "no training questions available" in run("evaluate", "base", "--questions", "asked.tsv").stdout


def test_the_help_lists_every_field_with_its_default_and_help() -> None:
    for name, steps in (("pretrain", 1000), ("finetune", 200)):
        words = "".join(run(name, "--help").stdout.split())  # Lines break at hyphens too.
        for section, kind in SECTIONS.items():
            for p in parameters_of(kind):
                default = steps if (section, p.name) == ("schedule", "steps") else p.default
                default = ", ".join(default) if isinstance(default, tuple) else default
                assert "".join(f"{section}.{p.name}={default} {p.help}".split()) in words
        for field in dataclasses.fields(ModelConfig):
            if field.name != "vocabulary":
                shown = f"model.{field.name}={getattr(ModelConfig(vocabulary=9), field.name)} {field.metadata['help']}"
                assert "".join(shown.split()) in words


def test_a_length_is_given_where_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def caught(config: Any, *_: object, **__: object) -> None:
        found.append((config.schedule.steps, config.schedule.epochs))
        raise KeyboardInterrupt

    monkeypatch.setattr("avow.training.train", caught)
    Path("a.toml").write_text("[schedule]\nepochs = 3\n")
    for more in ([], ["--config", "a.toml"], ["schedule.epochs=5"], ["schedule.steps=7"]):
        run("pretrain", "base", *more, code=130)
    run("finetune", "base", "--from", "nothing", code=130)
    assert found == [(1000, 0), (0, 3), (0, 5), (7, 0), (200, 0)]


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_where_it_stands_and_the_command_it_gives_ends_it(
    kind: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupting(patched, 3, kind)
        done = run("pretrain", "a run", *FLAGS, code=code)
    assert "no held-out loss was measured (the run was interrupted before)" in done.stdout
    *_, saved, again = done.stderr.strip().splitlines()
    assert saved == "avow: interrupted at step 3 and saved in a run/checkpoints/step-00000003"
    assert again == "go on with: avow train pretrain 'a run' --resume"
    ended = json.loads(run(*shlex.split(again.removeprefix("go on with: avow train ")), "--json").stdout)
    assert ended["step"] == 14 and ended["loss"] == read_log(Path("base/log.csv"))[-1].loss
    paths = (Path(folder, "checkpoints", "step-00000014") for folder in ("a run", "base"))
    weights = [checkpoint.load(path).weights for path in paths]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    # What is finished stays so, and still says how it ended.
    assert json.loads(run("pretrain", "a run", "--resume", "--json").stdout)["loss"] == ended["loss"]


def test_an_interrupt_with_json_is_still_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, 6, signal.SIGINT)
    found = json.loads(run("pretrain", "first", *FLAGS, "--json", code=130).stdout)
    assert found["interrupted"] and found["step"] == 6 and found["checkpoint"].endswith("step-00000006")


def test_a_second_interrupt_names_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.save

    def hurried(snapshot: checkpoint.Snapshot, *given: Any) -> Path:
        if snapshot.step == 8:
            raise KeyboardInterrupt
        return before(snapshot, *given)

    monkeypatch.setattr(checkpoint, "save", hurried)
    done = run("pretrain", "first", *FLAGS, code=130)
    words = "first/checkpoints/step-00000004 is whole; go on with: avow train pretrain first --resume"
    assert done.stderr.strip().splitlines()[-1] == f"avow: stopped at once; {words}"


@pytest.mark.processes
def test_two_processes_print_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "avow"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "train", "pretrain", "two", *FLAGS, "schedule.steps=6", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["step"] == 6
    assert done.stderr.count("step 6/6  loss") == 1


def test_a_bar_fits_a_terminal_and_ends_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    shown = Console(width=80, force_terminal=True, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with shown.file:
        monkeypatch.setattr("avow.report.terminal.Console", lambda **_: shown)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        with terminal.training_progress() as tell:
            tell(Progress(9_000, 15_000, 2.0, 1.2345, 1e-3, 1.0, 1_234_567.0, 0.123, 7400.0))
            (line,) = [row for row in shown.render_lines(shown._live_stack[-1].get_renderable(), pad=False)]
    text = "".join(segment.text for segment in line)
    assert len(text) <= 80 and "…" not in text and "━" in text
    assert "9,000/15,000" in text and "loss 1.234 · 1,234,567 tokens/s · MFU 12.3% · 2:03:20 left" in text


def test_elsewhere_a_long_run_takes_some_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.training_progress() as tell:
        for step in range(10, 2001, 10):
            tell(Progress(step, 2000, 1.0, 1.0, 1e-3, 1.0, 1e4, 0.1, 5.0))
    lines = capsys.readouterr().err.splitlines()
    assert 20 <= len(lines) <= 22 and lines[0].startswith("step 10/2,000") and lines[-1].endswith("done")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrain", "b", "schedule.epoch=3"], "schedule: epoch=3 is not a field; did you mean schedule.epochs?"),
        (["pretrain", "b", "speed.steps=3"], "speed={'steps': 3} is not a section of a configuration"),
        (
            ["pretrain", "b", "--lr=1e-3"],
            "option=--lr is not known to avow train pretrain; fields are written without ",
        ),
        (
            ["pretrain", "b", "corpus/wiki.txt"],
            "to read it, use --data corpus/wiki.txt or data.sources=corpus/wiki.txt",
        ),
        (["pretrain", "b", "--data", "corpus/wiki.txt,corpus/dev.tsv"], "name each source on its own: repeat --data"),
        (
            ["pretrain", "b", *FLAGS, "model.block=10000"],
            "model: block=10000 is longer than the text, which has 1,844 tokens; use model.block<=1844",
        ),
        (["pretrain", "b", "schedule.steps=5", "schedule.epochs=5"], "schedule: steps=5 contradicts schedule.epochs=5"),
        (["pretrain", "b", "--config", "none.toml"], "config=none.toml cannot be read (No such file or directory)"),
        (["pretrain", "b", "data.task=questions"], "task='questions' contradicts avow train pretrain; use avow train"),
        (
            ["finetune", "b", "--from", "nothing", "data.task=spans"],
            "data.task='spans' contradicts questions, which the command or its options say; say it once",
        ),
        (
            ["pretrain", "b", "--data", "invented", "data.sources=corpus"],
            "data.sources='corpus' contradicts [\"invented\"], which the command or its options say; say it once",
        ),
        (["pretrain", "b", "--data", "nowhere"], "data=nowhere does not exist; give files, a folder, or invented"),
        (["pretrain", "data.batch=4"], "RUN='data.batch=4' reads like a field; name the folder of the run first"),
        (["finetune", "b"], "from=None says what to begin with, and must be given; name a pretrained run, or use"),
        (["finetune", "b", "--from", "none"], "run=none does not exist; give the folder of a run, or one of its check"),
        (["evaluate", "corpus"], "run=corpus is neither a run nor a checkpoint; give the folder of a run"),
        (
            ["pretrain", "corpus/wiki.txt", *SMALL],
            "RUN=corpus/wiki.txt is a file, and RUN is the folder that the run is written to; to read it, use "
            "avow train pretrain RUN --data corpus/wiki.txt",
        ),
        (["pretrain", "b", "--resume"], "RUN=b holds no run to resume; check the path, or begin a run without --res"),
        (["finetune", "b", "--resume"], "RUN=b holds no run to resume; check the path, or begin a run without --res"),
        (["pretrain", "b", "--task", "spans", "model.block=4"], "block=4 leaves 3 tokens of a document, fewer than"),
        (["pretrain", "b", "--device", "tpu"], "run: device='tpu' must be one of auto, cpu, cuda"),
    ],
)
def test_nonsense_ends_in_one_line(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)
    assert not Path("b").exists()


def test_what_torchrun_starts_again_begins_a_run_and_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert json.loads(run("pretrain", "first", *FLAGS, "--resume", "--json").stdout)["step"] == 14


def spoil_weights(path: Path) -> None:
    content = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(content[: len(content) // 2])


def test_a_run_is_not_begun_over_another() -> None:
    before = Path("base/log.csv").read_text()
    assert refused("pretrain", "base", *FLAGS) == (
        "avow: run=base holds a run already; continue it with --resume (resume=True in Python), or train into another "
        "folder"
    )
    assert Path("base/log.csv").read_text() == before


def test_a_run_is_resumed_as_what_it_is() -> None:
    line = refused("finetune", "base", "--resume")
    assert line == "avow: data: task='language' contradicts avow train finetune; use avow train pretrain"
    line = refused("pretrain", "base", "--resume", "optimizer.lr=0.5")
    assert "optimizer: lr=0.5 contradicts 0.01 of the checkpoint base/checkpoints/step-00000014" in line


def test_a_truncated_checkpoint_is_refused_and_the_good_one_named_works() -> None:
    good, bad = checkpoint.checkpoints(Path("base/checkpoints"))
    spoil_weights(bad)
    words = f"checkpoint={bad} is damaged: weights.safetensors is not what was written; resume from the previous good "
    for command in (["pretrain", "base", "--resume"], ["evaluate", "base"], ["sample", "base", "A"]):
        assert refused(*command) == f"avow: {words}one, {good}"
    # What is named can be used, and a run that is only begun with finds it by itself.
    run("evaluate", str(good))
    done = run("finetune", "tuned", "--from", "base", *TUNING)
    assert f"{bad} is damaged: weights.safetensors is not what was written; beginning with {good}" in done.stderr
    run("pretrain", "base", "--resume-from", str(good))
    run("evaluate", "base")


def test_a_checkpoint_of_another_run_is_refused_and_nothing_of_the_run_changes() -> None:
    run("pretrain", "other", *FLAGS, "run.seed=2")
    early, _ = checkpoint.checkpoints(Path("other/checkpoints"))
    before = {path: path.read_bytes() for path in Path("base").rglob("*") if path.is_file()}
    line = refused("pretrain", "base", *FLAGS, "run.seed=2", "--resume-from", str(early))
    assert line == (
        f"avow: checkpoint={early} is of another run, other, than base; "
        f"resume other, or begin a new run with its weights: run.start={early}"
    )
    line = refused("pretrain", "base", "--resume-from", str(early))
    assert f"checkpoint={early} is of another run, other, than base: run.seed is 2 there and 0 here; " in line
    line = refused("pretrain", "new", *FLAGS, "run.seed=2", "--resume-from", str(early))
    assert "is of another run, other, than new; " in line and not Path("new").exists()
    assert {path: path.read_bytes() for path in Path("base").rglob("*") if path.is_file()} == before


def test_a_folder_in_which_another_run_is_at_work_is_refused() -> None:
    with locked(Path("base")):
        line = refused("pretrain", "base", "--resume")
    assert line.startswith(f"avow: run=base is being written by process {os.getpid()} on ")
    assert line.endswith("; wait until that ends, or name another folder")
    run("pretrain", "base", "--resume")


def test_a_checkpoint_of_another_architecture_is_refused() -> None:
    line = refused("finetune", "tuned", "--from", "base", "model.width=64", *TUNING)
    assert line == (
        "avow: model: width=64 contradicts 16 in run.start=base/checkpoints/step-00000014; "
        "leave it out: the checkpoint knows it"
    )
    path = Path("base/checkpoints/step-00000014/state.json")
    state = json.loads(path.read_text().replace('"width": 16', '"width": 32'))
    path.write_text(json.dumps(checkpoint.sealed(state)))
    line = refused("evaluate", "base")
    assert "step-00000014 is of another architecture: " in line
    assert line.endswith("use the model configuration it was trained with")


def test_a_full_disk_during_a_save_leaves_the_old_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.save

    def full(snapshot: checkpoint.Snapshot, *given: Any) -> Path:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # The kernel refuses to write past this, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 if snapshot.step == 8 else soft, hard))
        try:
            return before(snapshot, *given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full)
        line = refused("pretrain", "first", *FLAGS)
    assert line == (
        "avow: checkpoint=first/checkpoints/step-00000008 cannot be written (File too large); "
        "make room and resume from first/checkpoints/step-00000004"
    )
    assert [path.name for path in Path("first/checkpoints").iterdir() if path.name != "step-00000000"] == [
        "step-00000004"
    ]
    assert json.loads(run("pretrain", "first", "--resume", "--json").stdout)["step"] == 14


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = [flag for flag in FLAGS if not flag.startswith("run.device")]
    field = "avow: device=cuda is not available here; use device=cpu, or device=auto"
    assert refused("pretrain", "other", *flags, "--device", "cuda") == field
    words = "avow: device=cuda is not available; use --device cpu"
    assert refused("evaluate", "base", "--device", "cuda") == words
    assert refused("sample", "base", "A", "--device", "cuda") == words
    assert not Path("other").exists()


def other_corpus(documents: str, questions: str, dev: str = "") -> None:
    Path("other").mkdir()
    Path("other/wiki.txt").write_text(documents)
    Path("other/train.tsv").write_text(questions)
    if dev:
        Path("other/dev.tsv").write_text(dev)


def test_training_questions_that_are_all_asked_again_are_none() -> None:
    other_corpus("One.\n", "a\tb\n", dev="a\tb\n")
    words = refused("finetune", "tuned", "--from", "base", "--data", "other", *TUNING)
    assert "needs questions, and dev.tsv asks all 1 of train.tsv too; keep questions apart for evaluation" in words


@pytest.mark.parametrize(
    ("documents", "questions", "words"),
    [
        ("One.\n\nThree.\n", "a\tb\n", "wiki.txt line 2=(empty) holds no document; delete the empty line"),
        ("One.\n", "a\tb\n\na\tb\n", "train.tsv line 2='' has 1 columns, not 2; write question, one tab, answer"),
        (
            "One.\n",
            "a\tb\na ñ\tb\n",
            "train.tsv line 2='a ñ' holds 'ñ' (U+00F1), a character outside the vocabulary of",
        ),
        (
            "One.\n",
            f"a\tb\na\t{'b' * 99}\n",
            f"train.tsv line 2: answer='{'b' * 99}' needs 101 positions with its question, and the block has 64; "
            "use a larger block or drop the line",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_file(documents: str, questions: str, words: str) -> None:
    other_corpus(documents, questions)
    assert words in refused("finetune", "tuned", "--from", "base", "--data", "other", *TUNING)
    assert not Path("tuned").exists()
    if "wiki.txt" not in words:
        Path("other/dev.tsv").write_text(questions)
        line = refused("evaluate", "base", "--questions", "other/dev.tsv")
        expected = words.replace("train.tsv", "dev.tsv").removesuffix("use a larger block or drop the line")
        assert expected in line


def test_questions_come_from_one_place() -> None:
    line = refused("evaluate", "base", "--questions", "corpus/dev.tsv", "--data", "corpus")
    assert line == "avow: questions=corpus/dev.tsv contradicts --data corpus; give one of them"


def test_without_questions_a_model_is_judged_by_text_it_was_not_trained_on() -> None:
    Path("corpus/dev.tsv").unlink()
    held_out = json.loads(run("evaluate", "base", "--json").stdout)
    (*_, last) = read_log(Path("base/log.csv"))
    # The same examples as at the run's last step, the same model: the same loss.
    assert held_out["loss"] == pytest.approx(last.held_out_loss, rel=1e-6) and held_out["held_out"]
    assert "held-out examples of the run" in run("evaluate", "base").stdout
    text = Path("corpus/wiki.txt").read_text().splitlines()[0]
    Path("other.txt").write_text(text)
    other = json.loads(run("evaluate", "base", "--data", "other.txt", "--json").stdout)
    assert (other["tokens"], other["characters"], other["held_out"]) == (len(text) - 1, len(text) - 1, False)
    run("pretrain", "all", *FLAGS, "data.held_out=0")
    line = refused("evaluate", "all")
    assert line.startswith("avow: data=corpus has no dev questions, and the run held nothing out; give --questions")
    line = refused("evaluate", "base", "--html", "page.html")
    assert line == "avow: html=page.html is for answers, and there are no questions; give --questions FILE.tsv"


TEXT = "the quick brown fox jumps over the lazy dog. " * 40
OWN = [flag for flag in SMALL if not flag.startswith("model.block")] + ["model.block=16"]


def test_own_texts_are_read_as_the_shell_gives_them() -> None:
    Path("texts").mkdir()
    for name in "abc":
        Path("texts", f"{name}.txt").write_text(TEXT)
    quoted = run("pretrain", "quoted", "--data", "texts/*.txt", *OWN)
    # A shell makes three words of an unquoted pattern, of which two come after the option.
    shell = run("pretrain", "shell", "--data", "texts/a.txt", "texts/b.txt", "texts/c.txt", *OWN)
    repeated = run("pretrain", "twice", "--data", "texts/[ab].txt", "--data", "texts/c.txt", *OWN)
    for done in (quoted, shell, repeated):
        first = done.stderr.splitlines()[0]
        assert first.startswith("read 5,400 characters in 3 documents: 339 windows of 16 tokens, 34 of them held out; ")
        assert first.endswith(
            "14 steps of 8 are 0.37 epochs: only 36.7% of it is trained on; schedule.steps=39 reads all"
        )
        assert re.search(
            r"held out: loss \d\.\d+ nats per token, perplexity \d+\.\d+, \d\.\d+ bits per ch", done.stdout
        )
        assert "next: avow train sample " in done.stdout and done.stdout.strip().endswith(" the")
    assert tomllib.loads(Path("shell/run.toml").read_text())["data"]["sources"] == [f"texts/{x}.txt" for x in "abc"]
    assert "avow: flag='texts/b.txt' must be section.name=value" in refused("pretrain", "b", "texts/b.txt", *OWN)


def test_a_language_model_goes_on_in_plain_characters_and_others_say_how_masks_work() -> None:
    Path("text.txt").write_text(TEXT)
    run("pretrain", "plain", "--data", "text.txt", *OWN)
    written = json.loads(run("sample", "plain", "the ", "--length", "100", "--json").stdout)["written"]
    assert len(written) == 100 and set(written) <= set(TEXT), "beyond its block of 16, and without a mask"
    line = refused("sample", "plain", "⁇")
    assert "holds '⁇' (U+2047), a character outside the vocabulary of 28" in line
    run("pretrain", "spans", "--data", "text.txt", "--task", "spans", *OWN)
    told = run("sample", "spans", "the quick")
    assert told.stderr.startswith(
        "avow: this model restores spans: write ⁇ where text is missing and ⁇ again at the end"
    )
    assert run("sample", "spans", "the ⁇ fox⁇").stderr == ""
    run("finetune", "tuned", "--from", "base", *TUNING)
    assert "answers questions: end the question with ⁇" in run("sample", "tuned", "Where was").stderr


def test_the_written_configuration_makes_the_same_run_again() -> None:
    run("pretrain", "again", "--config", "base/run.toml")
    assert Path("again/run.toml").read_text() == Path("base/run.toml").read_text()
    one, other = (checkpoint.load(Path(name, "checkpoints", "step-00000014")).weights for name in ("base", "again"))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_finished_run_goes_on_with_more_steps() -> None:
    done = run("pretrain", "base", "--resume", "schedule.steps=20")
    assert done.stdout.startswith("20 steps, ") and "not the run that 20 steps from the start would have" in done.stderr
    assert [line.step for line in read_log(Path("base/log.csv"))][-1] == 20
    assert "steps = 20" in Path("base/run.toml").read_text()
    again = run("pretrain", "base", "--resume")
    assert again.stdout.startswith("20 steps, ")
    assert "this run is finished: all 20 steps are done; schedule.steps=40, or any larger number, c" in again.stderr
    line = refused("pretrain", "base", "--resume", "schedule.steps=5")
    assert "schedule: steps=5 is fewer steps than the 20 of the checkpoint" in line


def test_the_example_is_named_if_no_data_is_given() -> None:
    tiny = [flag for flag in SMALL if not flag.startswith("schedule")]
    assert "the data is avow's example, invented people; --data FILE reads your own" in (
        run("pretrain", "first", *tiny, "steps=2", "data.held_out=0").stderr
    )
    given = run("pretrain", "second", *FLAGS)
    assert "invented" not in given.stderr


def test_a_folder_of_texts_is_read_and_little_text_is_counted_well() -> None:
    Path("texts").mkdir()
    for name in ("b.txt", "a.txt"):
        Path("texts", name).write_text(TEXT[:9])
    tiny = [flag for flag in OWN if not flag.startswith(("schedule", "data.held_out"))]
    done = run("pretrain", "first", "--data", "texts", *tiny, "steps=2", "data.held_out=0.0")
    assert "18 characters in 2 documents" in done.stderr
    assert "no held-out loss was measured (data.held_out=0)" in done.stdout
    Path("texts/a.txt").unlink()
    done = run("pretrain", "second", "--data", "texts", *tiny, "steps=2", "model.block=8")
    assert "9 characters in 1 document: 1 window of 8 tokens, none held out" in done.stderr
    assert "no held-out loss was measured (there is too little to hold any out)" in done.stdout


def test_bytes_and_a_tokenizers_file_are_tokens() -> None:
    Path("text.txt").write_text(TEXT)
    path = saved(Path(), byte_level())
    for name in ("bytes", str(path)):
        folder = name.replace(".", "-")
        told = run("pretrain", folder, "--data", "text.txt", "--tokenizer", name, *OWN)
        assert "bits per character" in told.stdout
        # The file may go: the checkpoint has its own.
        path.unlink(missing_ok=True)
        assert run("sample", folder, "a word that was not there: ñ", "--length", "3").exit_code == 0
        assert json.loads(run("evaluate", folder, "--json").stdout)["held_out"]
        path = saved(Path(), byte_level())


def test_what_draws_the_losses_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("pretrain", "undrawn", *FLAGS)
    assert "undrawn/loss.png was not drawn: " in done.stderr and not Path("undrawn/loss.png").exists()
    assert json.loads(run("pretrain", "undrawn", "--resume", "--json").stdout)["picture"] is None
