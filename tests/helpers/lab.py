"""The lab, really served: for the tests of its server and of its pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TOKEN = "a-token-for-tests"


@dataclass(frozen=True)
class Answered:
    """A status, headers, and what was said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)

    @property
    def mistake(self) -> str:
        """The four parts in a line, each of them there."""
        parts = self.said["error"]
        assert set(parts) == {"kind", "name", "value", "rule", "remedy"} and parts["rule"] and parts["remedy"], parts
        return f"{parts['name']}={parts['value']} {parts['rule']}; {parts['remedy']}"


@dataclass(frozen=True)
class Lab:
    """A running lab, and requests to it, by default as its own page sends them."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=150)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"X-Avow-Token": TOKEN, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def get(self, path: str, **headers: str) -> Answered:
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, inputs: Any, **headers: str) -> Answered:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, json.dumps(inputs).encode(), {"Content-Type": "application/json"} | named)


@contextlib.contextmanager
def running(package: str = "avow.lab.pages") -> Iterator[Lab]:
    """A lab on a free port, in a thread; gone afterwards, and its processes with it."""
    # Every test loads this module, and few of them need the lab's packages.
    from avow.lab.server import bound, server

    up = threading.Event()
    with bound(0) as listening:
        made = server(listening, TOKEN, lambda address: up.set(), package)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert up.wait(120)
            yield Lab(listening.getsockname()[1])
        finally:
            made.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
