"""Try to break the lab: `python -m tests.fuzz_lab --requests 2500`.

Requests are made from the OpenAPI document, valid and not, and by hand: too long, garbled, from elsewhere, with paths
and code where numbers and words should be. Each must be answered, in time, by a status that says what is wrong; none
by 500 or by something unforeseen, and none may make the lab write, start or call anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.lab_outside import Watched, watched

HONEST = frozenset({200, 400, 403, 404, 405, 408, 413, 422, 431, 503})
SECONDS = 90.0
SECRET = "avow-secret-that-no-answer-holds"
CODE = (
    "__import__('os').system('touch {folder}/../avow-touched')",
    "().__class__.__mro__[1].__subclasses__()",
    "eval('1')",
    "exec('import os')",
    "lambda: 0",
    "open('/etc/passwd').read()",
    "x.__class__",
    "9**9**9**9",
    "x" + "**2" * 4000,
    "(" * 5000 + "x" + ")" * 5000,
    "{{7*7}}${{7*7}}",
    "<script>alert(1)</script>",
    "'; DROP TABLE runs; --",
    "\u0000",
    "\u202e\ud83d\ude00ﬀ½",
    "sqrt(" * 900,
    "1e999999",
    "x\n\nimport os",
    "../../../../etc/passwd",
    "file:///etc/passwd",
)
TRICKS = (
    "/static/../../../../etc/passwd",
    "/static/..%2f..%2f..%2fetc%2fpasswd",
    "/static/%2e%2e/%2e%2e/avow-secret",
    "/static/....//....//avow-secret",
    "//evil.example/static/lab.js",
    "/static/lab.js%00",
    "/static\\..\\..\\avow-secret",
    "/%2e%2e/%2e%2e/avow-secret",
    "/api/../openapi.json",
    "/api//preview",
    "/explorer/../api/files",
    "/static/lab.css?../../avow-secret",
    "/static/chart.js/../avow-secret",
    "/" + "a" * 9000,
    "/%ff%fe",
    "/~root/.ssh/id_rsa",
    "/.git/config",
    "/proc/self/environ",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")


@dataclass(frozen=True)
class Ask:
    """A request, and the statuses that are right for it."""

    kind: str
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    right: frozenset[int] = HONEST
    raw: bytes | None = None


@dataclass
class Tally:
    """What came of them."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    stories: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(self.kinds.items()))
        statuses = ", ".join(f"{status} × {count:,}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.kinds.total():,} requests ({kinds}); answers {statuses}; slowest {self.slowest:.1f} s; "
            f"{len(self.stories)} wrong"
        )


def from_schema(document: dict[str, Any], count: int, seed: int) -> list[Ask]:
    """Requests that schemathesis makes of the OpenAPI document: half of them valid, half not."""
    import schemathesis

    found: list[Ask] = []
    # What cannot be read of our own document would raise, and be seen.
    offered: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    operations = [one.ok() for one in offered]
    taking = [one for one in operations if one.body]
    for operation in operations:
        # Proofs take seconds: of the valid ones a few are enough.
        some = 3 if operation.path.endswith("/verdict") else count // len(taking)
        found += _examples("schema", operation, schemathesis.GenerationMode.POSITIVE, some, seed)
        if operation.body:
            each = count // len(taking)
            found += _examples("schema, broken", operation, schemathesis.GenerationMode.NEGATIVE, each, seed)
    return found


