"""Claims are found by looking: those of the catalogue, which say where they are used, and those of one's own file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import avow
from avow.errors import FileError, ParameterError
from avow.theory.claims import catalogue, claims_in, ledger
from avow.theory.claims.claim import citations
from tests.helpers.judging import written

ROOT = Path(avow.__file__).parent

# What the catalogue must hold, as teaching material states it, with the verdict on each.
RECORDED = {
    "proved": """softmax-categorical softmax-bounds softmax-vanishing copy-gap copy-separated
        copy-least average-two mixture-any mixture-range sinusoid-distinct noise-one-key-discrete
        self-attend-copies-self route-by-weights permutation rbf-equals-dot low-rank-cost svd-energy svd-kth
        svd-spectral separable-rows separable-cost separable-weaker kernel-form features-cost relu-square
        relu-square-best relu-square-deep relu-square-no-bias relu-square-far relu-continuous features-trade
        rnn-two-forms rnn-vanishing ema-unrolled ema-bias sgd-l2-decay adam-l2-vs-w""",
    "corrected": """copy-possible noise-isotropic noise-one-key-gauss heads-discrete heads-gauss
        heads-both-noises project-out project-out-oblique cost-exact cost-bottleneck features-unbiased
        features-variance perceiver-cost relu-linear-a rnn-chain rnn-exploding rnn-exploding-ratio momentum-ema
        adam-l2-line""",
    "refuted": """finite-mask softmax-stored sinusoid-stored share-of-the-rest nearest-key average-bisector
        copy-shortest
        heads-identical relu-linear-b relu-square-line l2-only-sgd
        adam-l2-magnitude multi-head-cost""",
}
EXPECTED = {id: verdict for verdict, ids in RECORDED.items() for id in ids.split()}


def test_the_catalogue_holds_every_statement_with_its_verdict() -> None:
    assert len(EXPECTED) == 69
    found = {id: one.expected for id, one in catalogue().items()}
    assert {id: found.get(id, "missing") for id in EXPECTED} == EXPECTED


def test_every_claim_can_be_seen_failing() -> None:
    assert [id for id, one in catalogue().items() if not one.sabotage] == []
    assert sum(len(one.sabotage) for one in catalogue().values()) > len(catalogue())


def test_what_the_code_rests_on_is_in_the_catalogue_and_says_so() -> None:
    assert {"softmax-perturbation", "residual-cauchy-schwarz", "self-attend-copies-self"} <= set(citations())
    assert [id for id in citations() if id not in catalogue()] == []
    assert "numerics/rounding" in catalogue()["softmax-perturbation"].used_by


def test_a_claim_that_is_cited_in_vain_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("# because [claim pigs-fly]\n")
    (tmp_path / "more.py").write_text('"""As they do [claims pigs-fly,\nhens-swim]."""\n')
    assert citations(tmp_path) == {"pigs-fly": ("code", "more"), "hens-swim": ("more",)}


def test_topics_come_from_the_ground_up() -> None:
    topics = list(dict.fromkeys(one.topic for one in catalogue().values()))
    known = [topic for topic in ledger._TOPICS if topic in topics]
    assert topics[: len(known)] == known and topics[0] == "softmax"
    assert list(catalogue())[:4] == ["softmax-categorical", "softmax-bounds", "softmax-stored", "softmax-vanishing"]


def test_every_claim_knows_the_file_it_came_from() -> None:
    assert catalogue()["copy-gap"].source == "avow.theory.claims.catalogue.softmax"


def test_the_caller_cannot_change_the_catalogue() -> None:
    catalogue().clear()
    assert "copy-gap" in catalogue()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files belong to the catalogue."""
    package = sys.modules["avow.theory.claims.catalogue"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    ledger._catalogue.cache_clear()
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"avow.theory.claims.catalogue.{path.stem}", None)
    ledger._catalogue.cache_clear()


def test_a_new_file_of_the_catalogue_is_found_by_looking(planted: Path) -> None:
    written(planted, "@claim('brand-new', **words)\ndef new(proof, _):\n    proof.conclude('it')", "brand.py")
    assert list(catalogue())[-1] == "brand-new"
    assert catalogue()["brand-new"].judge().verdict == "proved"


def test_two_claims_of_one_name_are_refused(planted: Path) -> None:
    written(planted, "@claim('copy-gap', **words)\ndef new(_):\n    yield", "twice.py")
    message = (
        "claim: id='copy-gap' is the id of two claims, in avow.theory.claims.catalogue.softmax and in"
        " avow.theory.claims.catalogue.twice; rename one of them"
    )
    with pytest.raises(ParameterError, match=re.escape(message)):
        catalogue()


