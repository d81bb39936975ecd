"""What the pages tell people to type works: every bash and python block is run.

The python blocks of a page share one namespace, and functions named `test_…` in them are called. Bash blocks run
in an empty folder where `make` only says whether it knows the target, and fetching and installing do nothing.

A text block below `<!-- output -->` is what the block before it prints. `…` in a line stands for any characters, and a
line of `…` alone for any lines: what depends on the machine is left open, everything else is compared.

A block below `<!-- file: name -->` is a file that the reader saves: it is written to the folder of the bash blocks.
`pip install ./name` installs such a package for them, offline.

Nothing else is code: what takes too long stands in a text block below a comment `<!-- not run here: why -->`, and its
commands are still read by the parser that would run them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
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
    output: str | None = None
    """What it prints, if the page shows that."""
    file: str = ""
    """Where the reader is to save it, instead of running it."""


FENCE = re.compile(
    r"^( *)(?:<!-- file: (\S+) -->\n\1)?```(bash|python|text)\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL
)
OUTPUT = re.compile(r"\s*^( *)<!-- output -->\n\1```text\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[Block]:
    """The files and the bash and python blocks of a page, in order, each with the output that the page shows."""
    found = []
    for block in FENCE.finditer(text):
        _, file, language, code = block.groups()
        if language == "text" and not file:
            continue
        shown = OUTPUT.match(text, block.end())
        output = None if shown is None else textwrap.dedent(shown[2])
        line = text.count("\n", 0, block.start(4)) + 1
        found.append(Block(language, line, textwrap.dedent(code), output, file or ""))
    outputs = len(re.findall(r"^ *<!-- output -->$", text, re.MULTILINE))
    assert sum(block.output is not None for block in found) == outputs, "an output stands below no block of code"
    return found


def prints(shown: str, printed: str) -> bool:
    """Whether a block printed what its page shows, apart from what the page leaves open."""
    lines = [re.escape(line.rstrip()).replace("…", ".*") for line in shown.splitlines()]
    pattern = "".join("(?:.*\n)*" if line == ".*" else f"{line}\n" for line in lines)
    said = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return re.fullmatch(pattern, said) is not None


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
            if block.file:
                path = bash_home / "work" / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.code)
                printed = ""
            elif block.language == "bash":
                printed = run_bash(page, block, bash_home)
            else:
                os.chdir(python_home)
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    # Blank lines before the code make tracebacks name the page's own lines.
                    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
                printed = said.getvalue()
            if block.output is not None:
                assert prints(block.output, printed), f"{page.name}:{block.line} prints\n{printed}"
        for name, thing in list(vars(module).items()):
            if name.startswith("test_") and inspect.isfunction(thing):
                thing()
    finally:
        os.chdir(before)
        del sys.modules["page"]
    return len(found)


def run_bash(page: Path, block: Block, home: Path) -> str:
    """What a block prints; a command that fails fails the test."""
    path = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), str(home / "site")])
    environment = os.environ | {"PATH": path, "PYTHONPATH": python_path, "MPLBACKEND": "Agg"}
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
    return done.stdout


def lay_out(home: Path) -> None:
    """Commands that stand in for those that would reach the network or build the whole project."""
    avow = f'exec "{sys.executable}" -m avow "$@"'
    # A package that the page itself made is installed; nothing else is.
    offline = f'--quiet --no-index --no-deps --no-build-isolation --target "{home / "site"}"'
    pip = f'case "$2" in ./*) exec "{sys.executable}" -m pip install {offline} "$2";; esac'
    stand_ins = {
        "bin/avow": avow,
        "bin/make": f'unset MAKEFLAGS; exec {real("make")} -n -C "{ROOT}" "$@" >/dev/null',
        "bin/pip": pip,
        "bin/uv": "true",
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
PROCESSES = dict.fromkeys(["ranks.md", "training.md"], "processes")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=getattr(pytest.mark, PROCESSES.get(page.name, "commands"))) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_what_the_page_says_works(page: Path, tmp_path: Path) -> None:
    assert page.exists(), f"{page.name} is missing: the project has no such page yet"
    assert run_page(page, tmp_path) > 0 or page.parent.name == "docs", f"{page.name} shows nothing that can be run"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_shows_its_results_and_the_readme_links_to_it(page: Path) -> None:
    code = [block for block in blocks(page.read_text()) if not block.file]
    assert sum(block.output is not None for block in code) >= len(code) / 2 and code[-1].output is not None
    assert f"(docs/tutorials/{page.name})" in (ROOT / "README.md").read_text()


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
    if words[:3] == ["python", "-m", "pytest"]:
        assert (ROOT / words[3]).is_file(), f"there is no {words[3]}"
        return
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
        ("<!-- not run here: takes hours -->\n```text\npython -m pytest tests/no_such.py\n```\n", "tests/no_such.py"),
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


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1\n", "a 1\n", True),
        ("a 1\n", "a 2\n", False),
        ("a 1\n", "a 1\nb\n", False),
        ("a …\n", "a 2 of 3\n", True),
        ("a …\n", "b 2\n", False),
        ("a …\n", "a 2\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nb\nc\n", False),
        ("a.b\n", "axb\n", False),
        ("a  b\n", "a  b   \n", True),
    ],
)
def test_what_a_block_prints_is_compared_with_what_is_shown(shown: str, printed: str, same: bool) -> None:
    assert prints(shown, printed) == same


def test_shown_output_belongs_to_the_block_before_it(tmp_path: Path) -> None:
    text = "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n1\n```\n"
    text += "- b\n  ```bash\n  echo 2\n  ```\n  <!-- output -->\n  ```text\n  2\n  ```\n"
    assert [block.output for block in blocks(text)] == ["1\n", "2\n"]
    assert run_page(written(tmp_path, text), tmp_path) == 2


def test_a_file_is_saved_for_the_commands_after_it(tmp_path: Path) -> None:
    text = "<!-- file: a/one.py -->\n```python\nprint(3)\n```\n\n```bash\npython a/one.py\n```\n"
    text += "<!-- output -->\n```text\n3\n```\n"
    assert [(block.file, block.language) for block in blocks(text)] == [("a/one.py", "python"), ("", "bash")]
    assert run_page(written(tmp_path, text), tmp_path) == 2


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
        ("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```", AssertionError),
        ("```bash\necho 1\n```\n\n<!-- output -->\n```text\n2\n```", AssertionError),
        ("```python\nprint(1)\n```\n\nwords\n\n<!-- output -->\n```text\n1\n```", AssertionError),
    ],
)
def test_a_page_that_lies_is_caught(tmp_path: Path, block: str, problem: type[Exception]) -> None:
    with pytest.raises(problem):
        run_page(written(tmp_path, block), tmp_path)
