"""The lab on loopback: a port, a token, a browser."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Callable

from avow.errors import MissingPackage, ParameterError

_HOST = "127.0.0.1"


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted, on the given port or a free one (0); `ready` is told the address."""
    try:
        import uvicorn

        from avow.lab.app import build
    except ImportError as problem:
        raise MissingPackage(
            problem.name or "fastapi", "missing", "is needed for the lab", "pip install 'avow[lab,rigor]'"
        ) from problem

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{_HOST}:{taken}/")

    with bound(port) as listening:
        taken = listening.getsockname()[1]
        config = uvicorn.Config(
            build(taken, secrets.token_urlsafe(32)),
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            http="h11",
            loop="asyncio",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
        Server(config).run(sockets=[listening])


def bound(port: int) -> socket.socket:
    """A socket on loopback: this port, or any free one where it is 0."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
    except OSError as problem:
        listening.close()
        raise ParameterError("port", port, f"cannot be had: {problem.strerror}", "leave --port out") from None
    return listening


def open_browser(address: str) -> None:
    """Show the page where there is a browser to show it; the address was printed either way."""
    webbrowser.open(address)
