"""Optional packages: pyproject.toml and the code agree on the extras, and whoever lacks one reads what to install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import avow
from avow import extras
from avow.errors import MissingPackage
from avow.extras import PACKAGES, Package, missing, require
from docs.site.imports import imports, modules
from tests.helpers.command import refused, run
from tests.test_cli import SMALL
from tests.test_cli import at_home as at_home
from tests.test_readme import PAGES, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}
# Packages that another one brings.
BROUGHT = {"llvmlite": "numba", "markupsafe": "jinja2", "mpmath": "sympy", "starlette": "fastapi"}
# A claim is about it, and not applicable without it.
UNASKED = {"auto_LiRPA"}
# Loops and kernels are loaded after avow.decode.cpu and avow.kernels.availability have asked for their compilers.
ASKED_ELSEWHERE = ("avow.decode.", "avow.kernels.")


def brought(extra: str, optional: Mapping[str, list[str]]) -> dict[str, str]:
    """The packages that an extra brings, those of extras it names among them, each with its oldest version."""
    found: dict[str, str] = {}
    for line in optional[extra]:
        one = Requirement(line)
        if one.name == "avow":
            for other in one.extras:
                found |= brought(other, optional)
        else:
            found[one.name] = str(one.specifier).removeprefix(">=")
    return found


def disagreements(packages: Mapping[str, Package], optional: Mapping[str, list[str]]) -> list[str]:
    """Where a table of packages and the extras of a project differ, in words."""
    found = []
    for name, (distribution, extra, oldest) in packages.items():
        if extra not in optional:
            found.append(f"{name}: there is no extra {extra}")
        elif distribution not in (own := brought(extra, optional)):
            found.append(f"{name}: {extra} does not bring {distribution}")
        elif own[distribution] != oldest:
            found.append(f"{name}: {oldest} here, {own[distribution]} in pyproject.toml")
    known = {package.distribution for package in packages.values()}
    users = [extra for extra in optional if extra not in ("all", "dev")]
    found += [
        f"{extra}: brings {x}, which is in no table"
        for extra in users
        for x in sorted({*brought(extra, optional)} - known)
    ]
    whole = brought("all", optional)
    return found + [f"all: lacks {x} of {extra}" for extra in users for x in brought(extra, optional) if x not in whole]


def test_the_table_and_the_project_agree() -> None:
    assert disagreements(PACKAGES, PROJECT["optional-dependencies"]) == []


@pytest.mark.parametrize(
    ("packages", "optional", "fault"),
    [
        ({"a": Package("a", "x", "1")}, {"x": ["a>=1"], "all": ["avow[x]"]}, None),
        ({"a": Package("a", "y", "1")}, {"x": ["a>=1"], "all": ["avow[x]"]}, "a: there is no extra y"),
        ({"a": Package("b", "x", "1")}, {"x": ["a>=1"], "all": ["avow[x]"]}, "a: x does not bring b"),
        ({"a": Package("a", "x", "2")}, {"x": ["a>=1"], "all": ["avow[x]"]}, "a: 2 here, 1 in pyproject.toml"),
        ({}, {"x": ["a>=1"], "all": ["avow[x]"]}, "x: brings a, which is in no table"),
        ({"a": Package("a", "x", "1")}, {"x": ["a>=1"], "all": []}, "all: lacks a of x"),
    ],
)
def test_a_disagreement_is_caught(
    packages: dict[str, Package], optional: dict[str, list[str]], fault: str | None
) -> None:
    found = disagreements(packages, optional)
    assert found == [] if fault is None else fault in found


def asked(path: Path) -> set[str]:
    """The packages that a file requires by name."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("require", "missing")]
    return {word.value for call in own for word in call.args if isinstance(word, ast.Constant)}


def unguarded(root: Path) -> list[str]:
    """Imports of optional packages that neither their file nor a package around it asks for, in words."""
    known = modules(root)
    found = []
    for module, path in known.items():
        if module.startswith(ASKED_ELSEWHERE):
            continue
        above = [".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)]
        guards = asked(path).union(*(asked(known[name]) for name in above if name in known))
        for target, line, _ in imports(module, path, known):
            name = target.partition(".")[0]
            package = BROUGHT.get(name, name)
            if package in PACKAGES and package not in guards:
                found.append(f"{module}:{line}: {name} is loaded and not required before")
            if package not in {*PACKAGES, *CORE, *UNASKED, *sys.stdlib_module_names, "avow"}:
                found.append(f"{module}:{line}: {name} is brought by no extra")
    return found


def test_every_optional_package_is_asked_for_before_it_is_loaded() -> None:
    assert unguarded(ROOT / "avow") == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"a.py": "import torch, json\n"}, None),
        ({"a.py": "def f():\n    require('scipy', purpose='to f')\n    import scipy.linalg\n"}, None),
        ({"a/__init__.py": "require('fastapi', purpose='to a')\n", "a/b.py": "import starlette.requests\n"}, None),
        ({"a.py": "def f():\n    import scipy.linalg\n"}, "avow.a:2: scipy is loaded and not required before"),
        (
            {"a.py": "require('sympy', purpose='to a')\nimport scipy\n"},
            "avow.a:2: scipy is loaded and not required before",
        ),
        (
            {"a/__init__.py": "", "a/b.py": "import starlette\n"},
            "avow.a.b:1: starlette is loaded and not required before",
        ),
        ({"a.py": "import pandas\n"}, "avow.a:1: pandas is brought by no extra"),
    ],
)
def test_an_import_that_nobody_asked_for_is_caught(tmp_path: Path, files: dict[str, str], fault: str | None) -> None:
    for name, source in files.items():
        (tmp_path / "avow" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "avow" / name).write_text(source)
    assert unguarded(tmp_path / "avow") == ([] if fault is None else [fault])


