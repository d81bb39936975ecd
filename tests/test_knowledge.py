"""The knowledge experiment: every arm told once, kept when others fail, and gone on with when interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from avow.cli import app
from avow.errors import FileError, ParameterError
from avow.nn import build
from avow.training import Corpus, Document, Evaluation, Outcome, corpus_of, evaluate, invent, load_model, write_corpus
from avow.training.distributed import Ranks
from avow.training.evaluation import Answer
from avow.training.knowledge import CLASSIC, NOT_READ, SMALL, Arm, Experiment, Result, Row, arms, outcomes_by_kind
from avow.training.loop import Trainer
from avow.training.run_many import Interrupted, News, read_result, run_arm, side_by_side
from benchmarks.gpu import _EARLIER

TINY = ["model.width=16", "model.heads=2", "model.layers=1", "model.block=64", "data.batch=8", "run.log_every=2"]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("people")
    write_corpus(invent(people=10), folder)
    return str(folder)


def tiny(people: str, *flags: str, steps: int = 4) -> list[Arm]:
    """Two arms: one that reads nothing, and exact attention."""
    return arms(people, ["exact"], ["rotary"], steps=steps, device="cpu", flags=[*TINY, *flags])


def knowledge(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["knowledge", *words])
    assert done.exit_code == code, (done.output, done.stderr, done.exception)
    return done


def refused(*words: str) -> str:
    """The one line that a mistake ends in."""
    done = knowledge(*words, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr.strip())


@pytest.fixture(scope="module")
def made(people: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole experiment through the command line: its folder and what it printed."""
    out = tmp_path_factory.mktemp("made")
    asked = ["--corpus", people, "--attentions", "separable", "--steps", "4", "--device", "cpu", "--out", str(out)]
    told = knowledge(*asked, "--json", *TINY)
    assert told.stderr.count(": began") == 2 and told.stderr.count(": finished") == 2
    return out, json.loads(told.stdout)


def test_the_document_says_what_the_runs_left(made: tuple[Path, dict[str, Any]], people: str) -> None:
    out, document = made
    assert [row["arm"] for row in document["rows"]] == [NOT_READ, "separable"]
    assert json.loads((out / "knowledge.json").read_text()) == document
    for row in document["rows"]:
        (run,) = row["runs"]
        model, vocabulary = load_model(out / run["folder"])
        found = evaluate(model, vocabulary, corpus_of(people).dev)
        assert (row["right"], row["asked"], row["accuracy"]) == (found.right, 4, found.accuracy)
        assert row["interval"] == list(found.interval)
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        assert row["cpu_seconds"] > 0 and row["seconds"] > 0


def test_the_page_and_the_table_say_the_same(made: tuple[Path, dict[str, Any]], people: str) -> None:
    out, document = made
    page = (out / "knowledge.html").read_text()
    assert (out / "knowledge.png").read_bytes().startswith(b"\x89PNG")
    asked = ["--corpus", people, "--attentions", "separable", "--steps", "4", "--device", "cpu", "--out", str(out)]
    shown = knowledge(*asked, "--resume", *TINY)
    assert shown.stderr.count("was already finished") == 2 and "began" not in shown.stderr
    for row in document["rows"]:
        cells = [row["arm"], f"{row['right']}/{row['asked']}", f"{row['accuracy']:.1%}"]
        assert re.search(r"\s+".join(map(re.escape, cells)), shown.stdout)
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert document["headline"] in " ".join(shown.stdout.split())


def test_an_arm_is_a_run_like_any_other(made: tuple[Path, dict[str, Any]]) -> None:
    out, document = made
    folder = str(out / document["rows"][1]["runs"][0]["folder"])
    asked = CliRunner().invoke(app, ["train", "evaluate", folder, "--json", "--device", "cpu"])
    assert json.loads(asked.stdout)["right"] == document["rows"][1]["right"]


def test_a_second_experiment_does_not_overwrite_the_first(made: tuple[Path, dict[str, Any]], people: str) -> None:
    out, _ = made
    first = tiny(people)
    with pytest.raises(FileError, match=r"holds a run already; use --resume to go on with it, or another --out"):
        side_by_side(first, out)
    with pytest.raises(ParameterError, match=r"holds a run of another configuration; repeat what it began with"):
        side_by_side(first, out, resume=True)


