"""Which requests are served, and how large they may be: the first to see a request, the last to see a response.

A page elsewhere on the web can send requests to this machine, and can make its own name point here. So: the Host must
be loopback and this very port; an Origin must be the page itself; whatever computes needs the token that stands in the
page, which no other origin can read. Bodies are limited and read before anything looks at them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from avow.lab.page import error_body, error_body_of, json_bytes

TOKEN = "x-avow-token"
_BODY_BYTES = 64 * 1024
_FILES = "/api/files"
_FILE_BYTES = 32 * 1024 * 1024
# Files that are received and read at once; the others wait, and what they send with them.
_FILES_AT_ONCE = 2
_BODY_SECONDS = 20.0

# Plotly writes its rules into style elements that it makes empty, brings one for maps along, and sets style attributes:
# these two elements and attributes alone are let in. Scripts come from here, and nothing is ever evaluated.
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
_MAPS = "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {_EMPTY} {_MAPS}; style-src-attr 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, name: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(rule)
        self.answer = JsonResponse(error_body("Refused", name, value, rule, remedy), status)


class _NotSent(Exception):
    """A response that could not be sent."""


class SecurityMiddleware:
    """An application behind its rules; `close` ends what it computes, so that nobody waits for it."""

    def __init__(self, app: ASGIApp, port: int, token: str, close: Callable[[], Awaitable[None]]) -> None:
        self.app, self._token, self.close = app, token, close
        self._turns = asyncio.Semaphore(_FILES_AT_ONCE)
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                kept = [(name, value) for name, value in message["headers"] if name.decode() not in HEADERS]
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if not any(name == b"cache-control" for name, _ in kept):
                    own.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*kept, *own]}
            try:
                await send(message)
            except Exception as error:
                raise _NotSent from error

        try:
            self._admit(scope)
            async with self._turn(scope["path"]):
                body = await _body(scope, receive)
                await self.app(scope, _replay(body, receive), send_with_headers)
        except _NotSent:
            await _disconnected(receive)
        except Exception as error:
            if started:
                raise
            answer = error.answer if isinstance(error, Refused) else JsonResponse(error_body_of(error), 422)
            try:
                await answer(scope, receive, send_with_headers)
            except _NotSent:
                await _disconnected(receive)

    @contextlib.asynccontextmanager
    async def _turn(self, path: str) -> AsyncIterator[None]:
        """The time in which a request may be received and answered: files come a few at a time."""
        if path != _FILES:
            yield
            return
        try:
            await asyncio.wait_for(self._turns.acquire(), _BODY_SECONDS)
        except TimeoutError:
            rule = f"had to wait for {_FILES_AT_ONCE} other files for {_BODY_SECONDS:g} s"
            raise Refused(503, "file", "unread", rule, "try again in a moment") from None
        try:
            yield
        finally:
            self._turns.release()

    def _admit(self, scope: Scope) -> None:
        host = _header(scope, "host")
        if host not in self.hosts:
            raise Refused(403, "Host", host, "is not this server", "open the address that avow lab printed")
        origin = _header(scope, "origin")
        if origin is not None and origin not in {f"http://{known}" for known in self.hosts}:
            raise Refused(403, "Origin", origin, "is another site", "use the lab from its own page")
        if _header(scope, "sec-fetch-site") in ("cross-site", "same-site") and scope["method"] != "GET":
            raise Refused(403, "Sec-Fetch-Site", "cross-site", "is another site", "use the lab from its own page")
        if scope["path"].startswith("/api/"):
            token = _header(scope, TOKEN) or ""
            if not secrets.compare_digest(token.encode(), self._token.encode()):
                raise Refused(403, TOKEN, "wrong or missing", "must be the page's own", "load the page again")


def _header(scope: Scope, name: str) -> str | None:
    """A header's value; one that is given twice is refused."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    if len(values) > 1:
        raise Refused(400, name, f"{len(values)} times", "must be given once", "send it once")
    return values[0].decode("latin-1") if values else None


async def _body(scope: Scope, receive: Receive) -> bytes:
    """The whole body, unless there is too much of it or it takes too long."""
    name, most = ("file", _FILE_BYTES) if scope["path"] == _FILES else ("body", _BODY_BYTES)
    declared = _header(scope, "content-length") or "0"
    if not declared.isascii() or not declared.isdigit() or len(declared) > 12 or int(declared) > most:
        raise _too_long(name, declared, most)

    async def read() -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return bytes(body)
            body += message.get("body", b"")
            if len(body) > most:
                raise _too_long(name, len(body), most)
            if not message.get("more_body", False):
                return bytes(body)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except TimeoutError:
        raise Refused(408, "body", "unfinished", f"must arrive within {_BODY_SECONDS:g} s", "send it at once") from None


async def _disconnected(receive: Receive) -> None:
    """Return when a client that broke the protocol, and was told so by the server, is cut off."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while (await receive())["type"] != "http.disconnect":
                pass


def _too_long(name: str, size: object, most: int) -> Refused:
    room = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
    return Refused(413, name, f"{size} bytes", f"must be at most {room}", "send less")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the application the whole body first, and then whatever the client sends."""
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
