"""Readers bring pages of one tier into pages of the pool, on two threads of their own, and check every one.

Each thread has a queue. A short load does not wait behind a long one: the other thread reads it meanwhile.

A read job lists pages in order. Each is read into memory of the thread, checked against its digest, and only then
copied into its page of the pool. After `give_up` returns, no byte of the pool is written for that job any more, even
if the disk never answers.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageAccess, Pages
from twostroke.transfer.copy_threads import CopyThreads
from twostroke.worker.measured.page_time import PageTime, ReadTimes
from twostroke.worker.tiers.price import ReadQueue, predicted_read_s, thread_for

Place = TypeVar("Place")

THREADS = 2
"""Threads that read one tier."""


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
    """The block's page in the pool."""
    place: Place
    """The block's place on the tier."""


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[Place]):
    read: PageRead[Place]
    error: DamagedPage | MissingPage | None = None
    """None: its bytes lie in the pool."""


class ReadJob(Generic[Place]):
    """Pages that are read one after the other, and what has come of them so far."""

    def __init__(
        self, reads: Sequence[PageRead[Place]], notify: Callable[[], None], access: PageAccess | None = None
    ) -> None:
        """`notify` is called on the reader's thread when there are results, once until these are taken.

        `access` is where the pages go; None is the pool.
        """
        self.reads = reads
        self._access = access
        self._notify = notify
        self._lock = threading.Lock()
        self._is_given_up = False
        self._left_out: frozenset[int] = frozenset()
        self._results: deque[ReadResult[Place]] = deque()
        self.times = ReadTimes()
        """Seconds that the thread took for the pages that it has read."""

    def take_results(self) -> list[ReadResult[Place]]:
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results

    def give_up(self) -> None:
        """Returns once no page of the pool will be written by this job any more."""
        with self._lock:
            self._is_given_up = True

    def leave_out(self, blocks: Iterable[int]) -> None:
        """Returns once none of these blocks' pages will be written by this job any more."""
        with self._lock:
            self._left_out |= frozenset(blocks)

    def is_left_out(self, read: PageRead[Place]) -> bool:
        return read.block in self._left_out

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up

    def land(self, access: PageAccess, read: PageRead[Place], data: memoryview) -> None:
        """Copies the bytes into their page, unless the job was given up or leaves the block out. The page is in the
        pool, or where the job's access leads."""
        with self._lock:
            if self._is_given_up or self.is_left_out(read):
                return
            access = self._access or access
            (landing,) = access.landing([read.page])
            landing[:] = data
            access.landed()
            access.synchronize()
            self._put(ReadResult(read))

    def failed(self, read: PageRead[Place], error: DamagedPage | MissingPage) -> None:
        with self._lock:
            self._put(ReadResult(read, error))

    def _put(self, result: ReadResult[Place]) -> None:
        self._results.append(result)
        if len(self._results) == 1:
            self._notify()


class PageFetcher(Protocol[Place]):
    """Reads and checks pages of a tier, for one thread."""

    def fetch(self, read: PageRead[Place]) -> memoryview:
        """Returns the checked bytes of a page, valid until the next call.

        Raises DamagedPage, MissingPage, or OSError for a tier that has failed.
        """

    def close(self) -> None:
        """Frees its memory."""


class BusyThreads:
    """Fetches that the threads of a tier have under way; each thread writes its own entries."""

    def __init__(self, threads: int) -> None:
        self.since_s: list[float | None] = [None] * threads
        """When each thread began its fetch; None where there is none."""
        self._begun = [0] * threads

    def begin(self, thread: int, now_s: float) -> None:
        self.since_s[thread] = now_s
        self._begun[thread] += 1

    def end(self, thread: int) -> None:
        self.since_s[thread] = None

    def is_beside(self, thread: int) -> bool:
        """Returns whether another thread is reading."""
        return any(since_s is not None for index, since_s in enumerate(self.since_s) if index != thread)

    def begun_beside(self, thread: int) -> int:
        """Returns how many fetches other threads have begun so far."""
        return sum(begun for index, begun in enumerate(self._begun) if index != thread)


