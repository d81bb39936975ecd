"""Claims are found by looking, judged apart from each other within a limit, and all told in the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import avow
from avow.claims import Claim, Evidence, Finding, catalogue, claims_in, ledger, run
from avow.claims.crew import Worker
from avow.errors import FileError, ParameterError

ROOT = Path(avow.__file__).parent

# What the catalogue must hold, as teaching material states it, with the verdict on each.
RECORDED = {
    "proved": """softmax-categorical copy-gap copy-separated average-two mixture-any noise-one-key-discrete
        self-attend-copies-self route-by-weights permutation rbf-equals-dot low-rank-cost svd-energy svd-kth
        svd-spectral separable-rows separable-cost separable-weaker kernel-form features-cost relu-square
        relu-square-deep rnn-two-forms rnn-vanishing ema-unrolled ema-bias sgd-l2-decay adam-l2-vs-w""",
    "corrected": """softmax-bounds copy-possible noise-isotropic noise-one-key-gauss heads-discrete heads-gauss
        project-out sinusoid-distinct cost-exact cost-bottleneck features-unbiased features-variance perceiver-cost
        relu-linear-a rnn-exploding momentum-ema""",
    "refuted": "finite-mask copy-shortest heads-identical relu-linear-b relu-square-line l2-only-sgd",
}
EXPECTED = {id: verdict for verdict, ids in RECORDED.items() for id in ids.split()}

HEAD = """
    import os, signal, sys, time
    import sympy
    from avow.claims import claim, toolbox
    x = sympy.Symbol("x", real=True)
    words = dict(topic="mine", expected="proved", statement="x", plain="x")
"""


def written(folder: Path, body: str, name: str = "mine.py") -> Path:
    """A file of claims."""
    path = folder / name
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    return path


def test_the_catalogue_holds_every_statement_with_its_verdict() -> None:
    assert len(EXPECTED) == 49
    found = {id: one.expected for id, one in catalogue().items()}
    assert {id: found.get(id, "missing") for id in EXPECTED} == EXPECTED


def test_every_claim_can_be_seen_failing() -> None:
    assert [id for id, one in catalogue().items() if not one.sabotage] == []
    assert sum(len(one.sabotage) for one in catalogue().values()) > len(catalogue())


def test_every_claim_is_told_and_drawn() -> None:
    for id, one in catalogue().items():
        assert one.statement and one.plain.endswith(".") and one.assumptions and one.picture, id
        assert bool(one.amended) == bool(one.amended_plain), id


def test_every_claim_says_truly_where_it_is_used() -> None:
    absent = {id: name for id, one in catalogue().items() for name in one.used_by if not used(name)}
    assert absent == {}
    assert used("maths") and used("maths/rounding") and not used("maths/no_such_file")


def used(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()


def cited(root: Path) -> dict[str, str]:
    """Every claim that a comment or docstring of a tree rests on, with a file that does."""
    return {
        id: path.name
        for path in sorted(root.rglob("*.py"))
        for id in re.findall(r"\[claim ([\w-]+)\]", path.read_text())
    }


def test_every_claim_the_code_rests_on_is_in_the_catalogue() -> None:
    found = cited(ROOT)
    assert {"softmax-perturbation", "residual-cauchy-schwarz"} <= set(found)
    assert {id: file for id, file in found.items() if id not in catalogue()} == {}


def test_a_claim_that_is_cited_in_vain_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("# because [claim pigs-fly]\n")
    assert cited(tmp_path) == {"pigs-fly": "code.py"}


def test_topics_come_from_the_ground_up() -> None:
    topics = list(dict.fromkeys(one.topic for one in catalogue().values()))
    known = [topic for topic in ledger._TOPICS if topic in topics]
    assert topics[: len(known)] == known and topics[0] == "softmax"
    assert list(catalogue())[:4] == ["softmax-categorical", "softmax-bounds", "copy-gap", "finite-mask"]


def test_every_claim_knows_the_file_it_came_from() -> None:
    assert catalogue()["copy-gap"].source == "avow.claims.catalogue.softmax"


def test_the_caller_cannot_change_the_catalogue() -> None:
    catalogue().clear()
    assert "copy-gap" in catalogue()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files belong to the catalogue."""
    package = sys.modules["avow.claims.catalogue"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    ledger._catalogue.cache_clear()
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"avow.claims.catalogue.{path.stem}", None)
    ledger._catalogue.cache_clear()


def test_a_new_file_of_the_catalogue_is_found_by_looking(planted: Path) -> None:
    written(planted, "@claim('brand-new', **words)\ndef new(_):\n    yield toolbox.identity(x, x, 'same')", "brand.py")
    assert list(catalogue())[-1] == "brand-new"
    assert catalogue()["brand-new"].judge().verdict == "proved"


