"""Importing avow loads torch and nothing heavier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import avow
from tests.test_extras import asked

ROOT = Path(__file__).parent.parent
HEAVY = ["fastapi", "flint", "gguf", "matplotlib", "rich", "safetensors", "scipy", "sympy", "transformers"]
HEAVY += ["triton", "typer"]


def loaded_by(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after one statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_avow_loads_nothing_heavy() -> None:
    assert loaded_by("import avow; avow.attend") == set()


def test_the_first_calls_load_nothing_heavy() -> None:
    tensors = "import avow, torch; q, k, v = torch.randn(3, 1, 2, 70, 8).unbind(); mask = torch.ones(70, 70).bool()"
    attended = "out, _ = avow.attend(q, k, v, tol=1e-2, mask=mask); avow.audit(out, q, k, v, attn_mask=mask)"
    dropped_in = "avow.scaled_dot_product_attention(q, k, v, torch.zeros(70, 70)); avow.attend(q, k, v, rtol=1e-2)"
    assert loaded_by(f"{tensors}; {attended}; {dropped_in}") == set()


def test_subpackages_are_attributes_and_load_nothing_before_they_are_used() -> None:
    unused = "assert not [name for name in sys.modules if name.startswith(('avow.nn', 'avow.optim', 'avow.training'))]"
    code = f"import avow; {unused}; avow.nn.Attention, avow.optim; assert 'nn' in dir(avow) and not hasattr(avow, 'x')"
    assert loaded_by(code) == set()


@pytest.mark.commands
def test_packages_inside_subpackages_are_loaded_when_they_are_used() -> None:
    assert "transformers" in loaded_by("import avow; avow.integrations.transformers.enable")
    assert "transformers" not in loaded_by("import avow.integrations")
    assert "transformers" in loaded_by("from avow.integrations import disable, enable")
    code = "import avow; avow.theory.constructions.copy_query; assert 'claims' in dir(avow.theory)"
    assert "transformers" not in loaded_by(code)
    missing = (
        "import avow\ntry: avow.integrations.nobody\nexcept AttributeError as error: assert 'nobody' in str(error)"
    )
    assert loaded_by(missing) == set()


def test_completion_offers_public_names_and_nothing_else() -> None:
    assert {*avow.__all__, "nn", "optim", "integrations", "errors"} <= {*dir(avow)}
    own = [name for name in dir(avow) if not name.startswith("__")]
    assert not {"importlib", "Any", "TYPE_CHECKING", "file_io"} & {*own} and len(own) == len({*own})
    assert all(hasattr(avow, name) for name in own)


def test_help_needs_no_optional_package() -> None:
    absent = "import sys; from avow.extras import PACKAGES; sys.modules.update(dict.fromkeys(PACKAGES))"
    shown = "[pydoc.plain(pydoc.render_doc(package)) for package in (avow, avow.integrations, avow.theory, avow.nn)]"
    loaded_by(f"{absent}; import avow, pydoc; assert all('PACKAGE CONTENTS' in text for text in {shown})")


@pytest.mark.parametrize(
    ("package", "name"), [(avow, "lab"), (avow.integrations, "transformers"), (avow.theory, "claims")]
)
def test_completion_leaves_out_what_a_missing_package_keeps_from_loading(
    package: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package.__file__ is not None
    needed = asked(Path(package.__file__).parent / name / "__init__.py")
    assert len(needed) >= 3 and name in dir(package)
    for one in needed:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, one, None)
            assert name not in dir(package)


def test_a_heavy_import_would_be_noticed() -> None:
    assert loaded_by("import avow, rich; avow.attend") == {"rich"}