class ReaderThread(Generic[Place]):
    """One thread of a tier, with a queue, a buffer and an access of its own."""

    def __init__(
        self, name: str, fetcher: PageFetcher[Place], pool_memory: Pages, busy: BusyThreads, index: int
    ) -> None:
        self._fetcher = fetcher
        self._access = pool_memory.access(1)
        self._busy = busy
        self._index = index
        self._threads = CopyThreads(f"{name}-{index}", [self._access])
        self.pending_pages = 0
        """Pages of jobs that have not ended. The event loop counts them."""

    @property
    def busy_since_s(self) -> float | None:
        """Time at which the fetch under way began; None where there is none."""
        return self._busy.since_s[self._index]

    def start(self, job: ReadJob[Place], ended: Future[None]) -> None:
        """Reads the job's pages after those of earlier jobs; `ended` gets the error that ended it, if any."""
        self._threads.submit(lambda access: self._run(job, access), ended)

    def probe(self, read: PageRead[Place], took: Future[ReadTimes]) -> None:
        """Reads a page and discards its bytes; `took` gets the time, or the error."""
        self._threads.submit(lambda _: self._timed(lambda: self._fetcher.fetch(read), ReadTimes()), took)

    def close(self) -> None:
        """Ends the thread after its queued jobs."""
        self._threads.close()
        self._access.close()
        self._fetcher.close()

    def _run(self, job: ReadJob[Place], access: PageAccess) -> None:
        for read in job.reads:
            if job.is_given_up:
                return
            if job.is_left_out(read):
                continue
            try:
                job.times = self._timed(functools.partial(self._bring, job, access, read), job.times)
            except MissingPage as error:  # out here: no page was read, so it must not count in the times
                job.failed(read, error)

    def _bring(self, job: ReadJob[Place], access: PageAccess, read: PageRead[Place]) -> None:
        try:
            job.land(access, read, self._fetcher.fetch(read))
        except DamagedPage as error:
            job.failed(read, error)

    def _timed(self, fetch: Callable[[], object], times: ReadTimes) -> ReadTimes:
        """Fetches a page. Returns `times` with what this took added."""
        started_s = time.monotonic()
        self._busy.begin(self._index, started_s)
        begun, is_beside = self._busy.begun_beside(self._index), self._busy.is_beside(self._index)
        try:
            fetch()
        finally:
            self._busy.end(self._index)
        is_beside |= self._busy.begun_beside(self._index) > begun
        return times.plus(time.monotonic() - started_s, is_beside=is_beside)


class TierReaders(Generic[Place]):
    """The threads that read one tier, and predictions of how long their reads take."""

    def __init__(
        self,
        threads: Sequence[ReaderThread[Place]],
        page_time: PageTime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = threads
        self.page_time = page_time
        self._clock = clock

    @classmethod
    def of(
        cls, name: str, new_fetcher: Callable[[], PageFetcher[Place]], pool_memory: Pages, page_time: PageTime
    ) -> TierReaders[Place]:
        """Starts threads of this name; each gets a fetcher of its own."""
        busy = BusyThreads(THREADS)
        threads = [ReaderThread(name, new_fetcher(), pool_memory, busy, index) for index in range(THREADS)]
        return cls(threads, page_time)

    @property
    def pending_pages(self) -> int:
        """Pages of jobs that have not ended."""
        return sum(thread.pending_pages for thread in self.threads)

    def took(self, times: ReadTimes) -> None:
        """Learns from pages that were read."""
        self.page_time = self.page_time.after_reads(times)

    def took_at_least(self, seconds: float, pages: int) -> None:
        """Learns from a load that was given up after `seconds`, before it had brought this many pages."""
        self.page_time = self.page_time.at_least(seconds / pages)

    def thread_for(self, pages: int) -> ReaderThread[Place]:
        """Returns the thread that is to read a job of this many pages, if it comes now."""
        return self.threads[thread_for(self.page_time, self._queues(), pages)]

    def read_s(self, pages: int) -> float:
        """Predicts how long this many pages take where nothing else is read."""
        return pages * self.page_time.seconds

    def load_s(self, pages: int) -> float:
        """Predicts how long a job of this many pages takes if it comes now, with those that wait before it."""
        queues = self._queues()
        return predicted_read_s(self.page_time, queues, thread_for(self.page_time, queues, pages), pages)

    def wait_s(self, thread: ReaderThread[Place]) -> float:
        """Predicts the seconds until a thread begins with a job that comes now."""
        return predicted_read_s(self.page_time, self._queues(), self.threads.index(thread), 0)

    def beside(self, thread: ReaderThread[Place]) -> int:
        """Returns the pages that other threads have to read."""
        return self.pending_pages - thread.pending_pages

    def close(self) -> None:
        """Ends the threads after their queued jobs."""
        for thread in self.threads:
            thread.close()

    def _queues(self) -> list[ReadQueue]:
        now_s = self._clock()
        return [
            ReadQueue(each.pending_pages, 0.0 if each.busy_since_s is None else now_s - each.busy_since_s)
            for each in self.threads
        ]
