"""Imports only go up the table of layers; what is heavy is loaded only where it belongs, and at use."""

from __future__ import annotations

import graphlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.site.imports import imports, modules, part

ROOT = Path(__file__).parent.parent / "avow"


@dataclass(frozen=True)
class Layer:
    """Parts of avow that may import the same: `always` anywhere, `at_use` only inside a function."""

    parts: frozenset[str]
    always: frozenset[str]
    at_use: frozenset[str] = frozenset()


def names(*words: str) -> frozenset[str]:
    return frozenset(" ".join(words).split())


TENSORS = names("torch numpy jaxtyping")
PROOFS = names("flint scipy sympy z3")

FOUNDATION = names("avow.errors avow.extras avow.file_io avow.worker_pool avow.parameters")
# What a certificate says needs norms and a model of rounding; numerics need to know what a problem is. No module of the
# two imports one that imports it: another test sees to that.
CORE = FOUNDATION | names("avow.core avow.numerics")
METHODS = CORE | names("avow.methods")
# calibration measures the device, so that the planner can turn counted work into seconds: it needs methods to time.
ATTEND = METHODS | names("avow.calibration avow.calibration_file avow.planner avow.deferred avow.in_graph avow.attend")
DECODE = ATTEND | names("avow.decode")
HOSTS = DECODE | names("avow avow.nn avow.optim avow.distributed avow.bounds")
TRAINING = HOSTS | names("avow.training")
THEORY = TRAINING | names("avow.theory")
# What people look at reads answers, certificates and claims; it computes none of them.
PAGES = THEORY - names("avow.numerics") | names("avow.bench avow.report avow.lab avow.cli avow.integrations")

TABLE = (
    # A file of tensors is read by the library of its format, which is loaded at use.
    Layer(
        names("errors extras file_io worker_pool parameters"),
        FOUNDATION | names("torch jaxtyping"),
        names("safetensors"),
    ),
    Layer(names("core"), CORE | names("torch jaxtyping")),
    # Balls are numerics; their library is loaded at use.
    Layer(names("numerics"), CORE | TENSORS, names("flint")),
    Layer(names("kernels"), CORE | TENSORS | names("avow.kernels triton")),
    Layer(names("methods"), METHODS | TENSORS, names("avow.kernels")),
    Layer(names("calibration calibration_file"), METHODS | names("avow.calibration_file") | TENSORS),
    # What a promise rests on is measured by one kernel on a GPU.
    Layer(names("deferred"), METHODS | TENSORS, names("avow.kernels")),
    # The planner chooses among numbers; it never touches a tensor.
    Layer(names("planner"), ATTEND),
    Layer(names("attend in_graph"), ATTEND | TENSORS),
    # Bounds on what others compute need the rounding of exact attention.
    Layer(names("bounds"), ATTEND | TENSORS),
    # What numba compiles is loaded when a step first needs it. A cache may be kept in a file; on a GPU, kernels answer.
    Layer(names("decode"), DECODE | TENSORS | names("numba llvmlite"), names("safetensors avow.kernels")),
    # The surface re-exports, and so stands right above attend.
    # A plan for a whole model belongs to the library that has the model, which is loaded when there is one.
    # A plan for decoding measures steps of a cache, which is loaded then.
    Layer(
        names("avow"),
        ATTEND - names("avow.numerics"),
        names("avow.integrations avow.decode avow.lab avow.bounds"),
    ),
    Layer(names("nn optim distributed"), HOSTS | TENSORS),
    # Nothing but what people look at loads an integration, so it may load its host outright.
    Layer(
        names("integrations"),
        HOSTS | TENSORS | names("avow.integrations huggingface_hub transformers"),
        names("gguf safetensors"),
    ),
    # Tables and tokenizers are read by the libraries of their formats, which are loaded at use.
    Layer(names("training"), TRAINING | TENSORS | names("safetensors"), names("pyarrow tokenizers")),
    # Nothing below loads the ledger, so it may load its provers outright.
    # The neighbours it speaks of are there to be looked at, where they are installed.
    Layer(names("theory"), THEORY | TENSORS | PROOFS, names("latex2sympy2_extended mpmath auto_LiRPA")),
    # Measures modules and, each by itself, the kernels below them. Beside the commands and not in benchmarks/, so that
    # whoever installs avow can run it. Peers, and the library of whole models, are loaded where they are installed.
    Layer(
        names("bench"),
        HOSTS | TENSORS | names("avow.bench"),
        names("avow.kernels avow.integrations fla performer_pytorch safetensors transformers"),
    ),
    Layer(
        names("report"),
        PAGES | TENSORS | names("jinja2 markupsafe rich"),
        names("matplotlib latex2mathml safetensors"),
    ),
    # The lab makes tensors of what a reader set, and hands them on.
    Layer(
        names("lab"),
        PAGES | TENSORS | names("fastapi starlette uvicorn jinja2 markupsafe"),
        names("uvicorn latex2mathml safetensors"),
    ),
    # A formula that someone types is read into SymPy's terms, as constructions take it.
    Layer(names("cli __main__"), PAGES | names("torch typer rich"), names("safetensors sympy")),
)


