"""Optional packages: which extra of avow brings which, and the error that whoever lacks one gets.

`require` stands before every import of an optional package: a person without it reads what to type, and no traceback.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from typing import NamedTuple

from avow.errors import MissingPackage


class Package(NamedTuple):
    """An optional package: its name on PyPI, the extra that is named to whoever lacks it, and its oldest version."""

    distribution: str
    extra: str
    oldest: str


# By the name that is imported. pyproject.toml has the same extras and versions; a test compares the two.
PACKAGES = {
    "accelerate": Package("accelerate", "hf", "1.1"),
    "fastapi": Package("fastapi", "lab", "0.115"),
    "flint": Package("python-flint", "rigor", "0.9"),
    "gguf": Package("gguf", "hf", "0.10"),
    "huggingface_hub": Package("huggingface-hub", "hf", "1.0"),
    "jinja2": Package("jinja2", "report", "3.1"),
    "latex2mathml": Package("latex2mathml", "report", "3.77"),
    "latex2sympy2_extended": Package("latex2sympy2-extended", "rigor", "1.10"),
    "matplotlib": Package("matplotlib", "report", "3.9"),
    "numba": Package("numba", "cpu", "0.62"),
    "pyarrow": Package("pyarrow", "data", "17"),
    "safetensors": Package("safetensors", "files", "0.8"),
    "scipy": Package("scipy", "rigor", "1.14"),
    "sympy": Package("sympy", "rigor", "1.13"),
    "tokenizers": Package("tokenizers", "train", "0.20"),
    "transformers": Package("transformers", "hf", "5.20"),
    "uvicorn": Package("uvicorn", "lab", "0.30"),
    "z3": Package("z3-solver", "rigor", "4.13"),
}


def require(*names: str, purpose: str, extra: str = "") -> None:
    """Raise `MissingPackage` if one of these packages is missing or too old; none is loaded.

    `extra` is what a person who wants `purpose` should install, if not the package's usual extra.
    """
    error = missing(*names, purpose=purpose, extra=extra)
    if error is not None:
        raise error


def missing(*names: str, purpose: str, extra: str = "") -> MissingPackage | None:
    """What `require` would raise, or None."""
    for name in names:
        package = PACKAGES[name]
        if not _is_installed(name):
            value, rule = "missing", f"is needed {purpose}"
        elif _numbers(version := _version(name)) < _numbers(package.oldest):
            value, rule = version, f"must be at least {package.oldest} {purpose}"
        else:
            continue
        return MissingPackage(package.distribution, value, rule, f"pip install 'avow[{extra or package.extra}]'")
    return None


def _is_installed(name: str) -> bool:
    # A name that leads to None is one that Python must not find.
    return sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None


def _version(name: str) -> str:
    """The version of a package that is loaded or installed; one that does not say is taken for new enough."""
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        return importlib.metadata.version(PACKAGES[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return PACKAGES[name].oldest


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("5.20.0rc1"), _numbers("0.9") < _numbers("0.10") < _numbers("main")
    ((5, 20, 0), True)
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else (sys.maxsize,)
