"""The lines of a process's log: what one line may say, how many lines of a kind there may be, how large the file gets.

Each of the three has a bound, because what a client sends causes lines and stands in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import TextIO

from twostroke.base.client_text import log_value, on_one_line, without_middle

MOST_LINE = 4000
"""Characters of a message."""
MOST_TRACEBACK = 16_000
"""Characters of the traceback below a message."""
LINES_PER_S = 100.0
"""Lines of one kind, over time. A kind is a message before its values are put in."""
BURST_LINES = 500.0
"""Lines of one kind that may come at once."""
MOST_KINDS = 1000
"""Kinds that are counted apart; libraries may make up messages."""
MOST_KIND = 200
"""Characters of a message that tell its kind; a library's may contain what a client sent."""
SUMMARY_S = 1.0
"""Seconds between two lines that say how many were left out, and between two looks at the size of the file."""
MOST_FILE_BYTES = 16 << 20
OLD_FILES = 2
"""Copies that are kept in addition to the file that is written to."""
INDENT = "    "
"""A traceback stands in further than any line begins: no text in it can pass for a line."""

PLACEHOLDER = re.compile(
    r"(?P<key>(?<==))?%(?:%|(?P<form>[#0\- +]*\d*(?:\.\d+)?)[hlL]?(?P<conversion>[diouxXeEfFgGcrsa]))"
)
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """Formats an event as one line, in which every value that a client may have chosen is cut, quoted and escaped."""

    def __init__(self, identity: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._identity = identity
        self._second = -1
        self._shown_second = ""
        """The second of the latest line, as lines show it."""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown_second = second, self.formatTime(record, self.datefmt)
        message = without_middle(on_one_line(_message(record)), MOST_LINE)
        at = f"{self._shown_second}.{int(record.msecs):03d}"
        line = f"{at} {record.levelname} {self._identity} {record.name} {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802  # the base class's name
        text = without_middle(super().formatException(ei), MOST_TRACEBACK)
        return "\n".join(INDENT + on_one_line(line) for line in text.split("\n"))


def _message(record: logging.LogRecord) -> str:
    """Returns the message with its values. Those after `key=` are quoted where they need it."""
    if not isinstance(record.msg, str) or len(record.msg) > MOST_LINE or not isinstance(record.args, tuple):
        return record.getMessage()
    frame, places = _places(record.msg)
    if len(places) != len(record.args):
        return record.getMessage()
    texts = [form % (value,) for (form, _), value in zip(places, record.args, strict=True)]
    values = [log_value(text) if has_key else text for (_, has_key), text in zip(places, texts, strict=True)]
    return frame % tuple(values)


@functools.lru_cache(MOST_KINDS)
def _places(message: str) -> tuple[str, tuple[tuple[str, bool], ...]]:
    """Returns the message as a frame for texts, the form of each value, and whether it stands after a `key=`."""
    frame, places, end = "", [], 0
    for found in PLACEHOLDER.finditer(message):
        is_value = found["conversion"] is not None
        frame += message[end : found.start()].replace("%", "%%") + ("%s" if is_value else "%%")
        end = found.end()
        if is_value:
            places.append((f"%{found['form']}{found['conversion']}", found["key"] is not None))
    return frame + message[end:].replace("%", "%%"), tuple(places)


@dataclass(slots=True)
class _Allowance:
    lines: float
    at_s: float
    left_out: int = 0


class LineLimit:
    """Limits the lines of each kind: `BURST_LINES` may come at once, and `LINES_PER_S` in each second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, _Allowance] = {}
        self._left_out: set[str] = set()
        """Kinds of lines that were left out, not yet reported."""
        self._said_s = clock()

    def admit(self, kind: str) -> bool:
        """Counts a line of this kind. Returns False if it has to be left out."""
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            kind = "any other"
        now_s = self._clock()
        allowance = self._kinds.setdefault(kind, _Allowance(BURST_LINES, now_s))
        refilled = allowance.lines + (now_s - allowance.at_s) * LINES_PER_S
        allowance.lines, allowance.at_s = min(BURST_LINES, refilled), now_s
        if allowance.lines >= 1:
            allowance.lines -= 1
            return True
        allowance.left_out += 1
        self._left_out.add(kind)
        return False

    def left_out(self) -> list[tuple[str, int]]:
        """Returns the kinds of lines that were left out since the last report, with their numbers; empty until it is
        time.
        """
        now_s = self._clock()
        if not self._left_out or now_s < self._said_s + SUMMARY_S:
            return []
        told = [(kind, self._kinds[kind].left_out) for kind in sorted(self._left_out)]
        for kind in self._left_out:
            self._kinds[kind].left_out = 0
        self._left_out.clear()
        self._said_s = now_s
        return told


class OwnFile(RotatingFileHandler):
    """A file that this process's output goes to: copied and emptied where it is large. A few copies are kept.

    Whoever has it open continues in the same file: a library that writes to a descriptor by itself, or a second process
    that shares it.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_FILE_BYTES) -> None:
        super().__init__(path, maxBytes=most_bytes, backupCount=OLD_FILES, delay=True)

    @classmethod
    def behind(cls, descriptors: Iterable[int]) -> tuple[OwnFile, ...]:
        """Returns those that are files to which lines are appended, and not terminals or pipes."""
        paths = dict.fromkeys(_path_behind(descriptor) for descriptor in descriptors)
        return tuple(cls(path) for path in paths if path is not None)

    def keep_small(self, quiet: AbstractContextManager[object]) -> None:
        """Empties the file where it is large, even where it cannot be copied, as on a disk that is full.

        Within `quiet` this process writes no line. It is entered only for the last lines, after the copy.
        """
        self.rotator = functools.partial(_copy_and_empty, quiet)
        with contextlib.suppress(OSError):
            if os.stat(self.baseFilename).st_size > self.maxBytes:
                self.doRollover()


def _path_behind(descriptor: int) -> Path | None:
    try:
        is_appended = (
            stat.S_ISREG(os.fstat(descriptor).st_mode) and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        )
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
    return path if is_appended and path.is_file() else None


def _copy_and_empty(quiet: AbstractContextManager[object], source: str, destination: str) -> None:
    with open(source, "rb") as old, contextlib.ExitStack() as stack:
        try:
            kept = stack.enter_context(open(destination, "wb", opener=_for_the_owner))
            shutil.copyfileobj(old, kept)
            stack.enter_context(quiet)
            shutil.copyfileobj(old, kept)
        finally:
            os.truncate(source, 0)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class EventHandler(logging.StreamHandler[TextIO]):
    """Writes events to standard error, within `LineLimit`; `files` are kept small by a thread of their own."""

    def __init__(
        self, identity: str, files: Sequence[OwnFile] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(LineFormatter(identity))
        self._limit = LineLimit(clock)
        self._files = files
        self._is_closed = threading.Event()
        if files:
            threading.Thread(target=self._look_after_files, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self._summarize()
        if self._limit.admit(f"{record.name} {str(record.msg)[:MOST_KIND]}"):
            super().emit(record)

    def close(self) -> None:
        self._is_closed.set()
        super().close()

    def _summarize(self) -> None:
        for kind, count in self._limit.left_out():
            text = "lines left out count=%d kind=%s"
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count, kind), None))

    def _look_after_files(self) -> None:
        while not self._is_closed.wait(SUMMARY_S):
            self.acquire()
            try:
                self._summarize()
            finally:
                self.release()
            for file in self._files:
                file.keep_small(self.lock or contextlib.nullcontext())
