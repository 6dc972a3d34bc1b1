"""One link per living decode worker, opened when it is first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from router.answer_stream import AnswerStream
from router.member import Member
from router.metrics import RouterMetrics
from router.worker_link import WorkerLink
from twostroke.ids import WorkerId

log = logging.getLogger(__name__)


class LinkPool:
    def __init__(self, router_id: str, token: str, metrics: RouterMetrics, tasks: asyncio.TaskGroup) -> None:
        self._router_id = router_id
        self._token = token
        self._metrics = metrics
        self._tasks = tasks
        self._links: dict[WorkerId, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def to(self, member: Member) -> WorkerLink:
        """The link to this life; a new one where the last was lost."""
        if member.worker in self._links:
            link, _ = self._links[member.worker]
            if link.lost is None and link.epoch == member.epoch:
                return link
            self.drop(member, "it is replaced")
        link = WorkerLink(member, self._router_id, self._token, self._metrics)
        self._links[member.worker] = (
            link,
            self._tasks.create_task(_contained(link, link.run), name=f"link {member.worker}"),
        )
        return link

    def drop(self, member: Member, reason: str) -> None:
        """That worker is gone: its answers fail now, so that they can go on elsewhere."""
        if member.worker in self._links:
            link, task = self._links.pop(member.worker)
            link.lose(reason)
            task.cancel()

    def close_later(self, link: WorkerLink, stream: AnswerStream) -> None:
        """Tell the worker without making anyone wait: whoever cancelled may be gone already."""
        if link.lost is None and not self._is_closed:
            closing = self._tasks.create_task(
                _contained(link, partial(link.close, stream)), name=f"close {stream.request_id}"
            )
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Until every worker has been told (each call has its own deadline)."""
        while self._closing:
            await asyncio.wait(self._closing)

    def close(self) -> None:
        """From here on nobody is told anything: the tasks that would do it are ending."""
        self._is_closed = True


async def _contained(link: WorkerLink, work: Callable[[], Awaitable[None]]) -> None:
    """A link's bug costs its own answers only."""
    try:
        await work()
    except Exception:
        log.exception("link failed worker=%s epoch=%s", link.worker, link.epoch)
