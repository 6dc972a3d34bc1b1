"""`python -m tests.unit.router.requests.endless_reader`: a process that prepares requests and never comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.preparation.process import MOST_BYTES, serve
from router.requests.work import PreparationOutcome


def main() -> None:
    serve(_reads, MOST_BYTES)


def _reads(model_dir: str) -> Callable[[Any], PreparationOutcome]:
    def read(work: Any) -> PreparationOutcome:
        while True:
            pass

    return read


if __name__ == "__main__":
    main()