def faults(root: Path) -> list[str]:
    """Every import of a tree that the table forbids, in words."""
    known = modules(root)
    layers = {name: layer for layer in TABLE for name in layer.parts}
    found = []
    for module, path in known.items():
        layer = layers.get(part(module))
        if layer is None:
            found.append(f"{module}: has no layer; add it to the table of tests/test_layers.py with its reason")
            continue
        for target, line, at_use in imports(module, path, known):
            own = target.split(".")[0] == "avow"
            if not own and target.split(".")[0] in sys.stdlib_module_names:
                continue
            name = ".".join(target.split(".")[:2]) if own else target.split(".")[0]
            where = f"{module}:{line}"
            if name not in layer.always | layer.at_use:
                found.append(f"{where}: {part(module)} may not import {name}")
            elif name not in layer.always and not at_use:
                found.append(f"{where}: {part(module)} may import {name} only inside a function")
            elif module.startswith("avow.methods.") and name == "avow.methods":
                found.append(f"{where}: a method may not import its siblings")
    return found


def cycle(root: Path) -> list[str]:
    """Modules that import each other in a ring at load time, or nothing."""
    known = modules(root)
    graph = {
        module: {i.target for i in imports(module, path, known) if not i.at_use and i.target in known} - {module}
        for module, path in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_import_keeps_the_table() -> None:
    assert faults(ROOT) == []


def test_no_modules_import_each_other_in_a_ring() -> None:
    assert cycle(ROOT) == []


def test_the_walk_sees_the_package() -> None:
    found = modules(ROOT)
    assert {"avow.core", "avow.numerics.rounding", "avow.methods.exact"} <= set(found)
    seen = {i.target for module, path in found.items() for i in imports(module, path, found)}
    assert {"torch", "avow.numerics.rounding", "avow.core"} <= seen


CLEAN = {
    "__init__.py": "from avow.attend import attend as attend\n",
    "errors.py": "import json\n",
    "numerics/scan.py": "import torch\nfrom avow import errors\n",
    "kernels/scan.py": "import triton\nfrom ..numerics import scan\n",
    "methods/exact.py": "from avow.numerics import scan\ndef compute():\n    from avow.kernels import scan\n",
    "methods/__init__.py": "from avow.methods import exact\n",
    "planner.py": "from avow.methods import exact\n",
    "attend.py": "from avow import planner\n",
    "theory/rings.py": "def prove():\n    import flint\n",
    "cli.py": "import typer\nimport avow\n",
}


def plant(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "avow"
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_a_clean_tree_has_no_faults(tmp_path: Path) -> None:
    root = plant(tmp_path, CLEAN)
    assert faults(root) == []
    assert cycle(root) == []


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("numerics/scan.py", "from avow.methods import exact", "numerics may not import avow.methods"),
        ("numerics/scan.py", "from ..planner import ranked", "numerics may not import avow.planner"),
        ("numerics/scan.py", "import avow", "numerics may not import avow"),
        ("methods/exact.py", "def f():\n    import avow.attend", "methods may not import avow.attend"),
        ("methods/window.py", "from avow.methods import exact", "a method may not import its siblings"),
        ("methods/window.py", "from .exact import Exact", "a method may not import its siblings"),
        (
            "methods/window.py",
            "from avow.kernels import scan",
            "methods may import avow.kernels only inside a function",
        ),
        ("methods/window.py", "import triton", "methods may not import triton"),
        ("decode/rings.py", "import safetensors", "decode may import safetensors only inside a function"),
        ("nn/memory.py", "import scipy.linalg", "nn may not import scipy"),
        ("planner.py", "import torch", "planner may not import torch"),
        ("attend.py", "from avow.theory.constructions import query", "attend may not import avow.theory"),
        ("attend.py", "from rich import print", "attend may not import rich"),
        ("cli.py", "from avow.numerics import scan", "cli may not import avow.numerics"),
        ("cli.py", "import sympy", "cli may import sympy only inside a function"),
        ("bench/cases.py", "def f():\n    from avow.report import page", "bench may not import avow.report"),
        ("cli.py", "import importlib; importlib.import_module('avow.kernels')", "cli may not import avow.kernels"),
        ("errors.py", "if TYPE_CHECKING:\n    from avow.nn import Block", "errors may not import avow.nn"),
        ("helpers.py", "", "has no layer"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, line: str, words: str) -> None:
    (fault,) = faults(plant(tmp_path, CLEAN | {file: line}))
    assert fault.startswith("avow." + file.removesuffix(".py").replace("/", ".") + ":")
    assert fault.partition(";")[0].endswith(words)


def test_a_planted_ring_is_caught(tmp_path: Path) -> None:
    assert cycle(plant(tmp_path, CLEAN | {"errors.py": "import avow.numerics.scan"}))
