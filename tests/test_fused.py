"""Compiled loops: one that cannot be compiled says why, is tried again, and leaves all others compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.numerics import fused
from avow.numerics.fused import Fused, NotCompiled


class Compiler:
    """In the place of torch.compile: it raises what it is told to for tensors of some width, and counts its calls."""

    def __init__(self, error: BaseException, width: int = 3) -> None:
        self.error: BaseException | None = error
        self.width, self.attempts = width, 0

    def __call__(self, function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def made(x: Tensor) -> Any:
            self.attempts += 1
            if self.error is not None and x.shape[-1] == self.width:
                raise self.error
            return function(x)

        return made


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(RuntimeError("no space left\nand more"))
    monkeypatch.setattr("torch.compile", compiler)
    return compiler


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_failure_is_of_one_function_and_one_family_of_shapes(broken: Compiler) -> None:
    one, other = Fused(doubled), Fused(doubled)
    with pytest.raises(NotCompiled, match=r"^RuntimeError: no space left$"):
        one([torch.ones(5, 3)])
    assert torch.equal(one([torch.ones(5, 4)]), 2 * torch.ones(5, 4)), "another width"
    assert torch.equal(one([torch.ones(5, 3, dtype=torch.float64)[:, :2]]), 2 * torch.ones(5, 2).double())
    broken.error = None
    assert torch.equal(other([torch.ones(5, 3)]), 2 * torch.ones(5, 3)), "another function"


def test_a_failure_is_tried_again_ever_more_rarely(broken: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_PAUSE", 2)
    loop = Fused(doubled)
    attempts = []
    for length in range(1, 13):
        with pytest.raises(NotCompiled, match="no space left"):
            loop([torch.ones(length, 3)])
        attempts.append(broken.attempts)
    assert attempts == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    broken.error = None
    for _ in range(5):
        with pytest.raises(NotCompiled):
            loop([torch.ones(1, 3)])
    assert all(torch.equal(loop([torch.ones(n, 3)]), 2 * torch.ones(n, 3)) for n in (1, 2, 3))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
def test_no_memory_and_an_interrupt_are_no_failures_of_the_compiler(broken: Compiler, error: BaseException) -> None:
    loop = Fused(doubled)
    broken.error = error
    with pytest.raises(type(error)):
        loop([torch.ones(5, 3)])
    broken.error = None
    assert torch.equal(loop([torch.ones(5, 3)]), 2 * torch.ones(5, 3))


def test_more_families_than_the_compilers_limit_are_all_compiled() -> None:
    loop = Fused(doubled)
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (2, 3, 4):
            assert torch.equal(loop([torch.ones(5, width)]), 2 * torch.ones(5, width))
    assert len(loop._known) == 3 and not loop._failures