def _examples(kind: str, operation: Any, mode: Any, count: int, seed: int) -> list[Ask]:
    """So many requests for one operation, where it has so many."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    found: list[Ask] = []

    @seeded(seed)
    @settings(
        max_examples=max(1, count),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        body = case.body
        if not isinstance(body, bytes):
            # What JSON cannot hold is sent as its words.
            body = b"" if type(body).__name__ == "NotSet" else json.dumps(body, default=str).encode()
        headers = {"Content-Type": "application/json"} if case.method == "POST" else {}
        found.append(Ask(kind, case.method, case.path, body, headers))

    collect()
    return found


def by_hand(document: dict[str, Any], count: int, seed: int, folder: Path) -> list[Ask]:
    """Requests that no schema describes."""
    draw = random.Random(seed)
    fields = _fields(document)
    made = _by_hand(draw, list(fields.items()), folder)
    return [next(made) for _ in range(count)]


def _fields(document: dict[str, Any]) -> dict[str, list[str]]:
    """The inputs of everything that computes, by its path."""
    found = {}
    for path, operation in document["paths"].items():
        content = operation.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            found[path] = list(content["schema"]["properties"])
    return found


def _by_hand(draw: random.Random, fields: list[tuple[str, list[str]]], folder: Path) -> Iterator[Ask]:
    own = {"Content-Type": "application/json"}
    while True:
        path, names = draw.choice(fields)
        code = draw.choice(CODE).replace("{folder}", str(folder))
        value: Any = draw.choice((code, [code], {code: code}, -1e308, 10**400, True, None, [[]] * 50, "é" * 100))
        body = json.dumps({draw.choice([*names, code]): value}).encode()
        yield Ask("code", "POST", path, body, own, HONEST)
        long = draw.choice((b"[" * 60000, b'{"a":' * 9000, b" " * 70000, b'"' + b"x" * 65000, draw.randbytes(30000)))
        yield Ask("long", "POST", path, long, own, frozenset({413, 422}))
        trick = draw.choice(TRICKS) + draw.choice(("", "", "?x=" + "y" * draw.randrange(3000), "%", ";a"))
        yield Ask("path", draw.choice(METHODS), trick, None, {}, HONEST)
        host = draw.choice(("evil.example", "127.0.0.1:1", "localhost", "", "127.0.0.1:{port}@evil.example", "[::1]"))
        yield Ask("host", "POST", path, b"{}", own | {"Host": host}, frozenset({400, 403}))
        origin = draw.choice(
            ("null", "http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1:{port}.evil")
        )
        yield Ask("origin", "POST", path, b"{}", own | {"Origin": origin}, frozenset({403}))
        token = draw.choice(("", "wrong", "a" * 43, "é", "%00", "0" * 5000))
        yield Ask("token", "POST", path, b"{}", own | {"X-Avow-Token": token}, frozenset({403, 431, 400}))
        headers = draw.choice(
            ({"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {"Content-Encoding": "gzip"},
             {"Content-Type": "application/json; charset=utf-7"}, {"Content-Length": "-1"}, {"Expect": "100-continue"})
        )  # fmt: skip
        yield Ask("header", "POST", path, b"{}", headers, HONEST)
        file = draw.randbytes(8) + draw.randbytes(draw.randrange(400))
        header = json.dumps({"q": {"dtype": "F32", "shape": [draw.randrange(-3, 9)] * draw.randrange(9),
                                   "data_offsets": [0, draw.randrange(99)]}}).encode()  # fmt: skip
        framed = len(header).to_bytes(8, "little") + header + b"\0" * draw.randrange(99)
        yield Ask("file", "POST", "/api/files", draw.choice((file, framed)), {}, HONEST)
        line = draw.choice(
            (b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"POST /api/files HTTP/1.1\r\nContent-Length: 9",
             b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * 50, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
             b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nzz\r\n",
             b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", draw.randbytes(200))
        )  # fmt: skip
        yield Ask("garbled", "", "", raw=line)


def send(one: Ask, at: Watched) -> str | tuple[int, bytes]:
    """The status and body, or what went wrong."""
    port = str(at.lab.port)
    headers = {name: word.replace("{port}", port) for name, word in one.headers.items()}
    try:
        if one.raw is not None:
            with socket.create_connection(("127.0.0.1", at.lab.port), timeout=SECONDS) as wire:
                with contextlib.suppress(ConnectionError):
                    wire.sendall(one.raw)
                    wire.shutdown(socket.SHUT_WR)
                    return 400, wire.makefile("rb").read()
                return 400, b""
        done = at.lab.ask(one.method, one.path, one.body, {"X-Avow-Token": at.token} | headers)
    except ConnectionError:
        # It may hang up on what it will not read: too much, or no HTTP at all.
        return 400, b""
    except UnicodeEncodeError:
        return 400, b""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return done.status, done.body


def judged(one: Ask, came: str | tuple[int, bytes], token: str) -> str:
    """What is wrong with an answer; nothing, mostly."""
    if isinstance(came, str):
        return came
    status, body = came
    if one.raw is not None and body and body.split()[1:2] not in ([b"400"], [b"403"], [b"404"], [b"405"], [b"431"]):
        return f"garbled, and answered {body[:80]!r}"
    if status not in one.right:
        return f"status {status}: {body[:200]!r}"
    if b"Unforeseen" in body:
        return f"not foreseen: {body[:300]!r}"
    if SECRET.encode() in body or (token.encode() in body and not body.startswith(b"<!doctype html>")):
        return "told a secret"
    return ""


def run(at: Watched, count: int, seed: int) -> Tally:
    """Send so many requests, eight at a time."""
    (at.folder.parent / "avow-secret").write_text(SECRET)
    document = at.lab.get("/openapi.json").said
    asked = from_schema(document, count // 2, seed)
    asked += by_hand(document, max(count - len(asked), count // 3), seed, at.folder)
    random.Random(seed).shuffle(asked)
    tally = Tally()

    def one(ask: Ask) -> None:
        since = time.monotonic()
        came = send(ask, at)
        took = time.monotonic() - since
        wrong = judged(ask, came, at.token)
        tally.slowest = max(tally.slowest, took)
        tally.kinds[ask.kind] += 1
        if not isinstance(came, str):
            tally.statuses[came[0]] += 1
        if wrong or took > SECONDS:
            shown = ask.raw or ask.body or b""
            tally.stories.append(
                f"{ask.kind}: {ask.method} {ask.path[:100]} {shown[:200]!r}: {wrong or f'{took:.0f} s'}"
            )

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(one, asked))
    path = next(iter(_fields(document)))
    after = at.lab.ask("POST", path, b"{}", {"X-Avow-Token": at.token, "Content-Type": "application/json"})
    if after.status != 200:
        tally.stories.append(f"afterwards {path} was answered by {after.status}: {after.body[:200]!r}")
    tally.stories += [f"it did {note}" for note in at.notes]
    tally.stories += [f"{left} appeared" for left in at.folder.parent.iterdir() if left.name == "avow-touched"]
    return tally


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--requests", type=int, default=2500)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    chosen = options.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "lab"
        folder.mkdir()
        with watched(folder) as at:
            tally = run(at, chosen.requests, chosen.seed)
    print(tally)
    for story in tally.stories[:20]:
        print(" ", story)
    return 1 if tally.stories else 0


if __name__ == "__main__":
    sys.exit(main())
