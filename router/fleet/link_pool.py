"""One link to each decode worker, opened as soon as it serves, and the Close calls that have not reached it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from router.fleet.liveness import FailureDetector
from router.fleet.token_stream import StreamLink, TokenStream
from router.fleet.worker import Worker
from router.fleet.worker_link import WorkerLink
from router.metrics import RouterMetrics
from twostroke.base.ids import Epoch, WorkerId
from twostroke.observability.bug_log import log_bug
from twostroke.rpc.membership import Membership

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause before a Close call that failed is sent again."""


class LinkPool:
    def __init__(
        self,
        router_id: str,
        membership: Membership,
        metrics: RouterMetrics,
        detector: FailureDetector,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._new_link = partial(
            WorkerLink, router_id=router_id, membership=membership, metrics=metrics, detector=detector
        )
        self._tasks = tasks
        self._links: dict[WorkerId, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unclosed: dict[WorkerId, dict[TokenStream, Epoch]] = {}
        """Attempts for which no Close reached the worker. It may still compute them."""
        self._is_flushing = False
        self._is_closed = False

    def to(self, worker: Worker) -> WorkerLink:
        """Returns the link to this epoch. It is a new one where the last was lost."""
        if worker.worker_id in self._links:
            link, _ = self._links[worker.worker_id]
            if link.lost is None and link.epoch == worker.epoch:
                return link
            self.drop(worker, "it is replaced")
        link = self._new_link(worker)
        task = self._tasks.create_task(_contained(link, "run", link.run), name=f"link {worker.worker_id}")
        self._links[worker.worker_id] = (link, task)
        for stream, epoch in self._unclosed.pop(worker.worker_id, {}).items():
            if epoch == worker.epoch:
                self._close_later(link, stream)
        return link

    def connect(self, workers: Iterable[Worker]) -> None:
        """Opens the links that are missing, so that no request waits for one."""
        if not self._is_closed:
            for worker in workers:
                self.to(worker)

    def close_unclosed(self, worker: Worker) -> None:
        """Closes the attempts that were given up when this worker seemed dead.

        It is heard again, and may compute them.
        """
        if worker.worker_id in self._unclosed:
            self.to(worker)

    def drop(self, worker: Worker, reason: str, *, for_good: bool = False) -> None:
        """Fails the worker's requests now, so that they continue elsewhere. `for_good`: its epoch has ended."""
        if for_good:
            self._unclosed.pop(worker.worker_id, None)
        if worker.worker_id in self._links:
            link, task = self._links.pop(worker.worker_id)
            link.is_over = for_good
            link.lose(reason)
            task.cancel()

    def close_later(self, stream: TokenStream) -> None:
        """Tells the worker in the background that an attempt is over. The owner of the attempt may be gone already."""
        self._close_later(stream.link, stream)

    async def flush(self) -> None:
        """Returns when every worker has got its calls, or could not be reached. Each call has its own deadline."""
        self._is_flushing = True
        while self._closing:
            await asyncio.wait(self._closing)

    def close(self) -> None:
        """Sends no more calls to workers: the tasks that would do it are ending."""
        self._is_closed = True

    def _close_later(self, link: StreamLink, stream: TokenStream) -> None:
        if self._is_closed:
            return
        if link.lost is not None:
            self._keep_unclosed(link, stream)
            return
        work = partial(self._close, link, stream)
        closing = self._tasks.create_task(_contained(link, "close", work), name=f"close {stream.request_id}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, link: StreamLink, stream: TokenStream) -> None:
        while not await link.close(stream):
            if link.lost is not None or self._is_flushing:
                self._keep_unclosed(link, stream)
                return
            await asyncio.sleep(RETRY_PAUSE_S)

    def _keep_unclosed(self, link: StreamLink, stream: TokenStream) -> None:
        """Keeps a call that a lost link could not send, until a link reaches the same epoch again."""
        if link.is_over:
            return
        newer, _ = self._links.get(link.worker_id, (None, None))
        if newer is not None and newer is not link and newer.lost is None and newer.epoch == link.epoch:
            self._close_later(newer, stream)
            return
        unclosed = self._unclosed.get(link.worker_id, {})
        kept = {other: epoch for other, epoch in unclosed.items() if epoch == link.epoch}
        self._unclosed[link.worker_id] = {**kept, stream: link.epoch}


async def _contained(link: StreamLink, task: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs `work`, which the log calls `task`: a bug in one link costs that link's requests only."""
    try:
        await work()
    except Exception as error:
        log_bug(log, "task of a link failed task=%s worker=%s epoch=%s", task, link.worker_id, link.epoch, error=error)
