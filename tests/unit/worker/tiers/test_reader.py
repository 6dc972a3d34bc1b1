"""Two threads read a tier: a short job passes a long one, and each thread has its own memory, errors and end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.worker.measured.page_time import PageTime, ReadTimes
from twostroke.worker.tiers.reader import DamagedPage, PageRead, ReaderThread, ReadJob, TierReaders

PAGE_BYTES, PAGES = 4096, 64
PAGE_TIME = PageTime(0.001)
WHOLE = BlockHash(b"whole page")
NEVER = BlockHash(b"never answers")
BROKEN = BlockHash(b"broken disk")
DAMAGED = BlockHash(b"damaged page")


class Fetchers:
    """Fetchers of a tier whose pages hold their place as a byte."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.made: list[Fetcher] = []
        self.fetching = threading.Semaphore(0)
        """One for each fetch of NEVER that has begun."""

    def new(self) -> Fetcher:
        self.made.append(Fetcher(self))
        return self.made[-1]


class Fetcher:
    def __init__(self, tier: Fetchers) -> None:
        self._tier = tier
        self._buffer = bytearray(PAGE_BYTES)
        self.is_closed = False
        self.threads: set[int] = set()

    def fetch(self, read: PageRead[int]) -> memoryview:
        self.threads.add(threading.get_ident())
        if read.block_hash == NEVER:
            self._tier.fetching.release()
            assert self._tier.answers.wait(60)
        if read.block_hash == BROKEN:
            raise OSError("the disk is broken")
        if read.block_hash == DAMAGED:
            raise DamagedPage("other bytes")
        self._buffer[:] = bytes([read.place]) * PAGE_BYTES
        return memoryview(self._buffer)

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self) -> None:
        self.memory = PageMemory(PAGES, PAGE_BYTES)
        self.fetchers = Fetchers()
        self.now_s = 0.0
        threads = TierReaders.of("test", self.fetchers.new, self.memory, PAGE_TIME).threads
        self.readers = TierReaders(threads, PAGE_TIME, lambda: self.now_s)
        self._pages = itertools.count()

    def reads(self, count: int, block_hash: BlockHash = WHOLE) -> list[PageRead[int]]:
        pages = [next(self._pages) for _ in range(count)]
        return [PageRead(page, block_hash, PageId(page), page) for page in pages]

    def start(self, reads: list[PageRead[int]]) -> tuple[ReadJob[int], ReaderThread[int], Future[None]]:
        """Gives these reads to the thread that is to have them."""
        job, ended = ReadJob(reads, lambda: None), Future[None]()
        thread = self.readers.thread_for(len(reads))
        thread.pending_pages += len(reads)
        thread.start(job, ended)
        return job, thread, ended

    def start_stuck(self, pages: int) -> tuple[ReadJob[int], ReaderThread[int], Future[None]]:
        """Starts a job of so many pages, and returns once its first read does not end."""
        started = self.start(self.reads(pages, NEVER))
        assert self.fetchers.fetching.acquire(timeout=60)
        return started

    def has_landed(self, reads: list[PageRead[int]]) -> bool:
        return all((self.memory.page(read.page) == read.place).all() for read in reads)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.fetchers.answers.set()
    rig.readers.close()
    rig.memory.close()


def test_a_short_job_is_read_while_a_long_one_is(rig: Rig) -> None:
    long, thread, long_ended = rig.start_stuck(30)
    short = rig.reads(2)
    job, other, ended = rig.start(short)
    ended.result(10)
    assert other is not thread
    assert rig.has_landed(short)
    assert job.times.beside_pages == 2
    assert not long_ended.done()
    rig.fetchers.answers.set()
    long_ended.result(10)
    assert rig.has_landed(list(long.reads)), "each thread reads into a buffer of its own"
    assert long.times.beside_pages == 1, "the others were read alone"
    assert long.times.alone_pages == 29
    used = [fetcher.threads for fetcher in rig.fetchers.made]
    assert [len(threads) for threads in used] == [1, 1]
    assert used[0] != used[1]


