"""What the pages tell people to type works: every bash and python block is run.

The python blocks of a page share one namespace, and functions named `test_…` in them are called. Bash blocks run
in an empty folder where `make` only says whether it knows the target, and fetching and installing do nothing.

Nothing else is code: what takes too long stands in a text block below a comment `<!-- not run here: why -->`, and its
commands are still read by the parser that would run them.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from avow.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


class Block(NamedTuple):
    """Some code on a page, and the line of the page it starts on."""

    language: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """The bash and python blocks of a page, in order."""
    fence = re.compile(r"^( *)```(bash|python)\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
    return [Block(m[2], text.count("\n", 0, m.start(3)) + 1, textwrap.dedent(m[3])) for m in fence.finditer(text)]


def run_page(page: Path, folder: Path) -> int:
    """Run every block of a page; how many there were."""
    found = blocks(page.read_text())
    bash_home, python_home = folder / "bash", folder / "python"
    lay_out(bash_home)
    python_home.mkdir()
    module = types.ModuleType("page")
    before = Path.cwd()
    sys.modules["page"] = module
    try:
        for block in found:
            if block.language == "bash":
                run_bash(page, block, bash_home)
            else:
                os.chdir(python_home)
                # Blank lines before the code make tracebacks name the page's own lines.
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
        for name, thing in list(vars(module).items()):
            if name.startswith("test_") and inspect.isfunction(thing):
                thing()
    finally:
        os.chdir(before)
        del sys.modules["page"]
    return len(found)


def run_bash(page: Path, block: Block, home: Path) -> None:
    path = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=home / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page.name}:{block.line}: exit {done.returncode} from\n{block.code}\n{done.stdout}"


def lay_out(home: Path) -> None:
    """Commands that stand in for those that would reach the network or build the whole project."""
    avow = f'exec "{sys.executable}" -m avow "$@"'
    stand_ins = {
        "bin/avow": avow,
        "bin/make": f'unset MAKEFLAGS; exec {real("make")} -n -C "{ROOT}" "$@" >/dev/null',
        "bin/pip": "true",
        "bin/git": 'test "$1" = clone && mkdir -p "$(basename "$2" .git)"',
        "work/.venv/bin/avow": avow,
        "work/.venv/bin/python": f'exec "{sys.executable}" "$@"',
        "work/.venv/bin/pip": "true",
        "work/.venv/bin/activate": "",
    }
    for name, command in stand_ins.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{command}\n")
        file.chmod(0o755)


def real(command: str) -> str:
    found = next((folder for folder in os.get_exec_path() if (Path(folder) / command).is_file()), None)
    assert found is not None, f"{command} is not installed"
    return str(Path(found) / command)


# Pages whose commands start ranks and workers are tested with the other processes.
STARTS_PROCESSES = {"ranks.md", "training.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.processes if page.name in STARTS_PROCESSES else ()) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_what_the_page_says_works(page: Path, tmp_path: Path) -> None:
    assert page.exists(), f"{page.name} is missing: the project has no such page yet"
    assert run_page(page, tmp_path) > 0 or page.parent.name == "docs", f"{page.name} shows nothing that can be run"


NOTE = re.compile(r"<!-- not run here: (.+) -->\n\Z")


def unsaid(text: str) -> list[str]:
    """What a page shows as code without having it run, and without saying why; and commands that no parser knows."""
    found = []
    for block in re.finditer(r"^ *```([^\n]*)\n(.*?)^ *```\s*$", text, re.MULTILINE | re.DOTALL):
        language, line = block[1].strip(), text.count("\n", 0, block.start()) + 1
        if language in ("bash", "python"):
            continue
        if language != "text":
            found.append(
                f"line {line}: a block is in {language or 'no language'!r}: bash and python are run, text is not"
            )
        commands = [
            shown for shown in block[2].splitlines() if re.match(r"(avow|make|python -m|pip|torchrun) ?", shown)
        ]
        note = NOTE.search(text, 0, block.start())
        if commands and note is None:
            found.append(f"line {line}: {commands[0]!r} is not run, and nothing says why")
        if note is not None:
            named = re.findall(r"tests/\w+\.py", note[1])
            found += [f"line {line}: there is no {name}" for name in named if not (ROOT / name).is_file()]
        for command in commands:
            try:
                parsed(command)
            except Exception as error:
                found.append(f"line {line}: {command!r}: {type(error).__name__}: {error}")
    return found


def parsed(line: str) -> None:
    """Raise where a command line names no command, or options that the command does not have."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file(), f"there is no {words[2]}"
        return
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]  # What it is to run, in several processes.
    assert words[0] == "avow", f"{words[0]} belongs into a bash block"
    command = typer.main.get_command(app)
    for _ in range(2):
        if isinstance(command, typer.core.TyperGroup):
            words = words[1:]
            command = command.commands[words[0]]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page: Path) -> None:
    assert unsaid(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```text\nwhat was printed\n```\n", None),
        ("<!-- not run here: takes hours -->\n```text\navow compare --length 5\n```\n", None),
        ("```text\navow compare --length 5\n```\n", "nothing says why"),
        ("<!-- not run here: takes hours -->\n\nwords\n\n```text\navow compare\n```\n", "nothing says why"),
        ("<!-- not run here: tests/test_no_such.py does -->\n```text\navow compare\n```\n", "tests/test_no_such.py"),
        ("<!-- not run here: takes hours -->\n```text\navow compare --lenght 5\n```\n", "lenght"),
        ("<!-- not run here: takes hours -->\n```text\navow train nothing\n```\n", "nothing"),
        ("<!-- not run here: takes hours -->\n```text\npython -m benchmarks.nothing\n```\n", "benchmarks.nothing"),
        ("```sh\navow compare\n```\n", "'sh'"),
        ("```\navow compare\n```\n", "no language"),
    ],
)
def test_what_is_not_run_in_silence_is_caught(text: str, fault: str | None) -> None:
    found = unsaid(text)
    assert found == [] if fault is None else any(fault in words for words in found)


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python\nx = 1\n```\n- b\n  ```bash\n  make\n  ```\n```text\nnot code\n```\n"
    assert blocks(text) == [Block("python", 3, "x = 1\n"), Block("bash", 7, "make\n")]


def test_a_good_page_passes(tmp_path: Path) -> None:
    text = "```bash\ngit clone somewhere/thing.git\ncd thing\nmake test\n```\n"
    text += "```python\nx = 1\n```\n```python\nassert x\n```"
    assert run_page(written(tmp_path, text), tmp_path) == 3


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```python\nassert 1 == 2\n```", AssertionError),
        ("```python\nimport avow\navow.no_such_name\n```", AttributeError),
        ("```python\ndef test_it():\n    assert False\n```", AssertionError),
        ("```bash\nmake no-such-target\n```", AssertionError),
        ("```bash\navow no-such-command\n```", AssertionError),
        ("```bash\nno-such-program | cat\n```", AssertionError),
    ],
)
def test_a_page_that_lies_is_caught(tmp_path: Path, block: str, problem: type[Exception]) -> None:
    with pytest.raises(problem):
        run_page(written(tmp_path, block), tmp_path)
