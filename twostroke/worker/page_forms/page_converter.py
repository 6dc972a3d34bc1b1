"""The page converter converts pages of one worker on a thread, one after the other, and predicts how long that takes.

A source converts pages before they travel. A puller converts them after they have arrived. For each pull, the side
with the shorter predicted time converts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from twostroke.base.ids import PageId
from twostroke.kv_cache.form import Conversion, page_form
from twostroke.kv_cache.memory import PageAccess, Pages
from twostroke.transfer.copy_threads import CopyThreads, off_loop
from twostroke.worker.measured.page_time import PageTime

TRIALS = 8
"""Number of conversions that are timed where a worker has converted no page so far, or none for long."""
FORGET_S = 30.0
"""Time without a conversion after which the next pull has it measured again. Otherwise a price that was too high would
never fall."""
LEAST_GAIN = 0.25
"""Fraction of the source's time that converting at the puller must save. There are three reasons. A page that the
source converts serves later pulls too. At the puller, streams share the cores with conversions. The puller measured its
first price while it was idle."""
Numbers = npt.NDArray[np.uint8]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """What it costs to convert the pages of one pull, before they are sent or after they have arrived."""

    page_bytes: int
    """Bytes of a page as it is sent."""
    page_s: float
    """Seconds of converting one page."""
    wait_s: float
    """Seconds until conversions that are queued there are done."""
    conversions: int
    """Pages that are still to be converted."""

    def seconds(self, pages: int, bytes_per_s: float) -> float:
        """Returns the predicted seconds of converting and of sending this many pages over a link with this rate."""
        return self.wait_s + self.conversions * self.page_s + pages * self.page_bytes / bytes_per_s


def is_for_puller(source: ConversionCost, puller: ConversionCost, pages: int, bytes_per_s: float) -> bool:
    """Returns whether the puller should convert the pages of a pull. On a near tie the source converts."""
    if not bytes_per_s > 0:
        return False
    return puller.seconds(pages, bytes_per_s) < (1 - LEAST_GAIN) * source.seconds(pages, bytes_per_s)


class PageConverter:
    """Converts pages for one event loop; `pages` are those of this worker, on either end of the conversion."""

    def __init__(self, conversion: Conversion, pages: Pages) -> None:
        self._conversion = conversion
        self._layout = pages.layout
        self.seconds = 0.0
        """Time spent so far, copies between device and host included."""
        self.pages = 0
        """Pages converted so far."""
        self._page_time = PageTime(time_of_a_conversion(conversion))
        self._measured_s = time.monotonic()
        self._open: set[Future[Any]] = set()
        self._access = pages.access(1)
        self._thread = CopyThreads("pages-convert", [self._access])

    @property
    def page_s(self) -> float:
        """Seconds per page: measured before the first one, and by each one since."""
        return self._page_time.seconds

    @property
    def wait_s(self) -> float:
        """Predicted seconds until the conversions that are queued now are done."""
        return len(self._open) * self.page_s

    def conversion_of(self, page: PageId) -> Conversion:
        """Returns how this page of the worker is converted, by its group."""
        return self._conversion.groups[self._layout.region_of(page)]

    def submit(self, job: Callable[[PageAccess], Result]) -> Future[Result]:
        """Queues a job that converts one page on the thread; cancelling its future before it runs drops it."""
        future: Future[Result] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._thread.submit(lambda access: self._timed(job, access), future)
        return future

    def keep_measured(self) -> None:
        """Times some conversions on the thread if it has done none for long; what they take is known later."""
        if not self._open and time.monotonic() - self._measured_s > FORGET_S:
            trials: Future[None] = Future()
            self._open.add(trials)
            trials.add_done_callback(self._open.discard)
            self._thread.submit(lambda _: self._measure(), trials)

    async def close(self) -> None:
        """Finishes open conversions and ends the thread; call it before the pages' memory is closed."""
        await off_loop(self._thread.close)
        self._access.close()

    def _measure(self) -> None:
        self._page_time = PageTime(time_of_a_conversion(self._conversion))
        self._measured_s = time.monotonic()

    def _timed(self, job: Callable[[PageAccess], Result], access: PageAccess) -> Result:
        started_s = time.perf_counter()
        result = job(access)
        seconds = time.perf_counter() - started_s
        self.seconds += seconds
        self.pages += 1
        self._page_time = self._page_time.after(seconds, 1)
        self._measured_s = time.monotonic()
        return result


def convert(conversion: Conversion, original: Numbers, target: Numbers) -> None:
    """Fills the target page with what the original stores."""
    import torch  # which workers of paced models do without

    from twostroke.kernels.page_forms.page_conversion import convert_page

    with torch.inference_mode():
        convert_page(conversion, torch.from_numpy(original), torch.from_numpy(target))


def time_of_a_conversion(conversion: Conversion) -> float:
    """Returns the seconds of the quickest of some conversions: the first one also loads code."""
    original, target = (
        np.zeros(page_form(form.format).page_bytes(conversion.shape), np.uint8)
        for form in (conversion.source, conversion.target)
    )
    seconds = []
    for _ in range(TRIALS):
        started_s = time.perf_counter()
        convert(conversion, original, target)
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)
