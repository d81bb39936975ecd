"""The lab as an application: its pages, their scripts, and the computations behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from avow.errors import AvowError
from avow.lab import templates
from avow.lab.page import PACKAGE, Inputs, Page, all_pages
from avow.lab.request_queue import Busy, RequestQueue
from avow.lab.responses import MISTAKE, JsonResponse, error_body, error_body_of
from avow.lab.security import SecurityMiddleware
from avow.lab.static_files import TYPES, static_files
from avow.lab.uploads import FileStore

# A preview that does not come at once is of no use.
_PREVIEW_SECONDS = 5.0
_PROOFS_AT_A_TIME = 2
# Answers that a page lets the server keep; the oldest goes first.
_MOST_KEPT = 256


def build(port: int, token: str, package: str = PACKAGE) -> SecurityMiddleware:
    """The application for one port and one token, its guard around it; its pages are those of a package."""
    pages = all_pages(package)
    previews, proofs, shelf = (
        RequestQueue(package, 1),
        RequestQueue(package, _PROOFS_AT_A_TIME, low_priority=True),
        FileStore(),
    )

    async def close() -> None:
        await asyncio.gather(previews.close(), proofs.close())

    @contextlib.asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.gather(previews.start(), proofs.start())
        try:
            yield
        finally:
            await close()

    app = FastAPI(title="avow lab", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=alive)
    app.add_exception_handler(AvowError, _told)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(HTTPException, _unknown(list(pages.values()), token))

    @app.get("/", response_class=HTMLResponse)
    async def front() -> str:
        return templates.front(list(pages.values()), token)

    for page in pages.values():
        app.get(f"/{page.name}", response_class=HTMLResponse)(_shown(page, list(pages.values()), token))
        app.post(f"/api/{page.name}/preview")(_computed(page, "preview", previews, shelf))
        if page.verdict is not None:
            app.post(f"/api/{page.name}/verdict")(_computed(page, "verdict", proofs, shelf))

    @app.post("/api/files")
    async def files(request: Request) -> Response:
        return JsonResponse(await asyncio.to_thread(shelf.put, await request.body()))

    for name, content in static_files().items():
        app.get(f"/static/{name}", include_in_schema=False)(_sent(content, TYPES[name.rpartition(".")[2]]))
    app.get("/plotly.js", include_in_schema=False)(_plotly)
    return SecurityMiddleware(app, port, token, close)


def _shown(page: Page, pages: list[Page], token: str) -> Callable[[], Coroutine[Any, Any, str]]:
    async def show() -> str:
        return templates.page(page, pages, token)

    return show


def _computed(
    page: Page, what: str, queue: RequestQueue, shelf: FileStore
) -> Callable[..., Coroutine[Any, Any, Response]]:
    seconds = min(page.seconds, _PREVIEW_SECONDS) if what == "preview" else page.seconds
    known: dict[str, bytes] = {}

    async def compute(request: Request, inputs: Inputs) -> Response:
        handle = getattr(inputs, "file", None) if page.takes_files else None
        file = (handle, shelf.get(handle)) if handle else None
        question = {"page": page.name, "what": what, "inputs": inputs.model_dump(mode="json")}
        name = inputs.model_dump_json()
        if name in known:
            return JsonResponse(known[name])
        asked = asyncio.ensure_future(queue.ask(question, seconds, file))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return Response(status_code=499)  # nobody will read it
            answer = asked.result()
            mistaken = answer.startswith(MISTAKE)
            if page.kept and not mistaken:
                known[name] = answer
                if len(known) > _MOST_KEPT:
                    del known[next(iter(known))]
            return JsonResponse(answer, 422 if mistaken else 200)
        finally:
            gone.cancel()
            asked.cancel()

    # FastAPI reads the body as what the annotation says.
    compute.__annotations__["inputs"] = page.inputs
    compute.__name__ = f"{page.name}_{what}"
    return compute


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sent(content: str, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def send() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers={"cache-control": "no-cache"})

    return send


async def _plotly() -> Response:
    import plotly.offline

    kept = {"cache-control": "private, max-age=86400"}
    return Response(plotly.offline.get_plotlyjs(), media_type="text/javascript; charset=utf-8", headers=kept)


async def _told(request: Request, problem: Exception) -> Response:
    return JsonResponse(error_body_of(problem), 503 if isinstance(problem, Busy) else 422)


async def _misread(request: Request, problem: Exception) -> Response:
    """The first thing wrong with some inputs."""
    assert isinstance(problem, RequestValidationError)
    first = problem.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    rule = first["msg"].replace("Input should", "must", 1)
    rule = rule[:1].lower() + rule[1:]
    return JsonResponse(error_body("ParameterError", name, first.get("input"), rule, "set it again on the page"), 422)


def _unknown(pages: list[Page], token: str) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    async def answer(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        status, path = problem.status_code, request.url.path
        if status == 404 and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(templates.front(pages, token, lost=path), status)
        if status == 400:
            return JsonResponse(
                error_body("InputError", "body", "as sent", "is not JSON that can be read", "send JSON"), 422
            )
        rule = "is not known here" if status == 404 else f"was refused: {problem.detail}"
        return JsonResponse(error_body("Unknown", "address", path, rule, "start from the front page"), status)

    return answer
