"""Which requests are served, and how large they may be: the first to see a request, the last to see a response.

A page elsewhere on the web can send requests to this machine, and can make its own name point here. So: the Host must
be loopback and this very port; an Origin must be the page itself; whatever computes needs the token that stands in the
page, which no other origin can read. Bodies are limited in size and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from avow.errors import AvowError
from avow.lab.page import error_body, json_bytes

TOKEN = "x-avow-token"
_BODY_SECONDS = 20.0

# Scripts and styles come from here, none stand in line, and nothing is ever evaluated.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class JsonResponse(Response):
    """JSON that holds nothing a browser could mistake for anything else."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json_bytes(content)


class Refused(AvowError):
    """A request that goes no further."""

    def __init__(self, status: int, name: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(name, value, rule, remedy)
        self.status = status


def error_response(error: Exception) -> JsonResponse:
    """The parts of an error, with the status it names, if any."""
    return JsonResponse(error_body(error), getattr(error, "status", 422))


class _NotSent(Exception):
    """A response that could not be sent."""


class SecurityMiddleware:
    """An application behind its rules; `close` ends what it computes, so that nobody waits for it."""

    def __init__(self, app: ASGIApp, port: int, token: str, close: Callable[[], Awaitable[None]]) -> None:
        self.app, self._token, self.close = app, token, close
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            try:
                await send(message)
            except Exception as error:
                raise _NotSent from error

        app = self.app
        try:
            self._admit(scope)
        except Refused as refusal:
            app = error_response(refusal)
        try:
            await app(scope, receive, send_with_headers)
        except _NotSent:
            # The client broke the protocol; the server has answered and closes the connection.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while (await receive())["type"] != "http.disconnect":
                        pass

    def _admit(self, scope: Scope) -> None:
        """Raise where a request is not one of this server's own pages, or cannot prove that it is."""
        headers = Headers(scope=scope)
        for name in ("host", "origin", "sec-fetch-site", TOKEN, "content-length"):
            if (times := len(headers.getlist(name))) > 1:
                raise Refused(400, name, f"{times} times", "must be given once", "send it once")
        host, origin = headers.get("host"), headers.get("origin")
        if host not in self.hosts:
            raise Refused(403, "Host", host, "is not this server", "open the address that avow lab printed")
        if origin is not None and origin not in {f"http://{known}" for known in self.hosts}:
            raise Refused(403, "Origin", origin, "is another site", "use the lab from its own page")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["method"] != "GET":
            raise Refused(403, "Sec-Fetch-Site", "cross-site", "is another site", "use the lab from its own page")
        token = headers.get(TOKEN, "")
        if scope["path"].startswith("/api/") and not secrets.compare_digest(token.encode(), self._token.encode()):
            raise Refused(403, TOKEN, "wrong or missing", "must be the page's own", "load the page again")


async def read_body(request: Request, most: int, name: str = "body") -> bytes:
    """The whole body, unless there is too much of it or it takes too long."""
    room = f"must be at most {most >> 20} MiB" if most >> 20 else f"must be at most {most >> 10} KiB"
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or len(declared) > 12 or int(declared) > most:
        raise Refused(413, name, f"{declared} bytes", room, "send less")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refused(413, name, f"{len(body)} bytes", room, "send less")
    except TimeoutError:
        raise Refused(408, name, "unfinished", f"must arrive within {_BODY_SECONDS:g} s", "send it at once") from None
    except ClientDisconnect:
        pass  # what has come is answered, and nobody reads it
    return bytes(body)
