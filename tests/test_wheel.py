"""`pip install avow`, as a stranger has it: the wheel and its core dependencies alone, every command, and its types."""

from __future__ import annotations

import email.message
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer.main
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import avow
from avow.cli import app
from avow.extras import PACKAGES
from tests.helpers.bare import ROOT, Bare, bare, built, dependencies, metadata
from tests.test_manners import commands

pytestmark = pytest.mark.wheel

SMALL = ["--length", "64", "--heads", "1", "--dim", "8"]
# Each command that a stranger may type first: whether it works, or which extra it names in one line.
TYPED = [
    (["--help"], "Commands:"),
    (["--version"], f"avow {avow.__version__}"),
    (["plan", *SMALL], "would run"),
    (["plan", *SMALL, "--tol", "0.1"], "would run"),
    (["bench", "shards", "--ranks", "2"], "shards"),
    (["compare", *SMALL, "--quick", "--html", "report.html"], "avow[report]"),
    (["compare", *SMALL, "--quick", "--png", "picture.png"], "avow[report]"),
    (["compare", "--input", "heads.safetensors"], "avow[files]"),
    (["bench", "linear", "--rehearse"], "pip install triton"),
    (["claims", "list"], "avow[rigor]"),
    (["claims", "run"], "avow[rigor]"),
    (["claims", "show", "softmax-is-convex"], "avow[rigor]"),
    (["construct", "copy", "--orthonormal", "4"], "avow[rigor]"),
    (["construct", "relu-piecewise", "--formula", "x**2"], "avow[rigor]"),
    (["construct", "copy", "--orthonormal", "4", "--save", "weights.safetensors"], "avow[files]"),
    (["lab", "--no-open"], "avow[lab]"),
    (["train", "pretrain", "run"], "avow[train]"),
    (["train", "finetune", "run", "--from", "nothing"], "avow[train]"),
    (["knowledge"], "avow[train]"),
    (["profile", "model", "--text", "text.txt"], "avow[hf]"),
    (["verify", "model", "--plan", "plan.json", "--text", "text.txt"], "avow[hf]"),
]
# Called in one process of the environment: loading torch for each would take minutes.
EVERY = """
import json, sys
from typer.testing import CliRunner
from avow.cli import app
answers = []
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    raised = done.exception is not None and not isinstance(done.exception, SystemExit)
    answers.append([done.exit_code, done.stdout, done.stderr, repr(done.exception) if raised else ""])
print(json.dumps(answers))
"""
LIBRARY = """
import json, torch
import avow, avow.nn, avow.optim, avow.distributed, avow.training, avow.report, avow.theory

q, k, v = torch.randn(3, 1, 2, 96, 16).unbind()
out, certificate = avow.attend(q, k, v, tol=1e-2, causal=True)
assert certificate.bound <= 1e-2 and avow.audit(out, q, k, v, causal=True).errors.max() <= certificate.bound
avow.nn.Attention(32, 2)(torch.randn(1, 5, 32))
cache = avow.nn.KeyValueCache(key_heads=2, dim=16)
cache.append(k, v)
out, certificate = cache.attend(q[:, :, -1:], tol=1e-2)
assert certificate.bound <= 1e-2

def load(name):
    import importlib
    return lambda: importlib.import_module(name)

calls = {
    "KeyValueCache.save": lambda: cache.save("cache.safetensors"),
    "KeyValueCache.load": lambda: avow.nn.KeyValueCache.load("heads.safetensors"),
    "avow.apply": lambda: avow.apply(None, "plan.json"),
    "training.train": lambda: avow.training.train(avow.training.read_config(None, ["schedule.steps=1"]), "run"),
    **{name: load(name) for name in ("avow.integrations.transformers", "avow.lab", "avow.lab.server")},
    **{name: load(name) for name in ("avow.report.page", "avow.theory.claims")},
}
said = {}
for name, call in calls.items():
    try:
        call()
    except avow.errors.MissingPackage as error:
        said[name] = str(error)
print(json.dumps(said))
"""
NAMED = {
    "KeyValueCache.save": "files",
    "KeyValueCache.load": "files",
    "avow.apply": "hf",
    "training.train": "train",
    "avow.integrations.transformers": "hf",
    "avow.lab": "lab",
    "avow.lab.server": "lab",
    "avow.report.page": "report",
    "avow.theory.claims": "rigor",
}
# A person's own file; every line says what a type checker must see of it.
USER = """
from pathlib import Path

import torch

import avow
import avow.optim
from avow.core import Certificate
from avow.errors import ToleranceUnreachable
from avow.nn import Attention, KeyValueCache

q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
out, certificate = avow.attend(q, k, v, tol=1e-2, causal=True)
bound: float = certificate.bound
kind: str = certificate.kind
words: str = certificate.to_json()
again: Certificate = certificate
plan = avow.plan(q, k, v, tol=1e-2)
seconds: float = plan.exact_seconds
cache = KeyValueCache(key_heads=8, dim=16)
cache.append(k, v)
step, promise = cache.attend(q[:, :, -1:], tol=1e-2)
tight: bool = promise.bound < 1e-3
cache.save(Path("cache.safetensors"))
layer = Attention(128, 8)
optimiser: torch.optim.Optimizer = avow.optim.adamw(layer, 1e-3)


def best(error: ToleranceUnreachable) -> float:
    return error.best
"""


