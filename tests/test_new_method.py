"""The method of docs/tutorials/method.md, installed as a package of its own, is known to everything that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from avow.errors import ParameterError, UnknownMethod
from avow.methods import GROUP, OWN, method_named, named_form
from avow.methods.exact import Exact
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from avow.nn import Attention, KeyValueCache
from tests.test_readme import ROOT, blocks

pytestmark = pytest.mark.commands

QUIET = ("-q", "-p", "no:cacheprovider")

# The method and the test file that the tutorial prints.
FILES = {Path(x.file).name: x.code for x in blocks((ROOT / "docs/tutorials/method.md").read_text()) if x.file}
METHOD, TEST = FILES["flattened.py"], FILES["test_flattened.py"]


def install(site: Path, name: str, code: str, target: str) -> None:
    """One module and what an installer writes beside it."""
    facts = site / f"{name}_plugin-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / f"{name}.py").write_text(code)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {target}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with one that brings the method, and the method's test file beside it."""
    place = tmp_path_factory.mktemp("site")
    install(place, "flattened", METHOD, "flattened:Flattened")
    (place / "test_flattened.py").write_text(TEST)
    return place


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, site)))
    own = {"PYTHONPATH": path, "AVOW_CALIBRATION": "off", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "CI"))}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=inherited | own, capture_output=True, text=True, check=False
    )


