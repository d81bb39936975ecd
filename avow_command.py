"""`avow` from its first moment: whoever presses Ctrl-C before a command has begun gets one line, too.

This lies beside the package, not in it: whatever is imported from `avow` loads torch before its own first line.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """The entry point: load the command line, then hand over to it."""
    # Where Ctrl-C is ignored, as behind nohup, it stays so.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _leave)
    from avow.cli import main as run

    run(_hand_over if heard else None)


def _hand_over() -> None:
    # From here on the command knows best what an interrupt leaves behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    # Not by an exception: a half-loaded library might take it for one of its own.
    os.write(2, b"avow: interrupted; nothing was written\n")
    os._exit(128 + signal.SIGINT)