def strange_extras(text: str) -> list[str]:
    """What a text would have people install that pyproject.toml does not have."""
    named = [name.strip() for names in re.findall(r"\bavow\[([^]\n]*)\]", text) for name in names.split(",")]
    return [name for name in named if name not in PROJECT["optional-dependencies"] and "{" not in name]


def test_the_extras_that_people_are_told_to_install_exist() -> None:
    texts = {file: file.read_text() for file in [*PAGES, *(ROOT / "avow").rglob("*.py")]}
    assert {file: strange for file, text in texts.items() if (strange := strange_extras(text))} == {}
    assert sum("avow[" in text for text in texts.values()) > 3


def test_an_extra_that_does_not_exist_is_caught() -> None:
    assert strange_extras("pip install 'avow[lab, nothing]' or 'avow[all]'") == ["nothing"]


def unlisted(page: str) -> list[str]:
    """The extras for users that the table of a page lacks, and those in it that do not exist."""
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    return sorted({*rows} ^ ({*PROJECT["optional-dependencies"]} - {"dev"}))


def test_the_page_on_installing_lists_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert unlisted(page) == []
    assert unlisted(page.replace("| `rigor` |", "| `vigor` |")) == ["rigor", "vigor"]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: Version(version) for name, _, version in (line.partition("==") for line in lines) if version}


def test_every_package_is_tested_in_a_version_that_its_range_allows() -> None:
    tested = pins()
    lines = [*PROJECT["dependencies"], *(line for some in PROJECT["optional-dependencies"].values() for line in some)]
    required = [one for one in map(Requirement, lines) if one.name != "avow"]
    assert [one.name for one in required if one.name not in tested] == []
    assert [str(one) for one in required if not one.specifier.contains(tested[one.name])] == []
    assert all(one.specifier for one in required if one.name in CORE), "each has an oldest version"
    assert not Requirement("torch>=99").specifier.contains(tested["torch"])


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An optional package that is loaded, of a version to be set."""
    module = types.ModuleType("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", module)
    yield module


def test_a_package_that_is_there_is_not_loaded_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(name=name))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99")
    require("pyarrow", purpose="to read")
    assert "pyarrow" not in sys.modules


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("3.9", None),
        ("3.9.0rc1", None),
        ("10.2", None),
        ("unknown", None),
        ("3.8.4", "matplotlib=3.8.4 must be at least 3.9 to draw; pip install 'avow[report]'"),
    ],
)
def test_an_old_version_is_refused(planted: types.ModuleType, version: str, line: str | None) -> None:
    planted.__dict__["__version__"] = version
    error = missing("matplotlib", purpose="to draw")
    assert error is None if line is None else str(error) == line


def test_a_missing_package_is_named_with_the_extra_for_the_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(
        MissingPackage, match=r"^python-flint is not installed; it is needed to prove; pip install 'avow\[rigor\]'$"
    ):
        require("flint", purpose="to prove")
    with pytest.raises(
        MissingPackage, match=r"^python-flint is not installed; it is needed to look; pip install 'avow\[lab\]'$"
    ):
        require("scipy", "flint", purpose="to look", extra="lab")
    with pytest.raises(KeyError):
        require("no_such_package", purpose="to fail")


def test_a_package_without_a_version_is_taken_as_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise extras.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setattr("importlib.metadata.version", unknown)
    assert missing("matplotlib", purpose="to draw") is None


QUICK = ["compare", *SMALL, "--kinds", "diffuse", "--methods", "exact"]
NO_REPORT = "latex2mathml is not installed; it is needed for the report; pip install 'avow[report]'"


@pytest.fixture
def without_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "latex2mathml", None)


def test_without_the_report_s_packages_the_table_is_printed_and_a_line_says_why(without_formulas: None) -> None:
    done = run(*QUICK)
    assert "exact" in done.stdout and done.stderr.endswith(f"no report was written: {NO_REPORT}\n")
    assert not Path("out").exists()


def test_a_report_that_was_asked_for_is_refused_before_the_work(without_formulas: None) -> None:
    assert refused(*QUICK, "--html", "here.html") == f"avow: {NO_REPORT}"
    assert not Path("here.html").exists()


def test_with_the_report_s_packages_nothing_is_said() -> None:
    done = run(*QUICK)
    assert "no report" not in done.stderr and Path("out/compare.html").exists()


def test_a_package_that_is_damaged_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("libquadmath.so.0: cannot open shared object file", name="scipy.linalg")

    monkeypatch.setattr("avow.plan", broken)
    line = (
        "package=scipy cannot be loaded (libquadmath.so.0: cannot open shared object file); install it again with pip"
    )
    assert refused("plan", "--length", "64") == f"avow: {line}"


def test_an_import_that_fails_within_avow_is_a_bug_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("cannot import name 'x'", name="avow.core")

    monkeypatch.setattr("avow.plan", broken)
    with pytest.raises(AssertionError, match="cannot import name 'x'"):
        refused("plan", "--length", "64")


def test_citation_and_package_have_one_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == avow.__version__
