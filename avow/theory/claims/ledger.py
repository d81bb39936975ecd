"""The claims there are: those of the catalogue, and those of a file of one's own."""

from __future__ import annotations

import _thread
import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from avow.errors import FileError, ParameterError
from avow.theory.claims.claim import Claim

_CATALOGUE = "avow.theory.claims.catalogue"
# Topics from the ground up; one that is not named here comes after them.
_TOPICS = ("softmax", "queries", "heads", "efficient", "costs", "relu", "dynamics", "lemmas", "neighbours")


def catalogue() -> dict[str, Claim]:
    """Every claim of the catalogue by id, topic after topic.

    Returns:
        Claims by id.

    >>> from avow.theory.claims import catalogue
    >>> "copy-gap" in catalogue()
    True
    """
    return dict(_catalogue())


@functools.cache
def _catalogue() -> dict[str, Claim]:
    claims: dict[str, Claim] = {}
    for module in _modules():
        for one in _claims_of(module, module.__name__):
            if one.id in claims:
                rule = f"is the id of two claims, in {claims[one.id].source} and in {module.__name__}"
                raise ParameterError("claim: id", repr(one.id), rule, "rename one of them")
            claims[one.id] = one
    return dict(sorted(claims.items(), key=lambda pair: _rank(pair[1].topic)))


def _modules() -> list[Any]:
    """The files of the catalogue; the one named after a topic comes before others on it."""
    folders = importlib.import_module(_CATALOGUE).__path__
    names = sorted((module.name for module in pkgutil.iter_modules(folders)), key=lambda name: (_rank(name), name))
    return [importlib.import_module(f"{_CATALOGUE}.{name}") for name in names]


def _rank(topic: str) -> int:
    return _TOPICS.index(topic) if topic in _TOPICS else len(_TOPICS)


def claims_in(path: str | Path, seconds: float = 60.0) -> dict[str, Claim]:
    """The claims of a Python file of one's own, by id; a file that takes longer to load is given up.

    Args:
        path: the file.
        seconds: how long loading may take.

    Returns:
        The claims.

    Raises:
        FileError: the file is missing, takes too long, or has two claims of one name.
    """
    path = Path(path)
    if not path.is_file():
        fault = ("is a folder", "give one of its files") if path.is_dir() else ("does not exist", "check the path")
        raise FileError("claims file", path, *fault)
    if path.suffix != ".py":
        raise FileError("claims file", path, "is not a Python file", "give a file whose name ends in .py")
    late = threading.Event()
    try:
        # What it prints is no part of what is said of its claims.
        with _interrupted_after(seconds, late), _outlived(), contextlib.redirect_stdout(sys.stderr):
            module = load(str(path))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not late.is_set():
            raise
        words = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        rule = f"ran out of time while loading: {seconds:g} s" if late.is_set() else f"raised while loading: {words}"
        raise FileError("claims file", path, rule + _line(error, path), "fix it there, and try again") from error
    claims: dict[str, Claim] = {}
    for one in _claims_of(module, str(path.resolve())):
        if one.id in claims:
            raise FileError("claims file", path, f"has two claims called {one.id!r}", "rename one of them")
        if one.id in _catalogue():
            rule = f"has a claim called {one.id!r}, and so does the catalogue"
            raise FileError("claims file", path, rule, "give it an id of its own")
        claims[one.id] = one
    if not claims:
        remedy = 'write one: @avow.theory.claims.claim("my-claim", topic=…, expected="proved", …)'
        raise FileError("claims file", path, "holds no claims at its top level", remedy)
    return claims


def load(source: str) -> Any:
    """The module of a claim: a dotted name, or a Python file, loaded again, with its folder on the path."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(f"claims_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _claims_of(module: Any, source: str) -> list[Claim]:
    """The claims at the top of a module, in its order, each once, with their source noted."""
    claims = {id(item): item for item in vars(module).values() if isinstance(item, Claim)}
    # One that was imported belongs to the module that wrote it.
    own = [one for one in claims.values() if getattr(one.check, "__module__", module.__name__) == module.__name__]
    return [_from(one, source) for one in own]


def _from(claim: Claim, source: str) -> Claim:
    """A copy that notes its source; its words are those of the original, and spelling them again would take long."""
    noted = copy.copy(claim)
    object.__setattr__(noted, "source", source)
    return noted


@contextlib.contextmanager
def _interrupted_after(seconds: float, late: threading.Event) -> Iterator[None]:
    """What takes longer inside is interrupted as Ctrl-C would, and `late` is set; only the main thread can be."""
    done = threading.Lock()

    def interrupt() -> None:
        if done.acquire(blocking=False):
            late.set()
            _thread.interrupt_main()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    # A job in the background ignores Ctrl-C, and would ignore this too.
    handler = signal.getsignal(signal.SIGINT)
    if handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            # Whoever comes first has the lock for good; an interrupt that is on its way arrives here, and not later.
            if not done.acquire(blocking=False):
                timer.join()
    finally:
        if handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _outlived() -> Iterator[None]:
    """`os._exit` ends a process without a word: inside, in this thread, it raises as `sys.exit` does."""
    leave, here = os._exit, threading.get_ident()

    def leave_by_exception(status: int) -> NoReturn:
        if threading.get_ident() != here:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = leave_by_exception
    try:
        yield
    finally:
        os._exit = leave


def _line(error: BaseException, path: Path) -> str:
    """The line of a file that raised an exception, in brackets, where it is known."""
    steps = traceback.extract_tb(error.__traceback__)
    lines = [step.lineno for step in steps if Path(step.filename) == path.resolve()]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f" (line {lines[-1]})" if lines and lines[-1] else ""
