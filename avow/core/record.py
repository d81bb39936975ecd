"""Certificates of a whole model, collected layer by layer while it runs.

A bound belongs to one layer's answer to the inputs which that layer was given. What the layers above make of an error
is not known without their weights' own bounds, so bounds of layers are listed here and never added up.

A record gets the answers of its own thread (or asyncio task) and those of threads that have no record open themselves:
generation that streams runs in such a thread. With records open in several threads nobody knows whose such an answer
is: none of them gets it, all of them say so, and none keeps a tolerance.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

from avow.core import Certificate, check_limits, weakest

_HONESTY = (
    "Bounds are relative to the longest value that a row sees; of answer: relative to the true answer's own length.\n"
    "Each bound is of one layer's answer to the inputs that this layer was given.\n"
    "They do not compose through the network into a bound on logits: measure those."
)


class Recorded(NamedTuple):
    """One answer of one layer: the layer's name in its model, and what is promised."""

    layer: str
    certificate: Certificate


class Record(list[Recorded]):
    """The certificates of every answer, in the order in which they were given; prints as a table of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}
        """How many of the answers were given in other threads, by the names of those."""
        self.unattributed = 0
        """Answers of other threads, given while records were open in several: they may have been this one's."""

    @property
    def bound(self) -> float:
        """The largest bound of any layer, relative to the longest value; infinite if no answer was recorded."""
        return max((entry.certificate.bound for entry in self), default=math.inf)

    @property
    def relative(self) -> float:
        """The largest bound of any layer relative to its answer's own length."""
        return max((entry.certificate.relative for entry in self), default=math.inf)

    @property
    def layers(self) -> dict[str, list[Certificate]]:
        """The certificates of each layer."""
        layers: dict[str, list[Certificate]] = {}
        for layer, certificate in self:
            layers.setdefault(layer, []).append(certificate)
        return layers

    def keeps(self, tol: float | None = None, rtol: float | None = None) -> bool:
        """Whether answers were recorded, and each is promised to be within `tol`, relative to itself within `rtol`."""
        check_limits(tol, rtol)
        seen = len(self) > 0 and self.unattributed == 0
        return seen and all(entry.certificate.keeps(tol, rtol) for entry in self)

    def to_json(self) -> str:
        """Each layer's certificates as JSON, without the bounds of single rows."""
        layers = self.layers.items()
        return json.dumps({layer: [json.loads(x.to_json(rows=False)) for x in given] for layer, given in layers})

    def __str__(self) -> str:
        layers = self.layers
        if not layers:
            return "\n".join(["no answer was recorded: run a model in which avow is enabled", *self._remarks])
        widest = max(len(layer) for layer in layers)
        lines = [f"{'layer':<{widest}}  answers  worst bound  of answer  promise        method"]
        for layer, certificates in layers.items():
            worst, own = (max(getattr(x, name) for x in certificates) for name in ("bound", "relative"))
            methods = ", ".join(dict.fromkeys(x.method for x in certificates))
            numbers = f"{len(certificates):7d}  {worst:11.1e}  {own:9.1e}"
            lines.append(f"{layer:<{widest}}  {numbers}  {weakest(certificates).kind:<13}  {methods}")
        return "\n".join([*lines, *self._remarks, _HONESTY])

    @property
    def _remarks(self) -> list[str]:
        """What there is to say of other threads."""
        remarks = [f"{count} answers were given in the thread {name}" for name, count in self.threads.items()]
        if self.unattributed:
            remarks.append(
                f"{self.unattributed} answers of other threads are not in this record: records were open in several "
                "threads; open one in each thread that runs a model"
            )
        return remarks


_own: contextvars.ContextVar[tuple[Record, ...]] = contextvars.ContextVar("avow_records", default=())
# Every record that is open in any thread, each with the outermost of its own thread or task.
_open: list[tuple[Record, Record]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """The certificates of all layers of all models in which avow is enabled, as long as the block runs.

    Answers of other threads are among them, unless those threads have records of their own.

    >>> with record() as certificates:
    ...     pass  # run a model here
    >>> certificates.keeps(1e-2)
    False
    """
    new, before = Record(), _own.get()
    # A context that was copied may name records which are closed by now.
    still = [one for one in before if any(one is other for other, _ in _open)]
    entry = (new, still[0] if still else new)
    token = _own.set((*still, new))
    with _lock:
        _open.append(entry)
    try:
        yield new
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not entry]
        _own.reset(token)


def note(layer: str, certificate: Certificate) -> None:
    """Add a layer's certificate to every record that is being made of it."""
    if not _open:
        return
    with _lock:
        own = [one for one in _own.get() if any(one is other for other, _ in _open)]
        if own:
            for one in own:
                one.append(Recorded(layer, certificate))
            return
        thread = threading.current_thread().name
        known = len({id(outermost) for _, outermost in _open}) == 1
        for one, _ in _open:
            if known:
                one.append(Recorded(layer, certificate))
                one.threads[thread] = one.threads.get(thread, 0) + 1
            else:
                one.unattributed += 1