class Made(NamedTuple):
    """What was built: the wheel and the source distribution, and an environment with the wheel."""

    wheel: Path
    sdist: Path
    bare: Bare


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    wheel, sdist = (built(target, ROOT, folder / target) for target in ("wheel", "sdist"))
    environment = bare(wheel, folder)
    save_file({name: torch.randn(1, 4, 8) for name in "qkv"}, environment.home / "heads.safetensors")
    (environment.home / "text.txt").write_text("Some words.")
    return Made(wheel, sdist, environment)


def test_nothing_optional_is_in_the_environment(made: Made) -> None:
    core = dependencies(metadata(made.wheel))
    optional = [name for name, package in PACKAGES.items() if package.distribution not in core]
    assert {"flint", "safetensors", "fastapi", "latex2mathml", "transformers", "numba"} <= set(optional)
    code = f"import importlib.util as u; print([name for name in {optional} if u.find_spec(name)])"
    assert made.bare.run("python", "-c", code).stdout == "[]\n"
    assert made.bare.run("python", "-c", "import avow; print(avow.__file__)").stdout.startswith(str(made.bare.folder))


class Said(NamedTuple):
    """How a command ended: its exit code, its two streams, and the exception that nobody caught."""

    code: int
    out: str
    err: str
    raised: str

    def fault(self, words: str) -> str:
        """What is wrong with it for whoever expects these words; nothing if it works, or names an extra in a line."""
        if self.raised or "Traceback" in self.err:
            return f"a traceback: {self.raised or self.err}"
        named = "pip install" in words or words.startswith("avow[")
        if self.code != (2 if named else 0):
            return f"exit code {self.code}: {self.err}"
        if named and (self.err.count("\n") != 1 or " is not installed; it is needed" not in self.err):
            return f"not one line that names a package: {self.err}"
        return "" if words in self.out + self.err else f"{words} is not in: {self.out + self.err}"


def said(environment: Bare, typed: list[list[str]]) -> list[Said]:
    done = environment.run("python", "-c", EVERY, json.dumps(typed))
    assert done.returncode == 0, done.stderr
    return [Said(*answer) for answer in json.loads(done.stdout)]


def test_each_command_works_or_names_the_extra_it_needs(made: Made) -> None:
    answers = said(made.bare, [arguments for arguments, _ in TYPED])
    wrong = {
        " ".join(a): why for (a, words), answer in zip(TYPED, answers, strict=True) if (why := answer.fault(words))
    }
    assert wrong == {}
    left = {path.name for path in made.bare.home.iterdir()}
    assert not left & {"report.html", "picture.png", "weights.safetensors", "run", "out"}, "half of something is left"


def test_every_command_has_its_help_and_every_group_too(made: Made) -> None:
    paths = [list(path) for path, _ in commands()]
    groups = {
        name for name, command in vars(typer.main.get_command(app))["commands"].items() if "commands" in vars(command)
    }
    assert {"claims", "construct", "train", "bench"} <= groups and len(paths) > 15
    typed = [[*path, "--help"] for path in [*paths, *([group] for group in groups)]]
    answers = said(made.bare, typed)
    assert {
        " ".join(a): why for a, answer in zip(typed, answers, strict=True) if (why := answer.fault("Usage: "))
    } == {}


def test_a_command_that_breaks_is_caught(made: Made) -> None:
    broken = "import sys; sys.modules['typer'] = None; from avow_command import main; main()"
    done = made.bare.run("python", "-c", broken)
    assert "a traceback" in Said(done.returncode, done.stdout, done.stderr, "").fault("Commands:")
    assert Said(0, "words", "", "").fault("words") == "" and Said(0, "", "", "").fault("words")
    line = "avow: a is not installed; it is needed to b; pip install 'avow[c]'\n"
    assert Said(2, "", line, "").fault("avow[c]") == "" and Said(2, "", line, "").fault("avow[d]")
    assert Said(1, "", line, "").fault("avow[c]") and Said(2, "", line * 2, "").fault("avow[c]")
    assert Said(2, "", "", "ModuleNotFoundError('a')").fault("avow[c]").startswith("a traceback")


def test_the_command_itself_compares_without_a_report_and_says_how_to_get_one(made: Made) -> None:
    done = made.bare.run("avow", "compare", *SMALL, "--quick", "--kinds", "diffuse")
    assert done.returncode == 0 and all(name in done.stdout for name in avow.all_methods()), done.stderr
    line = (
        "no report was written: latex2mathml is not installed; it is needed for the report; pip install 'avow[report]'"
    )
    assert done.stderr.splitlines()[-1] == line and not (made.bare.home / "out").exists()