def attends(site: Path, script: str) -> str:
    """What a script prints after the tensors were made."""
    done = run(site, "-c", f"import avow, torch\nq, k, v = torch.randn(3, 1, 2, 64, 8).unbind()\n{script}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_avows_own_methods_are_entry_points_of_its_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert declared == OWN
    files = {path.stem for path in (ROOT / "avow/methods").glob("*.py")} - {"__init__"}
    assert {value.split(":")[0].rsplit(".", 1)[1] for value in OWN.values()} == files


def test_the_new_file_is_short() -> None:
    assert len([line for line in METHOD.splitlines() if line.strip()]) < 60


def test_the_method_attends_by_name_and_as_an_object_and_is_planned(site: Path) -> None:
    said = attends(
        site,
        "from flattened import Flattened\n"
        "by_name = avow.attend(q, k, v, method='flattened', warmth=0.5)\n"
        "as_object = avow.attend(q, k, v, method=Flattened(0.5))\n"
        "print(list(avow.all_methods()), torch.equal(by_name.out, as_object.out))\n"
        "print(as_object.certificate)\n"
        "print(avow.audit(as_object.out, q, k, v, method=Flattened()).certificate.kind)\n"
        "print(avow.plan(q, k, v, tol=1e-2))",
    )
    names, *rest = said.splitlines()
    assert "'flattened'" in names and names.endswith("True")
    assert "method   flattened (warmth=0.5)" in said and "sampled" in rest
    assert "flattened(warmth=0.25)" in said


def test_an_object_needs_no_entry_point(tmp_path: Path) -> None:
    (tmp_path / "flattened.py").write_text(METHOD)
    said = attends(
        tmp_path,
        "from flattened import Flattened\n"
        "print('flattened' in avow.all_methods(), avow.attend(q, k, v, method=Flattened(0.5)).certificate.method)",
    )
    assert said.split() == ["False", "flattened"]


def test_modules_and_caches_take_a_method_object() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    modules = [Attention(8, 2, method, causal=True) for method in ("exact", Separable(2.0), Exact("float64"))]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    named = Attention(8, 2, "separable", causal=True, temperature=2.0)
    named.load_state_dict(modules[0].state_dict())
    assert torch.equal(modules[1](x), named(x)) and not torch.equal(modules[1](x), modules[0](x))
    assert modules[2].certified(x).certificate.parameters == {"precision": "float64"}
    cache = KeyValueCache(2, 8)
    cache.append(*torch.randn(2, 1, 2, 32, 8).unbind())
    q = torch.randn(1, 2, 1, 8)
    assert cache.attend(q, method=Exact()).certificate.method == "exact"
    with pytest.raises(ParameterError, match="which a cache sets by tol and bits; use method='sparse'"):
        cache.attend(q, tol=0.1, method=Sparse(drop=0.3))
    with pytest.raises(ParameterError, match=r"temperature=1\.0 is given with a method object"):
        Attention(8, 2, Separable(2.0), temperature=1.0)


def test_a_method_object_that_has_no_registered_name_cannot_be_kept_by_name() -> None:
    class Other(Exact):
        """Not registered."""

    assert named_form(Sparse(bits=2)) == ("sparse", {"bits": 2})
    with pytest.raises(UnknownMethod, match="is not known by its name; make it an entry point"):
        named_form(Other())


def test_a_file_or_a_class_in_place_of_a_name_is_answered_with_how_to_install_it() -> None:
    with pytest.raises(UnknownMethod, match=r"with pip, as an entry point of the group avow\.methods$"):
        method_named("window.py:Window")
    with pytest.raises(UnknownMethod, match=r"did you mean sparse\?$"):
        method_named("sparsee")


@pytest.mark.parametrize(
    "code, target, why",
    [
        ("import no_such_package", "broken:Broken", "could not be loaded (ModuleNotFoundError: No module named"),
        ("class Broken: pass", "broken:Broken", "is not a subclass of avow.Method"),
        ("from avow import Method\nclass Broken(Method): name = 'broken'", "broken:Broken", "does not define compute"),
        ("from avow.methods.exact import Exact", "broken:Exact", "calls itself 'exact'"),
    ],
    ids=["import fails", "not a method", "incomplete", "other name"],
)
def test_a_plugin_that_fails_to_load_is_warned_of_and_refused_with_the_reason(
    tmp_path: Path, code: str, target: str, why: str
) -> None:
    install(tmp_path, "broken", code, target)
    said = attends(
        tmp_path,
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print(list(avow.all_methods()))\n"
        "print(*(one.message for one in caught))\n"
        "try:\n    avow.attend(q, k, v, method='broken')\n"
        "except avow.InputError as error:\n    print(type(error).__name__, error)",
    )
    names, warning, error = said.splitlines()
    assert "broken" not in names and "exact" in names
    assert f"the method 'broken' ({target}) {why}" in warning
    assert error.startswith(f"UnknownMethod method='broken' {why}") and "repair or uninstall" in error


def test_a_plugin_cannot_take_the_name_of_one_of_avows_methods(tmp_path: Path) -> None:
    install(tmp_path, "exact", METHOD.replace('"flattened"', '"exact"'), "exact:Flattened")
    said = attends(tmp_path, "print(avow.all_methods()['exact'].__module__)")
    assert said.split() == ["avow.methods.exact"]


def test_the_command_line_knows_it(site: Path) -> None:
    done = run(site, "-m", "avow", "compare", "--help")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "flattened softmax attention with smaller logits" in said
    assert "flattened.warmth=0.25 how much of each logit is left" in said


def test_the_comparison_contains_it(site: Path) -> None:
    sizes = ("--length", "64", "--heads", "2", "--dim", "8", "--kinds", "diffuse", "--quick")
    done = run(site, "-m", "avow", "compare", "--methods", "exact,flattened", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    assert '"flattened"' in json.dumps(json.loads(done.stdout))


def test_the_comparison_marks_a_bound_that_its_own_measurement_refutes(tmp_path: Path) -> None:
    lie = METHOD.replace("softmax_l1_bound((1 - self.warmth +", "softmax_l1_bound(0.0 * (1 - self.warmth +")
    assert lie != METHOD
    install(tmp_path, "flattened", lie, "flattened:Flattened")
    sizes = ("--length", "64", "--heads", "2", "--dim", "8", "--kinds", "copying", "--quick")
    done = run(tmp_path, "-m", "avow", "compare", "--methods", "exact,flattened", *sizes, "--json")
    assert done.returncode == 1 and "BROKEN: the bound of flattened(warmth=0.25) on copying heads" in done.stderr
    rows = json.loads(done.stdout)["workloads"][0]["rows"]
    broken = {(row["method"], row["parameters"].get("warmth")): row["broken"] for row in rows}
    assert broken["flattened", 0.25] and not broken["flattened", 1.0] and not broken["exact", None]


def test_the_common_suite_judges_it(site: Path) -> None:
    own = run(site, "-m", "pytest", str(site / "test_flattened.py"), "-c", str(ROOT / "pyproject.toml"), *QUIET)
    assert own.returncode == 0, own.stdout[-3000:]
    done = run(site, "-m", "pytest", "tests/test_every_method.py", "-k", "flattened", *QUIET)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout


def test_a_lie_in_the_new_file_is_caught_by_the_common_suite(tmp_path: Path) -> None:
    lie = METHOD.replace("softmax_l1_bound((1 - self.warmth +", "softmax_l1_bound(0.01 * (1 - self.warmth +")
    assert lie != METHOD
    install(tmp_path, "flattened", lie, "flattened:Flattened")
    lied_about = "flattened and certificate_on_odd and float32"
    done = run(tmp_path, "-m", "pytest", "tests/test_every_method.py", "-x", "-k", lied_about, *QUIET)
    assert done.returncode == 1 and " failed" in done.stdout
