"""A reader brings pages of one tier into pages of the pool, on a thread of its own, and checks every one.

A read job lists pages in order. Each is read into memory of the thread, checked against its digest, and only then
copied into its page of the pool. After `give_up` returns, no byte of the pool is written for that job any more, even
if the disk never answers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from twostroke.ids import BlockHash, PageId
from twostroke.kv_cache.memory import Pages, Window
from twostroke.transfer.copy_threads import CopyThreads

Place = TypeVar("Place")


class DamagedPage(Exception):
    """The bytes that were read are not those that were stored."""


class MissingPage(Exception):
    """The page is not on the tier any more."""


@dataclass(frozen=True, slots=True)
class PageRead(Generic[Place]):
    """One page to be brought up."""

    block: int
    """Index in its sequence."""
    block_hash: BlockHash
    page: PageId
    """Its page in the pool."""
    place: Place
    """Its place on the tier."""


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[Place]):
    read: PageRead[Place]
    error: DamagedPage | MissingPage | None = None
    """None: its bytes lie in the pool."""


class ReadJob(Generic[Place]):
    """Pages that are read one after the other, and what has come of them so far."""

    def __init__(
        self, reads: Sequence[PageRead[Place]], notify: Callable[[], None], window: Window | None = None
    ) -> None:
        """`notify` is called on the reader's thread when there are results, once until these are taken.

        `window` is where the pages go; None is the pool.
        """
        self.reads = reads
        self._window = window
        self._notify = notify
        self._lock = threading.Lock()
        self._is_given_up = False
        self._left_out: frozenset[int] = frozenset()
        self._results: deque[ReadResult[Place]] = deque()
        self.read_s = 0.0
        """Time that the thread took for the pages so far."""

    def take_results(self) -> list[ReadResult[Place]]:
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results

    def give_up(self) -> None:
        """Return once no page of the pool will be written by this job any more."""
        with self._lock:
            self._is_given_up = True

    def leave_out(self, blocks: Iterable[int]) -> None:
        """Return once none of these blocks' pages will be written by this job any more."""
        with self._lock:
            self._left_out |= frozenset(blocks)

    def is_left_out(self, read: PageRead[Place]) -> bool:
        return read.block in self._left_out

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up

    def land(self, window: Window, read: PageRead[Place], data: memoryview) -> None:
        """Copy the bytes into their page, of the pool unless the job has a window, and unless it was given up."""
        with self._lock:
            if self._is_given_up or self.is_left_out(read):
                return
            window = self._window or window
            (landing,) = window.landing([read.page])
            landing[:] = data
            window.landed()
            window.synchronize()
            self._put(ReadResult(read))

    def failed(self, read: PageRead[Place], error: DamagedPage | MissingPage) -> None:
        with self._lock:
            self._put(ReadResult(read, error))

    def _put(self, result: ReadResult[Place]) -> None:
        self._results.append(result)
        if len(self._results) == 1:
            self._notify()


class TierReader(Generic[Place]):
    """The reader thread of one tier."""

    def __init__(self, name: str, fetch: Callable[[PageRead[Place]], memoryview], pool_memory: Pages) -> None:
        """`fetch` returns the checked bytes of a page, valid until the next call.

        It raises DamagedPage, MissingPage, or OSError for a tier that has failed.
        """
        self._fetch = fetch
        self._window = pool_memory.window(1)
        self._threads = CopyThreads(name, [self._window])
        self.pending_pages = 0
        """Pages of jobs that have not ended. The event loop counts them."""
        self.busy_since_s: float | None = None
        """Time at which the fetch under way began; None where there is none."""

    def start(self, job: ReadJob[Place], ended: Future[None]) -> None:
        """Read the job's pages after those of earlier jobs; `ended` gets the error that ended it, if any."""
        self._threads.submit(lambda window: self._run(job, window), ended)

    def probe(self, read: PageRead[Place], took: Future[float]) -> None:
        """Read a page to nowhere; `took` gets the seconds, or the error."""
        self._threads.submit(lambda _: self._timed(read), took)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._threads.close()
        self._window.close()

    def _run(self, job: ReadJob[Place], window: Window) -> None:
        for read in job.reads:
            if job.is_given_up:
                return
            if job.is_left_out(read):
                continue
            started_s = self.busy_since_s = time.monotonic()
            try:
                job.land(window, read, self._fetch(read))
            except (DamagedPage, MissingPage) as error:
                job.failed(read, error)
            finally:
                job.read_s += time.monotonic() - started_s
                self.busy_since_s = None

    def _timed(self, read: PageRead[Place]) -> float:
        started_s = self.busy_since_s = time.monotonic()
        try:
            self._fetch(read)
        finally:
            self.busy_since_s = None
        return time.monotonic() - started_s
