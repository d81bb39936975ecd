"""How far a training run is: a live bar on a terminal, a line now and then elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from avow.training import Progress

Tell = Callable[[Progress], None]

# Elsewhere than on a terminal, a line whenever this share of the run is done, or so many seconds have passed.
_SHARE, _SECONDS = 0.05, 60.0


@contextmanager
def training_progress() -> Iterator[Tell]:
    """A function to call with every line of the log."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[told]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        # Until the first line nothing is known of the length: the bar swings.
        task = bar.add_task("preparing", total=None, told="")

        def tell(progress: Progress) -> None:
            share = f"{progress.step:,}/{progress.steps:,}"
            bar.update(task, description=share, total=progress.steps, completed=progress.step, told=told(progress))

        yield tell


class Lines:
    """Plain lines: the first, the last, and some between."""

    def __init__(self) -> None:
        self._share, self._when = -1.0, 0.0

    def __call__(self, progress: Progress) -> None:
        share, now = progress.step / progress.steps, time.monotonic()
        if share < 1 and share - self._share < _SHARE and now - self._when < _SECONDS:
            return
        self._share, self._when = share, now
        print(f"step {progress.step:,}/{progress.steps:,}  {told(progress)}", file=sys.stderr, flush=True)


def told(progress: Progress) -> str:
    """The figures of a line: loss, pace and the time left.

    >>> told(Progress(10, 200, 0.5, 1.23456, 1e-3, 1.0, 12345.6, 0.1234, 75.0))
    'loss 1.235 · 12,346 tokens/s · MFU 12.3% · 1:15 left'
    """
    pace = f"{progress.tokens_per_second:,.0f} tokens/s · MFU {progress.mfu:.1%}"
    left = f"{clock(progress.eta)} left" if progress.step < progress.steps else "done"
    return f"loss {progress.loss:.3f} · {pace} · {left}"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> [clock(x) for x in (9.4, 75, 3723)]
    ['0:09', '1:15', '1:02:03']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
