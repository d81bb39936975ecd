"""What a terminal shows: one kind of table, one console to print it on, and how far long work is.

Progress is a bar on a terminal and plain lines elsewhere, always on stderr.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from avow.training import Progress

Cell = str | Text

# Prose in a narrower column than this is hard to read.
_PROSE = 16
_GAP = 2
# Of a training run, elsewhere than on a terminal: a line after this share of it, or after so many seconds.
_SHARE, _SECONDS = 0.05, 60.0


@dataclass(frozen=True)
class Columns:
    """Rows under headings, a title above and notes below; each row may have a style.

    `form` has a letter for each column: `l` for words and `r` for figures, which are never cut, `w` for prose, which
    wraps. Where the terminal is too narrow for that, rows come one below the other, and their cells too.
    """

    form: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: Cell = ""
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.title:
            yield self.title if isinstance(self.title, Text) else bold(self.title)
        if self.rows:
            yield from self._beside() if self._narrowest() <= options.max_width else self._below()
        yield from (Text(note, "dim") for note in self.notes)

    def _beside(self) -> Iterator[RenderableType]:
        table = Table(box=None, pad_edge=False, show_header=any(self.headings))
        for kind, heading in zip(self.form, self.headings, strict=True):
            table.add_column(Text(heading), justify="right" if kind == "r" else "left", no_wrap=kind != "w")
        for row, style in self._styled():
            table.add_row(*map(Text.assemble, row), style=style)
        yield table

    def _below(self) -> Iterator[RenderableType]:
        if self.headings[0]:
            yield Text(self.headings[0].replace("\n", " "), "dim")
        for (first, *rest), style in self._styled():
            yield Text.assemble(first, style=f"{style} bold")
            cells = Table.grid(padding=(0, _GAP, 0, 0))
            cells.add_column(style="dim")
            cells.add_column(overflow="fold")
            for heading, cell in zip(self.headings[1:], rest, strict=True):
                if str(cell):
                    cells.add_row(Text(heading.replace("\n", " ")), Text.assemble(cell))
            yield Padding(cells, (0, 0, 0, _GAP))

    def _styled(self) -> Iterator[tuple[Sequence[Cell], str]]:
        return zip(self.rows, self.styles or [""] * len(self.rows), strict=True)

    def _narrowest(self) -> int:
        """The least width at which nothing is cut."""
        widths = []
        for kind, *column in zip(self.form, self.headings, *self.rows, strict=True):
            widest = max(cell_len(line) for cell in column for line in str(cell).split("\n"))
            widths.append(min(widest, _PROSE) if kind == "w" else widest)
        return sum(widths) + _GAP * (len(widths) - 1)


def show(*parts: RenderableType) -> None:
    """Print renderables on stdout; each string is a line of its own, printed as it is."""
    console = Console(highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)


def bold(words: str) -> Text:
    """Text in bold."""
    return Text(words, "bold")


@contextmanager
def progress(steps: int, alike: int | None = None) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step as it begins.

    If the steps behind the first `alike` take about as long as each other, the time left is shown once one of them is
    over.
    """
    begun, start = itertools.count(), time.monotonic()

    def named(step: str) -> tuple[int, str]:
        nonlocal start
        done = next(begun)
        if done == alike:
            start = time.monotonic()
        if alike is None or done <= alike:
            return done, step
        left = (time.monotonic() - start) / (done - alike) * (steps - done)
        return done, f"{step} · {clock(left)} left"

    if not sys.stderr.isatty():

        def line(step: str) -> None:
            done, words = named(step)
            print(f"[{done + 1}/{steps}] {words}", file=sys.stderr, flush=True)

        yield line
        return
    count, name = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}")
    with Bar(BarColumn(), count, TimeElapsedColumn(), name, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)

        def update(step: str) -> None:
            done, words = named(step)
            bar.update(task, completed=done, description=words)

        yield update


@contextmanager
def training_progress() -> Iterator[ProgressLines | ProgressBar]:
    """What to call with every line of the log, and `note` with what there is to know before the first."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[line]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        yield ProgressBar(bar)


class ProgressBar:
    """A bar with the last line beside it."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._held_out: float | None = None
        # Until the first line nothing is known of the length: the bar swings.
        self._task = bar.add_task("preparing", total=None, line="")

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def __call__(self, progress: Progress) -> None:
        step, steps = progress.step, progress.steps
        self._held_out = progress.held_out_loss or self._held_out
        line = progress_line(progress, self._held_out)
        self._bar.update(self._task, description=f"{step:,}/{steps:,}", total=steps, completed=step, line=line)


class ProgressLines:
    """Plain lines: the first, the last, and some between."""

    def __init__(self) -> None:
        self._share, self._when = -1.0, 0.0
        self._held_out: float | None = None

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __call__(self, progress: Progress) -> None:
        share, now = progress.step / progress.steps, time.monotonic()
        self._held_out = progress.held_out_loss or self._held_out
        if share < 1 and share - self._share < _SHARE and now - self._when < _SECONDS:
            return
        self._share, self._when = share, now
        self.note(f"step {progress.step:,}/{progress.steps:,}  {progress_line(progress, self._held_out)}")


def progress_line(progress: Progress, held_out: float | None = None) -> str:
    """The figures of a line: loss, pace and the time left, as a clock shows it; `held_out` is the last such loss.

    >>> from avow.training import Progress
    >>> progress_line(Progress(10, 200, 0.5, 1.23456, 1e-3, 1.0, 12345.6, 0.1234, 75.0))
    'loss 1.235 · 12,346 tokens/s · MFU 12.3% · 1:15 left'
    """
    left = f"{clock(progress.eta)} left"
    figures = [f"loss {progress.loss:.3f}", f"{progress.tokens_per_second:,.0f} tokens/s", f"MFU {progress.mfu:.1%}"]
    if held_out is not None:
        figures = [figures[0], f"held out {held_out:.3f}", figures[1]]  # Eighty characters have no room for all.
    return " · ".join([*figures, left if progress.step < progress.steps else "done"])


def clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> clock(75.2), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