def test_two_claims_of_one_name_are_refused(planted: Path) -> None:
    written(planted, "@claim('copy-gap', **words)\ndef new(_):\n    yield", "twice.py")
    message = (
        "claim: id='copy-gap' is the id of two claims, in avow.claims.catalogue.softmax and in"
        " avow.claims.catalogue.twice; rename one of them"
    )
    with pytest.raises(ParameterError, match=re.escape(message)):
        catalogue()


def test_a_claim_that_is_imported_stays_with_its_author(planted: Path) -> None:
    written(planted, "from avow.claims.catalogue.softmax import copy_gap", "borrows.py")
    assert catalogue()["copy-gap"].source == "avow.claims.catalogue.softmax"


FINE = "@claim('{0}', **words)\ndef check(_):\n    yield toolbox.identity(x, x, 'same')"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "raised while loading: ZeroDivisionError: division by zero (line 7); mend it there"),
        ("raise SystemExit(3)", "raised while loading: SystemExit: 3 (line 7); mend it there, and try again"),
        (
            "import no_such_module",
            "raised while loading: ModuleNotFoundError: No module named 'no_such_module' (line 7)",
        ),
        ("def (", "raised while loading: SyntaxError: invalid syntax (line 7); mend it there"),
        ("@claim('x', **words | {'expected': 'true'})\ndef f(_): ...", "expected='true' is no verdict; one of ["),
        ("pass", "holds no claims at its top level; write one: @avow.claims.claim("),
        (FINE.format("copy-gap"), "has a claim called 'copy-gap', and so does the catalogue; give it an id of its own"),
        (
            FINE.format("one") + "\nother = claim('one', **words)(lambda _: [])",
            "has two claims called 'one'; rename one of them",
        ),
    ],
    ids=["raises", "exits", "imports", "syntax", "verdict", "empty", "clash", "twice"],
)
def test_a_file_that_holds_no_good_claims_says_why(tmp_path: Path, body: str, message: str) -> None:
    path = written(tmp_path, body)
    with pytest.raises(FileError, match=re.escape(f"claims file={path} ") + ".*" + re.escape(message)):
        claims_in(path)


def test_a_file_must_be_there_and_be_python(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"claims file=.*gone\.py does not exist; check the path"):
        claims_in(tmp_path / "gone.py")
    with pytest.raises(FileError, match=rf"claims file={re.escape(str(tmp_path))} is a folder; give one of its files"):
        claims_in(tmp_path)
    (tmp_path / "notes.txt").write_text("claims")
    with pytest.raises(FileError, match=r"notes\.txt is not a Python file; give a file whose name ends in \.py"):
        claims_in(tmp_path / "notes.txt")


def test_a_file_that_never_ends_is_given_up_at_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "while True:\n    pass")
    with pytest.raises(FileError, match=r"ran out of time while loading: 0\.2 s \(line [78]\); mend it there, and try"):
        claims_in(path, seconds=0.2)
    assert list(claims_in(written(tmp_path, FINE.format("quick")), seconds=0.2)) == ["quick"]
    time.sleep(0.3)  # nothing is interrupted once it is loaded


