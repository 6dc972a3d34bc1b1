"""Fetch brings blocks of another worker into this one's cache, before their holder leaves or their request migrates.

It is a pull without a request: pages are claimed, read, verified, and released as cached. Pages in use stay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import BlockHash, PageId, RequestId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.parts import GroupKind, Part, parts_of
from twostroke.kv_cache.pool import BlockPool, Claim
from twostroke.rpc.convert import hashes_from_bytes
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.host import WorkerHost
from twostroke.worker.supply.pull_spec import PullSpec

LONGEST_S = 60.0
"""Longest time that a fetch holds pages, whatever its caller asks for."""


class BlockFetcher:
    """Fetches blocks for one worker; `tasks` end with it."""

    def __init__(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks

    async def fetch(self, request: worker_pb2.FetchRequest) -> int:
        """Fetches blocks; returns how many of them are here in the end. Raises InvalidRequest."""
        hashes, root, within_s = _checked(request)
        pool = self._host.pool
        await self._host.branches.gate.ready(self._host.new_session(), hashes[: pool.total], 0)
        claim = _claim_first(pool, hashes, root)
        last = pool.share_last(hashes[: len(claim.pages)])
        try:
            async with asyncio.timeout(within_s):
                await self._arrival(request.source, hashes, claim, last, within_s)
        except TimeoutError:
            pass  # the caller learns what is here
        finally:
            pool.unshare_last(last)
            pool.release(claim.pages)
            self._host.pulls.prune()
            self._host.loop.wake()
        return sum(pool.find(block_hash) is not None for block_hash in hashes)

    async def _arrival(
        self,
        source: worker_pb2.PageSource,
        hashes: Sequence[BlockHash],
        claim: Claim,
        last: dict[Part, PageId],
        within_s: float,
    ) -> None:
        host = self._host
        pages = {Part(block, GroupKind.FULL): page for block, page in enumerate(claim.pages)} | last
        unwritten = [part for part, page in last.items() if host.pool.is_unwritten(page)]
        parts = sorted([*parts_of(claim.missing), *unwritten])
        if parts and source.worker_id != host.config.worker_id:
            blocks = parts[-1].block + 1
            spec = PullSpec(
                RequestId(f"fetch-{hashes[blocks - 1].hex()[:12]}"),
                host.new_session(),
                source,
                (),
                hashes[:blocks],
                {part: pages[part] for part in parts},
                cached_within_s=within_s,
            )
            await asyncio.wait([host.pulls.start(spec, self._tasks)])
        while await _has_awaited_writers(host.pool, pages):
            pass  # others may have begun to write a page meanwhile


async def _has_awaited_writers(pool: BlockPool, pages: dict[Part, PageId]) -> bool:
    """Waits for each of these pages that has a writer; returns whether there were any."""
    has_waited = False
    for part, page in pages.items():
        while pool.is_arriving(page) and pool.writer(page) is not None:
            await _Change().of(pool, page, part)
            has_waited = True
    return has_waited


class _Change:
    """The next change of an arriving page."""

    def __init__(self) -> None:
        self._came = asyncio.Event()

    def pages_changed(self, parts: Sequence[Part]) -> None:
        self._came.set()

    async def of(self, pool: BlockPool, page: PageId, part: Part) -> None:
        pool.wait_for(page, self, part)
        try:
            await self._came.wait()
        finally:
            pool.stop_waiting(page, self)


def _checked(request: worker_pb2.FetchRequest) -> tuple[list[BlockHash], BlockHash, float]:
    hashes = hashes_from_bytes(request.block_hashes)
    if len(set(hashes)) < len(hashes):
        raise InvalidRequest("block_hashes has a block twice", field="block_hashes")
    if len(request.root) != HASH_BYTES:
        raise InvalidRequest(f"root must be {HASH_BYTES} bytes, got {len(request.root)}", field="root")
    if not 0 < request.within_s < math.inf:
        raise InvalidRequest(f"within_s must be seconds, more than 0, got {request.within_s}", field="within_s")
    return hashes, BlockHash(request.root), min(request.within_s, LONGEST_S)


def _claim_first(pool: BlockPool, hashes: Sequence[BlockHash], root: BlockHash) -> Claim:
    """Claims pages for as many of the first blocks as fit, halving the number until they do."""
    count = min(len(hashes), pool.total)
    while (claim := pool.claim(hashes[:count], root, 0)) is None:
        count //= 2
    return claim
