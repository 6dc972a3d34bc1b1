"""Tables as people read them: on a terminal, or in a page (`tools.figures`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.flags.checks import STDOUT

COLUMNS = 190
"""The width of tables where no terminal says one."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""
    """Detail below the text, in smaller or paler letters."""
    kind: str = ""
    """The style of the cell in a page: "better" or "worse"."""


@dataclass(frozen=True, slots=True)
class Row:
    colour: int | None
    """The number of the swatch that a page shows before the row."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    headings: tuple[Cell, ...]
    rows: tuple[Row, ...]


def text_row(*cells: str, colour: int | None = None) -> Row:
    return Row(colour, tuple(map(Cell, cells)))


def text_grid(headings: Iterable[str], rows: Iterable[Row]) -> Grid:
    return Grid(tuple(map(Cell, headings)), tuple(rows))


def console_for(json_path: str | None, columns: int = COLUMNS) -> Console:
    """Returns a console. It writes to standard error where the JSON goes to standard output."""
    console = Console(stderr=json_path == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = columns
    return console


def table_of(grid: Grid, title: str | None = None) -> Table:
    """Returns a table: names of rows, then numbers. Only pages show the detail of a heading."""
    table = Table(title=title and escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, heading in enumerate(grid.headings):
        table.add_column(heading.text, justify="right" if index else "left", no_wrap=True)
    for each in grid.rows:
        table.add_row(*(escape(cell.text) for cell in each.cells))
        if any(cell.detail for cell in each.cells):
            table.add_row(*(escape(cell.detail) for cell in each.cells), style="dim")
    return table
