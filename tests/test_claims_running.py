"""Claims are judged apart from each other, within a limit, after those they need; and all are told in the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from avow.errors import ParameterError
from avow.theory.claims import Claim, Evidence, Finding, catalogue, claims_in, run
from avow.worker_pool import Worker
from tests.helpers.judging import written

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds_each": 0.0}, "run: seconds_each=0.0 must be above 0; try seconds_each=60"),
        ({"workers": 0}, "run: workers=0 must be at least 1; try workers=2"),
    ],
)
def test_limits_that_allow_nothing_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        run(catalogue(), **options)  # type: ignore[arg-type]


def test_a_claim_that_no_worker_could_find_is_refused() -> None:
    homeless = Claim("homeless", topic="t", statement="x", plain="x", expected="proved", check=lambda _: [])
    message = "run: source of homeless='' must say where a worker finds the claim; take claims from catalogue(), or"
    with pytest.raises(ParameterError, match=re.escape(message)):
        run([homeless])


TROUBLED = """
    broken = {"three": 3, "two again": 2, "no number": "?"}
    @claim("fine", subject=2, sabotage=broken, **words | {"formal": square})
    def fine(proof, k):
        print("noise on stdout, which is not for the news")
        proof.conclude("it", says="a square")

    @claim("raises", sabotage={"any": 1}, **words)
    def raises(proof, _):
        proof.conclude("it")
        raise ValueError("no \\ud800")

    @claim("threads", **words)
    def threads(proof, _):
        import torch, beside_trouble
        proof.conclude("it")
        proof.shows(toolbox.rational(torch.get_num_threads() == 1, "one thread"))

    @claim("after", needs=("fine", "copy-gap"), **words)
    def after(proof, _):
        proof.conclude("it")

    @claim("orphan", needs=("no-such-claim",), **words)
    def orphan(proof, _):
        proof.conclude("it")

    @claim("hen", needs=("egg",), **words)
    def hen(proof, _):
        proof.conclude("it")

    @claim("egg", needs=("hen",), **words)
    def egg(proof, _):
        proof.conclude("it")

    def no_picture():
        raise RuntimeError("no ink")

    @claim("undrawn", picture=no_picture, **words)
    def undrawn(proof, _):
        proof.conclude("it")

    @claim("no-drawing", picture=lambda: 5, **words)
    def no_drawing(proof, _):
        proof.conclude("it")

    @claim("absent", requires=("no_such_package",), sabotage={"any": 1}, **words)
    def absent(proof, _):
        proof.conclude("it")

    @claim("later", needs=("loops",), **words)
    def later(proof, _):
        proof.conclude("it")

    @claim("last", needs=("later",), **words)
    def last(proof, _):
        proof.conclude("it")

    @claim("loops", **words)
    def loops(proof, _):
        while True:
            pass

    @claim("exits", **words)
    def exits(proof, _):
        os._exit(3)

    @claim("segfaults", **words)
    def segfaults(proof, _):
        os.kill(os.getpid(), signal.SIGSEGV)

    @claim("half-way", subject=False, sabotage={"fine": "fine", "loops": "loops", "never tried": "fine"}, **words)
    def half_way(proof, subject):
        while subject == "loops":
            pass
        proof.conclude("it")
        proof.shows(toolbox.rational(not subject, "not sabotaged"))
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Finding], list[str]]:
    """What came of a file full of trouble, and which claims were told of."""
    told: list[str] = []
    path = written(tmp_path_factory.mktemp("claims"), TROUBLED)
    path.with_name("beside_trouble.py").touch()
    found = list(run(claims_in(path), seconds_each=4, tell=lambda one: told.append(one.id)))
    assert len({finding.claim.id for finding in found}) == len(found)
    return {finding.claim.id: finding for finding in found}, told


