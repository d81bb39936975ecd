"""Seeing what each attention layer is asked while a model runs: one layer at a time, and none is kept."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from torch import Tensor

from avow.core import Certificate, Problem
from avow.integrations.transformers.masks import Seen

# A layer's name, what it was asked, its answer (b, h, n, e) and what is promised of that.
Watcher = Callable[[str, Problem, Tensor, Certificate], None]

_watchers: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar("avow_watchers", default=())


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every answer of every layer of models in which avow is enabled, as long as the block runs."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def show(layer: str, query: Tensor, view: Seen, scaling: float | None, out: Tensor, certificate: Certificate) -> None:
    """Have all watchers look at a layer."""
    for watcher in _watchers.get():
        grouped = query.shape[1] != view.key.shape[1]
        problem = Problem.of(
            query, view.key, view.value, mask=view.mask, causal=view.causal, scale=scaling, enable_gqa=grouped
        )
        watcher(layer, problem.detached(), out.detach(), certificate)
