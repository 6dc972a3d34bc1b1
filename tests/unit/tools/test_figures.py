"""Charts that are well-formed SVG, with everything they were given in it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.figures.charts import (
    MOST_POINTS,
    PALETTE,
    Line,
    Series,
    Words,
    bar_figure,
    latency_figure,
    line_figure,
    scatter_figure,
)

WORDS = Words("title & <more>", "x", "y & <z>")


def drawn(svg: str, colour: int) -> list[ElementTree.Element]:
    """Elements in one of the palette's colours, points but for lines."""
    return [each for each in ElementTree.fromstring(svg).iter() if PALETTE[colour] in each.get("style", "")]


def paths(svg: str, colour: int) -> list[ElementTree.Element]:
    return [each for each in drawn(svg, colour) if each.tag.endswith("path") and each.get("clip-path")]


@pytest.mark.parametrize("log_y", [False, True])
def test_every_line_is_drawn_in_its_colour(log_y: bool) -> None:
    lines = [Line(0, ((0.0, 1.0), (1.0, 2.0), (2.0, 40.0)), name="a & b"), Line(1, ((1.0, 0.0), (2.0, 0.0)), True)]
    svg = line_figure(lines, WORDS, log_y=log_y)
    (first,), (second,) = paths(svg, 0), paths(svg, 1)
    assert first.get("d", "").count("L") == 2
    assert "stroke-dasharray" in second.get("style", "")
    assert "y & <z>" in [each.text for each in ElementTree.fromstring(svg).iter()]


def test_nothing_to_draw_is_an_empty_frame() -> None:
    for svg in (
        line_figure([], WORDS),
        scatter_figure([], WORDS),
        bar_figure([], WORDS),
        line_figure([], WORDS, log_x=True),
    ):
        assert ElementTree.fromstring(svg).get("aria-label") == "title & <more>"
    assert ElementTree.fromstring(latency_figure([Series(0, ())])).get("role") == "img"


def test_a_bar_stands_for_every_value_of_a_group() -> None:
    svg = bar_figure([("p0", [(0, 0.5), (1, 1.0)]), ("p1", [(0, 0.25)])], WORDS, level=1.0)
    assert [len(paths(svg, colour)) for colour in (0, 1)] == [2, 1]
    assert {"p0", "p1"} <= {each.text for each in ElementTree.fromstring(svg).iter()}


def test_a_cloud_too_large_is_thinned_evenly() -> None:
    cloud = Line(2, tuple((1.0 + number, 1.0 + number) for number in range(4 * MOST_POINTS)))
    points = [each for each in drawn(scatter_figure([cloud], WORDS), 2) if each.tag.endswith("use")]
    assert MOST_POINTS <= len(points) <= MOST_POINTS + 1


def test_the_same_figure_is_the_same_text() -> None:
    line = Line(0, ((0.0, 1.0), (1.0, 2.0)))
    assert line_figure([line], WORDS) == line_figure([line], WORDS)
