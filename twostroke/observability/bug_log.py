"""Lines of a log about what went wrong in the code. They say where, and repeat no word of a client's.

The text of an exception may quote what a client sent: a key of its JSON, a part of its schema, what its template says.
So neither that text nor a frame's source is logged, only the kinds of exceptions and the places of their frames.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType


def log_bug(log: logging.Logger, what: str, *facts: object, error: BaseException) -> None:
    """Logs a mistake of ours: `what`, a format, with `facts`, then a line for each exception in the chain."""
    log.error(f"{what} error=%s", *facts, "".join(f"\n  {line}" for line in _chain(error)))


def place_of(error: BaseException) -> str:
    """Returns where an error was raised, "file.py:12"; "elsewhere" where it came from another process."""
    places = _places(error.__traceback__)
    return places[-1] if places else "elsewhere"


def _chain(error: BaseException | None) -> Iterator[str]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{type(error).__name__} " + " > ".join(_places(error.__traceback__))
        error = error.__cause__ or error.__context__


def _places(frames: TracebackType | None) -> list[str]:
    """Returns the places of a traceback. The module `traceback` would look at every source file, for each refused
    request.
    """
    places = []
    while frames is not None:
        parts = frames.tb_frame.f_code.co_filename.rsplit("/", 2)
        places.append(f"{'/'.join(parts[-2:])}:{frames.tb_lineno}")
        frames = frames.tb_next
    return places
