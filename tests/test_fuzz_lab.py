"""A seeded slice of the lab's fuzz, and proof that it would notice."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz_lab import Ask, judged, run, send
from tests.helpers.lab_outside import watched

pytestmark = pytest.mark.processes

OWN = {"Content-Type": "application/json"}


def test_a_slice_of_the_fuzz_finds_nothing_and_a_lab_that_is_watched_is_seen(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    with watched(tmp_path / "lab") as at:
        tally = run(at, 120, 11)
        assert tally.stories == [] and tally.kinds.total() >= 120 and at.processes() >= 3
        assert set(tally.statuses) >= {200, 403, 404, 422}
        # A client that breaks the protocol after its headers is cut off without a word in the terminal.
        broken = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        for _ in range(5):
            send(Ask("garbled", "", "", raw=broken), at)
        assert at.lab.get("/").status == 200 and at.notes == []
        # Right answers to the wrong expectations: the judge would speak.
        ask = Ask("token", "POST", "/api/explorer/preview", b"{}", OWN, frozenset({403}))
        assert judged(ask, send(ask, at), at.token).startswith("status 200")
        page = send(Ask("page", "GET", "/explorer"), at)
        assert not isinstance(page, str) and not judged(ask, (403, b"{}"), at.token)
        assert judged(dataclasses.replace(ask, right=frozenset({200})), (200, at.token.encode()), at.token)
        assert judged(ask, (403, b'{"error": {"kind": "Unforeseen"}}'), at.token).startswith("not foreseen")


@pytest.mark.parametrize(
    "act",
    ["open('../elsewhere', 'w')", "os.system('true')", "subprocess.run(['true'])", "open('/etc/passwd')"],
)
def test_what_a_lab_must_not_do_is_noted(tmp_path: Path, act: str) -> None:
    from tests.helpers.lab_outside import _WATCH

    home = tmp_path / "home"
    home.mkdir()
    (home / "sitecustomize.py").write_text(_WATCH)
    command = [sys.executable, "-c", f"import os, subprocess; open('own', 'w').close(); {act}"]
    surroundings = {"PYTHONPATH": str(home), "AVOW_WATCHED": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=home, env=surroundings, check=True, stderr=subprocess.DEVNULL)
    (note,) = [line for line in (home / "notes").read_text().splitlines() if "posix_spawn" not in line][:1]
    assert note.split()[0] in ("open", "os.system", "subprocess.Popen") and "own'" not in note
