"""Figures as inline SVG, and the pages around them, shared by reports of several commands. Nothing is ever fetched.

A figure is lines, points, bars or percentiles over axes. A page is a head and sections of figures and tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tools.tables import Grid

WIDTH, HEIGHT = 470, 240
LETTER = 6
"""Pixels: names that would overlap are left out."""
MOST_POINTS = 1500
"""Drawn in one figure: more are a file that no browser likes."""


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one thing, in seconds."""

    colour: int
    """Its number: the page gives it a colour."""
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Line:
    colour: int
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    name: str = ""
    """Shown where one points at it."""


@dataclass(frozen=True, slots=True)
class Words:
    """Beside the axes."""

    title: str
    x: str
    y: str


def latency_figure(series: Sequence[Series], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Milliseconds (log) over the share of samples below them, stretched towards the tail."""
    in_ms = [(each.colour, sorted(1e3 * sample for sample in each.samples)) for each in series]
    x = tail_axis((LEFT, width - 2 * RIGHT))
    y = log_axis(*_bounds([values for _, values in in_ms if values]), (height - BOTTOM, TOP))
    parts = [grid(x, y, width, height), label(LEFT - 44, TOP + 2, "ms", "start")]
    parts += [f'<path class="line e{colour}" d="{_percentile_path(values, x, y)}"/>' for colour, values in in_ms]
    return svg(parts, width, height, "latency in milliseconds over percentiles")


def line_figure(lines: Sequence[Line], words: Words, *, log_x: bool = False, log_y: bool = False) -> str:
    """Over an axis from 0, or a logarithmic one; heights from 0 too, or as a logarithm."""
    drawn = [(x, y) for line in lines for x, y in line.points]
    x = _width_axis([x for x, _ in drawn], log_x)
    y = _height_axis([y for _, y in drawn], log_y)
    parts = [_line(line, x, y) for line in lines]
    return _framed(parts, x, y, words)


def scatter_figure(clouds: Sequence[Line], words: Words) -> str:
    """Points over two equal logarithmic axes with their diagonal; of many points, evenly chosen ones."""
    values = [value for cloud in clouds for point in cloud.points for value in point if value > 0]
    low, high = min(values, default=0.1), max(values, default=1.0)
    x, y = log_axis(low, high, (LEFT, WIDTH - 2 * RIGHT)), log_axis(low, high, (HEIGHT - BOTTOM, TOP))
    diagonal = path([(x.at(low), y.at(low)), (x.at(high), y.at(high))])
    parts = [f'<path class="grid dashed" d="{diagonal}"/>']
    stride = max(1, sum(len(cloud.points) for cloud in clouds) // MOST_POINTS)
    for cloud in clouds:
        dots = "".join(f"M{x.at(a):.1f} {y.at(b):.1f}h.01" for a, b in cloud.points[::stride])
        parts.append(f'<path class="dot e{cloud.colour}" d="{dots}"><title>{escape(cloud.name)}</title></path>')
    return _framed(parts, x, y, words)


def bar_figure(
    groups: Sequence[tuple[str, Sequence[tuple[int, float]]]], words: Words, level: float | None = None
) -> str:
    """Groups of coloured bars side by side, over a name each if there is room; a dashed line at `level`."""
    y = _height_axis([level or 0.0, *(value for _, bars in groups for _, value in bars)], log=False)
    room = (WIDTH - LEFT - 2 * RIGHT) / max(1, len(groups))
    parts, ticks = [], []
    for number, (name, bars) in enumerate(groups):
        left = LEFT + room * (number + 0.1)
        wide = 0.8 * room / max(1, len(bars))
        for at, (colour, value) in enumerate(bars):
            tall = y.at(0.0) - y.at(value)
            parts.append(
                f'<rect class="bar e{colour}" x="{left + wide * at:.1f}" y="{y.at(value):.1f}" '
                f'width="{max(0.5, wide - 0.5):.1f}" height="{tall:.1f}"><title>{value:.3g}</title></rect>'
            )
        ticks.append((LEFT + room * (number + 0.5), name))
    frame = grid(Axis(float, ()), y, WIDTH, HEIGHT)
    if level is not None:
        parts.append(f'<path class="grid dashed" d="M{LEFT} {y.at(level):.1f}H{WIDTH - RIGHT}"/>')
    fits = all(LETTER * len(name) <= room for _, name in ticks)
    names = [label(at, HEIGHT - BOTTOM + 14, name, "middle") for at, name in ticks if fits]
    return svg([frame, *names, *parts, *_beside(words)], WIDTH, HEIGHT, words.title)


def _framed(parts: Sequence[str], x: Axis, y: Axis, words: Words) -> str:
    return svg([grid(x, y, WIDTH, HEIGHT), *parts, *_beside(words)], WIDTH, HEIGHT, words.title)


def _beside(words: Words) -> list[str]:
    return [label(4, TOP, words.y, "start"), label(WIDTH - RIGHT, HEIGHT - 2, words.x, "end")]


def _line(line: Line, x: Axis, y: Axis) -> str:
    places = [(x.at(a), y.at(b)) for a, b in line.points]
    kind = "line dashed" if line.dashed else "line"
    marks = "".join(f"M{a:.1f} {b:.1f}h.01" for a, b in places)
    return (
        f'<path class="{kind} e{line.colour}" d="{path(places)}"><title>{escape(line.name)}</title></path>'
        f'<path class="mark e{line.colour}" d="{marks}"/>'
    )


def _width_axis(values: Sequence[float], log: bool) -> Axis:
    pixels = (LEFT, WIDTH - 2 * RIGHT)
    positive = [value for value in values if value > 0]
    if log and positive:
        return log_axis(min(positive), max(positive), pixels)
    return linear_axis(max(values, default=1.0), pixels)


def _height_axis(values: Sequence[float], log: bool) -> Axis:
    pixels = (HEIGHT - BOTTOM, TOP)
    positive = [value for value in values if value > 0]
    if log and positive:
        return log_axis(min(positive), max(positive), pixels)
    return linear_axis(1.05 * max(values, default=1.0), pixels)


def _bounds(ordered: Sequence[Sequence[float]]) -> tuple[float, float]:
    """To the highest; from the least that is no accident: events that arrive together are no time apart."""
    low = min((max(values[len(values) // 50], values[len(values) // 2] / 10) for values in ordered), default=1.0)
    high = max(1e-3, max((values[-1] for values in ordered), default=1.0))
    return low or high / 1e3, high


def _percentile_path(ordered: Sequence[float], x: Axis, y: Axis) -> str:
    """Steps would hide in the tail what the few samples there are: sample i of n stands at (i + 1/2) / n."""
    points: list[tuple[float, float]] = []
    for index, value in enumerate(ordered):
        at = x.at(100 * (index + 0.5) / len(ordered))
        if not points or at - points[-1][0] >= LEAST_STEP or index == len(ordered) - 1:
            points.append((at, y.at(value)))
    return path(points)


TAIL_PERCENTILES = (0.0, 50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to pixels."""

    at: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]
    """Pixel and label."""


