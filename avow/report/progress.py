"""How far long work is: a bar on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step as it begins."""
    begun = itertools.count(1)
    if not sys.stderr.isatty():

        def line(step: str) -> None:
            print(f"[{next(begun)}/{steps}] {step}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)

        def step_bar(step: str) -> None:
            bar.update(task, completed=next(begun) - 1, description=step)

        yield step_bar
