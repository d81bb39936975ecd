"""CUDA graphs on a CPU: what they repeat, and what they do not.

A captured call runs as it would on a GPU, and leaves nothing behind but what the host counted. A replay runs it again
with the host's counts as they were when it was captured, and shows the host nothing: who forgets to advance a count
sees it here. Kernels must be interpreted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.integrations.transformers import CertifiedCache, enabling, graphs, verified
from avow.nn import KeyValueCache

_COUNTS = ("_counted", "_counts", "_uncounted", "_replayed", "_asked_before", "_metric", "_size")


class StandIn:
    """In the place of `graphs.capture`, for the caches that it was told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches: list[CertifiedCache] = []
        self.captured = self.replayed = 0
        monkeypatch.setattr(graphs, "capture", self.capture)
        monkeypatch.setattr(graphs, "shared_memory", lambda device: (None, None))
        for module in (graphs, enabling, verified):
            monkeypatch.setattr(module, "captures", lambda device: True)

    def capture(self, call: Callable[[], Any], *_: object) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        before, held = self._counts(), [(x, x.clone()) for x in self._tensors()]
        result = call()
        for x, old in held:
            x.copy_(old)

        def replay() -> None:
            self.replayed += 1
            now = self._counts()
            self._set(before)
            layers = [layer for cache in self.caches for layer in cache.layers]
            with torch.no_grad(), graphs._as_repeated(layers):
                again = call()
            self._set(now)
            if result is not None:
                result.copy_(again)

        return replay, result

    def _held(self) -> Iterator[tuple[Any, KeyValueCache]]:
        layers = itertools.chain.from_iterable(cache.layers for cache in self.caches)
        return ((layer, layer.cache) for layer in layers if layer.cache is not None)

    def _tensors(self) -> Iterator[Tensor]:
        for _, cache in self._held():
            assert cache._store is not None
            written = itertools.chain.from_iterable(cache._steps._reports.values())
            yield from (x for x in (*cache._store, *cache._steps._states.values(), *written) if x is not None)

    def _counts(self) -> list[Any]:
        return [
            (layer.length, layer.seen, x._steps.report, *(getattr(x, name) for name in _COUNTS))
            for layer, x in self._held()
        ]

    def _set(self, counts: list[Any]) -> None:
        for (layer, cache), (length, seen, report, *own) in zip(self._held(), counts, strict=True):
            layer.length, layer.seen, cache._steps.report = length, seen, report
            for name, value in zip(_COUNTS, own, strict=True):
                setattr(cache, name, value)
