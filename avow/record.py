"""Certificates of a whole model, collected layer by layer while it runs.

A bound belongs to one layer's answer to the inputs which that layer was given. What the layers above make of an error
is not known without their weights' own bounds, so bounds of layers are listed here and never added up.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator
from typing import NamedTuple

from avow.contract import Certificate, check_limits, weakest

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

    @property
    def bound(self) -> float:
        """The largest bound of any layer, relative to the longest value: no answer was further off than that."""
        return max((entry.certificate.bound for entry in self), default=0.0)

    @property
    def relative(self) -> float:
        """The largest bound of any layer relative to its answer's own length."""
        return max((entry.certificate.relative for entry in self), default=0.0)

    @property
    def layers(self) -> dict[str, list[Certificate]]:
        """The certificates of each layer."""
        found: dict[str, list[Certificate]] = {}
        for layer, certificate in self:
            found.setdefault(layer, []).append(certificate)
        return found

    def keeps(self, tol: float | None = None, rtol: float | None = None) -> bool:
        """Whether every answer of every layer is promised to be within `tol`, and relative to itself within `rtol`."""
        check_limits(tol, rtol)
        return all(entry.certificate.keeps(tol, rtol) for entry in self)

    def to_json(self) -> str:
        """Each layer's certificates as JSON, without the bounds of single rows."""
        return json.dumps(
            {layer: [json.loads(x.to_json(rows=False)) for x in found] for layer, found in self.layers.items()}
        )

    def __str__(self) -> str:
        layers = self.layers
        if not layers:
            return "no answer was recorded: run a model in which avow is enabled"
        widest = max(len(layer) for layer in layers)
        lines = [f"{'layer':<{widest}}  answers  worst bound  of answer  promise        method"]
        for layer, found in layers.items():
            worst, own = (max(getattr(x, name) for x in found) for name in ("bound", "relative"))
            methods = ", ".join(dict.fromkeys(x.method for x in found))
            numbers = f"{len(found):7d}  {worst:11.1e}  {own:9.1e}"
            lines.append(f"{layer:<{widest}}  {numbers}  {weakest(found).kind:<13}  {methods}")
        return "\n".join([*lines, _HONESTY])


_open: contextvars.ContextVar[tuple[Record, ...]] = contextvars.ContextVar("avow_records", default=())


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """The certificates of all layers of all models in which avow is enabled, as long as the block runs.

    >>> with record() as certificates:
    ...     pass  # run a model here
    >>> certificates.bound
    0.0
    """
    own = Record()
    token = _open.set((*_open.get(), own))
    try:
        yield own
    finally:
        _open.reset(token)


def note(layer: str, certificate: Certificate) -> None:
    """Add a layer's certificate to every record that is being made."""
    for made in _open.get():
        made.append(Recorded(layer, certificate))
