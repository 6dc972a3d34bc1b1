"""Reads what a process of a test counts, from its metrics page."""

from __future__ import annotations

import urllib.request

PATIENCE_S = 90.0


def scraped(address: str) -> str:
    """Returns the page of a router or worker at HOST:PORT or http://HOST:PORT."""
    with urllib.request.urlopen(f"http://{address.removeprefix('http://')}/metrics", timeout=PATIENCE_S) as answer:
        page: str = answer.read().decode()
    return page


def total(address: str, name: str, **labels: str) -> float:
    """Returns the sum over all series of one metric that have these labels."""
    series = [line for line in scraped(address).splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in series if all(label in line for label in wanted))
