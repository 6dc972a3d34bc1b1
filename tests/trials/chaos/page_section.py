"""The part of a page of docs/ that a command brings up to date, between `<!-- faults:NAME -->` and its end.

A page without that part is refused before anything is measured for it.
"""

from __future__ import annotations

from pathlib import Path

from twostroke.base.errors import ConfigError

MATRIX, SAMPLE, SOAK, HOSTS, DISK = "matrix", "sample", "soak", "hosts", "disk"
TIERS, PINS, RANKS, DRAFTS = "tiers", "pins", "ranks", "drafts"
"""Parts of the matrix."""


def check(path: Path | None, name: str) -> None:
    """Raises ConfigError where `put` would."""
    if path is None:
        return
    if not path.is_file():
        raise ConfigError(
            f"--write {path}: is not a file; it has to be a page with {_begin(name)} ... {_end(name)}", field="write"
        )
    _around(path, name)


def put(path: Path, name: str, text: str) -> None:
    """Instead of what is there between the marks. Raises ConfigError where they are not."""
    head, tail = _around(path, name)
    path.write_text(f"{head}{_begin(name)}\n{text}\n{_end(name)}{tail}")


def _around(path: Path, name: str) -> tuple[str, str]:
    head, begin, rest = path.read_text().partition(_begin(name))
    _, end, tail = rest.partition(_end(name))
    if not begin or not end:
        raise ConfigError(f"--write {path}: has no {_begin(name)} ... {_end(name)}; add those lines", field="write")
    return head, tail


def _begin(name: str) -> str:
    return f"<!-- faults:{name} -->"


def _end(name: str) -> str:
    return f"<!-- end of faults:{name} -->"
