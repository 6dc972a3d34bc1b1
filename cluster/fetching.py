"""Fetches a model and shows the progress."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from twostroke.models.catalog.fetch import fetch

LINE_PERCENT = 25
"""Percent of a step between two lines in a log."""


def fetch_with_progress(model: str, dtype: str, console: Console | None = None) -> Path:
    """Fetches a model, with bars on a terminal and plain lines elsewhere, where bars would only show at the end."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    return _fetch_with_bars(model, dtype, console) if console.is_terminal else _fetch_with_lines(model, dtype, console)


def _fetch_with_bars(model: str, dtype: str, console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {"": progress.add_task(f"fetching {model}", total=1.0)}

        def on_progress(label: str, fraction: float) -> None:
            if label not in bars:
                # The first step replaces the line without a step.
                bars[label] = bars.pop("") if "" in bars else progress.add_task(label, total=1.0)
            progress.update(bars[label], description=label, completed=fraction)

        return fetch(model, dtype, on_progress)


def _fetch_with_lines(model: str, dtype: str, console: Console) -> Path:
    printed: dict[str, int] = {}
    """Percentage last printed, by step."""

    def on_progress(label: str, fraction: float) -> None:
        percent = int(100 * fraction) // LINE_PERCENT * LINE_PERCENT
        if printed.get(label) != percent:
            printed[label] = percent
            console.print(f"{label} {percent} %", markup=False)

    console.print(f"fetching {model}", markup=False)
    return fetch(model, dtype, on_progress)