def test_the_command_and_the_module_are_one(made: Made) -> None:
    assert made.bare.run("avow", "--version").stdout == f"avow {avow.__version__}\n"
    assert made.bare.run("python", "-m", "avow", "--version").stdout == f"avow {avow.__version__}\n"


def test_the_library_works_and_names_what_is_missing(made: Made) -> None:
    done = made.bare.run("python", "-W", "error", "-c", LIBRARY)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert lines.keys() == NAMED.keys()
    assert {name: line.rpartition("; ")[2] for name, line in lines.items()} == {
        name: f"pip install 'avow[{extra}]'" for name, extra in NAMED.items()
    }
    assert not {"cache.safetensors", "run"} & {path.name for path in made.bare.home.iterdir()}


@pytest.mark.parametrize("typed", ["avow comp", "avow claims "])
def test_a_shell_completes_commands(made: Made, typed: str) -> None:
    words = typed.split(" ")
    shell = f'env COMP_WORDS="{typed}" COMP_CWORD={len(words) - 1} _AVOW_COMPLETE=complete_bash'
    done = subprocess.run(
        ["bash", "-c", f"{shell} {made.bare.folder}/bin/avow"], env=made.bare.variables, capture_output=True, text=True
    )
    listed = {"comp": ["compare"], "": ["list", "run", "show", "questions", "grade", "new"]}
    assert done.stdout.split() == listed[words[-1]], done.stderr


def checked(environment: Bare, source: str) -> str:
    """What a strict type checker says of a person's file; torch's own types are left out, they take a minute."""
    (environment.home / "user.py").write_text(source)
    (environment.home / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\nfollow_imports_for_stubs = true\n"
    )
    python = str(environment.folder / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", os.devnull, "user.py"]
    options: dict[str, Any] = {"cwd": environment.home, "env": environment.variables, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return done.stdout + done.stderr


def test_a_person_s_own_file_is_checked_against_avow_s_types(made: Made) -> None:
    assert checked(made.bare, USER).startswith("Success")
    wrong = USER + "certificate.bund\navow.attend(q, k, v, tol='tight')\nnumber: int = certificate.to_json()\n"
    found = checked(made.bare, wrong)
    assert '"Certificate" has no attribute "bund"' in found and 'has incompatible type "str"' in found
    assert found.count(": error:") == 3


def test_without_py_typed_nothing_would_be_checked(made: Made) -> None:
    marker = made.bare.site / "avow" / "py.typed"
    marker.rename(marker.with_name("py.untyped"))
    try:
        assert "py.typed marker" in checked(made.bare, USER)
    finally:
        marker.with_name("py.untyped").rename(marker)


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by name, without those that say what it is."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_source_distribution_makes_the_same_wheel(made: Made, tmp_path: Path) -> None:
    with tarfile.open(made.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    beside = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "SECURITY.md", "constraints.txt"}
    assert beside | {"tests", "docs", "benchmarks"} <= {path.name for path in source.iterdir()}
    again = built("wheel", source, tmp_path / "again")
    assert contents(again) == contents(made.wheel)
    assert metadata(again).read_text("METADATA") == metadata(made.wheel).read_text("METADATA")


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(made: Made) -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "avow"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(contents(made.wheel)) == {*listed.stdout.split(), "avow_command.py"}


def described(wheel: Path) -> email.message.Message:
    about: Any = metadata(wheel).metadata
    return about


def test_the_wheel_says_what_it_is(made: Made) -> None:
    about = described(made.wheel)
    assert about["Version"] == avow.__version__ and about["License-Expression"] == "Apache-2.0"
    assert about["Author"] == "The avow authors" and about["Requires-Python"] == ">=3.11"
    addresses = dict(line.split(", ") for line in about.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} == set(addresses)
    assert all(address.startswith("https://") for address in addresses.values())
    assert "Typing :: Typed" in about.get_all("Classifier", [])


def relative(text: str) -> list[str]:
    """Addresses of links and pictures that lead nowhere outside the repository."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inside = [token for block in tokens for token in block.children or []]
    found = [str(token.attrs.get("href", token.attrs.get("src", "#"))) for token in inside]
    return [address for address in found if not address.startswith(("https://", "#"))]


def test_on_pypi_every_link_and_the_picture_lead_somewhere(made: Made) -> None:
    readme, shown = (ROOT / "README.md").read_text(), str(described(made.wheel).get_payload())
    assert "docs/frontier.png" in relative(readme), "the repository shows its own picture"
    assert relative(shown) == []
    home = "avow-attention/avow"
    assert f"(https://raw.githubusercontent.com/{home}/main/docs/frontier.png)" in shown
    assert f"(https://github.com/{home}/blob/main/docs/choosing.md#tol-or-rtol)" in shown
    for address in relative(readme):
        assert (ROOT / address.partition("#")[0]).exists(), address
    assert relative("![a](b.png) [c](d.md) [e](https://f.org) [g](#h)") == ["b.png", "d.md"]
