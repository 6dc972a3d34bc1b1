"""Figures as inline SVG, drawn by matplotlib, and the pages around them. Nothing is ever fetched.

A figure is lines, points, bars or percentiles over axes. A page is a head and sections of figures and tables.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tools.tables import Grid

if TYPE_CHECKING:  # takes 0.4 s, and only pages need it
    from matplotlib.axes import Axes

PALETTE = (
    *("#1f6feb", "#d9640c", "#1a8f4c", "#8f4ad0", "#c02668", "#8a7800"),
    *("#0a8a9a", "#b8472c", "#5b8c00", "#6a60df", "#8a6d5a", "#6f7b8a"),
)
"""Colours by number, seen on light and on dark pages. Beyond them the first one comes again."""
INK = "#80868e"
"""The colour of axes and words, between those of light and of dark pages."""
SIZE = (4.7, 2.4)
"""Inches of a figure: wide, tall."""
MOST_POINTS = 1500
"""Points of one cloud: more are a file that no browser likes."""
TAIL_PERCENTILES = (0.0, 50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one thing, in seconds."""

    colour: int
    """Its place in PALETTE."""
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Line:
    colour: int
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Beside the axes."""

    title: str
    x: str
    y: str


def latency_figure(series: Sequence[Series]) -> str:
    """Milliseconds (log) over the share of samples below them, every further nine as wide as the one before."""
    axes = new_axes(Words("latency in milliseconds over percentiles", "", "ms"))
    for each in series:
        ordered = sorted(1e3 * sample for sample in each.samples)
        shares = [_nines(100 * (index + 0.5) / len(ordered)) for index in range(len(ordered))]
        axes.plot(shares, ordered, color=PALETTE[each.colour])
    axes.set_xlim(0, _nines(TAIL_PERCENTILES[-1]))
    axes.set_xticks([_nines(mark) for mark in TAIL_PERCENTILES], [f"p{mark:g}" for mark in TAIL_PERCENTILES])
    _scale(axes, "y", [1e3 * sample for each in series for sample in each.samples], is_log=True)
    return svg_of(axes)


def line_figure(lines: Sequence[Line], words: Words, *, log_x: bool = False, log_y: bool = False) -> str:
    """Draws lines over an axis from 0, or a logarithmic one; heights from 0 too, or as a logarithm."""
    axes = new_axes(words)
    for line in lines:
        style = "--" if line.dashed else "-"
        axes.plot(*_split(line.points), style, color=PALETTE[line.colour], marker=".", label=line.name)
    _scale(axes, "x", [x for line in lines for x, _ in line.points], is_log=log_x)
    _scale(axes, "y", [y for line in lines for _, y in line.points], is_log=log_y)
    return svg_of(axes)


def scatter_figure(clouds: Sequence[Line], words: Words) -> str:
    """Draws points over two equal logarithmic axes with their diagonal; of many points, evenly chosen ones."""
    axes = new_axes(words)
    values = [value for cloud in clouds for point in cloud.points for value in point if value > 0] or [0.1, 1.0]
    ends = (min(values) / 1.1, max(values) * 1.1)
    axes.plot(ends, ends, "--", color=INK, linewidth=0.8)
    stride = max(1, sum(len(cloud.points) for cloud in clouds) // MOST_POINTS)
    for cloud in clouds:
        axes.plot(*_split(cloud.points[::stride]), ".", color=PALETTE[cloud.colour], alpha=0.45, markeredgewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    return svg_of(axes)


def bar_figure(
    groups: Sequence[tuple[str, Sequence[tuple[int, float]]]], words: Words, level: float | None = None
) -> str:
    """Draws groups of coloured bars side by side over a name each, and a dashed line at `level`."""
    axes = new_axes(words)
    for number, (_, bars) in enumerate(groups):
        wide = 0.8 / max(1, len(bars))
        for index, (colour, value) in enumerate(bars):
            axes.bar(number + 0.1 + wide * index, value, wide, align="edge", color=PALETTE[colour])
    if level is not None:
        axes.axhline(level, linestyle="--", color=INK, linewidth=0.8)
    axes.set_xticks([number + 0.5 for number in range(len(groups))], [name for name, _ in groups])
    axes.set_ylim(bottom=0)
    return svg_of(axes)


def new_axes(words: Words, size: tuple[float, float] = SIZE) -> Axes:
    """Returns a figure with a single pair of axes and its text, in colours that light and dark pages show."""
    from matplotlib.figure import Figure as Drawing

    axes = Drawing(figsize=size, layout="constrained").add_subplot()
    axes.set_title(words.title).set_visible(False)
    axes.set_xlabel(words.x, loc="right", color=INK, fontsize=8)
    axes.set_ylabel(words.y, loc="top", color=INK, fontsize=8)
    axes.tick_params(which="both", colors=INK, labelsize=8, length=0)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    axes.set_frame_on(False)
    return axes


def svg_of(axes: Axes) -> str:
    """Returns a figure as an element of a page, with the title of its axes for those who cannot see it."""
    from matplotlib import rc_context

    written = io.StringIO()
    drawing = axes.get_figure(root=True)
    assert drawing is not None, "its axes are in it"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": axes.get_title()}):
        drawing.savefig(
            written, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    element = written.getvalue().partition("<svg ")[2]
    return f'<svg role="img" aria-label={quoteattr(axes.get_title())} {element}'


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _scale(axes: Axes, axis: str, values: Sequence[float], *, is_log: bool) -> None:
    """Lets an axis be logarithmic where it may be; else it begins at 0."""
    if is_log and any(value > 0 for value in values):
        axes.set(**{f"{axis}scale": "log"})
    else:
        axes.set(**{f"{axis}lim": (0, 1.05 * max(values, default=1.0) or 1.0)})


def _nines(percentile: float) -> float:
    return -math.log10(max(1e-9, 1 - percentile / 100))


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    svg: str

    @property
    def markup(self) -> Markup:
        return Markup(self.svg)  # ours: the library escapes every text in it


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str = ""
    grid: Grid | None = None
    figures: tuple[Figure, ...] = ()
    """Figures that are shown side by side."""
    wide_figures: tuple[Figure, ...] = ()
    items: tuple[str, ...] = ()
    """A list below the text."""


@dataclass(frozen=True, slots=True)
class Head:
    title: str
    setting: str
    """Which requests, which fleet."""
    legend: tuple[str, ...] = ()
    """What has which colour, from the first on."""


def render(head: Head, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=PackageLoader("tools.figures", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja")
    return page.render(head=head, sections=sections, colours=PALETTE, made_at=time.strftime("%Y-%m-%d %H:%M"))


def colours_of(names: Sequence[str]) -> dict[str, int]:
    return {name: number % len(PALETTE) for number, name in enumerate(names)}
