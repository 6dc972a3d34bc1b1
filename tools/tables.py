"""Tables as people read them: on a terminal, or in a page (`tools.figures`)."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.flags.checks import STDOUT

COLUMNS = 190
"""The width of tables where no terminal says one."""


@dataclass(frozen=True, slots=True)
class Row:
    colour: int | None
    """The number of the swatch that a page shows before the row."""
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


def console_for(json_path: str | None, columns: int = COLUMNS) -> Console:
    """Write to standard error where standard output is the JSON's."""
    console = Console(stderr=json_path == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = columns
    return console


def table_of(grid: Grid, title: str | None = None) -> Table:
    """The first column says what a row is of; the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for at, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*map(escape, row.cells))
    return table
