"""Claims on unsound neighbours: refuted where the package is there, not applicable where it is not."""

from __future__ import annotations

import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest

from avow.theory.claims.catalogue import neighbours
from avow.theory.claims.claim import version_of
from tests.helpers.judging import claims_of, judged

LOOSE = """
    import torch

    class BoundSoftmax:
        def interval_propagate(self, box):
            lowest, highest = (torch.exp(x - box[1].max()) for x in box)
            others = [x.flip(self.axis) for x in (lowest, highest)]
            low, high = lowest / (others[1] + lowest + EPS), highest / (others[0] + highest + EPS)
            return low * (1 - 1e-12), high * (1 + 1e-12)
"""


def test_each_claim_names_the_version_it_is_about() -> None:
    found = claims_of(neighbours)
    assert [one.id for one in found] == ["mpmath-iv-exp", "auto-lirpa-softmax"]
    assert [one.requires for one in found] == [("mpmath==1.3.0",), ("auto_LiRPA==0.3",)]


def test_mpmath_s_exponential_does_not_enclose() -> None:
    if judged(neighbours.mpmath_iv_exp).verdict == "not applicable":
        assert version_of("mpmath") != "1.3.0"
        return
    (step,) = judged(neighbours.mpmath_iv_exp).evidence
    low, high, truth = (Fraction(step.facts[name]) for name in ("low", "high", "truth"))
    assert low < high < truth and step.facts["fails"] == "enclosed"


def test_an_enclosure_that_holds_is_no_counterexample() -> None:
    assert neighbours.mpmath_iv_exp.judge_sabotage("balls of python-flint").rejected
    assert neighbours.auto_lirpa_softmax.judge_sabotage("bounds from the corners").rejected


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name and version, to be given an operator."""
    package = tmp_path / "auto_LiRPA" / "operators"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").write_text("__version__ = '0.3'")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "auto_LiRPA"]:
        monkeypatch.delitem(sys.modules, name)
    return package / "softmax.py"


@pytest.mark.parametrize(("eps", "verdict"), [("1e-12", "refuted"), ("0", "no verdict")])
def test_the_check_reads_the_operator_that_is_installed(stand_in: Path, eps: str, verdict: str) -> None:
    stand_in.write_text(textwrap.dedent(LOOSE).replace("EPS", eps))
    found = neighbours.auto_lirpa_softmax.judge()
    for name in [name for name in sys.modules if name.split(".")[0] == "auto_LiRPA"]:
        del sys.modules[name]
    assert found.verdict == verdict, found.trouble
    if verdict == "refuted":
        assert found.evidence[0].facts["bound"] == pytest.approx(8.7565e-15, rel=1e-4)


def test_without_the_package_the_claim_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "auto_LiRPA", None)
    found = neighbours.auto_lirpa_softmax.judge()
    assert (found.verdict, found.as_recorded) == ("not applicable", True)
    assert "auto_LiRPA" in found.trouble
