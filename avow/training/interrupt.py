"""Ctrl-C and SIGTERM as a question that a loop asks between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether someone asked to stop, and by which signal."""

    signal = 0

    @property
    def heard(self) -> bool:
        return self.signal != 0


@contextmanager
def listening() -> Iterator[Interruption]:
    """Until the end of the block, the first signal is noted and the second acts as it always did."""
    interruption = Interruption()
    # Python delivers signals to the main thread alone, and lets no other choose what they do.
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def note(kind: int, frame: FrameType | None) -> None:
        interruption.signal = kind
        restore()

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield interruption
    finally:
        restore()
