"""Writes the request log on a thread of its own, so that neither tokens nor new requests wait for a disk.

What cannot be written (a full disk, a disk that hangs) is dropped and counted: serving continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from router.fleet.worker import Worker, step_cost
from router.metrics import RouterMetrics
from twostroke.base.errors import ConfigError
from twostroke.observability.bug_log import log_bug
from twostroke.observability.request_log import LinkRecord, Record, WorkerRecord, line_of
from twostroke.rpc.v1.control_pb2 import Tier

log = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Records that wait for the disk."""
MAX_BATCH = 512
"""Records in one write."""
CLOSE_S = 2.0
"""Seconds for each of the two waits when the router ends: for room in the queue, and for the thread."""
MODE = 0o640
"""Mode of the file, which names tenants and clients' request ids."""

MakeRecord = Callable[[], Record]


class NoLog:
    """Stands for the log where none is configured."""

    def put(self, make: MakeRecord) -> None: ...

    def close(self) -> None: ...


class RequestLog:
    """Appends to a file, whole lines at a time, so that the routers of a cluster may share one."""

    def __init__(self, path: str, metrics: RouterMetrics) -> None:
        try:
            # Non-blocking: a pipe without a reader is refused instead of waited for.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, MODE)
        except OSError as error:
            raise ConfigError(f"--request-log {path}: {error.strerror}", field="request_log") from error
        self._path = path
        self._metrics = metrics
        self._pending: queue.Queue[MakeRecord | None] = queue.Queue(MAX_PENDING)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def put(self, make: MakeRecord) -> None:
        """Writes what `make` returns, some time later and on another thread. It never blocks."""
        try:
            self._pending.put_nowait(make)
        except queue.Full:
            self._metrics.request_log_dropped_total.inc()

    def close(self) -> None:
        """Returns when everything is written, or given up."""
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._pending.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_BATCH:
                    batch.append(self._pending.get_nowait())
            is_open = None not in batch
            self._write([line for make in batch if make is not None and (line := self._line(make))])
        os.close(self._file)

    def _line(self, make: MakeRecord) -> bytes:
        try:
            return line_of(make()).encode()
        except Exception as error:
            log_bug(log, "a record of the request log could not be made", error=error)
            self._metrics.request_log_dropped_total.inc()
            return b""

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        with _alone(self._file):
            written_lines, error = _append(self._file, b"".join(lines))
        self._metrics.request_log_dropped_total.inc(len(lines) - written_lines)
        if error is not None and not self._is_failing:
            log.error("request log not written path=%s error=%s: serving continues without it", self._path, error)
        if error is None and self._is_failing:
            log.info("request log written again path=%s", self._path)
        self._is_failing = error is not None


@contextlib.contextmanager
def _alone(file: int) -> Iterator[None]:
    """Holds the file for one writer: another router's line may neither follow half a line nor be cut off with it."""
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _append(file: int, data: bytes) -> tuple[int, OSError | None]:
    """Appends whole lines. Returns how many were written, and the error that kept the others out."""
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError as error:
        whole = data.rfind(b"\n", 0, written) + 1
        with contextlib.suppress(OSError):  # a pipe cannot take back what was half written
            os.ftruncate(file, os.fstat(file).st_size - (written - whole))
        return data.count(b"\n", 0, whole), error
    return data.count(b"\n"), None


def request_log(path: str | None, metrics: RouterMetrics) -> RequestLog | NoLog:
    return NoLog() if path is None else RequestLog(path, metrics)


def making(record: Record) -> MakeRecord:
    """Returns a function that returns this record."""
    return lambda: record


def worker_record(worker: Worker) -> WorkerRecord | None:
    """Returns None before the worker has introduced itself and reported."""
    load, model = worker.load, worker.model
    if model is None or worker.reported_at_s is None:
        return None
    return WorkerRecord(
        at_s=time.time(),
        worker=worker.worker_id,
        role=worker.role.value,
        epoch=str(worker.epoch),
        status=worker.status.value,
        block_size=model.block_size,
        page_bytes=model.page_bytes,
        pages_total=load.pages_total,
        step_tokens=load.costs.step_tokens,
        step_target_s=load.costs.step_target_s,
        costs=asdict(step_cost(load)),
        links=tuple(
            LinkRecord(worker=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
            for peer, link in worker.links.items()
        ),
        tiers={Tier.Name(rate.tier).removeprefix("TIER_").lower(): rate.page_s for rate in load.tiers},
        conversion_page_s=load.conversion_page_s,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        queued_s=load.queued_s,
        prefill_busy_s=load.prefill_busy_s,
    )
