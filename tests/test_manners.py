"""How the command line takes mistakes, and that all commands speak alike."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from avow.cli import app, error_formatting, options
from avow.errors import ParameterError
from tests.test_cli import at_home as at_home
from tests.test_cli import refused, run


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that call it."""
    root: Any = group or typer.main.get_command(app)
    for name, found in root.commands.items():
        if hasattr(found, "commands"):
            yield from commands(found, (*path, name))
        else:
            yield (*path, name), found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("compar", "command=compar is not known to avow; did you mean compare?"),
        ("sing", "command=sing is not known to avow; known commands: compare, plan, plan-decode, "),
        ("claims lst", "command=lst is not known to avow claims; did you mean list?"),
        ("--loud", "option=--loud is not known to avow; see avow --help"),
        ("compare --lenght 5", "option=--lenght is not known to avow compare; did you mean --length?"),
        ("compare --length", "option=--length must have a value; see avow"),
        ("plan --causal=yes", "option=--causal takes no value; see avow"),
        ("compare --length many", "length='many' must be a whole number; see avow compare --help"),
        ("plan --tol tight", "tol='tight' must be a number; see avow plan --help"),
        ("compare this", "arguments=this are not accepted by avow compare; see avow compare --help"),
        ("lab export", "arguments=export are not accepted by avow lab; did you mean --export?"),
        ("train sample r x --temp 1", "option=--temp is not known to avow train sample; did you mean --temperature?"),
        ("profile m --out p.json", "option=--out is not known to avow profile; did you mean --plan?"),
        ("profile m", "--text=(not given) must be given: a text in UTF-8; see avow profile --help"),
        ("compare --length 99999999999", "memory=all available is not enough for these sizes; try smaller ones"),
        (
            "construct copy --orthonormal 99999999",
            "memory=all available is not enough for these sizes; try smaller ones",
        ),
        ("compare --patience nan", "patience=nan must be above 0; try --patience 20"),
        ("construct robust-heads", "keys=(not given) must be given; use one of --keys FILE, --orthonormal N"),
        ("compare --seed -1", "seed='-1' must be at least 0; see avow compare --help"),
        ("lab --port 99999", "port='99999' must be at most 65535; see avow lab --help"),
        (
            "train sample",
            "run=(not given) must be given: the folder of a run, or one of its checkpoints; see avow train ",
        ),
        (
            "construct mixture",
            "--weights=(not given) must be given: the weights, separated by commas; see avow construct mixture --help",
        ),
        ("plan --seq-len 9", "option=--seq-len is not known to avow plan; did you mean --length?"),
        ("plan --num-kv-heads 9", "option=--num-kv-heads is not known to avow plan; did you mean --key-heads?"),
        ("profile m --length 9", "option=--length is not known to avow profile; did you mean --tokens?"),
        (
            "train --data a.txt",
            "option=--data is not known to avow train; --data belongs to avow train pretrain, avow train finetune and ",
        ),
        ("plan --kind copying,diffuse", "kind='copying,diffuse' must be one kind; try --kind copying"),
        ("plan --length 0", "length='0' must be at least 1; see avow plan --help"),
        ("plan --latency 5us", "option=--latency is not known to avow plan; --latency belongs to avow plan-ranks"),
        ("plan --ranks 8 --link 1GB/s", "option=--ranks is not known to avow plan; --ranks belongs to avow plan-ranks"),
        (
            "plan --kept 0.1",
            "option=--kept is not known to avow plan; --kept belongs to avow plan-decode and avow plan-",
        ),
        (
            "plan --tokens 9",
            "option=--tokens is not known to avow plan; did you mean --length? --tokens belongs to avow plan-decode",
        ),
        ("plan --tool 9", "option=--tool is not known to avow plan; did you mean --tol?"),
        ("plan --key-heads 3", "key_heads=3 must divide heads=4; use 1, 2 or 4"),
        ("plan --dtype int4", "dtype='int4' is not known; use one of float64"),
        ("plan --input a --batch 2", "batch=2 follows from the heads of --input; leave --batch or --input out"),
        ("plan --recalibrate", "recalibrate=True would measure this machine, and AVOW_CALIBRATION=off forbids it"),
        ("plan-ranks --ranks 0", "ranks='0' must be at least 1; see avow plan-ranks --help"),
        ("plan-ranks --ranks 8 --link 1GB/s --png a.pdf", "png=a.pdf must be a .png file; try --png a.png"),
        ("compare --png a.pdf", "png=a.pdf must be a .png file; try --png a.png"),
        ("profile model --text a --html a.html --plan ./a.html", "path=a.html is given for two files; give one"),
        ("compare --html a.png --png a.png", "path=a.png is given for two files; give one of them another path"),
        ("bench shards --png a.pdf", "png=a.pdf must be a .png file; try --png a.png"),
    ],
)
def test_a_wrong_word_gets_one_line_with_name_value_rule_and_remedy(arguments: str, line: str) -> None:
    assert refused(*arguments.split()).startswith(f"avow: {line}")


def test_a_mistake_that_typer_words_in_another_way_is_still_one_line() -> None:
    told = error_formatting.explained(typer.BadParameter("is strange"))
    assert isinstance(told, ParameterError) and "\n" not in str(told)


def test_summaries_fit_a_line_of_eighty() -> None:
    for words in ([], ["claims"], ["construct"], ["train"], ["bench"]):
        shown = run(*words, "--help").stdout
        assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2], shown


def test_commands_are_listed_in_the_order_in_which_a_new_user_tries_them() -> None:
    listed = re.findall(r"^  ([\w-]+) ", run("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert tuple(listed) == error_formatting.ORDER and set(listed) == {path[0] for path, _ in commands()}


def test_the_same_option_has_the_same_help_everywhere() -> None:
    said: dict[str, set[str]] = {}
    for _, found in commands():
        for option in found.params:
            said.setdefault(option.opts[0], set()).add(option.help)
    for name in ("--json", "--seed", "--threads", "--png", "--eps", "--causal", "--user", "--seconds"):
        assert len(said[name]) == 1, (name, said[name])


def test_every_command_speaks_json_and_every_help_is_a_sentence() -> None:
    for path, found in commands():
        assert "--json" in {name for option in found.params for name in option.opts}, path
        assert found.help.strip()[0].isupper() and found.help.strip().endswith("."), path
        for option in found.params:
            assert option.help and option.help[0].isupper() and option.help.endswith("."), (path, option.help)


def test_a_document_is_ascii_whatever_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    options.document({"name": "Ångström ⁇"})
    shown = capsys.readouterr().out
    assert shown.isascii() and json.loads(shown) == {"name": "Ångström ⁇"}
    with pytest.raises(ValueError, match="JSON"):
        options.document({"bound": float("nan")})


def test_a_terminal_without_the_character_gets_a_question_mark() -> None:
    words = ["construct", "copy", "--orthonormal", "3"]
    assert "3 × 3" in run(*words).stdout
    done = CliRunner(charset="ascii").invoke(app, words)
    assert done.exit_code == 0 and "3 ? 3" in done.stdout


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (errno.ENOSPC, "avow: file=output failed (No space left on device); check free space and permissions\n"),
        (errno.EPIPE, ""),  # a reader who has seen enough needs no word
    ],
)
def test_a_full_disk_behind_stdout_gets_one_line(number: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(json, "dumps", full)
    done = run("claims", "list", "--json", code=1)
    assert done.stderr == line and isinstance(done.exception, SystemExit)
