"""Fetches a model and shows the progress."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from twostroke.models.catalog.fetch import fetch

LINE_PERCENT = 25
"""A line is printed for every this many percent of a step, where there is no terminal."""


def fetch_with_progress(model: str, dtype: str, console: Console | None = None) -> Path:
    """Fetches a model, with bars on a terminal and plain lines elsewhere, where bars would only show at the end."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    return _fetch_with_bars(model, dtype, console) if console.is_terminal else _fetch_with_lines(model, dtype, console)


def _fetch_with_bars(model: str, dtype: str, console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        first_bar: TaskID | None = progress.add_task(f"fetching {model}", total=1.0)
        bars: dict[str, TaskID] = {}

        def on_progress(label: str, fraction: float) -> None:
            nonlocal first_bar
            if label not in bars:
                bars[label] = progress.add_task(label, total=1.0) if first_bar is None else first_bar
                first_bar = None
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
