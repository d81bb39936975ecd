"""What is written is whole or not there, and nothing else is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from avow import file_io
from avow.errors import FileError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    file_io.write(path, "old")
    file_io.write(path, b"new")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["page.html"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, moment: str
) -> None:
    path = tmp_path / "page.html"
    file_io.write(path, "old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, moment, fail)
    words = r"page\.html cannot be written \(No space left on device\); name another place$"
    with pytest.raises(FileError, match=words) if isinstance(failure, OSError) else pytest.raises(KeyboardInterrupt):
        file_io.write(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]


def test_what_is_renamed_is_on_the_disk_and_so_is_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def renamed(*paths: Path) -> None:
        done.append("renamed")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    file_io.write(tmp_path / "page.html", "new")
    assert done == ["file", "renamed", "folder"]
    done.clear()
    (tmp_path / "writing").mkdir()
    file_io.put(tmp_path / "writing" / "part", b"some")
    file_io.settle(tmp_path / "writing", tmp_path / "whole")
    assert done == ["file", "folder", "renamed", "folder"]
    assert (tmp_path / "whole" / "part").read_bytes() == b"some" and not (tmp_path / "writing").exists()


def test_a_file_may_be_read_by_whom_its_maker_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        file_io.write(tmp_path / "ours", "new")
        (tmp_path / "plain").write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a folder; name a file in it"):
        file_io.ready(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"has no folder .*; name another place"):
        file_io.ready(tmp_path / "file" / "page.html")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe is not a plain file; name another place"):
        file_io.write(tmp_path / "pipe", "would replace it")


@pytest.mark.parametrize(
    ("place", "why"),
    [("/proc/page.html", "No such file or directory|Permission denied"), ("n" * 250 + ".html", "File name too long")],
)
def test_a_place_that_only_trying_tells_of_is_refused_before_the_work(tmp_path: Path, place: str, why: str) -> None:
    path = tmp_path / place
    for refuse in (file_io.ready, lambda path: file_io.write(path, "new")):
        with pytest.raises(FileError, match=rf"cannot be written \((?:{why})\); name another place$"):
            refuse(path)
    assert os.listdir(tmp_path) == []


def test_getting_ready_leaves_what_was_there(tmp_path: Path) -> None:
    file_io.write(tmp_path / "page.html", "old")
    file_io.ready(tmp_path / "page.html")
    file_io.ready(tmp_path / "new" / "page.html")
    assert (tmp_path / "page.html").read_text() == "old" and os.listdir(tmp_path / "new") == []
