"""Caches on a CPU that kernels answer, interpreted, and what their answers should be in float64."""

from __future__ import annotations

import pytest
from torch import Tensor

from avow.decode import kernel_steps, token_buffers
from avow.kernels import pausing
from avow.nn import KeyValueCache
from tests.helpers import caches


def answer_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have caches on a CPU be answered by kernels, however short they are."""
    monkeypatch.setattr(token_buffers, "absent", lambda device: "")
    # Memory of the CPU stands for the GPU's as for the host's.
    monkeypatch.setattr(token_buffers, "refused", lambda device: "")
    monkeypatch.setattr(kernel_steps, "SHORTEST", 1)
    monkeypatch.setattr(token_buffers, "_ACROSS", ())
    monkeypatch.setattr(token_buffers, "_EAGER", ("cpu",))
    # Half of so few tokens have no sketch.
    monkeypatch.setattr(pausing, "WORTHWHILE", 0.95)


def errors(cache: KeyValueCache, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> Tensor:
    """How far answers are from the truth, in units of the longest value that a row sees.

    Each of the last tokens sees those up to itself in its window, and perhaps a sink.
    """
    held = cache._position - cache._base
    k, v = (cache._buffers[name][:, :, :held] for name in ("keys", "values"))
    return caches.errors(q, k, v, out, cache.window, sinks)
