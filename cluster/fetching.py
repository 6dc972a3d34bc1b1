"""A model is fetched, and people see how far it is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from twostroke.models.fetch import fetch

LINE_PERCENT = 25
"""The share of a step for each line in a log."""


def fetch_with_progress(model: str, dtype: str, console: Console | None = None) -> Path:
    """Bars on a terminal; elsewhere, where bars would only show when all is over, plain lines."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    return _fetch_with_bars(model, dtype, console) if console.is_terminal else _fetch_with_lines(model, dtype, console)


def _fetch_with_bars(model: str, dtype: str, console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {"": progress.add_task(f"fetching {model}", total=1.0)}

        def on_progress(label: str, fraction: float) -> None:
            if label not in bars:
                # The first step takes the place of the line that said nothing yet.
                bars[label] = bars.pop("") if "" in bars else progress.add_task(label, total=1.0)
            progress.update(bars[label], description=label, completed=fraction)

        return fetch(model, dtype, on_progress)


def _fetch_with_lines(model: str, dtype: str, console: Console) -> Path:
    told: dict[str, int] = {}
    """Step -> the last share of it that was told."""

    def on_progress(label: str, fraction: float) -> None:
        percent = int(100 * fraction) // LINE_PERCENT * LINE_PERCENT
        if told.get(label) != percent:
            told[label] = percent
            console.print(f"{label} {percent} %", markup=False)

    console.print(f"fetching {model}", markup=False)
    return fetch(model, dtype, on_progress)
