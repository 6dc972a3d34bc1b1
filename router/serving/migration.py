"""Moves open requests, with their pages, off decode workers that drain. Meanwhile their tokens keep coming.

The target worker first pulls a request's full blocks. Then the attempt is ended, and a new one is opened at the target
with prompt and output so far. The target computes only the tokens that no pulled block holds. A request without a token
is placed like a new one. If there is no other decode worker, requests stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.token_stream import TokenStream
from router.fleet.worker import Worker
from router.metrics import RouterMetrics
from router.serving.parent_request import ParentRequest
from router.serving.placement import Placer
from twostroke.base.errors import PeerLost, ServeError
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.block import root_hash
from twostroke.observability.bug_log import log_bug
from twostroke.request import Attempt
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Migrations at once. If more shared the network, each would emit more tokens before its pages have arrived."""
FETCH_S = 20.0
"""Deadline in seconds for each fetch of a request's pages. The target computes what has not arrived by then."""
MOST_FETCHES = 3
"""Most fetches for one request. Those after the first fetch blocks that it has filled meanwhile."""
JUDGED_S = 0.5
"""Longest wait, in seconds, for the fleet's verdict on a worker that broke off a fetch."""


class Migrated(ServeError):
    """Ends an attempt that is to continue at another worker, although its own one runs. Clients never see it."""

    retryable = True

    def __init__(self, message: str, to: WorkerId | None = None) -> None:
        super().__init__(message)
        self.to = to
        """The worker that has pulled its pages. None: any worker."""


@dataclass(slots=True, eq=False)
class _Watched:
    stream: TokenStream
    attempt: Callable[[], Attempt]
    parent: ParentRequest
    task: asyncio.Task[None] | None = None


class Migration:
    """Watches all open requests of a router, and migrates them in `tasks`."""

    def __init__(
        self, fleet: Fleet, links: LinkPool, placer: Placer, metrics: RouterMetrics, tasks: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._placer = placer
        self._metrics = metrics
        self._tasks = tasks
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._watched: set[_Watched] = set()
        fleet.on_change(self._move_all)

    @contextlib.contextmanager
    def watching(self, stream: TokenStream, attempt: Callable[[], Attempt], parent: ParentRequest) -> Iterator[None]:
        """Watches a stream inside the block. The stream fails as Migrated when it should continue on another worker.

        `attempt` returns the attempt with all tokens so far. It is slow for long prompts, so it is called when the
        request moves, not at each change of the fleet.
        """
        watched = _Watched(stream, attempt, parent)
        self._watched.add(watched)
        self._move(watched)
        try:
            yield
        finally:
            self._watched.discard(watched)
            if watched.task is not None:
                watched.task.cancel()

    def _move_all(self) -> None:
        for watched in self._watched:
            self._move(watched)

    def _move(self, watched: _Watched) -> None:
        """Begins to migrate a request if its worker drains and another one can take it."""
        link = watched.stream.link
        worker = self._fleet.worker(link.worker_id)
        if watched.task is not None or worker is None or worker.epoch != link.epoch:
            return
        if worker.is_draining and self._placer.takers(watched.parent):
            watched.task = self._tasks.create_task(self._migrate(watched), name=f"migrate {link.worker_id}")

    async def _migrate(self, watched: _Watched) -> None:
        """Moves the pages, and then ends the stream with Migrated. A bug in moving costs only this request's pages."""
        stream, target = watched.stream, None
        try:
            async with self._slots:
                target = await self._send_pages(watched)
        except Exception as error:
            log_bug(log, "migration failed request=%s", stream.request_id, error=error)
        if not self._placer.takers(watched.parent):
            watched.task = None  # the request stays until another worker can take it
            return
        self._metrics.migrated_requests_total.inc()
        stream.fail(Migrated(f"decode worker {stream.link.worker_id} drains", target))

    async def _send_pages(self, watched: _Watched) -> WorkerId | None:
        """Returns the worker that has pulled the pages. None: there was no need, or it failed."""
        attempt, others = watched.attempt(), self._placer.takers(watched.parent)
        leaving = self._fleet.worker(watched.stream.link.worker_id)
        if not attempt.emitted or not others or leaving is None:
            return None
        with self._placer.migration_target(attempt, watched.parent, others) as target:
            try:
                blocks = await self._fetch(watched, leaving, target)
            except ServeError as error:
                log.warning(
                    "pages not migrated request=%s to=%s error=%s", attempt.request_id, target.worker_id, error.label()
                )
                if isinstance(error, PeerLost):
                    await self._fleet.wait_for_change(JUDGED_S)
                return None
        log.info("pages migrated request=%s to=%s blocks=%d", attempt.request_id, target.worker_id, blocks)
        return target.worker_id

    async def _fetch(self, watched: _Watched, leaving: Worker, target: Worker) -> int:
        """Has `target` pull the full blocks, with those that are filled meanwhile. Returns how many blocks it has."""
        blocks = hashes = 0
        for _ in range(MOST_FETCHES):
            block_hashes = watched.attempt().block_hashes
            if len(block_hashes) <= hashes:
                break
            hashes = len(block_hashes)
            message = worker_pb2.FetchRequest(
                fingerprint=target.fingerprint,
                worker_epoch=str(target.epoch),
                source=leaving.page_source,
                block_hashes=hashes_to_bytes(block_hashes),
                root=root_hash(),
                within_s=FETCH_S,
            )
            blocks = await self._links.to(target).fetch(message)
        return blocks
