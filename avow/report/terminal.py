"""What a terminal shows: one kind of table, and one console to print it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Cell = str | Text

# Prose in a narrower column than this is no longer read but deciphered.
_PROSE = 16
_GAP = 2


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
            yield from [self._beside()] if self._narrowest() <= options.max_width else self._below()
        yield from (Text(note, "dim") for note in self.notes)

    def _beside(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=any(self.headings))
        for kind, heading in zip(self.form, self.headings, strict=True):
            table.add_column(Text(heading), justify="right" if kind == "r" else "left", no_wrap=kind != "w")
        for row, style in self._styled():
            table.add_row(*map(_text, row), style=style)
        return table

    def _below(self) -> Iterator[RenderableType]:
        if self.headings[0]:
            yield Text(self.headings[0].replace("\n", " "), "dim")
        for (first, *rest), style in self._styled():
            yield Text.assemble(_text(first), style=f"{style} bold")
            cells = Table.grid(padding=(0, _GAP, 0, 0))
            cells.add_column(style="dim")
            cells.add_column(overflow="fold")
            for heading, cell in zip(self.headings[1:], rest, strict=True):
                if str(cell):
                    cells.add_row(Text(heading.replace("\n", " ")), _text(cell))
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
    """Print on stdout what was made for a terminal; words in a line of their own, just as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)


def bold(words: str) -> Text:
    """Words that stand out."""
    return Text(words, "bold")


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
