"""How far long work is: a bar on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step as it begins."""
    if not sys.stderr.isatty():
        done = 0

        def line(step: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{steps}] {step}", file=sys.stderr, flush=True)

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
        task = bar.add_task("", total=steps, completed=-1)

        def step_bar(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield step_bar