def linear_axis(high: float, pixels: tuple[float, float]) -> Axis:
    """From 0 to `high`."""
    high = max(high, 1e-9)
    step = _round_step(high / 8)
    start, end = pixels

    def at(value: float) -> float:
        return start + (end - start) * value / high

    marks = [step * number for number in range(math.floor(high / step + 1e-9) + 1)]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks))


def log_axis(low: float, high: float, pixels: tuple[float, float]) -> Axis:
    """From `low` to `high`, both positive; what lies outside is drawn at the edge."""
    bottom, top = math.log10(low), math.log10(high)
    bottom, top = bottom - 0.05, max(top, bottom + 0.3) + 0.05
    start, end = pixels

    def at(value: float) -> float:
        exponent = math.log10(value) if value > 0 else bottom
        return start + (end - start) * (min(max(exponent, bottom), top) - bottom) / (top - bottom)

    digits = _digits(top - bottom)
    marks = [digit * 10.0**decade for decade in range(math.floor(bottom), math.ceil(top) + 1) for digit in digits]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks if bottom <= math.log10(mark) <= top))


def tail_axis(pixels: tuple[float, float]) -> Axis:
    """Percentiles, every further nine as wide as the one before: the tail is what one looks for."""
    start, end = pixels
    widest = _nines(TAIL_PERCENTILES[-1])

    def at(percentile: float) -> float:
        return start + (end - start) * min(1.0, _nines(percentile) / widest)

    return Axis(at, tuple((at(mark), f"p{mark:g}") for mark in TAIL_PERCENTILES))


def _nines(percentile: float) -> float:
    return -math.log10(max(1e-9, 1 - percentile / 100))


def _digits(decades: float) -> tuple[int, ...]:
    if decades > 3:
        return (1,)
    return (1, 2, 5) if decades > 0.8 else (1, 2, 3, 4, 5, 6, 8)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    decade = 10.0 ** math.floor(math.log10(step))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= step * (1 - 1e-9))


LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 30
"""Pixels around what is drawn."""
LEAST_STEP = 0.5
"""Pixels: what is nearer to the mark before is not drawn."""


def grid(x: Axis, y: Axis | None, width: int, height: int) -> str:
    bottom = height - BOTTOM
    lines = [f"M{at:.1f} {TOP}V{bottom}" for at, _ in x.ticks]
    labels = [label(at, bottom + 14, text, "middle") for at, text in x.ticks]
    if y is not None:
        lines += [f"M{LEFT} {at:.1f}H{width - RIGHT}" for at, _ in y.ticks]
        labels += [label(LEFT - 6, at + 4, text, "end") for at, text in y.ticks]
    return f'<path class="grid" d="{"".join(lines)}"/>' + "".join(labels)


def label(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """The commands of a line through them."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)}>{"".join(parts)}</svg>'


COLOURS = 12
"""Beyond them the first one comes again."""


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    svg: str

    @property
    def markup(self) -> Markup:
        return Markup(self.svg)  # ours: every text in it is escaped where it is drawn


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str = ""
    grid: Grid | None = None
    figures: tuple[Figure, ...] = ()
    """Figures that stand beside each other."""
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
    return page.render(head=head, sections=sections, colours=COLOURS, made_at=time.strftime("%Y-%m-%d %H:%M"))


def colours_of(names: Sequence[str]) -> dict[str, int]:
    return {name: number % COLOURS for number, name in enumerate(names)}