def test_a_long_job_waits_behind_one_that_it_would_delay(rig: Rig) -> None:
    _, thread, _ = rig.start_stuck(20)
    assert rig.start(rig.reads(20))[1] is thread
    assert rig.start(rig.reads(1))[1] is not thread, "one thread is left for short ones"
    assert rig.readers.pending_pages == 41
    assert rig.readers.beside(thread) == 1


def test_the_forecast_is_that_of_the_thread_that_will_read(rig: Rig) -> None:
    thread = rig.start_stuck(20)[1]
    since_s = thread.busy_since_s
    assert since_s is not None
    rig.now_s = since_s
    load_s = rig.readers.load_s(2)
    other = rig.readers.thread_for(2)
    assert other is not thread
    assert load_s == pytest.approx(0.004), "two pages, beside others"
    assert rig.readers.wait_s(other) == 0
    rig.now_s += 5
    assert rig.readers.wait_s(thread) == pytest.approx(0.02 + 5 - 0.001)


def test_jobs_on_both_threads_can_be_given_up_and_land_nothing(rig: Rig) -> None:
    stuck = [rig.start_stuck(pages) for pages in (10, 1)]
    assert len({thread for _, thread, _ in stuck}) == 2
    for job, _, _ in stuck:
        job.give_up()
    rig.fetchers.answers.set()
    for job, _, ended in stuck:
        ended.result(10)
        assert not job.take_results()
        assert not any(rig.memory.page(read.page).any() for read in job.reads)


def test_what_is_left_out_of_a_job_lands_no_more_also_while_it_is_read(rig: Rig) -> None:
    rig.reads(1)  # its bytes are those of an empty page
    job, _, ended = rig.start_stuck(3)
    under_way, later, kept = job.reads
    job.leave_out([under_way.block, later.block])
    rig.fetchers.answers.set()
    ended.result(10)
    assert [result.read for result in job.take_results()] == [kept]
    assert not any(rig.memory.page(read.page).any() for read in (under_way, later))
    assert rig.has_landed([kept])


def test_an_error_of_one_thread_ends_its_job_and_not_the_other_ones(rig: Rig) -> None:
    long, _, long_ended = rig.start_stuck(10)
    _, thread, ended = rig.start(rig.reads(1, BROKEN))
    assert isinstance(ended.exception(10), OSError)
    assert thread.busy_since_s is None
    after = rig.reads(1)
    assert rig.start(after)[2].result(10) is None, "the thread reads on"
    rig.fetchers.answers.set()
    assert long_ended.result(10) is None
    assert rig.has_landed([*after, *long.reads])


def test_a_damaged_page_ends_no_job(rig: Rig) -> None:
    reads = [*rig.reads(1, DAMAGED), *rig.reads(1)]
    job, _, ended = rig.start(reads)
    ended.result(10)
    errors = [result.error for result in job.take_results()]
    assert isinstance(errors[0], DamagedPage)
    assert errors[1] is None
    assert not rig.memory.page(reads[0].page).any()


def test_a_probe_says_whether_another_thread_read(rig: Rig) -> None:
    def probe() -> ReadTimes:
        took: Future[ReadTimes] = Future()
        rig.readers.thread_for(1).probe(rig.reads(1)[0], took)
        return took.result(10)

    assert (probe().alone_pages, probe().beside_pages) == (1, 0)
    rig.start_stuck(10)
    assert (probe().alone_pages, probe().beside_pages) == (0, 1)


@pytest.mark.parametrize("prepare", [lambda rig: None, lambda rig: rig.start(rig.reads(10))])
def test_closing_ends_both_threads_after_their_jobs(prepare: Callable[[Rig], object]) -> None:
    rig = Rig()
    prepare(rig)
    rig.readers.close()
    assert all(fetcher.is_closed for fetcher in rig.fetchers.made)
    assert not [each for each in threading.enumerate() if each.name.startswith("test-")]
    rig.memory.close()
