"""A pull of a transport that copies on threads is checked before it starts, awaited with a deadline, and fenced.

queued -> copying -> ended          the thread that copies is the only writer of the local pages
   \\-> dropped                      fenced or expired while queued: no byte was or will be written
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from twostroke.base.errors import InvalidRequest
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import PageCopy, PageEndpoint, ReadOutcome, Transfer, TransferResult
from twostroke.transfer.sockets.frames import Deadline


@dataclass(eq=False, slots=True)
class Pull(Transfer):
    """`ended` is set by the copying thread, which writes no byte afterwards."""

    copies: tuple[PageCopy, ...]
    deadline: Deadline
    interrupt: Callable[[Pull], None]
    """Wakes the copying thread if it is busy with this pull."""
    ended: Future[TransferResult] = field(default_factory=Future)
    unwanted: bool = False
    """Whether nobody wants the pages any more. Only the event loop sets it. The copying thread then starts no page."""


class PullTally:
    """Bytes and seconds of a pull while it is copied."""

    def __init__(self) -> None:
        self.copied_bytes = 0
        self._started = time.monotonic()

    def result(self, outcome: ReadOutcome, reason: str = "") -> TransferResult:
        return TransferResult(outcome, self.copied_bytes, time.monotonic() - self._started, reason)


def check_copies(copies: Sequence[PageCopy], endpoint: PageEndpoint, memory: Pages) -> None:
    """Checks that pages lie in their pools, change no group, and none is written twice. Raises InvalidRequest."""
    theirs, ours = endpoint.layout, memory.layout
    remote_pages, local_pages = theirs.pages, ours.pages
    if len({copy.local for copy in copies}) != len(copies):
        raise InvalidRequest("a local page is the destination of two copies")
    if copies and len(ours.regions) == len(theirs.regions) == 1 and _are_within(copies, remote_pages, local_pages):
        return
    for copy in copies:
        if not 0 <= copy.remote < remote_pages:
            raise InvalidRequest(f"remote page {copy.remote} is out of bounds: the peer has {remote_pages} pages")
        if not 0 <= copy.local < local_pages:
            raise InvalidRequest(f"local page {copy.local} is out of bounds: the pool has {local_pages} pages")
        if theirs.region_of(copy.remote) != ours.region_of(copy.local):
            raise InvalidRequest(f"remote page {copy.remote} and local page {copy.local} are of different page groups")
        if not 0 <= copy.generation < 1 << 64:
            raise InvalidRequest(f"generation {copy.generation} of remote page {copy.remote} is not a 64-bit count")


def _are_within(copies: Sequence[PageCopy], *pages: int) -> bool:
    """Returns whether all remote pages, local pages and generations of the copies are within bounds."""
    bounds = zip(zip(*copies, strict=True), (*pages, 1 << 64), strict=True)
    return all(min(column) >= 0 and max(column) < bound for column, bound in bounds)