def test_a_claim_that_is_imported_stays_with_its_author(planted: Path) -> None:
    written(planted, "from avow.theory.claims.catalogue.softmax import copy_gap", "borrows.py")
    assert catalogue()["copy-gap"].source == "avow.theory.claims.catalogue.softmax"


FINE = "@claim('{0}', **words)\ndef check(_):\n    yield toolbox.identity(x, x, 'same')"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "raised while loading: ZeroDivisionError: division by zero (line 9); fix it there"),
        ("raise SystemExit(3)", "raised while loading: SystemExit: 3 (line 9); fix it there, and try again"),
        ("import os\nos._exit(0)", "raised while loading: SystemExit: os._exit(0) (line 10); fix it there, and try"),
        (
            "def down(): down()\ndown()",
            "raised while loading: RecursionError: maximum recursion depth exceeded (line 9); fix it there, and try",
        ),
        (
            "import no_such_module",
            "raised while loading: ModuleNotFoundError: No module named 'no_such_module' (line 9)",
        ),
        ("def (", "raised while loading: SyntaxError: invalid syntax (line 9); fix it there"),
        ("@claim('x', **words | {'expected': 'true'})\ndef f(_): ...", "expected='true' is not a verdict; one of ["),
        ("pass", "holds no claims at its top level; write one: @avow.theory.claims.claim("),
        (FINE.format("copy-gap"), "has a claim called 'copy-gap', and so does the catalogue; give it an id of its own"),
        (
            FINE.format("one") + "\nother = claim('one', **words)(lambda _: [])",
            "has two claims called 'one'; rename one of them",
        ),
    ],
    ids=["raises", "exits", "leaves", "descends", "imports", "syntax", "verdict", "empty", "clash", "twice"],
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


def test_what_a_file_prints_is_kept_out_of_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(claims_in(written(tmp_path, "print('hello')\n" + FINE.format("quick")))) == ["quick"]
    assert capsys.readouterr() == ("", "hello\n")


def test_the_process_can_be_left_again_once_a_file_is_loaded(tmp_path: Path) -> None:
    leave = os._exit
    claims_in(written(tmp_path, FINE.format("quick")))
    with pytest.raises(FileError):
        claims_in(written(tmp_path, "import os\nos._exit(0)"))
    assert os._exit is leave


def test_a_file_that_never_ends_is_given_up_at_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "while True:\n    pass")
    with pytest.raises(FileError, match=r"ran out of time while loading: 0\.2 s \(line (9|10)\); fix it there"):
        claims_in(path, seconds=0.2)
    assert list(claims_in(written(tmp_path, FINE.format("quick")))) == ["quick"]


def test_a_file_that_never_ends_is_given_up_by_a_job_in_the_background_too(tmp_path: Path) -> None:
    path = written(tmp_path, "while True:\n    pass")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start such jobs
    try:
        with pytest.raises(FileError, match="ran out of time"):
            claims_in(path, seconds=0.2)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_done_in_time_is_not_interrupted_later() -> None:
    late = threading.Event()
    with ledger._interrupted_after(0.05, late):
        pass
    time.sleep(0.2)
    assert not late.is_set()


def test_whoever_interrupts_the_loading_of_a_file_is_heard(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        claims_in(written(tmp_path, "raise KeyboardInterrupt"))


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_claims.py").write_text("name = 'from-beside'")
    path = written(tmp_path, "from beside_claims import name\n" + FINE.replace("'{0}'", "name"))
    assert list(claims_in(path)) == ["from-beside"]
    assert str(tmp_path) not in sys.path
    assert claims_in(path)["from-beside"].source == str(path)


def test_without_a_prover_the_ledger_says_what_to_install() -> None:
    code = """
    import sys, types
    old = types.ModuleType("flint")
    old.__version__ = "0.8.0"
    for name, module in (("flint", None), ("sympy", None), ("scipy", None), ("flint", old)):
        kept = sys.modules.get(name)
        sys.modules[name] = module
        try:
            import avow.theory.claims
        except Exception as problem:
            print(type(problem).__name__, problem)
        sys.modules.pop(name)
        if kept:
            sys.modules[name] = kept
        sys.modules.pop("avow.theory.claims", None)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    remedy = "pip install 'avow[rigor]'"
    assert done.stdout.splitlines() == [
        f"MissingPackage python-flint is not installed; it is needed to judge claims; {remedy}",
        f"MissingPackage sympy is not installed; it is needed to judge claims; {remedy}",
        f"MissingPackage scipy is not installed; it is needed to judge claims; {remedy}",
        f"MissingPackage python-flint=0.8.0 must be at least 0.9 to judge claims; {remedy}",
    ]
