"""Every method on small odd sizes, with the shapes of all signatures checked: `python -m tests.helpers.shapes`.

Run in an interpreter of its own, since the checks must be in place before avow is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import jaxtyping
import torch
from beartype import BeartypeConf, beartype

# An int is welcome where a float is asked for, as everywhere in Python.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

# batch, query heads, key heads, queries, keys, dim, value dim: all different, and all one.
SIZES = [(1, 1, 1, 1, 1, 1, 1), (2, 3, 3, 5, 7, 4, 6), (1, 6, 2, 67, 65, 3, 9)]
MASKS = ["none", "keys", "rows", "heads", "bias"]


def loaded(package: str) -> list[ModuleType]:
    """Every module of a package."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    return [importlib.import_module(module.name) for module in found]


def problems() -> Iterator[Any]:
    from avow.core import Problem

    for (b, h, g, n, s, d, e), causal, mask in itertools.product(SIZES, (False, True), MASKS):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(shape, dtype=dtype) for shape in ((b, h, n, d), (b, g, s, d), (b, g, s, e)))
            masks = {
                "none": None,
                "keys": torch.rand(b, 1, 1, s) < 0.7,
                "rows": torch.rand(n, s) < 0.7,
                "heads": torch.rand(b, h, 1, s) < 0.7,
                "bias": torch.randn(1, 1, n, s, dtype=dtype),
            }
            yield Problem.of(q, k, v, mask=masks[mask], causal=causal, enable_gqa=h != g)


def run_methods() -> int:
    """Compute, promise, reference, cost and foresee of every method; how many problems that were."""
    from avow.errors import InputError
    from avow.methods import all_methods

    count = 0
    for name, method in all_methods().items():
        before = count
        for p in problems():
            # A method may refuse a problem that has no meaning for it, but not all of them.
            with contextlib.suppress(InputError):
                run(next(iter(method.grid(p.sizes)), method()), p)
                count += 1
        assert count > before, f"{name} refuses every problem"
    return count


def run(method: Any, p: Any) -> None:
    computed = method.compute(p, torch.Generator().manual_seed(0))
    promise = method.promise(p.detached(), computed, 0.9)
    assert computed.out.shape == (*p.q.shape[:-1], p.v.shape[-1])
    assert promise.rows.shape == p.q.shape[:-1]
    method.estimate_bound(p, 0.9)
    method.reference(p)
    method.cost(p.sizes)


def run_maths() -> None:
    """What no method calls: analysis and the paths of other arithmetic."""
    from avow.core import Problem
    from avow.methods.separable import Separable
    from avow.methods.sparse import Sparse
    from avow.numerics import brackets, features, norms, rounding, sketch, softmax

    q, k = torch.randn(2, 6, 5, 3), torch.randn(2, 2, 130, 3)
    sampling = Sparse(drop=0.3, chance=0.01)
    run(sampling, Problem.of(q, k, k, kernel="rbf", sigma=1.0, enable_gqa=True))
    sketch.unpacked(sketch.packed(torch.zeros(2, 7, dtype=torch.uint8), 4), 4)
    first = sketch.sketched(k)
    both = first.followed_by(sketch.sketched(k, metric=first.metric, size=first.size))
    rows = q.reshape(2, 2, 15, 3)
    brackets.ends(rows, both, 0.5)
    softmax.softmax_weights(Problem.of(q, k, k, causal=True, enable_gqa=True))
    features.variance_for(0.1, 0.9)
    norms.spectral_bound(torch.randn(4, 3))
    norms.lengths(torch.randn(2, 4, 3))
    norms.row_lengths(torch.randn(2, 4, 3), torch.randn(5, 3))
    norms.length_floors(torch.randn(2, 4, 3))
    sketch.spread_holds(first, k)
    p, method = Problem.of(*torch.randn(3, 1, 2, 4, 3).unbind(), causal=True), Separable()
    method.read_on(p, method.initial_state(p))
    rounding.tiled_depths(100, torch.float32, "cuda", many=True)


_NUMBERS = ("intervals", "kernel_rounding")


def functions(package: str) -> dict[CodeType, str]:
    """The public functions of a package that speak of tensors, by the code they run; some modules know only numbers."""
    found = {}
    for module in loaded(package):
        for name, thing in vars(module).items():
            own = inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
            if own and module.__name__.rpartition(".")[2] not in _NUMBERS:
                found[inspect.unwrap(thing).__code__] = f"{module.__name__}.{name}"
    return found


def unreached(package: str) -> list[str]:
    """The public functions of a package that nothing here calls."""
    missing = functions(package)
    assert missing, f"{package} holds no functions"

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            missing.pop(frame.f_code, None)

    sys.setprofile(watch)
    try:
        count = run_methods()
        run_maths()
    finally:
        sys.setprofile(None)
    print(f"{count} problems, {len(functions(package)) - len(missing)} functions of {package}")
    return sorted(missing.values())


def spoil() -> None:
    """A batch of one where two are needed: torch would broadcast it without a word."""
    from avow.numerics import scan

    scan.running(torch.randn(2, 3, 5, 4), torch.randn(1, 3, 4, 1))


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "--unchecked" not in sys.argv:
        # The hook looks `checked` up by its full name, and this module runs under another.
        importlib.import_module("tests.helpers.shapes")
        jaxtyping.install_import_hook("avow", "tests.helpers.shapes.checked")
    if "--spoil" in sys.argv:
        spoil()
        return 0
    missing = unreached("avow.numerics")
    if missing:
        print("no shapes were checked in these; call them in tests/helpers/shapes.py:", *missing, sep="\n  ")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