def test_an_experiment_is_not_resumed_with_other_texts_and_other_questions_are_asked_anew(tmp_path: Path) -> None:
    people = tmp_path / "people"
    write_corpus(invent(people=10, documents=2), people)
    (arm, *_) = tiny(str(people))
    (first,) = side_by_side([arm], tmp_path / "out")
    told: list[str] = []
    assert side_by_side([arm], tmp_path / "out", resume=True, tell=lambda news: told.append(news.kind)) == [first]
    assert told == ["found"]
    with (people / "dev.tsv").open("a") as questions:
        questions.write("Where was nobody born?\tNowhere\n")
    (again,) = side_by_side([arm], tmp_path / "out", resume=True)
    assert first.evaluation is not None and again.evaluation is not None
    assert again.evaluation.asked == first.evaluation.asked + 1
    text = people / "wiki.txt"
    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    words = f"corpus={people} holds other texts than those that the run in {tmp_path / 'out' / arm.name} has read"
    with pytest.raises(FileError, match=re.escape(f"{words}; put those back, or use another --out")):
        side_by_side([arm], tmp_path / "out", resume=True)


def children() -> list[int]:
    """The processes that this one started."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        found += [int(word) for word in path.read_text().split()]
    return found


def when(kind: str, act: Callable[[News], None]) -> Callable[[News], None]:
    return lambda news: act(news) if news.kind == kind else None


@pytest.mark.commands
def test_what_is_interrupted_goes_on_to_the_same_answers(people: str, tmp_path: Path) -> None:
    (_, arm) = tiny(people, steps=30)
    (once,) = side_by_side([arm], tmp_path / "once")
    before = children()  # what other tests of this process left running
    asked: list[News] = []

    def ask(news: News) -> None:
        # Once: a second Ctrl-C would not wait for the arms.
        if not asked:
            os.kill(os.getpid(), signal.SIGINT)
        asked.append(news)

    with pytest.raises(Interrupted) as stopped:
        side_by_side([arm], tmp_path, tell=when("progress", ask))
    assert stopped.value.signal == signal.SIGINT and set(children()) <= set(before)
    assert read_result(arm, tmp_path / arm.name) is None, "it ended before it could be interrupted"
    (again,) = side_by_side([arm], tmp_path, resume=True)
    assert once.evaluation is not None and again.evaluation == once.evaluation


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [(Interrupted(signal.SIGTERM), 143, "every arm is saved"), (KeyboardInterrupt(), 130, "at their last checkpoints")],
)
def test_an_interrupt_ends_in_the_command_to_go_on_with(
    people: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException, code: int, words: str
) -> None:
    def interrupted(*given: Any, **more: Any) -> None:
        raise problem

    monkeypatch.setattr("avow.training.run_many.side_by_side", interrupted)
    told = knowledge(*TINY, "--corpus", people, "--out", str(tmp_path), code=code)
    assert words in told.stderr and "go on with: avow " in told.stderr and "--resume" in told.stderr
    assert not (tmp_path / "knowledge.html").exists()


@pytest.mark.commands
def test_one_that_fails_and_one_that_is_killed_leave_the_others(people: str, tmp_path: Path) -> None:
    (_, good), (_, bad) = tiny(people), tiny(people, "optimizer.lr=1e30", "optimizer.clip=inf")
    (_, long) = tiny(people, steps=10**9)
    chosen = [dataclasses.replace(bad, label="bad"), dataclasses.replace(long, label="killed"), good]
    run_arm(good.config, tmp_path / good.name)
    before = children()  # what other tests of this process left running

    def kill(news: News) -> None:
        if news.arm.label == "killed":
            for child in set(children()) - set(before):
                os.kill(child, signal.SIGKILL)

    # One at a time, so that the only worker is the one to kill.
    found = side_by_side(chosen, tmp_path, jobs=1, resume=True, tell=when("progress", kill))
    assert [result.evaluation is None for result in found] == [True, True, False]
    assert found[0].why.startswith("loss=nan is not finite by step 2; lower optimizer.lr=1e+30")
    assert found[1].why == "its process was ended by SIGKILL"
    experiment = Experiment.of(people, tmp_path, found)
    assert [result.arm.label for result in experiment.failures] == ["bad", "killed"]
    assert experiment.best is not None and experiment.best.label == "exact"


@pytest.mark.commands
def test_arms_end_when_nobody_listens(people: str, tmp_path: Path) -> None:
    """`kill -9` of the experiment leaves no arm behind that trains for nobody; what it leaves can be resumed."""
    words = [*TINY, "--corpus", people, "--attentions", "exact", "--steps", "1000000", "--device", "cpu", "--jobs", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-m", "avow", "knowledge", *words, "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stderr is not None
    for line in parent.stderr:
        if "loss" in line or (tmp_path / "no-pretraining-seed-0" / "log.csv").exists():
            break
    (arm,) = [int(word) for word in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    parent.kill()
    parent.wait()
    parent.stderr.close()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{arm}").exists() and "Z" not in Path(f"/proc/{arm}/stat").read_text().split(")")[1]:
        assert time.monotonic() < deadline, "the arm trains on"
        time.sleep(0.05)
    assert list((tmp_path / "no-pretraining-seed-0" / "checkpoints").glob("step-*"))


def test_every_arm_differs_in_what_its_row_says_and_in_nothing_else() -> None:
    chosen = arms("invented", ["exact", "separable"], ["rotary", "learned"], seeds=2, device="cpu")
    assert [(arm.label, arm.seed) for arm in chosen[:5]] == [
        (NOT_READ, 0),
        ("exact, rotary", 0),
        ("exact, learned", 0),
        ("separable, rotary", 0),
        ("separable, learned", 0),
    ]
    assert len({arm.name for arm in chosen}) == 10
    first, other = chosen[1].config, chosen[3].config
    assert dataclasses.replace(other, model=first.model) == first
    assert dataclasses.replace(other.model, attention="exact") == first.model
    assert chosen[0].config.data.task == "questions" and chosen[0].config.model == first.model
    assert chosen[6].config.run.seed == 1


@pytest.mark.parametrize("size", [CLASSIC, SMALL])
def test_every_attention_has_its_entry(size: Any) -> None:
    assert list(size.attentions) == ["exact", "separable", "random_features", "latent"]


def test_the_classic_size_keeps_its_budget(people: str) -> None:
    for arm in arms(people, device="cpu"):
        model = arm.config.model
        # The Perceiver spends the same weights on more layers, each of which sees less.
        shape = (6, 208) if model.attention == "latent" else (4, 256)
        assert (model.layers, model.width, model.heads, model.block) == (*shape, 8, 128)
        assert sum(p.numel() for p in build(arm.config.model).parameters()) <= 3_400_000


def test_bad_names_are_refused_in_a_line(tmp_path: Path, people: str) -> None:
    known = "exact, separable, random_features, latent"
    assert refused("--attentions", "exact,flash") == f"avow: attentions='flash' is none of {known}; choose from these"
    assert refused("--attentions", ",").startswith("avow: attentions=(none) names none of them; choose from exact")
    assert refused("--attentions", "exact,exact") == "avow: attentions='exact' is named twice; name it once"
    assert "positions='round' is none of learned, sinusoidal, rotary" in refused("--positions", "round")
    assert refused("--seeds", "0") == "avow: seeds=0 must be at least 1; leave it out for the default"
    assert refused("--corpus", str(tmp_path / "none")).startswith("avow: corpus=")
    assert "schedule: stride=3 is not a field" in refused("schedule.stride=3")
    assert refused("--device", "tpu") == "avow: device=tpu is not available; use --device cpu"
    rule = "is decided for every arm by the experiment; use --seeds, or leave it out"
    assert refused("run.seed=3") == f"avow: flag='run.seed=3' {rule}"
    (tmp_path / "wiki.txt").write_text("Ada Holm. Holm was born in Arden.\n")
    (tmp_path / "train.tsv").write_text("Where was Ada Holm born?\tArden\n")
    assert "holds no dev.tsv" in refused("--corpus", str(tmp_path)) and "add a dev.tsv" in refused(
        "--corpus", str(tmp_path)
    )


def outcomes(right: int, asked: int = 4) -> Evaluation:
    corpus = corpus_of("invented")
    some = [
        Outcome(q.where, q.question, q.answer, Answer(q.answer if i < right else "Nowhere", 0.5))
        for i, q in enumerate(corpus.dev[:asked])
    ]
    return Evaluation(tuple(some))


def test_a_row_of_several_seeds_tells_of_the_middle_one_and_of_the_spread() -> None:
    chosen = [arm for arm in arms("invented", ["exact"], seeds=4, device="cpu") if arm.label == "exact"]
    results = [Result(arm, outcomes(right), 7, 1.0, 1.0) for arm, right in zip(chosen, (3, 0, 1, 4), strict=True)]
    row = Row("exact", tuple(results))
    assert row.middle is not None and row.middle[0] is results[2] and row.spread == (0.0, 1.0)
    assert row.plain()["right"] == 1 and row.plain()["seed"] == 2
    assert [run["right"] for run in row.plain()["runs"]] == [3, 0, 1, 4]


def test_answers_are_right_wrong_or_made_up() -> None:
    corpus = corpus_of("invented")
    (asked,) = {q for q in corpus.dev[:1]}
    other = next(q.answer for q in corpus.dev if q.answer != asked.answer)
    said = [Answer(text, sure) for text, sure in ((asked.answer, 0.2), (other, 0.3), ("orn", 0.4), ("", 0.5))]
    found = Evaluation(tuple(Outcome("here", asked.question, asked.answer, answer) for answer in said))
    kinds = outcomes_by_kind(found, corpus)
    assert {kind: [o.answer.text for o in some] for kind, some in kinds.items()} == {
        "right": [asked.answer],
        "wrong": [other],
        "made up": ["", "orn"],
    }, "a part of a word is no word of the text"


def read_first(corpus: str, *flags: str, steps: int = 20) -> dict[str, str]:
    """Digests of what every arm of an experiment reads in its first steps: numbers of characters, exactly."""
    digests = {}
    for arm in arms(corpus, steps=steps, device="cpu", seeds=2, flags=flags):
        trainer = Trainer(arm.config, Path("never written"), Ranks(0, 1, torch.device("cpu")))
        whole = hashlib.sha256()
        for step in range(steps):
            for rows in trainer.batches.examples.rows(*trainer.batches.read(step)):
                whole.update(repr(rows.shape).encode())
                whole.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
        digests[arm.name] = whole.hexdigest()[:16]
    return digests


def recipe(**digests: str) -> dict[str, str]:
    """The same for every attention: only the arm without pretraining reads something else."""
    names = ("exact", "separable", "random_features", "latent")
    return {
        f"{name}-seed-{seed}": digests[f"{'unread' if name == 'no-pretraining' else 'read'}_{seed}"]
        for seed in (0, 1)
        for name in ("no-pretraining", *names)
    }


def test_the_experiment_reads_what_it_always_has(tmp_path: Path) -> None:
    """The figures on its page were made with these examples, in this order."""
    assert read_first("invented") == recipe(
        unread_0="80f7f2aec38eac60", read_0="149d15565659ff26", unread_1="9745fe9372cd106a", read_1="044288f5298c65fe"
    )
    # Documents longer than a block: they are read from their start, as ever, and not cut into windows.
    some = invent(people=12)
    texts = [document.text for document in some.documents if isinstance(document, Document)]
    long = tuple(Document(" ".join(texts[first : first + 4]), "") for first in range(0, len(texts), 4))
    write_corpus(Corpus(long, some.train, some.dev), tmp_path)
    assert read_first(str(tmp_path)) == recipe(
        unread_0="273f2c304488a632", read_0="25fa4a09f8f27ce3", unread_1="ac3e8a97e3511dfc", read_1="debbd95da2b4e765"
    )
    # The recipe before statements.
    assert read_first(str(tmp_path), *_EARLIER) == recipe(
        unread_0="273f2c304488a632", read_0="5b35cf1911faa9d9", unread_1="ac3e8a97e3511dfc", read_1="d47c8e81aee7db42"
    )


def test_the_experiment_keeps_its_settings_and_holds_nothing_out() -> None:
    _, exact, *_ = (arm.config for arm in arms(device="cpu"))
    assert (exact.optimizer.lr, exact.optimizer.weight_decay, exact.optimizer.beta2) == (0.01, 0.05, 0.95)
    assert (exact.data.task, exact.data.held_out, exact.data.batch) == ("mixture", 0.0, 64)
    kinds = {"language": 1, "spans": 1, "cloze": 12, "questions": 3, "facts": 0, "reverse": 0}
    assert exact.mixture.weights == kinds
    assert (exact.schedule.steps, exact.schedule.warmup, exact.schedule.floor) == (1000, 50, 0.02)