@pytest.mark.parametrize(
    ("id", "verdict", "trouble"),
    [
        ("fine", "proved", ""),
        ("raises", "no verdict", "the check raised ValueError: no ? (line 19)"),
        ("threads", "proved", ""),
        ("after", "proved", ""),
        ("orphan", "no verdict", "it needs the claim no-such-claim, and there is none of that name"),
        ("hen", "no verdict", "it waits for claims that wait for it: hen and egg"),
        ("egg", "no verdict", "it waits for claims that wait for it: hen and egg"),
        ("undrawn", "proved", "the picture raised RuntimeError: no ink"),
        ("no-drawing", "proved", "the picture raised TypeError: a picture is a Chart or a Table, not int"),
        ("absent", "not applicable", "no_such_package is not installed here"),
        ("loops", "no verdict", "the claim ran out of time: 4 s"),
        ("exits", "no verdict", "the claim: its process ended with exit code 3"),
        ("later", "no verdict", "it needs the claim loops, on which the verdict was: no verdict"),
        ("last", "no verdict", "it needs the claim later, on which the verdict was: no verdict"),
        ("segfaults", "no verdict", "the claim: its process was ended by SIGSEGV"),
        ("half-way", "proved", "the sabotage 'loops' ran out of time: 4 s"),
    ],
)
def test_each_claim_gets_its_verdict_whatever_the_others_do(
    troubled: tuple[dict[str, Finding], list[str]], id: str, verdict: str, trouble: str
) -> None:
    found = troubled[0][id]
    assert (found.verdict, found.trouble) == (verdict, trouble)


def test_nothing_asked_for_is_left_out_and_nothing_else_is_told(
    troubled: tuple[dict[str, Finding], list[str]],
) -> None:
    found, told = troubled
    assert len(found) == 16
    # Those without hope were never begun, and copy-gap was judged for another's sake.
    assert set(told) == set(found) - {"orphan", "hen", "egg", "later", "last"}


def test_sabotages_are_judged_and_those_not_seen_rejected_are_not_said_to_be(
    troubled: tuple[dict[str, Finding], list[str]],
) -> None:
    found, _ = troubled
    # One that makes the check itself fall over has not been rejected by it.
    assert found["fine"].sabotages == {"three": True, "two again": False, "no number": False}
    assert found["half-way"].sabotages == {"fine": True, "loops": False, "never tried": False}
    # Of a check that cannot be tried, or that falls over the claim itself, nothing is said.
    assert found["absent"].sabotages == found["raises"].sabotages == {}


def test_what_a_worker_found_is_what_the_claim_finds_here(troubled: tuple[dict[str, Finding], list[str]]) -> None:
    found = troubled[0]["fine"]
    here = found.claim.judge()
    assert [step.plain() for step in found.evidence] == [step.plain() for step in here.evidence]
    assert all(isinstance(step, Evidence) for step in found.evidence) and 0 < found.seconds < 4
    told = json.loads(json.dumps([one.plain() for one in troubled[0].values()], allow_nan=False))
    assert {one["id"] for one in told} == set(troubled[0])


INTERRUPTED = """
    import signal, sys
    from avow.theory.claims import claims_in, run
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    for _ in run(claims_in(sys.argv[1]), seconds_each=100, workers=1):
        pass
"""


def test_no_worker_is_left_behind_by_an_interrupt_or_a_sudden_end(tmp_path: Path) -> None:
    running = []
    for word in (signal.SIGINT, signal.SIGKILL):
        pid = tmp_path / f"pid-{word.name}"
        body = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n        while True:\n            time.sleep(0.01)"
        path = written(
            tmp_path,
            f"    @claim('loops', **words)\n    def loops(proof, _):\n        {body}",
            word.name + ".py",
        )
        command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(path)]
        parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        running.append((parent, word, pid))
    for parent, word, pid in running:
        worker = int(soon(lambda file: file.is_file() and file.read_text(), pid))
        parent.send_signal(word)
        _, said = parent.communicate(timeout=30)
        assert parent.returncode != 0
        assert "KeyboardInterrupt" in said or word == signal.SIGKILL
        soon(lambda process: not alive(process), worker)


def soon(answer: Callable[[Any], Any], about: Any) -> Any:
    """The first answer that is one, within a while."""
    until = time.monotonic() + 180  # a busy machine takes its time to load torch twice
    while time.monotonic() < until:
        if found := answer(about):
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and that nobody has asked about is gone as well.
    status = Path(f"/proc/{pid}/stat")
    return not status.is_file() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_listener_who_stops_listening_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    start = Worker.__init__

    def started(worker: Worker, *words: Any) -> None:
        start(worker, *words)
        pids.append(worker.pid)

    monkeypatch.setattr(Worker, "__init__", started)
    findings = run([catalogue()["finite-mask"], catalogue()["copy-gap"]], workers=1, sabotage=False)
    assert next(findings).as_recorded
    findings.close()  # type: ignore[attr-defined]
    assert pids and not any(map(alive, pids))


def test_a_worker_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flint.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = run([catalogue()["finite-mask"]])
    assert found.verdict == "no verdict"
    assert found.trouble == "loading: its process ended with exit code 1: RuntimeError: broken on purpose"
