"""Charts that are well-formed SVG, with everything they were given inside their frame."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.figures.charts import HEIGHT, MOST_POINTS, WIDTH, Line, Words, bar_figure, line_figure, scatter_figure

WORDS = Words("title & <more>", "x", "y")


def drawn(svg: str, kind: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.get("class", "").split()[:1] == [kind]]


def places(commands: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", commands)]


@pytest.mark.parametrize("log_y", [False, True])
def test_lines_keep_their_order_and_stay_inside(log_y: bool) -> None:
    lines = [Line(0, ((0.0, 1.0), (1.0, 2.0), (2.0, 40.0)), name="a & b"), Line(1, ((1.0, 0.0),), dashed=True)]
    first, second = drawn(line_figure(lines, WORDS, log_y=log_y), "line")
    points = places(first.get("d", ""))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert second.get("class") == "line dashed e1"


def test_nothing_to_draw_is_an_empty_frame() -> None:
    for svg in (line_figure([], WORDS), scatter_figure([], WORDS), bar_figure([], WORDS)):
        assert ElementTree.fromstring(svg).get("aria-label") == "title & <more>"


def test_bars_are_as_tall_as_their_values() -> None:
    bars = drawn(bar_figure([("p0", [(0, 0.5), (1, 1.0)]), ("p1", [(0, 0.0)])], WORDS, level=1.0), "bar")
    tall = [float(bar.get("height", "")) for bar in bars]
    assert tall[1] == pytest.approx(2 * tall[0], abs=0.2)
    assert tall[2] == 0


def test_a_cloud_too_large_is_thinned_evenly() -> None:
    cloud = Line(2, tuple((1.0 + number, 1.0 + number) for number in range(4 * MOST_POINTS)))
    (dots,) = drawn(scatter_figure([cloud], WORDS), "dot")
    found = places(dots.get("d", ""))
    assert MOST_POINTS <= len(found) <= MOST_POINTS + 1
    assert all(x - 52 == pytest.approx((210 - y) * (WIDTH - 24 - 52) / 200, abs=0.4) for x, y in found)
