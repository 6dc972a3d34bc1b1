"""Pulls of prefill workers that nothing else asks for: each fetches from another one what it cannot have.

What routers ask for depends on prices, and what a worker hands over on what it holds when it leaves: a point within
such a pull may not be reached in any number of waves. Here one worker is let compute blocks of tokens that were never
asked for, and another one is asked to fetch them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence

from tests.trials.chaos.faults.testbed import ANSWER_S, Bed, Target
from tests.trials.chaos.injection.plan import Fault
from tests.trials.chaos.injection.points import Process
from twostroke.base.errors import ServeError
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, fleet_pb2, worker_pb2, worker_pb2_grpc

BLOCKS = 6
BLOCK_TOKENS = 16
"""The block size of a served model, unless it is told another one; workers refuse blocks of another size."""
LETTERS = (97, 122)
"""Tokens of a paced model are bytes; any model has these."""


async def prefill_workers_fetch(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    """Lets every prefill worker fetch from another one, so that whichever is armed comes to the point."""
    del broken, fault
    workers = [worker for worker in (await bed.view()).workers if worker.role == Process.PREFILL and worker.address]
    fingerprint = await _fingerprint(bed)
    pairs = list(itertools.permutations(workers, 2))
    draws.shuffle(pairs)
    for holder, reader in pairs:
        tokens = draws.choices(range(*LETTERS), k=BLOCKS * BLOCK_TOKENS)
        with contextlib.suppress(ServeError):  # whoever is asked may be the one that breaks
            await _compute(bed, holder, fingerprint, tokens)
            await _fetch(bed, reader, holder, fingerprint, tokens)


async def _fingerprint(bed: Bed) -> str:
    """Returns the fingerprint of the workers, as a router knows it."""
    async with bed.channel(bed.routers[0].admin) as channel:
        stub = control_pb2_grpc.ControlStub(channel.channel)
        known = await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=channel.metadata, timeout=ANSWER_S)
    return next((worker.server.fingerprint for worker in known.workers if worker.server.fingerprint), "")


async def _compute(bed: Bed, worker: fleet_pb2.WorkerEntry, fingerprint: str, tokens: Sequence[int]) -> None:
    """Waits until a worker has computed the blocks of these tokens, which then stay in its cache."""
    request = worker_pb2.PullRequest(
        request_id="faults",
        requester="faults",
        fingerprint=fingerprint,
        source_epoch=worker.epoch,
        tokens=tokens,
        block_hashes=hashes_to_bytes(block_hashes_of(tokens, BLOCK_TOKENS)),
        wanted=[worker_pb2.WantedPages(blocks=range(BLOCKS))],
    )
    async with bed.channel(worker.address) as channel:
        call = worker_pb2_grpc.PagesStub(channel.channel).Pull(request, metadata=channel.metadata, timeout=ANSWER_S)
        try:
            left = BLOCKS
            while left > 0 and isinstance(answer := await call.read(), worker_pb2.PullResponse):
                left -= len(answer.ready.pages)
        finally:
            call.cancel()
            await asyncio.wait([asyncio.ensure_future(call.code())])  # its pages are given back when it has ended


async def _fetch(
    bed: Bed,
    reader: fleet_pb2.WorkerEntry,
    holder: fleet_pb2.WorkerEntry,
    fingerprint: str,
    tokens: Sequence[int],
) -> None:
    source = worker_pb2.PageSource(worker_id=holder.worker_id, address=holder.address, epoch=holder.epoch)
    request = worker_pb2.FetchRequest(
        fingerprint=fingerprint,
        worker_epoch=reader.epoch,
        source=source,
        block_hashes=hashes_to_bytes(block_hashes_of(tokens, BLOCK_TOKENS)),
        root=root_hash(),
        within_s=ANSWER_S / 2,
    )
    async with bed.channel(reader.address) as channel:
        await worker_pb2_grpc.PagesStub(channel.channel).Fetch(request, metadata=channel.metadata, timeout=ANSWER_S)
