"""Lines that nobody can forge, in files of bounded size, at a bounded rate."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from twostroke.observability.event_log import (
    BURST_LINES,
    LINES_PER_S,
    MOST_KIND,
    MOST_KINDS,
    MOST_LINE,
    MOST_TRACEBACK,
    OLD_FILES,
    EventHandler,
    LineFormatter,
    OwnFile,
)


class Log:
    """A logger of its own with our handler, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handler = EventHandler("router-1", clock=lambda: self.now_s)
        self._stream = io.StringIO()
        self.handler.setStream(self._stream)
        self.logger = logging.Logger("a.logger")
        self.logger.addHandler(self.handler)

    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


def test_a_value_cannot_pass_for_another_field_or_line(log: Log) -> None:
    forged = "x error=None\n12:00:00.000 INFO router-1 router.requests answer ended request=y"
    log.logger.info("request failed request=%s error=%s attempt=%d", forged, "NotFound", 3)
    (line,) = log.lines()
    assert line.endswith(
        'INFO router-1 a.logger request failed request="x error=None\\n12:00:00.000 INFO router-1 router.requests '
        'answer ended request=y" error=NotFound attempt=3'
    )


def test_other_forms_of_messages_stay_as_they_are(log: Log) -> None:
    log.logger.info("took ms=%.1f share=50%% of %s", 12.34, "a whole line")
    log.logger.info("pair=%(a)s", {"a": "1 2"})
    log.logger.info("Started server process [%d]", 7)
    log.logger.info("a dict: %s", {"a": "b"})
    said = [line.partition("a.logger ")[2] for line in log.lines()]
    assert said == [
        "took ms=12.3 share=50% of a whole line",
        "pair=1 2",
        "Started server process [7]",
        "a dict: {'a': 'b'}",
    ]


def test_no_line_is_longer_than_it_may_be(log: Log) -> None:
    log.logger.info("f" * 1_000_000)
    try:
        raise ValueError("first\n12:00:00.000 INFO forged\n" + "v" * 8_000_000)
    except ValueError:
        log.logger.exception("failed request=%s", "r" * 1_000_000)
    assert max(map(len, log.lines())) < MOST_TRACEBACK + 100
    assert len(log.lines()[0]) < MOST_LINE + 150
    assert len("".join(log.lines())) < MOST_LINE + MOST_TRACEBACK + 2000
    assert not any(line.startswith("12:00:00.000 INFO forged") for line in log.lines())
    assert any(line.startswith("    ValueError: first") for line in log.lines())


def test_a_surrogate_does_not_break_the_log() -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "request=%s", ("\ud800",), None)
    assert LineFormatter("r").format(record).encode().endswith(rb'request="\ud800"')


def test_a_flood_of_one_kind_is_cut_and_counted_and_others_are_written(log: Log) -> None:
    for number in range(10_000):
        log.logger.info("request failed request=%s", number)
    log.logger.info("worker joins")
    assert len(log.lines()) == BURST_LINES + 1
    log.now_s = 2.0
    log.logger.info("request failed request=%s", "later")
    summary, later = log.lines()[-2:]
    assert f'lines left out count={10_000 - BURST_LINES:.0f} kind="a.logger request failed request=%s"' in summary
    assert later.endswith("request=later")
    for number in range(10_000):
        log.logger.info("request failed request=%s", number)
    assert len(log.lines()) == BURST_LINES + 3 + 2 * LINES_PER_S - 1


def test_made_up_kinds_do_not_pile_up(log: Log) -> None:
    for number in range(10 * MOST_KINDS):
        log.logger.info(f"kind {number}")  # as some libraries do
    assert len(log.lines()) == MOST_KINDS + BURST_LINES


def test_long_messages_do_not_pile_up(log: Log) -> None:
    for number in range(20):
        log.logger.info(f"{'x' * 100_000} kind {number}")
    assert sum(map(len, log.handler._limit._kinds)) < 20 * (MOST_KIND + 100)


def append_to(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def test_a_file_that_got_large_is_begun_anew_and_few_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "router-0.log"
    descriptor = append_to(path)
    own = OwnFile(path, most_bytes=1000)
    for number in range(200):
        os.write(descriptor, b"%099d\n" % number)
        own.keep_small(contextlib.nullcontext())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + OLD_FILES
    assert max(file.stat().st_size for file in files) <= 1100
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    kept = b"".join(file.read_bytes() for file in reversed(files)).split()
    assert [int(line) for line in kept] == list(range(200 - len(kept), 200)), "nothing is lost between two files"
    os.close(descriptor)


def test_two_processes_that_share_a_file_both_go_on_in_it(tmp_path: Path) -> None:
    path = tmp_path / "router-0.log"
    first, second = append_to(path), append_to(path)
    os.write(first, b"a" * 200)
    for _ in (first, second):
        OwnFile(path, most_bytes=100).keep_small(contextlib.nullcontext())
    os.write(first, b"from the first\n")
    os.write(second, b"from the second\n")
    assert path.read_text() == "from the first\nfrom the second\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["router-0.log", "router-0.log.1"]
    for descriptor in (first, second):
        os.close(descriptor)


def test_what_is_logged_while_a_file_is_copied_is_kept_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, is_held = tmp_path / "router-0.log", threading.Lock(), []
    descriptor, copyfileobj = append_to(path), shutil.copyfileobj

    def copied(source: IO[bytes], destination: IO[bytes]) -> None:
        copyfileobj(source, destination)
        is_held.append(lock.locked())
        if not lock.locked():
            os.write(descriptor, b"meanwhile\n")

    monkeypatch.setattr(shutil, "copyfileobj", copied)
    os.write(descriptor, b"a" * 200 + b"\n")
    OwnFile(path, most_bytes=100).keep_small(lock)
    assert is_held == [False, True]
    assert (tmp_path / "router-0.log.1").read_bytes() == b"a" * 200 + b"\nmeanwhile\n"
    assert path.read_bytes() == b""
    os.close(descriptor)


def test_a_file_that_cannot_be_copied_is_emptied_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_full_disk(source: object, destination: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", of_a_full_disk)
    path = tmp_path / "router-0.log"
    path.write_bytes(b"a" * 200)
    OwnFile(path, most_bytes=100).keep_small(contextlib.nullcontext())
    assert path.read_bytes() == b""


def test_a_terminal_or_a_pipe_is_left_alone(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert OwnFile.behind((writing,)) == ()
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert OwnFile.behind((reading,)) == (), "it is closed"
    deleted = append_to(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    assert OwnFile.behind((deleted,)) == ()
    os.close(deleted)


FLOOD = """
import os, sys, time
from pathlib import Path
from typing import IO
import twostroke.observability.event_log as event_log
event_log.SUMMARY_S, event_log.OwnFile.__init__.__defaults__ = 0.01, (10_000,)
from twostroke.observability.telemetry import configure_logging
configure_logging("worker-0", owns_files=True)
path, until_s = Path(sys.argv[1]), time.monotonic() + 20
while not Path(f"{path}.2").exists() and time.monotonic() < until_s:
    os.write(2, b"a library writes what it likes" * 10)
    time.sleep(0.0005)
"""


def test_what_a_library_writes_to_standard_error_is_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.err"
    descriptor = append_to(path)
    subprocess.run([sys.executable, "-c", FLOOD, str(path)], stderr=descriptor, check=True, timeout=60)
    os.close(descriptor)
    assert len(list(tmp_path.iterdir())) == 3
