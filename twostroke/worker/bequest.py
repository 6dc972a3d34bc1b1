"""A worker that leaves lets others of its role fetch what it holds: most recently used prefixes first.

Chains that begin with the same block go to the same heir. An heir is given no more than half of its pool, or what is
free there: its own blocks are worth as much. It is done when the time is over, or when it has room for no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from twostroke.ids import BlockName
from twostroke.kv_cache.chains import Chain, hottest_chains
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.convert import names_to_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.worker.host import WorkerHost

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Of an heir that lives."""


@dataclass(slots=True)
class Share:
    """What one heir gets."""

    heir: control_pb2.Heir
    room: int
    """Pages."""
    chains: list[Chain] = field(default_factory=list)


async def bequeath(host: WorkerHost, heirs: Sequence[control_pb2.Heir], until_s: float) -> int:
    """How many blocks heirs have got by `until_s`, by the clock of the event loop."""
    rooms = await asyncio.gather(*(_room(host, heir) for heir in heirs))
    shares = [Share(heir, room) for heir, room in zip(heirs, rooms, strict=True)]
    cached = host.pool.cached()
    # Not on the event loop: a second where thousands of prompts begin alike, and who is silent for two is dead.
    await asyncio.to_thread(lambda: divide(hottest_chains(cached), shares))
    blocks = sum(await asyncio.gather(*(_give(host, share, until_s) for share in shares)))
    log.info("bequeathed heirs=%d blocks=%d", len(heirs), blocks)
    return blocks


def divide(chains: Iterable[Chain], shares: Sequence[Share]) -> None:
    """Each chain to whoever has its first block already, else to whoever has most room."""
    taken: dict[BlockName, Share] = {}
    for chain in chains:
        share = taken.get(chain.names[0]) or max(shares, key=lambda share: share.room)
        if share.room > 0:
            taken[chain.names[0]] = share
            share.chains.append(chain.cut(share.room))
            share.room -= chain.fresh


async def _room(host: WorkerHost, heir: control_pb2.Heir) -> int:
    """Pages that it may be given; none where it does not answer."""
    peer = PeerChannel(heir.address, host.us)
    try:
        answer = await control_pb2_grpc.ControlStub(peer.channel).GetLoad(
            control_pb2.GetLoadRequest(), metadata=peer.metadata, timeout=ANSWER_S
        )
    except grpc.aio.AioRpcError as error:
        log.warning("heir not reached heir=%s error=%s", heir.worker_id, error_of(error, heir.address))
        return 0
    finally:
        await peer.close()
    load = answer.workers[0].load
    return max(load.pages_free, load.pages_total // 2)


async def _give(host: WorkerHost, share: Share, until_s: float) -> int:
    heir, blocks, loop = share.heir, 0, asyncio.get_running_loop()
    own = worker_pb2.PageSource(worker_id=host.config.worker_id, address=host.address, epoch=str(host.epoch))
    peer = PeerChannel(heir.address, host.us)
    try:
        for chain in share.chains:
            within_s = until_s - loop.time()
            if within_s <= 0:
                break
            request = worker_pb2.FetchRequest(
                fingerprint=host.facts.fingerprint,
                worker_epoch=heir.epoch,
                source=own,
                names=names_to_bytes(chain.names),
                root=chain.root,
                within_s=within_s,
            )
            answer = await worker_pb2_grpc.PagesStub(peer.channel).Fetch(
                request, metadata=peer.metadata, timeout=call_timeout_s(within_s + ANSWER_S)
            )
            blocks += min(answer.blocks, chain.fresh)
            if answer.blocks < len(chain.names):
                break
    except grpc.aio.AioRpcError as error:
        log.warning("heir lost heir=%s error=%s", heir.worker_id, error_of(error, heir.address))
    finally:
        await peer.close()
    return blocks
