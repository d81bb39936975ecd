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
import functools
import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from avow.core import SOFTMAX, Certificate, check_limits, weakest
from avow.core.quantities import count
from avow.errors import ParameterError, value_text

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
    """The certificates of every answer, in the order in which they were given; prints as a table of layers.

    Attributes:
        threads: how many of the answers were given in other threads, by the names of those.
        unattributed: answers of other threads, given while records were open in several: they may have been this one's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}
        self.unattributed = 0

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
        """Whether answers were recorded, and each is promised to be within what is given.

        Args:
            tol: the limit for every bound, relative to the longest value; None does not ask.
            rtol: the limit relative to the answer's length; None does not ask. One of the two must be given.

        Returns:
            False also if nothing was recorded, or if answers of other threads may be missing.

        Raises:
            ParameterError: neither is given, or one is not a number.
        """
        check_limits(tol, rtol)
        seen = len(self) > 0 and self.unattributed == 0
        return seen and all(entry.certificate.keeps(tol, rtol) for entry in self)

    def to_json(self) -> str:
        """Each layer's certificates as JSON, without the bounds of single rows.

        Returns:
            An object: to each layer's name, a list of certificates as `Certificate.to_json` writes them.
        """
        layers = self.layers.items()
        return json.dumps({layer: [json.loads(x.to_json(rows=False)) for x in given] for layer, given in layers})

    def __repr__(self) -> str:
        return f"<Record of {count(len(self), 'answer')} of {count(len(self.layers), 'layer')}>"

    def __str__(self) -> str:
        layers = self.layers
        if not layers:
            callers = "avow.nn modules, avow.scaled_dot_product_attention, or a model in which avow is enabled"
            advice = f"inside the block, run {callers}"
            return "\n".join([f"no answer was recorded: {advice}", *self._remarks])
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
        """What there is to say of other mechanisms, and of other threads."""
        other = {x.method: x.target for _, x in self if x.target != SOFTMAX}
        remarks = [f"{name}: bounds are of {target}, which is not {SOFTMAX}" for name, target in other.items()]
        given = [(name, count(many, "answer"), "was" if many == 1 else "were") for name, many in self.threads.items()]
        remarks += [f"{answers} {verb} given in the thread {name}" for name, answers, verb in given]
        if self.unattributed:
            remarks.append(
                f"not in this record: {count(self.unattributed, 'answer')} of other threads, since records were open "
                "in several; open one in each thread that runs a model"
            )
        return remarks


_own: contextvars.ContextVar[tuple[Record, ...]] = contextvars.ContextVar("avow_records", default=())
# Every record that is open in any thread, each with the outermost of its own thread or task.
_open: list[tuple[Record, Record]] = []
_lock = threading.Lock()


# The names of the modules whose `forward` is under way, from the outermost in, in models that a record names.
_running: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("avow_running", default=())


def record(model: nn.Module | None = None) -> contextlib.AbstractContextManager[Record]:
    """The certificates of every answer that is given while the block runs.

    Answers are those of `avow.scaled_dot_product_attention`, of `avow.nn.Attention`, and of models of transformers in
    which avow is enabled. `avow.attend` and caches return their certificates instead. Answers of other threads are
    among them, unless those threads have records of their own.

    Args:
        model: a model whose modules name the answers that they give: `layers.3.attention`. Models of transformers
            know the names of their layers without it.

    Returns:
        A context manager; inside and after its block, the list of certificates, which prints as a table of layers.

    >>> import torch, avow
    >>> model = torch.nn.ModuleDict({"first": avow.nn.Attention(16, heads=4)})
    >>> with avow.record(model) as certificates:
    ...     out = model["first"](torch.randn(1, 9, 16))
    >>> certificates.keeps(1e-2), list(certificates.layers)
    (True, ['first'])
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ParameterError("model", value_text(model), "must be a torch.nn.Module", "pass one, or leave it out")
    return _recording(model)


@contextlib.contextmanager
def _recording(model: nn.Module | None) -> Iterator[Record]:
    new, before = Record(), _own.get()
    # A context that was copied may name records which are closed by now.
    still = [one for one in before if any(one is other for other, _ in _open)]
    entry = (new, still[0] if still else new)
    token = _own.set((*still, new))
    with _lock:
        _open.append(entry)
    try:
        with naming({} if model is None else dict(model.named_modules())):
            yield new
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not entry]
        _own.reset(token)


@contextlib.contextmanager
def naming(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Have `running_layer` know modules by their names, as long as the block runs."""

    def enter(name: str, *_: Any) -> None:
        _running.set((*_running.get(), name))

    def leave(*_: Any) -> None:
        _running.set(_running.get()[:-1])

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(functools.partial(enter, name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def running_layer(otherwise: str) -> str:
    """The name of the module that is running, if a record was opened for its model; else what is given."""
    running = _running.get()
    return (running[-1] if running else "") or otherwise


def is_recording() -> bool:
    """Whether any record is open."""
    return bool(_open)


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
