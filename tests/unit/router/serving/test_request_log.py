"""The log's writer: whole lines, never in the way, whatever the disk does."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from router.metrics import RouterMetrics
from router.serving.request_log import MAX_PENDING, NoLog, RequestLog, making, request_log
from tools.simulate.traces.formats import record_of
from twostroke.base.errors import ConfigError
from twostroke.observability.request_log import AnswerRecord, line_of


def answer(number: int) -> AnswerRecord:
    return AnswerRecord(
        request_id=f"r{number}#0",
        arrival_s=float(number),
        outcome="stop",
        prompt_tokens=10,
        output_tokens=1,
        block_size=16,
        blocks="",
        policy="kv",
        attempts=1,
    )


def dropped(metrics: RouterMetrics) -> float | None:
    return metrics.registry.get_sample_value("twostroke_request_log_dropped_total", {"role": "router"})


def test_records_are_read_back_as_they_were_put_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = RequestLog(str(path), RouterMetrics())
    for number in range(1000):
        writer.put(making(answer(number)))
    writer.close()
    assert [record_of(line, "log") for line in path.read_text().splitlines()] == [answer(n) for n in range(1000)]
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_a_log_is_continued_and_may_be_shared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    one, other = (RequestLog(str(path), RouterMetrics()) for _ in range(2))
    for number in range(200):
        (one if number % 2 else other).put(making(answer(number)))
    one.close()
    other.close()
    assert sorted(record_of(line, "log").arrival_s for line in path.read_text().splitlines()) == list(range(200))  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["no/such/folder/log", ""])
def test_a_log_that_cannot_be_opened_is_refused_by_its_flag(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(str(tmp_path / place), RouterMetrics())


def test_a_pipe_that_nobody_reads_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(str(tmp_path / "pipe"), RouterMetrics())


def test_without_a_path_nothing_is_made() -> None:
    log = request_log(None, RouterMetrics())
    assert isinstance(log, NoLog)
    log.put(lambda: pytest.fail("made a record for nobody"))
    log.close()


def test_a_full_disk_is_logged_once_loses_whole_lines_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, metrics = tmp_path / "log.jsonl", RouterMetrics()
    room = len(line_of(answer(0))) + 20
    real_write, refused, is_full = os.write, threading.Semaphore(0), True

    def write(file: int, data: bytes) -> int:
        left = room - os.fstat(file).st_size
        if is_full and left <= 0:
            refused.release()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data[:left] if is_full else data)

    monkeypatch.setattr("router.serving.request_log.os.write", write)
    writer = RequestLog(str(path), metrics)
    writer.put(making(answer(0)))
    for number in (1, 2):
        writer.put(making(answer(number)))
        assert refused.acquire(timeout=60)
    is_full = False
    writer.put(making(answer(9)))
    writer.close()
    assert [record_of(line, "log") for line in path.read_text().splitlines()] == [answer(0), answer(9)]
    assert dropped(metrics) == 2
    assert sum("not written" in record.getMessage() for record in caplog.records) == 1


def test_a_line_of_another_router_survives_a_write_that_fails_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    one, other = (RequestLog(str(path), RouterMetrics()) for _ in range(2))
    real_write, begun = os.write, threading.Event()

    def write(file: int, data: bytes) -> int:
        if file != one._file:
            return real_write(file, data)
        if not begun.is_set():
            begun.set()
            return real_write(file, data[:20])
        until_s = time.monotonic() + 1.0  # for the other router's line, which must not come before this is undone
        while path.stat().st_size == 20 and time.monotonic() < until_s:
            time.sleep(0.01)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("router.serving.request_log.os.write", write)
    one.put(making(answer(0)))
    assert begun.wait(timeout=60)
    other.put(making(answer(1)))
    one.close()
    other.close()
    assert [record_of(line, "log") for line in path.read_text().splitlines()] == [answer(1)]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, hangs = RouterMetrics(), threading.Event()
    monkeypatch.setattr("router.serving.request_log.os.write", lambda file, data: hangs.wait(30) and len(data))
    monkeypatch.setattr("router.serving.request_log.CLOSE_S", 0.1)
    writer = RequestLog(str(tmp_path / "log"), metrics)
    for _ in range(MAX_PENDING + 1000):
        writer.put(making(answer(0)))
    assert 400 <= (dropped(metrics) or 0) <= 1000
    writer.close()
    hangs.set()
    while writer._thread.is_alive():
        writer.close()


def test_a_record_that_cannot_be_made_takes_no_other_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, metrics = tmp_path / "log", RouterMetrics()
    writer = RequestLog(str(path), metrics)
    writer.put(lambda: {}["a client's word"])  # type: ignore[misc]
    writer.put(making(answer(5)))
    writer.close()
    assert [record_of(line, "log") for line in path.read_text().splitlines()] == [answer(5)]
    assert dropped(metrics) == 1
    assert "KeyError serving/request_log.py:" in caplog.text
    assert "a client's word" not in caplog.text
