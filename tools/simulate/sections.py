"""What a page of the simulator is made of, and the page itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tools.figures.page import COLOURS, rendered


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    svg: str

    @property
    def markup(self) -> Markup:
        return Markup(self.svg)  # ours: every text in it is escaped where it is drawn


@dataclass(frozen=True, slots=True)
class Row:
    colour: int | None
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str = ""
    grid: Grid | None = None
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    title: str
    setting: str
    """Which requests, which fleet."""
    legend: tuple[str, ...] = ()
    """What has which colour, from the first on."""


def render(head: Head, sections: Sequence[Section]) -> str:
    return rendered("tools.simulate", head=head, sections=sections, made_at=time.strftime("%Y-%m-%d %H:%M"))


def colours_of(names: Sequence[str]) -> dict[str, int]:
    return {name: number % COLOURS for number, name in enumerate(names)}
