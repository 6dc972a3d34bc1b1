"""Moves open answers off decode workers that drain, with their pages, while their tokens keep flowing.

The next worker fetches an answer's full blocks first. Then its attempt is ended where it is and opened there, with
prompt and emitted tokens: what that has to compute is the tail of the last block and what was emitted meanwhile. An
answer that has no token yet is opened again like any other. Where there is no other decode worker, answers stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.worker import Member, Standing
from router.metrics import RouterMetrics
from router.serving.placement import Placed, Placer
from twostroke.config import Role
from twostroke.errors import PeerLost, ServeError
from twostroke.ids import WorkerId
from twostroke.kv_cache.block import root_name
from twostroke.request import Request
from twostroke.rpc.convert import names_to_bytes
from twostroke.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)

MOVES_AT_ONCE = 4
"""More would share the same wire, and each would emit more tokens before its pages have come."""
FETCH_S = 20.0
"""For the pages of one answer, however long; what has not come by then is computed."""
MOST_FETCHES = 3
"""Of one answer: those after the first bring blocks that it has filled meanwhile."""
JUDGED_S = 0.5
"""Whoever broke off a fetch is known to be dead, or not, so soon."""


class Moved(ServeError):
    """An attempt ends although its worker lives; never leaves the router."""

    retryable = True

    def __init__(self, message: str, to: WorkerId | None = None) -> None:
        super().__init__(message)
        self.to = to
        """Holds its pages."""


@dataclass(slots=True, eq=False)
class _Movable:
    placed: Placed
    known: Callable[[], Request]
    task: asyncio.Task[None] | None = None

    @property
    def worker(self) -> WorkerId:
        return self.placed.link.worker


class Movement:
    """Of all open answers of a router; `tasks` end with it."""

    def __init__(
        self, fleet: Fleet, links: LinkPool, placer: Placer, metrics: RouterMetrics, tasks: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._placer = placer
        self._metrics = metrics
        self._tasks = tasks
        self._slots = asyncio.Semaphore(MOVES_AT_ONCE)
        self._open: set[_Movable] = set()
        fleet.listen(self._look)

    @contextlib.contextmanager
    def watching(self, placed: Placed, known: Callable[[], Request]) -> Iterator[None]:
        """Inside, the attempt's stream fails as Moved when it is to go on elsewhere. `known`: what is known now."""
        movable = _Movable(placed, known)
        self._open.add(movable)
        self._look()
        try:
            yield
        finally:
            self._open.discard(movable)
            if movable.task is not None:
                movable.task.cancel()

    def _look(self) -> None:
        """Begin to move what is on workers that drain now."""
        leaving = {
            (member.worker, member.epoch)
            for member in self._fleet.members
            if member.role is Role.DECODE and member.standing is Standing.DRAINING
        }
        if not leaving or not self._fleet.serving(Role.DECODE):
            return
        for movable in self._open:
            link = movable.placed.link
            if movable.task is None and (link.worker, link.epoch) in leaving:
                movable.task = self._tasks.create_task(self._contained(movable), name=f"move {movable.worker}")

    async def _contained(self, movable: _Movable) -> None:
        """A bug here costs an answer its pages, and nobody else anything."""
        stream, to = movable.placed.stream, None
        try:
            async with self._slots:
                to = await self._prepare(movable)
        except Exception:
            log.exception("move failed request=%s", stream.request_id)
        if not self._fleet.serving(Role.DECODE):
            movable.task = None  # it stays until there is another one
            return
        self._metrics.moved_requests_total.inc()
        stream.fail(Moved(f"decode worker {movable.worker} drains", to))

    async def _prepare(self, movable: _Movable) -> WorkerId | None:
        """Who has its pages now; None where nobody needs them or nobody could get them."""
        request, others = movable.known(), self._fleet.serving(Role.DECODE)
        leaving = self._fleet.member(movable.worker)
        if not request.emitted or not others or leaving is None:
            return None
        with self._placer.refuge(request, others) as target:
            try:
                blocks = await self._fetch(movable, leaving, target)
            except ServeError as error:
                log.warning("pages not moved request=%s to=%s error=%s", request.request_id, target.worker, error)
                if isinstance(error, PeerLost):
                    await self._fleet.wait_for_change(JUDGED_S)
                return None
        log.info("pages moved request=%s to=%s blocks=%d", request.request_id, target.worker, blocks)
        return target.worker

    async def _fetch(self, movable: _Movable, leaving: Member, target: Member) -> int:
        """How many blocks have come, the ones that were filled meanwhile among them."""
        blocks, names = 0, 0
        for _ in range(MOST_FETCHES):
            request = movable.known()
            if len(request.names) <= names:
                break
            names = len(request.names)
            blocks = await self._links.to(target).fetch(
                worker_pb2.FetchRequest(
                    fingerprint=self._fleet.fingerprint or "",
                    worker_epoch=str(target.epoch),
                    source=worker_pb2.PageSource(
                        worker_id=leaving.worker, address=leaving.address, epoch=str(leaving.epoch)
                    ),
                    names=names_to_bytes(request.names),
                    root=root_name(),
                    within_s=FETCH_S,
                )
            )
        return blocks
