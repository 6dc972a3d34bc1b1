"""One link per living decode worker, opened when it is first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from router.fleet.failure_detector import Vigil
from router.fleet.token_stream import AnswerStream
from router.fleet.worker import Member
from router.fleet.worker_link import WorkerLink
from router.metrics import RouterMetrics
from twostroke.ids import Epoch, WorkerId
from twostroke.rpc.membership import Membership

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Before a worker is told again what did not get through."""


class LinkPool:
    def __init__(
        self, router_id: str, us: Membership, metrics: RouterMetrics, vigil: Vigil, tasks: asyncio.TaskGroup
    ) -> None:
        self._router_id = router_id
        self._us = us
        self._metrics = metrics
        self._vigil = vigil
        self._tasks = tasks
        self._links: dict[WorkerId, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._owed: dict[WorkerId, dict[AnswerStream, Epoch]] = {}
        """Attempts that a worker could not be told to close, and may be computing still."""
        self._is_settling = False
        self._is_closed = False

    def to(self, member: Member) -> WorkerLink:
        """The link to this life; a new one where the last was lost."""
        if member.worker in self._links:
            link, _ = self._links[member.worker]
            if link.lost is None and link.epoch == member.epoch:
                return link
            self.drop(member, "it is replaced")
        link = WorkerLink(member, self._router_id, self._us, self._metrics, self._vigil)
        self._links[member.worker] = (
            link,
            self._tasks.create_task(_contained(link, link.run), name=f"link {member.worker}"),
        )
        for stream, epoch in self._owed.pop(member.worker, {}).items():
            if epoch == member.epoch:
                self.close_later(link, stream)
        return link

    def settle_with(self, member: Member) -> None:
        """That worker was thought dead and is heard again: what it still has of this router's is closed there."""
        if member.worker in self._owed:
            self.to(member)

    def to_all(self, members: Iterable[Member]) -> list[WorkerLink]:
        return [self.to(member) for member in members]

    def drop(self, member: Member, reason: str, *, for_good: bool = False) -> None:
        """That worker is gone: its answers fail now, so that they can go on elsewhere. `for_good`: nothing is left to
        be closed there later."""
        if for_good:
            self._owed.pop(member.worker, None)
        if member.worker in self._links:
            link, task = self._links.pop(member.worker)
            link.is_over = for_good
            link.lose(reason)
            task.cancel()

    def close_later(self, link: WorkerLink, stream: AnswerStream) -> None:
        """Tell the worker without making anyone wait: whoever cancelled may be gone already."""
        if self._is_closed:
            return
        if link.lost is not None:
            self._owe(link, stream)
            return
        closing = self._tasks.create_task(
            _contained(link, partial(self._close, link, stream)), name=f"close {stream.request_id}"
        )
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Until every worker has been told, or could not be (each call has its own deadline)."""
        self._is_settling = True
        while self._closing:
            await asyncio.wait(self._closing)

    def close(self) -> None:
        """From here on nobody is told anything: the tasks that would do it are ending."""
        self._is_closed = True

    async def _close(self, link: WorkerLink, stream: AnswerStream) -> None:
        while not await link.close(stream):
            if link.lost is not None or self._is_settling:
                self._owe(link, stream)
                return
            await asyncio.sleep(RETRY_PAUSE_S)

    def _owe(self, link: WorkerLink, stream: AnswerStream) -> None:
        if link.is_over:
            return
        later = self._links.get(link.worker)
        if later is not None and later[0] is not link and (later[0].lost, later[0].epoch) == (None, link.epoch):
            self.close_later(later[0], stream)
            return
        owed = self._owed.setdefault(link.worker, {})
        self._owed[link.worker] = {other: epoch for other, epoch in owed.items() if epoch == link.epoch}
        self._owed[link.worker][stream] = link.epoch


async def _contained(link: WorkerLink, work: Callable[[], Awaitable[None]]) -> None:
    """A link's bug costs its own answers only."""
    try:
        await work()
    except Exception:
        log.exception("link failed worker=%s epoch=%s", link.worker, link.epoch)
