"""The lab's server on loopback: its pages, their scripts, and the computations behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from avow.errors import AvowError, InputError, ParameterError
from avow.lab.page import MISTAKE, PACKAGE, Page, all_pages
from avow.lab.rendering import TYPES, render, row, static_files, workshop
from avow.lab.request_queue import RequestQueue
from avow.lab.security import JsonResponse, Refused, SecurityMiddleware, error_response, read_body
from avow.lab.stories import story_names, story_script
from avow.lab.uploads import FileStore

_HOST = "127.0.0.1"
_BODY_BYTES = 1 << 16
_PROOFS_AT_A_TIME = 2
# Shared addresses open again if the lab is always found at one port.
USUAL_PORT = 8642


def server(
    listening: socket.socket, token: str, ready: Callable[[str], None], package: str = PACKAGE
) -> uvicorn.Server:
    """The server of one socket; `ready` is called with the address once it answers."""
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

    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none"}
    settings |= {"timeout_keep_alive": 5, "timeout_graceful_shutdown": 2}
    return Server(uvicorn.Config(app, http="h11", loop="asyncio", **settings))


def bound_to_usual() -> socket.socket:
    """A socket on loopback: the usual port, or any free one if that is taken."""
    try:
        return bound(USUAL_PORT)
    except ParameterError:
        return bound(0)


def bound(port: int) -> socket.socket:
    """A socket on loopback: this port, or any free one if it is 0."""
    # Named as TCP, asyncio sends at once; else small answers wait 40 ms for the other side's acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
    except OSError as error:
        listening.close()
        raise ParameterError("port", port, f"is not available: {error.strerror}", "leave --port out") from None
    return listening


def build(port: int, token: str, package: str = PACKAGE) -> SecurityMiddleware:
    """The application for one port and one token behind its security rules; its pages are those of a package."""
    files = FileStore()
    proofs = RequestQueue(package, _PROOFS_AT_A_TIME, low_priority=True)
    previews = RequestQueue(package, 1, before=proofs)
    # Models stay loaded in its one process, which starts when it is first asked, and leaves a core to whoever reads.
    readers = RequestQueue(package, 1, low_priority=True, keep=True, threads=max(1, (os.cpu_count() or 1) - 1))

    async def close() -> None:
        await asyncio.gather(previews.close(), proofs.close(), readers.close())

    async def start() -> None:
        # One after the other: the browser opens its first page meanwhile.
        await previews.start()
        await proofs.start()

    @contextlib.asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.ensure_future(start())
        try:
            yield
        finally:
            await close()
            await asyncio.gather(starting, return_exceptions=True)

    app = FastAPI(title="avow lab", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=alive)

    @app.exception_handler(AvowError)
    async def refused(request: Request, error: AvowError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def lost(request: Request, error: HTTPException) -> Response:
        status, path = error.status_code, request.url.path
        if status == 404 and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(render("lost", package, token, lost=path), status)
        rule = "is not known here" if status == 404 else f"was refused: {error.detail}"
        return error_response(Refused(status, "address", path, rule, "start from the front page"))

    if workshop(package):

        @app.get("/workshop", response_class=HTMLResponse)
        async def index() -> str:
            return render("workshop", package, token)

    @app.post("/api/files")
    async def store(request: Request) -> Response:
        return JsonResponse(await files.receive(request))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in static_files():
            raise HTTPException(404)
        kind, headers = TYPES[Path(name).suffix], {"cache-control": "no-cache"}
        return Response(static_files()[name], media_type=kind, headers=headers)

    @app.get("/stories/{name}.js", include_in_schema=False)
    async def story(name: str) -> Response:
        if name not in story_names():
            raise HTTPException(404)
        return Response(story_script(name), media_type=TYPES[".js"], headers={"cache-control": "no-cache"})

    def add(page: Page) -> None:
        async def show() -> str:
            return render(page.name, package, token, page)

        for address in {f"/{page.name}", *(place.address for place in row(package)[:1] if place.name == page.name)}:
            app.get(address, response_class=HTMLResponse)(show)
        _add_computation(app, page, "preview", previews, min(page.seconds, page.preview_seconds), files)
        if page.verdict is not None:
            _add_computation(app, page, "verdict", proofs, page.seconds, files)
        for name in page.calls:
            _add_computation(app, page, name, readers, page.call_seconds, files)

    for page in all_pages(package).values():
        add(page)
    return SecurityMiddleware(app, port, token, close)


def _add_computation(
    app: FastAPI, page: Page, what: str, queue: RequestQueue, seconds: float, files: FileStore
) -> None:
    """Serve a page's preview, its verdict or a call; the document of the interface has the schema of its inputs."""
    schema = {"required": True, "content": {"application/json": {"schema": page.inputs.schema()}}}

    @app.post(f"/api/{page.name}/{what}", name=f"{page.name}_{what}", openapi_extra={"requestBody": schema})
    async def compute(request: Request) -> Response:
        try:
            given = json.loads(await read_body(request, _BODY_BYTES))
        except (ValueError, RecursionError):
            raise InputError("body", "as sent", "cannot be read as JSON", "send JSON") from None
        inputs = page.inputs.of(given)
        handle = getattr(inputs, "file", None)
        file = (handle, files.get(handle)) if handle else None
        answering = asyncio.ensure_future(queue.ask({"page": page.name, "what": what, "inputs": given}, seconds, file))
        leaving = asyncio.ensure_future(_departure(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)  # nobody will read it
            answer = answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
        return JsonResponse(answer, 422 if answer.startswith(MISTAKE) else 200)


async def _departure(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
