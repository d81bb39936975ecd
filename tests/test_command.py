"""`avow` can be interrupted from its first moment on, with one line and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from avow.cli import main

ROOT = Path(__file__).parents[1]
LOADING = "print('loading', flush=True)\nimport time\ntime.sleep(60)\n"
# A library that takes an interrupt for an error of its own.
DEAF = LOADING.replace(
    "time.sleep(60)", "try: time.sleep(60)\nexcept BaseException: raise ImportError('torch') from None"
)
ONE_LINE = (130, "avow: interrupted; nothing was written\n")
STARTS = {"command": "import avow_command; avow_command.main()", "package": "from avow.cli import main; main()"}


def started(folder: Path, package: str, cli: str, how: str) -> subprocess.Popen[str]:
    """`avow` with a package that stands in for it."""
    (folder / "avow").mkdir()
    (folder / "avow" / "__init__.py").write_text(package)
    (folder / "avow" / "cli.py").write_text(cli)
    find = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; import signal; "
    # A shell that runs the tests in its background has them ignore Ctrl-C, and those whom they start.
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler); "
    return subprocess.Popen(
        [sys.executable, "-c", find + heed + STARTS[how]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ends, and with what words, where Ctrl-C comes while it is loading."""
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize("package", [LOADING, DEAF])
@pytest.mark.parametrize(("how", "told"), [("command", True), ("package", False)])
def test_ctrl_c_while_it_loads_ends_in_one_line(tmp_path: Path, package: str, how: str, told: bool) -> None:
    with started(tmp_path, package, "", how) as process:
        end = interrupted(process)
    assert (end == ONE_LINE) == told, end


def test_ctrl_c_between_loading_and_the_command_ends_in_one_line(tmp_path: Path) -> None:
    cli = f"def main(begin):\n{textwrap.indent(LOADING, '    ')}"
    with started(tmp_path, "", cli, "command") as process:
        assert interrupted(process) == ONE_LINE


def test_once_begun_ctrl_c_is_the_command_s_own(tmp_path: Path) -> None:
    heard = "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    cli = f"import signal\ndef main(begin):\n    {heard}\n    begin()\n    {heard}\n"
    with started(tmp_path, "", cli, "command") as process:
        assert process.communicate(timeout=60) == ("False\nTrue\n", "") and process.returncode == 0


@pytest.mark.parametrize(("words", "begun"), [(["claims", "list"], True), (["--version"], False)])
def test_only_a_command_that_runs_has_begun(
    words: list[str], begun: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys, "argv", ["avow", *words])
    with pytest.raises(SystemExit):
        main(lambda: calls.append("begun"))
    assert bool(calls) == begun and capsys.readouterr().out
