"""Brings named blocks of another worker into this one's cache: before their holder leaves, or their request moves.

It is a pull seen from the other side, for nobody's request: pages are claimed, read, verified, and given back as
cached. Only free pages and cached ones are claimed, as for any request; what is in use stays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from twostroke.errors import InvalidRequest
from twostroke.ids import BlockName, PageId, RequestId
from twostroke.kv_cache.block import NAME_BYTES
from twostroke.kv_cache.pool import BlockPool, Claim
from twostroke.rpc.convert import names_from_bytes
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.host import WorkerHost
from twostroke.worker.pull_client import PullSpec

LONGEST_S = 60.0
"""Nobody who asks waits longer, so pages are not held longer for them."""


class Fetches:
    """Of one worker; `tasks` end with it."""

    def __init__(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks

    async def fetch(self, request: worker_pb2.FetchRequest) -> int:
        """How many of the named blocks are here, once all that come have come. Raises InvalidRequest."""
        names, root, within_s = _checked(request)
        pool = self._host.pool
        claim = _claim_first(pool, names, root)
        try:
            async with asyncio.timeout(within_s):
                await self._arrival(request.source, names, claim, within_s)
        except TimeoutError:
            pass  # what is here is what is told
        finally:
            pool.release(claim.pages)
            self._host.pulls.prune()
            self._host.loop.wake()
        return sum(pool.find(name) is not None for name in names)

    async def _arrival(
        self, source: worker_pb2.PageSource, names: Sequence[BlockName], claim: Claim, within_s: float
    ) -> None:
        host = self._host
        if claim.missing and source.worker_id != host.config.worker_id:
            spec = PullSpec(
                RequestId(f"fetch-{names[claim.missing[-1]].hex()[:12]}"),
                host.new_session(),
                source,
                (),
                names[: claim.missing[-1] + 1],
                {block: claim.pages[block] for block in claim.missing},
                resident_within_s=within_s,
            )
            await asyncio.wait([host.pulls.start(spec, self._tasks)])
        while any(map(self._is_coming, claim.pages)):  # for somebody else
            await host.progress.ticket().wait()

    def _is_coming(self, page: PageId) -> bool:
        return self._host.pool.is_arriving(page) and self._host.pool.writer(page) is not None


def _checked(request: worker_pb2.FetchRequest) -> tuple[list[BlockName], BlockName, float]:
    names = names_from_bytes(request.names)
    if len(set(names)) < len(names):
        raise InvalidRequest("names has a block twice", field="names")
    if len(request.root) != NAME_BYTES:
        raise InvalidRequest(f"root must be {NAME_BYTES} bytes, got {len(request.root)}", field="root")
    if not 0 < request.within_s < math.inf:
        raise InvalidRequest(f"within_s must be seconds, more than 0, got {request.within_s}", field="within_s")
    return names, BlockName(request.root), min(request.within_s, LONGEST_S)


def _claim_first(pool: BlockPool, names: Sequence[BlockName], root: BlockName) -> Claim:
    """Pages for as many of the first blocks as can be had, but for halving."""
    count = min(len(names), pool.total)
    while (claim := pool.claim(names[:count], root, 0)) is None:
        count //= 2
    return claim
