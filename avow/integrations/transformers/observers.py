"""Who looks at the answers of layers, or gives them in their place, while a model runs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from torch import Tensor

from avow.core import Certificate, Problem
from avow.core.record import is_recording
from avow.integrations import attention_audit
from avow.integrations.transformers.call_view import CallView

# Called with a layer's name, its problem, its answer (b, h, n, e) and the certificate.
Watcher = Callable[[str, Problem, Tensor, Certificate], None]

# Called with a query and the simplified call in a setting's place: gives the answer (b, h, n, e) and its certificate.
Answerer = Callable[[Tensor, CallView], tuple[Tensor, Certificate]]

watchers: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar("avow_watchers", default=())
answerer: contextvars.ContextVar[Answerer | None] = contextvars.ContextVar("avow_answerer", default=None)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every answer of every layer of models in which avow is enabled, as long as the block runs."""
    token = watchers.set((*watchers.get(), watcher))
    try:
        yield
    finally:
        watchers.reset(token)


@contextlib.contextmanager
def answering(instead: Answerer) -> Iterator[None]:
    """Have `instead` attend in every layer of models in which avow is enabled, as long as the block runs."""
    token = answerer.set(instead)
    try:
        yield
    finally:
        answerer.reset(token)


def observed() -> str:
    """Who wants to see every answer, or to give it; empty if nobody does."""
    reasons = {
        "a record collects the certificate of every answer": is_recording(),
        "an audit sees every answer": attention_audit.watching(),
        "a function sees or gives every answer": bool(watchers.get()) or answerer.get() is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