def test_whoever_interrupts_the_loading_of_a_file_is_heard(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        claims_in(written(tmp_path, "raise KeyboardInterrupt"))


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_claims.py").write_text("name = 'from-beside'")
    path = written(tmp_path, "from beside_claims import name\n" + FINE.replace("'{0}'", "name"))
    assert list(claims_in(path)) == ["from-beside"]
    assert str(tmp_path) not in sys.path
    assert claims_in(path)["from-beside"].source == str(path)


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
    @claim("fine", subject=2, sabotage={"three": 3, "two again": 2, "no number": "?"}, **words)
    def fine(k):
        print("noise on stdout, which is not for the news")
        yield toolbox.identity((x + 1) ** 2, x**2 + sympy.Integer(k) * x + 1, "a square")

    @claim("raises", sabotage={"any": 1}, **words)
    def raises(_):
        yield toolbox.identity(x, x, "same")
        raise ValueError("no \\ud800")

    @claim("threads", **words)
    def threads(_):
        import torch, beside_trouble
        yield toolbox.rational(torch.get_num_threads() == 1, "one thread")

    @claim("after", needs=("fine", "copy-gap"), **words)
    def after(_):
        yield toolbox.identity(x, x, "same")

    @claim("orphan", needs=("no-such-claim",), **words)
    def orphan(_):
        yield toolbox.identity(x, x, "same")

    @claim("hen", needs=("egg",), **words)
    def hen(_):
        yield toolbox.identity(x, x, "same")

    @claim("egg", needs=("hen",), **words)
    def egg(_):
        yield toolbox.identity(x, x, "same")

    def no_picture():
        raise RuntimeError("no ink")

    @claim("undrawn", picture=no_picture, **words)
    def undrawn(_):
        yield toolbox.identity(x, x, "same")

    @claim("no-drawing", picture=lambda: 5, **words)
    def no_drawing(_):
        yield toolbox.identity(x, x, "same")

    @claim("absent", requires=("no_such_package",), sabotage={"any": 1}, **words)
    def absent(_):
        yield toolbox.identity(x, x, "same")

    @claim("later", needs=("loops",), **words)
    def later(_):
        yield toolbox.identity(x, x, "same")

    @claim("last", needs=("later",), **words)
    def last(_):
        yield toolbox.identity(x, x, "same")

    @claim("loops", **words)
    def loops(_):
        while True:
            pass
        yield

    @claim("exits", **words)
    def exits(_):
        os._exit(3)
        yield

    @claim("segfaults", **words)
    def segfaults(_):
        os.kill(os.getpid(), signal.SIGSEGV)
        yield

    @claim("half-way", subject=False, sabotage={"fine": "fine", "loops": "loops", "never tried": "fine"}, **words)
    def half_way(subject):
        while subject == "loops":
            pass
        yield toolbox.rational(not subject, "not sabotaged")
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
        ("raises", "no verdict", "the check raised ValueError: no ?"),
        ("threads", "proved", ""),
        ("after", "proved", ""),
        ("orphan", "no verdict", "it needs the claim no-such-claim, and there is none of that name"),
        ("hen", "no verdict", "it waits for claims that wait for it: hen and egg"),
        ("egg", "no verdict", "it waits for claims that wait for it: hen and egg"),
        ("undrawn", "proved", "the picture raised RuntimeError: no ink"),
        ("no-drawing", "proved", "the picture raised TypeError: a picture is a Chart or a Table, not int"),
        ("absent", "not applicable", "no_such_package is not installed here"),
        ("loops", "no verdict", "the claim ran out of time: 4 s"),
        ("exits", "no verdict", "the claim ended the interpreter, with exit code 3"),
        ("later", "no verdict", "it needs the claim loops, on which the verdict was: no verdict"),
        ("last", "no verdict", "it needs the claim later, on which the verdict was: no verdict"),
        ("segfaults", "no verdict", "the claim broke the interpreter, with SIGSEGV"),
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
    import sys
    from avow.claims import claims_in, run
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
            f"    @claim('loops', **words)\n    def loops(_):\n        {body}\n        yield",
            word.name + ".py",
        )
        command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(path)]
        parent = subprocess.Popen(command, cwd=ROOT.parent, stderr=subprocess.PIPE, text=True)
        running.append((parent, word, pid))
    for parent, word, pid in running:
        worker = int(soon(lambda pid=pid: pid.is_file() and pid.read_text()))
        parent.send_signal(word)
        _, said = parent.communicate(timeout=30)
        assert parent.returncode != 0
        assert "KeyboardInterrupt" in said or word == signal.SIGKILL
        soon(lambda worker=worker: not alive(worker))


def soon(answer):  # type: ignore[no-untyped-def]
    """The first answer that is one, within a while."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := answer():
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
    crew: list[Worker] = []
    begin = Worker.begin

    def begun(worker: Worker, *words: object) -> None:
        crew.append(worker)
        begin(worker, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "begin", begun)
    findings = run([catalogue()["finite-mask"], catalogue()["copy-gap"]], workers=1, sabotage=False)
    assert next(findings).as_recorded
    findings.close()  # type: ignore[attr-defined]
    assert crew and not any(worker.alive or alive(worker._process.pid) for worker in crew)


def test_a_worker_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flint.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = run([catalogue()["finite-mask"]])
    assert found.verdict == "no verdict"
    assert found.trouble == "loading ended the interpreter, with exit code 1: RuntimeError: broken on purpose"


def test_without_a_prover_the_ledger_says_what_to_install() -> None:
    code = """
    import sys, types
    old = types.ModuleType("flint")
    old.__version__ = "0.8.0"
    for name, module in (("flint", None), ("sympy", None), ("scipy", None), ("flint", old)):
        kept = sys.modules.get(name)
        sys.modules[name] = module
        try:
            import avow.claims
        except Exception as problem:
            print(type(problem).__name__, problem)
        sys.modules.pop(name)
        if kept:
            sys.modules[name] = kept
        sys.modules.pop("avow.claims", None)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    remedy = "pip install 'avow[rigor]'"
    assert done.stdout.splitlines() == [
        f"MissingPackage python-flint=missing is needed to judge claims; {remedy}",
        f"MissingPackage sympy=missing is needed to judge claims; {remedy}",
        f"MissingPackage scipy=missing is needed to judge claims; {remedy}",
        f"MissingPackage python-flint=0.8.0 negates balls wrongly and proves nothing; {remedy}",
    ]
