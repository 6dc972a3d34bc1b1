"""What every figure has: a frame, a grid and labels. Pure; colours are the page's classes."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from tools.figures.axes import Axis

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
