"""The lab on loopback: a port, a token, a browser."""

from __future__ import annotations

import importlib
import secrets
import socket
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING

from avow.errors import MissingPackage, ParameterError

if TYPE_CHECKING:
    import uvicorn

_HOST = "127.0.0.1"
_PACKAGE = "avow.lab.pages"


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted, on the given port or a free one (0); `ready` is told the address."""
    try:
        # What is missing is named before a port is taken.
        for needed in ("uvicorn", "avow.lab.app"):
            importlib.import_module(needed)
    except ImportError as error:
        raise MissingPackage(
            error.name or "fastapi", "missing", "is needed for the lab", "pip install 'avow[lab,rigor]'"
        ) from error
    with bound(port) as listening:
        server(listening, secrets.token_urlsafe(32), ready).run(sockets=[listening])


def server(
    listening: socket.socket, token: str, ready: Callable[[str], None], package: str = _PACKAGE
) -> uvicorn.Server:
    """The server of one socket; `ready` is told the address once it answers."""
    import uvicorn

    from avow.lab.app import build

    port = listening.getsockname()[1]
    app = build(port, token, package)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{_HOST}:{port}/")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await app.close()
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            http="h11",
            loop="asyncio",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
    )


def bound(port: int) -> socket.socket:
    """A socket on loopback: this port, or any free one where it is 0."""
    # Named as TCP, asyncio sends at once; else small answers wait 40 ms for the other side's acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
    except OSError as error:
        listening.close()
        raise ParameterError("port", port, f"cannot be had: {error.strerror}", "leave --port out") from None
    return listening


def open_browser(address: str) -> None:
    """Show the page where there is a browser to show it; the address was printed either way."""
    webbrowser.open(address)
