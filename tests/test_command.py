"""`avow` can be interrupted from its first moment on, with one line and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADING = "print('loading', flush=True)\nimport time\ntime.sleep(60)\n"
# A library that takes an interrupt for an error of its own.
DEAF = LOADING.replace(
    "time.sleep(60)", "try: time.sleep(60)\nexcept BaseException: raise ImportError('torch') from None"
)
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


@pytest.mark.parametrize("package", [LOADING, DEAF])
@pytest.mark.parametrize(("how", "told"), [("command", True), ("package", False)])
def test_ctrl_c_while_it_loads_ends_in_one_line(tmp_path: Path, package: str, how: str, told: bool) -> None:
    with started(tmp_path, package, "", how) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode == 130 and said == "avow: interrupted; nothing was written\n") == told, said


def test_once_loaded_ctrl_c_is_the_command_s_own(tmp_path: Path) -> None:
    cli = "import signal\ndef main(): print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    with started(tmp_path, "", cli, "command") as process:
        assert process.communicate(timeout=60) == ("True\n", "") and process.returncode == 0
