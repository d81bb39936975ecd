"""Handlers for the tests of the worker pool."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from avow.worker_pool import Handler, Send


def echo(prefix: str) -> Handler:
    """A handler that answers with as many messages as it is asked for, or misbehaves as told."""

    def handle(request: dict[str, Any], content: bytes, send: Send) -> None:
        print("noise that must not reach the answer")
        match request.get("act"):
            case "exit":
                os._exit(7)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise ValueError("on purpose")
            case "flood":
                send(b"x" * (1 << 25))
        for number in range(request.get("messages", 1)):
            time.sleep(request.get("pause", 0.0))
            send(f"{prefix}{number}".encode() + content)

    return handle
