"""What a panel and a dashboard are, and the two queries that most panels are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RATE = "$__rate_interval"
ONE = '{instance=~"$instance"}'


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    """PromQL, and what a line is called."""
    about: str = ""
    kind: str = "timeseries"


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    instances_of: str | None = None
    """A metric whose instances can be chosen from."""


def rate(metric: str, by: str = "", where: str = "") -> str:
    total = f"rate({metric}{where}[{RATE}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def quantiles(metric: str, by: str = "", where: str = "", of: Sequence[float] = (0.5, 0.95)) -> list[tuple[str, str]]:
    labels, legend = (f"le, {by}", " ".join(f"{{{{{name.strip()}}}}}" for name in by.split(","))) if by else ("le", "")
    return [
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{where}[{RATE}])))",
            f"p{q * 100:g} {legend}".strip(),
        )
        for q in of
    ]
